"""Every attack against a planted answer, and every reason for which it does not apply.

`pytest tests/contract -k yours` runs the tests of the attack called yours, and says which step of
adding it is missing.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from attacks import find_attack
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.interfaces import Attack, AttackerView, ClientInput
from mjp_privacy.metrics.pictures import psnr, quantise
from tests.contract.attack_targets import (
    EXACT,
    RECTANGLES,
    SITUATIONS,
    TARGETS,
    TOLERANCE,
    AttackTarget,
    Situation,
)
from tests.helpers.models import planted_model
from tests.helpers.night import nightly
from tests.helpers.planted import best, keeping, planted_images, planted_view, solved


def seen_by(
    target: AttackTarget, setting: str, *, masks: bool = True, **client: Any
) -> tuple[Attack, AttackerView, ClientInput]:
    """The attack, what it sees of its target's own model, and what the client fed; masks: the model
    has E_unk."""
    attack = find_attack(target.attack, target.options)
    model = planted_model(unknown_embedding=masks, **RECTANGLES | target.model)
    images = planted_images(target.images, model.card.img_size)
    images = quantise(images) if target.eight_bit else images
    view, inputs = planted_view(model, attack, setting, images=images, gamma=target.gamma, **client)
    return attack, view, inputs


# the planted answer -------------------------------------------------------------------------------


def situations() -> Iterator[Any]:
    """An attack's target, the client's setting, whether its model has E_unk, and the PSNR."""
    for target in TARGETS:
        if not target.pictures:
            continue
        if not target.mjp_only:
            yield pytest.param(target, "a", False, target.unshuffled, id=f"{target}-a")
        if not target.mjp_only and not target.plain:
            yield pytest.param(target, "b", False, target.shuffled, id=f"{target}-b")
        if not target.nothing_under_mjp:
            setting = "c" if target.plain else "b"
            yield pytest.param(target, setting, True, target.mjp, id=f"{target}-mjp")
        yield nightly(target, "a", True, target.unmasked, id=f"{target}-unmasked")


@pytest.mark.parametrize(("target", "setting", "masks", "expected"), situations())
def test_planted_answer(
    target: AttackTarget, setting: str, masks: bool, expected: float | None
) -> None:
    """The mean of the planted answer is what the table says; an exact one is exact in each."""
    attack, view, inputs = seen_by(target, setting, masks=masks)
    refusal = attack.unsupported(view)
    if expected is None and refusal is not None:
        return
    assert refusal is None
    images = attack.run(view, generator=torch.Generator()).images
    wanted = inputs.images
    if view.against == "plain":
        wanted = seen_by(target, "a", masks=masks)[2].images
    found = psnr(images, wanted).clamp(max=EXACT)
    if expected is None:
        assert found.isfinite().all(), found.tolist()
        return
    assert float(found.mean()) == pytest.approx(expected, abs=TOLERANCE), (
        f"{target}: expected {expected} dB, got {found.tolist()}. If that is what it can reach, "
        "say so in its line of tests/contract/attack_targets.py."
    )
    assert expected < EXACT or float(found.min()) > EXACT - TOLERANCE


@pytest.mark.parametrize("target", [t for t in TARGETS if t.nothing_under_mjp], ids=str)
def test_where_every_image_is_masked_none_is_claimed(target: AttackTarget) -> None:
    attack, view, _ = seen_by(target, "c")
    found = attack.run(view, generator=torch.Generator())
    assert sorted(found.inapplicable) == list(range(target.images))


@pytest.mark.parametrize("setting", ["a", "b"])
@pytest.mark.parametrize("name", ["mask_locator", "april_unk_aware"])
def test_masks_are_named(name: str, setting: str) -> None:
    target = next(target for target in TARGETS if target.attack == name)
    attack, view, inputs = seen_by(target, setting)
    found = attack.run(view, generator=torch.Generator())
    assert (found.images is None) != target.pictures
    assert torch.equal(found.mask, inputs.mask if inputs.mask is not None else found.mask & False)


@pytest.mark.parametrize("situation", SITUATIONS, ids=str)
def test_other_networks_batches_and_clients(situation: Situation) -> None:
    model, attack = situation.network(), find_attack(situation.attack)
    images = situation.pictures(planted_images(situation.images, model.card.img_size))
    batch = situation.batch or len(images)
    client = ClientConfig(batch=batch, **situation.client)
    view, _ = planted_view(model, attack, "a", images=images, client=client)
    assert "pos_embed" not in view.updates[0].grads or "token" not in situation.attack
    found = solved(replace(view, labels=None), situation.attack, seed=3)
    steps = zip(found.images.split(batch), images.split(batch), strict=True)
    for made, true in steps:
        reached = best(made, true)
        assert situation.least < reached.min() <= reached.max() <= situation.most, reached.tolist()
    for name, value in situation.says.items():
        assert found.diagnostics[name].tolist() == [value] * len(images), name


# what it needs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_it_names_the_gradients_it_cannot_do_without(target: AttackTarget) -> None:
    """With any of them withheld it refuses or does without; it never breaks."""
    attack, view, inputs = seen_by(replace(target, images=1), "b")
    everything = tuple(name for name, _ in view.model.named_parameters())
    named = tuple(attack.needs(view.model))
    assert named
    assert set(named) <= set(everything), f"{target} names parameters that no model has"
    assert target.needs is None or named == (everything if target.needs == "all" else target.needs)
    assert inputs.mask.any()  # else all rows are visible
    for absent in ("pos_embed", "unk_embed") if target.needs == "all" else named:
        lacking = keeping(view, lambda name, absent=absent: name != absent)
        refusal = attack.unsupported(lacking)
        if refusal is not None:
            assert refusal.kind == "missing_gradient"
            assert absent in refusal.text
        elif target.needs != "all":
            found = attack.run(lacking, generator=torch.Generator())
            assert target.needs is None or found.mask is not None


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.any_positions], ids=str)
def test_strict_model_without_positions_is_not_applicable(target: AttackTarget) -> None:
    attack = find_attack(target.attack, target.options)
    view, _ = planted_view(planted_model(position_embedding="strict"), attack, "a")
    refusal = attack.unsupported(view)
    if refusal is None and target.any_positions is None:
        assert attack.run(view, generator=torch.Generator()).images is not None
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
        assert attack.run(view, generator=torch.Generator()).images.shape == inputs.images.shape
        return
    assert refusal is not None
    assert "batch" in refusal.text
