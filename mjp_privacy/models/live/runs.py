"""What of a live network runs for a picture, in which order, and on what."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from mjp_privacy.core.machine import torch_generator
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.network_parts import CHANNELS
from mjp_privacy.models.vit import token_norm


class Ran(NamedTuple):
    """A part of a network that ran, with the first of what it was given and what it returned."""

    part: nn.Module
    given: Any
    output: Any


def run_of(
    module: nn.Module, x: Tensor, *also: nn.Module, options: dict[str, bool] | None = None
) -> list[Ran]:
    """The parts of a network, in eval mode, in the order in which they end for a picture, itself
    last; with tensors only of itself, of layers of tokens, of norms and of those named `also`.
    Where it does not take the picture, which the caller will meet, those that had ended."""
    run: list[Ran] = []
    kept = {module, *also, *(part for part in module.modules() if embeds(part) or token_norm(part))}

    def keep(part: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if part in kept:
            run.append(Ran(part, next(iter((*given, *named.values())), None), output))
        else:
            run.append(Ran(part, None, None))

    hooks = [part.register_forward_hook(keep, with_kwargs=True) for part in module.modules()]
    try:
        with torch.no_grad():
            module.eval()(x, **(options or {}))
    except Exception:  # whatever the network's own code raises
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return run


def takes(module: nn.Module, projection: nn.Conv2d, grid: Grid) -> bool:
    """Whether a network computes something of pictures of so many patches."""
    pixels = grid.pixels(int(projection.kernel_size[0]))
    run = run_of(module, projection.weight.new_zeros(1, projection.in_channels, *pixels))
    return bool(run) and run[-1].part is module


def picture_like(x: Tensor) -> Tensor:
    """A random picture of this shape."""
    generator = torch_generator("a picture by which parts of a network are told")
    return torch.randn(x.shape, generator=generator).to(x)


def embeds(part: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d]:
    """Whether a part computes the same linear function of each token: a linear layer does, and a
    convolution of 1 × 1."""
    if isinstance(part, nn.Conv2d):
        return part.kernel_size == part.stride == (1, 1) and part.groups == 1
    return isinstance(part, nn.Linear)


def convolution_of(module: nn.Module) -> nn.Conv2d | None:
    """The first convolution that embeds patches of a picture without overlap."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d) and part.in_channels in CHANNELS:
            side, down = part.kernel_size
            is_whole = part.groups == 1 and part.dilation == (1, 1)
            if part.stride == (side, side) and side == down > 1 and is_whole:
                return part
    return None
