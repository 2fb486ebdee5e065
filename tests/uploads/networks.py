"""Networks that somebody wrote around torch's own layers, each another step of one ViT."""

from functools import partial
from typing import Any

import timm
import torch
from skimage import data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu

from mjp_privacy import attack_gradients
from mjp_privacy.core.schema import Size, height_width
from mjp_privacy.uploads.leak import Leak

DIM, PATCH = 96, 8


def photographs(count: int, size: Size = 32) -> Tensor:
    named = [data.astronaut(), data.coffee(), data.chelsea()][:count]
    height, width = height_width(size)
    cuts = [
        torch.from_numpy(one[100 : 100 + 4 * height : 4, 100 : 100 + 4 * width : 4])
        for one in named
    ]
    return torch.stack(cuts).permute(0, 3, 1, 2).double() / 255


STRETCHED = ("ViTModel", "SiglipVisionModel", "CLIPForImageClassification")
"""Of transformers, networks that take pictures of other sizes when they are told to."""


def outputs(network: nn.Module, x: Tensor) -> Any:
    """What a network of any library makes of pictures of any size."""
    told = {"interpolate_pos_encoding": True} if type(network).__name__ in STRETCHED else {}
    made = network(x, **told)
    if isinstance(made, Tensor):
        return made
    return made["logits"] if "logits" in made else made["pooler_output"]


def leak_of(network: nn.Module, images: Tensor, *, without: str = "\0", **given: Any) -> Leak:
    """What a gradient of these pictures (m, C, H, W), normalised by .5 and .5, gives away; that of
    parameters in whose name `without` stands is not sent."""
    network.double().eval()
    loss = cross_entropy(outputs(network, (images - 0.5) / 0.5), torch.arange(len(images)))
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    sent = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    used = {n: g for n, g in zip(named, sent, strict=True) if g is not None and without not in n}
    return attack_gradients(network, used, images=images, mean=0.5, std=0.5, **given)


class Own(nn.Module):
    """A ViT around torch's encoder, as tutorials have it, of which others replace a step."""

    def __init__(self, side: int = 32, channels: int = 3, *, sine: bool = False, **layer: Any):
        super().__init__()
        self.embed: Any = nn.Conv2d(channels, DIM, PATCH, PATCH)
        table = 0.1 * torch.randn(1, (side // PATCH) ** 2 + 1, DIM)
        self.pos_embed = nn.Parameter(table, requires_grad=not sine)
        self.cls = nn.Parameter(0.1 * torch.randn(1, 1, DIM))
        block = nn.TransformerEncoderLayer(DIM, 4, 3 * DIM, dropout=0, **layer)
        self.encoder: Any = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.first = bool(layer.get("batch_first"))
        self.head = nn.Linear(DIM, 10)

    def embedded(self, x: Tensor) -> Any:
        return self.embed(x).flatten(2).mT

    def with_class(self, z: Tensor) -> Tensor:
        return torch.cat((self.cls.expand(len(z), -1, -1), z), 1)

    def placed(self, z: Tensor) -> Any:
        return self.with_class(z) + self.pos_embed

    def encoded(self, z: Tensor) -> Any:
        return self.encoder(z) if self.first else self.encoder(z.transpose(0, 1)).transpose(0, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encoded(self.placed(self.embedded(x))).mean(1))


FIRST: dict[str, Any] = {"norm_first": True, "batch_first": True}
"""Of an encoder that normalises before its layers and takes pictures first."""


class Normed(Own):
    """What the first block is given is normalised before, with positions or without."""

    def __init__(self, with_positions: bool) -> None:
        super().__init__(**FIRST)
        self.with_positions, self.first_norm = with_positions, nn.LayerNorm(DIM)
        nn.init.normal_(self.first_norm.bias, std=0.1)

    def placed(self, z: Tensor) -> Any:
        if self.with_positions:
            return self.first_norm(super().placed(z))
        return super().placed(self.first_norm(z))


class Positions(Own):
    """Positions as a map that is added to the embedded picture, or as rows and columns; patches
    embedded by 1 × 1 behind a shuffle of pixels."""

    def __init__(self, kind: str, side: int = 32, name: str = "pos_map") -> None:
        super().__init__(**FIRST)
        del self.pos_embed
        self.kind, self.name, of = kind, name, side // PATCH
        if kind == "map":
            setattr(self, name, nn.Parameter(0.1 * torch.randn(1, DIM, of, of)))
        else:
            self.row_pos = nn.Parameter(0.1 * torch.randn(of, 1, DIM))
            self.column_pos = nn.Parameter(0.1 * torch.randn(of, DIM))
        if kind == "shuffled":
            self.embed = nn.Sequential(nn.PixelUnshuffle(PATCH), nn.Conv2d(3 * PATCH**2, DIM, 1))

    def embedded(self, x: Tensor) -> Any:
        if self.kind == "map":
            return (self.embed(x) + getattr(self, self.name)).flatten(2).mT
        table = (self.row_pos + self.column_pos).permute(2, 0, 1)
        return (self.embed(x) + table).flatten(2).mT

    def placed(self, z: Tensor) -> Any:
        return z


class Placed(Own):
    """With a table, in place of `pos_embed`, that has another name and rows for every token; the
    class token stands behind the patches where it is `last`."""

    def __init__(self, name: str, *, last: bool = False) -> None:
        super().__init__(**FIRST)
        del self.pos_embed
        rows = 0.1 * torch.randn((32 // PATCH) ** 2 + 1, DIM)
        self.name, self.last = name, last
        embedding = nn.Embedding.from_pretrained(rows, freeze=False)
        setattr(self, name, embedding if name == "table" else nn.Parameter(rows[None]))
        self.queries = nn.Parameter(torch.randn(1, len(rows), DIM))

    def placed(self, z: Tensor) -> Any:
        table: Any = getattr(self, self.name)
        table = table(torch.arange(z.shape[1] + 1)) if self.name == "table" else table
        cls = self.cls.expand(len(z), -1, -1)
        return torch.cat((z, cls) if self.last else (cls, z), 1) + table


class Rectangle(Own):
    """An encoder around pictures of 6 × 4 patches, whose table shows no more than their number."""

    def __init__(self) -> None:
        super().__init__(**FIRST)
        table = 0.1 * torch.randn(1, 25, DIM)
        self.pos_embed = nn.Parameter(table)


class Flattened(Own):
    """That embeds flattened patches, colours last, by a linear layer."""

    def __init__(self, *before: nn.Module) -> None:
        super().__init__(**FIRST)
        self.embed = nn.Sequential(*before, nn.Linear(3 * PATCH**2, DIM))

    def embedded(self, x: Tensor) -> Any:
        tiles = x.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
        return self.embed(tiles.permute(0, 2, 4, 3, 5, 1).flatten(3)).flatten(1, 2)


# without attention --------------------------------------------------------------------------------


class Convolved(nn.Module):
    """That adds positions in place, calls its parts by keywords and returns a dictionary; `head` is
    another layer than the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.pos = nn.Parameter(torch.randn(1, 16, DIM) * 0.02)
        self.keys = nn.ModuleList(timm.layers.Mlp(DIM, 2 * DIM) for _ in range(2))
        self.head, self.to_classes = nn.Linear(DIM, 64), nn.Linear(64, 10)

    def patches(self, x: Tensor) -> Any:
        return self.embed(input=x).flatten(2).mT

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        tokens = self.patches(x)
        tokens += self.pos
        for block in self.keys:
            tokens = tokens + block(x=tokens)
        features = self.head(tokens.mean(1))
        return {"logits": self.to_classes(features), "features": features}


class Decoding(Convolved):
    """Whose decoder has a table of positions, too."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder_pos = nn.Parameter(torch.randn(1, 16, DIM) * 0.02)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = super().forward(x)["features"] + self.head(self.decoder_pos.mean(1))
        return {"logits": self.to_classes(features)}


# blocks of one's own ------------------------------------------------------------------------------


def turned_by_place(q: Tensor) -> Tensor:
    """Queries or keys (B, heads, N, d), each pair of numbers turned by an angle of its place."""
    places = torch.arange(q.shape[-2]).to(q)
    angles = places[:, None] / torch.arange(1, q.shape[-1] // 2 + 1).to(q)
    pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


class Block(nn.Module):
    """A block in which everything is called by hand.

    order  of qkv's outputs, or its layers; `two` are queries, and keys with values head by head
    gate   of what the second branch is made
    beside  both branches beside each other, behind one norm or one each
    scales  whether attention (a) and the other branch (b) have a layer scale, of so many numbers
    turned  whether queries and keys are turned by their places
    """

    def __init__(
        self,
        order: str = "three",
        norm: Any = nn.LayerNorm,
        gate: str = "",
        bias: bool = True,
        beside: int = 0,
        scales: str = "",
        numbers: int = DIM,
        turned: bool = False,
    ) -> None:
        super().__init__()
        self.order, self.heads, self.gate, self.beside = order, 4, gate, beside
        self.turned = turned
        outputs = {"three": [DIM] * 3, "two": [DIM, 2 * DIM]}.get(order, [3 * DIM])
        self.layers = nn.ModuleList(nn.Linear(DIM, width) for width in outputs)
        self.out, self.ln1 = nn.Linear(DIM, DIM), norm(DIM)
        self.ln2: Any = None if beside == 1 else norm(DIM)
        self.up = nn.Linear(DIM, (6 if gate == "halves" else 3) * DIM, bias)
        self.down = nn.Linear(3 * DIM, DIM, bias)
        if gate == "module":
            self.mlp = Gated(bias)
        elif gate == "two":
            self.gating = nn.Linear(DIM, 3 * DIM, bias)
        of_branch = {which: nn.Parameter(torch.rand(numbers) * 0.7 + 0.3) for which in scales}
        self.g: Any = of_branch.get("a")
        self.weights_of: Any = of_branch.get("b")

    def branch(self, u: Tensor) -> Any:
        if self.gate == "module":
            return self.mlp(u)
        if self.gate == "two":
            return self.down(silu(self.up(u)) * self.gating(u))
        if self.gate == "halves":
            one, other = self.up(u).chunk(2, -1)
            return self.down(one * gelu(other))
        return self.down(silu(self.up(u)))

    def attend(self, y: Tensor) -> Any:
        split = torch.cat([layer(y) for layer in self.layers], -1)
        each = DIM // self.heads
        if self.order == "head, value, kind":
            q, k, v = split.unflatten(-1, (self.heads, each, 3)).transpose(1, 2).unbind(-1)
        elif self.order == "two":
            q, both = split.split((DIM, 2 * DIM), -1)
            q = q.unflatten(-1, (self.heads, each)).transpose(1, 2)
            k, v = both.unflatten(-1, (self.heads, 2, each)).transpose(1, 2).unbind(-2)
        elif self.order == "head, kind, value":
            q, k, v = split.unflatten(-1, (self.heads, 3, each)).transpose(1, 2).unbind(-2)
        else:
            q, k, v = split.unflatten(-1, (3, self.heads, each)).transpose(1, 3).unbind(2)
        if self.turned:
            q, k = turned_by_place(q), turned_by_place(k)
        late = self.order == "head, value, kind"  # as a well-known tutorial scales them
        weights = (q @ k.mT).softmax(-1) / DIM**0.5 if late else (q @ k.mT / each**0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, z: Tensor) -> Any:
        y = self.ln1(z)
        attended = self.attend(y) if self.g is None else self.g * self.attend(y)
        if self.beside == 0:
            z, attended = z + attended, 0
        branch = self.branch(y if self.beside == 1 else self.ln2(z))
        branch = branch if self.weights_of is None else self.weights_of * branch
        return z + attended + branch, y


class Gated(nn.Module):
    """Two layers that gate each other, as language models have them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(DIM, 3 * DIM, bias) for _ in range(2))
        self.down_proj = nn.Linear(3 * DIM, DIM, bias)

    def forward(self, u: Tensor) -> Any:
        return self.down_proj(silu(self.gate_proj(u)) * self.up_proj(u))


class RootMeanSquare(nn.Module):
    """An RMSNorm as somebody writes it, whose weight is less by 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.g) * nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5


class Attention(nn.Module):
    """Under timm's names, but for the order of its one layer's outputs; tokens that `bias` (N, N)
    sets far below 0 are not seen."""

    def __init__(self, order: str = "", bias: Tensor | None = None) -> None:
        super().__init__()
        self.qkv, self.proj, self.order = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), order
        self.num_heads = 4
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor, **_: object) -> Any:
        made = self.qkv(x)
        if self.order == "by heads":
            q, k, v = made.unflatten(-1, (4, 3, -1)).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = made.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.order == "values first":
            q, k, v = k, v, q
        mixed = scaled_dot_product_attention(q, k, v, self.bias)
        return self.proj(mixed.transpose(1, 2).flatten(2))


def attending(attention: Any, **options: Any) -> Any:
    """timm's ViT of 4 × 4 patches without a class token, whose blocks attend so."""
    sizes = {"img_size": 32, "patch_size": PATCH, "embed_dim": DIM, "depth": 2, "num_heads": 4}
    pooled = {"num_classes": 10, "class_token": False, "global_pool": "avg"}
    network: Any = timm.models.VisionTransformer(**sizes, **pooled, **options)
    for block in network.blocks:
        block.attn = attention()
        for matrix in (p for p in block.parameters() if p.ndim == 2):
            nn.init.normal_(matrix, std=0.1)
    return network


class ByHand(Own):
    """A ViT around blocks of one's own, with a fixed table of positions that is no parameter."""

    def __init__(self, block: Any = Block, holder: str = "list") -> None:
        super().__init__()
        table = self.pos_embed.detach()
        del self.pos_embed, self.encoder
        self.register_buffer("pos_embed", table)
        blocks, self.holder = [block() for _ in range(2)], holder
        if holder == "attributes":
            self.one, self.two = blocks
        elif holder == "dictionary":
            self.named = nn.ModuleDict({"one": blocks[0], "two": blocks[1]})
        else:
            self.blocks = nn.ModuleList(blocks)

    def encoded(self, z: Tensor) -> Any:
        blocks: Any = {
            "attributes": lambda: (self.one, self.two),
            "dictionary": lambda: self.named.values(),
            "list": lambda: self.blocks,
        }[self.holder]()
        for block in blocks:
            z, _ = block(z)
        return z


class Pooled(ByHand):
    """Without a class token, whose gradients in such blocks are those of all pictures together."""

    def placed(self, z: Tensor) -> Any:
        return z + self.pos_embed[:, 1:]


class WithoutTable(ByHand):
    """Its blocks alone know of places."""

    def placed(self, z: Tensor) -> Any:
        return z


class Doubling(ByHand):
    """With a learned table of positions that is doubled before it is added."""

    def __init__(self) -> None:
        super().__init__()
        table = self.pos_embed
        del self.pos_embed
        self.pos_embed = nn.Parameter(table)

    def placed(self, z: Tensor) -> Any:
        return z + 2 * self.pos_embed[:, 1:]


class Neck(ByHand):
    """With patches that are embedded wide and then narrowed, before block 0 is given them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.neck = nn.Conv2d(3, 2 * DIM, PATCH, PATCH), nn.Linear(2 * DIM, DIM)

    def embedded(self, x: Tensor) -> Any:
        return self.neck(super().embedded(x))


def hands(holder: str = "list", network: Any = ByHand, **block: Any) -> Any:
    """How to make a network by hand around two blocks with these options."""
    return lambda: network(partial(Block, **block), holder)
