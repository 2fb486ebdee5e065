"""Every attack against a planted answer, and every reason for which it does not apply.

`pytest tests/contract -k yours` runs the tests of the attack called yours, and says which step of
adding it is missing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from attacks import ATTACKS, CONTROLS, find_attack
from attacks.april import April
from attacks.controls import oracle_inverse
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.metrics.pictures import psnr
from tests.contract.attack_targets import (
    EXACT,
    LINES,
    TARGETS,
    TOLERANCE,
    AttackTarget,
    fault_of,
    registered,
)
from tests.contract.registered import files_of, unregistered
from tests.helpers.models import planted_model
from tests.helpers.planted import attacked, planted_images, planted_view

each_target = pytest.mark.parametrize("target", TARGETS, ids=str)
each_picture = pytest.mark.parametrize("target", [t for t in TARGETS if t.pictures], ids=str)


@cache
def planted_answer(number: int, setting: str, masks: bool) -> Tensor:
    """PSNR (m,) of a target, by its place in the table; masks: the model has E_unk. Made once."""
    target = TARGETS[number]
    model = planted_model(unknown_embedding=masks, **target.model)
    return attacked(
        target.attack,
        target.options,
        model,
        setting,
        target.images,
        gamma=target.gamma,
        eight_bit=target.eight_bit,
    )


def reaches(target: AttackTarget, setting: str, masks: bool, situation: str) -> None:
    """The mean of the planted answer is what the table says; an exact one is exact in each."""
    expected = getattr(target, situation)
    if expected is None and refuses(target, setting, masks):
        return
    psnr = planted_answer(TARGETS.index(target), setting, masks)
    if expected is None:
        assert psnr.isfinite().all(), psnr.tolist()
        return
    assert float(psnr.mean()) == pytest.approx(expected, abs=TOLERANCE), (
        f"{target}: expected {expected} dB, got {psnr.tolist()}. If that is what it can reach, say "
        f"so in its line of tests/contract/attack_targets.py: AttackTarget({target.attack!r}, "
        f"{situation}={float(psnr.mean()):.1f})."
    )
    assert expected < EXACT or float(psnr.min()) > EXACT - TOLERANCE


def refuses(target: AttackTarget, setting: str, masks: bool) -> bool:
    """Whether the attack says that it does not apply in this situation."""
    attack = find_attack(target.attack, target.options)
    model = planted_model(unknown_embedding=masks, **target.model)
    view, _ = planted_view(model, attack, setting, gamma=target.gamma)
    return attack.unsupported(view) is not None


# the steps of adding one --------------------------------------------------------------------------


def test_every_registered_attack_has_a_target() -> None:
    assert {target.attack for target in TARGETS} == set(ATTACKS)


@pytest.mark.parametrize("target", registered(), ids=str)
def test_a_registered_attack_can_be_made(target: AttackTarget) -> None:
    if fault := fault_of(target):
        pytest.fail(f"{fault} (The line is in attacks/__init__.py.)", pytrace=False)


@pytest.mark.parametrize("line", LINES, ids=str)
def test_a_line_is_of_a_registered_attack(line: AttackTarget) -> None:
    if line.attack not in ATTACKS:
        pytest.fail(
            f"tests/contract/attack_targets.py has a line for {line.attack!r}, but no attack of "
            "this name is registered. Register it in attacks/__init__.py, or take the line out.",
            pytrace=False,
        )


@pytest.mark.parametrize("file", files_of("attacks"))
def test_an_attack_in_a_file_is_registered(file: str) -> None:
    entries = [*ATTACKS.values(), *CONTROLS.values()]
    for members, verb in ((("needs", "run"), "_attack"), (("role", "run"), "_control")):
        for place in unregistered("attacks", file, entries, members):
            line = f'{verb}("{file}", "{place.removeprefix("attacks.")}", "what it does")'
            pytest.fail(
                f"{place} is registered nowhere. Add `{line}` to attacks/__init__.py.",
                pytrace=False,
            )


# what it does -------------------------------------------------------------------------------------


@each_target
def test_it_names_the_gradients_it_needs(target: AttackTarget) -> None:
    attack = find_attack(target.attack, target.options)
    model = planted_model(unknown_embedding=True)
    everything = tuple(name for name, _ in model.named_parameters())
    named = tuple(attack.needs(model))
    if target.needs is None:
        assert named
        assert set(named) <= set(everything), f"{target} names parameters that no model has"
    else:
        assert named == (everything if target.needs == "all" else target.needs)


@pytest.mark.parametrize(
    ("target", "setting"),
    [
        (t, s)
        for t in TARGETS
        for s in "ab"
        if t.pictures and not t.mjp_only and not (t.plain and s == "b")
    ],
    ids=str,
)
def test_planted_answer_without_mjp(target: AttackTarget, setting: str) -> None:
    reaches(target, setting, False, "unshuffled" if setting == "a" else "shuffled")


@pytest.mark.parametrize(
    "target", [t for t in TARGETS if t.pictures and not t.nothing_under_mjp], ids=str
)
def test_planted_answer_under_mjp(target: AttackTarget) -> None:
    reaches(target, "c" if target.plain else "b", True, "mjp")


@each_target
def test_mjp_masks_something_of_every_planted_answer(target: AttackTarget) -> None:
    """A row whose images keep all patches visible would say nothing of MJP."""
    attack = find_attack(target.attack, target.options)
    model = planted_model(unknown_embedding=True, **target.model)
    images = planted_images(target.images, model.card.img_size)
    _, inputs = planted_view(model, attack, "b", images=images, gamma=target.gamma)
    assert inputs.mask.any(-1).float().mean() >= 0.5


@pytest.mark.parametrize("target", [t for t in TARGETS if t.nothing_under_mjp], ids=str)
def test_where_every_image_is_masked_none_is_claimed(target: AttackTarget) -> None:
    model = planted_model(unknown_embedding=True, **target.model)
    attack = find_attack(target.attack, target.options)
    view, _ = planted_view(model, attack, "c")
    found = attack.run(view, generator=torch.Generator())
    assert sorted(found.inapplicable) == list(range(target.images))


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.pictures], ids=str)
@pytest.mark.parametrize("setting", ["a", "b"])
def test_masks_are_named(target: AttackTarget, setting: str) -> None:
    attack = find_attack(target.attack, target.options)
    view, inputs = planted_view(planted_model(unknown_embedding=True), attack, setting)
    found = attack.run(view, generator=torch.Generator())
    assert found.images is None
    assert torch.equal(found.mask, inputs.mask if inputs.mask is not None else found.mask & False)


@pytest.mark.nightly
@each_picture
def test_on_an_unmasked_upload_of_an_mjp_model_nothing_is_lost(target: AttackTarget) -> None:
    reaches(target, "a", True, "unmasked")


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.any_positions], ids=str)
def test_strict_model_without_positions_is_not_applicable(target: AttackTarget) -> None:
    attack = find_attack(target.attack, target.options)
    view, _ = planted_view(planted_model(position_embedding="strict"), attack, "a")
    reason = attack.unsupported(view)
    if reason is None and target.any_positions is None:
        assert attack.run(view, generator=torch.Generator()).images is not None
        return
    assert reason is not None, f"{target}: say any_positions=True in its line if this is right"
    assert reason.kind in ("positions", "unknown_embedding")


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.any_batch], ids=str)
def test_batch_of_two_is_not_applicable(target: AttackTarget) -> None:
    """Or, where the table does not say, it makes a picture for each image of the batch."""
    attack = find_attack(target.attack, target.options)
    model = planted_model(unknown_embedding=True)
    view, inputs = planted_view(model, attack, "b", client=ClientConfig(batch=2))
    reason = attack.unsupported(view)
    if reason is None and target.any_batch is None:
        images = attack.run(view, generator=torch.Generator()).images
        assert images.shape == inputs.images.shape
        return
    assert "batch" in str(reason)


@each_target
def test_every_gradient_it_cannot_do_without_is_named(target: AttackTarget) -> None:
    """With any of its gradients withheld an attack refuses or does without; it never breaks."""
    attack = find_attack(target.attack, target.options)
    model = planted_model(unknown_embedding=True, **target.model)
    images = planted_images(target.images, model.card.img_size)
    view, _ = planted_view(model, attack, "b", images=images, gamma=target.gamma)
    needs = tuple(attack.needs(model)) if target.needs is None else target.needs
    for absent in ("pos_embed", "unk_embed") if needs == "all" else needs:
        updates = [
            replace(update, grads={n: g for n, g in update.grads.items() if n != absent})
            for update in view.updates
        ]
        lacking = replace(view, updates=updates)
        refusal = attack.unsupported(lacking)
        if refusal is not None:
            assert refusal.kind == "missing_gradient"
            assert absent in refusal.text
        elif target.needs is None:
            attack.run(lacking, generator=torch.Generator())
        elif target.needs != "all":
            assert attack.run(lacking, generator=torch.Generator()).mask is not None


@pytest.mark.parametrize("setting", ["a", "b"])
@pytest.mark.parametrize("gamma", [0.27, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_engines_agree(setting: str, gamma: float, dtype: torch.dtype) -> None:
    model = planted_model(unknown_embedding=True).to(dtype)
    batched, reference = April(engine="batched"), April(engine="breaching")
    view, inputs = planted_view(model, batched, setting, gamma=gamma)
    ours = batched.run(view, generator=torch.Generator())
    theirs = reference.run(view, generator=torch.Generator())
    one, other = (psnr(found.images, inputs.images) for found in (ours, theirs))
    beyond = (one >= 60) & (other >= 60)  # there the score is rounding noise
    assert ((one - other).abs()[~beyond] <= 0.01).all()
    assert (ours.images[beyond] - theirs.images[beyond]).abs().flatten().le(1e-4).all()
    for name in ("cond_a", "rank_a", "zero_rows", "nonzero_rows"):
        assert torch.allclose(ours.diagnostics[name], theirs.diagnostics[name], rtol=1e-6)


def test_unknown_aware_april_beats_april_on_the_visible_patches_and_finds_the_mask() -> None:
    model = planted_model(unknown_embedding=True)
    attack = find_attack("april_unk_aware")
    view, inputs = planted_view(model, attack, "b")
    found = attack.run(view, generator=torch.Generator())
    assert torch.equal(found.mask, inputs.mask)
    plain = attacked("april", {}, model, "b")
    assert psnr(found.images, inputs.images).mean() > plain.mean()


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
