"""An option that entries of the grid do not take is said to reach no more than it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from mjp_privacy.experiment.own_fields import unreached

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import Experiment
from mjp_privacy.experiment.config_files import load_experiment

PLAIN: Mapping[str, Any] = {"models": ["ViT"], "settings": ["a"]}


def experiment(*entries: Mapping[str, Any], **client: Any) -> Experiment:
    """A grid of these entries, and the client as the command line has changed it."""
    loaded = load_experiment(
        {
            "name": "planted",
            "block": 8,
            "models": {"ViT": {"model": "cifar_vit"}},
            "attacks": [{"name": "grey"}],
            "grid": [PLAIN | entry for entry in entries],
        }
    )
    return dataclasses.replace(loaded, client=dataclasses.replace(loaded.client, **client))


@pytest.mark.parametrize("word", [["--client.batch", "4"], ["--client.batch=4"]])
def test_entries_with_their_own_value_are_counted(word: list[str]) -> None:
    grid = experiment({}, {"client": {"batch": 2}}, {"client": {"batch": 8, "dal": True}}, batch=4)
    assert unreached(["planted.yaml", *word, "--limit", "3"], grid) == [
        "note: --client.batch does not reach 2 of the grid's 3 entries, whose own batch is 2, 8"
    ]


def test_an_entry_that_wants_the_same_is_reached() -> None:
    grid = experiment({}, {"client": {"batch": 4}}, batch=4)
    assert unreached(["--client.batch", "4"], grid) == []


def test_options_that_are_not_given_are_not_spoken_of() -> None:
    grid = experiment({}, {"client": {"batch": 2}}, {"dtypes": ["float64"]})
    assert unreached(["--client.dal", "--limit", "3"], grid) == []


@pytest.mark.parametrize(
    ("word", "own", "value"),
    [
        ("--client.no-dal", {"client": {"dal": True}}, "True"),
        ("--client.position_noise", {"client": {"position_noise": 0.1}}, "0.1"),
        ("--client.withhold", {"client": {"withhold": ["pos_embed", "cls_token"]}}, "pos_embed "),
        ("--dtypes", {"dtypes": ["float64"]}, "float64"),
    ],
)
def test_every_way_to_write_an_option(word: str, own: Mapping[str, Any], value: str) -> None:
    (note,) = unreached([word], experiment({}, own))
    assert f"is {value}" in note
    assert "1 of the grid's 2 entries" in note


def test_an_option_that_changes_nothing_is_refused() -> None:
    grid = experiment({"client": {"batch": 2}}, {"client": {"batch": 8}}, batch=4)
    with pytest.raises(UserError, match=r"would change nothing.*its own batch, but they say 2, 8"):
        unreached(["--client.batch", "4"], grid)


def test_the_command_refuses_it_before_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attack", "batch_matching", "--client.batch", "8"]) == 2
    assert "--client.batch would change nothing" in capsys.readouterr().err
