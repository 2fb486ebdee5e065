"""`load_module`: a live network of any library, with the same outputs, for those who attack it.

A plain ViT becomes this package's own. Any other keeps its own forward, and gets timm's names of
its parts (`live.parts.Renamed`), so that `timm_networks` takes it.

Networks may stretch their table of positions to the size of the pictures at hand, as transformers'
and timm's `dynamic_img_size` do. The stretched table is linear in the stored one, E' = M E, so a
client's gradient of the stored table, M^T A, still tells the rows A of the patches as long as there
are no more of them than stored positions; else it is taken as withheld.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.schema import Size, height_width, size_text
from mjp_privacy.models.checkpoint_files import WeightFile, tensors_sha256
from mjp_privacy.models.checkpoints import completed, load_into, shape_of
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.layouts import recognised
from mjp_privacy.models.live.parts import (
    STRETCHES,
    FlattenedPatches,
    Renamed,
    call_attention,
    embed_by_convolution,
    tables_by_rows,
    tell_size,
    undo_normalisation,
)
from mjp_privacy.models.loading import LoadedModel, build, with_card
from mjp_privacy.models.mjp_vit import Network, PositionEmbedding
from mjp_privacy.models.network_parts import (
    IN_SIZE,
    answers_in,
    code_of,
    convolution_of,
    embeds,
    kind_of,
    other_size,
    run_of,
)
from mjp_privacy.models.sizes import Activation
from mjp_privacy.models.timm_networks import TimmNetwork, of_timm
from mjp_privacy.models.vit import ACTIVATION_LAYERS, copied, input_of
from mjp_privacy.models.zoo import ModelSpec, check_complete, overridden

HEADS = ("num_heads", "num_attention_heads")
PROBE = torch.linspace(-4, 4, 33)
SAME = 1e-4  # of the largest output, up to which two networks compute the same
TINY = 1e-12
TABLE, PROJECTION = "pos_embed", "patch_embed.proj.weight"
CHECKPOINT = "checkpoint"
"""What attributes that have blocks computed again have in their names in timm and transformers."""
COMPILED = "_orig_mod"  # what torch.compile calls the network that it runs
SOLVABLE = 1e-3  # of M's largest singular value, the smallest from which A is told

Channels = float | Sequence[float] | None


@torch.inference_mode(False)
def load_module(
    module: nn.Module,
    *,
    mean: Channels = None,
    std: Channels = None,
    img_size: Size | None = None,
) -> LoadedModel:
    """A copy of a live Vision Transformer, in eval mode on the CPU, with its `card`.

    load_module(torchvision.models.vit_b_32(), mean=0.5, std=0.5).card.architecture

    module  of timm (any with patches and, or without, a table of positions), torchvision,
            transformers (ViT, DeiT, CLIP, Dinov2, SigLIP and their kind), open_clip or one's own; a
            model of this package is returned as it is. Of a model of pictures and text the visual
            tower is taken.
    mean, std   of the client's normalisation, one number or three; one of grey pictures. They are
                never guessed.
    img_size    side, or height and width, of the client's pictures, where the network stretches
                its table of positions to them, or they are no squares

    A copy as a plain ViT is compared with the module on one random input, so that it never stands
    for a network that computes something else: that one keeps its own forward.
    """
    if img_size is not None:
        img_size = overridden(ModelSpec(kind_of(module)), {"img_size": img_size}).img_size
    prefix = ""  # of the network's names in what was given
    while inner := _inner(module):
        module, prefix = module.get_submodule(inner), f"{prefix}{inner}."
    tower = _tower(module)
    if tower:
        module, prefix = module.get_submodule(tower), f"{prefix}{tower}."
    given = {"mean": mean, "std": std}
    if isinstance(module, LoadedModel | TimmNetwork):
        card, facts = module.card, {**given, "img_size": img_size}
        asked = overridden(ModelSpec(card.name), facts)
        for key, value in facts.items():
            if value is not None and getattr(asked, key) != getattr(card, key):
                raise UserError(
                    f"{key}: expected that of the model's card, {getattr(card, key)}, got {value}. "
                    f"Leave it out, or load the model with {key}=… as the client made its pictures."
                )
        return cast(LoadedModel, module)
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(
            f"{kind_of(module)}: expected the network that was traced or scripted, got what "
            "torch.jit made of it. Give the nn.Module."
        )
    with code_of(module, "that copy.deepcopy copies", "Give one of modules and tensors alone."):
        module = copied(module).cpu().eval()
    if next(filter(torch.is_floating_point, module.parameters()), PROBE).dtype.itemsize < 4:
        module = module.float()  # its own rounding would hide another activation
    pixels = _normalisation(module, given)
    with suppress(UserError):
        plain = None if tower else _plain_copy(module, pixels)
        projection = convolution_of(module)
        if plain is not None and img_size is None and projection is not None:
            plain.other_size = other_size(module, plain.grid, projection)
        if plain is not None and img_size in (None, plain.card.img_size):
            return plain
    network = _with_own_forward(module, prefix, **pixels, img_size=img_size)
    network.tower = tower
    return cast(LoadedModel, network)


def _inner(module: nn.Module) -> str:
    """The name of the network in a wrapper of torch's, and of open_clip's visual tower; "" in any
    other, for somebody else's wrapper may compute more."""
    kind, parts = type(module).__module__, dict(module.named_children())
    if kind.startswith("open_clip."):
        return "visual" if "visual" in parts else ""
    is_torchs = kind.startswith("torch.") and len(parts) == 1
    return next((name for name in parts if is_torchs and name in ("module", COMPILED)), "")


def _tower(module: nn.Module) -> str:
    """The name of the part that takes one picture, in a network that takes more, as CLIP's do; ""
    where there is none, or several parts embed patches."""
    embedding = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Conv2d) and part.kernel_size == part.stride != (1, 1)
    ]
    if len(embedding) != 1 or _taken(module) < 2:
        return ""
    parts = embedding[0].split(".")
    names = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((name for name in names if _taken(module.get_submodule(name)) == 1), "")


def _taken(module: nn.Module) -> int:
    """How many arguments a network cannot do without."""
    of = inspect.signature(module.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.default is one.empty and one.kind in named for one in of)


# a plain ViT --------------------------------------------------------------------------------------


def _plain_copy(module: nn.Module, pixels: Mapping[str, Any]) -> LoadedModel | None:
    """The module as a plain ViT of this package; None, or a UserError, where it is none."""
    source = kind_of(module)
    tensors = {name: p.detach() for name, p in module.named_parameters()}
    layout = recognised(tensors)
    names = {own: name for name in tensors for own in layout.own_names(name)}

    def around(own: str) -> list[nn.Module]:
        """The modules that the parameter of this own name stands in, from its layer outwards."""
        parts = names.get(own, "").split(".")[:-1]
        return [module.get_submodule(".".join(parts[:end])) for end in range(len(parts), 0, -1)]

    heads = _attribute(around("blocks.0.attn.qkv.weight"), HEADS)
    if heads is None:
        return None
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    positions: PositionEmbedding = "learned" if "pos_embed" in names else "strict"
    facts = ModelSpec(
        source,
        img_size=size if isinstance(size, tuple) else None,
        num_heads=heads,
        norm_eps=_attribute(around("blocks.0.norm1.weight"), ("eps",)),
        # Where no part tells, the comparison of outputs does.
        activation=_activation(around("blocks.0.mlp.fc1.weight")) or "gelu",
        position_embedding=getattr(module, "position_embedding", positions),
        first_block=getattr(module, "first_block", None),
        **pixels,
    )
    double = all(tensor.dtype == torch.float64 for tensor in tensors.values())
    dtype = torch.float64 if double else torch.float32
    state = {name: value.to(dtype) for name, value in layout.to_own(tensors).items()}
    spec = completed(facts, shape_of(state, source), layout, source)
    check_complete(spec, source)
    copy = build(spec, source).to(dtype)
    file = WeightFile(Path(source), tensors_sha256(state), tensors)
    copy = with_card(copy, spec, load_into(copy, state, file))
    head = next(iter(around("head.weight")), None)
    return copy if _computes_the_same(module, copy, head) else None


def _attribute(owners: Sequence[nn.Module], names: Sequence[str]) -> Any:
    """The first of these attributes that one of the modules has, innermost first; or None."""
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in values if isinstance(value, int | float)), None)


def _activation(owners: Sequence[nn.Module]) -> Activation | None:
    """The activation that stands beside a block's first layer, told by what it computes."""
    for part in (part for owner in owners[1:] for part in owner.modules()):
        if type(part) in (nn.Dropout, nn.Identity) or next(part.parameters(), None) is not None:
            continue
        try:
            values = part(PROBE)
        except Exception:  # a part of another kind, which takes something else than one tensor
            continue
        if isinstance(values, Tensor) and values.shape == PROBE.shape:
            for name, layer in ACTIVATION_LAYERS.items():
                if torch.allclose(values, layer()(PROBE), atol=1e-6):
                    return name
    return None


def _normalisation(module: nn.Module, given: Mapping[str, Channels]) -> dict[str, Any]:
    """Mean and std as numbers per channel, or a UserError with what the module declares, as timm
    and open_clip write it onto a network."""
    if missing := [key for key, value in given.items() if value is None]:
        config = getattr(module, "pretrained_cfg", None) or {}
        of = [(key, config.get(key) or getattr(module, f"image_{key}", None)) for key in missing]
        stated = ", ".join(f"{key}={tuple(value)}" for key, value in of if value)
        raise UserError(
            f"{kind_of(module)}: expected {' and '.join(f'{key}=…' for key in missing)} of the "
            "client's normalisation, one number or one per channel; got none. No weight shows "
            "them, and they are never guessed."
            + (f" The module declares {stated}: give that if the client used it." if stated else "")
        )
    spec = overridden(ModelSpec(kind_of(module)), given)
    return {key: getattr(spec, key) for key in given}


def _computes_the_same(module: nn.Module, copy: LoadedModel, head: nn.Module | None) -> bool:
    """Whether the copy's output on a random input is one that the module returns.

    head  the module's last layer, of which what goes in is compared too: a fresh one may be zero,
          and then every network has its outputs
    """
    size = height_width(copy.card.img_size)
    x = torch.randn(1, 3, *size, generator=torch_generator("comparison of a copied module"))
    x = x.to(next(module.parameters()))
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")  # others are off by more than the tolerance
        entered = [ran.given for ran in run_of(module, x) if ran.part is head and embeds(ran.part)]
        run = getattr(module, "get_image_features", module)  # of transformers' CLIP
        with code_of(module, f"that takes one picture {tuple(x.shape)}", IN_SIZE):
            answers = list(answers_in(run(x)))
        own = x.to(copy.cls_token)
        pairs = [(answers, copy(own))]
        if entered:
            pairs.append((entered, input_of(copy, copy.head, own)))
    return all(any(_is_near(one, expected) for one in found) for found, expected in pairs)


def _is_near(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    off = (found.to(expected) - expected).abs().max() / found.abs().max().clamp_min(TINY)
    return float(off) <= SAME


# a network with its own forward -------------------------------------------------------------------


def _with_own_forward(
    whole: nn.Module,
    prefix: str,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    img_size: Size | None,
) -> TimmNetwork:
    """A live network, which is changed in place, with its card.

    prefix  what stands before its names where its gradients are
    """
    if next(filter(torch.is_floating_point, whole.parameters()), None) is None:
        raise UserError(
            f"{kind_of(whole)}: expected a network with parameters, got none. Give the network "
            "whose gradients were sent."
        )
    for parameter in whole.parameters():  # what a client froze is there, too
        parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
    for part in whole.modules():  # computed once: that changes no number, and hooks are gone later
        for name, value in vars(part).items():
            if value is True and CHECKPOINT in name:
                part.__dict__[name] = False
    for part in [*whole.modules()]:  # what torch.compile made of parts
        inner = {name: child._modules.get(COMPILED) for name, child in part.named_children()}
        part._modules.update({name: child for name, child in inner.items() if child is not None})
    # timm's, but for parts of block 0 that somebody replaced or patches that are embedded elsewhere
    of_timms = type(whole).__module__.startswith("timm.") and all(
        type(part).__module__.startswith(("timm.", "torch."))
        for part in next(iter(getattr(whole, "blocks", ())), nn.Identity()).modules()
    )
    undone = undo_normalisation(whole, img_size)
    if undone is not None:  # as (x - mean) / std is multiplied and added to
        times, plus = undone
        mean = tuple(m - s * p / t for m, s, p, t in zip(mean, std, plus, times, strict=False))
        mean = tuple(round(m, 7) for m in mean)
        std = tuple(float(f"{s / t:.7g}") for s, t in zip(std, times, strict=False))
    projection = getattr(getattr(whole, "patch_embed", None), "proj", None)
    of_timms &= getattr(projection, "kernel_size", None) == getattr(projection, "stride", 0)
    if not of_timms:
        embed_by_convolution(whole, img_size)
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    maps: set[str] = set()
    if not of_timms:
        maps = tables_by_rows(whole)
        call_attention(whole)
    net = whole if of_timms else Renamed(whole, img_size)
    stored = TimmNetwork(net)
    size, spread = img_size and height_width(img_size), None
    if size and size != stored.grid.pixels(stored.patch_size):
        spread = _at_size(stored, size)
    network = of_timm(net, mean=mean, std=std)
    renamed = {names[id(p)]: name for name, p in net.named_parameters() if id(p) in names}
    if spread is not None:
        values = torch.linalg.svdvals(spread)
        solvable = float(values[-1]) >= SOLVABLE * float(values[0])
        told = solvable and len(spread) <= spread.shape[1]
        network.resampled = torch.linalg.pinv(spread.mT) if told else spread[:0]
        renamed |= {name: TABLE for name in names.values() if name not in renamed}
    prefix = prefix.replace(f"{COMPILED}.", "")
    network.renamed = {f"{prefix}{name}": own for name, own in renamed.items()}
    network.maps = frozenset(f"{prefix}{name}" for name in maps)
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


def rebuilt_by_name(network: Network) -> bool:
    """Whether a file of the network's weights says all that it takes to build it again."""
    return not isinstance(getattr(network, "net", None), Renamed) and network.channels == 3


# a table that is stretched to the pictures --------------------------------------------------------


def _at_size(network: TimmNetwork, size: tuple[int, int]) -> Tensor:
    """Give a network, in place, the table that it uses for pictures of this size; returns M
    (N, rows), float64: what each stored row has part in."""
    net, patch, stored = network.net, network.patch_size, network.pos_embed
    kind, shown = kind_of(net), size_text(size)
    are_whole, blocks = not any(side % patch for side in size), getattr(net, "blocks", ())
    if stored is None or not are_whole or not len(blocks):
        raise UserError(
            f"{kind}: expected an img_size of whole patches of {patch} px, and a network of blocks "
            f"that stretches its table to it, got {shown} and {len(blocks)} blocks. Give the "
            "img_size that the network was made for, or none."
        )
    generator = torch_generator("a picture of another size")
    x = torch.randn(1, network.channels, *size, generator=generator)
    takes = f"that takes pictures of {shown} px, as one built with dynamic_img_size does"
    with torch.no_grad(), code_of(net, takes, "Leave img_size out."):
        expected = net(x.to(stored))
        spread = _stretched(network, x)
    rows = stored.detach().reshape(-1, stored.shape[-1])
    of_patches = network.rows_of_patches
    patches = (spread @ rows[of_patches].double()).to(rows)
    whole = torch.cat((rows[: of_patches.start], patches, rows[of_patches.stop :])).unsqueeze(0)
    if stored.ndim == 4:  # a grid
        whole = whole.unflatten(1, Grid.of(size, patch))
    table = nn.Parameter(whole)
    if (resize := getattr(net, "set_input_size", None)) is not None:
        resize(img_size=size)
    for part in net.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is stored or (name == "pos_embed" and part is net):
                part._parameters[name] = table
    for part in getattr(net, "rest", net).modules():
        names = [name for name, parameter in part.named_parameters() if parameter is table]
        if names and hasattr(part, STRETCHES):  # it takes any table for that of a square
            holder, _, own = names[0].rpartition(".")  # the part itself, or its nn.Embedding
            setattr(part, STRETCHES, partial(_table_itself, part.get_submodule(holder), own))
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


def _table_itself(part: nn.Module, name: str, *_: Any) -> Tensor:
    """What is partial to a part is copied with it; a lambda would keep the first one's."""
    return part._parameters[name]  # type: ignore[return-value]


def _stretched(network: TimmNetwork, x: Tensor) -> Tensor:
    """M (N, rows) at the size of a picture x.

    Every channel of the table is stretched alike, so one pass shows as many columns of M as the
    table is wide.
    """
    precise = copied(network.net).double()
    table, before = TimmNetwork(precise).pos_embed, getattr(precise, "norm_pre", None)
    plain = isinstance(before, nn.Identity | None)  # else a norm, which is not linear in the table
    first: Any = next(iter(precise.blocks.children())) if plain else before
    assert table is not None
    width, held = table.shape[-1], table.reshape(-1, table.shape[-1])[network.rows_of_patches]
    one, other = (input_of(precise, first, given)[0] for given in (x.double(), 0 * x.double()))
    of_patches = (one != other).any(-1)

    def seen(positions: Tensor) -> Tensor:
        """What stands at the patches (N, D) behind these rows of the table."""
        held.copy_(positions)
        return input_of(precise, first, x.double())[0][of_patches]

    nothing, columns = seen(torch.zeros_like(held)), []
    for some in torch.eye(len(held), dtype=torch.float64).split(width):
        padded = nn.functional.pad(some.mT, (0, width - len(some)))
        columns.append((seen(padded) - nothing)[:, : len(some)])
    return torch.cat(columns, 1)
