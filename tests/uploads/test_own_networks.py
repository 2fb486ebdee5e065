"""Uploads of networks that somebody wrote around torch's own layers, and of grey pictures."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from skimage import data
from torch import Tensor, nn

from attacks.prior.files import find_prior
from mjp_privacy import attack_gradients
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.live.parts import CalledAttention
from mjp_privacy.uploads.leak import Leak

DIM, PATCH = 96, 8


class Own(nn.Module):
    """A ViT around torch's encoder, as tutorials have it."""

    def __init__(self, side: int = 32, channels: int = 3, *, sine: bool = False, **layer: Any):
        super().__init__()
        self.embed = nn.Conv2d(channels, DIM, PATCH, PATCH)
        table = 0.1 * torch.randn(1, (side // PATCH) ** 2 + 1, DIM)
        self.pos_embed = nn.Parameter(table, requires_grad=not sine)
        self.cls = nn.Parameter(0.1 * torch.randn(1, 1, DIM))
        block = nn.TransformerEncoderLayer(DIM, 4, 3 * DIM, dropout=0, **layer)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.first = bool(layer.get("batch_first"))
        self.head = nn.Linear(DIM, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x).flatten(2).mT
        z = torch.cat((self.cls.expand(len(z), -1, -1), z), 1) + self.pos_embed
        z = self.encoder(z) if self.first else self.encoder(z.transpose(0, 1)).transpose(0, 1)
        return self.head(z.mean(1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block in which everything is called by hand; `order` is that of qkv's outputs, `gate` says
    of what the second branch is made."""

    def __init__(
        self, order: str = "three", norm: Any = nn.LayerNorm, gate: str = "", bias: bool = True
    ) -> None:
        super().__init__()
        self.order, self.heads, self.gate = order, 4, gate
        outputs = [3 * DIM] if order != "three" else [DIM] * 3
        self.layers = nn.ModuleList(nn.Linear(DIM, width) for width in outputs)
        self.out, self.ln1, self.ln2 = nn.Linear(DIM, DIM), norm(DIM), norm(DIM)
        self.up = nn.Linear(DIM, (6 if gate == "halves" else 3) * DIM, bias)
        self.down = nn.Linear(3 * DIM, DIM, bias)
        if gate == "module":
            self.mlp = Gated(bias)
        elif gate == "two":
            self.beside = nn.Linear(DIM, 3 * DIM, bias)

    def branch(self, u: Tensor) -> Tensor:
        if self.gate == "module":
            return self.mlp(u)  # type: ignore[no-any-return]
        if self.gate == "two":
            return self.down(nn.functional.silu(self.up(u)) * self.beside(u))
        if self.gate == "halves":
            one, other = self.up(u).chunk(2, -1)
            return self.down(one * nn.functional.gelu(other))
        return self.down(nn.functional.silu(self.up(u)))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y = self.ln1(z)
        split = torch.cat([layer(y) for layer in self.layers], -1)
        each = DIM // self.heads
        if self.order == "head, value, kind":
            q, k, v = split.unflatten(-1, (self.heads, each, 3)).transpose(1, 2).unbind(-1)
        elif self.order == "head, kind, value":
            q, k, v = split.unflatten(-1, (self.heads, 3, each)).transpose(1, 2).unbind(-2)
        else:
            q, k, v = split.unflatten(-1, (3, self.heads, each)).transpose(1, 3).unbind(2)
        late = self.order == "head, value, kind"  # as a well-known tutorial scales them
        weights = (q @ k.mT).softmax(-1) / DIM**0.5 if late else (q @ k.mT / each**0.5).softmax(-1)
        z = z + self.out((weights @ v).transpose(1, 2).flatten(2))
        return z + self.branch(self.ln2(z)), weights


class Gated(nn.Module):
    """Two layers that gate each other, as language models have them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(DIM, 3 * DIM, bias) for _ in range(2))
        self.down_proj = nn.Linear(3 * DIM, DIM, bias)

    def forward(self, u: Tensor) -> Tensor:
        gated = nn.functional.silu(self.gate_proj(u)) * self.up_proj(u)
        return self.down_proj(gated)  # type: ignore[no-any-return]


class RootMeanSquare(nn.Module):
    """An RMSNorm as somebody writes it, whose weight is less by 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.g) * nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5


class ByHand(Own):
    """The same around blocks of one's own, with a fixed table of positions that is no parameter."""

    def __init__(self, order: str, holder: str, **block: Any) -> None:
        super().__init__()
        table = self.pos_embed.detach()
        del self.pos_embed, self.encoder
        self.register_buffer("pos_embed", table)
        blocks, self.holder = [Block(order, **block) for _ in range(2)], holder
        if holder == "attributes":
            self.one, self.two = blocks
        elif holder == "dictionary":
            self.named = nn.ModuleDict({"one": blocks[0], "two": blocks[1]})
        else:
            self.blocks = nn.ModuleList(blocks)

    def encoder(self, z: Tensor) -> Tensor:
        z = z.transpose(0, 1)
        blocks: Any = {
            "attributes": lambda: (self.one, self.two),
            "dictionary": lambda: self.named.values(),
            "list": lambda: self.blocks,
        }[self.holder]()
        for block in blocks:
            z, _ = block(z)
        return z.transpose(0, 1)


class Positions(Own):
    """Positions as a map that is added to the embedded picture, or as rows and columns; patches
    embedded by 1 × 1 behind a shuffle of pixels."""

    def __init__(self, kind: str, side: int = 32) -> None:
        super().__init__(norm_first=True, batch_first=True)
        del self.pos_embed
        self.kind, of = kind, side // PATCH
        if kind == "map":
            self.pos_map = nn.Parameter(0.1 * torch.randn(1, DIM, of, of))
        else:
            self.row_pos = nn.Parameter(0.1 * torch.randn(of, 1, DIM))
            self.column_pos = nn.Parameter(0.1 * torch.randn(of, DIM))
        if kind == "shuffled":
            self.embed = nn.Sequential(nn.PixelUnshuffle(PATCH), nn.Conv2d(3 * PATCH**2, DIM, 1))

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        if self.kind == "map":
            z = z + self.pos_map
        else:
            z = z + (self.row_pos + self.column_pos).permute(2, 0, 1)
        return self.head(self.encoder(z.flatten(2).mT).mean(1))  # type: ignore[no-any-return]


def photographs(count: int, side: int = 32) -> Tensor:
    named = [data.astronaut(), data.coffee(), data.chelsea()][:count]
    cuts = [
        torch.from_numpy(one[100 : 100 + 4 * side : 4, 100 : 100 + 4 * side : 4]) for one in named
    ]
    return torch.stack(cuts).permute(0, 3, 1, 2).double() / 255


def leak_of(network: nn.Module, images: Tensor, **given: Any) -> Leak:
    """What a gradient of these pictures (m, C, H, W), normalised by .5 and .5, gives away."""
    network.double().eval()
    loss = nn.functional.cross_entropy(network((images - 0.5) / 0.5), torch.arange(len(images)))
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    sent = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    used = {name: g for name, g in zip(named, sent, strict=True) if g is not None}
    return attack_gradients(network, used, images=images, mean=0.5, std=0.5, **given)


@pytest.mark.parametrize(
    "layer",
    [
        {"norm_first": True, "batch_first": True, "activation": "gelu"},
        {"norm_first": True},
        {"batch_first": True},
        {"activation": nn.functional.silu},
    ],
    ids=["before", "before, tokens first", "of sums", "of sums, tokens first"],
)
def test_torchs_encoder_layers_are_read_wherever_they_normalise(layer: dict[str, Any]) -> None:
    """A batch of two, and a table whose gradient is not sent: what no patch equation tells."""
    torch.manual_seed(0)
    batch = leak_of(Own(**layer), photographs(2), attacks="token_peeling", batch=2)
    assert batch.best.exact == 2
    assert batch.best.verified >= 1  # where tokens hardly see each other, mixtures would pass, too
    single = leak_of(Own(sine=True, **layer), photographs(1), attacks="token_peeling")
    assert (single.best.exact, single.best.verified) == (1, 1)


class Normed(Own):
    """What the first block is given is normalised before, with positions or without."""

    def __init__(self, with_positions: bool) -> None:
        super().__init__(norm_first=True, batch_first=True)
        self.with_positions, self.first_norm = with_positions, nn.LayerNorm(DIM)
        nn.init.normal_(self.first_norm.bias, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x).flatten(2).mT
        z = z if self.with_positions else self.first_norm(z)
        z = torch.cat((self.cls.expand(len(z), -1, -1), z), 1) + self.pos_embed
        z = self.first_norm(z) if self.with_positions else z
        return self.head(self.encoder(z).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["map", "rows and columns", "shuffled"])
def test_positions_may_be_a_map_or_rows_and_columns(kind: str) -> None:
    torch.manual_seed(0)
    size = 32 if kind == "shuffled" else None
    single = leak_of(Positions(kind), photographs(1), img_size=size)
    assert (single.best.exact, single.best.verified) == (1, 1)
    attack = "patch_gradient" if kind == "map" else "token_peeling"  # a map is each patch's own
    assert single.best.attack == attack
    batch = leak_of(
        Positions(kind), photographs(2), batch=2, attacks="token_peeling", img_size=size
    )
    assert batch.best.exact == 2


def test_a_map_of_positions_may_be_as_large_as_a_patch() -> None:
    torch.manual_seed(0)
    found = leak_of(Positions("map", 64), photographs(1, 64), attacks="patch_gradient")
    assert (found.best.exact, found.best.verified) == (1, 1)


class Beside(Block):
    """Attention and the two layers beside each other, behind one norm or one each."""

    def __init__(self, norms: int) -> None:
        super().__init__()
        self.norms = norms
        if norms == 1:
            del self.ln2

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y = self.ln1(z)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in self.layers)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return z + self.out(mixed) + self.branch(y if self.norms == 1 else self.ln2(z)), y


class Pooled(ByHand):
    """Without a class token, whose gradients in such blocks are those of all pictures together."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x).flatten(2).mT + self.pos_embed[:, 1:]
        return self.head(self.encoder(z.transpose(0, 1)).mean(0))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Under timm's names, but for the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = 4, nn.Linear(DIM, 3 * DIM, False), nn.Linear(DIM, DIM)

    def forward(self, y: Tensor) -> Tensor:
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Inside(Block):
    """With its attention as a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers, self.out
        self.attention = Attention()

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z = z + self.attention(self.ln1(z))
        return z + self.branch(self.ln2(z)), z


class Rotated(Block):
    """With queries and keys turned by their places, of layers that say what they are, and no table;
    `says` whether it says its number of heads, too, or has one layer of all three."""

    def __init__(self, says: str) -> None:
        super().__init__("one" if says == "fused" else "three")
        self.says = says
        if says == "fused":
            self.qkv = self.layers[0]
        else:
            self.wv, self.wq, self.wk = self.layers
        del self.layers
        if says != "heads":
            del self.heads

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y, places = self.ln1(z), torch.arange(z.shape[1]).to(z)
        whole = self.qkv(y).chunk(3, -1) if self.says == "fused" else None
        q, k, v = whole or (self.wq(y), self.wk(y), self.wv(y))
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in (q, k, v))
        turn = torch.polar(
            torch.ones(()).to(z), places[:, None] / torch.arange(1, DIM // 8 + 1).to(z)
        )
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(one.unflatten(-1, (-1, 2)).contiguous()) * turn
            )
            for one in (q, k)
        )
        mixed = nn.functional.scaled_dot_product_attention(q.flatten(-2), k.flatten(-2), v)
        z = z + self.out(mixed.transpose(1, 2).flatten(2))
        return z + self.branch(self.ln2(z)), z


class WithoutTable(ByHand):
    """Its blocks alone know of places."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(self.embed(x).flatten(2).permute(2, 0, 1))
        return self.head(z.mean(0))  # type: ignore[no-any-return]


class Turned(nn.Module):
    """A block that turns its tokens for an attention that takes them first; its sums are
    normalised, and its attention has a layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.ls1 = nn.MultiheadAttention(DIM, 4), nn.Parameter(torch.ones(DIM))
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.ls1.data.uniform_(0.2, 1)

    def forward(self, z: Tensor) -> Tensor:
        turned = z.transpose(0, 1)
        mixed = self.attention(turned, turned, turned, None, False)[0].transpose(0, 1)
        u = self.ln1(z + self.ls1 * mixed)
        return self.ln2(u + self.mlp(u))  # type: ignore[no-any-return]


def with_blocks(block: Any, network: Any = ByHand) -> nn.Module:
    """A network by hand around two blocks of another class."""
    made: nn.Module = network("three", "list")
    made.blocks = nn.ModuleList(block() for _ in range(2))
    return made


def turned() -> nn.Module:
    network = Own(sine=True, batch_first=True)
    network.encoder = nn.Sequential(Turned(), Turned())  # type: ignore[assignment]
    return network


norm_of = partial(ByHand, "three", "list")
NETWORKS: dict[str, tuple[int, Any]] = {  # pictures in a step, and the network
    "a norm before the first block, of positions too": (2, lambda: Normed(True)),
    "a norm before the first block and positions": (2, lambda: Normed(False)),
    "three layers": (2, lambda: ByHand("three", "list")),
    "blocks as attributes": (2, lambda: ByHand("kind, head, value", "attributes")),
    "blocks in a dictionary": (2, lambda: ByHand("head, kind, value", "dictionary")),
    "one layer, kinds last": (2, lambda: ByHand("head, value, kind", "list")),
    "RMSNorm": (2, lambda: norm_of(norm=nn.RMSNorm, gate="two", bias=False)),
    "a norm of one's own": (2, lambda: norm_of(norm=RootMeanSquare, gate="halves", bias=False)),
    "norms without bias": (
        2,
        lambda: norm_of(norm=partial(nn.LayerNorm, bias=False), gate="module"),
    ),
    "norms without weights": (
        2,
        lambda: norm_of(norm=partial(nn.LayerNorm, elementwise_affine=False)),
    ),
    "attention that does not say its heads": (2, lambda: with_blocks(Inside)),
    **{
        f"turned queries and keys, {says}": (
            2,
            lambda says=says: with_blocks(lambda: Rotated(says), WithoutTable),
        )
        for says in ("heads", "no heads", "fused")
    },
    "beside each other, one norm": (1, lambda: with_blocks(lambda: Beside(1))),
    "beside each other, two norms": (1, lambda: with_blocks(lambda: Beside(2))),
    "beside each other, one norm, pooled": (2, lambda: with_blocks(lambda: Beside(1), Pooled)),
    "beside each other, two norms, pooled": (2, lambda: with_blocks(lambda: Beside(2), Pooled)),
    "tokens turned for attention": (1, turned),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_are_read_whatever_their_layers_are_called(kind: str) -> None:
    """Attention's layers are found by what they compute: a batch of two is told apart. A branch
    without biases is solved by nothing, too, which is no token."""
    torch.manual_seed(4)
    count, make = NETWORKS[kind]
    found = leak_of(make(), photographs(count), attacks="token_peeling", batch=count, img_size=32)
    assert (found.best.exact, found.best.verified) == (count, count)
    assert count == 1 or float(found.best.residual) < 1e-3


def test_branches_beside_each_other_hide_a_batch_behind_the_class_token() -> None:
    torch.manual_seed(4)
    network = with_blocks(lambda: Beside(1))
    read: dict[str, Any] = {"attacks": "token_peeling", "img_size": 32}
    assert "token_peeling" in leak_of(network, photographs(2), batch=2, **read).refused


def test_a_block_that_computes_something_else_gets_no_picture() -> None:
    """None of photographs' mean either, which would look like a weak attack."""
    network = Own(norm_first=True)
    hook = lambda layer, given, output: 2 * output  # noqa: E731
    network.encoder.layers[0].register_forward_hook(hook)
    found = leak_of(network, photographs(1), attacks="token_peeling")
    assert not found.results
    assert "token_peeling" in found.refused


def test_called_attention_computes_what_torchs_does() -> None:
    for first in (True, False):
        torch.manual_seed(1)
        own = nn.MultiheadAttention(12, 3, batch_first=first).double()
        called, (x, y) = CalledAttention(own), torch.randn(2, 4, 5, 12).double()
        assert {id(p) for p in called.parameters()} == {id(p) for p in own.parameters()}
        blocked = torch.ones(4, 4).triu(1).bool() if not first else torch.ones(5, 5).triu(1).bool()
        for given, options in (
            ((x, x, x), {}),
            ((x, x, x), {"average_attn_weights": False}),
            ((x, x, x), {"need_weights": False}),
            ((x, y, y), {}),
            ((x, x, x, None, False), {}),
            ((x, x, x), {"attn_mask": blocked}),
        ):
            for one, other in zip(called(*given, **options), own(*given, **options), strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# grey pictures ------------------------------------------------------------------------------------


def test_grey_pictures_come_back_from_equations_and_from_tokens() -> None:
    """Also pictures like MNIST's, which are too small for LPIPS."""
    torch.manual_seed(2)
    grey, layer = photographs(1).mean(1, keepdim=True).mul(255).round() / 255, {"norm_first": True}
    plain = leak_of(Own(channels=1, **layer), grey)
    assert (plain.best.attack, plain.best.exact, plain.best.verified) == ("patch_gradient", 1, 1)
    assert plain["patch_gradient"].image.shape == (1, 32, 32)
    small = leak_of(Own(24, 1, sine=True, **layer), grey[..., :24, :24], attacks="token_peeling")
    assert (small.best.exact, small.best.verified) == (1, 1)
    assert small.scores is not None
    assert "lpips" not in small.scores


def test_mean_and_std_of_grey_pictures_are_one_number_each() -> None:
    network = Own(channels=1).eval()
    sent = {name: torch.randn_like(p) for name, p in network.named_parameters()}
    attack_gradients(network, sent, mean=[0.5], std=0.5, attacks="patch_gradient")
    with pytest.raises(UserError, match="Own"):
        attack_gradients(network, sent, mean=[0.4, 0.5, 0.6], std=0.5)


def test_a_prior_of_grey_pictures_is_that_of_their_mean_colour() -> None:
    colour, grey = (find_prior("fitted", patch=16, size=64, channels=c) for c in (3, 1))
    mean, covariance = colour.patch(16, Pixels(64, (0.0,) * 3, (1.0,) * 3))
    centre, spread = grey.patch(16, Pixels(64, (0.0,), (1.0,)))
    torch.testing.assert_close(centre, mean.view(3, 256).mean(0))
    torch.testing.assert_close(spread, covariance.view(3, 256, 3, 256).mean((0, 2)))
    fields = colour.field_spectrum(Pixels(64, (0.0,) * 3, (1.0,) * 3))
    torch.testing.assert_close(
        grey.field_spectrum(Pixels(64, (0.0,), (1.0,)))[..., 0, 0],
        fields.mean((2, 3)),
        rtol=0.05,  # the logarithm of a mean is interpolated, not the mean of logarithms
        atol=0,
    )
