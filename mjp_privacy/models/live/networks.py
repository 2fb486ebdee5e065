"""Live networks of any library, with their own forward, and tables that are stretched to pictures.

`live.parts.Renamed` gives the network timm's names of its parts, so that `timm_networks` takes it:
transformers' Dinov2, SigLIP and others of their kind, and networks of one's own. `_at_size` is for
networks that stretch their table of positions to the size of the pictures at hand, as
transformers' and timm's `dynamic_img_size` do. The stretched table is linear in the stored one,
E' = M E, so a client's gradient of the stored table, M^T A, still tells the rows A of the patches
as long as there are no more of them than stored positions; else it is taken as withheld.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.schema import Size, height_width, size_text
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.live.parts import (
    STRETCHES,
    FlattenedPatches,
    NoPatches,
    Renamed,
    embed_by_convolution,
    tell_size,
)
from mjp_privacy.models.live.tables import tables_by_rows
from mjp_privacy.models.network_parts import IN_SIZE, code_of, kind_of
from mjp_privacy.models.timm_networks import TimmNetwork, of_timm
from mjp_privacy.models.vit import Common, copied, input_of

TABLE, PROJECTION = "pos_embed", "patch_embed.proj.weight"
CHECKPOINT = "checkpoint"
"""What attributes that have blocks computed again have in their names in timm and transformers."""
COMPILED = "_orig_mod"  # what torch.compile calls the network that it runs
SAME = 1e-4  # relative error up to which two networks compute the same
SOLVABLE = 1e-3  # of M's largest singular value, the smallest from which A is told


def of_live(
    module: nn.Module,
    logits: Callable[[Any], Tensor],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    img_size: Size | None = None,
) -> TimmNetwork:
    """A copy of a live network, in eval mode on the CPU, with its card.

    logits    what is wanted of that which the network returns
    img_size  of the client's pictures, where the network takes several or they are no squares
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(
            f"{kind_of(module)}: expected the network that was traced or scripted, got what "
            "torch.jit made of it. Give the nn.Module."
        )
    if next(filter(torch.is_floating_point, module.parameters()), None) is None:
        raise NoPatches(
            f"{kind_of(module)}: expected a network with parameters, got none. Give the network "
            "whose gradients were sent."
        )
    with code_of(module, "that copy.deepcopy copies", "Give one of modules and tensors alone."):
        whole = copied(module).cpu()
    for parameter in whole.parameters():  # what a client froze is there, too
        parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
    for part in whole.modules():  # computed once: that changes no number, and hooks are gone later
        for name, value in vars(part).items():
            if value is True and CHECKPOINT in name:
                part.__dict__[name] = False
    if next(filter(torch.is_floating_point, whole.parameters())).dtype.itemsize < 4:
        whole = whole.float()
    for part in [*whole.modules()]:  # what torch.compile made of parts
        inner = {name: child._modules.get(COMPILED) for name, child in part.named_children()}
        part._modules.update({name: child for name, child in inner.items() if child is not None})
    of_timms = type(module).__module__.startswith("timm.")  # and not embedded elsewhere
    projection = getattr(getattr(module, "patch_embed", None), "proj", None)
    of_timms &= getattr(projection, "kernel_size", None) == getattr(projection, "stride", 0)
    if not of_timms:
        embed_by_convolution(whole, img_size)
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    maps: set[str] = set()
    if not of_timms:
        maps = tables_by_rows(whole)
        call_attention(whole)
    net = whole if of_timms else Renamed(whole, logits, img_size)
    stored = TimmNetwork(net.eval())
    size, spread = stored.grid.pixels(stored.patch_size), None
    if img_size is not None and height_width(img_size) != size:
        size = height_width(img_size)
        spread = _at_size(stored, size)
    expected = f"that takes one picture of {size_text(size)} px"
    blocks = net.blocks if isinstance(net, Renamed) else nn.Module()
    with torch.no_grad(), code_of(net, expected, IN_SIZE), marked_order(blocks):
        net(stored.patch_embed.proj.weight.new_zeros(1, stored.channels, *size))
    network = of_timm(net, mean=mean, std=std)
    renamed = {names[id(p)]: name for name, p in net.named_parameters() if id(p) in names}
    if spread is not None:
        network.resampled = torch.linalg.pinv(spread.mT) if _tells(spread) else spread[:0]
        renamed |= {name: TABLE for name in names.values() if name not in renamed}
    network.renamed, network.maps = renamed, frozenset(maps)
    network.other_size = getattr(net, "other_size", None) if spread is None else None
    return network


def of_live_names(network: Any, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A live network's gradients (n, *shape) under the names of its copy, and that of a stretched
    table as one of the copy's table."""
    names = network.renamed or {}
    own = {
        names.get(name, name): gradient.movedim(2, -1) if name in network.maps else gradient
        for name, gradient in ((name.replace(f"{COMPILED}.", ""), g) for name, g in sent.items())
    }
    projection = network.patch_embed.proj
    if isinstance(projection, FlattenedPatches) and PROJECTION in own:
        own[PROJECTION] = projection.placed(own[PROJECTION])
    if network.resampled is not None and not len(network.resampled):
        own.pop(TABLE, None)
    elif network.resampled is not None and TABLE in own:
        rows = own[TABLE].reshape(len(own[TABLE]), -1, network.embed_dim)
        stored = slice(network.before, network.before + network.resampled.shape[1])
        patches = network.resampled @ rows[:, stored].double()
        parts = rows[:, : stored.start], patches.to(rows), rows[:, stored.stop :]
        own[TABLE] = torch.cat(parts, 1).unsqueeze(1)
    return own


def rebuilt_by_name(network: Common) -> bool:
    """Whether a file of the network's weights says all that it takes to build it again."""
    return not isinstance(getattr(network, "net", None), Renamed) and network.channels == 3


# a table that is stretched to the pictures --------------------------------------------------------


def _at_size(network: TimmNetwork, size: tuple[int, int]) -> Tensor:
    """Give a network, in place, the table that it uses for pictures of this size; returns M
    (N, rows), float64: what each stored row has part in."""
    net, patch, stored = network.net, network.patch_size, network.pos_embed
    kind, shown = kind_of(net), size_text(size)
    if stored is None or any(side % patch for side in size):
        raise UserError(
            f"{kind}: expected an img_size of whole patches of {patch} px and a table that is "
            f"stretched to it, got {shown}. Leave img_size out."
        )
    generator = torch_generator("a picture of another size")
    x = torch.randn(1, network.channels, *size, generator=generator)
    if not len(getattr(net, "blocks", ())):
        raise UserError(
            f"{kind}: its table of {stored[..., 0].numel()} positions is not of pictures of "
            f"{shown} px. Expected a network of blocks that stretches it, got none that can be "
            "told. Give the img_size that the network was made for."
        )
    takes = f"that takes pictures of {shown} px, as one built with dynamic_img_size does"
    with torch.no_grad(), code_of(net, takes, "Leave img_size out."):
        expected = net(x.to(stored))
        spread = _stretched(network, x)
    rows = stored.detach().reshape(-1, stored.shape[-1])
    of_patches = network.rows_of_patches
    patches = (spread @ rows[of_patches].double()).to(rows)
    others = rows[: of_patches.start], rows[of_patches.stop :]
    table = nn.Parameter(torch.cat((others[0], patches, others[1])).unsqueeze(0))
    if stored.ndim == 4:  # a grid
        table = nn.Parameter(table.data.unflatten(1, Grid.of(size, patch)))
    if (resize := getattr(net, "set_input_size", None)) is not None:
        resize(img_size=size)
    for part in net.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is stored or (name == "pos_embed" and part is net):
                part._parameters[name] = table
    for part in getattr(net, "rest", net).modules():
        names = [name for name, parameter in part._parameters.items() if parameter is table]
        if names and hasattr(part, STRETCHES):  # it takes any table for that of a square
            setattr(part, STRETCHES, partial(_table_itself, part, names[0]))
    tell_size(net.patch_embed, Grid.of(size, patch), patch)
    with torch.no_grad(), code_of(net, takes, "Leave img_size out."):
        off = float((net(x.to(stored)) - expected).norm() / expected.norm())
    if not off < SAME:
        raise UserError(
            f"{kind}: with the table that it uses at {shown} px it computes something else: "
            f"outputs differ by {off:.1e}, expected at most {SAME:.0e}. Its gradients cannot be "
            "read at this size."
        )
    return spread


def _tells(spread: Tensor) -> bool:
    """Whether a stored table's gradient tells the rows of the patches to which M (N, rows)
    stretches it."""
    values = torch.linalg.svdvals(spread)
    return len(spread) <= spread.shape[1] and float(values[-1]) >= SOLVABLE * float(values[0])


def _table_itself(part: nn.Module, name: str, *_: Any) -> Tensor:
    """What is partial to a part is copied with it; a lambda would keep the first one's."""
    return part._parameters[name]  # type: ignore[return-value]


def _stretched(network: TimmNetwork, x: Tensor) -> Tensor:
    """M (N, rows) at the size of a picture x.

    Every channel of the table is stretched alike, so one pass shows as many columns of M as the
    table is wide.
    """
    precise = copied(network.net).double()
    table, block = TimmNetwork(precise).pos_embed, next(iter(precise.blocks.children()))
    assert table is not None
    width, held = table.shape[-1], table.reshape(-1, table.shape[-1])[network.rows_of_patches]
    one, other = (input_of(precise, block, given)[0] for given in (x.double(), 0 * x.double()))
    of_patches = (one != other).any(-1)

    def seen(positions: Tensor) -> Tensor:
        """Block 0's input at the patches (N, D), for these rows of the table."""
        held.copy_(positions)
        return input_of(precise, block, x.double())[0][of_patches]

    nothing, columns = seen(torch.zeros_like(held)), []
    for some in torch.eye(len(held), dtype=torch.float64).split(width):
        padded = nn.functional.pad(some.mT, (0, width - len(some)))
        columns.append((seen(padded) - nothing)[:, : len(some)])
    return torch.cat(columns, 1)


# torch's own attention ----------------------------------------------------------------------------


class CalledAttention(nn.MultiheadAttention):
    """torch's attention of tokens to one another by layers that are called, `qkv` and `out_proj`,
    so that hooks see what they are given; torch's own uses their weights alone, and torch's
    encoder layers do not even call it."""

    def __init__(self, own: nn.MultiheadAttention) -> None:
        """What stands in place of `own`, with its parameters."""
        nn.Module.__init__(self)
        self.__dict__.update({k: v for k, v in own.__dict__.items() if k not in self.__dict__})
        self._qkv_same_embed_dim = False  # torch's encoder layers look here
        weight, bias = own.in_proj_weight, own.in_proj_bias
        self.qkv = nn.Linear(self.embed_dim, 3 * self.embed_dim, bias is not None, "meta")
        self.qkv.weight, self.qkv.bias, self.out_proj = weight, bias, own.out_proj
        self.bias_k = self.bias_v = None

    in_proj_weight: Any = property(lambda self: self.qkv.weight)
    in_proj_bias: Any = property(lambda self: self.qkv.bias)
    q_proj_weight: Any = property(lambda self: self.qkv.weight.chunk(3)[0])
    k_proj_weight: Any = property(lambda self: self.qkv.weight.chunk(3)[1])
    v_proj_weight: Any = property(lambda self: self.qkv.weight.chunk(3)[2])

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's; what is not of tokens to one another, or is masked, goes to torch's own."""
        masked = key_padding_mask is not None or attn_mask is not None
        if masked or not (query is key and key is value):
            rest = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            out: tuple[Tensor, Tensor | None] = super().forward(query, key, value, *rest)
            return out
        split = self.qkv(query).unflatten(-1, (3, self.num_heads, -1))
        tokens_first = query.ndim == 3 and not self.batch_first
        split = split.transpose(0, 1) if tokens_first else split
        q, k, v = split.movedim(-3, 0).transpose(-3, -2)
        weights = (q @ k.mT * self.head_dim**-0.5).softmax(-1)
        attended = (weights @ v).transpose(-3, -2).flatten(-2)
        attended = self.out_proj(attended.transpose(0, 1) if tokens_first else attended)
        if not need_weights:
            return attended, None
        return attended, weights.mean(-3) if average_attn_weights else weights


def call_attention(whole: nn.Module) -> None:
    """Put, in place, attention whose layers are called where a network has torch's own."""
    for part in [*whole.modules()]:
        for name, own in part.named_children():
            if type(own) is not nn.MultiheadAttention or own.bias_k is not None:
                continue
            hooked = own._forward_hooks or own._forward_pre_hooks  # which would be lost
            fused = isinstance(own.in_proj_weight, nn.Parameter) and not own.add_zero_attn
            if fused and not hooked:
                setattr(part, name, CalledAttention(own))


@contextmanager
def marked_order(blocks: nn.Module) -> Iterator[None]:
    """Where the network is given one picture in this block, its parts keep whether they were given
    tokens as (T, 1, D), for `vit.pictures_first`."""

    def look(part: nn.Module, given: Any) -> None:
        if isinstance(given, Tensor) and given.ndim == 3 and given.shape[1] == 1 < len(given):
            part.__dict__["tokens_first"] = True

    handles = [
        part.register_forward_pre_hook(
            lambda _, given, named, part=part: look(
                part, next(iter((*given, *named.values())), None)
            ),
            with_kwargs=True,
        )
        for part in blocks.modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
