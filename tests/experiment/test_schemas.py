"""Every field of every config against wrong types, sizes and ranges, made from the schemas."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import parse
from mjp_privacy.experiment.config import (
    AttackConfig,
    ClassChoice,
    Experiment,
    GridEntry,
    ModelConfig,
)
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.federation.config import (
    Clients,
    FederationConfig,
    Probe,
    Recording,
    Server,
)
from mjp_privacy.federation.stored import Evaluation

NEEDED: Mapping[type[Any], dict[str, Any]] = {
    GridEntry: {"models": ["m"], "settings": ["a"]},
    AttackConfig: {"name": "april"},
    ClassChoice: {"modulo": 5, "remainders": [0]},
    Experiment: {"name": "n"},
    FederationConfig: {"name": "n"},
    Evaluation: {"step": 1, "round": 1, "val_top1": None},
}
"""Fields without a default, with a good value."""

SCHEMAS: tuple[type[Any], ...] = (
    *(ClientConfig, ModelConfig, GridEntry, AttackConfig, ClassChoice, Experiment),
    *(EngineConfig, Clients, Server, Probe, Recording, FederationConfig, Evaluation),
)

FREE = {(AttackConfig, "options"), (GridEntry, "client"), (Evaluation, "timing")}
"""Mappings whose values are checked by somebody else: the attack, the client's own schema."""
ELSEWHERE = ("mjp_privacy.training.config",)
"""Schemas that are tested with the trainer."""

WORDS = "Input should be|should have|unknown field|should hold|mistake"
HUGE: tuple[Any, ...] = (10**30, -(10**30), 2**63, float("nan"), float("inf"), 1e300)
NO_TEXT: tuple[Any, ...] = (5, True, 0.5, ["a"], {"a": 1}, b"a")


def parts(hint: Any) -> list[Any]:
    """The alternatives of a type, without Annotated and None."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        return [part for option in get_args(hint) for part in parts(option)]
    return [] if hint is type(None) else [hint]


def wrong_values(hint: Any) -> list[Any]:
    """Values that no field of this type may take."""
    kinds = parts(hint)
    values: list[Any] = [object(), {1: {}}, [[[]]]]
    if int not in kinds and float not in kinds:
        values += [5, 0.5]
    if float in kinds or int in kinds:
        values += [True, False, "5", *HUGE]
    if int in kinds and float not in kinds:
        values += [0.5, 5.0]
    if str in kinds:
        values += [*NO_TEXT[3:], "x" * 5000]
    if bool not in kinds:
        values += [True]
    else:
        values += [0, 1, "true", "yes"]
    if any(get_origin(kind) is Literal for kind in kinds):
        values += ["", "nothing of that kind", 5, None if type(None) not in get_args(hint) else 5]
    for kind in kinds:
        if get_origin(kind) is tuple:
            values += ["ab", {"a": 1}, "5", ["x"] * 5000]
            inner = get_args(kind)[0]
            values += [[value] for value in wrong_values(inner)[:8]]
        if get_origin(kind) is dict:
            values += ["ab", ["a"], {f"k{number}": 1 for number in range(5000)}, {"x" * 5000: 1}]
        if dataclasses.is_dataclass(kind):
            values += ["ab", ["a"], {"no_such_field": 1}]
    return values


def fields_of(schema: type[Any]) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(schema, include_extras=True)
    for field in dataclasses.fields(schema):
        yield field.name, hints[field.name]


CASES = [
    pytest.param(schema, name, value, id=f"{schema.__name__}.{name}-{number}")
    for schema in SCHEMAS
    for name, hint in fields_of(schema)
    for number, value in enumerate(wrong_values(hint))
    if not any(getattr(part, "__module__", "") in ELSEWHERE for part in parts(hint))
]


def test_there_are_many() -> None:
    assert len(CASES) > 1000


@pytest.mark.parametrize(("schema", "name", "value"), CASES)
def test_a_wrong_value_is_refused_with_the_fields_name(
    schema: type[Any], name: str, value: Any
) -> None:
    content = {**NEEDED.get(schema, {}), name: value}
    try:
        made = parse(schema, content, "the config", {})
    except UserError as error:
        message = str(error)
        assert message.startswith("the config has ")
        assert f"\n  {name}" in message
        assert len(message) < 4000
        return
    assert is_bearable(schema, name, value), f"{name}: {value!r} became {getattr(made, name)!r}"


def is_bearable(schema: type[Any], name: str, value: Any) -> bool:
    """Whether a value of the table fits this field after all."""
    if (schema, name) in FREE:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return False


@pytest.mark.parametrize("schema", SCHEMAS)
def test_what_is_missing_or_too_much_is_named(schema: type[Any]) -> None:
    with pytest.raises(UserError, match="no_such_field: unknown field"):
        parse(schema, {**NEEDED.get(schema, {}), "no_such_field": 1}, "the config", {})
    for name in NEEDED.get(schema, {}):
        content = {key: value for key, value in NEEDED[schema].items() if key != name}
        with pytest.raises(UserError, match=f"{name}: this field is needed"):
            parse(schema, content, "the config", {})


def bounded(metadata: Any) -> bool:
    """Whether a number has an upper bound, a text or list a greatest length."""
    return any(
        getattr(part, "le", None) is not None
        or getattr(part, "lt", None) is not None
        or getattr(part, "max_length", None) is not None
        or any(bounded([inner]) for inner in getattr(part, "metadata", ()))
        for part in metadata
    )


def unbounded(hint: Any, metadata: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Numbers, texts and lists within a type that have no bound."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        yield from unbounded(inner, (*metadata, *more))
    elif get_origin(hint) in (Union, types.UnionType):
        for option in get_args(hint):
            yield from unbounded(option, metadata)
    elif get_origin(hint) is tuple:
        *inner, last = get_args(hint)
        if last is Ellipsis and not bounded(metadata):
            yield hint
        for part in (*inner, *([] if last is Ellipsis else [last])):
            yield from unbounded(part)
    elif get_origin(hint) is dict:
        if not bounded(metadata):
            yield hint
        for part in get_args(hint):
            yield from unbounded(part)
    elif hint in (int, float, str) and not bounded(metadata):
        yield hint


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_number_text_and_list_has_a_bound(schema: type[Any]) -> None:
    free = {name for of, name in FREE if of is schema}
    bare = {name: list(unbounded(hint)) for name, hint in fields_of(schema) if name not in free}
    assert {name: hints for name, hints in bare.items() if hints} == {}


# names and grids ----------------------------------------------------------------------------------


def small(**changes: Any) -> dict[str, Any]:
    grid = [{"models": ["m"], "settings": ["a"]}]
    return {"name": "n", "models": {"m": {"checkpoint": "random"}}, "grid": grid} | changes


@pytest.mark.parametrize("name", ["", " ", ".", "..", "../x", "a/b", "a\\b", ".hidden", "a\0b"])
def test_a_name_is_that_of_one_folder(name: str) -> None:
    with pytest.raises(UserError, match="name: "):
        load_experiment(small(name=name))


@pytest.mark.parametrize("label", ["", "\x1b[31mred", "a\nb", "\u202egnp", "x" * 101, "\ud800"])
def test_a_label_can_be_shown(label: str) -> None:
    with pytest.raises(UserError, match="models"):
        load_experiment(small(models={label: {}}, grid=[{"models": [label], "settings": ["a"]}]))


def test_labels_may_be_in_any_language() -> None:
    for label in ("DeiT-S (w/o PEs)", "ViT γ=0.27", "模型"):
        load_experiment(small(models={label: {}}, grid=[{"models": [label], "settings": ["a"]}]))


def test_a_grid_of_more_cells_than_anybody_reads_is_refused() -> None:
    labels = [f"a{number}" for number in range(200)]
    attacks = [{"name": "april", "label": label} for label in labels]
    gammas = [number / 1000 for number in range(200)]
    grid = [{"models": ["m"], "settings": ["b"], "gammas": gammas}]
    with pytest.raises(UserError, match="grid: expected at most 10000 cells, got 40000"):
        load_experiment(small(attacks=attacks, grid=grid))


@pytest.mark.parametrize(("text", "number"), [("1e-3", 1e-3), ("1E5", 1e5), ("2.e+1", 20.0)])
def test_a_number_with_an_exponent_is_a_number(tmp_path: Any, text: str, number: float) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: n\nmodels: {m: {}}\ngrid: [{models: [m], settings: [a]}]\n"
        f"client: {{dal_lambda: {text}}}\n"
    )
    assert load_experiment(path).client.dal_lambda == number
    path.write_text(path.read_text().replace(text, f"'{text}'"))
    with pytest.raises(UserError, match=r"client\.dal_lambda: Input should be a valid number"):
        load_experiment(path)
