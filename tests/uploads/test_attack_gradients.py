"""`attack_gradients` on a small model of this package, whose pictures are known."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from attacks import ATTACKS
from mjp_privacy import attack_gradients, load_model, save_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import shuffle_patches
from mjp_privacy.models.live.modules import load_module
from mjp_privacy.uploads import checks
from mjp_privacy.uploads.memory import half_precision_error, own_uploads
from tests.helpers.models import planted_model
from tests.helpers.planted import gradient_of, planted_images

Gradients = dict[str, Tensor]
STATIONARY = {"prior": "stationary"}
PLAIN: dict[str, Any] = {"mean": 0.5, "std": 0.5, "num_classes": 7}
PATCHES, LABEL = 64, torch.tensor([3])


def off(picture: Tensor) -> float:
    """The largest distance of a pixel from the planted picture's."""
    return float((picture.double() - planted_images(1)[0]).abs().max())


def test_the_picture_comes_back_and_is_known_to_without_the_truth(
    model: LoadedModel, gradients: Gradients
) -> None:
    """Scores are there where images are given; also of a weight difference, which is a gradient
    times the rate."""
    leak = attack_gradients(model, gradients, attacks=["patch_gradient", "masked_span"])
    best = leak.best
    assert off(best.image) < 1e-6
    assert best.attack == "patch_gradient"  # of equals the simplest
    assert max(best.residual, best.misfit) < 1e-6
    assert best.factor == pytest.approx(1)
    assert (leak.labels.tolist(), leak.label_source) == ([3], "read off the gradient")
    assert leak.scores is None
    assert best.is_certain
    assert f"{best.residual:.1e}" in leak.verdict
    own: dict[str, Any] = {"images": planted_images(1)[0].numpy(), "attacks": "patch_gradient"}
    leak = attack_gradients(model, gradients, labels=3, **own)
    row = leak.scores.iloc[0]
    assert {"attack", "image", "mse", "psnr", "ssim", "fft2d", "lpips", "exact"} == set(row.index)
    assert row["psnr"] > 100
    assert bool(row["exact"])
    assert leak.label_source == "given"
    assert 5 < leak.floor < 25
    assert all(text in leak.verdict for text in ("1 of 1", f"{leak.floor:.1f}"))
    difference = {name: -0.1 * g for name, g in gradients.items()}
    of_weights = attack_gradients(model, difference, kind="weight_difference", lr=0.1, **own).best
    assert of_weights.exact == 1
    assert of_weights.residual < 1e-6


def test_a_caller_without_autograd_gets_the_same(
    model: LoadedModel, gradients: Gradients, tmp_path: Path
) -> None:
    """Also of tensors that were made without it."""
    with torch.inference_mode():
        made = {name: g.clone() for name, g in gradients.items()}
        given: dict[str, Any] = {"labels": LABEL.clone(), "images": planted_images(1).clone()}
        leak = attack_gradients(model, made, attacks=("patch_gradient", "head_features"), **given)
        saved = save_upload(tmp_path / "own", model, made, **given)
        fresh = load_model("eva02_tiny_patch14_224", checkpoint="random", img_size=56, **PLAIN)
        copy = load_module(getattr(fresh, "net", fresh), mean=0.5, std=0.5)
    assert leak.best.is_certain
    assert len(leak.results) == 2
    assert saved.is_file()
    assert not any(one.like.is_inference() for one in (fresh, copy))


def test_every_attack_has_a_result_or_a_reason(model: LoadedModel, gradients: Gradients) -> None:
    """What could not improve certain pictures is skipped, and named."""
    leak = attack_gradients(model, gradients)
    assert {*leak.results, *leak.refused, *leak.skipped} == set(ATTACKS)
    assert {"april", "multi_round", "pixel_lattice"} <= leak.refused.keys()
    assert {"token_span", "inverting_gradients"} <= leak.skipped.keys()
    assert all(name in str(leak) for name in leak.skipped)
    assert sum(made.seconds for made in leak) <= leak.seconds
    assert leak["mask_locator"].images is None
    for attack in ("mask_locator", "april", "inverting_gradients", "maskedspan"):
        with pytest.raises(UserError, match=attack.replace("maskedspan", "mean masked_span")):
            _ = leak[attack].image
    unsolved = {name: g for name, g in gradients.items() if name != "patch_embed.proj.weight"}
    assert "token_span" not in attack_gradients(model, unsolved, labels=3).skipped
    nothing = attack_gradients(model, gradients, attacks="april")
    with pytest.raises(UserError, match="refused"):
        nothing.show()
    with pytest.raises(UserError, match="april"):
        _ = nothing.best


@pytest.mark.parametrize("where", ["", "embed"])
def test_tokens_that_errors_hide_are_not_searched_beside_a_picture_that_explains_them(
    where: str,
) -> None:
    """Errors in the embeddings' gradients alone hide none."""
    small, draws = planted_model(img_size=16), torch.Generator().manual_seed(0)
    sent = gradient_of(small, planted_images(1, 16), LABEL)
    for name, g in sent.items():
        if where in name:
            g += 2e-3 * g.std() * torch.randn(g.shape, generator=draws, dtype=g.dtype)
    leak = attack_gradients(small, sent)
    assert leak["patch_gradient"].residual < 0.01
    assert ("token_peeling" in leak.skipped) == (where == "")


def test_pictures_below_the_windows_of_metrics_have_the_other_scores() -> None:
    """Of 8 pixels a side SSIM and LPIPS have no value, which is noted."""
    small = planted_model(img_size=8)
    picture = planted_images(1, 8)
    own = gradient_of(small, picture, LABEL)
    leak = attack_gradients(small, own, attacks="patch_gradient", images=picture)
    assert leak.scores is not None
    assert set(leak.scores) == {"attack", "image", "mse", "psnr", "fft2d", "exact"}
    assert any("ssim" in note for note in leak.notes)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("roundig", "rounding"), ("kinds", "kind"), ("nois", "noise"), ("image", "images")],
)
def test_a_misspelt_keyword_is_told_what_is_meant(
    model: LoadedModel, gradients: Gradients, tmp_path: Path, misspelt: str, meant: str
) -> None:
    for call in (attack_gradients, partial(save_upload, tmp_path)):
        with pytest.raises(UserError, match=rf"{misspelt}.* {meant}[,?]"):
            call(model, gradients, **{misspelt: 0.1})


def test_a_misspelt_keyword_is_compared_with_the_functions_own(
    model: LoadedModel, gradients: Gradients, tmp_path: Path
) -> None:
    of_saving = partial(save_upload, tmp_path)
    for call, meant in ((attack_gradients, "attacks seconds seed"), (of_saving, "series round")):
        for name in meant.split():
            with pytest.raises(UserError, match=f"mean {name}"):
                call(model, gradients, **{f"{name}s": 1})


# several uploads ----------------------------------------------------------------------------------


def masked_uploads(model: LoadedModel, rounds: int) -> list[Gradients]:
    """Uploads of one picture, each with a fresh mask of 16 of its 64 patches."""
    generator = torch.Generator().manual_seed(4)
    uploads = []
    for _ in range(rounds):
        order = torch.arange(PATCHES)
        chosen = torch.randperm(PATCHES, generator=generator)[:16].sort().values
        order[chosen] = chosen[torch.randperm(16, generator=generator)]
        mask = torch.zeros(1, PATCHES, dtype=torch.bool)
        mask[0, chosen] = True
        fed = shuffle_patches(planted_images(1), order.unsqueeze(0), model.patch_size)
        uploads.append(gradient_of(model, fed, LABEL, mask))
    return uploads


def test_several_uploads_of_an_mjp_client_meet_in_one_picture() -> None:
    """An attack without a picture is not the best: plain_step has none of an image that was masked
    in every upload."""
    model = planted_model(unknown_embedding=True)
    chosen = {"plain_step": {}, "masked_span": STATIONARY, "multi_round": STATIONARY}
    uploads = masked_uploads(model, 8)
    leak = attack_gradients(model, uploads, attacks=chosen, images=planted_images(1))
    assert leak["multi_round"].psnr > 60 > leak["masked_span"].psnr
    assert leak.best.attack == "multi_round"
    assert "plain_step" in leak.refused
    mask = leak["masked_span"].mask
    assert int(mask.sum()) == 16


def test_several_uploads_may_come_from_several_models(
    model: LoadedModel, gradients: Gradients
) -> None:
    later = planted_model()
    with torch.no_grad():
        for name, parameter in later.named_parameters():
            parameter -= 0.01 * gradients.get(name, torch.zeros_like(parameter))
    sent = [gradients, gradient_of(later, planted_images(1), LABEL)]
    leak = attack_gradients([model, later], sent, attacks={"multi_round": STATIONARY})
    assert off(leak.best.image) < 1e-5
    assert leak.best.residual < 1e-4
    with pytest.raises(UserError, match=r"model: .* 1 upload\(s\); got 2"):
        attack_gradients([model, later], gradients)


@pytest.mark.parametrize("mean", [0.5, 0.4])
def test_several_uploads_of_more_patches_than_the_width_tell_the_normalisation(
    mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are solved together once."""
    solved, several = list[int](), checks.several_uploads
    monkeypatch.setattr(
        checks, "several_uploads", lambda *given: solved.append(1) or several(*given)
    )
    narrow: dict[str, Any] = {"embed_dim": 48, "num_heads": 3, "std": 0.5}
    image = (planted_images(1) * 255).round() / 255
    client = planted_model(**narrow, mean=0.5)
    sent = [gradient_of(client, image, torch.tensor([label])) for label in range(3)]
    told = planted_model(**narrow, mean=mean)
    best = attack_gradients(told, sent, attacks={"multi_round": STATIONARY}).best
    assert ("mean 0.5" in str(best.doubts)) == (mean != 0.5)
    assert len(solved) == 1


def test_what_uploads_determine_together_is_best_whatever_the_weights() -> None:
    """Of a client whose weights moved and are not known one upload's picture leaves less."""
    narrow: dict[str, Any] = {"embed_dim": 48, "num_heads": 3}
    sent, moving = [], planted_model(**narrow)
    draws = torch.Generator().manual_seed(0)
    for _ in range(4):
        with torch.no_grad():
            for p in moving.parameters():
                p += 0.05 * torch.randn(p.shape, generator=draws, dtype=p.dtype)
        sent.append(gradient_of(moving, planted_images(1), LABEL))
    chosen = ("patch_prior", "multi_round")
    leak = attack_gradients(planted_model(**narrow), sent, attacks=chosen)
    assert leak["patch_prior"].scaled_residual < leak["multi_round"].scaled_residual
    assert leak.best.attack == "multi_round"
    assert off(leak.best.image) < 1e-5
    assert [made.together for made in leak] == [False, True]


@pytest.mark.parametrize(
    ("kind", "share", "held"),
    [
        ("gradient", 1e-170, torch.float64),
        ("weight_difference", 1e-5, torch.float32),
        ("gradient", 1.0, torch.bfloat16),
        ("weight_difference", 1.0, torch.bfloat16),
        ("weight_difference", 1.0, torch.float16),
    ],
)
def test_an_upload_of_another_picture_is_named(kind: str, share: float, held: torch.dtype) -> None:
    """One of a model that has learned the picture sends a share of the others' gradient, of which
    weights in float32 keep few digits; nor are numbers of 16 bits, or weights, in float32 another
    picture's."""
    model, (one, other) = planted_model(patch_size=8), planted_images(2).split(1)
    step: dict[str, Any] = {"kind": kind, "attacks": {"multi_round": STATIONARY}}
    own = dict(model.named_parameters())

    def sent(image: Tensor, label: int, share: float = 1.0) -> Gradients:
        grads = gradient_of(model, image, torch.tensor([label]))
        made = {name: (share * grad.double()).to(held) for name, grad in grads.items()}
        if kind == "weight_difference":
            step["lr"] = 0.1
            before = {name: own[name].detach().to(held) for name in grads}
            made = {name: before[name] - 0.1 * g - before[name] for name, g in made.items()}
        return {name: g.to(torch.promote_types(held, torch.float32)) for name, g in made.items()}

    uploads = [sent(one, 0, share), *(sent(one, label) for label in range(1, 4))]
    notes = attack_gradients(model, uploads, **step).notes
    assert not any("hold the same picture" in note for note in notes)
    uploads[2] = sent(other, 3)
    notes = attack_gradients(model, uploads, **step).notes
    (note,) = [note for note in notes if "hold the same picture" in note]
    assert "without upload 3 of 4" in note


# what is not known --------------------------------------------------------------------------------


def test_what_is_not_known_is_noted(model: LoadedModel, gradients: Gradients) -> None:
    """Without labels the misfit decides; a frozen table that is sent as zeros is withheld."""
    kept = {name: g for name, g in gradients.items() if not name.startswith("head.")}
    leak = attack_gradients(model, kept, attacks="patch_gradient")
    assert leak.label_source == "unknown"
    assert math.isnan(leak.best.residual)
    assert leak.best.misfit < 1e-6
    assert leak.best.is_certain
    assert f"{leak.best.misfit:.1e}" in leak.verdict
    frozen = {**gradients, "pos_embed": torch.zeros_like(gradients["pos_embed"])}
    leak = attack_gradients(model, frozen, attacks=["patch_gradient", "mask_locator"])
    assert leak.refused["patch_gradient"] == "the upload holds no gradient of pos_embed"
    assert "pos_embed" in leak.notes[0]
    patches = ("patch_embed.proj.weight", "patch_embed.proj.bias")
    frozen = {n: torch.zeros_like(g) if n in patches else g for n, g in gradients.items()}
    assert not {*patches} & {*own_uploads(model, frozen, {}).updates[0].grads}


@pytest.mark.parametrize(("scale", "double"), [(1e-5, False), (1e-5, True), (0.1, False)])
def test_a_layer_scale_that_float32_rounds_off_is_noted(scale: float, double: bool) -> None:
    network = timm.create_model(
        "vit_small_patch14_dinov2", img_size=28, depth=1, num_classes=7, init_values=scale
    )
    sent = {name: torch.ones_like(p) for name, p in network.named_parameters()}
    if double:
        sent = {name: gradient.double() for name, gradient in sent.items()}
    notes = own_uploads(network, sent, {"batch": 1}, labels=LABEL, mean=0.5, std=0.5).notes
    assert any("layer scale" in note for note in notes) == (scale < 0.1 and not double)


def test_a_turned_sign_is_told_of_a_network_that_is_sure_of_another_class() -> None:
    """And is not taken for smoothed labels."""
    model = planted_model()
    with torch.no_grad():
        model.head.bias[5] += 20
    sent = {name: -g for name, g in gradient_of(model, planted_images(1), LABEL).items()}
    uploads = own_uploads(model, sent, {})
    assert (uploads.labels, "weight_difference" in uploads.notes[0]) == (None, True)
    smoothed = gradient_of(model, planted_images(1), LABEL, smoothing=0.1)
    assert own_uploads(model, smoothed, {}).labels == LABEL


def test_classes_that_do_not_fit_one_picture_are_noticed(
    model: LoadedModel, gradients: Gradients
) -> None:
    """Of several uploads, or of a batch that is called one."""
    other = gradient_of(model, planted_images(2)[1:], torch.tensor([5]))
    batch = gradient_of(model, planted_images(4), torch.tensor([1, 2, 3, 4]))
    for sent, named in (([gradients, other], r"\[3\], \[5\]"), (batch, "at least [234] classes")):
        leak = attack_gradients(model, sent, attacks="patch_gradient")
        assert leak.label_source == "unknown"
        (note,) = leak.notes
        assert re.search(named, note)
    assert f"{leak.best.misfit:.2g}" in leak.verdict
    assert not leak.best.is_certain


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_declared_where_it_is_weighed(
    model: LoadedModel, gradients: Gradients, dtype: torch.dtype
) -> None:
    """float16 rounds less than attacks weigh; of bfloat16 the declared error is what it made."""
    for name in ("pos_embed", "patch_embed.proj.weight"):
        exact = gradients[name].unsqueeze(0)
        error = (exact.to(dtype).double() - exact).square().mean().sqrt()
        expected = float(error) if dtype == torch.bfloat16 else 0.0
        assert float(half_precision_error(exact.to(dtype))) == pytest.approx(expected, rel=0.2)
    rounded = {name: g.to(dtype) for name, g in gradients.items()}
    chosen = {"patch_gradient": {}, "patch_prior": STATIONARY}
    assert len(attack_gradients(model, rounded, attacks=chosen).results) == 2


def test_autocast_is_read_off_the_gradient_and_makes_attacks_stronger(
    halved: tuple[LoadedModel, Gradients],
) -> None:
    """Or it is named, where the gradient does not tell."""
    model, sent = halved
    slightly_other = {**sent, "pos_embed": sent["pos_embed"] * 1.0017}
    untold = {name: g for name, g in sent.items() if name != "pos_embed"}
    named = {"autocast": "bf16"}
    for given, facts, kind in ((sent, {}, "bf16"), (untold, {}, "none"), (untold, named, "bf16")):
        assert own_uploads(model, given, facts).view().updates[0].autocast == kind
    known, unknown = (
        attack_gradients(model, g, images=planted_images(1).float(), attacks="patch_gradient").best
        for g in (sent, slightly_other)
    )
    assert known.psnr > unknown.psnr + 1


# batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("labels", "clipped"), [([5, 3], 1.0), (None, 50.0), (None, -1.0)])
def test_pictures_of_a_batch_are_certain_and_each_has_its_class(
    labels: list[int] | None, clipped: float
) -> None:
    """`layer_span` finds both; labels are given in another order than that of the pictures. Of a
    gradient of the other sign, which they do not explain, pictures have no classes."""
    model, private = planted_model(img_size=8, depth=3), planted_images(2, 8)
    sent = gradient_of(model, private, torch.tensor([3, 5]))
    sent = {name: gradient / clipped for name, gradient in sent.items()}
    chosen = {"patch_gradient": {}, "layer_span": STATIONARY}
    leak = attack_gradients(model, sent, labels=labels, batch=2, attacks=chosen)
    assert leak.best.is_certain
    if clipped < 0:
        assert all(made.labels is None for made in leak)
        assert f"{leak.best.residual:.2g}" in leak.verdict
        return
    assert leak.best.attack == "layer_span"
    distance = (leak.best.images[:, None] - private).abs().flatten(2).amax(2)
    assert leak.best.labels[distance.argmin(0)].tolist() == [3, 5]
    assert leak.best.scaled_residual < 1e-5 < leak["patch_gradient"].scaled_residual
    assert leak.best.factor == pytest.approx(1 / clipped)
    assert "2 of 2" in leak.verdict
    assert "nan" not in str(leak)
    assert any("batch 2" in note for note in leak.notes)
    unseen = {name: gradient for name, gradient in sent.items() if "patch_embed" not in name}
    found = attack_gradients(model, unseen, batch=2, attacks={"token_peeling": STATIONARY}).best
    assert (math.isnan(found.residual), found.labels) == (True, None)


def test_attacks_with_different_numbers_of_pictures_are_ranked_and_drawn(tmp_path: Path) -> None:
    """Where nothing is verified the best is made for batches. Of two batches that share the picture
    2, beside an original stands the picture that was scored; without originals those that are
    certain come first."""
    wide = planted_model(patch_size=8, embed_dim=80, depth=1)

    def step(*numbers: int) -> Gradients:
        return gradient_of(wide, planted_images(6)[list(numbers)], torch.tensor(numbers))

    sent = [step(0, 1, 2), step(3, 4, 2)]
    known: dict[str, Any] = {"shared_picture": STATIONARY, "patch_gradient": {}}
    chosen = {"patch_gradient": {}, "batch_span": STATIONARY}
    leak = attack_gradients(wide, step(0, 1), batch=2, attacks=chosen)
    assert [made.attack for made in leak.ranked] == ["batch_span", "patch_gradient"]
    assert leak.best.verified == 0
    assert "no evidence of safety" in leak.verdict
    figure = attack_gradients(wide, sent, batch=3, attacks=known).show(tmp_path / "leak.png")
    assert (tmp_path / "leak.png").stat().st_size > 5000
    beside = attack_gradients(wide, sent, batch=3, attacks=known, images=planted_images(6))
    figure = beside.show()
    titles = [axes.get_title() for axes in figure.axes]
    assert ["certain" in title for title in titles[1::3]] == [False, False, True, False]
    original, drawn = (torch.as_tensor(figure.axes[6 + at].images[0].get_array()) for at in (0, 1))
    assert (drawn - original).abs().max() < 1e-3  # of picture 2, in the best attack's column


def test_the_first_uploads_pictures_are_scored_where_an_attack_reads_no_more(
    model: LoadedModel,
) -> None:
    images = planted_images(4)
    steps = [gradient_of(model, images[at : at + 2], torch.tensor([3, 4])) for at in (0, 2)]
    leak = attack_gradients(model, steps, batch=2, images=images, attacks="patch_gradient")
    scores = leak["patch_gradient"].scores
    assert len(scores) == 2
