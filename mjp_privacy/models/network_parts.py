"""By what the parts of a network are told: what runs for a picture, and the patch equation

    dL/dW = sum_i g_i x_i^T

W (D, p) the patch embedding's weight, x_i (p,) the flattened patches of a picture, g_i (D,) the
rows of a table's gradient that belong to the patches. It holds where the table is added to the
embedded patches, and nowhere else. A live network's table of positions is known by its name, as
every library looked at has it, or by this equation.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mjp_privacy.core.errors import UserError, format_error
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.schema import Size
from mjp_privacy.models.jigsaw import Grid, to_patches
from mjp_privacy.models.vit import START_STD, token_norm

CHANNELS = (3, 1)  # of colour and of grey pictures, which metrics and attacks take
MOST_CHANNELS = 16  # of other pictures, as of satellites: layers behind the first are wider
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


OUTPUTS = ("logits", "image_embeds", "pooler_output", "last_hidden_state")


def answers_in(returned: Any) -> Iterator[Tensor]:
    """The tensors (B, outputs) among what a network returned; of tokens the first."""
    if isinstance(returned, Tensor):
        returned = (returned,)
    named = [getattr(returned, name, None) for name in OUTPUTS]
    others = returned if isinstance(returned, tuple | list) else ()
    if isinstance(returned, Mapping):
        named, others = [returned.get(name) for name in OUTPUTS], tuple(returned.values())
    for entry in [*named, *others]:
        if isinstance(entry, Tensor):
            yield entry[:, 0] if entry.ndim == 3 else entry


def answer_of(returned: Any) -> Tensor:
    """The first of the tensors that a network may mean."""
    for answer in answers_in(returned):
        return answer
    raise UserError(
        "expected a network that returns a tensor (B, outputs), or one among others, got "
        f"{type(returned).__name__}. Give one that does."
    )


# what runs, in which order, and on what -----------------------------------------------------------


TIMES = 32  # that a network which draws random numbers is asked
REPEATS = 1e-4  # of the largest output, up to which another one is the same


class Ran(NamedTuple):
    """A part of a network that ran, with the first of what it was given and what it returned."""

    part: nn.Module
    given: Any
    output: Any
    tokens_first: bool
    """Whether it was given tokens as (T, 1, D), for `vit.pictures_first`."""


def run_of(
    module: nn.Module, x: Tensor, *also: nn.Module, options: dict[str, bool] | None = None
) -> list[Ran]:
    """The parts of a network in the order in which they end for a picture, itself last if it takes
    the picture; with tensors only of itself, of layers of tokens, of norms and of `also`.

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
        taken, is_kept = next(iter((*given, *named.values())), None), part in kept
        is_turned = (
            isinstance(taken, Tensor) and taken.ndim == 3 and taken.shape[1] == 1 < len(taken)
        )
        run.append(Ran(part, taken if is_kept else None, output if is_kept else None, is_turned))

    hooks = [part.register_forward_hook(keep, with_kwargs=True) for part in module.modules()]
    try:
        with torch.inference_mode(False), torch.no_grad():
            module.eval()(x, **options)
    except Exception:  # whatever the network's own code raises
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return run


def takes(module: nn.Module, projection: nn.Conv2d, grid: Grid) -> bool:
    """Whether a network computes something of pictures of so many patches."""
    run = run_of(module, picture_of(projection, grid))
    return bool(run) and run[-1].part is module


def picture_of(projection: nn.Conv2d, grid: Grid) -> Tensor:
    """A random picture of so many patches."""
    size = grid.pixels(int(projection.kernel_size[0]))
    generator = torch_generator("a picture by which parts of a network are told")
    x = torch.randn(1, projection.in_channels, *size, generator=generator)
    return x.to(projection.weight)


def other_size(module: nn.Module, grid: Grid, projection: nn.Conv2d) -> tuple[int, int] | None:
    """Height and width of pictures of as many patches that the network takes, too; of several the
    nearest to a square."""
    for rows in range(grid.rows - 1, 0, -1):
        other = Grid(rows, grid.patches // rows)
        if other.patches == grid.patches and takes(module, projection, other):
            return other.pixels(int(projection.kernel_size[0]))
    return None


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
    """The first convolution of pictures, where it embeds no patches; or ""."""
    for name, part in module.named_modules():
        is_first = isinstance(part, nn.Conv2d | nn.Conv3d) and part.in_channels <= MOST_CHANNELS
        if is_first and not embeds(part):
            return f"{name}: {part}"
    return ""


# the equation -------------------------------------------------------------------------------------

HOLDS = 1e-3
"""Relative error of the patch equation up to which a network's parts are what they seem."""
SAME_PICTURE = 1e-5
"""Relative error of a picture up to which a network normalises it by one factor a channel."""
NORMALISES = "normalisation_undone"
"""Attribute of a network that does, where it is given pictures that are normalised already."""


def equation_errors(
    network: nn.Module, x: Tensor, table: Tensor, weight: Tensor
) -> list[float] | None:
    """The relative error of the equation for a picture x (1, C, H, W), with the patches' rows of a
    network's table at each place where they may begin; None where it does not learn one of the two.
    Matrices of zeros, as a fresh classifier's, would pass nothing back, and are drawn for this.
    """
    generator = torch_generator("matrices of zeros for the patch equation")
    used: dict[str, Tensor] = {}
    asked: dict[int, Tensor] = {}
    for name, parameter in network.named_parameters():
        is_wanted = parameter is table or parameter is weight
        if parameter.ndim > 1 and not bool(parameter.any()):
            drawn = torch.randn(parameter.shape, generator=generator)
            used[name] = drawn.to(parameter) * START_STD
        elif is_wanted:
            used[name] = parameter.detach()
        if is_wanted:
            used[name].requires_grad_()
            asked[id(parameter)] = used[name]
    with torch.enable_grad():
        loss = answer_of(functional_call(network, used, (x,))).square().sum()
        inputs = [asked[id(one)] for one in (table, weight)]
        sent, total = torch.autograd.grad(loss, inputs, allow_unused=True)
    if sent is None or total is None:
        return None
    rows, total = sent.reshape(-1, sent.shape[-1]), total.flatten(1)
    patches = to_patches(x[0], weight.shape[-1])
    starts = range(len(rows) - len(patches) + 1)
    of_patches = (rows[start : start + len(patches)] for start in starts)
    return [float((g.mT @ patches - total).norm() / total.norm()) for g in of_patches]


# tables of positions of a live network ------------------------------------------------------------

POSITIONS = re.compile(r"pos(?!t)")
"""What a table of positions has in its name in every library looked at."""
MOST_OTHERS, MANY_OTHERS = 5, 128
"""Rows of a table of positions that are not of patches: a class token's and four registers'; and
where it is known how many patches there are, such as prompts' or those of YOLOS's objects."""


class Positions(NamedTuple):
    """What a live network adds to its patches."""

    grid: Grid
    table: nn.Parameter | None
    before: int
    """Rows of the table before the patches'."""
    is_shown: bool
    """Whether the network or the user says how many patches stand beside and below each other; else
    they are taken for a square's."""


def positions_of(module: nn.Module, projection: nn.Conv2d, img_size: Size | None) -> Positions:
    """The table of positions of a network, where it has one, and its pictures' patches."""
    patch = int(projection.kernel_size[0])

    def tried(table: nn.Parameter, most: int) -> Positions | None:
        """The table with the rows for which the equation holds; None where it holds for none."""
        grid, is_shown = grid_of(module, table, patch, img_size, most)
        if not 0 <= _rows(table) - grid.patches <= (most if is_shown else MOST_OTHERS):
            return None
        x = picture_of(projection, grid)
        try:
            errors = equation_errors(module.eval(), x, table, projection.weight) or [math.inf]
        except Exception:  # of a size that it does not take, which the caller will meet
            return None
        least = min(errors)
        return Positions(grid, table, errors.index(least), is_shown) if least <= HOLDS else None

    width = projection.out_channels
    named = named_tables(module, width)
    both = (named.values(), other_tables(module, width))
    for tables, most in itertools.product(both, (MOST_OTHERS, MANY_OTHERS)):
        for table in tables:
            if (found := tried(table, most)) is not None:
                return found
    grid, is_given = grid_of(module, None, patch, img_size)
    if is_given and (not named or takes(module, projection, grid)):
        return Positions(grid, None, 0, True)  # none, or one that is added otherwise
    if len(named) == 1:  # `timm_networks.check_equation` says what is wrong with it
        (table,) = named.values()
        grid, is_shown = grid_of(module, table, patch, img_size)
        return Positions(grid, table, _rows(table) - grid.patches, is_shown)
    raise UserError(
        f"{kind_of(module)}: expected one table of positions, which is added to patches, or the "
        f"size of the client's pictures; got {', '.join(named) or 'no such table'} and img_size="
        f"{img_size}. Give img_size=…; or, if the network flips, normalises or scales pictures "
        "itself, the network behind that."
    )


def likely_grids(
    module: nn.Module, width: int, patch: int, img_size: Size | None
) -> Iterable[Grid]:
    """How many patches of this side a network's pictures may have, the likeliest first."""
    tables = (*named_tables(module, width).values(), None, *other_tables(module, width))
    grids = [grid_of(module, table, patch, img_size)[0] for table in tables]
    return dict.fromkeys(grid for grid in grids if grid.patches)


def named_tables(module: nn.Module, width: int) -> dict[str, nn.Parameter]:
    """What is named as a table of positions; nothing where positions are told otherwise, as by
    rotation."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if POSITIONS.search(name) and parameter.shape[-1] == width
        if parameter.numel() > width  # else of a class token
    }


def other_tables(module: nn.Module, width: int) -> list[nn.Parameter]:
    """What may be a table of positions under another name: parameters of so many columns that are
    no layer's weights."""
    layers = (nn.Linear, nn.MultiheadAttention, nn.modules.conv._ConvNd)
    return [
        parameter
        for part in module.modules()
        if not isinstance(part, layers)
        for parameter in part._parameters.values()
        if parameter is not None and parameter.ndim > 1
        if parameter.shape[-1] == width and parameter.numel() > width
    ]


def _rows(table: nn.Parameter) -> int:
    return table[..., 0].numel()


def grid_of(
    module: nn.Module,
    table: nn.Parameter | None,
    patch: int,
    img_size: Size | None,
    most: int = MOST_OTHERS,
) -> tuple[Grid, bool]:
    """The patches of the pictures that a network is made for, and whether its table's shape, its
    config or the size that is given shows them; else the largest square for which the table has
    rows, of no patches without one.

    most  rows of the table that are not of patches
    """
    if table is not None and table.ndim == 4 and min(table.shape[1:3]) > 1:
        return Grid(*table.shape[1:3]), True
    rows = None if table is None else _rows(table)
    configs = (getattr(part, "config", None) for part in module.modules())
    sizes: list[Any] = [getattr(config, "image_size", None) for config in configs]  # transformers'
    # Without a table pictures may be of any size.
    for size in [img_size, *sizes] if rows is None else [*sizes, img_size]:
        is_pair = isinstance(size, list | tuple) and len(size) == 2
        if not is_pair and not isinstance(size, int):
            continue
        grid = Grid.of(size, patch)
        if grid.patches and (rows is None or 0 <= rows - grid.patches <= most):
            return grid, True
    side = math.isqrt(rows or 0)
    return Grid(side, side), False
