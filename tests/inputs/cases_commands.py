"""Bad words on the command line: every option of every command."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.inputs.case import NO_STORAGE, USUAL_CODES, Case
from tests.inputs.values import LONG

GOOD: Mapping[str, tuple[str, ...]] = {
    "attack": ("experiment.yaml", "--images", "images", "--out", "out"),
    "report": ("run", "--out", "out"),
    "score": (
        *("--reference", "reference", "--reconstruction", "reconstruction"),
        *("--out", "s.csv", "--metrics", "psnr"),
    ),
    "sample": ("--from", "images", "--out", "out"),
    "train": ("training.yaml", "--data", "classes", "--out", "out"),
    "evaluate": ("--checkpoint", "model.safetensors", "--data", "classes"),
    "curves": ("trained", "--out", "out"),
    "analyse": ("model.safetensors", "--out", "out", "--limit", "2"),
    "federate": ("federation.yaml", "--data", "classes", "--out", "out"),
    "compare": ("federation", "--out", "out"),
    "check": ("uploads",),
    "fit-prior": ("--images", "images", "--patch", "8", "--out", "p.safetensors"),
    "list": ("attacks",),
    "completion": ("bash",),
}
"""A command line of each command that ends well."""

WORDS: Mapping[str, str] = {
    "empty": "",
    "a dash": "-",
    "a space": " ",
    "null device": "/dev/null",
    "endless device": "/dev/zero",
    "own memory": "/proc/self/mem",
    "long": LONG,
    "long parts": "/".join(["x" * 200] * 30),
    "controls": "a\x1b[2Jb\nc",
    "nowhere": "no/such/place",
    "root": "/",
    "a file": "model.pth",
    "a folder": "classes",
    "a wrong folder": "trained",
    "up": "../../../../../../..",
    "home": "~",
    "proc": "/proc/1",
    "surrogate": "a\udcffb",
    "nan": "nan",
    "-1": "-1",
    "zero": "0",
    "10^9": "1000000000",
    "10^30": "1" + "0" * 30,
    "10^5000": "1" + "0" * 5000,
    "inf": "inf",
    "1.5": "1.5",
    "text": "five",
    "url": "http://127.0.0.1:1/x",
    "code": "__import__('os').system('touch OWNED')",
    "shell": "$(touch OWNED)",
}


def all_cases() -> Iterator[Case]:
    """Every case of this file."""
    yield from usage()
    for command in GOOD:
        for option in options(command):
            for title, word in WORDS.items():
                yield _with(command, option, title, word)
            yield _without(command, option)
        for place, good in enumerate(GOOD[command]):
            if not good.startswith("-") and (
                place == 0 or not GOOD[command][place - 1].startswith("-")
            ):
                for title, word in WORDS.items():
                    words = (*GOOD[command][:place], word, *GOOD[command][place + 1 :])
                    yield _case(command, f"word {place + 1} = {title}", words)
    yield from nested()


def options(command: str) -> list[str]:
    """The options of a command, as its help lists them."""

    return sorted(OPTIONS[command])


def _arguments() -> dict[str, set[str]]:
    """By command, the names of its options, from its arguments' dataclass."""
    import importlib

    places = {
        "attack": "mjp_privacy.experiment.commands:AttackArguments",
        "report": "mjp_privacy.report.commands:ReportArguments",
        "score": "mjp_privacy.metrics.commands:ScoreArguments",
        "sample": "mjp_privacy.paper.sample:SampleArguments",
        "train": "mjp_privacy.training.commands:TrainArguments",
        "evaluate": "mjp_privacy.training.evaluation_arguments:EvaluationArguments",
        "curves": "mjp_privacy.training.commands:CurveArguments",
        "analyse": "mjp_privacy.paper.arguments:AnalysisArguments",
        "federate": "mjp_privacy.federation.commands:FederateArguments",
        "compare": "mjp_privacy.federation.commands:CompareArguments",
        "check": "mjp_privacy.uploads.commands:CheckArguments",
        "fit-prior": "attacks.prior.commands:FitArguments",
        "list": "mjp_privacy.federation.listing:ListArguments",
    }
    names: dict[str, set[str]] = {"completion": set()}
    for command, where in places.items():
        module, _, kind = where.partition(":")
        fields = dataclasses.fields(getattr(importlib.import_module(module), kind))
        skipped = {
            "overrides",
            "by",
            "attack",
            "runs",
            "config",
            "kind",
            "shell",
            "folder",
            "checkpoints",
        }
        found = {field.name for field in fields} - skipped
        found = {{"source": "from", "everything": "all"}.get(name, name) for name in found}
        names[command] = {"--" + name.replace("_", "-") for name in found}
    names["attack"] |= {"--seed", "--block", "--dtypes", "--engine", "--workers"}
    names["attack"] |= {"--client.batch", "--client.lr", "--client.defenses", "--client.steps"}
    names["attack"] |= {"--address", "--minutes", "--gpus-per-task"}
    names["federate"] |= {"--attack.engine", "--attack.workers"}
    return names


OPTIONS = _arguments()


def _with(command: str, option: str, title: str, word: str) -> Case:
    words = list(GOOD[command])
    if option in words:
        words[words.index(option) + 1] = word
    else:
        words += [option, word]
    return _case(command, f"{option} = {title}", tuple(words))


def _without(command: str, option: str) -> Case:
    """The option stands at the end, without a value."""
    words = list(GOOD[command])
    if option in words:
        at = words.index(option)
        words[at : at + 2] = []
    return _case(command, f"{option} without a value", (*words, option))


def _case(command: str, name: str, words: tuple[str, ...]) -> Case:
    return Case(
        {"attack": "core", "report": "report", "compare": "federation"}.get(command, "core"),
        f"words {name}",
        (command, *words),
        copied=("*",),
        codes=(*USUAL_CODES, NO_STORAGE),
        devices=any(word.startswith(("/dev", "/proc", "/")) for word in words),
    )


def usage() -> Iterator[Case]:
    """Calls of `mjp` itself."""
    for title, argv in {
        "nothing": (),
        "an unknown command": ("attac",),
        "a long command": (LONG,),
        "controls": ("a\x1b[2Jb",),
        "an empty command": ("",),
        "a wrong option": ("--verison",),
    }.items():
        yield Case("core", title, argv, expected="refused")
    for command, good in GOOD.items():
        yield Case(
            "core", "no words", (command,), expected="survived" if command == "list" else "refused"
        )
        yield Case(
            "core",
            "a misspelt option",
            (command, *good, "--surprize", "1"),
            expected="refused",
            names=("surprize",),
        )
        yield Case(
            "core",
            "a word too many",
            (command, *good[2:], *good[:2], "stranger", "stranger2"),
            expected="survived",
        )
        yield Case("core", "an option twice", (command, *good, *good[1:]), expected="survived")


def nested() -> Iterator[Case]:
    """Places that lie inside each other, and outputs where something is already."""
    inside = {
        "attack": ("experiment.yaml", "--images", "images", "--out", "images/run"),
        "report": ("run", "--out", "run"),
        "score": (
            *("--reference", "reference", "--reconstruction", "reconstruction"),
            *("--out", "reference/0.png", "--metrics", "psnr"),
        ),
        "sample": ("--from", "images", "--out", "images/out"),
        "train": ("training.yaml", "--data", "classes", "--out", "classes/out"),
        "federate": ("federation.yaml", "--data", "classes", "--out", "classes/out"),
        "curves": ("trained", "--out", "trained"),
        "compare": ("federation", "--out", "federation"),
        "fit-prior": ("--images", "images", "--patch", "8", "--out", "images/0.safetensors"),
        "evaluate": ("--checkpoint", "model.safetensors", "--data", "classes", "--out", "classes"),
    }
    refused = {"attack", "sample", "train", "federate"}
    for command, words in inside.items():
        expected = "refused" if command in refused else "survived"
        yield Case(
            "core",
            "out inside the input",
            (command, *words),
            copied=("*",),
            expected=expected,
            names=("--out",),
        )  # type: ignore[arg-type]
    for command, words in GOOD.items():
        if "--out" not in words:
            continue
        at = words.index("--out") + 1
        for title, prepare in OCCUPIED.items():
            changed = (*words[:at], "place", *words[at + 1 :])
            codes = (*USUAL_CODES, NO_STORAGE)
            words_of = (command, *changed)
            yield Case("core", f"out is {title}", words_of, prepare, ("*",), codes=codes)


def _a_file(folder: Path) -> None:
    (folder / "place").write_text("mine")


def _a_link(folder: Path) -> None:
    (folder / "place").symlink_to("nowhere/at/all")


def _foreign(folder: Path) -> None:
    (folder / "place").mkdir()
    (folder / "place" / "thesis.txt").write_text("mine")


def _foreign_names(folder: Path) -> None:
    for name in ("rows", "experiments", "damaged", "index.html", "model.safetensors"):
        (folder / "place" / name).mkdir(parents=True)


def _locked(folder: Path) -> None:
    (folder / "place").mkdir()
    (folder / "place" / ".lock").mkdir()


def _other_run(folder: Path) -> None:
    shutil.copytree(folder / "federation", folder / "place")


def _pipes(folder: Path) -> None:
    import os

    (folder / "place").mkdir()
    for name in (
        "cells.0001.0123456789abcdef.parquet",
        "log.jsonl",
        ".lock",
        "metrics.jsonl",
        "federation.json",
        "checkpoint.pt",
        "labels.csv",
        "table.md",
        "index.html",
        "experiment.yaml",
    ):
        os.mkfifo(folder / "place" / name)


OCCUPIED = {
    "a file": _a_file,
    "a dangling link": _a_link,
    "a foreign folder": _foreign,
    "a folder of folders": _foreign_names,
    "a folder with a folder for a lock": _locked,
    "another command's folder": _other_run,
    "a folder of pipes": _pipes,
}
