"""The lattice behind a span: planted patches come back, grey level by grey level."""

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.budget import limited
from attacks.equations.patch_system import normalised
from attacks.equations.span import hull_rows, split_hull
from attacks.lattice import unmixing
from attacks.lattice.cost import GREY
from attacks.lattice.unmixing import Unmixed, unmix
from attacks.patch_variants import SURE, whole_columns
from mjp_privacy.data import load_images
from mjp_privacy.interfaces import Pixels, Reconstruction
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.models import tiny_model
from tests.helpers.planted import planted_view, solved

SIDE, PATCH, LENGTH, WIDTH = 96, 8, 192, 40
HALF = Pixels(SIDE, (0.5,) * 3, (0.5,) * 3)
IMAGENET = Pixels(SIDE, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture(scope="module")
def photographs() -> Tensor:
    return torch.stack([i.image for i in load_images("embedded", size=SIDE, limit=4)])


@pytest.fixture
def patches(photographs: Tensor) -> Tensor:
    """(16, 192) of a photograph, multiples of 1/255: 6 to be masked and 10 others."""
    return to_patches(photographs[0], PATCH)[40:56].double()


def planted(patches: Tensor, masked: int, pixels: Pixels) -> tuple[Tensor, Tensor]:
    """(hull, unmasked patches up to differences) from a float32 gradient G = A^T X."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(patches), WIDTH, generator=generator, dtype=torch.float64)
    gradient = (rows.T @ normalised(patches, pixels, PATCH)).float().double()
    seen = torch.linalg.qr(rows[masked:].T)[0]
    projected = gradient - seen @ (seen.T @ gradient)
    total = rows[:masked].sum(0).unsqueeze(1)
    wide = hull_rows(projected, total - seen @ (seen.T @ total), masked)
    basis, anchor = split_hull(wide)
    outer = gradient - total * anchor
    outer = outer - outer @ basis.T @ basis
    return wide, torch.linalg.lstsq(rows[masked:].T, outer).solution


def unmixed(patches: Tensor, masked: int = 6, pixels: Pixels = HALF) -> tuple[Unmixed, Tensor]:
    """What is found behind the span of the first patches, and the others up to differences."""
    wide, partial = planted(patches, masked, pixels)
    return unmix(wide, pixels, PATCH), partial


def same_set(found: Tensor, truth: Tensor) -> bool:
    distance = (found[:, None] - truth).abs().amax(-1)
    return bool((distance.min(0).values < 1e-6).all() and (distance.min(1).values < 1e-6).all())


@pytest.mark.parametrize(
    ("masked", "change", "pixels"),
    [
        (6, {}, IMAGENET),
        (1, {}, HALF),
        (6, {3: 1}, HALF),  # equal patches are found once
        (6, {2: 0.0}, HALF),  # a flat patch, black as well as any other colour
        (6, {2: 1.0}, HALF),
        (6, dict.fromkeys(range(1, 6), 1.0), HALF),  # five of six are white, as in a drawing
    ],
    ids=str,
)
def test_masked_patches_come_back_exactly_and_complete_the_others(
    patches: Tensor, masked: int, change: dict[int, int | float], pixels: Pixels
) -> None:
    for place, by in change.items():
        patches[place] = patches[by] if isinstance(by, int) else by
    found, partial = unmixed(patches, masked, pixels)
    assert same_set(found.patches, patches[:masked])
    assert not len(found.frame.colours)
    if masked > 1:
        completed, whole = found.complete(partial, torch.full_like(partial, GREY / 255))
        assert whole.all()
        assert (completed - patches[masked:]).abs().max() < 1e-6


def test_flat_patches_of_two_colours_leave_a_level_to_the_guess(patches: Tensor) -> None:
    """Black and white masked: every patch is known but for its level; of two hues, for a level
    along their difference."""
    hues = torch.tensor([[10.0, 20, 30], [13, 27, 30]]).double() / 255
    patches[2], patches[4] = hues.repeat_interleave(64, 1)
    assert abs(unmixed(patches)[0].frame.colours[:, ::64]).tolist() == [[3, 7, 0]]
    patches[2], patches[4] = 0.0, 1.0
    found, partial = unmixed(patches)
    assert np.array_equal(abs(found.frame.colours), np.ones((1, LENGTH)))
    guess = patches[6:].mean(-1, keepdim=True).expand(-1, LENGTH)
    completed, whole = found.complete(partial, guess)
    assert whole.all()
    assert (completed - patches[6:]).abs().max() < 1e-6


def test_a_partial_patch_of_no_integers_is_not_passed_off(patches: Tensor) -> None:
    found, partial = unmixed(patches)
    generator = torch.Generator().manual_seed(2)
    partial[3] += 0.02 * torch.randn(LENGTH, generator=generator, dtype=torch.float64)
    completed, whole = found.complete(partial, torch.full_like(partial, GREY / 255))
    assert whole.tolist() == [row != 3 for row in range(10)]
    assert (completed - patches[6:])[whole].abs().max() < 1e-6


# pixel_lattice on one upload: photographs through a small model, and when it falls back -----------


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """36 patches of 16×16, float64."""
    shape = {"img_size": SIDE, "patch_size": 16, "embed_dim": 96, "num_heads": 4, "depth": 1}
    facts = {"num_classes": 10, "mean": 0.5, "std": 0.5, "unknown_embedding": True}
    return tiny_model(shape | facts, weights="drawn")


def attacked(
    name: str, model: LoadedModel, images: Tensor, setting: str = "c", gamma: float = 0.3
) -> tuple[Reconstruction, Tensor, Tensor]:
    """What the attack makes, and the images and masks that the client fed."""
    view, inputs = planted_view(model, find_attack(name), setting, images=images, gamma=gamma)
    return solved(view, name), inputs.images, inputs.mask


def test_as_fed_the_unmasked_patches_are_exact_and_the_others_their_mean(
    model: LoadedModel, photographs: Tensor
) -> None:
    found, fed, masks = attacked("pixel_lattice", model, photographs[:1], "b")
    ours, fed = (to_patches(images.double(), 16)[0] for images in (found.images, fed))
    expected = torch.where(masks[0].unsqueeze(-1), fed[masks[0]].mean(0), fed)
    assert torch.allclose(ours, expected, atol=1e-6)
    assert found.permutation is None


def test_pixels_that_are_no_grey_levels_fall_back_to_the_span(
    model: LoadedModel, photographs: Tensor
) -> None:
    """A client that mixes or resamples after decoding."""
    mixed = 0.7 * photographs[:1] + 0.3 * photographs[1:2]
    found, before = (attacked(n, model, mixed)[0] for n in ("pixel_lattice", "masked_span"))
    assert found.diagnostics["lattice_found"].tolist() == [0]
    assert torch.allclose(found.images, before.images)


def test_the_spans_picture_stands_where_the_search_is_ended(
    model: LoadedModel, photographs: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a search that ends in time is the same under a budget."""
    given = model, photographs[:1]
    free, guess = (attacked(name, *given)[0] for name in ("pixel_lattice", "masked_span"))
    with limited(3600.0, 1):
        assert attacked("pixel_lattice", *given)[0].images.equal(free.images)
    monkeypatch.setattr(unmixing, "spent", lambda: True)
    ended = attacked("pixel_lattice", *given)[0]
    assert [one.diagnostics["lattice_found"].item() for one in (free, ended)] == [1, 0]
    assert torch.allclose(ended.images, guess.images, atol=1e-12)


@pytest.mark.parametrize(
    ("free", "error", "told"),
    [(1, 1e-4, True), (2, 1e-4, True), (3, 1e-4, True), (3, 0.02, False), (4, 0.02, False)],
)
def test_whole_numbers_are_those_of_a_search_of_all(free: int, error: float, told: bool) -> None:
    """Five numbers of 0 to 7, of which some directions are open: with small errors they are the
    client's; with large ones Babai's plane misses some that are nearer, none of which is sure."""
    drawn = np.random.default_rng(free)
    directions = np.linalg.qr(drawn.standard_normal((5, 5)))[0]
    sizes = np.where(np.arange(5) < free, 2.0, error)
    truth = drawn.integers(0, 8, (5, 12)).astype(float)
    mean = truth + directions @ (sizes[:, None] * drawn.standard_normal((5, 12)))
    found, doubt = whole_columns(mean, (directions * sizes**2) @ directions.T)
    known = directions.T / sizes[:, None]
    around = known @ np.indices((11,) * 5).reshape(5, -1) - 5 * known.sum(1, keepdims=True)
    off, start = known @ (found - mean), known @ (np.rint(mean) - mean)
    least = [np.square(around + one[:, None]).sum(0).min() for one in start.T]
    missed = np.square(off).sum(0) > np.array(least) + 1e-6
    assert not (missed & (doubt <= SURE)).any()
    assert missed.any() != told
    assert not told or ((found == truth).all() and (doubt <= SURE).all())
