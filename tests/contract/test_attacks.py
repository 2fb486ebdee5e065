"""Every attack against a planted answer, and every reason for which it does not apply.

`pytest tests/contract -k yours` runs the tests of the attack called yours, and says which step of
adding it is missing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attacks import ATTACKS, CONTROLS, find_attack
from attacks.april import April
from attacks.controls import oracle_inverse
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.interfaces import Attack, AttackerView, ClientInput
from mjp_privacy.metrics.pictures import psnr
from tests.contract.attack_targets import EXACT, LISTED, TARGETS, TOLERANCE, AttackTarget
from tests.contract.registered import unregistered
from tests.helpers.models import planted_model
from tests.helpers.planted import attacked, keeping, planted_images, planted_view

PICTURES = [target for target in TARGETS if target.pictures]
each_target = pytest.mark.parametrize("target", TARGETS, ids=str)
GENERATOR = torch.Generator()


def seen_by(
    target: AttackTarget, setting: str, **client: Any
) -> tuple[Attack, AttackerView, ClientInput]:
    """The attack, what it sees of its target's own MJP model, and what the client fed."""
    attack = find_attack(target.attack, target.options)
    model = planted_model(unknown_embedding=True, **target.model)
    images = planted_images(target.images, model.card.img_size)
    view, inputs = planted_view(model, attack, setting, images=images, gamma=target.gamma, **client)
    return attack, view, inputs


def reaches(target: AttackTarget, setting: str, masks: bool, expected: float | None) -> None:
    """The mean of the planted answer is what the table says; an exact one is exact in each.
    masks: the model has E_unk."""
    model = planted_model(unknown_embedding=masks, **target.model)
    if expected is None:
        attack = find_attack(target.attack, target.options)
        view, _ = planted_view(model, attack, setting, gamma=target.gamma)
        if attack.unsupported(view) is not None:
            return
    known: dict[str, Any] = {"gamma": target.gamma, "eight_bit": target.eight_bit}
    found = attacked(target.attack, target.options, model, setting, target.images, **known)
    if expected is None:
        assert found.isfinite().all(), found.tolist()
        return
    assert float(found.mean()) == pytest.approx(expected, abs=TOLERANCE), (
        f"{target}: expected {expected} dB, got {found.tolist()}. If that is what it can reach, "
        "say so in its line of tests/contract/attack_targets.py."
    )
    assert expected < EXACT or float(found.min()) > EXACT - TOLERANCE


def test_targets_are_of_registered_attacks_and_none_is_forgotten() -> None:
    assert set(ATTACKS) >= LISTED
    entries = [*ATTACKS.values(), *CONTROLS.values()]
    forgotten = unregistered("attacks", entries, (("needs", "run"), ("role", "run")))
    assert not forgotten, "add its line to attacks/__init__.py"


# the planted answer -------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["a", "b"])
@pytest.mark.parametrize("target", [t for t in PICTURES if not t.mjp_only], ids=str)
def test_planted_answer_without_mjp(target: AttackTarget, setting: str) -> None:
    if setting == "a" or not target.plain:
        expected = target.unshuffled if setting == "a" else target.shuffled
        reaches(target, setting, False, expected)


@pytest.mark.parametrize("target", [t for t in PICTURES if not t.nothing_under_mjp], ids=str)
def test_planted_answer_under_mjp(target: AttackTarget) -> None:
    reaches(target, "c" if target.plain else "b", True, target.mjp)


@pytest.mark.nightly
@pytest.mark.parametrize("target", PICTURES, ids=str)
def test_on_an_unmasked_upload_of_an_mjp_model_nothing_is_lost(target: AttackTarget) -> None:
    reaches(target, "a", True, target.unmasked)


@pytest.mark.parametrize("target", [t for t in TARGETS if t.nothing_under_mjp], ids=str)
def test_where_every_image_is_masked_none_is_claimed(target: AttackTarget) -> None:
    attack, view, _ = seen_by(target, "c")
    found = attack.run(view, generator=GENERATOR)
    assert sorted(found.inapplicable) == list(range(target.images))


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.pictures], ids=str)
@pytest.mark.parametrize("setting", ["a", "b"])
def test_masks_are_named(target: AttackTarget, setting: str) -> None:
    attack, view, inputs = seen_by(target, setting)
    found = attack.run(view, generator=GENERATOR)
    assert found.images is None
    assert found.mask is not None
    assert torch.equal(found.mask, inputs.mask if inputs.mask is not None else found.mask & False)


# what it needs ------------------------------------------------------------------------------------


@each_target
def test_it_names_the_gradients_it_cannot_do_without(target: AttackTarget) -> None:
    """With any of them withheld it refuses or does without; it never breaks."""
    attack, view, inputs = seen_by(target, "b")
    everything = tuple(name for name, _ in view.model.named_parameters())
    named = tuple(attack.needs(view.model))
    assert named
    assert set(named) <= set(everything), f"{target} names parameters that no model has"
    assert target.needs is None or named == (everything if target.needs == "all" else target.needs)
    assert inputs.mask is not None  # rows whose patches are all visible would say nothing of MJP
    assert inputs.mask.any(-1).float().mean() >= 0.5
    for absent in ("pos_embed", "unk_embed") if target.needs == "all" else named:
        lacking = keeping(view, lambda name, absent=absent: name != absent)  # type: ignore[misc]
        refusal = attack.unsupported(lacking)
        if refusal is not None:
            assert refusal.kind == "missing_gradient"
            assert absent in refusal.text
        elif target.needs != "all":
            found = attack.run(lacking, generator=GENERATOR)
            assert target.needs is None or found.mask is not None


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.any_positions], ids=str)
def test_strict_model_without_positions_is_not_applicable(target: AttackTarget) -> None:
    attack = find_attack(target.attack, target.options)
    view, _ = planted_view(planted_model(position_embedding="strict"), attack, "a")
    refusal = attack.unsupported(view)
    if refusal is None and target.any_positions is None:
        assert attack.run(view, generator=GENERATOR).images is not None
        return
    assert refusal is not None, f"{target}: say any_positions=True in its line if this is right"
    assert refusal.kind in ("positions", "unknown_embedding")


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.any_batch], ids=str)
def test_batch_of_two_is_not_applicable(target: AttackTarget) -> None:
    """Or, where the table does not say, it makes a picture for each image of the batch."""
    two = replace(target, model={}, images=4, gamma=0.27)
    attack, view, inputs = seen_by(two, "b", client=ClientConfig(batch=2))
    refusal = attack.unsupported(view)
    if refusal is None and target.any_batch is None:
        images = attack.run(view, generator=GENERATOR).images
        assert images is not None
        assert images.shape == inputs.images.shape
        return
    assert refusal is not None
    assert "batch" in refusal.text


# two engines, and the ceiling ---------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["a", "b"])
@pytest.mark.parametrize("gamma", [0.27, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_engines_agree(setting: str, gamma: float, dtype: torch.dtype) -> None:
    model = planted_model(unknown_embedding=True).to(dtype)
    view, inputs = planted_view(model, April(engine="batched"), setting, gamma=gamma)
    ours = April(engine="batched").run(view, generator=GENERATOR)
    theirs = April(engine="breaching").run(view, generator=GENERATOR)
    assert ours.images is not None
    assert theirs.images is not None
    one, other = (psnr(images, inputs.images) for images in (ours.images, theirs.images))
    beyond = (one >= 60) & (other >= 60)  # there the score is rounding noise
    assert ((one - other).abs()[~beyond] <= 0.01).all()
    assert (ours.images[beyond] - theirs.images[beyond]).abs().flatten().le(1e-4).all()
    for name in ("cond_a", "rank_a", "zero_rows", "nonzero_rows"):
        assert torch.allclose(ours.diagnostics[name], theirs.diagnostics[name], rtol=1e-6)


def test_unknown_aware_april_beats_april_on_the_visible_patches_and_finds_the_mask() -> None:
    model, attack = planted_model(unknown_embedding=True), find_attack("april_unk_aware")
    view, inputs = planted_view(model, attack, "b")
    found = attack.run(view, generator=GENERATOR)
    assert torch.equal(found.mask, inputs.mask)
    assert psnr(found.images, inputs.images).mean() > attacked("april", {}, model, "b").mean()


def test_rank_ceiling_is_what_exact_embeddings_give() -> None:
    wide, narrow = planted_model(), planted_model(embed_dim=24, num_heads=4)
    images = planted_images()
    assert psnr(oracle_inverse(wide, images), images).min() > 200
    weight = narrow.patch_embed.proj.weight.detach().flatten(1)
    projector = torch.linalg.pinv(weight) @ weight
    x = torch.nn.functional.unfold(narrow.normalize(images), 4, stride=4)
    expected = torch.nn.functional.fold(projector @ x, 32, 4, stride=4)
    expected = narrow.denormalize(expected).clamp(0, 1)
    assert torch.allclose(oracle_inverse(narrow, images), expected, atol=1e-10)
