"""Live networks of any library that embed patches linearly and add a table of positions.

`Renamed` finds the parts by their shapes and gives the network timm's names of them, so that
`models.timm_networks` takes it: transformers' Dinov2, SigLIP and others of their kind, and
networks of one's own. A linear layer of flattened patches becomes the convolution that computes the
same. `_at_size` is for networks that stretch their table to the size of the pictures at hand, as
transformers' and timm's `dynamic_img_size` do. The stretched table is linear in the stored one,
E' = M E, so a client's gradient of the stored table, M^T A, still tells the rows A of the patches
as long as there are no more of them than stored positions.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError, format_error
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.timm_networks import (
    CHANNELS,
    Parts,
    TimmNetwork,
    kind_of,
    of_timm,
    parts_of,
)
from mjp_privacy.models.vit import input_of

TABLE, PROJECTION = "pos_embed", "patch_embed.proj.weight"
POSITIONS = re.compile(r"pos")
"""What a table of positions has in its name in every library looked at."""
CLASSIFIERS = (
    *("classifier", "head", "fc", "logits", "classification_head", "cls_head"),
    "cls_classifier",  # beside a teacher's
)
"""What networks call the linear layer that gives the classes."""
STRETCHES = "interpolate_pos_encoding"
"""With which transformers' networks are told to take pictures of other sizes than their own."""
SAME = 1e-4  # relative error up to which two networks compute the same
SOLVABLE = 1e-3  # of M's largest singular value, the smallest from which A is told


class NoPatches(UserError):
    """A network without the parts that `Renamed` looks for."""


class FlattenedPatches(nn.Conv2d):
    """A linear layer of flattened patches, with its weights as those of the convolution that
    computes the same."""

    order: Tensor
    """(3 p²,) which of the convolution's inputs each of the layer's is."""

    @classmethod
    def of(cls, layer: nn.Linear, order: Tensor) -> FlattenedPatches:
        """The convolution that computes what this layer does."""
        patch = math.isqrt(layer.in_features // CHANNELS)
        one = cls(CHANNELS, layer.out_features, patch, patch, bias=layer.bias is not None)
        one.__dict__["order"], one.bias = order, layer.bias
        one.weight = nn.Parameter(one.placed(layer.weight.detach()))
        return one

    def placed(self, weight: Tensor) -> Tensor:
        """Numbers of the layer's weight (..., D, 3 p²), as the convolution's has them."""
        return weight[..., self.order.argsort()].unflatten(-1, self.weight.shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Flattened patches (..., 3 p²) -> their embeddings (..., D)."""
        return nn.functional.linear(x, self.weight.flatten(1)[:, self.order], self.bias)


class Renamed(nn.Module):
    """A network under timm's names of its parts: pos_embed, patch_embed.proj, blocks, head. Its
    other parameters are behind `others`.

    It stands around the network and shares its parameters; no module of it has two names, which
    torch's `functional_call` would mix up.
    """

    rest: nn.Module
    logits: Callable[[Any], Tensor]

    def __init__(self, module: nn.Module, logits: Callable[[Any], Tensor]) -> None:
        super().__init__()
        kind = type(module).__name__
        projection: nn.Conv2d | None = None
        stacks: list[nn.Module] = [nn.ModuleList()]  # layers of one kind, as a network's blocks are
        for part in module.modules():
            if isinstance(part, nn.Conv2d) and part.in_channels == 3 and projection is None:
                side, down = part.kernel_size
                projection = part if part.stride == (side, side) and side == down > 1 else None
            one_kind = len({type(child) for child in part.children()}) == 1
            if isinstance(part, nn.ModuleList | nn.Sequential) and one_kind:
                stacks.append(part)
        if projection is None:
            raise NoPatches(
                f"{kind}: expected patches that one convolution without overlap embeds, got none: "
                "no gradient of this network is a sum over patches. Give another network."
            )
        patch, width = int(projection.kernel_size[0]), projection.out_channels
        tables = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if POSITIONS.search(name) and parameter.shape[-1] == width and parameter.ndim > 1
        ]
        if len(tables) != 1:
            names = ", ".join(name for name, _ in tables) or "none"
            raise NoPatches(
                f"{kind}: expected one table of positions of width {width}, got {names}. Networks "
                "without one are attacked under timm's names (timm.create_model)."
            )
        table = tables[0][1]
        self.pos_embed = table
        self.patch_embed = nn.Module()
        self.patch_embed.proj = projection
        rows = table[..., 0].numel()
        _tell_size(self.patch_embed, math.isqrt(rows), patch)
        self.num_prefix_tokens = rows - math.isqrt(rows) ** 2
        sizes = [sum(parameter.numel() for parameter in stack.parameters()) for stack in stacks]
        self.blocks = stacks[sizes.index(max(sizes))]
        heads = [
            child
            for name, child in module.named_modules()
            if name.rpartition(".")[2] in CLASSIFIERS and isinstance(child, nn.Linear)
        ]
        side = patch * math.isqrt(rows)
        self.head = heads[0] if heads else _last_layer(module, table.new_zeros(1, 3, side, side))
        self.num_classes = getattr(self.head, "out_features", 0)
        self.others = nn.ModuleDict()
        here = {id(part) for part in self.modules()}
        for name, part in module.named_modules():
            if id(part) not in here and (part._parameters or part._buffers):
                holder = nn.Module()
                holder._parameters, holder._buffers = part._parameters, part._buffers
                self.others[name.replace(".", "_") or "own"] = holder
        self.__dict__["rest"], self.logits = module, logits
        takes = inspect.signature(module.forward).parameters
        self.options = {STRETCHES: True} if STRETCHES in takes else {}

    def train(self, mode: bool = True) -> Renamed:
        """The mode of the network around and inside."""
        super().train(mode)
        self.rest.train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Normalised pictures (B, 3, S, S) -> what the network says of them."""
        return self.logits(self.rest(x, **self.options))

    forward_features = forward


def _last_layer(module: nn.Module, x: Tensor) -> nn.Module:
    """The linear layer whose output for a picture the network returns as it is; else nothing's."""
    last: nn.Module = nn.Identity()
    outputs: list[tuple[nn.Module, Tensor]] = []
    hooks = [
        part.register_forward_hook(lambda layer, _, output: outputs.append((layer, output)))
        for part in module.modules()
        if isinstance(part, nn.Linear)
    ]
    try:
        with torch.no_grad():
            returned = module(x)
        last = next((layer for layer, output in outputs if output is returned), last)
    except Exception:  # whatever the network's own code raises, which the caller will meet
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return last


def _tell_size(patch_embed: Any, grid: int, patch: int) -> None:
    """Write onto a patch embedding, as timm's have it, for which pictures it is."""
    patch_embed.img_size = (grid * patch, grid * patch)
    patch_embed.num_patches = grid**2


# a table that is stretched to the pictures --------------------------------------------------------


def of_live(
    module: nn.Module,
    logits: Callable[[Any], Tensor],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    img_size: int | None = None,
) -> TimmNetwork:
    """A copy of a live network, in eval mode on the CPU, with its card.

    logits    what is wanted of that which the network returns
    img_size  side of the client's pictures, where the network takes several
    """
    whole = _copied(module).cpu().requires_grad_(True)  # what a client froze is there, too
    if next(whole.parameters()).dtype.itemsize < 4:
        whole = whole.float()
    _embed_by_convolution(whole)
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    net = whole if type(module).__module__.startswith("timm.") else Renamed(whole, logits)
    parts = parts_of(net.eval())
    side = parts.grid * int(parts.projection.kernel_size[0])
    spread = None
    if img_size not in (None, side):
        spread = _at_size(net, parts, img_size)
        side = img_size
    try:
        with torch.no_grad():
            net(torch.zeros(1, 3, side, side, dtype=next(net.parameters()).dtype))
    except Exception as error:  # whatever the network's own code raises
        raise NoPatches(
            f"{kind_of(net)}: expected a network that takes one picture of {side} px; it raised "
            f"{format_error(error)}. Give the network itself, in the size of its table."
        ) from error
    network = of_timm(net, mean=mean, std=std)
    renamed = {names[id(p)]: name for name, p in net.named_parameters() if id(p) in names}
    if spread is not None:
        network.resampled = torch.linalg.pinv(spread.mT)
        renamed |= {name: TABLE for name in names.values() if name not in renamed}
    network.renamed = renamed
    return network


def _embed_by_convolution(whole: nn.Module) -> None:
    """Put, in place, a convolution where a linear layer embeds flattened patches. A picture whose
    numbers are all different shows which of them the layer is given, in which order."""
    kinds = {name: part for name, part in whole.named_modules() if isinstance(part, nn.Linear)}
    tables = [(n, p) for n, p in whole.named_parameters() if POSITIONS.search(n) and p.ndim > 1]
    for name, layer in kinds.items():
        patch = math.isqrt(layer.in_features // CHANNELS)
        fitting = [p for _, p in tables if p.shape[-1] == layer.out_features]
        if patch < 2 or CHANNELS * patch**2 != layer.in_features or len(fitting) != 1:
            continue
        side = patch * math.isqrt(fitting[0][..., 0].numel())
        x = torch.arange(CHANNELS * side**2).view(1, CHANNELS, side, side).to(fitting[0])
        try:
            with torch.no_grad():
                given = input_of(whole, layer, x)[0]
        except Exception:  # whatever the network's own code raises; it is not of such patches
            continue
        patches = to_patches(x[0], patch)
        if given.shape != patches.shape:
            continue
        order = torch.searchsorted(patches[0].contiguous(), given[0].contiguous())
        if not torch.equal(patches[:, order.clamp(max=len(order) - 1)], given):
            raise UserError(
                f"{kind_of(whole)}: expected {name} to be given the numbers of the patches, row by "
                "row, got others: a norm or another layer stands before it. Give the part of the "
                "network behind a normalisation; of normalised patches no equation here tells."
            )
        parent, _, own = name.rpartition(".")
        setattr(whole.get_submodule(parent), own, FlattenedPatches.of(layer, order))
        return


def _copied(module: nn.Module) -> nn.Module:
    """A copy, also of a network that keeps what it last computed as an attribute."""
    kept = [value for part in module.modules() for value in vars(part).values()]
    computed = [value for value in kept if isinstance(value, Tensor) and not value.is_leaf]
    try:
        return copy.deepcopy(module, {id(value): value.detach() for value in computed})
    except Exception as error:  # whatever the network's own code raises
        raise NoPatches(
            f"{kind_of(module)}: expected a network that copy.deepcopy copies; it raised "
            f"{format_error(error)}. Give one that keeps no tensors of its last step."
        ) from error


def of_live_names(network: Any, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A live network's gradients (n, *shape) under the names of its copy, and that of a stretched
    table as one of the copy's table."""
    names = network.renamed or {}
    own = {names.get(name, name): gradient for name, gradient in sent.items()}
    projection = network.patch_embed.proj
    if isinstance(projection, FlattenedPatches) and PROJECTION in own:
        own[PROJECTION] = projection.placed(own[PROJECTION])
    if network.resampled is not None and TABLE in own:
        rows = own[TABLE].reshape(len(own[TABLE]), -1, network.embed_dim)
        patches = network.resampled @ rows[:, network.before :].double()
        table = torch.cat((rows[:, : network.before], patches.to(rows)), 1)
        own[TABLE] = table.unsqueeze(1)
    return own


def rebuilt_by_name(network: nn.Module) -> bool:
    """Whether a file of the network's weights says all that it takes to build it again."""
    return not isinstance(getattr(network, "net", None), Renamed)


def _at_size(net: nn.Module, parts: Parts, side: int) -> Tensor:
    """Give the network, in place, the table that it uses for pictures of this side; returns M
    (N, rows), float64: what each stored row has part in."""
    kind, patch, stored = kind_of(net), int(parts.projection.kernel_size[0]), parts.table
    if stored is None or side % patch:
        raise UserError(
            f"{kind}: expected an img_size of whole patches of {patch} px and a table that is "
            f"stretched to it, got {side}. Leave img_size out."
        )
    x = torch.randn(1, 3, side, side, generator=torch_generator("a picture of another size"))
    with torch.no_grad(), _taking(kind, side):
        expected = net(x.to(stored))
        spread = _stretched(net, parts, x)
    values = torch.linalg.svdvals(spread)
    if len(spread) > spread.shape[1] or float(values[-1]) < SOLVABLE * float(values[0]):
        raise UserError(
            f"{kind}: its table of {spread.shape[1]} positions is stretched to {len(spread)} at "
            f"{side} px, and its gradient does not tell those of the patches. Expected pictures of "
            "at most the size that the table was made for."
        )
    rows = stored.detach().reshape(-1, stored.shape[-1])
    patches = (spread @ rows[parts.before :].double()).to(rows)
    table = nn.Parameter(torch.cat((rows[: parts.before], patches)).unsqueeze(0))
    if (resize := getattr(net, "set_input_size", None)) is not None:
        resize(img_size=(side, side))
    for part in net.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is stored or (name == "pos_embed" and part is net):
                part._parameters[name] = table
    _tell_size(net.patch_embed, side // patch, patch)
    with torch.no_grad(), _taking(kind, side):
        off = float((net(x.to(stored)) - expected).norm() / expected.norm())
    if not off < SAME:
        raise UserError(
            f"{kind}: with the table that it uses at {side} px it computes something else: outputs "
            f"differ by {off:.1e}, expected at most {SAME:.0e}. Its gradients cannot be read at "
            "this size."
        )
    return spread


@contextmanager
def _taking(kind: str, side: int) -> Iterator[None]:
    """Whatever a network's own code raises on pictures of this side, as a UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"{kind}: expected a network that takes pictures of {side} px, as one built with "
            f"dynamic_img_size does; it raised {format_error(error)}. Leave img_size out."
        ) from error


def _stretched(net: nn.Module, parts: Parts, x: Tensor) -> Tensor:
    """M (N, rows) at the size of a picture x.

    Every channel of the table is stretched alike, so one pass shows as many columns of M as the
    table is wide.
    """
    precise = copy.deepcopy(net).double()
    table, block = parts_of(precise).table, next(iter(precise.blocks.children()))  # type: ignore[union-attr]
    assert table is not None
    count = (x.shape[-1] // int(parts.projection.kernel_size[0])) ** 2
    width, held = table.shape[-1], table.reshape(-1, table.shape[-1])[parts.before :]

    def seen(positions: Tensor) -> Tensor:
        """Block 0's input at the patches (N, D), for these rows of the table."""
        held.copy_(positions)
        tokens = input_of(precise, block, x.double())[0]
        return tokens[len(tokens) - count :].clone()

    nothing, columns = seen(torch.zeros_like(held)), []
    for some in torch.eye(len(held), dtype=torch.float64).split(width):
        padded = nn.functional.pad(some.mT, (0, width - len(some)))
        columns.append((seen(padded) - nothing)[:, : len(some)])
    return torch.cat(columns, 1)
