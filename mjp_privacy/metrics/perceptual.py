"""LPIPS v0.1 with AlexNet (Zhang et al. 2018), without a download.

The linear heads come with the `lpips` package. The AlexNet convolutions come from torchvision's
file where torch.hub has it already, else from the float16 copy inside this package; the two scores
differ by less than 2e-4. The network computes in float32, whatever the precision of the images.
"""

import hashlib
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError

PACKAGED = Path(__file__).parents[1] / "assets" / "alexnet_features_fp16.safetensors"
TORCHVISION = "alexnet-owt-7be5be79.pth"  # the last part is the start of its SHA-256
SMALLEST = 31  # pixels a side: below that AlexNet's second pooling has no window left
CHUNK = 16  # pairs per forward pass


def lpips(reconstructions: Tensor, references: Tensor) -> Tensor:
    """Weighted squared distance of unit-length features, averaged over space, summed over layers.

    (m, C, H, W) twice in [0, 1], C = 3, or 1 for grey taken as three equal channels.
    -> (m,) float64, >= 0; computed in float32, TF32 off.
    """
    _check_shape(reconstructions)
    network = _network(reconstructions.device)
    chunks = zip(torch.split(reconstructions, CHUNK), torch.split(references, CHUNK), strict=True)
    return torch.cat([_distances(network, u, v) for u, v in chunks]).double()


def lpips_backbone() -> str:
    """Which AlexNet weights LPIPS uses on this machine, in words."""
    return _backbone()[0]


def backbone_weights() -> dict[str, Tensor]:
    """AlexNet's convolutions under torchvision's names: `features.0.weight` and so on."""
    return _backbone()[1]


def _check_shape(images: Tensor) -> None:
    channels, height, width = images.shape[1:]
    if min(height, width) < SMALLEST:
        raise UserError(
            f"LPIPS expected images of at least {SMALLEST}×{SMALLEST} pixels, the smallest that "
            f"AlexNet can take; these are {height}×{width}. Leave lpips out of the metrics or "
            "score larger images."
        )
    if channels not in (1, 3):
        raise UserError(
            f"LPIPS expected images of 3 channels (RGB) or 1 (grey); these have {channels}. Leave "
            "lpips out of the metrics or score RGB images."
        )


def _distances(network: Any, u: Tensor, v: Tensor) -> Tensor:
    """(k, C, H, W) twice -> (k,) float32."""
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with torch.no_grad(), exact:
        u, v = (image.float().expand(-1, 3, -1, -1) * 2 - 1 for image in (u, v))
        distances: Tensor = network(u, v).flatten()
    return distances


@cache
def _network(device: torch.device) -> Any:
    import lpips as package

    # lpips first makes a random AlexNet; this must not change the caller's random numbers
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # lpips uses deprecated arguments
        network = package.LPIPS(net="alex", version="0.1", pnet_rand=True, verbose=False)
    weights = backbone_weights()
    backbone = network.net.state_dict()  # torchvision's features.3.weight is slice2.3.weight here
    backbone = {name: weights[f"features.{name.split('.', 1)[1]}"] for name in backbone}
    network.net.load_state_dict(backbone)
    return network.requires_grad_(False).to(device)


@cache
def _backbone() -> tuple[str, dict[str, Tensor]]:
    """A description of the weights, and the weights."""
    file = Path(torch.hub.get_dir()) / "checkpoints" / TORCHVISION
    if _is_whole(file):
        return f"{file.name} of torchvision, float32", torch.load(
            file, map_location="cpu", weights_only=True
        )
    from safetensors.torch import load_file

    return f"{PACKAGED.name} of this package, float16", load_file(PACKAGED)


def _is_whole(file: Path) -> bool:
    """Whether the file is there and has the SHA-256 that its name promises."""
    if not file.is_file():
        return False
    return hashlib.sha256(file.read_bytes()).hexdigest().startswith(file.stem.rsplit("-", 1)[1])
