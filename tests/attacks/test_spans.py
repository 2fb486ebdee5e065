"""The span of hidden patches, from one upload and several, what noise leaves of it, and the most
probable picture in it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from attacks import find_attack
from attacks.equations import filling
from attacks.equations.completion import (
    FieldEnergy,
    complete,
    complete_patchwise,
    fewest_steps,
    field_energy,
    whole_picture,
)
from attacks.equations.filling import NoisyUpload, most_probable, noisy_upload
from attacks.equations.patch_system import PatchSystem, in_levels, located, normalised, patch_system
from attacks.equations.several_uploads import several_uploads
from attacks.equations.span import (
    ABOVE_NOISE,
    Knowledge,
    combine,
    refine,
    token_equations,
    upload_span,
)
from attacks.prior.files import find_prior
from attacks.prior.gaussian import (
    JITTER,
    PatchPrior,
    noise_by_direction,
    posterior_patches,
    stationary_prior,
)
from mjp_privacy import attack_gradients
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.data import Preprocessing
from mjp_privacy.data.images import data_folder
from mjp_privacy.interfaces import AttackerView, ClientInput, Pixels
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.models import planted_model
from tests.helpers.night import nightly
from tests.helpers.planted import planted_images, planted_view, solved

N, D, P = 10, 16, 30
ALL = [*range(N)]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def system(
    x: Tensor, hidden: Sequence[int], seed: int, *, summed: bool = False, rows: Tensor | None = None
) -> PatchSystem:
    """What an upload holds: the rows of hidden patches are missing, their share of G is not;
    summed: the gradient of E_unk is there, the sum of the hidden rows."""
    rows = draw(N, D, seed=seed) if rows is None else rows
    mask = torch.zeros(1, N, dtype=torch.bool)
    mask[0, list(hidden)] = True
    sums = rows[list(hidden)].sum(0)[None] if summed else None
    shown = torch.where(mask.unsqueeze(-1), 0.0, rows[None])
    return PatchSystem(shown, (rows.mT @ x)[None], mask, sums)


def uploads_of(
    x: Tensor, hidden: Sequence[Sequence[int]], width: int = D, *, summed: bool = False
) -> list[PatchSystem]:
    """Systems of several uploads, each of which hides other patches and has rows of its own."""
    return [
        system(x, places, seed, summed=summed, rows=draw(N, width, seed=seed))
        for seed, places in enumerate(hidden, 1)
    ]


def holds(knowledge: Knowledge, x: Tensor) -> None:
    """known + a basis = x for some a."""
    part = x @ knowledge.basis.mT
    assert torch.allclose(knowledge.known + part @ knowledge.basis, x, atol=1e-8)
    assert torch.allclose(knowledge.known @ knowledge.basis.mT, torch.zeros_like(part), atol=1e-8)


@pytest.mark.parametrize(
    ("summed", "width", "hidden", "open_directions"),
    [
        (False, D, [[1, 4, 7]], 3),
        (False, D, [[]], 0),
        (False, D, [ALL], N),
        (False, D, [[1, 4, 7], [4, 2], [4]], 1),
        (False, D, [[1, 4, 7], [0, 2, 3]], 0),
        (False, N, [[2, 5, 9]], 3),  # what the visible rows leave free is as much as is hidden
        (True, D, [[1, 4, 7]], 2),
        (True, D, [[1, 4, 7], [4, 2], [4]], 0),
    ],
)
def test_uploads_leave_the_span_of_the_patches_that_were_always_hidden(
    summed: bool, width: int, hidden: list[list[int]], open_directions: int
) -> None:
    """Of their differences, where the sum of the hidden rows is sent."""
    x = draw(N, P, seed=0)
    knowledge = combine(
        [upload_span(one, 0) for one in uploads_of(x, hidden, width, summed=summed)]
    )
    always = sorted(set.intersection(*map(set, hidden)))
    assert knowledge.hidden.nonzero().flatten().tolist() == always
    assert len(knowledge.basis) == open_directions
    holds(knowledge, x)
    apart = x[always] - x[always[:1]] if summed else x[always]
    assert torch.allclose(apart @ knowledge.basis.mT @ knowledge.basis, apart, atol=1e-8)


NARROW = 8  # numbers of a row, fewer than patches

FEW_UPLOADS = [[1, 4, 7], [0, 2], [3], [5, 6, 8, 9]]
TWICE_HIDDEN = [[1, 4], [1], [1, 5], [2]]


@pytest.mark.parametrize(
    ("summed", "hidden", "open_directions"),
    [
        (False, [[], []], 0),
        (False, FEW_UPLOADS, 0),
        (False, TWICE_HIDDEN, 1),  # patch 1 is visible once, which is not enough for it
        (True, TWICE_HIDDEN, 0),
        (True, [[1, 4], [1, 4], [1, 4], [2]], 1),  # both in one upload alone: their sum
        (True, [[1], [1], [1, 3]], 0),  # never visible
        (False, [ALL, ALL, ALL], P),
    ],
)
def test_uploads_of_more_patches_than_a_row_has_numbers_determine_them_together(
    summed: bool, hidden: list[list[int]], open_directions: int
) -> None:
    x = draw(N, P, seed=0)
    found = several_uploads(uploads_of(x, hidden, NARROW, summed=summed), 0)
    assert len(found.knowledge.basis) == open_directions
    holds(found.knowledge, x)
    always = set.intersection(*map(set, hidden))
    assert set(found.knowledge.hidden.nonzero().flatten().tolist()) == always
    if 0 < open_directions < P:  # some patches that are known to be exact determine the others
        exact = torch.tensor([place not in hidden[0] for place in ALL])
        guess = torch.where(exact.unsqueeze(1), x, 0.0)
        narrowed = found.narrowed(guess, exact, 1)
        assert not len(narrowed.basis)
        assert torch.allclose(narrowed.known, x, atol=1e-8)
        assert found.narrowed(guess, exact, 0) is None
        assert found.narrowed(guess + exact.unsqueeze(1) / 255, exact, 1) is None
        assert found.narrowed(guess, exact & False, 1) is None
        untested = exact & (torch.arange(N) > NARROW - 2)  # so many others that all would fit
        assert found.narrowed(guess, untested, 1) is None
        if summed:
            uploads = replace(found.uploads, sums=found.uploads.sums + 1)
            wrong = replace(found, uploads=uploads)
            assert wrong.narrowed(guess, exact, 1) is None


def test_uploads_of_much_smaller_gradients_count_as_much() -> None:
    """As of a model that has learned the picture, with errors as float32 has them; each upload
    alone is badly conditioned."""
    x, systems = draw(N, P, seed=0), []
    strengths = torch.logspace(0, -3, NARROW, dtype=torch.float64)
    for seed, places in enumerate(FEW_UPLOADS, 1):
        one = system(x, places, seed, rows=strengths * draw(N, NARROW, seed=seed))
        error = 1e-7 * one.total.square().mean().sqrt() * draw(NARROW, P, seed=50 + seed)
        scale = 1.0 if seed == 1 else 1e-5
        systems.append(replace(one, rows=scale * one.rows, total=scale * (one.total + error)))
    found = several_uploads(systems, 0).knowledge
    assert not len(found.basis)
    assert torch.allclose(found.known, x, rtol=0, atol=1e-5)


EQUAL, TWO_KINDS, FOUR = {3: 8}, {3: 8, 1: 4, 2: 4}, {3: 8, 1: 8, 2: 8}
ONE_OF_THEM = [[3, 0], [8], [3, 1], [8, 2]]
AS_MANY_KINDS = [[4, 8], [5, 8], [6]]  # as a row has numbers: one upload never contradicts


@pytest.mark.parametrize(
    ("equal", "width", "summed", "hidden", "open_directions"),
    [
        (EQUAL, NARROW, True, ONE_OF_THEM, 0),
        (EQUAL, NARROW, False, ONE_OF_THEM, 1),
        (EQUAL, NARROW, False, [[0], [1], [2]], 0),
        (TWO_KINDS, NARROW, True, [*ONE_OF_THEM, [3, 8]], 1),  # one sum does not tell them apart
        (FOUR, N - 3, True, AS_MANY_KINDS, 0),
        (FOUR, N - 3, False, AS_MANY_KINDS, 1),
    ],
)
def test_equal_patches_of_more_patches_than_a_row_has_numbers(
    equal: dict[int, int], width: int, summed: bool, hidden: list[list[int]], open_directions: int
) -> None:
    """Their rows cannot be told apart. Where an upload shows both that does not matter, and where
    the sum of hidden rows is sent they have one row together."""
    x = draw(N, P, seed=0)
    for one, other in equal.items():
        x[one] = x[other]
    found = several_uploads(uploads_of(x, hidden, width, summed=summed), 0).knowledge
    assert len(found.basis) == open_directions
    holds(found, x)


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("width", [5, NARROW])
def test_uploads_that_repeat_each_other_leave_all_open(width: int, summed: bool) -> None:
    """Or that have fewer equations than there are patches, as rows of equal sums have."""
    x, shared = draw(N, P, seed=0), draw(N, width, seed=1)
    drawn = [shared, shared] if width == NARROW else [shared, draw(N, width, seed=2)]
    hidden = [[1], []] if width < NARROW else [[1, 2, 3], [1, 2, 3]]
    systems = [
        system(x, places, 0, summed=summed, rows=rows - rows.mean(1, keepdim=True))
        for places, rows in zip(hidden, drawn, strict=True)
    ]
    assert len(several_uploads(systems, 0).knowledge.basis) == P


def test_a_visible_row_that_carries_nothing_gets_the_least_norm() -> None:
    """Such as one that quantisation rounded away in one upload and not in another."""
    x, rows = draw(N, P, seed=0), draw(N, D, seed=1)
    rows[3] = 0
    found = combine([upload_span(system(x, [], 0, rows=rows), 0)]).known
    expected = x.clone()
    expected[3] = 0
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("level", [-1.0, 0.0, 1.0])
def test_copies_of_one_patch_hidden_every_time_leave_nothing_open(level: float) -> None:
    """Letterbox bars: another bar patch is hidden each time, but they are all equal. At level 0
    they are the zero vector, which the span does not see."""
    x = draw(N, P, seed=0)
    x[:6] = level
    hidden = [[0, 1, 7], [2, 3, 8], [4, 5, 9]]
    told, untold = (
        combine([upload_span(one, 0, above_noise=10) for one in uploads_of(x, hidden, summed=sent)])
        for sent in (True, False)
    )
    assert not len(told.basis)
    assert torch.allclose(told.known, x, atol=1e-7)
    assert len(untold.basis) == int(level != 0)


def test_the_rank_of_equal_patches_is_told_from_float32_noise() -> None:
    x = draw(N, P, seed=0)
    x[:4] = 1.0
    exact = system(x, [0, 1, 2, 3, 4], seed=1, summed=True)
    names = ("rows", "total", "hidden_sum")
    rounded = replace(exact, **{name: getattr(exact, name).float().double() for name in names})
    assert len(upload_span(rounded, 0, above_noise=ABOVE_NOISE).basis) == 1
    assert len(upload_span(rounded, 0).basis) == 4  # kept where directions may be weak


# block 0's equations: exact without the position table's gradient where there are enough ----------


def test_its_masks_are_told_and_it_closes_a_direction_that_the_span_leaves_open() -> None:
    model = planted_model(unknown_embedding=True, embed_dim=160)
    view, inputs = planted_view(model, find_attack("token_span"), "c")
    assert torch.equal(solved(view, "token_span").mask, inputs.mask)
    view, inputs = planted_view(model, find_attack("masked_span"), "b")
    before = upload_span(replace(patch_system(view, view.updates[0]), hidden_sum=None), 0)
    after = refine(before, token_equations(view, view.updates[0], 0))
    assert len(after.basis) < len(before.basis)
    x = to_patches(model.normalize(inputs.images), 4)[0]
    visible = ~inputs.mask[0]
    closed = after.known + (x @ after.basis.mT) @ after.basis
    # A direction that stands out of the noise by little more than MARGIN may be off by 1 / MARGIN.
    assert (closed - x)[visible].norm() < 0.05 * x[visible].norm()


# attacks that know a defence's noise against the same attacks that do not -------------------------

LEVEL = 0.03


def defended(setting: str, defense: dict[str, float]) -> tuple[AttackerView, ClientInput]:
    """What masked_span sees of a client with this defence, and what that client fed."""
    model = planted_model(unknown_embedding=setting != "a")
    view, inputs = planted_view(model, find_attack("masked_span"), setting)
    names, client = [*view.updates[0].grads], ClientConfig(defenses=(defense,))
    return replace(view, updates=[make_upload(model, [inputs], client, names=names)]), inputs


def mean_psnr(view: AttackerView, **options: object) -> float:
    found = solved(view, "masked_span", **options)
    return float(psnr(found.images, planted_images()).mean())


# At 0.03 some visible rows are weaker than the noise, and nobody can tell them from masked ones.
@pytest.mark.parametrize("defense", [{"gaussian_noise": 0.01}, {"dp_sgd": 0.00003}])
def test_knowing_the_noise_helps(defense: dict[str, float]) -> None:
    view, inputs = defended("c", defense)
    untold = replace(view, updates=[replace(view.updates[0], noise={})])
    assert located(view, view.updates[0]).equal(inputs.mask)
    assert not located(untold, untold.updates[0]).equal(inputs.mask)
    assert mean_psnr(view) > mean_psnr(untold) + 1


def noisy(setting: str) -> tuple[NoisyUpload, Tensor, Tensor]:
    """One upload of a planted image, and the patch prior."""
    view, _ = defended(setting, {"gaussian_noise": LEVEL})
    system, patch = patch_system(view, view.updates[0]), view.model.patch_size
    prior = find_prior("stationary", patch=patch, size=view.pixels.size)
    mean, covariance = (part.double() for part in prior.patch(patch, view.pixels))
    return noisy_upload(view.updates[0], system, 0, mean, covariance), mean, covariance


@pytest.mark.parametrize(
    ("setting", "contrast"), [nightly("a", 1.0), nightly("c", 1.0), ("c", 1e-4)]
)
def test_the_solution_is_that_of_the_dense_system(
    setting: str, contrast: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "PASSES", 0)
    monkeypatch.setattr(filling, "TOLERANCE", 1e-12)
    upload, mean, covariance = noisy(setting)
    covariance = contrast * covariance
    found = most_probable([upload], mean, covariance, None, mean.expand(upload.pull().shape))
    patches, length = found.shape
    weight = covariance + JITTER * covariance.diagonal().mean() * torch.eye(length)
    eye = torch.eye(patches * length, dtype=torch.float64).view(-1, patches, length)
    forces = [upload.force(one) + one @ torch.linalg.inv(weight) for one in eye]
    dense = torch.stack([force.flatten() for force in forces], dim=1)
    right = upload.pull() + mean.expand_as(found) @ torch.linalg.inv(weight)
    wanted = torch.linalg.solve(dense, right.flatten()).view_as(found)
    assert torch.allclose(found, wanted, atol=1e-5 * contrast**0.5)


def test_rows_beside_a_guess_are_those_of_dense_conditioning() -> None:
    """g_1 ... g_N and G = A^T X jointly Gaussian around what was sent, a column of D at a time."""
    upload, mean, covariance = noisy("a")
    guess = most_probable([upload], mean, covariance, None, mean.expand(upload.pull().shape))
    found = upload.with_rows(guess).rows
    (a, g), sent = upload.errors, upload.sent
    joint = a * guess.mT @ guess + g * torch.eye(guess.shape[1])  # of G's row, given the rows sent
    gain = a * guess @ torch.linalg.inv(joint)
    wanted = sent + gain @ (upload.total - sent.mT @ guess).mT
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-7 * float(sent.abs().max()))
    assert not torch.allclose(found, sent, rtol=1e-2)


# the posterior in its diagonal form against dense Gaussian conditioning ---------------------------


@pytest.mark.parametrize("zero_row", [False, True])
@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize("noise", [1e-6, 0.1, 10.0])
@pytest.mark.parametrize("own_mean", [False, True])
def test_it_is_the_conditional_mean(
    own_mean: bool, noise: float, embedded: bool, zero_row: bool
) -> None:
    rows, mean, root = draw(3, 7, seed=0), draw(5, seed=1), draw(5, 5, seed=2)
    covariance, weight = root @ root.mT, draw(4, 5, seed=3) if embedded else torch.eye(5).double()
    rows[1] *= not zero_row
    total = draw(7, len(weight), seed=4) if not zero_row else rows.mT @ draw(3, len(weight), seed=4)
    prior = PatchPrior(mean, covariance, weight if embedded else None)
    level = torch.tensor([noise])
    found, values = posterior_patches(rows[None], total[None], prior, level, own_mean=own_mean)
    # vec of X row by row: Y = (A^T kron W) vec(X)
    operator = np.kron(rows.mT.numpy(), weight.numpy())
    sigma = np.kron(np.eye(3) + own_mean, covariance.numpy())
    centre = np.tile(mean.numpy(), 3)
    gain = sigma @ operator.T
    inverse = np.linalg.inv(operator @ gain + noise * np.eye(len(operator)))
    expected = centre + gain @ inverse @ (total.numpy().ravel() - operator @ centre)
    assert np.allclose(found[0].numpy().ravel(), expected, atol=1e-7)
    assert torch.allclose(values[0], torch.linalg.svdvals(rows))


def test_the_noise_of_each_direction_is_read_off_the_upload_and_at_least_what_is_known() -> None:
    root, zero = draw(6, 6, seed=1), torch.zeros(1, dtype=torch.float64)
    prior = PatchPrior(draw(6, seed=2), root @ root.mT)
    values, vectors, _ = prior.spread
    scale = torch.linspace(0.01, 0.3, 6).double()
    rows = draw(1, 20, 1200, seed=3)
    total = rows.mT @ draw(1, 20, 6, seed=4) + (scale * draw(1, 1200, 6, seed=5)) @ vectors.mT
    found = noise_by_direction(rows, total, prior, torch.float64, zero, zero)
    assert torch.allclose(found[0], scale.square(), rtol=0.15)
    known = noise_by_direction(rows, total, prior, torch.float64, zero, zero + 0.2)
    assert torch.allclose(known[0], scale.clamp_min(0.2).square(), rtol=0.15)
    square = draw(1, 8, 8, seed=6)  # which spans all: an error of A is as large as the patches are
    found = noise_by_direction(square, 0 * square[..., :6], prior, torch.float32, zero + 0.1, zero)
    assert torch.allclose(found[0], 0.01 * 8 * (values + (prior.mean @ vectors).square()))


# the most probable picture: conjugate gradients against a dense solve -----------------------------

SIDE, CUT = 8, 4
PIXELS = Pixels(SIDE, (0.4, 0.5, 0.6), (0.5, 0.5, 0.5))


def knowledge(open_directions: int) -> Knowledge:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(48, open_directions, generator=generator).double()).Q.mT
    patches = torch.randn(4, 48, generator=generator).double()
    known = patches - (patches @ basis.mT) @ basis
    return Knowledge(known, basis, torch.zeros(4, dtype=torch.bool))


def energy_and_matrix() -> tuple[FieldEnergy, Tensor]:
    """The field's energy, and Sigma^-1 as a matrix over all patches' entries."""
    energy = FieldEnergy.of(stationary_prior(SIDE), CUT, PIXELS)
    eye = torch.eye(4 * 48, dtype=torch.float64)
    return energy, torch.stack([energy.force(row.view(4, 48)).flatten() for row in eye])


@pytest.mark.parametrize("open_directions", [0, 1, 5, 20])
def test_conjugate_gradients_find_the_dense_solution(open_directions: int) -> None:
    known, (energy, matrix) = knowledge(open_directions), energy_and_matrix()
    found = complete(known, energy)
    basis = np.kron(np.eye(4), known.basis.numpy())
    centre = np.tile(np.repeat(energy.mean.numpy(), CUT**2), 4)
    offset = known.known.numpy().ravel() - centre
    force = basis @ matrix.numpy()
    a = np.linalg.solve(force @ basis.T, -force @ offset)
    expected = known.known.numpy().ravel() + a @ basis
    assert np.abs(found.numpy().ravel() - expected).max() < 2e-3
    outside = found - (found @ known.basis.mT) @ known.basis
    assert torch.allclose(outside, known.known, atol=1e-10)


def test_patchwise_completion_is_gaussian_conditioning() -> None:
    known = knowledge(6)
    mean, covariance = stationary_prior(SIDE).patch(CUT, PIXELS)
    found = complete_patchwise(known, mean, covariance)
    rest = torch.linalg.svd(known.basis, full_matrices=True).Vh[6:]  # what is known of a patch
    through = covariance @ rest.mT
    gain = torch.linalg.solve(rest @ through, through.mT).mT
    expected = mean + ((known.known - mean) @ rest.mT) @ gain.mT
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_prior_of_pictures_beats_one_of_patches_and_that_one_none() -> None:
    model = planted_model(unknown_embedding=True)
    view, _ = planted_view(model, find_attack("masked_span"), "c")
    field, patch, none = (mean_psnr(view, completion=how) for how in ("field", "patch", "none"))
    assert field > patch + 0.5 > none + 1


# planted pictures with flat regions: what several uploads leave open of them is found -------------

FLAT = Pixels(96, (0.5,) * 3, (0.5,) * 3)


def patches_of(kind: str) -> Tensor:
    """(144, 192) in [0, 1] of one of scikit-image's pictures with flat regions: an X-ray phantom, a
    photograph out of focus in its upper half, or one between two black bars."""
    name = {"drawing": "phantom", "half blurred": "chelsea", "letterboxed": "coffee"}[kind]
    source = Image.open(data_folder() / f"{name}.png").convert("RGB")
    square = Image.new("RGB", (224, 224))
    if kind == "drawing":
        source.thumbnail(square.size, Image.Resampling.BICUBIC)
    else:
        shape = (224, 224 if kind == "half blurred" else 128)
        scale = min(source.width / shape[0], source.height / shape[1])
        left, top = ((of - scale * to) / 2 for of, to in zip(source.size, shape, strict=True))
        box = (left, top, left + scale * shape[0], top + scale * shape[1])
        source = source.resize(shape, Image.Resampling.BICUBIC, box=box)
    square.paste(source, ((224 - source.width) // 2, (224 - source.height) // 2))
    if kind == "half blurred":
        square.paste(square.filter(ImageFilter.GaussianBlur(10.0)).crop((0, 0, 224, 112)), (0, 0))
    return to_patches(Preprocessing(96)(square), 8).double()


def known_but_for(patches: Tensor, lacks: Literal["levels", "differences"]) -> Knowledge:
    """The picture's patches, in [0, 1], without their part along one direction: their level; or
    along two: the differences of three patches that were masked every time."""
    x = normalised(patches, FLAT, 8)
    directions = torch.ones(1, 192).double() if lacks == "levels" else x[[67, 78]] - x[65]
    basis = torch.linalg.qr(directions.mT).Q.mT
    return Knowledge(x - x @ basis.mT @ basis, basis, torch.zeros(len(x), dtype=torch.bool))


@pytest.mark.nightly
def test_a_drawing_known_but_for_its_levels_comes_back() -> None:
    patches = patches_of("drawing")
    knowledge = known_but_for(patches, "levels")
    likely = complete(knowledge, field_energy("stationary", 8, FLAT))
    assert (in_levels(likely, FLAT, 8) - patches).abs().max() > 0.05
    found, whole = fewest_steps(knowledge, likely, 8, FLAT)
    assert whole.double().mean() > 0.9
    assert ((255 * found).round() - 255 * patches).abs().max() < 1e-3


def test_pixels_do_not_leave_their_range() -> None:
    """One patch is half black and half white: no other level is possible, whatever is beside it."""
    patches = torch.full((144, 192), 0.5).double()
    patches[70] = torch.tensor([0.0, 1.0]).double().repeat(96)
    start = normalised(patches + 0.2, FLAT, 8)
    found = fewest_steps(known_but_for(patches, "levels"), start, 8, FLAT)[0][70]
    assert found.min() > -0.02
    assert found.max() < 1.02


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("half blurred", True),
        ("letterboxed", True),
        ("half blurred", False),
    ],
)
def test_steps_between_patches_are_whole(name: str, whole: bool) -> None:
    """The field's guess is off, the lattice is not; nothing is taken for exact where no pixel is
    whole."""
    patches = patches_of(name)
    if not whole:
        noise = np.random.default_rng(0).uniform(-0.5, 0.5, (144, 192)) / 255
        patches = 0.9 * patches + 0.05 + torch.from_numpy(noise)
    knowledge, energy = known_but_for(patches, "differences"), field_energy("stationary", 8, FLAT)
    likely = complete(knowledge, energy)
    found = whole_picture(knowledge, likely, energy, FLAT)
    assert torch.equal(found, likely) != whole
    if whole:
        off, right = (
            255 * (in_levels(one, FLAT, 8) - patches).abs().amax(1) for one in (likely, found)
        )
        assert (off > 0.5).double().mean() > 0.5
        assert (right < 1e-3).double().mean() > 0.95


@pytest.mark.parametrize("name", ["multi_round", "plain_step", "masked_span"])
def test_a_picture_as_it_was_fed_is_filled_where_the_first_upload_was_masked(name: str) -> None:
    """The order of its masked patches is in no gradient: their mean stands there."""
    model = planted_model(unknown_embedding=True, img_size=32)
    attack = find_attack(name, {"uploads": 3} if name != "masked_span" else {})
    view, inputs = planted_view(model, attack, "b", gamma=0.3)
    made = attack.run(view, generator=torch.Generator())
    for image, masked in zip(made.images, inputs.mask, strict=True):
        there = to_patches(image[None], model.patch_size)[0][masked]
        assert float(there.std(0).max()) < 1e-6


@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_without_bias_ends_no_attack(affine: bool) -> None:
    norm = partial(torch.nn.LayerNorm, elementwise_affine=affine, bias=False)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 2, "num_heads": 4}
    network = timm.models.VisionTransformer(**sizes, num_classes=10, norm_layer=norm)
    images = planted_images(1, 32).float()
    logits = network(2 * images - 1)
    torch.nn.functional.cross_entropy(logits, torch.tensor([3])).backward()
    leak = attack_gradients(network, mean=0.5, std=0.5, images=images, attacks="token_span")
    assert "token_span" in leak.results
