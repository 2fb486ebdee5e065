"""Gradient matching through breaching: what decides the image, and what does not enter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload, noisy
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, ClientInput, Reconstruction
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view

QUICK: dict[str, Any] = {"steps": 4, "tv": 0.01}
BOTH = pytest.mark.parametrize("name", ["inverting_gradients", "april_optimization"])


def view_of(
    setting: str = "a", *, images: int = 1, client: ClientConfig | None = None, **options: object
) -> tuple[AttackerView, ClientInput]:
    options = {"img_size": 16, "depth": 1, "unknown_embedding": True} | options
    attack = find_attack("inverting_gradients")
    planted = planted_images(images, 16)
    return planted_view(planted_model(**options), attack, setting, images=planted, client=client)


def found_by(name: str, view: AttackerView, *, seed: int = 0, **options: object) -> Reconstruction:
    attack = find_attack(name, QUICK | options)
    assert attack.unsupported(view) is None
    return attack.run(view, generator=torch.Generator().manual_seed(seed))


def pixels(found: Reconstruction) -> Tensor:
    assert found.images is not None
    return found.images


def with_grads(view: AttackerView, keep: Callable[[str], bool]) -> AttackerView:
    update = view.updates[0]
    grads = {name: grad for name, grad in update.grads.items() if keep(name)}
    return replace(view, updates=[replace(update, grads=grads)])


@BOTH
def test_the_seed_decides_and_nothing_global_moves(name: str) -> None:
    view, _ = view_of()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = pixels(found_by(name, view, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(first, pixels(found_by(name, view, seed=1)))
    assert not torch.equal(first, pixels(found_by(name, view, seed=2)))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_are_pixels_in_the_uploads_precision(name: str, dtype: torch.dtype) -> None:
    view, _ = view_of()
    update = view.updates[0]
    grads = {key: grad.to(dtype) for key, grad in update.grads.items()}
    model = view.model.to(dtype)
    view = replace(view, model=model, updates=[replace(update, grads=grads, dtype=dtype)])
    found = pixels(found_by(name, view))
    assert found.dtype == dtype
    assert found.shape == (1, 3, 16, 16)
    assert 0 <= found.min() < found.max() <= 1


@BOTH
def test_the_attackers_model_is_left_as_it_was(name: str) -> None:
    view, _ = view_of("b")
    before = {key: value.clone() for key, value in view.model.state_dict().items()}
    found_by(name, with_grads(view, lambda key: not key.startswith("head")))
    assert all(torch.equal(value, before[key]) for key, value in view.model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in view.model.parameters())


@BOTH
def test_budget_is_reported_per_image(name: str) -> None:
    view, _ = view_of(images=2)
    found = found_by(name, view, steps=3, restarts=2)
    assert found.diagnostics["steps"].tolist() == [6, 6]
    assert found.diagnostics["seconds"].shape == (2,)
    assert (found.diagnostics["seconds"] > 0).all()
    assert (found.diagnostics["cosine_distance"] > 0).all()


def test_the_position_term_moves_the_image() -> None:
    view, _ = view_of()
    plain = pixels(found_by("inverting_gradients", view))
    light = pixels(found_by("april_optimization", view, positions=1e-12))
    heavy = pixels(found_by("april_optimization", view, positions=10.0))
    torch.testing.assert_close(plain, light, rtol=0, atol=1e-6)
    assert not torch.allclose(plain, heavy, atol=1e-3)


@BOTH
def test_what_is_not_uploaded_does_not_enter(name: str) -> None:
    view, _ = view_of()
    keep = lambda key: key in ("pos_embed", "patch_embed.proj.weight")  # noqa: E731
    few = with_grads(view, keep)
    found = pixels(found_by(name, few))
    assert not torch.equal(found, pixels(found_by(name, view)))
    update = view.updates[0]
    noise = {k: g if keep(k) else torch.full_like(g, 7.0) for k, g in update.grads.items()}
    other = with_grads(replace(view, updates=[replace(update, grads=noise)]), keep)
    assert torch.equal(found, pixels(found_by(name, other)))


def test_gradients_are_matched_by_name_not_by_their_order() -> None:
    view, _ = view_of()
    update = view.updates[0]
    backwards = dict(reversed(update.grads.items()))
    other = replace(view, updates=[replace(update, grads=backwards)])
    assert torch.equal(*(pixels(found_by("april_optimization", v)) for v in (view, other)))


def test_the_true_image_is_where_the_distance_ends() -> None:
    """Mask, labels, normalisation and pairing are right: there the gradients agree."""
    from attacks.breaching import match_gradients, optimization_configuration

    view, inputs = view_of("b", images=2)
    assert inputs.mask is not None
    assert view.labels is not None
    still = {"optim": {"max_iterations": 1, "step_size": 1e-12}, "init": "zeros"}
    config = optimization_configuration(torch.float64, still, 0.0)
    for at in range(2):
        grads = {key: grad[at] for key, grad in view.updates[0].grads.items()}
        for mask, exact in ((inputs.mask[at : at + 1], True), (~inputs.mask[at : at + 1], False)):
            _, facts = match_gradients(
                view.model,
                grads,
                view.labels[at : at + 1],
                mask,
                view.pixels,
                config,
                start=view.model.normalize(inputs.images[at : at + 1]),
            )
            assert (facts["cosine_distance"] < 1e-9) == exact


@BOTH
def test_the_mask_is_located_and_fed(name: str) -> None:
    view, inputs = view_of("b", images=2)
    found = found_by(name, view)
    assert found.mask is not None
    assert torch.equal(found.mask, inputs.mask)


@BOTH
def test_the_mask_is_located_in_a_noisy_table(name: str) -> None:
    """No row of it is zero; those that are noise alone were masked."""
    view, inputs = view_of("b", images=2)
    update = noisy(view.updates[0], 0.001, ("0", "1"), seed=0)
    assert not (update.grads["pos_embed"][:, 0, 1:] == 0).all(-1).any()
    found = found_by(name, replace(view, updates=[update]))
    assert found.mask is not None
    assert torch.equal(found.mask, inputs.mask)


def test_without_the_table_or_without_e_unk_no_mask_is_claimed() -> None:
    view, _ = view_of("b")
    assert (
        found_by("inverting_gradients", with_grads(view, lambda k: k != "pos_embed")).mask is None
    )
    view, _ = view_of("b", unknown_embedding=False)
    assert found_by("inverting_gradients", view).mask is None


def test_the_localization_loss_is_taken_off() -> None:
    view, _ = view_of("b", dal="linear")
    with_dal, _ = view_of("b", dal="linear", client=ClientConfig(dal=True, dal_lambda=0.5))
    assert with_dal.updates[0].dal_lambda == 0.5
    untold = replace(with_dal, updates=[replace(with_dal.updates[0], dal_lambda=0.0)])
    plain, knows, ignores = (
        pixels(found_by("april_optimization", v)) for v in (view, with_dal, untold)
    )
    torch.testing.assert_close(plain, knows, rtol=0, atol=1e-6)
    assert not torch.allclose(plain, ignores, atol=1e-6)


def test_the_localization_loss_is_taken_off_as_far_as_it_was_clipped() -> None:
    view, _ = view_of("b", dal="linear")
    dal = {"dal": True, "dal_lambda": 0.5}
    whole, inputs = view_of("b", dal="linear", client=ClientConfig(**dal))  # type: ignore[arg-type]
    client = ClientConfig(**dal, defenses=({"dp_sgd": {"noise": 0, "clip": 0.05}},))  # type: ignore[arg-type]
    sent = make_upload(view.model, [inputs], client, names=[*whole.updates[0].grads])
    assert sent.grads["pos_embed"].norm() < 0.9 * whole.updates[0].grads["pos_embed"].norm()
    clipped = replace(whole, updates=[sent])
    untold = replace(whole, updates=[replace(sent, clipped=False)])
    plain, knows, ignores = (
        pixels(found_by("april_optimization", v)) for v in (view, clipped, untold)
    )
    torch.testing.assert_close(plain, knows, rtol=0, atol=1e-5)
    assert not torch.allclose(plain, ignores, atol=1e-5)


@BOTH
def test_a_batch_is_one_reconstruction(name: str) -> None:
    view, _ = view_of("b", images=4, client=ClientConfig(batch=2))
    found = found_by(name, view)
    assert pixels(found).shape == (4, 3, 16, 16)
    seconds = found.diagnostics["seconds"]
    assert seconds[0] == seconds[1] != seconds[2]


def test_numbers_that_break_down_are_no_image() -> None:
    view, _ = view_of()
    update = view.updates[0]
    grads = dict(update.grads) | {
        "pos_embed": torch.full_like(update.grads["pos_embed"], torch.nan)
    }
    view = replace(view, updates=[replace(update, grads=grads)])
    assert pixels(found_by("inverting_gradients", view)).isnan().all()


@BOTH
def test_reasons_for_not_applying(name: str) -> None:
    attack = find_attack(name, QUICK)
    view, _ = view_of()
    assert "labels" in str(attack.unsupported(replace(view, labels=None)))
    difference = replace(view, updates=[replace(view.updates[0], kind="weight_difference")])
    assert "weight difference" in str(attack.unsupported(difference))
    assert "no gradient" in str(attack.unsupported(with_grads(view, lambda key: False)))


def test_the_position_term_needs_the_tables_gradient() -> None:
    attack = find_attack("april_optimization", QUICK)
    view, _ = view_of()
    withheld = with_grads(view, lambda key: key != "pos_embed")
    assert "no gradient of pos_embed" in str(attack.unsupported(withheld))
    assert find_attack("inverting_gradients", QUICK).unsupported(withheld) is None


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps: expected a whole number of at least 1, got 0"),
        ({"restarts": 1.5}, "restarts: expected a whole number of at least 1, got 1.5"),
        ({"step_size": "fast"}, "step_size: expected a number above 0, got 'fast'"),
        ({"tv": -1}, "tv: expected a number of at least 0, got -1"),
        ({"decay": "cosine"}, "decay: expected one of step-lr, cosine-decay"),
        ({"signed": True}, "signed: expected one of hard, soft, none, got True"),
        ({"stepz": 1}, "Did you mean steps"),
    ],
)
def test_wrong_options_say_what_is_right(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_attack(name, options)


def test_a_position_term_of_no_weight_is_the_other_attack() -> None:
    with pytest.raises(UserError, match=r"above 0.*inverting_gradients"):
        find_attack("april_optimization", {"positions": 0})
