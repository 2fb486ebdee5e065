"""Gradient matching through breaching: what decides the picture, what does not enter, and the terms
and switches of gradvit; and the jigsaw solver, alone and on clients that mask no patch."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.fft import dctn
from torch import Tensor

from attacks import find_attack
from attacks.breaching import Borders, FieldPrior, Near, SquaredDistance, match_gradients
from attacks.equations.completion import FieldEnergy
from attacks.gradient_matching import GradViT
from attacks.jigsaw import in_the_order_of, shifted_onto, solve
from attacks.patch_variants import agreed, sorted_patches
from attacks.prior.gaussian import stationary_prior
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload, noisy
from mjp_privacy.data import Preprocessing, load_images, open_images
from mjp_privacy.interfaces import AttackerView, ClientInput, Pixels, Reconstruction
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import load_model
from mjp_privacy.models.jigsaw import (
    Grid,
    blockwise_mask,
    draw_masks,
    shuffle_patches,
    shuffled_order,
    to_patches,
)
from tests.helpers.models import MEAN, STD, planted_model, some_images
from tests.helpers.planted import changed, keeping, planted_images, planted_view, solved

QUICK: dict[str, dict[str, Any]] = {
    "inverting_gradients": {"steps": 4, "tv": 0.01},
    "april_optimization": {"steps": 4, "tv": 0.01},
    "gradvit": {"steps": 4, "seeds": 2, "image_prior": "stationary"},
}
each_attack = pytest.mark.parametrize("name", QUICK)


def view_of(
    setting: str = "a",
    *,
    images: int = 1,
    side: int = 16,
    gamma: float = 0.5,
    client: ClientConfig | None = None,
    **model: object,
) -> tuple[AttackerView, ClientInput]:
    shape = {"img_size": side, "depth": 1, "unknown_embedding": True} | model
    attack, planted = find_attack("gradvit"), planted_images(images, side)
    return planted_view(
        planted_model(**shape), attack, setting, images=planted, client=client, gamma=gamma
    )


def made_by(name: str, view: AttackerView, *, seed: int = 0, **options: object) -> Reconstruction:
    return solved(view, name, seed=seed, **QUICK[name] | options)


def same(first: Reconstruction, second: Reconstruction, atol: float = 1e-12) -> bool:
    """Equal but for one rounding: breaching's distances are compiled after their first calls."""
    return torch.allclose(first.images, second.images, rtol=0, atol=atol)


@each_attack
def test_the_seed_decides_and_nothing_else_moves(name: str) -> None:
    view, _ = view_of("b")
    weights = {key: value.clone() for key, value in view.model.state_dict().items()}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = made_by(name, view, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert same(first, made_by(name, view, seed=1))
    assert not same(first, made_by(name, view, seed=2))
    assert all(torch.equal(value, weights[key]) for key, value in view.model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in view.model.parameters())


@each_attack
def test_images_are_pixels_in_the_uploads_precision(name: str) -> None:
    """And where its numbers break down there is no image."""
    view, _ = view_of()
    grads = {key: grad.float() for key, grad in view.updates[0].grads.items()}
    view = changed(replace(view, model=view.model.float()), grads=grads, dtype=torch.float32)
    found = made_by(name, view).images
    assert found.dtype == torch.float32
    assert 0 <= found.min() < found.max() <= 1
    broken = grads | {"pos_embed": torch.full_like(grads["pos_embed"], torch.nan)}
    assert made_by(name, changed(view, grads=broken)).images.isnan().all()


def test_the_mask_is_located_also_in_a_noisy_table_and_claimed_only_where_it_shows() -> None:
    """Of which no row is zero: those that are noise alone were masked."""
    view, inputs = view_of("b", images=2, gamma=0.27)
    assert torch.equal(made_by("gradvit", view).mask, inputs.mask)
    for strength in (1e-6, 1e-3, 0.03):
        update = noisy(view.updates[0], strength, ("0", "1"), seed=0)
        assert (update.grads["pos_embed"] != 0).all()
        one = replace(view, updates=[update])
        assert torch.equal(made_by("gradvit", one, steps=1, seeds=1).mask, inputs.mask)
    without_table = keeping(view, lambda name: name != "pos_embed")
    for one in (without_table, view_of("b", unknown_embedding=False)[0]):
        assert made_by("inverting_gradients", one).mask is None


@each_attack
def test_steps_and_seconds_are_told_for_each_picture_of_a_batch(name: str) -> None:
    view, _ = view_of("b", images=4, client=ClientConfig(batch=2))
    found = made_by(name, view, steps=3)
    seconds, steps = found.diagnostics["seconds"], 3 * QUICK[name].get("seeds", 1)
    assert found.images.shape == (4, 3, 16, 16)
    assert found.diagnostics["steps"].tolist() == [steps] * 4
    assert seconds[0] == seconds[1] != seconds[2]
    assert (seconds > 0).all()
    assert (found.diagnostics["cosine_distance"] > 0).all()


@each_attack
def test_what_is_not_uploaded_does_not_enter_and_names_pair_gradients(name: str) -> None:
    view, _ = view_of()

    def kept(key: str) -> bool:
        return key in ("pos_embed", "patch_embed.proj.weight")

    few = made_by(name, keeping(view, kept))
    assert not same(few, made_by(name, view))
    grads = view.updates[0].grads
    noise = {key: g if kept(key) else torch.full_like(g, 7.0) for key, g in grads.items()}
    assert same(few, made_by(name, keeping(changed(view, grads=noise), kept)))
    backwards = changed(view, grads=dict(reversed(grads.items())))
    assert same(made_by(name, view), made_by(name, backwards))


def test_the_true_image_is_where_the_distance_ends() -> None:
    """Mask, labels, normalisation and pairing are right: there the gradients agree."""
    view, inputs = view_of("b", images=2, gamma=0.27)
    still = {"optim": {"max_iterations": 1, "step_size": 1e-12}, "init": "zeros"}
    still["regularization"] = {"total_variation": {"scale": 0.0}}
    for at in range(2):
        one = slice(at, at + 1)
        grads = {key: grad[at] for key, grad in view.updates[0].grads.items()}
        start = view.model.normalize(inputs.images[one])
        for mask, exact in ((inputs.mask[one], True), (~inputs.mask[one], False)):
            given = view.model, grads, view.labels[one], mask, view.pixels, torch.float64, still
            _, facts = match_gradients(*given, start=start)
            assert (facts["cosine_distance"] < 1e-9) == exact


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_localization_loss_is_taken_off_as_far_as_it_was_clipped(clip: float | None) -> None:
    view, inputs = view_of("b", dal="linear")
    defenses = () if clip is None else ({"dp_sgd": {"noise": 0, "clip": clip}},)
    client = ClientConfig(dal=True, dal_lambda=0.5, defenses=defenses)
    sent = make_upload(view.model, [inputs], client, names=[*view.updates[0].grads])
    untold = replace(sent, dal_lambda=0.0)
    shrunk = sent.grads["pos_embed"].norm() < 0.9 * view.updates[0].grads["pos_embed"].norm()
    assert shrunk == (clip is not None)
    plain, knows, ignores = (
        made_by("april_optimization", replace(view, updates=[update]))
        for update in (view.updates[0], sent, untold)
    )
    assert same(plain, knows, 1e-5)
    assert not same(plain, ignores, 1e-5)


# the switches of gradvit --------------------------------------------------------------------------


@pytest.mark.nightly
def test_with_all_switched_off_it_is_inverting_gradients() -> None:
    """The same loop from the same noise: 40 steps in one go, or 20 and 20 with Adam's memory lost
    between."""
    view, _ = view_of("b")
    plainly = {"tv": 0.2, "steps": 40, "decay": "cosine-decay", "signed": "none"}
    expected = made_by("inverting_gradients", view, **plainly)
    off = {"steps": 40, "l2": 0, "borders": 0, "image_prior": "none", "seeds": 1}
    assert same(expected, made_by("gradvit", view, **off))
    halves = off | {"image_prior": "stationary", "prior_weight": 1e-12}
    assert same(expected, made_by("gradvit", view, **halves), 0.2)


def test_masked_patches_of_seeds_are_laid_on_one_another() -> None:
    view, inputs = view_of("b", side=16)
    best = view.model.normalize(inputs.images)
    hidden = inputs.mask[0].nonzero().flatten()
    order = torch.arange(16)
    order[hidden] = hidden.roll(1)
    other = shuffle_patches(best, order[None], 4)
    searches = [(best, {"cosine_distance": 0.1}), (other, {"cosine_distance": 0.2})]
    given = searches, torch.zeros(1, dtype=torch.long), inputs.mask, 4
    starts, mean = GradViT(image_prior="none")._agreement(*given)
    assert all(torch.equal(start, best) for start in starts)
    torch.testing.assert_close(mean, best)
    starts, mean = GradViT(image_prior="none", registration=False)._agreement(*given)
    assert torch.equal(starts[1], other)
    apart = (to_patches(mean, 4) - to_patches(best, 4)).abs().amax(-1)[0] > 1e-9
    assert torch.equal(apart, inputs.mask[0])


# its terms against their formulas -----------------------------------------------------------------


def test_squared_distance_is_a_share_and_nearness_a_mean_square() -> None:
    uploaded = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    candidate = [torch.tensor([0.0, 1.0]), torch.tensor([[2.0]])]
    distance = SquaredDistance().gradient_based_loss
    assert float(distance(candidate, uploaded)) == pytest.approx(14 / 25)
    stronger = [[10 * grad for grad in grads] for grads in (candidate, uploaded)]
    assert float(distance(*stronger)) == pytest.approx(14 / 25)
    pictures = torch.tensor([[[[1.0, 3.0]]]])
    assert float(Near(0.5, torch.tensor([[[[0.0, 1.0]]]]))(pictures)) == 0.5 * (1 + 4) / 2


def test_borders_are_the_norms_of_each_borders_step() -> None:
    pictures = some_images(2)
    expected = []
    for picture in pictures:
        for row in range(0, 32, 8):
            for at in (8, 16, 24):
                for image in (picture, picture.mT):
                    step = image[:, row : row + 8, at] - image[:, row : row + 8, at - 1]
                    expected.append(float(step.norm()) / math.sqrt(24))
    mean = sum(expected) / len(expected)
    assert float(Borders(3.0, patch_size=8)(pictures)) == pytest.approx(3 * mean, rel=1e-9)
    flat = torch.zeros(1, 3, 32, 32, requires_grad=True)
    for patch_size in (32, 8):  # without any border, and with flat ones
        value = Borders(1.0, patch_size)(flat)
        (derivative,) = torch.autograd.grad(value, flat)
        assert value.item() == pytest.approx(0, abs=1e-5)
        assert not derivative.any()


def test_the_field_prior_is_the_energy_per_value_and_its_derivative_the_force() -> None:
    """From SciPy's DCT and a loop over its coefficients."""
    pictures, total = some_images(2).requires_grad_(), 0.0
    energy = FieldEnergy.of(stationary_prior(32), 8, Pixels(32, MEAN, STD))
    for picture in pictures.detach():
        centred = picture - energy.mean.view(-1, 1, 1)
        waves = torch.from_numpy(dctn(centred.numpy(), axes=(1, 2), norm="ortho"))
        for row in range(32):
            for column in range(32):
                wave = waves[:, row, column]
                total += float(wave @ energy.precision[:, :, row, column] @ wave)
    found = FieldPrior(0.5, energy)(pictures)
    assert float(found) == pytest.approx(0.5 * total / pictures.numel(), rel=1e-6)
    found.backward()
    centred = pictures.detach()[0] - energy.mean.view(-1, 1, 1)
    force = energy.force(to_patches(centred, 8)) / pictures.numel()
    torch.testing.assert_close(to_patches(pictures.grad[0], 8), force, rtol=1e-6, atol=1e-9)


# pictures laid on one another ---------------------------------------------------------------------


@pytest.mark.parametrize(("down", "right"), [(0, 0), (2, -1), (-2, 0), (1, 2), (3, 0)])
def test_a_shift_within_reach_is_taken_back(down: int, right: int) -> None:
    large = some_images(1, 40)[0]
    reference, moved = large[:, 4:36, 4:36], large[:, 4 + down : 36 + down, 4 + right : 36 + right]
    assert torch.equal(shifted_onto(moved, reference), reference) == (down < 3)
    assert torch.equal(shifted_onto(moved, reference, reach=3), reference)


def test_pictures_change_places_within_their_label_alone() -> None:
    reference = some_images(4)
    found = reference[[1, 0, 3, 2]]
    assert torch.equal(in_the_order_of(found, reference, torch.tensor([7] * 4)), reference)
    labels = torch.tensor([0, 0, 1, 2])
    assert torch.equal(in_the_order_of(found, reference, labels), reference[[0, 1, 3, 2]])


# the jigsaw: conventions, planted answers, edges, determinism -------------------------------------

GRID, PATCH = 12, 16
PLACES = torch.arange(GRID**2)


@pytest.fixture(scope="module")
def photographs() -> Tensor:
    """(n, 3, 192, 192) crops of scikit-image's photographs."""
    crops = load_images("embedded", size=GRID * PATCH)
    return torch.stack([item.image for item in crops if item.image_id.endswith("0_1")])


def puzzle(image: Tensor, gamma: float = 0.27) -> tuple[Tensor, Tensor, Tensor]:
    """(shuffled patches, mask, permutation)."""
    rng = random.Random(1)
    mask = blockwise_mask(Grid(GRID, GRID), gamma, rng)
    permutation = shuffled_order(mask, rng)
    shuffled = shuffle_patches(image[None], permutation[None], PATCH)
    return to_patches(shuffled, PATCH)[0], mask, permutation


def put_together(shuffled: Tensor, mask: Tensor) -> Tensor:
    known = shuffled.masked_fill(mask[:, None], torch.nan)  # what must not be read
    return solve(known, mask, shuffled[mask], grid=Grid(GRID, GRID), patch_size=PATCH)


def test_the_permutation_is_the_clients_own_and_the_same_every_time(photographs: Tensor) -> None:
    shuffled, mask, permutation = puzzle(photographs[0])
    found = put_together(shuffled, mask)
    assert (found == permutation)[mask].double().mean() > 0.9
    assert not (permutation[mask] == permutation.argsort()[mask]).all()  # the inverse differs
    assert (found[~mask] == PLACES[~mask]).all()
    assert sorted(found.tolist()) == PLACES.tolist()
    shuffled, mask, _ = puzzle(photographs[1], 0.5)
    torch.manual_seed(5)
    first = put_together(shuffled, mask)
    torch.manual_seed(6)
    assert torch.equal(first, put_together(shuffled, mask))


def test_everything_masked_gives_a_permutation_with_neighbours_together() -> None:
    ramp = torch.linspace(0.1, 1, 32)
    plain = to_patches((ramp * ramp[:, None]).expand(3, -1, -1), 8)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(16, dtype=torch.bool)
    found = solve(plain, mask, plain[order], grid=Grid(4, 4), patch_size=8)
    assert sorted(found.tolist()) == list(range(16))
    at = order[found.argsort()].reshape(4, 4)  # the plain patch at each position
    assert (at[:, 1:] - at[:, :-1] == 1).double().mean() > 0.5


# patch_jigsaw -------------------------------------------------------------------------------------

COUNT, SIZE, CIFAR_PATCH = 6, 56, 7


@pytest.fixture(scope="module")
def enlarged() -> Tensor:
    source = open_images("embedded")
    prepare = Preprocessing(SIZE, SIZE, "bicubic")
    return torch.stack([prepare(source.decode(record)) for record in source.records[:COUNT]])


def test_one_upload_gives_most_pictures_back_in_order(enlarged: Tensor) -> None:
    """Of the zoo's model without E_unk."""
    attack = find_attack("patch_jigsaw")
    view, fed = planted_view(load_model("cifar_vit_jp"), attack, "c", images=enlarged)
    images = attack.run(view, generator=torch.Generator()).images
    sorted_pictures, before = psnr(images.cpu().float(), enlarged), psnr(fed.images, enlarged)
    assert float(before.max()) < 30
    assert int((sorted_pictures > 60).sum()) >= 3
    assert bool((sorted_pictures > before - 0.1).all())


def test_uploads_agree_on_places_and_sort_the_rest(enlarged: Tensor) -> None:
    """Three that shuffle nearly all agree on few places, and on some by chance."""
    patches = to_patches(enlarged[:1], CIFAR_PATCH)[0]
    given = {"grid": Grid(8, 8), "gamma": 0.8, "seed": 1}
    orders = [draw_masks(["i"], **given, round=round)[1][0] for round in range(3)]
    rounds = torch.stack([patches[order] for order in orders])
    assert int(agreed(rounds)[1].sum()) > 20
    assert torch.equal(sorted_patches(rounds, Grid(8, 8), CIFAR_PATCH), patches)
