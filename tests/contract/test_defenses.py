"""Every defence against what it declares, and the steps of adding one.

`pytest tests/contract -k yours` runs the tests of the defence called yours.
"""

import dataclasses
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
    BOUND,
    CLIENTS,
    PLANTED,
    REAL_UPLOAD,
    copied,
    declared,
    excess,
    step_excess,
    upload_with_the_same_result,
)
from tests.contract.defense_targets import LINES, NAMED, ON_REAL_GRADIENTS

each_line = pytest.mark.parametrize("line", LINES)


@each_line
def test_it_is_a_frozen_dataclass_that_comes_back_from_its_one_line(line: str) -> None:
    assert set(DEFENSES) >= NAMED
    plugin, defense = defense_class(line.split()[0]), defense_of(line)
    assert plugin.__dataclass_params__.frozen, f"{plugin}: expected @dataclass(frozen=True)"
    generated = f"{plugin.__name__}("  # how the docstring begins that dataclass writes itself
    assert not (plugin.__doc__ or generated).startswith(generated), f"{plugin}: needs a docstring"
    assert defense_of(text_of(defense)) == defense
    options = {f.name: getattr(defense, f.name) for f in dataclasses.fields(plugin)}
    assert canonical({defense.name: options}) == text_of(defense)


@pytest.mark.parametrize("line", [x for x in LINES if isinstance(defense_of(x), UploadDefense)])
def test_it_keeps_what_it_must_and_declares_the_error_that_it_makes(line: str) -> None:
    """Where zero entries do not stay zero, attacks look for masked rows in vain: such an error
    belongs into Disturbed.noise, any other into Disturbed.rounding. It declares only what recipe
    and upload tell: another upload from which the same tensors are sent has the same declared
    error, for attacks are told it and must learn nothing else from it; where neither tells it, the
    tensor stands in Disturbed.unknown. Nor may half of what it declares pass."""
    defense, most = defense_of(line), 0.0
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
        bound = ON_REAL_GRADIENTS.get(defense.name, BOUND) if upload is REAL_UPLOAD else BOUND
        reached, name = excess(upload, altered)
        times = reached / bound
        assert times <= 1, f"{line} on the {upload}: {name}'s error is {reached:.3g} the declared"
        most = max(most, times)
        again = upload_with_the_same_result(defense, upload, altered)
        for name in upload.sent if again is not None else ():
            alike = torch.allclose(declared(altered, name), declared(again, name), rtol=1e-3)
            assert alike, f"{line} on {upload}, {name}: declares what it should not know"
    assert most == 0 or most > 0.5, f"{line} declares far more than it makes"


@pytest.mark.parametrize("line", [x for x in LINES if isinstance(defense_of(x), StepDefense)])
def test_a_step_is_a_mean_of_examples_and_the_declared_noise(line: str) -> None:
    """Each example times a factor, for that is what attacks are told of; what else changes an
    upload is an UploadDefense."""
    for batch in (1, 2):
        made = [step_excess(defense_of(line), upload, batch) for upload in PLANTED]
        assert max(noise for noise, _ in made) <= BOUND, "it adds more noise than it declares"
        assert max(left for _, left in made) <= BOUND, "it changes more than it adds noise"
        assert any(noise > 0.5 * BOUND for noise, _ in made) == any(noise for noise, _ in made)


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


@pytest.mark.parametrize("batch", [1, 4])
def test_dp_sgds_noise_is_sigma_times_the_clip_over_the_batch(batch: int) -> None:
    """By Abadi et al.'s formula, not by what it declares."""
    still = {"w": torch.zeros(1, batch, 300, 300)}
    noisy = DpSgd(noise=0.5, clip=2.0).step_gradient(still, Draws(0, ["a"], 0))["w"]
    assert float(noisy.std()) == pytest.approx(0.5 * 2.0 / batch, rel=0.02)
