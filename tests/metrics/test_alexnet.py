"""AlexNet's layers as read here, against the network that the lpips package builds."""

import lpips as package
import torch

from mjp_privacy.metrics import lpips
from mjp_privacy.metrics.alexnet import alexnet_layers, lpips_heads


def test_layers_and_heads_give_the_packages_distance() -> None:
    torch.manual_seed(0)
    left, right = torch.rand(3, 3, 64, 64), torch.rand(3, 3, 64, 64)
    total = torch.zeros(3)
    pairs = zip(alexnet_layers(left), alexnet_layers(right), lpips_heads(), strict=True)
    for u, v, head in pairs:
        u, v = (x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10) for x in (u, v))
        total += ((u - v).square() * head).sum(1).mean((1, 2))
    torch.testing.assert_close(total.double(), lpips(left, right), atol=1e-6, rtol=1e-5)


def test_the_heads_are_those_of_the_package() -> None:
    network = package.LPIPS(net="alex", version="0.1", pnet_rand=True, verbose=False)
    for head, known in zip(lpips_heads(), network.lins, strict=True):
        torch.testing.assert_close(head, known.model[-1].weight.detach().clamp(min=0))
