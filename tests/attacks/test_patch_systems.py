"""Reading an upload: masks, weight differences, what the recipe adds to the gradient, the error of
autocast; and the least-squares solver."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations import PATCH, TABLE
from attacks.equations.patch_system import (
    PatchSystem,
    condition_and_rank,
    error_of,
    minimum_norm_solve,
    patch_system,
)
from attacks.equations.span import combine, upload_span
from attacks.patch_gradient import PatchGradient
from mjp_privacy import load_images, load_model
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import HALF, FedSGDClient
from mjp_privacy.client.upload import make_upload, rounded
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate, Pixels
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from tests.contract.defense_errors import allowance, deviation
from tests.helpers.models import planted_model, tiny
from tests.helpers.planted import changed, planted_images, planted_view


def view_of(
    model: LoadedModel, setting: str = "b", **client: object
) -> tuple[AttackerView, ClientInput]:
    return planted_view(model, PatchGradient(), setting, client=ClientConfig(**client))


def hidden(view: AttackerView) -> Tensor:
    return patch_system(view, view.updates[0]).hidden


@pytest.mark.parametrize(
    ("kind", "setting", "clips"),
    [
        *(("linear", "a", True), ("linear", "b", False)),
        *(("nonlinear", "a", False), ("nonlinear", "b", True)),
        *(("pca", "a", False), ("pca", "b", True)),
    ],
)
def test_dal_is_subtracted_as_far_as_it_was_clipped(kind: str, setting: str, clips: bool) -> None:
    model, dal = planted_model(unknown_embedding=True, dal=kind), {"dal": True, "dal_lambda": 0.5}
    view, inputs = view_of(model, setting, **dal)
    whole = FedSGDClient(model, ClientConfig(**dal)).gradients(inputs)
    norm = torch.stack([g.flatten(1).square().sum(1) for g in whole.values()]).sum(0).sqrt()
    clip = float(norm.median()) / 3 if clips else 1e9
    defenses = ({"dp_sgd": {"noise": 0, "clip": clip}},) if clips else ()
    client = ClientConfig(**dal, defenses=defenses)
    sent = make_upload(model, [inputs], client, names=[*view.updates[0].grads])
    system, plain = patch_system(view, sent), view_of(model, setting)[0]
    shrunk = (clip / norm).clamp(max=1)
    assert (sent.clipped, bool(shrunk.min() < 0.5)) == (clips, clips)
    expected = shrunk.view(-1, 1, 1) * patch_system(plain, plain.updates[0]).rows
    assert torch.allclose(system.rows, expected, rtol=1e-5, atol=1e-9 if clips else 1e-12)
    assert not torch.allclose(sent.grads[TABLE][:, 0, 1:], expected, rtol=1e-2, atol=1e-6)
    if setting == "b":
        assert torch.equal(system.hidden, inputs.mask)
    if clips:
        untold = patch_system(view, replace(sent, clipped=False, dal_lambda=3.0))
        assert torch.allclose(untold.rows, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", ["linear", "nonlinear"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_dal_is_taken_out_of_a_batch_of_masks(kind: str, clip: float | None) -> None:
    """Each picture has its own mask, and each its own factor where examples are clipped."""
    model = planted_model(unknown_embedding=True, dal=kind)
    clipped = () if clip is None else ({"dp_sgd": {"noise": 0, "clip": clip}},)
    facts = {"batch": 2, "defenses": clipped, "dal": True, "dal_lambda": 5.0}
    view, inputs = view_of(model, **facts)
    assert not torch.equal(*inputs.mask[:2])
    update = view.updates[0]
    rows = patch_system(view, update).rows
    assert float((rows.sum(-1) / rows.norm(dim=-1).clamp_min(1e-9)).abs().max()) < 1e-9
    sent = update.grads[TABLE][:, 0, 1:]
    if clip is None:
        plain = view_of(model, batch=2)[0].updates[0].grads[TABLE][:, 0, 1:]
        assert torch.allclose(rows, plain, rtol=1e-5, atol=1e-9)
        assert not torch.allclose(sent, plain, rtol=1e-2)


def test_weak_rows_of_a_model_that_cannot_mask_are_no_masked_ones() -> None:
    view, inputs = view_of(planted_model(), "a")
    client = ClientConfig(defenses=({"gaussian_noise": 3.0},))
    view = replace(view, updates=[make_upload(view.model, [inputs], client)])
    assert not hidden(view).any()
    assert hidden(replace(view, model=planted_model(unknown_embedding=True))).any()


def test_weights_that_moved_are_those_the_decay_is_taken_from() -> None:
    view, inputs = view_of(planted_model(unknown_embedding=True))
    before = {name: p.detach().clone() for name, p in view.model.named_parameters()}
    grads = view.updates[0].grads.items()
    sent = {name: -0.1 * (g + 0.05 * before[name]) for name, g in grads}
    view = changed(view, grads=sent, kind="weight_difference", lr=0.1, weight_decay=0.05)
    with torch.no_grad():  # the server's model has gone on since
        for parameter in view.model.parameters():
            parameter.add_(1.0)
    assert torch.equal(hidden(changed(view, weights_before=before)), inputs.mask)
    assert not torch.equal(hidden(view), inputs.mask)


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("masks", [True, False])
def test_a_small_rate_rounds_no_row_to_a_masked_one(masks: bool, decay: float) -> None:
    """Rows are a hundredth of what rounding could do to the table's largest weight."""
    client = {"upload": "weight_difference", "lr": 1e-4, "weight_decay": decay}
    model = planted_model(unknown_embedding=masks).float()
    with torch.no_grad():
        model.pos_embed[:, 0] = 5.0  # the class token's row
    images = planted_images(2).float()
    view, inputs = planted_view(
        model, PatchGradient(), "b" if masks else "a", images=images, client=ClientConfig(**client)
    )
    assert torch.equal(hidden(view), inputs.mask if masks else torch.zeros(2, 64).bool())


# the batched least-squares solver against LAPACK's gelsd, where rows are zero or dependent --------


def systems(rows: int, condition: float, number: int = 3) -> tuple[Tensor, Tensor]:
    """a (n, rows, 30) of this condition number, b (n, 30, 5) that it explains but for 1e-9."""
    generator = torch.Generator().manual_seed(rows)
    left, right = (
        torch.linalg.qr(torch.randn(number, size, size, generator=generator).double()).Q
        for size in (rows, 30)
    )
    values = torch.logspace(0, -torch.tensor(condition).log10(), min(rows, 30)).double()
    a = left[..., : len(values)] * values @ right.mT[:, : len(values)]
    b = a.mT @ torch.randn(number, rows, 5, generator=generator).double()
    return a, b + 1e-9 * torch.randn(b.shape, generator=generator).double()


def gelsd(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.lstsq(a.mT, b, driver="gelsd").solution


@pytest.mark.parametrize(
    ("rows", "condition"), [(1, 1e1), (20, 1e5), (20, 1e9), (30, 1e5), (30, 1e9), (40, 1e9)]
)
def test_it_is_gelsd(rows: int, condition: float) -> None:
    a, b = systems(rows, condition)
    z, values = minimum_norm_solve(a, b)
    expected = gelsd(a, b)
    assert float((z - expected).norm() / expected.norm()) < 1e-14 * condition
    torch.testing.assert_close(values, torch.linalg.svdvals(a), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "lost"), [("zero", 4), ("equal", 1), ("all zero", 20), ("dependent", 5)]
)
def test_rows_that_say_nothing_of_their_own(change: str, lost: int) -> None:
    a, b = systems(20, 10.0)
    if change == "zero":
        a[1, 3:7] = 0
    elif change == "equal":
        a[1, 3] = a[1, 4]
    elif change == "all zero":
        a[1] = 0
    else:
        mixed = torch.randn(5, 15, generator=torch.Generator().manual_seed(2)).double()
        a[:, 15:] = mixed @ a[:, :15]
    z, values = minimum_norm_solve(a, b)
    expected = gelsd(a, b)
    assert torch.allclose(z, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
    assert z[1, 3:7].any() == (change not in ("zero", "all zero"))
    torch.testing.assert_close(values, torch.linalg.svdvals(a), rtol=1e-9, atol=1e-13)
    assert condition_and_rank(a, torch.float64, values)["rank_a"][1] == 20 - lost


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_the_number_of_threads_and_of_systems_changes_no_bit(threads: int) -> None:
    a, b = systems(20, 1e6, number=7)
    several = minimum_norm_solve(a, b)[0]
    torch.set_num_threads(1)
    assert torch.equal(minimum_norm_solve(a, b)[0], several)
    assert torch.equal(several[4], minimum_norm_solve(a[4:5], b[4:5])[0][0])
    assert minimum_norm_solve(a[:0], b[:0])[0].shape == (0, 20, 5)


# the error of autocast: what is declared against what is measured ---------------------------------

BOUND = 1.05
"""How many times too small or large the declared error may be; defences are held to 1.4."""

each_kind = pytest.mark.parametrize("kind", ["bf16", "fp16"])


def is_declared(declared: Tensor, error: Tensor, bound: float = BOUND) -> None:
    """Within the bound, and not as many times too large."""
    measured, allowed = deviation(error), allowance(error[0].numel(), bound)
    assert (measured < declared * allowed).all()
    assert (declared < measured * allowed).all()


@each_kind
@pytest.mark.parametrize("dal", [False, True])
def test_the_rows_that_were_multiplied_are_known_exactly(kind: str, dal: bool) -> None:
    """G is their product with the rounded patches, up to the declared rounding of its entries; the
    gradient of MJP's extra loss is taken out as the client rounded it."""
    if dal:
        model = tiny(unknown_embedding=True, dal="nonlinear").float()
        images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    else:
        model = load_model("cifar_vit_mjp")
        images = torch.stack([image for image, *_ in load_images("embedded", size=56, limit=4)])
    ids = [f"image {place}" for place in range(len(images))]
    inputs = ClientInput(images, torch.arange(len(images)), ids)
    client = ClientConfig(autocast=kind, dal=dal, dal_lambda=10)
    update = make_upload(model, [inputs], client, names=[TABLE, PATCH])
    pixels = Pixels(model.card.img_size, model.card.mean, model.card.std)
    system = patch_system(AttackerView(model, [update], pixels, None, "plain"), update)
    patches = rounded(to_patches(model.normalize(images), model.patch_size), HALF[kind])
    left = system.total - system.rows.mT @ patches
    is_declared(error_of(update, PATCH), left)
    if not dal:
        assert (error_of(update, TABLE) == 0).all()
        as_sent = system.total - update.grads[TABLE][:, 0, 1:].double().mT @ patches
        assert (deviation(as_sent) > 1.05 * deviation(left)).all()


@each_kind
def test_errors_of_several_local_steps(kind: Any) -> None:
    """Each step's product is rounded, and so are the rows that went into it."""
    rate, generator = 0.1, torch.Generator().manual_seed(0)
    drawn = torch.randn(1, 5, 64, 96, generator=generator).double()
    rows = drawn[:, :1] + 0.1 * drawn[:, 1:]  # of four steps, whose weights moved a little
    patches = torch.randn(1, 64, 192, generator=generator).double()
    multiplied = rounded(rows, HALF[kind]).mT @ patches.unsqueeze(1)
    sent = {TABLE: -rate * rows.sum(1), PATCH: -rate * rounded(multiplied, HALF[kind]).sum(1)}
    facts: dict[str, Any] = {"kind": "weight_difference", "lr": rate, "steps": 4}
    update = ClientUpdate({n: g.float() for n, g in sent.items()}, autocast=kind, **facts)
    for name, exact in ((PATCH, multiplied), (TABLE, rows)):
        error = (rounded(exact, HALF[kind]) - exact).mean(1)
        measured, declared = deviation(error), error_of(update, name)
        assert (measured < declared * 1.4).all(), name
        assert (declared < measured * 1.4).all(), name


def test_a_direction_that_noise_alone_closes_stays_open() -> None:
    """Three patches are masked in both uploads. By the errors of the spans the eigenvalue of their
    directions is not zero; with the errors told they are open."""
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(24, 192, generator=generator).double()
    error, spans, told = 0.05, [], []
    for hidden_ones in ((0, 1, 2, 3, 4), (0, 1, 2, 5, 6)):
        rows = torch.randn(24, 96, generator=generator).double()
        total = rows.mT @ patches + error * torch.randn(96, 192, generator=generator).double()
        hidden = torch.zeros(1, 24, dtype=torch.bool)
        hidden[0, list(hidden_ones)] = True
        system = PatchSystem(torch.where(hidden[0, :, None], 0.0, rows)[None], total[None], hidden)
        spans.append(upload_span(system, 0))
        told.append(upload_span(system, 0, error=error))
    assert len(combine(spans).basis) == 0
    knowledge = combine(told)
    assert len(knowledge.basis) == 3
    across = patches - (patches @ knowledge.basis.mT) @ knowledge.basis
    assert (knowledge.known - across).square().mean().sqrt() < 2 * error
    misled = (combine(spans).known - patches) @ knowledge.basis.mT
    assert misled.square().mean().sqrt() > 10 * error


# noise on the table -------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["a", "b"])
def test_noise_on_the_table_is_declared_as_it_is(setting: str) -> None:
    """Masked rows hold nothing but noise, and their number changes its size."""
    model, attack = planted_model(unknown_embedding=True), find_attack("masked_span")
    exact = planted_view(model, attack, setting)[0].updates[0]
    client = ClientConfig(position_noise=0.01)
    noisy = planted_view(model, attack, setting, client=client)[0].updates[0]
    is_declared(error_of(noisy, TABLE), noisy.grads[TABLE] - exact.grads[TABLE])
    assert (error_of(noisy, PATCH) == 0).all()
    assert (error_of(exact, TABLE) == 0).all()


@pytest.mark.parametrize(
    ("name", "options", "least"),
    [("masked_span", {}, 14.2), ("multi_round", {"uploads": 3}, 16.7)],
)
def test_noise_on_the_table_is_weighed(name: str, options: dict[str, int], least: float) -> None:
    """Taken for exact, the same uploads give 13.3 and 15.7 dB."""
    attack = find_attack(name, {"prior": "stationary", **options})
    client = ClientConfig(position_noise=0.01)
    view, _ = planted_view(planted_model(unknown_embedding=True), attack, "b", client=client)
    found = attack.run(replace(view, against="plain"), generator=torch.Generator())
    assert psnr(found.images, planted_images()).mean() > least
