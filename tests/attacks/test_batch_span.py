"""One upload of a batch: what it determines, what is guessed, and where it says no."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations.batches import superposed
from attacks.equations.patch_system import patch_system
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view

BATCH = 3
ATTACK = find_attack("batch_span", {"prior": "stationary"})
NAMES = ("pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "unk_embed")


def small_model(**changes: object) -> LoadedModel:
    """4 patches of 48 pixels, width 96: batches of up to twelve."""
    return planted_model(img_size=8, depth=1, **changes)


def seen(images: Tensor, batch: int = BATCH, mask: Tensor | None = None) -> AttackerView:
    """What the attacker sees of these images in steps of `batch`; mask (m, N): what MJP masks."""
    model = small_model(unknown_embedding=mask is not None)
    client = ClientConfig(batch=batch)
    view, inputs = planted_view(model, ATTACK, "a", images=images, client=client)
    if mask is None:
        return view
    sent = FedSGDClient(model, client).update(replace(inputs, mask=mask), names=NAMES)
    return replace(view, updates=[sent])


def best(found: Tensor, truth: Tensor) -> Tensor:
    """The PSNR of each true picture's best guess."""
    scores = [psnr(guess.expand_as(truth), truth) for guess in found]
    return torch.stack(scores).amax(0)


def normalised(view: AttackerView, images: Tensor) -> Tensor:
    """Patches (B, N, p) as the model sees them."""
    return to_patches(view.model.normalize(images), view.model.patch_size)  # type: ignore[operator]


def test_off_the_span_every_picture_and_the_mean_are_exact() -> None:
    images = planted_images(BATCH, 8)
    view = seen(images)
    update, true = view.updates[0], normalised(view, images)
    guess = superposed(view, update, patch_system(view, update), 0, "stationary")
    assert len(guess.basis) == 4 * (BATCH - 1)
    for picture in (*true, true.mean(0)):
        for known in (guess.mean, guess.smoothest, guess.span.complement):
            assert float(guess.span.off(picture - known).abs().max()) < 1e-8


def test_the_span_is_that_of_the_differences() -> None:
    images = planted_images(BATCH, 8)
    view = seen(images)
    update, true = view.updates[0], normalised(view, images)
    guess = superposed(view, update, patch_system(view, update), 0, "stationary")
    differences = (true[1:] - true[:1]).flatten(0, 1)
    assert float(guess.span.off(differences).abs().max()) < 1e-8
    assert float((differences @ guess.basis.mT).norm()) > 0.9 * float(differences.norm())


@pytest.mark.parametrize("batch", [2, 3])
def test_the_guesses_beat_the_mixture_and_the_pictures_add_up_to_the_mean(batch: int) -> None:
    images = planted_images(4 * batch, 8)
    view = seen(images, batch)
    update, system = view.updates[0], patch_system(view, view.updates[0])
    mixed = find_attack("patch_gradient").run(view, generator=torch.Generator()).images
    errors = []
    for step, true in enumerate(images.split(batch)):
        guess = superposed(view, update, system, step, "stationary")
        patches = guess.pictures(batch)
        assert torch.allclose(patches.mean(0), guess.mean)
        mean = normalised(view, true).mean(0)
        plain = to_patches(view.model.normalize(mixed[step * batch : step * batch + 1]), 4)[0]
        errors.append([float((one - mean).norm()) for one in (guess.mean, plain)])
    guessed, mixture = torch.tensor(errors).mean(0)
    assert guessed < 0.8 * mixture


def test_a_batch_of_one_picture_over_and_over_is_exact() -> None:
    images = planted_images(1, 8).repeat(BATCH, 1, 1, 1)
    found = ATTACK.run(seen(images), generator=torch.Generator())
    assert found.images is not None
    assert psnr(found.images, images).min() > 100
    assert found.diagnostics["known_share"].tolist() == [1.0] * BATCH
    assert found.diagnostics["open_directions"].tolist() == [0.0] * BATCH


@pytest.mark.parametrize("masked", [True, False])
def test_one_picture_a_step_is_masked_span(masked: bool) -> None:
    images = planted_images(2, 8)
    mask = torch.tensor([[False, True, False, False], [False] * 4]) if masked else None
    view = seen(images, 1, mask)
    alone = find_attack("masked_span", {"prior": "stationary"})
    ours, theirs = (a.run(view, generator=torch.Generator()).images for a in (ATTACK, alone))
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shared", [True, False])
def test_masked_patches_lie_in_the_span_too(shared: bool) -> None:
    """A position that is masked in some pictures gives what the others have in common."""
    images = planted_images(BATCH, 8)
    mask = torch.tensor([[True, False, False, False]] * BATCH)
    if not shared:
        mask[0] = torch.tensor([False, False, True, False])
    view = seen(images, mask=mask)
    update, true = view.updates[0], normalised(view, images)
    system = patch_system(view, update)
    assert system.hidden[0].tolist() == [shared, False, False, False]
    guess = superposed(view, update, system, 0, "stationary")
    off = guess.span.off
    for picture, masked in zip(true, mask, strict=True):
        assert float(off(picture[masked]).abs().max()) < 1e-8
        assert float(off(picture - guess.mean)[~masked].abs().max()) < 1e-8
    found = ATTACK.run(view, generator=torch.Generator())
    assert found.images is not None
    assert found.images.shape == images.shape
    assert found.mask is not None
    assert found.mask[:, 0].tolist() == [shared] * BATCH


def test_an_upload_of_known_noise_is_left_to_masked_span() -> None:
    view = seen(planted_images(BATCH, 8))
    noise = {name: torch.ones(1).double() for name in view.updates[0].grads}
    noisy = replace(view, updates=[replace(view.updates[0], noise=noise)])
    alone = find_attack("masked_span", {"prior": "stationary"})
    ours, theirs = (a.run(noisy, generator=torch.Generator()) for a in (ATTACK, alone))
    assert ours.images is not None
    assert torch.equal(ours.images, theirs.images)
    assert "known_share" not in ours.diagnostics


def test_too_many_pictures_are_refused_with_the_largest_batch() -> None:
    """N = 4, D = 96, p = 48: N B <= 96 allows 24, N (B - 1) < 48 twelve."""
    images = planted_images(4, 8).repeat(8, 1, 1, 1)
    view = seen(images[:16], 16)
    reason = ATTACK.unsupported(view)
    assert reason is not None
    assert str(reason).startswith("N (B - 1) = 60 differences >= p = 48 pixels of a patch")
    assert str(reason).endswith("batches of at most 12 do")
    assert ATTACK.unsupported(seen(images[:12], 12)) is None
    reason = ATTACK.unsupported(seen(images[:32], 32))
    assert reason is not None
    assert reason.kind == "underdetermined"
    assert str(reason).startswith("N B = 128 patches > D = 96: the pictures of a batch")


def test_where_no_batch_is_small_enough_it_says_that() -> None:
    view, _ = planted_view(planted_model(), ATTACK, "a", client=ClientConfig(batch=2))
    assert "no batch of this model does" in str(ATTACK.unsupported(view))
