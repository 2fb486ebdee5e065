"""Uploads of networks that somebody wrote around torch's own layers, and of grey pictures: tables
of positions are known by what they do, layers by what they compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

from attacks.prior.files import find_prior
from mjp_privacy import attack_gradients
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.live.modules import load_module
from mjp_privacy.models.live.parts import CalledAttention
from mjp_privacy.uploads.leak import Leak
from tests.uploads.networks import (
    DIM,
    PATCH,
    Attention,
    ByHand,
    Doubling,
    Inside,
    Neck,
    Normed,
    NoTable,
    Own,
    Placed,
    Pooled,
    Positions,
    RootMeanSquare,
    Rows,
    WithoutTable,
    first,
    hands,
    leak_of,
    photographs,
    turned,
)

HALF: dict[str, Any] = {"mean": 0.5, "std": 0.5}
PEELING: dict[str, Any] = {"attacks": "token_peeling", "img_size": 32}


def best_of(leak: Leak) -> tuple[str, int, int]:
    return leak.best.attack, leak.best.exact, leak.best.verified


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [{**first(), "activation": "gelu"}, {"norm_first": True}, {"batch_first": True}, {}],
    ids=["before", "before, tokens first", "of sums", "of sums, tokens first"],
)
def test_torchs_encoder_layers_are_read_wherever_they_normalise(layer: dict[str, Any]) -> None:
    """A batch of two, and a table whose gradient is not sent: what no patch equation tells."""
    layer = layer or {"activation": nn.functional.silu}
    batch = leak_of(Own(**layer), photographs(2), attacks="token_peeling", batch=2)
    assert batch.best.exact == 2
    assert batch.best.verified >= 1  # where tokens hardly see each other, mixtures would pass, too
    single = leak_of(Own(sine=True, **layer), photographs(1), attacks="token_peeling")
    assert best_of(single) == ("token_peeling", 1, 1)


NETWORKS: dict[str, tuple[int, Any]] = {  # pictures in a step, and the network
    "a norm before the first block, of positions too": (2, lambda: Normed(True)),
    "a norm before the first block and positions": (2, lambda: Normed(False)),
    "three layers": (2, hands()),
    "blocks as attributes": (2, hands("attributes", order="kind, head, value")),
    "blocks in a dictionary": (2, hands("dictionary", order="head, kind, value")),
    "one layer, kinds last": (2, hands(order="head, value, kind")),
    "RMSNorm": (2, hands(norm=nn.RMSNorm, gate="two", bias=False)),
    "a norm of one's own": (2, hands(norm=RootMeanSquare, gate="halves", bias=False)),
    "norms without bias": (2, hands(norm=partial(nn.LayerNorm, bias=False), gate="module")),
    "norms without weights": (2, hands(norm=partial(nn.LayerNorm, elementwise_affine=False))),
    "parts that keep what they computed": (2, hands(gate="keeps")),
    "attention that does not say its heads": (2, lambda: ByHand(Inside)),
    "turned queries and keys": (2, hands(network=WithoutTable, turned=True)),
    "turned queries and keys, one layer": (
        2,
        hands(network=WithoutTable, order="kind, head, value", turned=True),
    ),
    "beside each other, one norm": (1, hands(beside=1)),
    "beside each other, two norms": (1, hands(beside=2)),
    "beside each other, one norm, pooled": (2, hands(network=Pooled, beside=1)),
    "beside each other, two norms, pooled": (2, hands(network=Pooled, beside=2)),
    "tokens turned for attention": (1, turned),
    "a scale of attention": (1, hands(scales="a")),
    "a scale of attention, another norm": (1, hands(scales="a", norm=RootMeanSquare)),
    "a scale of the two layers": (1, hands(scales="b")),
    "scales of both": (1, hands(scales="ab")),
    "scales that are numbers": (1, hands(scales="ab", numbers=1)),
    "scales, beside each other": (1, hands(beside=2, scales="ab")),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_are_read_whatever_their_layers_are_called(kind: str) -> None:
    """Attention's layers are found by what they compute: a batch of two is told apart. A branch
    without biases is solved by nothing, too, which is no token."""
    torch.manual_seed(4)
    count, make = NETWORKS[kind]
    found = leak_of(make(), photographs(count), batch=count, **PEELING)
    assert best_of(found) == ("token_peeling", count, count)
    assert count == 1 or float(found.best.residual) < 1e-3


@pytest.mark.parametrize(
    ("order", "wrap"), [("values first", nn.Identity()), ("by heads", nn.Sequential())]
)
def test_an_order_that_timms_names_do_not_have_is_told_by_outputs(
    order: str, wrap: nn.Module
) -> None:
    """In a batch attention says which tokens are of one picture."""
    sizes = {"img_size": 32, "patch_size": PATCH, "embed_dim": DIM, "depth": 2, "num_heads": 4}
    pooled: dict[str, Any] = {"num_classes": 10, "class_token": False, "global_pool": "avg"}
    network: Any = timm.models.VisionTransformer(**sizes, **pooled)
    for block in network.blocks:
        block.attn = Attention(order)
        for matrix in (p for p in block.parameters() if p.ndim == 2):
            nn.init.normal_(matrix, std=0.08)
    if isinstance(wrap, nn.Sequential):
        network = wrap.append(network)
    leak = leak_of(network, photographs(2), attacks="token_peeling", batch=2)
    assert (leak.best.verified, leak.best.exact) == (2, 2)


def test_sums_that_no_norm_makes_zero_tell_no_weight_decay() -> None:
    """Behind norms of the sums, where biases are zero but for the patch embedding's."""
    network = Own()
    for layer in (part for part in network.modules() if isinstance(part, nn.Linear)):
        nn.init.zeros_(layer.bias)
    found = leak_of(network, photographs(2), batch=2, attacks="token_peeling")
    assert (found.best.exact, found.best.verified) == (2, 2)


def test_blocks_may_be_computed_again_in_the_backward_pass() -> None:
    sizes: Any = {"img_size": 56, "embed_dim": 96, "depth": 2, "num_heads": 4, "num_classes": 10}
    network = timm.create_model("vit_small_patch14_dinov2", **sizes)
    for name, scale in network.named_parameters():
        if "gamma" in name:
            nn.init.constant_(scale, 0.1)
    network.set_grad_checkpointing(True)
    found = leak_of(network, photographs(1, 56), attacks=["patch_gradient", "token_peeling"])
    assert found["patch_gradient"].exact == 1
    assert found["patch_gradient"].residual < 1e-6
    assert network.grad_checkpointing


def shared(parts: bool) -> nn.Module:
    """A network whose blocks are one, or have the same weights in all layers behind attention."""
    network = ByHand()
    one, other = network.blocks
    for part in ("out", "up", "down") if parts else ():
        getattr(other, part).weight = getattr(one, part).weight
    if not parts:
        network.blocks[1] = one
    return network


def doubled() -> nn.Module:
    """A network with a block that computes something else than its parts."""
    network = Own(norm_first=True)
    network.encoder.layers[0].register_forward_hook(lambda layer, given, output: 2 * output)
    return network


@pytest.mark.parametrize(
    ("make", "count", "named"),
    [
        (lambda: shared(False), 1, "more than once"),
        (lambda: shared(True), 1, "more than once"),
        (lambda: Neck("wide"), 1, "what stands between"),
        (lambda: Neck("joined"), 1, "what stands between"),
        (hands(beside=1), 2, ""),  # the class token's hide those of a batch
        (doubled, 1, ""),  # no mean of photographs either, which would look like a weak attack
    ],
)
def test_blocks_that_no_layer_shows_are_refused(make: Any, count: int, named: str) -> None:
    read = ["patch_gradient", "token_peeling", "layer_span", "token_span", "batch_lattice"]
    found = leak_of(make(), photographs(count), batch=count, **{**PEELING, "attacks": read})
    assert named in found.refused["token_peeling"]
    assert not any("Error" in why for why in found.refused.values())


def test_called_attention_computes_what_torchs_does() -> None:
    for tokens_last in (True, False):
        own = nn.MultiheadAttention(12, 3, batch_first=tokens_last).double()
        called, (x, y) = CalledAttention(own), torch.randn(2, 4, 5, 12).double()
        assert {id(p) for p in called.parameters()} == {id(p) for p in own.parameters()}
        length = 5 if tokens_last else 4
        blocked = torch.ones(length, length).triu(1).bool()
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


# tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "side"),
    [
        (lambda: Placed("location"), 32),
        (lambda: Placed("table"), 32),
        (lambda: Placed("pos_embed", last=True), 32),
        (lambda: Placed("location", last=True), 32),
        (lambda: Positions("map", 64), 64),  # a map as large as a patch
        (lambda: Positions("map", name="places"), 32),
    ],
)
def test_a_table_is_known_by_what_it_does(make: Any, side: int) -> None:
    """One that is stretched to the picture: tests/models/test_modules.py."""
    found = leak_of(make(), photographs(1, side), attacks="patch_gradient")
    assert best_of(found) == ("patch_gradient", 1, 1)


@pytest.mark.parametrize("kind", ["map", "rows and columns", "shuffled"])
def test_positions_may_be_a_map_or_rows_and_columns(kind: str) -> None:
    size = None if kind == "map" else 32
    attacks = ["patch_gradient", "token_peeling"]
    single = leak_of(Positions(kind), photographs(1), img_size=size, attacks=attacks)
    attack = "patch_gradient" if kind == "map" else "token_peeling"  # a map is each patch's own
    assert best_of(single) == (attack, 1, 1)
    given = {"batch": 2, "attacks": "token_peeling", "img_size": size}
    assert leak_of(Positions(kind), photographs(2), **given).best.exact == 2


@pytest.mark.parametrize(("kind", "size"), [("gap", None), ("gap", 48), ("siglip", 48)])
def test_timms_networks_that_embed_patches_elsewhere_are_read(kind: str, size: int | None) -> None:
    """NaFlexVit: a linear layer of flattened patches, and a table that is a grid and is stretched
    to pictures of other sizes, added in place where no token stands before the patches; layer scale
    as after training."""
    sizes: Any = {"embed_dim": DIM, "depth": 2, "num_heads": 4, "num_classes": 10, "img_size": 64}
    name = f"naflexvit_base_patch16_{kind}"
    network = timm.create_model(name, pos_embed_grid_size=(4, 4), **sizes)
    for name, scale in network.named_parameters():
        if "gamma" in name:
            nn.init.constant_(scale, 0.1)
    found = leak_of(network, photographs(1, size or 64), img_size=size, attacks="patch_gradient")
    assert best_of(found) == ("patch_gradient", 1, 1)


def of_timm(name: str, **sizes: int) -> nn.Module:
    network: Any = timm.create_model(name, num_classes=10, **sizes)
    nn.init.normal_(network.get_classifier().weight, std=0.02)
    assert isinstance(network, nn.Module)
    return network


@pytest.mark.parametrize(
    ("make", "side", "finds"),
    [
        (Rows, 32, True),
        (Doubling, 32, True),
        (lambda: of_timm("mixer_s32_224", img_size=96), 96, False),
        (lambda: of_timm("convnext_atto"), 64, False),
    ],
)
def test_networks_without_a_table_say_so(make: Any, side: int, finds: bool) -> None:
    read = ["patch_gradient", "token_peeling", "layer_span", "token_span"]
    found = leak_of(make(), photographs(1, side), img_size=side, attacks=read)
    assert "no table of positions" in found.refused["patch_gradient"]
    assert not any("Error" in why for why in found.refused.values())
    assert not finds or best_of(found)[:2] == ("token_peeling", 1)


class Pads(Own):
    """That pads pictures before it embeds them."""

    def embedded(self, x: Tensor) -> Any:
        return super().embedded(nn.functional.pad(x, (4, 4, 4, 4)))


@pytest.mark.parametrize(
    ("make", "named", "img_size"),
    [
        (nn.Identity, "parameters", None),
        (lambda: Pads(40, **first()), "pads", 32),
        (NoTable, "img_size", None),
    ],
)
def test_what_a_network_lacks_is_named(make: Any, named: str, img_size: int | None) -> None:
    network = make()
    sent = {name: torch.randn_like(p) for name, p in network.named_parameters()}
    given = {"mean": 0.5, "std": 0.5, "img_size": img_size}
    with pytest.raises(UserError, match=named):
        attack_gradients(network, sent or {"a": torch.ones(1)}, **given)
    if named == "img_size":  # parameters of as many rows are no tables
        assert load_module(network, mean=0.5, std=0.5, img_size=32).pos_embed is None


# grey pictures ------------------------------------------------------------------------------------


def test_grey_pictures_come_back_from_equations_and_from_tokens() -> None:
    """Also pictures like MNIST's, which are too small for LPIPS."""
    torch.manual_seed(2)
    grey, layer = photographs(1).mean(1, keepdim=True).mul(255).round() / 255, {"norm_first": True}
    plain = leak_of(Own(channels=1, **layer), grey)
    assert best_of(plain) == ("patch_gradient", 1, 1)
    assert plain["patch_gradient"].image.shape == (1, 32, 32)
    small = leak_of(Own(24, 1, sine=True, **layer), grey[..., :24, :24], attacks="token_peeling")
    assert best_of(small) == ("token_peeling", 1, 1)
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


class Masked(timm.models.VisionTransformer):
    """An MJP client of one's own."""

    hidden: Tensor | None = None

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.in_place_of_positions = nn.Parameter(0.02 * torch.randn(1, 1, self.embed_dim))

    def _pos_embed(self, x: Tensor) -> Tensor:
        table = self.pos_embed
        if self.hidden is not None:
            rows = torch.where(self.hidden[:, None], self.in_place_of_positions, table[:, 1:])
            table = torch.cat((table[:, :1], rows), 1)
        return torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + table


@pytest.mark.parametrize(("pooled", "decay"), [(False, 0.0), (True, 0.0), (False, 0.05)])
def test_an_embedding_of_masked_patches_is_known_by_its_gradient(
    pooled: bool, decay: float
) -> None:
    """Whatever it is called, and where weights decay; pixels' lattice needs it, and the comparison
    of a picture's gradient."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"global_pool": "avg"} if pooled else {}
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 2, "num_heads": 4}
    network = Masked(**sizes, num_classes=10, **options)
    image = photographs(1).float()
    network.hidden = torch.arange(16) < 5
    nn.functional.cross_entropy(network((image - 0.5) / 0.5), torch.tensor([3])).backward()
    network.hidden = None
    sent = {n: -(p.grad + decay * p).detach() for n, p in network.named_parameters()}  # type: ignore[operator]
    told: dict[str, Any] = {"kind": "weight_difference", "lr": 1.0, "weight_decay": decay}
    chosen = {"attacks": "pixel_lattice", "images": image, "mean": 0.5, "std": 0.5}
    found = attack_gradients(network, sent, **told, **chosen)
    assert found.best.residual < 1e-4
    assert sorted(to_patches(found.best.images, 8).sum(2)[0].tolist()) == pytest.approx(
        sorted(to_patches(image, 8).sum(2)[0].tolist()), rel=1e-5
    )


class WithText(nn.Module):
    """A ViT's features beside those of texts, whose likeness is what is trained, as CLIP's."""

    def __init__(self, place: str) -> None:
        super().__init__()
        for name in place.split(".")[:-1]:
            self.add_module(name, nn.Module())
        holder, _, name = place.rpartition(".")
        self.get_submodule(holder).add_module(name, Own(**first()))
        self.place, self.text = place, nn.Embedding(10, 10)

    def forward(self, image: Tensor, ids: Tensor) -> Any:
        return self.get_submodule(self.place)(image) @ self.text(ids).mT


@pytest.mark.parametrize("place", ["visual", "vision_model", "encoder.vit"])
def test_the_part_that_takes_pictures_is_read_and_named(place: str) -> None:
    """With its gradients under the names that they have in the whole."""
    network, image = WithText(place).eval(), photographs(1).float()
    loss = nn.functional.cross_entropy
    loss(network((image - 0.5) / 0.5, torch.arange(10)), torch.tensor([3])).backward()
    sent = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
    leak = attack_gradients(network, sent, images=image, attacks="patch_gradient", **HALF)
    assert best_of(leak) == ("patch_gradient", 1, 1)
    assert [f"part {place} is" in note for note in leak.notes] == [True]
    network.second = Own(**first())
    with pytest.raises(UserError, match="WithText"):
        attack_gradients(network, sent, attacks="patch_gradient", **HALF)


def test_weight_norm_is_refused_and_left_out_as_the_refusal_says() -> None:
    network, image = Own(**first()).eval(), photographs(1).float()
    name, of = "embed.weight", "embed.parametrizations.weight.original"
    weight_norm(network.embed)
    nn.functional.cross_entropy(network((image - 0.5) / 0.5), torch.tensor([3])).backward()
    with pytest.raises(UserError, match="weight_norm"):
        attack_gradients(network, attacks="patch_gradient", **HALF)
    g, v = (network.get_parameter(f"{of}{number}") for number in (0, 1))
    of_g, of_v = g.grad, v.grad
    assert of_g is not None
    assert of_v is not None
    sent: dict[str, Any] = {
        n: p.grad for n, p in network.named_parameters() if not n.startswith(of)
    }
    g, v = g.detach(), v.detach()
    size = v.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    remove_parametrizations(network.embed, "weight")
    sent[name] = of_g * v / size + of_v * size / g
    leak = attack_gradients(network, sent, images=image, attacks="patch_gradient", **HALF)
    assert best_of(leak) == ("patch_gradient", 1, 1)


class Imitating(Own):
    """One whose clients hide patches behind a token, to which their positions are added."""

    hidden: Tensor | None = None

    def __init__(self, *, bias: bool) -> None:
        super().__init__(**first())
        self.embed = nn.Conv2d(3, DIM, PATCH, PATCH, bias=bias)
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, DIM))

    def embedded(self, x: Tensor) -> Any:
        z = super().embedded(x)
        return z if self.hidden is None else torch.where(self.hidden[:, None], self.mask_token, z)


@pytest.mark.parametrize("mean", [0.5, 0.0])
@pytest.mark.parametrize(("bias", "drops"), [(True, False), (False, False), (False, True)])
def test_patches_that_a_token_took_the_place_of_are_not_certain(
    bias: bool, drops: bool, mean: float
) -> None:
    """Their rows of the table's gradient are those of the token: zeros solve the equations, and
    where tokens are dropped that have no bias, those of layers, too. With mean 0 zeros are black,
    a level of 8 bits."""
    std = 1 - mean
    torch.manual_seed(0)
    network, image = Imitating(bias=bias).eval(), photographs(1).float()
    if drops:
        nn.init.zeros_(network.mask_token)
    for hidden in (torch.arange(16) % 5 == 0, None):
        network.hidden = hidden
        network.zero_grad()
        nn.functional.cross_entropy(network((image - mean) / std), torch.tensor([3])).backward()
        network.hidden = None
        given: dict[str, Any] = {"mean": mean, "std": std, "exhaustive": True}
        asked = ["patch_gradient", "token_peeling", "patch_integers"]
        leak = attack_gradients(network, images=image, attacks=asked, **given)
        assert leak.best.exact == (hidden is None)
        assert any(made.verified for made in leak) == (hidden is None)
        assert ("SimMIM" in leak.verdict) == (hidden is not None)
        assert ("bias is not the sum" in leak.verdict) == (hidden is not None and bias)


@pytest.mark.parametrize("spread", [0.01, 0.003])
def test_as_many_patches_as_equations_are_not_certain(spread: float) -> None:
    """Norms take means of gradients away, so that 17 numbers a row are 16 equations, which two
    pictures that are told as one solve, too."""
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 17, "num_heads": 1}
    network = timm.models.VisionTransformer(**sizes, depth=2, num_classes=10).eval()
    image = photographs(1).float() / 2 + 0.25
    both = torch.cat((image, image + spread * torch.randn_like(image)))
    nn.functional.cross_entropy(network((both - 0.5) / 0.5), torch.tensor([3, 3])).backward()
    given = {"mean": 0.5, "std": 0.5, "attacks": "patch_gradient"}
    best = attack_gradients(network, images=image, **given).best
    assert best.misfit < 1e-6
    assert best.verified == 0
