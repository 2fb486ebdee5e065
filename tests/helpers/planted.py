"""A tiny float64 client whose images are known, and what its attacker sees."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import timm
import torch
from torch import Tensor, nn

from attacks import find_attack
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import SETTINGS, Feeding
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.schema import Size, height_width
from mjp_privacy.interfaces import Attack, AttackerView, ClientInput, Pixels, Reconstruction
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.live.modules import load_module
from mjp_privacy.models.mjp_vit import with_closed_form_block
from tests.helpers.models import PLANTED, planted_model

SIDE, PATCH = PLANTED["img_size"], PLANTED["patch_size"]
IMAGES = 4


def planted_images(count: int = IMAGES, size: Size = SIDE) -> Tensor:
    """Smooth random colours with some noise, (count, 3, H, W) in [0, 1]."""
    generator = torch.Generator().manual_seed(3)
    coarse = torch.rand(count, 3, 5, 5, generator=generator, dtype=torch.float64)
    smooth = torch.nn.functional.interpolate(coarse, size=height_width(size), mode="bicubic")
    noise = 0.1 * torch.randn(smooth.shape, generator=generator, dtype=torch.float64)
    return (smooth + noise).clamp(0.02, 0.98)


def planted_view(
    model: LoadedModel,
    attack: Attack,
    setting: str,
    *,
    gamma: float = 0.27,
    images: Tensor | None = None,
    labels: Tensor | None = None,
    ids: Sequence[str] | None = None,
    client: ClientConfig | None = None,
) -> tuple[AttackerView, ClientInput]:
    """What the attacker sees of planted images in a setting, and what the client fed."""
    images = planted_images(size=model.card.img_size) if images is None else images
    ids = [f"image {index}" for index in range(len(images))] if ids is None else ids
    labels = torch.arange(len(images)) % 10 if labels is None else labels
    feeding = Feeding(ClientConfig(), setting, gamma, model.patch_size, 0)
    rounds = [feeding.input(images, labels, ids, round) for round in range(attack.uploads)]
    victim = with_closed_form_block(model) if attack.victim == "april_block" else model
    own = {name for name, _ in victim.named_parameters()}
    names = [name for name in attack.needs(victim) if name in own]
    client = client or ClientConfig()
    updates = [make_upload(victim, [inputs], client, names=names) for inputs in rounds]
    pixels = Pixels(model.card.img_size, model.card.mean, model.card.std)
    against = SETTINGS[setting].against
    return AttackerView(victim, updates, pixels, labels=labels, against=against), rounds[0]


def solved(view: AttackerView, name: str, *, seed: int = 0, **options: object) -> Reconstruction:
    """What an attack that applies to a view makes of it; its prior, if any, is the stationary."""
    prior = {"prior": "stationary"} if hasattr(find_attack(name), "prior") else {}
    attack = find_attack(name, prior | options)
    assert attack.unsupported(view) is None
    return attack.run(view, generator=torch.Generator().manual_seed(seed))


def best(found: Tensor, truth: Tensor) -> Tensor:
    """The PSNR (m,) of each true picture's best guess."""
    return torch.stack([psnr(guess.expand_as(truth), truth) for guess in found]).amax(0)


def keeping(view: AttackerView, keep: Callable[[str], bool]) -> AttackerView:
    """The view with those gradients of its uploads alone whose names are kept."""
    kept = [{n: g for n, g in update.grads.items() if keep(n)} for update in view.updates]
    pairs = zip(view.updates, kept, strict=True)
    return replace(view, updates=[replace(update, grads=grads) for update, grads in pairs])


def changed(view: AttackerView, **facts: object) -> AttackerView:
    """The view whose uploads have these facts in place of their own."""
    return replace(view, updates=[replace(update, **facts) for update in view.updates])


def gradient_of(
    model: LoadedModel,
    images: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    smoothing: float = 0.0,
    normalised: bool = False,
) -> dict[str, Tensor]:
    """One step's gradient by name, as a plain loop makes it; normalised: the images are as fed."""
    x = images if normalised else model.normalize(images)
    logits = model(x, mask=mask)
    loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    names, parameters = zip(*model.named_parameters(), strict=True)
    values = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: g for n, g in zip(names, values, strict=True) if g is not None}


# networks of timm's -------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {"img_size": SIDE, "patch_size": 8, "embed_dim": 96}
SHAPE |= {"depth": 2, "num_heads": 3, "num_classes": 10}


def drawn(net: Callable[..., nn.Module], scale: float, **more: Any) -> LoadedModel:
    """A float64 network of timm's, with weights so large that attention differs."""
    torch.manual_seed(5)
    network = net(**SHAPE | more)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, scale)
            parameter.add_(0.05 * torch.randn_like(parameter))
    return load_module(network.double(), mean=0.5, std=0.5)


def other_vit(**more: Any) -> LoadedModel:
    """A ViT with layer scale."""
    settings = {"init_values": 0.5, "class_token": False, "global_pool": "avg", **more}
    return drawn(timm.models.VisionTransformer, 0.15, **settings)


def rotary(**more: Any) -> LoadedModel:
    """A network without a table of positions."""
    return drawn(timm.models.Eva, 0.1, use_abs_pos_emb=False, use_rot_pos_emb=True, **more)


def relative(**more: Any) -> LoadedModel:
    return drawn(timm.models.VisionTransformerRelPos, 0.1, **more)


def cait() -> LoadedModel:
    """A CaiT, which mixes its attention's heads."""
    torch.manual_seed(2)
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 96, "depth": 3, "num_heads": 3}
    network = timm.models.Cait(**shape, num_classes=10, init_values=1.0)
    return load_module(network.double(), mean=0.5, std=0.5)


def lattice_model(biases: float = 0.1, **changes: object) -> LoadedModel:
    """Four patches of 192 pixels, width 96; the first LayerNorm has biases, as trained ones do."""
    model = planted_model(**{"img_size": 16, "patch_size": 8, "depth": 3, **changes})
    with torch.no_grad():
        drawn = torch.randn(model.embed_dim, generator=torch.Generator().manual_seed(5))
        model.blocks[0].norm1.bias.copy_(biases * drawn)
    return model
