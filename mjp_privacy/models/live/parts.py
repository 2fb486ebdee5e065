"""A live network under timm's names of its parts, found by shapes and by what runs after what.

    network = Renamed(transformers.DINOv3ViTModel(…), img_size=224)
    network.blocks[0].mlp.fc1  # by timm's name, whatever transformers calls it

What no hook or convolution shows is put, in place, into another form that computes the same: a
linear layer of flattened patches, torch's own attention, a table that is a map. Whether a part is
what it seems, equations say that are tried on every network (`timm_networks.check_equation`,
`attacks.equations.block.equations_hold`).
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import Size
from mjp_privacy.models.jigsaw import Grid, to_patches
from mjp_privacy.models.live.blocks import Pair, find_scales, named_block
from mjp_privacy.models.network_parts import (
    CHANNELS,
    MANY_OTHERS,
    NORMALISES,
    SAME_PICTURE,
    Positions,
    Ran,
    answer_of,
    answers_in,
    convolution_of,
    embeds,
    kind_of,
    likely_grids,
    named_tables,
    other_size,
    picture_layer,
    picture_of,
    positions_of,
    run_of,
)
from mjp_privacy.models.vit import copied, input_of, token_norm

CLASSIFIERS = (
    *("classifier", "head", "fc", "logits", "classification_head", "cls_head"),
    "cls_classifier",  # beside a teacher's
)
"""What networks call the linear layer that gives the classes."""
NEAR = 1e-4  # up to which embedded patches are the same
STRETCHES = "interpolate_pos_encoding"
"""With which transformers' networks are told to take pictures of other sizes than their own."""


class Renamed(nn.Module):
    """A network under timm's names of its parts: pos_embed, patch_embed.proj, blocks, head, and of
    block 0 attn.proj, norm2, mlp.fc1 and mlp.fc2. Its other parameters are behind `others`.

    It stands around the network and shares its parameters; no module of it has two names, which
    torch's `functional_call` would mix up.

    img_size  of the client's pictures, for a network whose table of positions does not show it
    """

    rest: nn.Module
    other_size: tuple[int, int] | None = None
    """Of pictures of as many patches that the network takes as well, where nothing shows theirs
    and they are taken for squares."""

    def __init__(self, module: nn.Module, img_size: Size | None = None) -> None:
        super().__init__()
        projection = convolution_of(module)
        if projection is None:
            got = picture_layer(module) or f"none with img_size={img_size}"
            raise UserError(
                f"{kind_of(module)}: expected square patches of pictures of 3 channels, or 1, that "
                f"one linear layer or one convolution embeds whole, without overlap or gaps, got "
                f"{got}: the attacks read that layer's gradient. Give another network, or "
                "img_size=… where a linear layer embeds them."
            )
        positions = positions_of(module, projection, img_size)
        grid, table = positions.grid, positions.table
        if table is not None and getattr(projection, "norm", None) is None:
            self.pos_embed = table  # else its gradient is not the embedded patches'
        self.patch_embed = nn.Module()
        self.patch_embed.proj = projection
        tell_size(self.patch_embed, grid, int(projection.kernel_size[0]))
        self.num_prefix_tokens = 0 if table is None else table[..., 0].numel() - grid.patches
        self.rows_before = positions.before
        taken = [inspect.signature(part.forward).parameters for part in module.modules()]
        hands_on = any(one.kind is one.VAR_KEYWORD for one in taken[0].values())
        is_told = img_size and any(STRETCHES in one for one in (taken if hands_on else taken[:1]))
        self.options = {STRETCHES: True} if is_told else {}
        self.__dict__["rest"] = module
        picture = picture_of(projection, grid)
        run = run_of(module, picture, options=self.options)
        if not positions.is_shown and run and run[-1].part is module:
            self.other_size = other_size(module, grid, projection)
        blocks = _blocks(module, run, projection)
        of_patches, of_sums = _norms_before(blocks, run, picture, projection, positions)
        if of_patches is not None:
            self.patch_embed.norm = of_patches
        elif of_sums is not None:
            self.norm_pre = of_sums
        self.head = _classifier(module, blocks, run)
        self.num_classes = getattr(self.head, "out_features", 0)
        for part in {*blocks.modules()} & {ran.part for ran in run if ran.tokens_first}:
            part.__dict__["tokens_first"] = True
        if block := next(iter(blocks.children()), None):
            named = named_block(block, run)
            if named is not None:
                find_scales(block, named, partial(run_of, module, picture, options=self.options))
                blocks = nn.ModuleList([named, *[*blocks.children()][1:]])
        self.blocks = blocks
        self.others = nn.ModuleDict()
        here = {id(part._parameters) for part in self.modules()}
        for name, part in module.named_modules():
            if id(part._parameters) not in here and (part._parameters or part._buffers):
                holder = nn.Module()
                holder._parameters, holder._buffers = part._parameters, part._buffers
                self.others[f"{len(self.others)}_{name.replace('.', '_')}"] = holder

    def train(self, mode: bool = True) -> Renamed:
        """The mode of the network around and inside."""
        super().train(mode)
        self.rest.train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Normalised pictures (B, C, H, W) -> what the network says of them."""
        return answer_of(self.rest(x, **self.options))

    forward_features = forward


def tell_size(patch_embed: Any, grid: Grid, patch: int) -> None:
    """Write onto a patch embedding, as timm's have it, for which pictures it is."""
    patch_embed.img_size = grid.pixels(patch)
    patch_embed.num_patches = grid.patches


def _blocks(module: nn.Module, run: list[Ran], projection: nn.Module) -> nn.Module:
    """The largest stack of layers of one kind, or of pairs of layers, that are run as such and
    embed no patches; an empty one where there is none."""
    have_run, stacks = {id(ran.part) for ran in run}, list[nn.Module]([nn.ModuleList()])
    for part in module.modules():
        children = [*part.children()]
        one_kind = len({type(child) for child in children}) == 1
        if not isinstance(part, nn.ModuleList | nn.Sequential | nn.ModuleDict) or not one_kind:
            continue
        if projection in part.modules():
            continue
        if all(id(child) in have_run for child in children):
            stacks.append(part)
        pairs = [[*child.children()] for child in children if isinstance(child, nn.ModuleList)]
        if pairs and all(len(pair) == 2 and id(pair[1]) in have_run for pair in pairs):
            stacks.append(nn.ModuleList(Pair(*pair) for pair in pairs))
    if not any(_holds_norm(stack) for stack in stacks):  # blocks may be attributes
        for part in module.modules():
            kinds: dict[type, list[nn.Module]] = {}
            for child in part.children():
                if id(child) in have_run and _holds_norm(child):
                    kinds.setdefault(type(child), []).append(child)
            stacks += [nn.ModuleList(kind) for kind in kinds.values() if len(kind) > 1]
    return max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))


def _holds_norm(part: nn.Module) -> bool:
    return any(token_norm(inner) for inner in part.modules() if inner is not part)


def _classifier(module: nn.Module, blocks: nn.Module, run: list[Ran]) -> nn.Module:
    """The linear layer that gives the classes: the network returns its output as it is, or it has
    the name of one and as many outputs; nothing's where there is none."""
    ended = run[-1].output if run and run[-1].part is module else None
    logits = next(answers_in(ended), None)
    for ran in run:
        if logits is not None and ran.output is logits and isinstance(ran.part, nn.Linear):
            return ran.part
    inner = {id(part) for part in blocks.modules()}
    for name, part in module.named_modules():
        is_named_so = name.rpartition(".")[2] in CLASSIFIERS and id(part) not in inner
        outputs = part.out_features if isinstance(part, nn.Linear) else 0
        if is_named_so and outputs and (logits is None or outputs == logits.shape[-1]):
            return part
    return nn.Identity()


def _norms_before(
    blocks: nn.Module,
    run: list[Ran],
    picture: Tensor,
    projection: nn.Conv2d,
    positions: Positions,
) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms before the blocks that are given embedded patches, perhaps among other tokens: as
    they are, and with their rows of a table added; None where none is."""
    side, weight = int(projection.kernel_size[0]), projection.weight.detach()
    patches = to_patches(picture[0], side)
    if isinstance(projection, FlattenedPatches) and projection.norm is not None:
        back = projection.order.argsort()
        patches = projection.norm(patches[:, projection.order]).detach()[:, back]
    patches = patches @ weight.flatten(1).mT
    if projection.bias is not None:
        patches = patches + projection.bias.detach()
    inner, count = {*blocks.modules()}, len(patches)

    def given(expected: Tensor) -> nn.Module | None:
        for part, tokens, *_ in run if len(inner) > 1 else ():
            if not isinstance(tokens, Tensor) or tokens.shape[-1:] != expected.shape[-1:]:
                continue
            rows = tokens.reshape(-1, tokens.shape[-1])
            starts = range(min(len(rows) - count, MANY_OTHERS) + 1)
            is_there = any(
                torch.allclose(rows[start : start + count], expected, rtol=0, atol=NEAR)
                for start in starts
            )
            if is_there and part not in inner and token_norm(part):
                return part
        return None

    if positions.table is None:
        return given(patches), None
    rows = positions.table.detach().reshape(-1, patches.shape[1])
    return given(patches), given(patches + rows[positions.before :][:count])


# pictures that a network normalises itself --------------------------------------------------------


DRAWS = 8
"""Times that a network in training is asked: what it changes at random it must leave alone."""


def undo_normalisation(whole: nn.Module, img_size: Size | None) -> tuple[list[float], ...] | None:
    """Let a network that normalises pictures itself be given them normalised, in place; by what it
    multiplies each channel, and what it adds. None where it does not, or changes them otherwise,
    as by what it sees of each picture, or only of those that it is trained with."""
    projection = convolution_of(whole)
    if projection is None:
        return None
    patch, width = int(projection.kernel_size[0]), projection.out_channels
    for grid in likely_grids(whole, width, patch, img_size):
        x = picture_of(projection, grid)
        given = [x, 3 * x + 1, x.sigmoid(), 255 * x.sigmoid()]  # what one looks at may decide
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                seen = [input_of(whole, projection, one) for one in given]
                if torch.equal(seen[0], x):
                    continue
                trained = copied(whole).train()
                for seed in range(DRAWS):
                    torch.manual_seed(seed)
                    seen.append(input_of(trained, convolution_of(trained) or trained, x))
        except Exception:  # of a size that it does not take
            continue
        if any(one.shape != x.shape for one in seen):
            continue
        centre, level = (one.mean((2, 3), keepdim=True) for one in (x, seen[0]))
        times = ((x - centre) * seen[0]).mean((2, 3), keepdim=True) / x.var((2, 3), False, True)
        plus = level - times * centre
        off = max(
            float((one - times * fed - plus).norm() / one.norm())
            for one, fed in zip(seen, [*given, *DRAWS * [x]], strict=True)
        )
        if bool((times > 0).all()) and off <= SAME_PICTURE:
            whole.register_forward_pre_hook(partial(_undone, times, plus))
            whole.__dict__[NORMALISES] = True
            return times.flatten().tolist(), plus.flatten().tolist()
    return None


def _undone(times: Tensor, plus: Tensor, whole: nn.Module, given: tuple[Any, ...]) -> Any:
    """What a network is given in place of a picture that is normalised already."""
    x, *rest = given
    return (x - plus.to(x)) / times.to(x), *rest


# patches that a linear layer embeds ---------------------------------------------------------------


class FlattenedPatches(nn.Conv2d):
    """A linear layer of flattened patches, or a convolution of maps of them, with its weights as
    those of the convolution of pictures that computes the same."""

    order: Tensor
    """(C p²,) which of the convolution's inputs each of the layer's is."""
    norm: nn.LayerNorm | None = None
    """The norm of each patch before it is embedded."""
    of_maps: bool = False
    """Whether it is given maps (B, C p², H, W), as behind `nn.PixelUnshuffle`."""

    @classmethod
    def of(cls, layer: nn.Linear | nn.Conv2d, order: Tensor) -> FlattenedPatches:
        """The convolution that computes what this layer does."""
        channels, patch = _of_patches(len(order)) or (0, 0)
        one = cls(channels, len(layer.weight), patch, patch, bias=layer.bias is not None)
        one.__dict__["order"], one.bias = order, layer.bias
        one.__dict__["of_maps"] = isinstance(layer, nn.Conv2d)
        one.weight = nn.Parameter(one.placed(layer.weight.detach()))
        return one

    def placed(self, weight: Tensor) -> Tensor:
        """Numbers of the layer's weight (..., D, C p²), as the convolution's has them."""
        weight = weight.flatten(-3) if self.of_maps else weight
        return weight[..., self.order.argsort()].unflatten(-1, self.weight.shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Flattened patches (..., C p²) -> their embeddings (..., D); of maps the channels are."""
        x = x.movedim(-3, -1) if self.of_maps else x
        embedded = nn.functional.linear(x, self.weight.flatten(1)[:, self.order], self.bias)
        return embedded.movedim(-1, -3) if self.of_maps else embedded


def _of_patches(numbers: int) -> tuple[int, int] | None:
    """The channels and the side of flattened square patches of so many numbers; None: of none.

    _of_patches(768) is (3, 16), _of_patches(256) is (1, 16)
    """
    sides = {channels: math.isqrt(numbers // channels) for channels in CHANNELS}
    whole = [(c, side) for c, side in sides.items() if c * side**2 == numbers and side > 1]
    return next(iter(whole), None)


def embed_by_convolution(whole: nn.Module, img_size: Size | None) -> None:
    """Put, in place, a convolution where a linear layer embeds flattened patches, or one of 1 × 1
    maps of them. A picture whose numbers are all different shows which of them the layer is given,
    in which order."""
    if convolution_of(whole) is not None:
        return
    for name, layer in whole.named_modules():
        if not embeds(layer) or (shape := _of_patches(layer.weight[0].numel())) is None:
            continue
        channels, patch = shape
        for grid in likely_grids(whole, len(layer.weight), patch, img_size):
            height, width = grid.pixels(patch)
            x = torch.arange(channels * height * width).view(1, channels, height, width)
            x = x.to(layer.weight)
            run = run_of(whole, x)
            at = next((at for at, ran in enumerate(run) if embeds(ran.part)), None)
            if at is not None and run[at].part is layer:
                break
        else:
            continue
        first, norms = run[at], [ran for ran in run if isinstance(ran.part, nn.LayerNorm)]
        before = next((norm for norm in norms if norm.output is first.given), None)
        patches, given = to_patches(x[0], patch), (before or first).given
        given = given.movedim(-3, -1) if isinstance(layer, nn.Conv2d) else given
        given = given.reshape(-1, patches.shape[1])
        if given.shape != patches.shape:
            continue
        order = torch.searchsorted(patches[0].contiguous(), given[0].contiguous())
        in_order = patches[:, order.clamp(max=len(order) - 1)]
        if not torch.equal(in_order, given):
            raise UserError(
                f"{kind_of(whole)}: expected {name} to be given the picture's own numbers, patch "
                "by patch and row by row, got others, or another order. Give the part of the "
                "network behind what changes them."
            )
        inner, _, own = name.rpartition(".")
        convolution = FlattenedPatches.of(layer, order)
        convolution.__dict__["norm"] = before and before.part
        setattr(whole.get_submodule(inner), own, convolution)
        return


# tables that are maps -----------------------------------------------------------------------------


class ChannelsLast(nn.Module):
    """Shows a table (1, H, W, D) as the map (1, D, H, W) that a network adds to its own."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows.movedim(-1, 1)

    def right_inverse(self, table: Tensor) -> Tensor:
        """The table as it is kept."""
        return table.movedim(1, -1).contiguous()


def tables_by_rows(whole: nn.Module) -> set[str]:
    """Keep, in place, tables of positions that are maps (1, D, H, W) as (1, H, W, D); the names of
    these parameters, whose values stand elsewhere now."""
    projection, names = convolution_of(whole), set[str]()
    if projection is None or named_tables(whole, projection.out_channels):
        return names
    for name, parameter in list(whole.named_parameters()):
        inner, _, own = name.rpartition(".")
        holder = whole.get_submodule(inner)
        is_map = parameter.ndim == 4 and parameter.shape[:2] == (1, projection.out_channels)
        if is_map and parameter[0, 0].numel() > 1 and not isinstance(holder, nn.Conv2d):
            parametrize.register_parametrization(holder, own, ChannelsLast())
            names.add(name)
    return names


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
