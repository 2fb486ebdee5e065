"""Pictures of a batch by the lattice of their differences: planted answers, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations.batches import differences
from attacks.equations.lattice_pictures import NormTest, exchanged
from attacks.equations.patch_system import patch_system
from attacks.jigsaw import sorted_into_pictures
from attacks.lattice.cost import Frame
from attacks.lattice.search import sums_of
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.data import Preprocessing, open_images
from mjp_privacy.interfaces import Attack, AttackerView
from mjp_privacy.metrics.pictures import quantise
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view

ATTACK = find_attack("batch_lattice", {"prior": "stationary"})
SIDE, PATCH = 16, 8


def model_of(biases: float = 0.1, **changes: object) -> LoadedModel:
    """Four patches of 192 pixels, width 96; the first LayerNorm has biases, as trained ones do."""
    model = planted_model(**{"img_size": SIDE, "patch_size": PATCH, "depth": 3, **changes})
    with torch.no_grad():
        drawn = torch.randn(model.embed_dim, generator=torch.Generator().manual_seed(5))
        model.blocks[0].norm1.bias.copy_(biases * drawn)
    return model


def pictures_of(batch: int, side: int = SIDE) -> Tensor:
    return quantise(planted_images(batch, side))


def seen(
    images: Tensor, model: LoadedModel | None = None, batch: int = 0, attack: Attack = ATTACK
) -> AttackerView:
    """What the attacker sees of these pictures as one batch, or as several, without labels."""
    client = ClientConfig(batch=batch or len(images))
    view, _ = planted_view(model or model_of(), attack, "a", images=images, client=client)
    return replace(view, labels=None)


def exact(found: Tensor | None, truth: Tensor) -> list[bool]:
    """For each true picture whether it is among those found, in every 8-bit value."""
    return [bool((quantise(found) == one).flatten(1).all(1).any()) for one in truth]


@pytest.mark.parametrize("biases", [0.0, 0.1])
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_every_picture_of_a_batch_comes_back(batch: int, biases: float) -> None:
    """Without biases no patch is tested by itself: the likeliest ones are sorted and verified."""
    images = pictures_of(batch)
    found = ATTACK.run(seen(images, model_of(biases)), generator=torch.Generator())
    if batch < 5 or biases:
        assert exact(found.images, images) == [True] * batch
        assert found.diagnostics["certain"].tolist() == [1.0] * batch
    assert found.diagnostics["lattice_found"].tolist() == [1.0] * batch


def test_small_biases_magnify_rounding_and_patches_still_pass() -> None:
    """The trained patch14_vit's biases are a hundredth of its LayerNorm's weights."""
    model = load_model("patch14_vit")
    source = open_images(Path("embedded"))
    prepare = Preprocessing(model.card.img_size, model.card.resize)
    images = torch.stack([prepare(source.decode(source.records[k])) for k in (7, 14)])
    attack = find_attack("batch_lattice")
    found = attack.run(seen(images, model, attack=attack), generator=torch.Generator())
    assert exact(found.images, quantise(images.double())) == [True, True]
    assert found.diagnostics["certain"].tolist() == [1.0, 1.0]


def test_steps_are_looked_at_one_by_one() -> None:
    images = pictures_of(4)
    found = ATTACK.run(seen(images, batch=2), generator=torch.Generator())
    assert exact(found.images[:2], images[:2]) == exact(found.images[2:], images[2:]) == [True] * 2


def test_nothing_is_certain_of_pictures_that_are_no_whole_grey_levels() -> None:
    images = planted_images(2, SIDE)
    found = ATTACK.run(seen(images), generator=torch.Generator())
    assert exact(found.images, images) == [False, False]
    assert found.diagnostics["certain"].tolist() == [0.0, 0.0]
    assert found.diagnostics["lattice_found"].tolist() == [0.0, 0.0]


def test_equal_patches_of_a_batch_count_once() -> None:
    images = pictures_of(2)
    images[1, :, :PATCH, :PATCH] = images[0, :, :PATCH, :PATCH]
    found = ATTACK.run(seen(images), generator=torch.Generator())
    assert exact(found.images, images) == [True, True]


def test_one_picture_twice_is_found_twice() -> None:
    images = pictures_of(1).expand(2, -1, -1, -1)
    found = ATTACK.run(seen(images), generator=torch.Generator())
    assert exact(found.images, images) == [True, True]


def norm_test(view: AttackerView) -> NormTest | None:
    wide = torch.ones(1, 3 * PATCH**2 + 1)
    frame = Frame.of(wide, view.pixels.mean, view.pixels.std, PATCH)
    return NormTest.of(view, view.updates[0], 0, 2, frame)


def test_with_biases_that_rounding_hides_no_patch_is_tested() -> None:
    view = seen(pictures_of(2), model_of(1e-4))
    rounded = replace(view.updates[0], dtype=torch.float32)
    assert norm_test(view) is not None
    assert norm_test(replace(view, updates=[rounded])) is None


def test_patches_of_the_batch_pass_and_other_sums_of_differences_do_not() -> None:
    images = pictures_of(2)
    test = norm_test(seen(images))
    patches = 255 * torch.stack([to_patches(image, PATCH) for image in images]).numpy()
    steps = np.rint(patches[1] - patches[0])
    along = test.along(steps)
    for size in range(3):
        rows, signs = sums_of(4, size)
        for place in range(4):
            passed = along.passed(np.rint(patches[0, place]), place, rows, signs)
            sums = [(rows[each].tolist(), signs[each].tolist()) for each in passed]
            own = {0: [([], [])], 1: [([place], [1.0])], 2: []}[size]
            assert [one for one in sums if one[1] not in ([1.0, -1.0], [-1.0, 1.0])] == own


def test_there_is_no_test_without_biases_or_with_too_many_tokens() -> None:
    assert norm_test(seen(pictures_of(2), model_of(biases=0.0))) is None
    assert norm_test(seen(pictures_of(2), model_of(embed_dim=8))) is None


def test_patches_are_sorted_into_pictures_by_their_borders() -> None:
    images = planted_images(3, 40)
    patches = 255 * torch.stack([to_patches(image, PATCH) for image in images], 1).numpy()
    generator = np.random.default_rng(0)
    mixed = np.stack([place[generator.permutation(3)] for place in patches])
    pictures = sorted_into_pictures(mixed, PATCH)
    for picture in patches.transpose(1, 0, 2):
        assert any((picture == one).all() for one in pictures)


def test_patches_are_exchanged_until_pictures_pass() -> None:
    truth = torch.rand(3, 9, 2, generator=torch.Generator().manual_seed(0))
    mixed = truth.clone()
    mixed[[0, 1], 4] = truth[[1, 0], 4]
    mixed[[1, 2], :2] = truth[[2, 1], :2]

    def shares(pictures: Tensor) -> Tensor:
        """How many patches are not of the picture that most of them are of."""
        own = (pictures.unsqueeze(1) == truth).all(-1).sum(-1)
        return (9.0 - own.amax(1)).clamp_min(1e-9)

    pictures, outside = exchanged(mixed, shares, 1e-6)
    assert outside.max() < 1e-6
    assert torch.equal(pictures, truth)


def test_two_uploads_show_the_span_that_one_does_not() -> None:
    """N = 16, D = 32: one upload leaves 15 rows of 16 differences; the weights differ."""
    shape = {"img_size": 32, "embed_dim": 32}
    attack = find_attack("batch_lattice", {"prior": "stationary", "uploads": 2})
    images, model = pictures_of(2, 32), model_of(**shape)
    first = seen(images, model, attack=attack)
    moved = model_of(**shape)
    with torch.no_grad():
        for parameter in moved.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter += 0.1 * parameter.abs().mean() * noise
    second = seen(images, moved, attack=attack)
    before = {name: value.detach() for name, value in moved.named_parameters()}
    view = replace(
        first, updates=[first.updates[0], replace(second.updates[0], weights_before=before)]
    )
    assert attack.unsupported(view) is None
    systems = [patch_system(view, update) for update in view.updates]
    known = differences(systems, 2, 1e-16)
    assert len(known.basis) == 16
    patches = torch.stack([to_patches(model.normalize(image), PATCH) for image in images])
    apart = patches[1] - patches[0]
    assert (apart - apart @ known.basis.mT @ known.basis).abs().max() < 1e-8
    off = patches[0] - patches[0] @ known.basis.mT @ known.basis
    assert (off - known.known).abs().max() < 1e-8
    found = attack.run(view, generator=torch.Generator())
    assert found.diagnostics["lattice_found"].tolist() == [1.0, 1.0]
