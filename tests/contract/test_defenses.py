"""Every defence against what it declares, and the steps of adding one.

`pytest tests/contract -k yours` runs the tests of the defence called yours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mjp_privacy.client.defenses.disturbance import Draws
from mjp_privacy.client.defenses.published import DpSgd
from mjp_privacy.client.defenses.registry import (
    DEFENSES,
    StepDefense,
    UploadDefense,
    canonical,
    defense_class,
    defense_of,
    text_of,
)
from mjp_privacy.interfaces import Grads
from tests.contract.defense_errors import (
    CLIENTS,
    PLANTED,
    REAL_UPLOAD,
    complaints,
    copied,
    declared,
    deviation,
    step_complaints,
    upload_with_the_same_result,
)
from tests.contract.defense_targets import LINES, NAMED, ON_REAL_GRADIENTS
from tests.contract.registered import unregistered

WHOLE = [line for line in LINES if isinstance(defense_of(line), UploadDefense)]
STEPS = [line for line in LINES if isinstance(defense_of(line), StepDefense)]
each_line = pytest.mark.parametrize("line", LINES)
each_whole = pytest.mark.parametrize("line", WHOLE)


# what it is ---------------------------------------------------------------------------------------


def test_lines_are_of_registered_defenses_and_none_is_forgotten() -> None:
    assert set(DEFENSES) >= NAMED
    room, members = "mjp_privacy.client.defenses", (("apply", "main"), ("step_gradient", "main"))
    assert not unregistered(room, DEFENSES.values(), members), "register it in registry.py"


@each_line
def test_it_is_a_frozen_dataclass_that_comes_back_from_its_one_line(line: str) -> None:
    plugin, defense = defense_class(line.split()[0]), defense_of(line)
    assert plugin.__dataclass_params__.frozen, f"{plugin}: expected @dataclass(frozen=True)"
    generated = f"{plugin.__name__}("  # how the docstring begins that dataclass writes itself
    assert not (plugin.__doc__ or generated).startswith(generated), f"{plugin}: needs a docstring"
    assert defense_of(text_of(defense)) == defense
    options = {f.name: getattr(defense, f.name) for f in dataclasses.fields(plugin)}
    assert canonical({defense.name: options}) == text_of(defense)


# what it sends ------------------------------------------------------------------------------------


@each_whole
def test_it_keeps_what_it_must_and_declares_the_error_that_it_makes(line: str) -> None:
    """Where zero entries do not stay zero, attacks look for masked rows in vain: such an error
    belongs into Disturbed.noise. It declares only what recipe and upload tell: another upload from
    which the same tensors are sent has the same declared error, for attacks are told it and must
    learn nothing else from it."""
    defense = defense_of(line)
    assert isinstance(defense, UploadDefense)
    for upload in PLANTED:
        given = copied(upload.sent)
        altered = defense.apply(given, upload.draws())
        assert list(altered.sent) == list(upload.sent)
        for name, before in upload.sent.items():
            assert given[name].equal(before), f"{line} changes its input {name} in place"
            after = altered.sent[name]
            assert (after.shape, after.dtype) == (before.shape, before.dtype), name
            assert after.isfinite().all(), name
            assert name in altered.noise or (after[before == 0] == 0).all(), name
        for name, size in (*altered.noise.items(), *altered.rounding.items()):
            assert name in upload.sent
            assert size.shape == (CLIENTS,), f"{line}, {name}: expected one size for each client"
            assert (size.isfinite() & (size >= 0)).all(), name
        if sentences := list(complaints(defense, upload, altered)):
            pytest.fail("\n".join(sentences[:3]), pytrace=False)
        again = upload_with_the_same_result(defense, upload, altered)
        for name in upload.sent if again is not None else ():
            alike = torch.allclose(declared(altered, name), declared(again, name), rtol=1e-3)
            assert alike, f"{line} on {upload}, {name}: declares what it should not know"


@each_line
def test_its_draws_are_its_only_chance_and_steps_are_independent(line: str) -> None:
    upload = PLANTED[0]
    draws, state = upload.draws(), torch.get_rng_state()
    whole, again = (everything(line, upload.sent, draws) for _ in range(2))
    assert all(again[name].equal(tensor) for name, tensor in whole.items())
    assert torch.get_rng_state().equal(state), f"{line} draws from torch's global generator"
    second = replace(draws, first_ids=draws.first_ids[1:2])
    alone = everything(line, {name: g[1:2] for name, g in upload.sent.items()}, second)
    for name, tensor in whole.items():
        torch.testing.assert_close(alone[name], tensor[1:2], msg=f"{line}, {name}: other clients")


def everything(line: str, grads: Grads, draws: Draws) -> dict[str, Tensor]:
    """What is sent, and what is declared, by name; a step's examples are one for each client."""
    defense = defense_of(line)
    if isinstance(defense, StepDefense):
        return defense.step_gradient({n: g.unsqueeze(1) for n, g in grads.items()}, draws)
    altered = defense.apply(copied(grads), draws)
    return altered.sent | {f"size of {name}": declared(altered, name) for name in grads}


# what it declares ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ON_REAL_GRADIENTS)
def test_a_wider_bound_on_real_gradients_is_what_the_defence_reaches(name: str) -> None:
    altered = defense_of(name).apply(copied(REAL_UPLOAD.sent), REAL_UPLOAD.draws())
    made = {n: deviation(altered.sent[n] - before) for n, before in REAL_UPLOAD.sent.items()}
    times = max(float((error / declared(altered, n)).max()) for n, error in made.items())
    bound = ON_REAL_GRADIENTS[name]
    assert 0.97 * bound < times <= bound, f"{name}: {times:.2f}"


@pytest.mark.parametrize("line", STEPS)
def test_a_step_is_a_mean_of_examples_and_the_declared_noise(line: str) -> None:
    defense = defense_of(line)
    assert isinstance(defense, StepDefense)
    for upload in PLANTED:
        if sentences := list(step_complaints(defense, upload, batch=2)):
            pytest.fail("\n".join(sentences), pytrace=False)


@pytest.mark.parametrize("batch", [1, 4])
def test_dp_sgds_noise_is_sigma_times_the_clip_over_the_batch(batch: int) -> None:
    """By Abadi et al.'s formula, not by what it declares."""
    still = {"w": torch.zeros(1, batch, 300, 300)}
    noisy = DpSgd(noise=0.5, clip=2.0).step_gradient(still, Draws(0, ["a"], 0))["w"]
    assert float(noisy.std()) == pytest.approx(0.5 * 2.0 / batch, rel=0.02)


def every_complaint(line: str, share: float) -> Iterator[str]:
    defense = defense_of(line)
    for upload in PLANTED:
        if isinstance(defense, StepDefense):
            yield from step_complaints(defense, upload, 1, share)
        else:
            altered = defense.apply(copied(upload.sent), upload.draws())
            yield from complaints(defense, upload, altered, share)


@each_line
def test_it_does_not_declare_twice_the_error_that_it_makes(line: str) -> None:
    """The bound is as tight as it can be: of no defence may half of what it declares pass, but of
    those that add no noise, or say of every tensor that its error is not known."""
    knows = any(every_complaint(line, 1e-9))
    assert any(every_complaint(line, 0.5)) == knows, f"{line} declares far more than it makes"
