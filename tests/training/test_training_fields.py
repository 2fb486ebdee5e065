"""Every field of a training's config and every option of its command, with values that are none."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.config_files import load_training
from tests.helpers.training import content

NUMBERS: list[Any] = ["5", True, [1], {}, float("nan"), float("inf"), -(10**9), 1e300, 2**64]
TEXTS: list[Any] = [5, True, [1], {}, "x" * 5000, ""]
WORDS: list[Any] = ["no such word", 5, True, ["none"], {}]
SWITCHES: list[Any] = ["yes", 1, 0, "true", [True], {}]
MANY_NUMBERS: list[Any] = [0.5, "0.5", [0.5], [0.5] * 4, [0.5, 0.5, "0.5"], [0.5, 0.5, 300], {}]
PARTS: list[Any] = [5, "x", [1], True]


def wrong_values(kind: Any) -> list[Any]:
    """Values that no field of this type takes."""
    if get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        return WORDS
    if get_origin(kind) is tuple:
        return MANY_NUMBERS
    if dataclasses.is_dataclass(kind):
        return PARTS
    return {bool: SWITCHES, str: TEXTS, int: [*NUMBERS, 2.5], float: NUMBERS}[kind]


def fields(kind: Any, above: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """The place of each field, and each value that it must not take."""
    cases = []
    for name, hint in get_type_hints(kind).items():
        place = (*above, name)
        cases += [(place, value) for value in wrong_values(hint)]
        parts = [p for p in (hint, *get_args(hint)) if dataclasses.is_dataclass(p)]
        cases += [case for part in parts for case in fields(part, place)]
    return cases


def changed(place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The small config with this value in it."""
    config = content()
    part = config
    for name in place[:-1]:
        part[name] = dict(part.get(name) or {})
        part = part[name]
    part[place[-1]] = value
    return config


CASES = fields(TrainingConfig)


def test_there_are_many() -> None:
    assert len(CASES) > 300
    assert {place[-1] for place, _ in CASES} >= {"epochs", "lr", "seed", "mixup", "checkpoint"}


@pytest.mark.parametrize("part", sorted({place[0] for place, _ in CASES}))
def test_a_wrong_value_is_refused_by_its_field(part: str) -> None:
    for place, value in CASES:
        if place[0] != part or (place == ("model",) and value == {}):
            continue
        with pytest.raises(UserError) as caught:
            load_training(changed(place, value))
        said = str(caught.value)
        assert place[-1] in said, (place, value, said)
        assert len(said) < 3000


@pytest.mark.parametrize("place", ["", "model.", "recipe.", "augmentation.", "jigsaw.", "data."])
def test_a_field_that_there_is_not_suggests_the_nearest(place: str) -> None:
    near = {"": "seed", "model.": "depth", "recipe.": "epochs", "data.": "store"}.get(
        place, "mixup"
    )
    near = "gamma" if place == "jigsaw." else near
    path = (*place.split(".")[:-1], f"{near}s")
    with pytest.raises(UserError, match=rf"{near}s: unknown field. Did you mean {near}\?"):
        load_training(changed(path, 1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 2**63}, "seed: Input should be less than 9223372036854775808"),
        ({"recipe": {"epochs": 10**9}}, "epochs: Input should be less than or equal to 1000000"),
        (
            {"augmentation": {"repeats": 10**9}},
            "repeats: Input should be less than or equal to 100",
        ),
        ({"model": {"drop_path": 1}}, "drop_path: Input should be less than 1; got 1"),
        (
            {"model": {"embed_dim": 16384, "depth": 512, "num_heads": 2}},
            "expected one that fits into 25,000,000,000 parameters",
        ),
    ],
)
def test_what_no_machine_could_train(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_training(content(**changes))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--epochs", "0"], "recipe.epochs: Input should be greater than or equal to 1"),
        (["--epochs", "1000000000000"], "recipe.epochs: Input should be less than or equal to"),
        (["--batch", "-3"], "recipe.batch: Input should be greater than or equal to 1"),
        (["--lr", "nan"], "recipe.lr: Input should be"),
        (["--lr", "-1"], "recipe.lr: Input should be greater than or equal to 0"),
        (["--seed", str(2**63)], "seed: Input should be less than"),
        (["--seed", "-1"], "seed: Input should be greater than or equal to 0"),
        (["--workers", "1000000"], "--workers: expected 0 or more, got 1000000 (at most 256)"),
        (["--initial", "nowhere.pth"], "No checkpoint at nowhere.pth"),
        (["--initial", "x\0y"], "no control characters"),
        (["--overlay", "nowhere"], "No metrics.jsonl in nowhere"),
        (["--data", "nowhere"], "nowhere"),
        (["--val", "nowhere"], "nowhere"),
        (["--row", "A"], "A"),
    ],
)
def test_options_are_as_bounded(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content()))
    given = {"--data": str(data), "--out": str(tmp_path / "run"), "--device": "cpu"}
    given |= {options[0]: options[1]}
    words = [word for pair in given.items() for word in pair]
    assert main(["train", str(config), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_weights_to_start_from_are_refused_before_any_image_is_read(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pth")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content()))
    for image in data.rglob("*.png"):
        image.write_bytes(b"no image")
    words = ["--data", data, "--out", tmp_path / "run", "--initial", tmp_path / "other.pth"]
    assert main(["train", str(config), *map(str, words), "--device", "cpu"]) == 2
    assert "other.pth is not a plain ViT classifier" in capsys.readouterr().err
