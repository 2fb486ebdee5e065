"""Every attack against a planted answer, and every reason for which it does not apply."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from attacks import ATTACKS, find_attack
from attacks.april import April
from attacks.controls import oracle_inverse
from attacks.equations.least_squares import condition_and_rank, minimum_norm_solve
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics.pixel import psnr
from tests.contract.attack_targets import EXACT, TARGETS, TOLERANCE, AttackTarget
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


def reaches(target: AttackTarget, setting: str, masks: bool, expected: float) -> None:
    """The mean of the planted answer is what the table says; an exact one is exact in each."""
    psnr = planted_answer(TARGETS.index(target), setting, masks)
    assert float(psnr.mean()) == pytest.approx(expected, abs=TOLERANCE), psnr.tolist()
    assert expected < EXACT or float(psnr.min()) > EXACT - TOLERANCE


def test_every_registered_attack_has_a_target() -> None:
    assert {target.attack for target in TARGETS} == set(ATTACKS)


@each_target
def test_it_names_the_gradients_it_needs(target: AttackTarget) -> None:
    attack = find_attack(target.attack, target.options)
    model = planted_model(unknown_embedding=True)
    everything = tuple(name for name, _ in model.named_parameters())
    assert tuple(attack.needs(model)) == (target.needs or everything)


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
    expected = target.unshuffled if setting == "a" else target.shuffled
    reaches(target, setting, False, expected)


@pytest.mark.parametrize(
    "target", [t for t in TARGETS if t.pictures and not t.nothing_under_mjp], ids=str
)
def test_planted_answer_under_mjp(target: AttackTarget) -> None:
    reaches(target, "c" if target.plain else "b", True, target.mjp)


@each_target
def test_mjp_masks_something_of_every_planted_answer(target: AttackTarget) -> None:
    """A row whose images keep all patches visible would say nothing of MJP."""
    attack = find_attack(target.attack, target.options)
    model = planted_model(unknown_embedding=True, **target.model)
    images = planted_images(target.images, model.card.img_size)
    _, inputs = planted_view(model, attack, "b", images=images, gamma=target.gamma)
    assert inputs.mask is not None
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
    assert found.mask is not None
    assert torch.equal(found.mask, inputs.mask if inputs.mask is not None else found.mask & False)


@each_picture
def test_on_an_unmasked_upload_of_an_mjp_model_nothing_is_lost(target: AttackTarget) -> None:
    reaches(target, "a", True, target.unmasked)


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.any_positions], ids=str)
def test_strict_model_without_positions_is_not_applicable(target: AttackTarget) -> None:
    attack = find_attack(target.attack, target.options)
    view, _ = planted_view(planted_model(position_embedding="strict"), attack, "a")
    reason = attack.unsupported(view)
    assert reason is not None
    assert reason.kind in ("positions", "unknown_embedding")


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.any_batch], ids=str)
def test_batch_of_two_is_not_applicable(target: AttackTarget) -> None:
    attack = find_attack(target.attack, target.options)
    model = planted_model(unknown_embedding=True)
    view, _ = planted_view(model, attack, "b", client=ClientConfig(batch=2))
    assert "batch" in str(attack.unsupported(view))


def test_more_tokens_than_equations_is_not_applicable() -> None:
    view, _ = planted_view(planted_model(embed_dim=48), April(), "a")
    assert "65 tokens, 48 equations" in str(April().unsupported(view))


def test_missing_gradient_and_index_table_are_not_applicable() -> None:
    view, _ = planted_view(planted_model(index_embedding=True), April(), "a")
    assert "index table" in str(April().unsupported(view))
    view, _ = planted_view(planted_model(), April(), "a")
    view.updates[0].grads.pop("pos_embed")  # type: ignore[attr-defined]
    assert "no gradient of pos_embed" in str(April().unsupported(view))


@each_target
def test_every_gradient_it_cannot_do_without_is_named(target: AttackTarget) -> None:
    """With any of its gradients withheld an attack refuses or does without; it never breaks."""
    attack = find_attack(target.attack, target.options)
    model = planted_model(unknown_embedding=True, **target.model)
    images = planted_images(target.images, model.card.img_size)
    view, _ = planted_view(model, attack, "b", images=images, gamma=target.gamma)
    for absent in target.needs or ("pos_embed", "unk_embed"):
        updates = [
            replace(update, grads={n: g for n, g in update.grads.items() if n != absent})
            for update in view.updates
        ]
        lacking = replace(view, updates=updates)
        refusal = attack.unsupported(lacking)
        if refusal is not None:
            assert refusal.kind == "missing_gradient"
            assert absent in refusal.text
        elif target.needs is not None:
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
    assert ours.images is not None
    assert theirs.images is not None
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
    assert found.mask is not None
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


def test_minimum_norm_solve_is_lapacks_gelsd() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, 7, 12, generator=generator, dtype=torch.float64)
    a[1, 3] = 0
    a[2, 4] = a[2, 5] + a[2, 6]
    b = torch.randn(5, 12, 9, generator=generator, dtype=torch.float64)
    ours, singular_values = minimum_norm_solve(a, b)
    lapack = torch.linalg.lstsq(a.mT, b, driver="gelsd").solution
    assert torch.allclose(ours, lapack, atol=1e-10)
    facts = condition_and_rank(a, torch.float64, singular_values)
    assert facts["rank_a"].tolist() == [7, 6, 6, 7, 7]
    assert facts["zero_rows"].tolist() == [0, 1, 0, 0, 0]
    for index in (0, 1, 3):
        rows = a[index][(a[index] != 0).any(-1)]
        assert facts["cond_a"][index] == pytest.approx(float(torch.linalg.cond(rows)), rel=1e-9)


def test_unknown_names_are_errors_that_suggest() -> None:
    with pytest.raises(UserError, match="Did you mean april"):
        find_attack("aprl")
    with pytest.raises(UserError, match="Did you mean engine"):
        find_attack("april", {"engin": "batched"})
    with pytest.raises(UserError, match="'batched' or 'breaching'"):
        find_attack("april", {"engine": "fast"})
    with pytest.raises(UserError, match="batched engine only"):
        find_attack("april_unk_aware", {"engine": "breaching"})
