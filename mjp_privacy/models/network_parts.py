"""By what the parts of a network are told: what runs for a picture, and the patch equation

    dL/dW = sum_i g_i x_i^T

W (D, p) the patch embedding's weight, x_i (p,) the flattened patches of a picture, g_i (D,) the
rows of a table's gradient that belong to the patches. It holds where the table is added to the
embedded patches, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mjp_privacy.core.errors import UserError, format_error
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.schema import size_text
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.vit import START_STD, token_norm

CHANNELS = (3, 1)  # of colour and of grey pictures, which metrics and attacks take
IN_SIZE = "Give the network itself, and img_size=(height, width) where pictures are no squares."


def kind_of(net: Any) -> str:
    """The class of a network, of one under other names (`live.parts.Renamed`) that inside."""
    return type(getattr(net, "rest", net)).__name__


@contextmanager
def code_of(net: nn.Module, expected: str, advice: str) -> Iterator[None]:
    """Whatever a network's own code raises in this block, as a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{kind_of(net)}: expected a network {expected}; it raised {format_error(error)}. "
            f"{advice}"
        ) from error


# what runs, in which order, and on what -----------------------------------------------------------


TIMES = 32  # that a network which draws random numbers is asked
REPEATS = 1e-4  # of the largest output, up to which another one is the same


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
    Where it does not take the picture, which the caller will meet, those that had ended.

    A network that draws random numbers is asked again and again, and refused where its parts
    compute something else.
    """
    first: list[Ran] = []
    kept = {module, *also, *(part for part in module.modules() if embeds(part) or token_norm(part))}
    with torch.random.fork_rng(devices=[]):
        for seed in range(TIMES):
            torch.manual_seed(seed)
            before, run = torch.get_rng_state(), _run(module, x, kept, options or {})
            first = first or run
            if seed and not _agree(first, run):
                raise UserError(
                    f"{kind_of(module)}: expected a network that computes the same of the same "
                    "picture in eval mode, got one that draws random numbers for it, as random "
                    "transforms do. Give the network without such layers."
                )
            if torch.equal(before, torch.get_rng_state()):
                break
    return first


def _agree(one: list[Ran], other: list[Ran]) -> bool:
    """Whether the same parts gave the same outputs, as far as these are kept."""
    pairs = [(a.output, b.output) for a, b in zip(one, other, strict=False)]
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=REPEATS * float(a.abs().max()))
        for a, b in pairs
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.numel()
    )


def _run(
    module: nn.Module, x: Tensor, kept: Set[nn.Module], options: Mapping[str, bool]
) -> list[Ran]:
    """The parts in the order in which they end, once."""
    run: list[Ran] = []

    def keep(part: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if part in kept:
            run.append(Ran(part, next(iter((*given, *named.values())), None), output))
        else:
            run.append(Ran(part, None, None))

    hooks = [part.register_forward_hook(keep, with_kwargs=True) for part in module.modules()]
    try:
        with torch.no_grad():
            module.eval()(x, **options)
    except Exception:  # whatever the network's own code raises
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return run


def takes(module: nn.Module, projection: nn.Conv2d, grid: Grid) -> bool:
    """Whether a network computes something of pictures of so many patches."""
    pixels = grid.pixels(int(projection.kernel_size[0]))
    x = picture_like(projection.weight.new_empty(1, projection.in_channels, *pixels))
    run = run_of(module, x)
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


def picture_layer(module: nn.Module) -> str:
    """How the first convolution of pictures meets them, where it embeds no patches; or ""."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d) and part.in_channels in CHANNELS and not embeds(part):
            pairs = (part.kernel_size, part.stride, part.dilation)
            size, stride, apart = (size_text((down, across)) for down, across in pairs)
            text = f"{name}, a convolution of {size} px every {stride} px"
            text += f", {apart} px apart" if part.dilation != (1, 1) else ""
            return f"{text}, in {part.groups} groups" if part.groups > 1 else text
    return ""


# the equation -------------------------------------------------------------------------------------

HOLDS = 1e-3
"""Relative error of the patch equation up to which a network's parts are what they seem."""


def gradients_of(
    network: nn.Module,
    x: Tensor,
    wanted: Sequence[Tensor],
    answer: Callable[[Any], Tensor] = lambda output: output,
) -> list[Tensor | None]:
    """The gradients of some of a network's parameters for what it says of pictures x; None of one
    that has no part in it. Matrices of zeros, as a fresh classifier's, would pass nothing back, and
    are drawn for this.

    answer  what is wanted of that which the network returns
    """
    generator = torch_generator("matrices of zeros for the patch equation")
    used: dict[str, Tensor] = {}
    asked: dict[int, Tensor] = {}
    for name, parameter in network.named_parameters():
        is_wanted = any(parameter is one for one in wanted)
        if parameter.ndim > 1 and not bool(parameter.any()):
            drawn = torch.randn(parameter.shape, generator=generator)
            used[name] = drawn.to(parameter) * START_STD
        elif is_wanted:
            used[name] = parameter.detach()
        if is_wanted:
            used[name].requires_grad_()
            asked[id(parameter)] = used[name]
    with torch.enable_grad():
        output = functional_call(network, used, (x,))
        loss = answer(output).square().sum()
        inputs = [asked[id(one)] for one in wanted]
        return list(torch.autograd.grad(loss, inputs, allow_unused=True))


def misfit(rows: Tensor, patches: Tensor, total: Tensor) -> float:
    """The relative error of the equation for rows g (N, D), patches x (N, p) and dL/dW (D, p)."""
    return float((rows.mT @ patches - total).norm() / total.norm())
