"""What is certain and what is said where a client deviates from what the attacker is told: clips,
adds noise, trains another loss, normalises otherwise, shuffles."""

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks.equations import CERTAIN
from mjp_privacy import attack_gradients, load_images
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import shuffle_patches
from mjp_privacy.models.zoo import IMAGENET_MEAN, IMAGENET_STD
from mjp_privacy.uploads.attacking import scored
from mjp_privacy.uploads.checks import MISNORMALISED, of_recorded
from mjp_privacy.uploads.leak import Leak, Reconstructed
from mjp_privacy.uploads.memory import declared_errors, own_uploads
from tests.helpers.models import planted_model, some_images
from tests.helpers.planted import gradient_of, planted_images
from tests.uploads.networks import Attention, attending, leak_of
from tools.calibrate_certain import BEGIN, CLIENTS, END, GOOD, clipped, models, tried

Gradients = Mapping[str, Tensor]
LABEL = torch.tensor([3])
PATCH = "patch_embed.proj.weight"


def size_of(sent: Gradients) -> float:
    return float(torch.stack([g.norm() for g in sent.values()]).norm())


def noisy(sent: Gradients, spread: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: g + spread * torch.randn(g.shape, generator=generator, dtype=g.dtype)
        for name, g in sent.items()
    }


# every client of docs/certain.md -----------------------------------------------------------------

TABLE = Path("docs/certain.md").read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
FOUND = {
    name.strip(): outcome.split()[0]
    for names, outcome in re.findall(r"^\| ([^|*]+) \| ([^|]+) \|", TABLE, re.MULTILINE)
    for name in names.split("; ")
}
"""Of how many of 24 pictures each client's is certain, as the page says."""


@pytest.fixture(scope="module")
def untrained() -> LoadedModel:
    return next(models())


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_certain_of_a_real_client_is_its_picture(
    untrained: LoadedModel, client: str
) -> None:
    """Where all or none of 24 are certain, this one is as they are; red and blue that were swapped
    no single picture shows."""
    one, other = (photograph(place)[0].float() for place in (0, 1))
    row = tried(client, untrained, one, other)
    if FOUND[client] in ("0", "24"):
        assert row["certain"] == (FOUND[client] == "24")
    assert not row["certain"] or row["psnr"] > GOOD or client == "channels in the other order"


def photograph(place: int) -> Tensor:
    return list(load_images("embedded", size=64, limit=place + 1))[place][0].double()[None]


def attacked(model: LoadedModel, sent: Gradients, **facts: Any) -> Leak:
    return attack_gradients(model, sent, **{"attacks": ["patch_gradient"], **facts})


def off(leak: Leak, picture: Tensor) -> float:
    """The largest distance of the best picture's pixels from those of a picture (1, C, H, W)."""
    return float((leak.best.image.double() - picture[0]).abs().max())


def levels(picture: Tensor) -> Tensor:
    """The picture in whole 8-bit levels."""
    return (picture * 255).round() / 255


# scale, noise, loss -------------------------------------------------------------------------------


def test_the_clip_factor_is_found_and_declared_noise_beside_it_is_named(
    model: LoadedModel, gradients: Gradients
) -> None:
    """The noise moves the picture, and so leaves more of the gradient than it is itself."""
    sent, size = clipped(gradients, 1.0), size_of(gradients)
    leak = attacked(model, sent, labels=[3])
    assert leak.best.factor == pytest.approx(1 / size, rel=1e-6)
    assert leak.best.scaled_residual < 1e-6
    assert f"{1 / size:.3g} times" in leak.verdict
    assert off(leak, planted_images(1)) < 1e-5
    spread = 1e-2 / sum(g.numel() for g in sent.values()) ** 0.5
    leak = attacked(model, noisy(sent, spread), labels=[3], noise=spread)
    assert leak.best.scaled_residual > 0.01
    assert f"{leak.best.factor:.3g} times" in leak.verdict
    assert "explains" not in leak.verdict


@pytest.mark.parametrize("change", ["smoothing", "sign", "another label"])
def test_a_certain_picture_does_not_explain_another_loss(
    model: LoadedModel, gradients: Gradients, change: str
) -> None:
    """Which says nothing against it. A turned sign is told, where labels are not given."""
    sent = {n: -g for n, g in gradients.items()} if change == "sign" else gradients
    if change == "smoothing":
        sent = gradient_of(model, planted_images(1), LABEL, smoothing=0.5)
    given = 4 if change == "another label" else 3
    leak = attacked(model, sent, labels=given, attacks=["patch_gradient", "token_span"])
    assert (leak.best.attack, leak.best.is_certain) == ("patch_gradient", True)
    assert leak.best.residual > 0.1
    assert ("−1 times" in leak.verdict) == (change == "sign")
    assert ("[4]" in str(leak.notes) and "[3]" in str(leak.notes)) == (change == "another label")
    unlabelled = attacked(model, sent) if change == "sign" else leak
    assert any("weight_difference" in note for note in unlabelled.notes) == (change == "sign")


@pytest.mark.parametrize(
    "facts", [{}, {"kind": "weight_difference", "lr": 1e-3}, {"defenses": ["sign"]}]
)
def test_a_step_of_signs_that_nobody_declared_is_told(
    model: LoadedModel, gradients: Gradients, facts: dict[str, Any]
) -> None:
    signs = {name: -1e-3 * g.sign() for name, g in gradients.items()}
    notes = attacked(model, signs, **facts).notes
    told = ["adamw" in note for note in notes if "adamw" in note or "batch=" in note]
    assert told == ([False] if "defenses" in facts else [True])
    clipped = {name: g.clamp(-g.abs().median(), g.abs().median()) for name, g in gradients.items()}
    assert not any("adamw" in note for note in attacked(model, clipped).notes)


# mean and std -------------------------------------------------------------------------------------

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
HALF: Normalisation = (0.5,) * 3, (0.5,) * 3
NONE: Normalisation = (0.0,) * 3, (1.0,) * 3
IMAGENET: Normalisation = IMAGENET_MEAN, IMAGENET_STD
PICTURE = levels(planted_images(1))


def fed(picture: Tensor, normalised: Normalisation) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in normalised)
    return (picture - mean) / std


def declaring(model: LoadedModel, normalised: Normalisation) -> LoadedModel:
    """The model with another mean and std on its card."""
    other = copy.deepcopy(model)
    other.card = replace(model.card, mean=normalised[0], std=normalised[1])
    return other


def as_fed(model: LoadedModel, pixels: Tensor) -> dict[str, Tensor]:
    return gradient_of(model, pixels.to(model.like), LABEL, normalised=True)


def test_pictures_as_declared_stay_certain(model: LoadedModel) -> None:
    """Neither rounding nor declared noise is another normalisation."""
    known = declaring(model, IMAGENET)
    for image in (planted_images(1), torch.ones_like(PICTURE), PICTURE.round()):
        assert attacked(known, as_fed(model, fed(image, IMAGENET))).doubt == ""
    sent = as_fed(model, fed(PICTURE, IMAGENET))
    spread = 0.05 * float(sent[PATCH].std())
    assert attacked(known, noisy(sent, spread), noise=spread).doubt == ""


LAYERS: dict[str, Any] = {"attacks": {"layer_span": {"prior": "stationary"}}}


def test_a_picture_with_white_borders_is_certain_though_clipping_moves_them() -> None:
    narrow, picture = planted_model(embed_dim=72).float(), PICTURE.clone()
    picture[:, :, :8] = picture[:, :, -8:] = 1
    sent = gradient_of(narrow, picture.float(), LABEL)
    leak = attacked(narrow, sent, attacks="patch_gradient", images=picture)
    assert leak.best.exact == 1
    assert leak.best.is_certain


def test_what_an_attack_itself_calls_certain_is_doubted_too() -> None:
    """`layer_span` finds both pictures of a batch, of a client that fed [0, 1] where .5 and .25 are
    told; here and in the rows of a run."""
    told = planted_model(img_size=8, depth=3)
    plain, labels = declaring(told, NONE), torch.tensor([3, 5])
    sent = gradient_of(plain, levels(planted_images(2, 8)), labels)
    for model, certain in ((plain, 1), (told, 0)):
        leak = attacked(model, sent, labels=labels, **LAYERS)
        assert leak.best.verified == 2 * certain
        assert ("none (mean 0, std 1)" in leak.verdict) == bool(leak.doubt) == (not certain)
        view = own_uploads(model, sent, {}, labels=labels).view()
        found = of_recorded(view, leak.best.images, {CERTAIN: torch.ones(2)})
        assert found[CERTAIN].tolist() == [certain] * 2
        assert found[MISNORMALISED].tolist() == [1 - certain] * 2


@pytest.mark.parametrize("normalisation", [IMAGENET, ((0.0,) * 3, (1 / 255,) * 3)])
def test_a_batch_whose_pixels_leave_their_range_is_not_certain(
    normalisation: Normalisation,
) -> None:
    """Also of pixels that are no 8-bit levels, where nothing names the other normalisation; what
    attacks show is clipped."""
    told = planted_model(img_size=8, depth=3)
    fed_otherwise, labels = declaring(told, normalisation), torch.tensor([3, 5])
    pictures = planted_images(2, 8).lerp(torch.rand(2, 3, 8, 8).double(), 0.5)
    sent = gradient_of(fed_otherwise, pictures, labels)
    assert attacked(fed_otherwise, sent, labels=labels, **LAYERS).best.verified == 2
    wrong = attacked(told, sent, labels=labels, **LAYERS)
    assert wrong.best.verified == 0
    assert wrong.best.doubts.keys() == {0, 1}


def test_a_client_that_keeps_embeddings_to_itself_is_doubted_too() -> None:
    told, absent = planted_model(img_size=16), ("pos_embed", "patch_embed")
    plain = declaring(told, NONE)
    whole = gradient_of(plain, levels(planted_images(1, 16)), LABEL)
    sent = {name: gradient for name, gradient in whole.items() if not name.startswith(absent)}
    known: dict[str, Any] = {"attacks": {"token_peeling": {"prior": "stationary"}}}
    right, wrong = attacked(plain, sent, **known), attacked(told, sent, **known)
    assert (right.best.is_certain, right.doubt) == (True, "")
    assert not wrong.best.is_certain
    assert "none (mean 0, std 1)" in wrong.verdict


def test_a_table_whose_gradient_was_scaled_by_itself_hides_no_other_picture() -> None:
    known = declaring(planted_model(img_size=16), IMAGENET)
    sent = as_fed(known, fed(levels(planted_images(1, 16)), IMAGENET))
    apart = {n: g * 1.25 if n == "pos_embed" else g for n, g in sent.items()}
    leak = attacked(known, apart, attacks=["patch_gradient", "token_span"])
    assert leak["patch_gradient"].doubts
    assert not leak["token_span"].doubts  # the client's own


def centred(sent: Tensor) -> Tensor:
    """With a mean of 0 in each row, as an optimizer that centralises gradients takes them."""
    return sent - sent.mean(1, keepdim=True)


def of_few_directions(sent: Tensor) -> Tensor:
    """With the four largest singular values, as a client that compresses sends them."""
    left, sizes, right = torch.linalg.svd(sent, full_matrices=False)
    return (left * sizes.where(torch.arange(len(sizes)) < 4, 0)) @ right


@pytest.mark.parametrize("changed", [centred, of_few_directions])
def test_a_gradient_that_tells_a_part_of_the_pixels_alone_makes_no_picture_certain(
    model: LoadedModel, changed: Any
) -> None:
    """That part alone solves the patch equations. A table (1, rows, width) is one row to it. Few
    directions of the picture itself, as in a flat border, are no fewer of other layers; and the
    small sums of patches of noise are none that are taken out."""
    known = declaring(planted_model(img_size=64, patch_size=16), HALF)
    assert attacked(known, as_fed(known, fed(some_images(1, 64), HALF))).best.is_certain
    bordered = planted_images(1) * 0.2 + 0.3
    bordered[..., : model.patch_size, :] = bordered[..., : model.patch_size] = 0.4
    sent = gradient_of(model, bordered, LABEL)
    assert attacked(model, sent).best.is_certain
    some = {n: changed(g.flatten(1)).view_as(g) for n, g in sent.items() if g.ndim > 1}
    leak = attacked(model, {**sent, **some})
    assert off(leak, bordered) > 0.03
    assert leak.best.misfit < 1e-6
    assert not leak.best.is_certain


@pytest.mark.parametrize("declared", [0.0, 0.05])
@pytest.mark.parametrize("least", [1, 2])
def test_weight_decay_is_read_off_where_it_is_not_as_declared(declared: float, least: int) -> None:
    """Of all weights, or of those alone that have so many axes and are no table."""
    known = planted_model(img_size=16)
    moved = gradient_of(known, planted_images(1, 16), LABEL)
    for name, weight in known.named_parameters():
        if weight.ndim >= least and (least == 1 or name != "pos_embed"):
            moved[name] = moved[name] + 0.05 * weight.detach()
    client: dict[str, Any] = {"attacks": ["patch_gradient", "token_peeling"]}
    told = {"kind": "weight_difference", "lr": 0.1, "weight_decay": declared}
    leak = attacked(known, {n: -0.1 * g for n, g in moved.items()}, **told, **client)
    assert [made.is_certain for made in leak] == [True, True]
    assert off(leak, planted_images(1, 16)) < 1e-6
    assert len(leak.notes) == (declared == 0 or least == 2)
    assert declared or attacked(known, moved, **client).best.is_certain


# what no gradient tells ---------------------------------------------------------------------------


PLACES = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))
APART = PLACES[:, None] - PLACES
DISTANCE, DIRECTION = APART.norm(dim=2), APART @ torch.tensor([1.0, 0.4])
WINDOW = (PLACES // 2) @ torch.tensor([2.0, 1.0])
WINDOWS, ALL = WINDOW[:, None] == WINDOW, torch.ones(16, 16, dtype=torch.bool)


@pytest.mark.parametrize(
    ("sees", "bias", "count", "is_told"),
    [
        (ALL, DIRECTION, 1, True),
        (ALL, DISTANCE, 1, False),
        (WINDOWS, DIRECTION, 1, False),
        (ALL, DIRECTION, 2, True),
        (WINDOWS, DIRECTION, 2, False),
    ],
    ids=["direction", "distance", "windows", "batch", "a patchwork of windows"],
)
def test_an_order_that_attention_does_not_tell_is_not_certain(
    sees: Tensor, bias: Tensor, count: int, is_told: bool
) -> None:
    """A mirrored order, or one of other windows, has the same inputs of all layers. A single
    picture's network has no table, either."""
    torch.manual_seed(0)
    pictures = levels(planted_images(count, 32))
    options: dict[str, Any] = {"pos_embed": "none"} if count == 1 else {}
    network = attending(lambda: Attention(bias=bias.masked_fill(~sees, -1e9).double()), **options)
    known: dict[str, Any] = {"batch": count, "img_size": 32 if count == 1 else None}
    leak = leak_of(network, pictures, attacks="token_peeling", **known)
    assert leak.best.verified == (count if is_told else 0)
    assert not is_told or leak.best.exact == count


# shuffled, or with defences that are named --------------------------------------------------------


@pytest.fixture(scope="module")
def larger() -> LoadedModel:
    """A model of pictures of 64 pixels."""
    return planted_model(img_size=64, patch_size=8, embed_dim=96)


def test_a_mosaic_is_not_taken_for_a_shuffled_picture(larger: LoadedModel) -> None:
    pixels = nn.functional.avg_pool2d(photograph(0), 8)
    mosaic = nn.functional.interpolate(pixels, scale_factor=8)
    sent = gradient_of(larger, mosaic, LABEL)
    leak = attacked(larger, sent, images=mosaic, attacks=["patch_gradient", "patch_jigsaw"])
    assert (leak.best.attack, leak.moved) == ("patch_gradient", 0)


@pytest.mark.parametrize(("place", "shuffles"), [(0, True), (4, False)])
@pytest.mark.parametrize("width", [96, 48])
def test_the_best_picture_of_a_client_that_shuffles_is_the_one_in_order(
    place: int, shuffles: bool, width: int
) -> None:
    """A plain client's is not taken for a shuffled one. Where its 64 patches outnumber the width,
    no attack puts them in order, but that their borders do not fit is said all the same."""
    solves = "patch_gradient" if width > 64 else "patch_integers"
    model = planted_model(img_size=64, patch_size=8, embed_dim=width)
    plain, order = levels(photograph(place)), torch.arange(64)
    chosen = torch.randperm(64, generator=torch.Generator().manual_seed(place))[:16]
    order[chosen] = chosen.roll(int(shuffles))
    sent = gradient_of(model, shuffle_patches(plain, order[None], model.patch_size), LABEL)
    leak = attacked(model, sent, images=plain, attacks=[solves, "patch_jigsaw"])
    sorts = shuffles and width > 64
    assert leak.best.attack == ("patch_jigsaw" if sorts else solves)
    assert leak[solves].is_certain
    assert (str(leak.moved) in leak.verdict and "borders" in leak.verdict) == shuffles
    assert leak.moved >= 15 if shuffles else leak.moved == 0
    if sorts:
        assert not leak.best.is_certain  # its order is a guess
        assert leak.best.psnr > leak[solves].psnr + 10


DEFENSES = (
    *("dp_sgd 0.1", "gaussian_noise 0.1", "int8", "float16", "sign", "top_k 0.3", "prune 0.3"),
    *("percentile_privacy", "dp_sgd 0.1 clip 0.5, int8"),
)


@pytest.mark.parametrize("defenses", [text.split(", ") for text in DEFENSES])
def test_what_defences_leave_is_read_off_recipe_and_upload_as_the_client_declares_it(
    larger: LoadedModel, defenses: list[str]
) -> None:
    inputs, client = ClientInput(photograph(0), LABEL, ["one"]), ClientConfig(defenses=defenses)
    sent = make_upload(larger, [inputs], client)
    noise, rounding, _ = declared_errors(client, sent.grads)
    for told, known in ((noise, sent.noise), (rounding, sent.rounding)):
        assert told.keys() == {name for name, level in known.items() if level.any()}
        assert all(told[n].item() == pytest.approx(known[n].item(), rel=0.01) for n in told)


# what is said beside the originals ----------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 32), (16, 32)])
def test_values_between_two_levels_are_exact_and_others_are_not(size: tuple[int, int]) -> None:
    """An original that was resized as floating-point numbers is no 8-bit picture. LPIPS, which
    small ones have not, hinders no other score."""
    between = torch.full((1, 3, *size), 10.5 / 255)
    found = [scored(Reconstructed("april", between + step), between) for step in (-1e-6, -1e-3)]
    assert [one.exact for one in found] == [1, 0]


def test_an_attack_that_came_nearer_than_the_one_chosen_is_named(tmp_path: Path) -> None:
    originals = planted_images(2, 32)
    made = {
        name: scored(Reconstructed(name, (originals + far).clamp(0, 1)), originals, 2)
        for name, far in (("batch_span", 0.2), ("layer_span", 0.01))
    }
    leak = Leak(made, {}, None, "unknown", private=originals, batch=2)
    assert leak.best.attack == "batch_span"
    assert f"layer_span: 0 of 2 exact, {made['layer_span'].psnr:.1f} dB" in leak.verdict
    swapped = Leak(dict(reversed(made.items())), {}, None, "unknown", private=originals, batch=2)
    assert "batch_span" not in swapped.verdict
    for path in (tmp_path / "absent" / "leak.png", tmp_path / "leak.nothing"):
        with pytest.raises(UserError, match="cannot be written"):
            leak.show(path)


def test_an_attack_that_takes_too_long_ends_and_is_named(
    model: LoadedModel, gradients: Gradients
) -> None:
    known: dict[str, Any] = {"attacks": ["inverting_gradients"], "labels": [3]}
    leak = attacked(model, gradients, **known, seconds=0.05)
    ended = [*leak.notes, *(f"{name} {why}" for name, why in leak.refused.items())]
    assert any("inverting_gradients" in why and "0.05" in why for why in ended)
    with pytest.raises(UserError, match="seconds=0"):
        attacked(model, gradients, **known, seconds=0)
