"""Configs: what one means, and that every mistake in one is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import parse
from mjp_privacy.experiment.config import (
    AttackConfig,
    ClassChoice,
    Experiment,
    GridEntry,
    ModelConfig,
    expand,
    load_experiment,
)
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.run_folder import file_of, write_experiment
from mjp_privacy.federation.config import (
    Clients,
    FederationConfig,
    Probe,
    Recording,
    Server,
)
from mjp_privacy.federation.rounds import Evaluation
from tests.inputs.values import bad_contents


def small(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": "small",
        "models": {"plain": {"checkpoint": "random"}, "mjp": {"model": "deit_small_mjp"}},
        "grid": [{"models": ["plain"], "settings": ["a"]}, {"models": ["mjp"], "settings": ["b"]}],
    }
    return content | changes


def entry(**changes: Any) -> dict[str, Any]:
    """With this first entry in the grid."""
    good = small()["grid"]
    return small(grid=[good[0] | changes, good[1]])


def mistake(content: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_experiment(content)
    return str(caught.value)


def cell_names(experiment: Experiment) -> list[tuple[Any, ...]]:
    cells = expand(experiment)
    return [(c.model, c.setting, c.gamma, c.dtype, c.attack.title) for c in cells]


# what a config means ------------------------------------------------------------------------------


def test_cells_are_the_product_of_an_entrys_lists_in_order() -> None:
    grid = [{"models": ["plain", "mjp"], "settings": ["a", "b"], "gammas": [0.1, 0.9]}]
    experiment = load_experiment(small(grid=grid, dtypes=["float32", "float64"]))
    assert cell_names(experiment) == [
        (model, setting, gamma, dtype, "april")
        for model in ("plain", "mjp")
        for setting, gamma in (("a", 0.0), ("b", 0.1), ("b", 0.9))
        for dtype in ("float32", "float64")
    ]


# mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (small(sed=1), ["sed", "seed"]),
        (small(models={"plain": {"chekpoint": "x"}}), ["models.plain.chekpoint", "checkpoint"]),
        (entry(setings=["a"]), ["grid.0.setings", "settings"]),
        (small(attacks=[{"name": "april", "option": {}}]), ["attacks.0.option", "options"]),
        (small(client={"bacth": 1}), ["client.bacth", "batch"]),
        ({"attacks": [{"name": "april"}]}, ["name"]),
        ({"name": "x", "models": {"ViT": {}}}, ["grid"]),
        (small(grid=[{"models": ["plain"]}]), ["grid.0.settings"]),
        (entry(models=["plan"]), ["grid.0", "plan", "plain"]),
        (entry(attacks=["aprl"]), ["aprl", "april"]),
        (entry(attacks=["april"]) | {"attacks": [{"name": "aprill"}]}, ["attacks.0", "aprill"]),
        (entry(settings=["d"]), ["grid.0.settings.0", "'d'"]),
        (entry(settings="a"), ["grid.0.settings", "'a'"]),
        (entry(gammas=[1.01]), ["grid.0.gammas.0", "1.01"]),
        *((small(**{name: []}), [name]) for name in ("grid", "dtypes", "attacks")),
        *(
            (entry(**{name: []}), [f"grid.0.{name}"])
            for name in ("models", "settings", "gammas", "attacks")
        ),
        (small(block=20, client={"batch": 3}), ["block", "batch (3)", "20"]),
        (small(diagnostics=["residuals"]), ["diagnostics.0", "'residuals'"]),
    ],
)
def test_a_mistake_is_named_with_what_came_and_what_is_near(
    content: dict[Any, Any], named: list[str]
) -> None:
    message = mistake(content)
    assert all(name in message for name in named), message


def test_labels_that_name_two_attacks_are_refused() -> None:
    attacks = [{"name": "april", "label": "x"}, {"name": "grey", "label": "x"}]
    assert "'x'" in mistake(small(attacks=attacks))
    assert "april" in mistake(
        small(attacks=[{"name": "grey", "label": "april"}, {"name": "april"}])
    )
    assert "'grey'" in mistake(entry(attacks=["grey"]) | {"attacks": attacks[1:]})


# files --------------------------------------------------------------------------------------------


def test_what_a_run_wrote_of_itself_is_its_config(tmp_path: Path) -> None:
    experiment = load_experiment("demo")
    file = file_of(tmp_path, experiment, (), uploads=False, add=False)
    write_experiment(tmp_path, file, experiment, {"commit": "abc"})
    for name in ("experiment.yaml", "experiments/demo.yaml"):
        assert load_experiment(tmp_path / name) == experiment


# every schema -------------------------------------------------------------------------------------


SCHEMAS: Mapping[type[Any], dict[str, Any]] = {
    GridEntry: {"models": ["m"], "settings": ["a"]},
    AttackConfig: {"name": "april"},
    ClassChoice: {"modulo": 5, "remainders": [0]},
    Experiment: {"name": "n"},
    FederationConfig: {"name": "n"},
    Evaluation: {"step": 1, "round": 1, "val_top1": None},
    **{kind: {} for kind in (ClientConfig, ModelConfig, EngineConfig)},
    **{kind: {} for kind in (Clients, Server, Probe, Recording)},
}
"""Every schema of a config, with good values of the fields that have no default."""


LARGE = ("a list of 10^5", "10^4 names")  # they take their time; tests/inputs has them


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_bad_value_is_refused_with_the_fields_name(schema: type[Any]) -> None:
    """One field at a time: of another type, out of range, too large, missing, or unknown."""
    wrong = []
    for case in bad_contents(schema, SCHEMAS[schema]):
        if case.bad.title in LARGE:
            continue
        try:
            parse(schema, case.content, "the config")
            named = not case.bad.certain
        except UserError as error:
            named = case.field in str(error) and len(str(error)) < 6000
        if not named:
            wrong.append(f"{case.place}: {case.bad.title}")
    assert not wrong, wrong[:20]


BOUNDS = {
    "number": {"maximum", "exclusiveMaximum"},
    "integer": {"maximum", "exclusiveMaximum"},
    "string": {"maxLength"},
    "array": {"maxItems"},
}


def unbounded(schema: Any) -> Iterator[Any]:
    """Numbers, texts and lists within a JSON schema that have no bound."""
    if isinstance(schema, dict):
        bounds = BOUNDS.get(str(schema.get("type")), set())
        if bounds and not bounds & schema.keys() and not {"enum", "const"} & schema.keys():
            yield schema
        for name, inner in schema.items():
            yield from () if name == "default" else unbounded(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from unbounded(inner)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_number_text_and_list_has_a_bound(schema: type[Any]) -> None:
    assert list(unbounded(TypeAdapter(schema).json_schema())) == []


def test_a_grid_of_more_cells_than_anybody_reads_is_refused() -> None:
    attacks = [{"name": "april", "label": f"a{number}"} for number in range(200)]
    gammas = [number / 1000 for number in range(200)]
    grid = [{"models": ["plain"], "settings": ["b"], "gammas": gammas}]
    assert "40000" in mistake(small(attacks=attacks, grid=grid))
    grid[0] |= {"gammas": gammas[:40], "dtypes": ["float32", "float64"]}  # 8,000, if not for these
    assert "16000" in mistake(small(attacks=attacks, grid=grid))
