"""Uploads of networks that somebody wrote around torch's own layers, and of grey pictures: tables
of positions are known by what they do, layers by what they compute."""

import re
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from mjp_privacy import attack_gradients
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import height_width
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.uploads.leak import Leak
from tests.helpers.libraries import hugging_face, randomised, timm_vit
from tests.uploads.networks import (
    DIM,
    FIRST,
    PATCH,
    Attention,
    ByHand,
    Convolved,
    Decoding,
    Doubling,
    Flattened,
    Neck,
    Normed,
    Own,
    Placed,
    Pooled,
    Positions,
    Rectangle,
    RootMeanSquare,
    WithoutTable,
    attending,
    hands,
    leak_of,
    photographs,
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
    [{**FIRST, "activation": "gelu"}, {"norm_first": True}, {"batch_first": True}, {}],
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


def of_sums() -> nn.Module:
    """Where sums of gradients tell no weight decay, though all biases but the patches' are zero."""
    network = Own()
    for layer in (part for part in network.modules() if isinstance(part, nn.Linear)):
        nn.init.zeros_(layer.bias)
    return network


NETWORKS: dict[str, tuple[int, Any]] = {  # pictures in a step, and the network
    "a norm before the first block, of positions too": (2, lambda: Normed(True)),
    "a norm before the first block and positions": (2, lambda: Normed(False)),
    "blocks as attributes": (2, hands("attributes", order="kind, head, value")),
    "in a dictionary, RMSNorm": (
        2,
        hands("dictionary", order="head, kind, value", norm=nn.RMSNorm, gate="two", bias=False),
    ),
    "kinds last, a norm of one's own": (
        2,
        hands(order="head, value, kind", norm=RootMeanSquare, gate="halves", bias=False),
    ),
    "queries, and keys with values": (2, hands(order="two")),
    "norms without bias": (2, hands(norm=partial(nn.LayerNorm, bias=False), gate="module")),
    "norms without weights": (2, hands(norm=partial(nn.LayerNorm, elementwise_affine=False))),
    "turned queries and keys": (2, hands(network=WithoutTable, turned=True)),
    "beside each other, one norm": (1, hands(beside=1)),
    "beside each other, one norm, pooled": (2, hands(network=Pooled, beside=1)),
    "beside each other, two norms, pooled": (2, hands(network=Pooled, beside=2)),
    "a scale of attention, another norm": (1, hands(scales="a", norm=RootMeanSquare)),
    "a scale of the two layers": (1, hands(scales="b")),
    "scales that are numbers": (1, hands(scales="ab", numbers=1)),
    "scales, beside each other": (1, hands(beside=2, scales="ab")),
    "timm's names, values first": (2, lambda: attending(lambda: Attention("values first"))),
    "timm's names, by heads": (2, lambda: nn.Sequential(attending(lambda: Attention("by heads")))),
    "positions as rows and columns": (2, lambda: Positions("rows and columns")),
    "patches that are unshuffled pixels": (1, lambda: Positions("shuffled")),
    "sums that no norm makes zero, biases of zeros": (2, of_sums),
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


def with_scales(network: Any) -> Any:
    """timm's network with layer scales as after training."""
    for name, scale in network.named_parameters():
        if "gamma" in name:
            nn.init.constant_(scale, 0.1)
    return network


def test_blocks_may_be_computed_again_in_the_backward_pass() -> None:
    sizes: Any = {"img_size": 56, "embed_dim": 96, "depth": 2, "num_heads": 4, "num_classes": 10}
    network = with_scales(timm.create_model("vit_small_patch14_dinov2", **sizes))
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
        (Neck, 1, "what stands between"),
        (hands(beside=1), 2, ""),  # the class token's hide those of a batch
        (doubled, 1, ""),  # no mean of photographs either, which would look like a weak attack
    ],
)
def test_blocks_that_no_layer_shows_are_refused(make: Any, count: int, named: str) -> None:
    read = ["patch_gradient", "token_peeling", "layer_span", "token_span", "batch_lattice"]
    found = leak_of(make(), photographs(count), batch=count, **{**PEELING, "attacks": read})
    assert named in found.refused["token_peeling"]
    assert not any("Error" in why for why in found.refused.values())


# tables -------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """A backbone with a new layer for the classes, which keeps what it last computed, and a
    parameter that is no floating-point number."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.fc = randomised(timm_vit(num_classes=0)), nn.Linear(DIM, 10)
        self.outputs: Tensor | None = None
        self.count = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        self.outputs = self.fc(self.backbone(x))
        return self.outputs


class Within(nn.Module):
    """A network under the name that DataParallel gives one, with another head behind its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = randomised(timm_vit(num_classes=20)), nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.module(x))


class Scaled(nn.Module):
    """Normalises pictures, with another factor for each channel."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([2.0, 1.5, 0.7]).view(3, 1, 1) - 0.3


def naflex(kind: str) -> nn.Module:
    """NaFlexVit: a linear layer of flattened patches, and a table that is a grid and is stretched,
    added in place where no token stands before the patches; layer scale as after training."""
    sizes: Any = {"embed_dim": DIM, "depth": 2, "num_heads": 4, "num_classes": 10, "img_size": 64}
    name = f"naflexvit_base_patch16_{kind}"
    return with_scales(timm.create_model(name, pos_embed_grid_size=(4, 4), **sizes))  # type: ignore[no-any-return]


def of_rectangles(**changes: Any) -> nn.Module:
    sizes: Any = {"img_size": WIDE, "num_classes": 10, "depth": 2, **changes}
    return timm.create_model("vit_tiny_patch16_224", **sizes)  # type: ignore[no-any-return]


class Registers(Own):
    """With more tokens behind the class token, which get positions as well."""

    def __init__(self, count: int = 7, faint: float = 1) -> None:
        super().__init__(**FIRST)
        with torch.no_grad():  # the fainter the blocks, the more alike the gradients of all tokens
            for parameter in self.encoder.parameters():
                parameter *= faint
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, 17 + count, DIM))
        self.registers = nn.Parameter(0.1 * torch.randn(1, count, DIM))

    def with_class(self, z: Tensor) -> Tensor:
        return super().with_class(torch.cat((self.registers.expand(len(z), -1, -1), z), 1))


WIDE = (48, 32)
BEFORE_A_NORM = {"img_size": 64, "dynamic_img_size": True, "num_classes": 10, "depth": 2}
POOLED: dict[str, Any] = {"class_token": False, "global_pool": "avg"}
READ: dict[str, tuple[Any, Any, Any]] = {  # the network, the picture's size, and what is told of it
    "a table that is looked up": (lambda: Placed("table"), 32, None),
    "a class token behind the patches": (lambda: Placed("location", last=True), 32, None),
    "a map as large as a patch": (lambda: Positions("map", 64), 64, None),
    "a map of any name": (lambda: Positions("map", name="places"), 32, None),
    "pictures normalised once more": (lambda: nn.Sequential(Scaled(), Convolved()), 32, None),
    "a second head behind a part that is called module": (Within, 32, None),
    "a backbone that keeps its output": (Backbone, 32, None),
    "flattened patches": (Flattened, 32, None),
    "keywords, in place, a dictionary, a classifier of any name": (Convolved, 32, None),
    "a decoder with a table of its own": (Decoding, 32, None),
    "a teacher's token": (
        lambda: hugging_face("DeiTForImageClassificationWithTeacher", "DeiTConfig", num_labels=10),
        *(32, None),
    ),
    "patches embedded elsewhere, pooled": (lambda: naflex("gap"), 48, 48),
    "patches embedded elsewhere, no token": (lambda: naflex("siglip"), 48, 48),
    "no squares": (of_rectangles, WIDE, None),
    "no squares, stretched": (
        lambda: of_rectangles(img_size=64, dynamic_img_size=True),
        *(WIDE, WIDE),
    ),
    "no squares, no class token": (lambda: of_rectangles(**POOLED), WIDE, None),
    "no squares, a table that shows no shape": (Rectangle, WIDE, WIDE),
    "eight other tokens in the table": (Registers, 32, 32),
    "twenty others, in a table of their own as well": (lambda: Registers(20, 0.02), 32, 32),
    "no squares, stretched before a norm": (
        lambda: timm.create_model("vit_xsmall_patch16_clip_224", **BEFORE_A_NORM),
        *(WIDE, WIDE),
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_one_upload_tells_picture_and_class(kind: str) -> None:
    """Tables are known by what they do, the classifier by its place. More tables that are stretched
    to the picture: tests/models/test_modules.py."""
    make, size, told = READ[kind]
    found = leak_of(make(), photographs(1, size), attacks="patch_gradient", img_size=told)
    assert best_of(found) == ("patch_gradient", 1, 1)
    assert found.labels.tolist() == [0]
    assert found.best.residual < 1e-4
    assert tuple(found.best.images.shape[-2:]) == height_width(size)


def of_timm(name: str, **sizes: int) -> nn.Module:
    network: Any = timm.create_model(name, num_classes=10, **sizes)
    nn.init.normal_(network.get_classifier().weight, std=0.02)
    assert isinstance(network, nn.Module)
    return network


def test_other_tokens_that_fill_the_width_leave_room_for_no_patches() -> None:
    """Nor for a number of them below 0."""
    told = {**PEELING, "attacks": ["patch_gradient", "token_peeling"]}
    found = leak_of(Registers(100), photographs(1), **told)
    assert found.best.exact == 1
    assert not re.search(r"-\d", found.refused["token_peeling"])


def test_a_branch_behind_no_norm_is_no_weight_decay() -> None:
    """Its gradients' sums are little more than 0."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 384, "num_heads": 4}
    network = timm.create_model("vit_base_patch16_rpn_224", depth=2, num_classes=10, **sizes)
    logits = network((photographs(1).float() - 0.5) / 0.5)
    nn.functional.cross_entropy(logits, torch.tensor([3])).backward()
    assert not attack_gradients(network.eval(), attacks="patch_gradient", **HALF).notes


def test_weight_decay_is_read_off_beside_the_rounding_of_mixed_precision() -> None:
    """Though all sums are far from 0 then."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "num_heads": 4}
    network = timm.create_model("vit_base_patch16_224", depth=2, num_classes=10, **sizes).eval()
    with torch.autocast("cpu", torch.bfloat16):
        logits = network((photographs(1).float() - 0.5) / 0.5)
    nn.functional.cross_entropy(logits.float(), torch.tensor([3])).backward()
    sent = {n: -0.1 * (p.grad + 0.05 * p.detach()) for n, p in network.named_parameters()}
    step: dict[str, Any] = {"kind": "weight_difference", "lr": 0.1, **HALF}
    leak = attack_gradients(network, sent, attacks="patch_gradient", images=photographs(1), **step)
    assert leak.best.psnr > 30


@pytest.mark.parametrize(
    ("make", "side", "finds"),
    [
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


def test_what_a_network_lacks_is_named() -> None:
    with pytest.raises(UserError, match="parameters"):
        attack_gradients(nn.Identity(), {"a": torch.ones(1)}, **HALF)
    network = Pads(40, **FIRST)
    sent = {name: torch.randn_like(p) for name, p in network.named_parameters()}
    with pytest.raises(UserError, match="pads"):
        attack_gradients(network, sent, **HALF, img_size=32)


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
    assert "lpips" not in small.scores


def test_mean_and_std_of_grey_pictures_are_one_number_each() -> None:
    network = Own(channels=1).eval()
    sent = {name: torch.randn_like(p) for name, p in network.named_parameters()}
    attack_gradients(network, sent, mean=[0.5], std=0.5, attacks="patch_gradient")
    with pytest.raises(UserError, match="Own"):
        attack_gradients(network, sent, mean=[0.4, 0.5, 0.6], std=0.5)


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
        self.get_submodule(holder).add_module(name, Own(**FIRST))
        self.place, self.text = place, nn.Embedding(10, 10)

    def forward(self, image: Tensor, ids: Tensor) -> Any:
        return self.get_submodule(self.place)(image) @ self.text(ids).mT


def test_the_part_that_takes_pictures_is_read_and_named() -> None:
    """With its gradients under the names that they have in the whole."""
    place = "encoder.vit"
    network, image = WithText(place).eval(), photographs(1).float()
    loss = nn.functional.cross_entropy
    loss(network((image - 0.5) / 0.5, torch.arange(10)), torch.tensor([3])).backward()
    sent = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
    leak = attack_gradients(network, sent, images=image, attacks="patch_gradient", **HALF)
    assert best_of(leak) == ("patch_gradient", 1, 1)
    assert [f"part {place} is" in note for note in leak.notes] == [True]
    network.second = Own(**FIRST)
    with pytest.raises(UserError, match="WithText"):
        attack_gradients(network, sent, attacks="patch_gradient", **HALF)


class Imitating(Own):
    """One whose clients hide patches behind a token, to which their positions are added."""

    hidden: Tensor | None = None

    def __init__(self, *, bias: bool) -> None:
        super().__init__(**FIRST)
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


@pytest.mark.parametrize(("error", "certain"), [(0.0, True), (1e-3, False)])
def test_an_error_that_patches_take_up_counts_as_well(error: float, certain: bool) -> None:
    """Of 51 equations for 49 patches two show what is wrong, so that little is left of much."""
    sizes: dict[str, Any] = {"img_size": 56, "patch_size": 8, "embed_dim": 52, "num_heads": 4}
    network = timm.models.VisionTransformer(**sizes, depth=1, num_classes=10).eval()
    image = photographs(1, 56).float()
    torch.manual_seed(1)
    rows = torch.randn(50, 52)
    rows -= rows.mean(1, keepdim=True)
    total = rows[1:].mT @ to_patches((image[0] - 0.5) / 0.5, 8)
    total += error * total.square().mean().sqrt() * torch.randn_like(total)
    sent = {"pos_embed": rows[None], "patch_embed.proj.weight": total.view(52, 3, 8, 8)}
    given = {"mean": 0.5, "std": 0.5, "attacks": "patch_gradient"}
    best = attack_gradients(network, sent, images=image, **given).best
    assert best.is_certain == certain
    assert (best.psnr > 60) == certain
