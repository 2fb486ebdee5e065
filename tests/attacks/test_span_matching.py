"""Gradient matching in the span of a batch: a planted answer, its labels, and where it says no."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.budget import limited
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.traces import labels_of_batch
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.metrics.matching import assigned
from mjp_privacy.metrics.pictures import psnr
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view

SIDE = 8
OPTIONS = {"prior": "stationary", "prior_weight": 1e-6, "steps": 40, "restarts": 1}
ATTACK = find_attack("span_matching", OPTIONS)
GUESSED = find_attack("batch_span", {"prior": "stationary"})


def seen(images: Tensor, batch: int, mask: Tensor | None = None) -> AttackerView:
    """What the attacker sees of these images in steps of `batch`; mask (m, N): what MJP masks."""
    model = planted_model(img_size=SIDE, depth=2, unknown_embedding=mask is not None)
    client = ClientConfig(batch=batch)
    view, inputs = planted_view(model, ATTACK, "a", images=images, client=client)
    if mask is None:
        return view
    sent = FedSGDClient(model, client).update(replace(inputs, mask=mask), names=ATTACK.needs(model))
    return replace(view, updates=[sent])


def mean_psnr(found: Tensor | None, images: Tensor) -> float:
    assert found is not None
    return float(psnr(found[assigned(found, images)], images).mean())


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.nightly
def test_gradients_in_the_span_come_closer_and_the_pictures_with_them() -> None:
    images = planted_images(2, SIDE)
    view = seen(images, 2)
    short = find_attack("span_matching", {**OPTIONS, "steps": 1})
    far = short.run(view, generator=seed())
    near = ATTACK.run(view, generator=seed())
    assert float(near.diagnostics["distance"][0]) < 0.1 * float(far.diagnostics["distance"][0])
    guessed = mean_psnr(GUESSED.run(view, generator=seed()).images, images)
    assert mean_psnr(near.images, images) > guessed + 5


@pytest.mark.nightly
def test_labels_are_read_off_the_classifier_where_they_are_unknown() -> None:
    images = planted_images(2, SIDE)
    view = seen(images, 2)
    told = ATTACK.run(view, generator=seed())
    blind = ATTACK.run(replace(view, labels=None), generator=seed())
    assert torch.allclose(told.diagnostics["distance"], blind.diagnostics["distance"], rtol=0.5)


def test_the_classes_of_a_batch_with_a_class_that_comes_twice() -> None:
    likely = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.3, 0.1, 0.2, 0.4], [0.25] * 4])
    classes = torch.tensor([1, 1, 3])
    bias = (likely - torch.nn.functional.one_hot(classes, 4)).mean(0)
    assert labels_of_batch(bias, 3).sort().values.tolist() == [1, 1, 3]


def test_patches_that_mjp_masked_in_all_pictures_stay_masked() -> None:
    images = planted_images(2, SIDE)
    view = seen(images, 2, torch.tensor([[True, False, False, False]] * 2))
    found = ATTACK.run(view, generator=seed())
    guessed = GUESSED.run(view, generator=seed())
    assert found.mask is not None
    assert found.mask.tolist() == [[True, False, False, False]] * 2
    assert torch.equal(found.mask, guessed.mask)
    assert found.images is not None
    assert found.images.isfinite().all()
    start = find_attack("span_matching", {**OPTIONS, "steps": 1}).run(view, generator=seed())
    assert float(found.diagnostics["distance"][0]) < float(start.diagnostics["distance"][0])


def test_it_ends_in_time_with_the_best_so_far() -> None:
    images = planted_images(2, SIDE)
    view = seen(images, 2)
    long = find_attack("span_matching", {**OPTIONS, "steps": 100_000, "restarts": 1000})
    with limited(0.5, 2) as budget:
        found = long.run(view, generator=seed())
    assert budget.cut == {0, 1}
    assert found.images is not None
    assert found.images.isfinite().all()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            lambda view: replace(view, labels=None, updates=[without(view, "head.bias")]),
            "labels",
            "no gradient of head.bias, which tells them",
        ),
        (
            lambda view: replace(
                view, updates=[replace(view.updates[0], kind="weight_difference")]
            ),
            "weight_difference",
            "gradient matching needs a gradient; the upload is a weight difference",
        ),
        (
            lambda view: replace(view, updates=[replace(view.updates[0], batch=40)]),
            "underdetermined",
            "N B = 160 patches > D = 96",
        ),
    ],
)
def test_what_it_cannot_match_is_refused(change, kind: str, words: str) -> None:  # type: ignore[no-untyped-def]
    refusal = ATTACK.unsupported(change(seen(planted_images(2, SIDE), 2)))
    assert refusal is not None
    assert refusal.kind == kind
    assert words in str(refusal)


def without(view: AttackerView, name: str):  # type: ignore[no-untyped-def]
    update = view.updates[0]
    return replace(update, grads={key: g for key, g in update.grads.items() if key != name})
