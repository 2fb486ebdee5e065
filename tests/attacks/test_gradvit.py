"""Gradvit: what its switches do, and that it finds a planted picture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.gradvit import GradViT
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, ClientInput, Reconstruction
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models.jigsaw import shuffle_patches, to_patches
from tests.helpers.models import planted_model
from tests.helpers.night import nightly
from tests.helpers.planted import planted_images, planted_view

QUICK: dict[str, Any] = {"steps": 4, "seeds": 2, "image_prior": "stationary"}


def view_of(
    setting: str = "a", *, images: int = 1, batch: int = 1, side: int = 16
) -> tuple[AttackerView, ClientInput]:
    model = planted_model(img_size=side, depth=1, unknown_embedding=True)
    planted = planted_images(images, side)
    client = ClientConfig(batch=batch)
    return planted_view(
        model, find_attack("gradvit"), setting, images=planted, client=client, gamma=0.5
    )


def made_by(view: AttackerView, *, seed: int = 0, **options: object) -> Reconstruction:
    attack = find_attack("gradvit", QUICK | options)
    assert isinstance(attack, GradViT)
    assert attack.unsupported(view) is None
    return attack.run(view, generator=torch.Generator().manual_seed(seed))


def pixels(made: Reconstruction) -> Tensor:
    assert made.images is not None
    return made.images


def assert_same(first: Tensor, second: Tensor) -> None:
    """Equal but for one rounding: breaching's distances are compiled after their first calls."""
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_the_seed_decides_and_nothing_global_moves() -> None:
    view, _ = view_of("b")
    before = torch.get_rng_state()
    first = pixels(made_by(view, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert_same(first, pixels(made_by(view, seed=1)))
    assert not torch.equal(first, pixels(made_by(view, seed=2)))


@pytest.mark.parametrize("distance", ["cosine", nightly("squared")])
def test_a_planted_picture_is_approached(distance: str) -> None:
    """From the start on, the distance falls and the picture gets better, masked patches and all."""
    view, inputs = view_of("b", side=8)
    assert inputs.mask is not None
    assert inputs.mask.any()
    options = {"distance": distance, "tv": 0.02, "step_size": 0.2, "borders": 0.01}
    start, end = (made_by(view, steps=steps, **options) for steps in (1, 100))
    begun, reached = (float(psnr(pixels(made), inputs.images)) for made in (start, end))
    assert end.diagnostics["cosine_distance"] < 0.3 * start.diagnostics["cosine_distance"]
    assert reached > begun + 3


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        *({"distance": "squared"}, {"tv": 0.5}, {"l2": 0.5}, {"borders": 1}),
        *({"prior_weight": 0.1}, {"prior_weight": 0.1, "schedule": "together"}),
        *({"image_prior": "fitted", "prior_weight": 0.1}, {"consensus": 2}),
    ],
    ids=str,
)
def test_each_switch_moves_the_picture(options: dict[str, Any]) -> None:
    view, _ = view_of("b")
    off = {"tv": 0, "l2": 0, "borders": 0, "prior_weight": 0, "consensus": 0, "steps": 6}
    options = off | options
    without = off | {key: options[key] for key in ("prior_weight",) if "schedule" in options}
    assert not torch.equal(pixels(made_by(view, **options)), pixels(made_by(view, **without)))


def test_without_a_prior_its_weight_and_schedule_mean_nothing() -> None:
    view, _ = view_of()
    none = pixels(made_by(view, image_prior="none"))
    for options in ({"image_prior": "none", "schedule": "together"}, {"prior_weight": 0}):
        assert_same(none, pixels(made_by(view, **options)))


@pytest.mark.nightly
def test_with_all_switched_off_it_is_inverting_gradients() -> None:
    """The same loop, from the same noise: 40 steps in one go, or 20 and 20 with Adam's memory
    lost between."""
    view, _ = view_of("b")
    other = find_attack(
        "inverting_gradients", {"steps": 40, "decay": "cosine-decay", "signed": "none"}
    )
    expected = pixels(other.run(view, generator=torch.Generator().manual_seed(0)))  # type: ignore[call-arg]
    off = {"steps": 40, "l2": 0, "borders": 0, "image_prior": "none", "seeds": 1}
    assert_same(expected, pixels(made_by(view, **off)))
    halves = off | {"image_prior": "stationary", "prior_weight": 1e-12}
    torch.testing.assert_close(expected, pixels(made_by(view, **halves)), rtol=0, atol=0.2)


def test_a_part_of_the_steps_has_its_step_size_of_the_whole() -> None:
    from attacks.breaching import match_gradients, optimization_configuration

    view, inputs = view_of()
    uploaded = view.updates[0].grads
    grads = {name: grad[0] for name, grad in uploaded.items() if name != "unk_embed"}
    optim = {"max_iterations": 10, "step_size_decay": "linear", "signed": "hard", "boxed": False}
    config = optimization_configuration(torch.float64, {"optim": optim}, 0.0)
    start = view.model.normalize(inputs.images) + 0.1
    assert view.labels is not None
    moved = []
    for part in (range(1), range(4, 5), range(9, 10), range(10, 10)):
        given = view.model, grads, view.labels, None, view.pixels, config
        pictures, facts = match_gradients(*given, start=start, part=part)
        assert facts["steps"] == len(part)
        moved.append(float((pictures - start).abs().max()))
    assert moved == pytest.approx([0.1, 0.06, 0.01, 0], rel=1e-3, abs=1e-9)


@pytest.mark.nightly
def test_steps_of_all_seeds_are_counted() -> None:
    view, _ = view_of(images=2)
    facts = made_by(view, steps=5, seeds=3).diagnostics
    assert facts["steps"].tolist() == [15, 15]
    assert made_by(view, steps=1).diagnostics["steps"].tolist() == [2, 2]
    assert (facts["seconds"] > 0).all()
    assert (facts["cosine_distance"] > 0).all()


@pytest.mark.nightly
def test_the_best_of_the_seeds_is_kept() -> None:
    view, _ = view_of(side=8)
    one, three = (
        [
            float(made_by(view, seed=seed, seeds=seeds, consensus=0).diagnostics["cosine_distance"])
            for seed in range(4)
        ]
        for seeds in (1, 3)
    )
    assert all(several <= single for several, single in zip(three, one, strict=True))
    assert three != one


@pytest.mark.nightly
def test_a_heavy_consensus_draws_seeds_to_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    view, _ = view_of(side=8)
    met: list[tuple[list[Tensor], Tensor]] = []
    agreement = GradViT._agreement

    def kept(*given: Any) -> tuple[list[Tensor], Tensor]:
        met.append(agreement(*given))
        return met[-1]

    monkeypatch.setattr(GradViT, "_agreement", kept)
    far = []
    for consensus in (1e-9, 1000):
        found = view.model.normalize(pixels(made_by(view, steps=40, consensus=consensus)))
        starts, mean = met[-1]
        begun = min(float((start - mean).norm()) for start in starts)
        far.append(float((found - mean).norm()) / begun)
    assert far[0] > 0.7
    assert far[1] < 0.5


def test_masked_patches_of_seeds_are_laid_on_one_another() -> None:
    view, inputs = view_of("b", side=16)
    attack = GradViT(image_prior="none")
    assert inputs.mask is not None
    best = view.model.normalize(inputs.images)
    hidden = inputs.mask[0].nonzero().flatten()
    order = torch.arange(16)
    order[hidden] = hidden.roll(1)
    other = shuffle_patches(best, order[None], 4)
    searches = [(best, {"cosine_distance": 0.1}), (other, {"cosine_distance": 0.2})]
    labels = torch.zeros(1, dtype=torch.long)
    starts, mean = attack._agreement(searches, labels, inputs.mask, 4)
    assert all(torch.equal(start, best) for start in starts)
    torch.testing.assert_close(mean, best)
    plain = replace(attack, registration=False)
    starts, mean = plain._agreement(searches, labels, inputs.mask, 4)
    assert torch.equal(starts[1], other)
    apart = (to_patches(mean, 4) - to_patches(best, 4)).abs().amax(-1)[0] > 1e-9
    assert torch.equal(apart, inputs.mask[0])


def test_the_mask_is_located_and_a_batch_is_one_reconstruction() -> None:
    view, inputs = view_of("b", images=4, batch=2)
    made = made_by(view, seeds=2)
    assert pixels(made).shape == (4, 3, 16, 16)
    assert made.mask is not None
    view, inputs = view_of("b", images=2)
    located = made_by(view).mask
    assert located is not None
    assert inputs.mask is not None
    assert torch.equal(located, inputs.mask)


def test_numbers_that_break_down_are_no_image() -> None:
    view, _ = view_of()
    update = view.updates[0]
    broken = {"pos_embed": torch.full_like(update.grads["pos_embed"], torch.nan)}
    view = replace(view, updates=[replace(update, grads=dict(update.grads) | broken)])
    assert pixels(made_by(view)).isnan().all()


def test_reasons_for_not_applying() -> None:
    attack = GradViT()
    view, _ = view_of()
    assert "labels" in str(attack.unsupported(replace(view, labels=None)))
    difference = replace(view, updates=[replace(view.updates[0], kind="weight_difference")])
    assert "weight difference" in str(attack.unsupported(difference))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "gradvit, steps: expected a whole number of at least 1, got 0"),
        ({"seeds": 0}, "gradvit, seeds: expected a whole number of at least 1, got 0"),
        ({"step_size": 0}, "gradvit, step_size: expected a number above 0, got 0"),
        ({"tv": -1}, "gradvit, tv: expected a number of at least 0, got -1"),
        ({"l2": "much"}, "gradvit, l2: expected a number of at least 0, got 'much'"),
        ({"borders": -0.1}, "gradvit, borders: expected a number of at least 0"),
        ({"prior_weight": -2}, "gradvit, prior_weight: expected a number of at least 0"),
        ({"consensus": True}, "gradvit, consensus: expected a number of at least 0, got True"),
        ({"distance": "l2"}, "gradvit, distance: expected one of cosine, squared, got 'l2'"),
        ({"schedule": "late"}, "gradvit, schedule: expected one of gradient_first, together"),
        ({"image_prior": 3}, "gradvit, image_prior: expected fitted, stationary, none or the path"),
        ({"image_prior": "resnet.pth"}, "expected 'fitted'.*there is no such file"),
        ({"registration": "yes"}, "option registration: Input should be a valid boolean"),
    ],
)
def test_wrong_options_say_what_is_right(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_attack("gradvit", options)
