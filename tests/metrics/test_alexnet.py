"""AlexNet's layers and heads as read here, against the network that the lpips package builds."""

import os
from pathlib import Path

import lpips as package
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mjp_privacy.metrics import lpips as alexnet
from mjp_privacy.metrics import score
from mjp_privacy.metrics.lpips import (
    CONVOLUTIONS,
    PACKAGED,
    TORCHVISION,
    alexnet_layers,
    lpips_heads,
)


@pytest.fixture(scope="module")
def network() -> package.LPIPS:
    """The package's own network, with this package's weights of AlexNet."""
    built = package.LPIPS(net="alex", version="0.1", pnet_rand=True, verbose=False)
    weights = load_file(PACKAGED)
    layers = [layer for layer in built.net.modules() if isinstance(layer, torch.nn.Conv2d)]
    for (index, _, _), layer in zip(CONVOLUTIONS, layers, strict=True):
        layer.weight.data.copy_(weights[f"features.{index}.weight"])
        layer.bias.data.copy_(weights[f"features.{index}.bias"])
    return built.requires_grad_(False)


@pytest.fixture
def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.rand(2, 3, 3, 64, 64, generator=generator)
    return left, right


def test_layers_and_heads_give_the_packages_distance(network, images) -> None:
    total = torch.zeros(3)
    pairs = zip(*(alexnet_layers(side) for side in images), lpips_heads(), strict=True)
    for u, v, head in pairs:
        u, v = (x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10) for x in (u, v))
        total += ((u - v).square() * head).sum(1).mean((1, 2))
    wanted = network(*images, normalize=True).flatten()
    torch.testing.assert_close(total, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("side", [32, 56, 192, 224])
def test_scores_are_the_packages_to_a_millionth(side: int, network) -> None:
    generator = torch.Generator().manual_seed(side)
    right = torch.rand(3, 3, side, side, generator=generator)
    noisy = (right + 0.1 * torch.randn(right.shape, generator=generator)).clamp(0, 1)
    for left in (noisy, torch.full_like(right, 0.5), torch.zeros_like(right)):
        wanted = network(left, right, normalize=True).flatten().double().numpy()
        found = score(left, right, ["lpips/standard"])["lpips", "standard"]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_the_heads_are_those_of_the_package(network) -> None:
    for head, known in zip(lpips_heads(), network.lins, strict=True):
        torch.testing.assert_close(head, known.model[-1].weight.detach().clamp(min=0))


@pytest.mark.parametrize("content", [b"", b"cut off", "a pipe", "a folder"])
def test_a_damaged_download_is_named_and_the_packaged_weights_are_used(
    content: bytes | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "checkpoints" / TORCHVISION
    file.parent.mkdir()
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        os.mkfifo(file) if content == "a pipe" else file.mkdir()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    described, weights = alexnet._backbone.__wrapped__()
    assert described == "alexnet_features_fp16.safetensors of this package, float16"
    assert set(weights) == set(load_file(PACKAGED))
    said = capsys.readouterr().err
    assert f"{TORCHVISION}: expected torchvision's AlexNet as torch.hub downloaded it" in said
    assert "Until then, the weights inside this package are used." in said
