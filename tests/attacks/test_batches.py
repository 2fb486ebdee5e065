"""One upload of a batch: what it determines, and its pictures by guesses, layers and matching."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.budget import limited
from attacks.equations.batches import Superposition, superposed
from attacks.equations.layers import LayerSpans, class_of, rectangles, without
from attacks.equations.patch_system import patch_system
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.traces import labels_of_batch
from mjp_privacy.interfaces import AttackerView, Reconstruction
from mjp_privacy.metrics.matching import assigned
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.models import planted_model
from tests.helpers.planted import best, changed, planted_images, planted_view

SIDE, BATCH, PATCHES = 8, 3, 4
MATCHING = {"prior_weight": 1e-6, "steps": 40, "restarts": 1}


def seen(
    images: Tensor, batch: int = BATCH, mask: Tensor | None = None, **model: object
) -> AttackerView:
    """What is seen of these images in steps of `batch`, by a ViT of 4 patches of 48 pixels, width
    96 and three blocks, of which the first two show all tokens; mask (m, N): what MJP masks."""
    shape = {"img_size": SIDE, "depth": 3, "unknown_embedding": mask is not None} | model
    victim, client = planted_model(**shape), ClientConfig(batch=batch)
    attack = find_attack("span_matching")
    view, inputs = planted_view(victim, attack, "a", images=images, client=client)
    if mask is None:
        return view
    sent = FedSGDClient(victim, client).update(replace(inputs, mask=mask))
    return replace(view, updates=[sent])


def run(view: AttackerView, name: str, **options: object) -> Reconstruction:
    attack = find_attack(name, {"prior": "stationary", **options})
    assert attack.unsupported(view) is None
    return attack.run(view, generator=torch.Generator().manual_seed(0))


def normalised(view: AttackerView, images: Tensor) -> Tensor:
    """Patches (B, N, p) as the model sees them."""
    return to_patches(view.model.normalize(images), view.model.patch_size)


def guess_of(view: AttackerView, step: int = 0) -> Superposition:
    update = view.updates[0]
    return superposed(view, update, patch_system(view, update), step, "stationary")


def grads_of(view: AttackerView) -> dict[str, Tensor]:
    return {name: sent[0] for name, sent in view.updates[0].grads.items()}


# batch_span ---------------------------------------------------------------------------------------


def test_off_the_span_of_the_differences_every_picture_and_the_mean_are_exact() -> None:
    images = planted_images(BATCH, SIDE)
    view = seen(images)
    true, guess = normalised(view, images), guess_of(view)
    assert len(guess.basis) == PATCHES * (BATCH - 1)
    for picture in (*true, true.mean(0)):
        for known in (guess.mean, guess.smoothest, guess.span.complement):
            assert float(guess.span.off(picture - known).abs().max()) < 1e-8
    differences = (true[1:] - true[:1]).flatten(0, 1)
    assert float(guess.span.off(differences).abs().max()) < 1e-8
    assert float((differences @ guess.basis.mT).norm()) > 0.9 * float(differences.norm())


@pytest.mark.parametrize("batch", [2, 3])
def test_the_guesses_beat_the_mixture_and_the_pictures_add_up_to_the_mean(batch: int) -> None:
    images = planted_images(4 * batch, SIDE)
    view, errors = seen(images, batch), []
    mixed = find_attack("patch_gradient").run(view, generator=torch.Generator()).images
    for step, true in enumerate(images.split(batch)):
        guess = guess_of(view, step)
        assert torch.allclose(guess.pictures(batch).mean(0), guess.mean)
        mean = normalised(view, true).mean(0)
        mixture = normalised(view, mixed[step * batch : step * batch + 1])[0]
        errors.append([float((one - mean).norm()) for one in (guess.mean, mixture)])
    guessed, mixture = torch.tensor(errors).mean(0)
    assert guessed < 0.8 * mixture


def test_a_batch_of_one_picture_over_and_over_is_exact() -> None:
    images = planted_images(1, SIDE).repeat(BATCH, 1, 1, 1)
    found = run(seen(images), "batch_span")
    assert psnr(found.images, images).min() > 100
    assert found.diagnostics["known_share"].tolist() == [1.0] * BATCH
    assert found.diagnostics["open_directions"].tolist() == [0.0] * BATCH


@pytest.mark.parametrize("case", ["plain", "masked", "noisy"])
def test_single_pictures_and_uploads_of_known_noise_are_left_to_masked_span(case: str) -> None:
    mask = torch.tensor([[False, True, False, False], [False] * 4]) if case == "masked" else None
    view = seen(planted_images(2, SIDE), 2 if case == "noisy" else 1, mask)
    if case == "noisy":
        view = changed(view, noise={name: torch.ones(1) for name in view.updates[0].grads})
    ours, theirs = run(view, "batch_span"), run(view, "masked_span")
    assert torch.equal(ours.images, theirs.images)
    assert "known_share" not in ours.diagnostics


@pytest.mark.parametrize("shared", [True, False])
def test_masked_patches_lie_in_the_span_too(shared: bool) -> None:
    """A position that is masked in some pictures gives what the others have in common."""
    images = planted_images(BATCH, SIDE)
    mask = torch.tensor([[True, False, False, False]] * BATCH)
    if not shared:
        mask[0] = torch.tensor([False, False, True, False])
    view = seen(images, mask=mask, depth=1)
    guess, hidden = guess_of(view), [shared, False, False, False]
    for picture, masked in zip(normalised(view, images), mask, strict=True):
        assert float(guess.span.off(picture[masked]).abs().max()) < 1e-8
        assert float(guess.span.off(picture - guess.mean)[~masked].abs().max()) < 1e-8
    assert run(view, "batch_span").mask.tolist() == [hidden] * BATCH


# layer_span ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [2, 3])
def test_every_picture_of_a_batch_comes_back_from_its_layers(batch: int) -> None:
    images = planted_images(batch, SIDE)
    found = run(replace(seen(images, batch), labels=None), "layer_span")
    assert best(found.images, images).min() > 80
    assert found.diagnostics["certain"].tolist() == [1.0] * batch
    assert float(found.diagnostics["outside"].max()) < 1e-15


def test_the_pictures_of_a_batch_pass_and_their_mixtures_do_not() -> None:
    images = planted_images(2, SIDE)
    view = seen(images, 2)
    spans = LayerSpans.of(view.model, grads_of(view), 2, blocks=2)
    mixed = images.clone()
    mixed[0, :, :, : SIDE // 2] = images[1, :, :, : SIDE // 2]
    mixed[1] = images.mean(0)
    pictures = view.model.normalize(torch.cat((images, mixed)))
    passed, failed = spans.off(pictures).detach().split(2)
    assert float(passed.max()) < 1e-24
    assert float(failed.min()) > 1e-4


def test_a_last_block_shows_no_tokens_and_is_left_out() -> None:
    view = seen(planted_images(2, SIDE), 2)
    all_three = LayerSpans.of(view.model, grads_of(view), 2, blocks=3)
    assert "blocks.1.mlp.fc2" in all_three.bases
    assert not any(name.startswith("blocks.2.mlp") for name in all_three.bases)
    one = planted_model(img_size=SIDE, depth=1)
    assert LayerSpans.of(one, {"blocks.0.mlp.fc1.weight": torch.ones(9, 96)}, 2, 1) is None


def test_a_picture_is_taken_out_of_its_batch() -> None:
    """What is left is the upload of the others alone."""
    images = planted_images(3, SIDE)
    view = seen(images)
    pictures = view.model.normalize(images)
    assert [class_of(view.model, one, grads_of(view), 3) for one in pictures] == [0, 1, 2]
    left = without(view.model, grads_of(view), pictures[0], 0, 3)
    model = planted_model(img_size=SIDE, depth=3)
    loss = torch.nn.functional.cross_entropy(model(pictures[1:]), torch.tensor([1, 2]))
    expected = torch.autograd.grad(loss, [model.get_parameter(name) for name in left])
    for name, gradient in zip(left, expected, strict=True):
        assert torch.allclose(left[name], gradient, atol=1e-12), name


def test_where_nothing_is_found_the_guesses_of_batch_span_stand() -> None:
    view = seen(planted_images(2, SIDE), 2)
    sent = dict(view.updates[0].grads)
    for name in [name for name in sent if name.startswith("blocks.")]:
        noise = torch.randn(sent[name].shape, generator=torch.Generator().manual_seed(1))
        sent[name] = noise.to(sent[name])
    view = changed(view, grads=sent)
    found = run(view, "layer_span", searches=2)
    assert torch.allclose(found.images, run(view, "batch_span").images)
    assert found.diagnostics["certain"].tolist() == [0.0, 0.0]
    assert found.diagnostics["outside"].isnan().all()


def test_rectangles_are_all_of_a_small_grid_and_not_too_many_of_a_large_one() -> None:
    assert len(rectangles(4)) == len(rectangles(4).unique(dim=0)) == 100
    assert len(rectangles(14)) < 3000


# span_matching ------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_gradients_in_the_span_come_closer_and_the_pictures_with_them() -> None:
    images = planted_images(2, SIDE)
    view = seen(images, 2, depth=2)
    far, near = (run(view, "span_matching", **{**MATCHING, "steps": n}) for n in (1, 40))
    assert float(near.diagnostics["distance"][0]) < 0.1 * float(far.diagnostics["distance"][0])
    guessed, matched = (
        float(psnr(found.images[assigned(found.images, images)], images).mean())
        for found in (run(view, "batch_span"), near)
    )
    assert matched > guessed + 5
    blind = run(replace(view, labels=None), "span_matching", **MATCHING)  # read off the classifier
    assert torch.allclose(near.diagnostics["distance"], blind.diagnostics["distance"], rtol=0.5)


def test_the_classes_of_a_batch_with_a_class_that_comes_twice() -> None:
    likely = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.3, 0.1, 0.2, 0.4], [0.25] * 4])
    classes = torch.tensor([1, 1, 3])
    bias = (likely - torch.nn.functional.one_hot(classes, 4)).mean(0)
    assert labels_of_batch(bias, 3).sort().values.tolist() == [1, 1, 3]


def test_patches_that_mjp_masked_in_all_pictures_stay_masked() -> None:
    mask = torch.tensor([[True, False, False, False]] * 2)
    view = seen(planted_images(2, SIDE), 2, mask, depth=2)
    start, found = (run(view, "span_matching", **{**MATCHING, "steps": n}) for n in (1, 40))
    assert torch.equal(found.mask, mask)
    assert found.images.isfinite().all()
    assert float(found.diagnostics["distance"][0]) < float(start.diagnostics["distance"][0])


def test_it_ends_in_time_with_the_best_so_far() -> None:
    view = seen(planted_images(2, SIDE), 2, depth=2)
    with limited(1.0, 2) as budget:
        found = run(view, "span_matching", **MATCHING | {"steps": 100_000, "restarts": 1000})
    assert budget.cut == {0, 1}
    assert found.images.isfinite().all()
