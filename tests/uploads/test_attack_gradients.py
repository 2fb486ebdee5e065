"""`attack_gradients` on a small model of this package, whose pictures are known."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks import ATTACKS
from mjp_privacy import attack_gradients
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import shuffle_patches
from mjp_privacy.uploads.memory import half_precision_error
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images

STATIONARY = {"prior": "stationary"}
PATCHES = 64


def gradient_of(
    model: LoadedModel, images: Tensor, labels: Tensor, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """One step's gradient by name, as a plain loop makes it."""
    loss = nn.functional.cross_entropy(model(model.normalize(images), mask=mask), labels)
    names, parameters = zip(*model.named_parameters(), strict=True)
    values = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: g for n, g in zip(names, values, strict=True) if g is not None}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return planted_model()


@pytest.fixture(scope="module")
def gradients(model: LoadedModel) -> dict[str, Tensor]:
    return gradient_of(model, planted_images(1), torch.tensor([3]))


def test_the_picture_comes_back_and_is_known_to_without_the_truth(
    model: LoadedModel, gradients: dict[str, Tensor]
) -> None:
    leak = attack_gradients(model, gradients, attacks=["patch_gradient", "masked_span"])
    best = leak.best
    assert (best.image.double() - planted_images(1)[0]).abs().max() < 1e-6
    assert best.attack == "patch_gradient"  # of equals the simplest
    assert best.residual < 1e-6
    assert best.misfit < 1e-6
    assert leak.labels is not None
    assert (leak.labels.tolist(), leak.label_source) == ([3], "read off the gradient")
    assert leak.scores is None
    assert best.is_certain
    assert f"{best.residual:.1e}" in leak.verdict


def test_scores_where_images_are_given(model: LoadedModel, gradients: dict[str, Tensor]) -> None:
    images = planted_images(1)
    leak = attack_gradients(
        model, gradients, images=images[0].numpy(), labels=3, attacks=["patch_gradient"]
    )
    assert leak.scores is not None
    row = leak.scores.iloc[0]
    assert {"attack", "image", "mse", "psnr", "ssim", "fft2d", "lpips", "exact"} == set(row.index)
    assert row["psnr"] > 100
    assert bool(row["exact"])
    assert leak.label_source == "given"
    assert leak.floor is not None
    assert 5 < leak.floor < 25
    assert all(text in leak.verdict for text in ("1 of 1", f"{leak.floor:.1f}"))


def test_all_attacks_answer_with_a_result_or_a_reason(
    model: LoadedModel, gradients: dict[str, Tensor]
) -> None:
    leak = attack_gradients(model, gradients)
    assert {*leak.results, *leak.refused, *leak.skipped} == set(ATTACKS)
    assert {"april", "multi_round", "pixel_lattice"} <= leak.refused.keys()
    assert leak["mask_locator"].images is None
    for attack in ("mask_locator", "april", "inverting_gradients", "maskedspan"):
        with pytest.raises(UserError, match=attack.replace("maskedspan", "mean masked_span")):
            _ = leak[attack].image


def test_what_could_not_improve_certain_pictures_is_skipped_and_named(
    model: LoadedModel, gradients: dict[str, Tensor]
) -> None:
    leak = attack_gradients(model, gradients)
    assert leak.best.is_certain
    assert {"token_span", "inverting_gradients"} <= leak.skipped.keys()
    assert all(name in str(leak) for name in leak.skipped)
    assert sum(made.seconds for made in leak) <= leak.seconds
    unsolved = {name: g for name, g in gradients.items() if name != "patch_embed.proj.weight"}
    assert "token_span" not in attack_gradients(model, unsolved, labels=3).skipped


def test_a_weight_difference_is_a_gradient_times_the_rate(
    model: LoadedModel, gradients: dict[str, Tensor]
) -> None:
    difference = {name: -0.1 * g for name, g in gradients.items()}
    leak = attack_gradients(
        model, difference, kind="weight_difference", lr=0.1, attacks="patch_gradient"
    )
    assert (leak.best.image.double() - planted_images(1)[0]).abs().max() < 1e-6
    assert leak.best.residual < 1e-6


def test_independent_steps_share_a_leading_axis(model: LoadedModel) -> None:
    images, labels = planted_images(2), torch.tensor([3, 5])
    each = [gradient_of(model, images[i : i + 1], labels[i : i + 1]) for i in range(2)]
    both = {name: torch.stack([g[name] for g in each]) for name in each[0]}
    leak = attack_gradients(model, both, attacks="patch_gradient", images=images, batch=1)
    assert leak.scores is not None
    assert leak.scores["psnr"].min() > 100
    assert leak.labels is not None
    assert leak.labels.tolist() == [3, 5]


def test_an_attack_without_a_picture_of_every_image_is_not_the_best() -> None:
    """plain_step has no picture of the image that was masked in both uploads."""
    model = planted_model(unknown_embedding=True)
    masked, label = masked_uploads(model, 2), torch.tensor([3])
    plain = [gradient_of(model, planted_images(2)[1:], label)] * 2
    both = [
        {n: torch.stack([g, other.get(n, torch.zeros_like(g))]) for n, g in one.items()}
        for one, other in zip(masked, plain, strict=True)
    ]
    chosen = {"plain_step": {}, "masked_span": STATIONARY}
    leak = attack_gradients(model, both, attacks=chosen, images=planted_images(2))
    assert leak.best.attack == "masked_span"
    assert leak["plain_step"].image.isfinite().all()
    assert "1 of 2" in str(leak)
    assert "plain_step: images (2, 3, 32, 32)" in repr(leak["plain_step"])


def masked_uploads(model: LoadedModel, rounds: int) -> list[dict[str, Tensor]]:
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
        uploads.append(gradient_of(model, fed, torch.tensor([3]), mask))
    return uploads


def test_several_uploads_of_an_mjp_client_meet_in_one_picture() -> None:
    model = planted_model(unknown_embedding=True)
    uploads = masked_uploads(model, 8)
    chosen = {"masked_span": STATIONARY, "multi_round": STATIONARY}
    leak = attack_gradients(model, uploads, attacks=chosen, images=planted_images(1))
    assert leak.scores is not None
    psnr = leak.scores.set_index("attack")["psnr"]
    assert psnr["multi_round"] > 60 > psnr["masked_span"]
    assert leak.best.attack == "multi_round"
    mask = leak["masked_span"].mask
    assert mask is not None
    assert int(mask.sum()) == 16


def test_several_uploads_may_come_from_several_models(
    model: LoadedModel, gradients: dict[str, Tensor]
) -> None:
    later = planted_model()
    with torch.no_grad():
        for name, parameter in later.named_parameters():
            parameter -= 0.01 * gradients.get(name, torch.zeros_like(parameter))
    second = gradient_of(later, planted_images(1), torch.tensor([3]))
    leak = attack_gradients(
        [model, later], [gradients, second], attacks={"multi_round": STATIONARY}
    )
    assert (leak.best.image.double() - planted_images(1)[0]).abs().max() < 1e-5
    assert leak.best.residual < 1e-4
    with pytest.raises(UserError, match=r"one model, or one for each of 1 upload\(s\), got 2"):
        attack_gradients([model, later], gradients)
    for wrong in (model.state_dict(), "model.pth", [], [model.state_dict()]):
        with pytest.raises(UserError, match=r"model: expected a network .* got (Ord|str|list)"):
            attack_gradients(wrong, gradients)  # type: ignore[arg-type]


def test_without_labels_the_misfit_decides(
    model: LoadedModel, gradients: dict[str, Tensor]
) -> None:
    kept = {name: g for name, g in gradients.items() if not name.startswith("head.")}
    leak = attack_gradients(model, kept, attacks="patch_gradient")
    assert leak.label_source == "unknown"
    assert math.isnan(leak.best.residual)
    assert leak.best.misfit < 1e-6
    assert leak.best.is_certain
    assert f"{leak.best.misfit:.1e}" in leak.verdict


@pytest.mark.parametrize("labels", [None, torch.tensor([3, 5])])
def test_a_batch_cannot_be_checked_with_or_without_labels(
    model: LoadedModel, labels: Tensor | None
) -> None:
    """Which picture of a batch has which label is not known."""
    gradients = gradient_of(model, planted_images(2), torch.tensor([3, 5]))
    leak = attack_gradients(model, gradients, labels=labels, batch=2, attacks="patch_gradient")
    assert leak.best.residuals is None
    assert leak.best.verified == 0
    assert "residual" not in repr(leak.best)


@pytest.mark.parametrize("change", ["smoothing", "sign", "another label"])
def test_a_picture_is_certain_whatever_the_loss(model: LoadedModel, change: str) -> None:
    """The whole gradient is then not explained, which says nothing against the picture."""
    label = torch.tensor([3])
    logits = model(model.normalize(planted_images(1)))
    loss = nn.functional.cross_entropy(logits, label, label_smoothing=0.3 * (change == "smoothing"))
    (loss * (-1 if change == "sign" else 1)).backward()
    given = 4 if change == "another label" else 3
    leak = attack_gradients(model, labels=given, attacks=["patch_gradient", "token_span"])
    model.zero_grad()
    assert (leak.best.image.double() - planted_images(1)[0]).abs().max() < 1e-6
    assert leak.best.attack == "patch_gradient"
    assert leak.best.residual > 0.1
    assert leak.best.is_certain
    if change == "sign":
        assert "times −1 " in leak.verdict
    contradicted = "labels [4] were given, and the classifier's gradient says [3]" in str(leak)
    assert contradicted == (change == "another label")


def test_a_batch_that_is_called_one_picture_is_noticed(model: LoadedModel) -> None:
    gradients = gradient_of(model, planted_images(4), torch.tensor([1, 2, 3, 4]))
    leak = attack_gradients(model, gradients, attacks="patch_gradient")
    assert leak.label_source == "unknown"
    (note,) = leak.notes
    assert re.search(r"at least [234] classes", note)
    assert f"{leak.best.misfit:.2g}" in leak.verdict
    assert not leak.best.is_certain


def test_a_frozen_table_that_is_sent_as_zeros_counts_as_withheld(
    model: LoadedModel, gradients: dict[str, Tensor]
) -> None:
    frozen = {**gradients, "pos_embed": torch.zeros_like(gradients["pos_embed"])}
    leak = attack_gradients(model, frozen, attacks=["patch_gradient", "mask_locator"])
    assert leak.refused["patch_gradient"] == "the upload holds no gradient of pos_embed"
    assert "pos_embed is missing or zero throughout" in leak.notes[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_declared_where_it_is_weighed(
    model: LoadedModel, gradients: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """float16 rounds less than attacks weigh; of bfloat16 the declared error is what it made."""
    for name in ("pos_embed", "patch_embed.proj.weight"):
        exact = gradients[name].unsqueeze(0)
        error = (exact.to(dtype).double() - exact).square().mean().sqrt()
        expected = float(error) if dtype == torch.bfloat16 else 0.0
        declared = float(half_precision_error(exact.to(dtype)))
        assert declared == pytest.approx(expected, rel=0.2)
    rounded = {name: g.to(dtype) for name, g in gradients.items()}
    leak = attack_gradients(
        model, rounded, attacks={"patch_gradient": {}, "patch_prior": STATIONARY}
    )
    assert len(leak.results) == 2


def test_the_picture_is_written(
    model: LoadedModel, gradients: dict[str, Tensor], tmp_path: Path
) -> None:
    leak = attack_gradients(model, gradients, attacks="patch_gradient", images=planted_images(1))
    leak.show(tmp_path / "leak.png")
    assert (tmp_path / "leak.png").stat().st_size > 5000
    for place in (tmp_path / "nowhere" / "leak.png", tmp_path, tmp_path / "leak.doc"):
        with pytest.raises(UserError, match=place.name):
            leak.show(place)
    nothing = attack_gradients(model, gradients, attacks="april")
    with pytest.raises(UserError, match="refused"):
        nothing.show()
    with pytest.raises(UserError, match="april"):
        _ = nothing.best


DIFFERENCE = {"kind": "weight_difference", "lr": 0.1}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"attacks": "patch_gradients"}, "patch_gradient"),
    ({"kind": "weight_difference"}, "lr"),
    ({"lr": 0.1}, "lr=0.1"),
    ({"momentum": 0.9}, "momentum=0.9"),
    (DIFFERENCE | {"optimizer": "SGD"}, "sgd"),
    (DIFFERENCE | {"optimizer": "adam"}, "adamw"),
    ({"labels": [1, 2], "batch": 1}, r"\[1, 2"),
    ({"images": torch.randn(1, 3, 32, 32)}, "normalisation"),
    ({"defenses": "int8"}, "defenses"),
    ({"defenses": ["int9"]}, "int8"),
    ({"defenses": ["int8", "float16"]}, "rounding="),
]
"""Arguments, and what the refusal names; `test_bad_objects.py` has every argument's bad types."""


@pytest.mark.parametrize(("arguments", "named"), MISTAKES)
def test_a_wrong_argument_is_named(
    model: LoadedModel, gradients: dict[str, Tensor], arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        attack_gradients(model, gradients, **arguments)
