"""Every defence against what it declares, and the steps of adding one.

`pytest tests/contract -k yours` runs the tests of the defence called yours.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from mjp_privacy.client.defenses.disturbance import Disturbed, Draws
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
from tests.contract import defense_errors, defense_targets
from tests.contract.defense_errors import (
    HOW_TO_DECLARE,
    complaints,
    copied,
    declared,
    deviation,
    step_complaints,
)
from tests.contract.planted_uploads import CLIENTS, PlantedUpload, planted_uploads
from tests.contract.registered import files_of, unregistered

ROOM = "mjp_privacy.client.defenses"
LINES = [line for line in defense_targets.registered() if not defense_targets.fault_of(line)]
WHOLE = [line for line in LINES if isinstance(defense_of(line), UploadDefense)]
STEPS = [line for line in LINES if isinstance(defense_of(line), StepDefense)]

SHOWN = 3  # sentences of a failure

each_line = pytest.mark.parametrize("line", LINES)
each_whole = pytest.mark.parametrize("line", WHOLE)
each_upload = pytest.mark.parametrize("upload", planted_uploads(), ids=str)


def applied(line: str, upload: PlantedUpload, seed: int = 0) -> Disturbed:
    defense = defense_of(line)
    assert isinstance(defense, UploadDefense)
    return defense.apply(copied(upload.sent), upload.draws(seed))


# the steps of adding one --------------------------------------------------------------------------


@pytest.mark.parametrize("line", defense_targets.registered())
def test_a_registered_defense_can_be_made(line: str) -> None:
    if fault := defense_targets.fault_of(line):
        listed = line in defense_targets.LINES
        pytest.fail(
            f"{fault} (It is registered in mjp_privacy/client/defenses/registry.py, and "
            f"tests/contract/defense_targets.py {'has' if listed else 'has no line for it but'} "
            f"{line!r}; a line there says with which options it is tested.)",
            pytrace=False,
        )


@pytest.mark.parametrize("line", defense_targets.LINES)
def test_a_line_is_of_a_registered_defense(line: str) -> None:
    if line.split()[0] not in DEFENSES:
        pytest.fail(
            f"tests/contract/defense_targets.py has the line {line!r}, but no defence of this name "
            "is registered. Register it in mjp_privacy/client/defenses/registry.py, or take the "
            "line out.",
            pytrace=False,
        )


@pytest.mark.parametrize("file", [file for file in files_of(ROOM) if file != "registry"])
def test_a_defense_in_a_file_is_registered(file: str) -> None:
    for members in (("apply", "main"), ("step_gradient", "main")):
        for place in unregistered(ROOM, file, DEFENSES.values(), members):
            line = f'_defense("{file}", "{place.removeprefix(ROOM + ".")}")'
            pytest.fail(
                f"{place} is registered nowhere. Add `{line}` to "
                "mjp_privacy/client/defenses/registry.py.",
                pytrace=False,
            )


# what it is ---------------------------------------------------------------------------------------


@each_line
def test_it_is_a_frozen_dataclass_with_a_line_for_people(line: str) -> None:
    plugin = defense_class(line.split()[0])
    assert plugin.__dataclass_params__.frozen, f"{plugin}: expected @dataclass(frozen=True)"
    generated = f"{plugin.__name__}("  # how the docstring begins that dataclass writes itself
    assert not (plugin.__doc__ or generated).startswith(generated), (
        f"{plugin}: expected a docstring; `mjp list defenses` shows its first line"
    )


@each_line
def test_its_options_come_back_from_its_one_line(line: str) -> None:
    defense = defense_of(line)
    assert defense_of(text_of(defense)) == defense
    options = {f.name: getattr(defense, f.name) for f in dataclasses.fields(defense)}
    assert canonical({defense.name: options}) == text_of(defense)


# what it declares ---------------------------------------------------------------------------------


@each_whole
@each_upload
def test_it_declares_the_error_that_it_makes(line: str, upload: PlantedUpload) -> None:
    defense = defense_of(line)
    assert isinstance(defense, UploadDefense)
    if sentences := list(complaints(defense, upload)):
        pytest.fail("\n".join([*sentences[:SHOWN], HOW_TO_DECLARE]), pytrace=False)


@pytest.mark.parametrize("name", defense_targets.ON_REAL_GRADIENTS)
def test_a_wider_bound_on_real_gradients_is_what_the_defence_reaches(name: str) -> None:
    (upload,) = (upload for upload in planted_uploads() if upload.real)
    altered = applied(name, upload)
    made = {n: deviation(altered.sent[n] - before) for n, before in upload.sent.items()}
    times = max(float((error / declared(altered, n)).max()) for n, error in made.items())
    bound = defense_targets.ON_REAL_GRADIENTS[name]
    assert 0.97 * bound < times <= bound, f"{name}: {times:.2f}"


@each_whole
@each_upload
def test_it_declares_only_what_recipe_and_upload_tell(line: str, upload: PlantedUpload) -> None:
    """Another upload from which the same tensors are sent has the same declared error."""
    altered, defense = applied(line, upload), defense_of(line)
    assert isinstance(defense, UploadDefense)
    again = defense_errors.upload_with_the_same_result(defense, upload, altered)
    if again is None:
        pytest.skip("no other upload was found from which it sends the same tensors")
    for name in upload.sent:
        one, other = declared(altered, name), declared(again, name)
        assert torch.allclose(one, other, rtol=1e-3), (
            f"{line}: from two uploads it sends the same {name}, and declares {one.tolist()} for "
            f"the one and {other.tolist()} for the other. Compute the size from the sent tensors "
            "and the options alone: attacks are told it, and must learn nothing else from it."
        )


@each_whole
@each_upload
def test_it_keeps_names_shapes_and_precision(line: str, upload: PlantedUpload) -> None:
    given = copied(upload.sent)
    defense = defense_of(line)
    assert isinstance(defense, UploadDefense)
    altered = defense.apply(given, upload.draws())
    assert list(altered.sent) == list(upload.sent)
    for name, before in upload.sent.items():
        assert given[name].equal(before), f"{line} changes its input {name} in place"
        after = altered.sent[name]
        assert (after.shape, after.dtype) == (before.shape, before.dtype), name
        assert after.isfinite().all(), name
    for sizes in (altered.noise, altered.rounding):
        assert sizes.keys() <= upload.sent.keys()
        for name, size in sizes.items():
            assert size.shape == (CLIENTS,), f"{line}, {name}: expected one size for each client"
            assert (size.isfinite() & (size >= 0)).all(), name


@each_whole
@each_upload
def test_zero_entries_stay_zero_if_it_declares_rounding_alone(
    line: str, upload: PlantedUpload
) -> None:
    altered = applied(line, upload)
    for name, before in upload.sent.items():
        if name not in altered.noise:
            assert (altered.sent[name][before == 0] == 0).all(), (
                f"{line}: zero entries of {name} do not stay zero, so attacks look for masked rows "
                "in vain. Declare its error in Disturbed.noise."
            )


@each_line
def test_its_draws_are_its_only_chance_and_steps_are_independent(line: str) -> None:
    upload = planted_uploads()[0]
    state = torch.get_rng_state()
    whole = _sent(line, upload.sent, upload.draws())
    again = _sent(line, upload.sent, upload.draws())
    assert all(again[name].equal(tensor) for name, tensor in whole.items())
    assert torch.get_rng_state().equal(state), f"{line} draws from torch's global generator"
    draws = upload.draws()
    second = replace(draws, first_ids=draws.first_ids[1:2])
    alone = _sent(line, {name: g[1:2] for name, g in upload.sent.items()}, second)
    for name, tensor in whole.items():
        torch.testing.assert_close(
            alone[name],
            tensor[1:2],
            msg=f"{line}: {name} of one client depends on the other clients of the block",
        )


def _sent(line: str, grads: Grads, draws: Draws) -> dict[str, torch.Tensor]:
    """What is sent, and what is declared, by name; a step's examples are one for each client."""
    defense = defense_of(line)
    if isinstance(defense, StepDefense):
        return defense.step_gradient({n: g.unsqueeze(1) for n, g in grads.items()}, draws)
    altered = defense.apply(copied(grads), draws)
    return altered.sent | {f"size of {name}": declared(altered, name) for name in grads}


@pytest.mark.parametrize("line", STEPS)
@pytest.mark.parametrize("batch", [1, 2])
@each_upload
def test_a_step_is_a_mean_of_examples_and_the_declared_noise(
    line: str, batch: int, upload: PlantedUpload
) -> None:
    defense = defense_of(line)
    assert isinstance(defense, StepDefense)
    if sentences := list(step_complaints(defense, upload, batch)):
        pytest.fail("\n".join(sentences), pytrace=False)
