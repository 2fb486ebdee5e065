"""Bad inputs made from schemas: every field of every config and header, and what files say of
themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.inputs import base
from tests.inputs.case import Case, relink
from tests.inputs.values import BadContent, bad_contents

UPLOAD = "b1s1_r00000_000_at00000"


def all_cases() -> Iterator[Case]:
    """Every case of this file."""
    yield from configs()
    yield from headers()
    yield from checkpoint_metadata()
    yield from stored_json()


def configs() -> Iterator[Case]:
    """Fields of the YAML files."""
    from mjp_privacy.experiment.config import Experiment
    from mjp_privacy.experiment.engines.options import EngineConfig
    from mjp_privacy.federation.config import FederationConfig
    from mjp_privacy.training.config import TrainingConfig

    attack = ("attack", "experiment.yaml", "--images", "images", "--out", "out")
    train = ("train", "training.yaml", "--data", "classes", "--out", "out")
    federate = ("federate", "federation.yaml", "--data", "classes", "--out", "out")
    engine = (*attack, "--engine", "site.yaml")
    yield from _yaml("config", Experiment, base.EXPERIMENT, attack, "experiment.yaml")
    yield from _yaml("training", TrainingConfig, base.TRAINING, train, "training.yaml")
    yield from _yaml("config", FederationConfig, base.FEDERATION, federate, "federation.yaml")
    for bad in bad_contents(EngineConfig, base.SITE["engine"]):
        yield _field_case("config", "site.yaml", bad, engine, lambda content: {"engine": content})


def _yaml(
    room: str, kind: Any, content: Mapping[str, Any], argv: tuple[str, ...], file: str
) -> Iterator[Case]:
    for bad in bad_contents(kind, content):
        yield _field_case(room, file, bad, argv)


def _field_case(
    room: str,
    file: str,
    bad: BadContent,
    argv: tuple[str, ...],
    around: Callable[[Any], Any] = lambda content: content,
) -> Case:
    def spoil(folder: Path) -> None:
        text = yaml.safe_dump(around(bad.content), sort_keys=False, allow_unicode=True)
        relink(folder / file, text.encode("utf-8", "surrogatepass"))

    return Case(
        room,
        f"{file} {bad.place} = {bad.bad.title}",
        argv,
        spoil,
        expected="refused" if bad.bad.certain else "survived",
        names=(Path(file).name, Path(file).stem),
        field=bad.field,
    )


def headers() -> Iterator[Case]:
    """Fields of an upload's header; one bad upload is a line of its own, so 0 is no answer."""
    from mjp_privacy.client.config import ClientConfig
    from mjp_privacy.uploads.header import UploadHeader

    header: dict[str, Any] = {
        "label": "small",
        "weights": "weights/W.safetensors",
        "mean": [0.5, 0.5, 0.5],
        "std": [0.25, 0.25, 0.25],
        "format": 1,
        "round": 0,
        "client": "0",
        "series": "s",
        "kind": "gradient",
        "gamma": 0.5,
        "labels": [2],
        "partial": True,
        "model": {"num_heads": 2},
        "noise": {},
        "recipe": {},
    }
    commands = (
        ("check", "uploads"),
        ("attack", "uploads.yaml", "--uploads", "uploads", "--out", "out"),
    )
    for argv in commands:
        for bad in bad_contents(UploadHeader, header):
            yield _header_case(argv, bad, lambda content: content)
        for bad in bad_contents(ClientConfig, {"batch": 1, "defenses": ["int8"]}):
            if bad.bad.title != "missing":
                yield _header_case(
                    argv, bad, lambda recipe: {**header, "recipe": recipe}, "recipe."
                )
        for key, values in MODEL_FIELDS.items():
            for title, value in values.items():
                content = {**header, "model": {key: value}}
                yield _header_raw(
                    argv, f"model.{key} = {title}", lambda content=content: content, key
                )


MODEL_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "model": {"number": 5, "unknown": "resnet", "long": "x" * 5000, "list": ["a"]},
    "num_heads": {"zero": 0, "7": 7, "text": "2", "huge": 10**30, "float": 2.5, "-1": -1},
    "img_size": {"zero": 0, "33": 33, "10^9": 10**9, "text": "32", "-32": -32, "list": [32]},
    "patch_size": {"zero": 0, "5": 5, "10^9": 10**9},
    "embed_dim": {"10^9": 10**9, "41": 41, "-1": -1},
    "depth": {"10^9": 10**9, "2": 2, "zero": 0},
    "mlp_ratio": {"-1": -1, "10^9": 1e9, "text": "4", "zero": 0},
    "num_classes": {"10^9": 10**9, "-1": -1, "text": "5"},
    "mean": {"text": "x", "two": [0.5, 0.5], "null": None},
    "std": {"zero": [0, 0, 0], "-1": [-1, -1, -1], "255": [255, 255, 255]},
    "resize": {"-1": -1, "10^9": 10**9, "text": "x"},
    "interpolation": {"number": 5, "unknown": "cubic"},
    "position_embedding": {"number": 5, "unknown": "odd", "list": []},
    "unknown_embedding": {"text": "yes", "number": 7},
    "dal": {"number": 5, "unknown": "odd", "pca": "pca"},
    "first_block": {"number": 5, "closed": "closed_form"},
    "norm_eps": {"-1": -1, "text": "x", "10^30": 1e30, "list": [1]},
    "activation": {"number": 5, "unknown": "odd"},
    "trained_gamma": {"5": 5, "text": "x", "-1": -1},
    "seed": {"2^63": 2**63, "text": "x"},
    "checkpoint": {"other": "random", "path": "/etc/passwd", "number": 5},
    "surprise": {"1": 1},
    "x" * 5000: {"1": 1},
}
"""By field of a model, values that are wrong or absurd for the tiny one."""


def _header_case(
    argv: tuple[str, ...], bad: BadContent, around: Callable[[Any], Any], prefix: str = ""
) -> Case:
    certain = bad.bad.certain
    name = f"{prefix}{bad.place} = {bad.bad.title}"
    field = bad.field if certain else ""
    return _header_raw(argv, name, lambda: around(bad.content), field, certain)


def _header_raw(
    argv: tuple[str, ...], name: str, content: Callable[[], Any], field: str, certain: bool = False
) -> Case:
    def spoil(folder: Path) -> None:
        weights = next((folder / "uploads" / "weights").iterdir()).name
        text = json.dumps(content()).replace("W.safetensors", weights)
        relink(folder / "uploads" / f"{UPLOAD}.json", text.encode())

    return Case(
        "uploads",
        f"header {name}"[:160],
        argv,
        spoil,
        copied=("uploads",),
        expected="refused" if certain else "survived",
        names=(UPLOAD,),
        field=field,
    )


def checkpoint_metadata() -> Iterator[Case]:
    """What a checkpoint says of its model."""
    commands = (
        ("check", "--model", "model.safetensors"),
        (
            "attack",
            "own.yaml",
            "--weights",
            "model.safetensors",
            "--images",
            "images",
            "--out",
            "o",
        ),
        ("evaluate", "--checkpoint", "model.safetensors", "--data", "classes"),
    )
    for argv in commands:
        for key, values in {**MODEL_FIELDS, "recipe": RECIPES}.items():
            for title, value in {**values, "no JSON": None}.items():
                text = "{" if title == "no JSON" else json.dumps(value)
                yield _metadata_case(argv, key, title, text)
        for title, text in TEXTS.items():
            yield _metadata_case(argv, "mean", title, text)
            yield _metadata_case(argv, "num_heads", title, text)
            yield _metadata_case(argv, "recipe", title, text)


RECIPES: Mapping[str, Any] = {
    "a number": 5,
    "a list": [1],
    "empty": {},
    "no model": {"name": "x"},
    "nan": {"jigsaw": {"gamma": math.nan}},
    "wrong": {"model": 5, "jigsaw": 7, "name": None},
}
TEXTS: Mapping[str, str] = {
    "NaN": "NaN",
    "Infinity": "[Infinity, 1, 1]",
    "deep": "[" * 100_000,
    "digits": "1" * 5000,
    "long": json.dumps("x" * 100_000),
    "controls": json.dumps("a\x1b[2Jb"),
    "twice": '{"a": 1, "a": 2}',
    "surrogate": '"\\ud800"',
}


def _metadata_case(argv: tuple[str, ...], key: str, title: str, text: str) -> Case:
    def spoil(folder: Path) -> None:
        from tests.inputs.tensors import with_metadata

        path = folder / "model.safetensors"
        content = with_metadata(path.read_bytes(), {key: text})
        relink(path, content)

    name = f"metadata {key[:40]} = {title}"
    return Case("checkpoints", name, argv, spoil, names=("model.safetensors",))


def stored_json() -> Iterator[Case]:
    """Fields of what the project's own commands wrote, changed one by one."""
    for file, argvs in STORED.items():
        for argv in argvs:
            for title, change in CHANGES.items():
                yield _stored_case(file, argv, title, change)


REPORT = ("report", "run", "--out", "out")
AGAIN = ("attack", "experiment.yaml", "--images", "images", "--out", "run")
COMPARE = ("compare", "federation", "--out", "out")
FEDERATE = ("federate", "federation.yaml", "--data", "classes", "--out", "federation")

STORED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "run/experiment.yaml": (REPORT, AGAIN),
    "federation/federation.json": (COMPARE, FEDERATE),
    "federation/metrics.jsonl": (COMPARE, FEDERATE),
    "trained/metrics.jsonl": (("curves", "trained", "--out", "out"),),
    "run/log.jsonl": (REPORT, AGAIN),
}
ROOMS = {"run": "store", "federation": "federation", "trained": "training"}
CHANGES: Mapping[str, Any] = {
    "null": None,
    "a number": 7,
    "-1": -1,
    "a text": "five",
    "a list": [1, "x"],
    "a mapping": {"a": 1},
    "10^30": 10**30,
    "10^400": 10**400,
    "nan": math.nan,
    "true": True,
    "controls": "a\x1b[2Jb\nc",
    "path": "../../../../etc/passwd",
    "long": "x" * 5000,
    "missing": ...,
}


def _stored_case(file: str, argv: tuple[str, ...], title: str, change: Any) -> Case:
    """Each change hits every field of the file in turn: one case holds one field, by its place."""

    def spoil(folder: Path) -> None:
        path = folder / file
        relink(path, changed(file, path.read_text(), title, change).encode())

    return Case(
        ROOMS[file.split("/")[0]],
        f"{file} all fields = {title}",
        argv,
        spoil,
        copied=(file.split("/")[0],),
    )


def changed(file: str, text: str, title: str, change: Any) -> str:
    """The file's text with every value of its innermost mappings changed."""
    if file.endswith(".jsonl"):
        lines = [json.dumps(_changed(json.loads(line), change)) for line in text.splitlines()]
        return "\n".join(lines) + "\n"
    if file.endswith(".yaml"):
        return str(yaml.safe_dump(_changed(yaml.safe_load(text), change)))
    return json.dumps(_changed(json.loads(text), change))


def _changed(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _changed(inner, change) for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if inner is not ...}
    if isinstance(value, list):
        return [inner for inner in (_changed(item, change) for item in value) if inner is not ...]
    return change
