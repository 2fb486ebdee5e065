"""Bad inputs that are files: every reader meets every damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.inputs.case import NO_STORAGE, USUAL_CODES, Case
from tests.inputs.cases_fields import AGAIN, COMPARE, FEDERATE, REPORT, UPLOAD
from tests.inputs.damage import DAMAGES, Damage

ATTACK = ("attack", "experiment.yaml", "--images", "images", "--out", "out")
ATTACK_UPLOADS = ("attack", "uploads.yaml", "--uploads", "uploads", "--out", "out")
CHECK = ("check", "uploads")
TRAIN = ("train", "training.yaml", "--data", "classes", "--out", "out")
TRAIN_AGAIN = (
    "train",
    "training.yaml",
    "--data",
    "classes",
    "--val",
    "classes",
    "--out",
    "trained",
)
PRIOR = ("attack", "prior.yaml", "--images", "images", "--out", "out")
CURVES = ("curves", "trained", "--out", "out")
EVALUATE = ("evaluate", "--checkpoint", "trained/model.safetensors", "--data", "classes")


def own(weights: str) -> tuple[str, ...]:
    """`mjp attack own` of these weights."""
    heads = ("--num-heads", "2", "--mean", "0.5", "--std", "0.25")
    return ("attack", "own.yaml", "--weights", weights, *heads, "--images", "images", "--out", "o")


def all_cases() -> Iterator[Case]:
    """Every case of this file."""
    for room, file, argvs, alone in FILES:
        for argv in argvs:
            for title, damage in DAMAGES.items():
                yield file_case(room, file, argv, title, damage, alone=alone)


FILES: tuple[tuple[str, str, tuple[tuple[str, ...], ...], bool], ...] = (
    ("config", "experiment.yaml", (ATTACK,), True),
    ("config", "uploads.yaml", (ATTACK_UPLOADS,), True),
    ("config", "federation.yaml", (FEDERATE,), True),
    ("config", "site.yaml", ((*ATTACK, "--engine", "site.yaml"),), True),
    ("training", "training.yaml", (TRAIN,), True),
    ("uploads", f"uploads/{UPLOAD}.json", (CHECK, ATTACK_UPLOADS), False),
    ("uploads", f"uploads/{UPLOAD}.safetensors", (CHECK, ATTACK_UPLOADS), False),
    ("uploads", f"uploads/truth/{UPLOAD}.safetensors", (CHECK, ATTACK_UPLOADS), False),
    ("uploads", "uploads/weights/*.safetensors", (CHECK, ATTACK_UPLOADS), False),
    (
        "checkpoints",
        "model.safetensors",
        (
            ("check", "--model", "model.safetensors"),
            own("model.safetensors"),
            ("evaluate", "--checkpoint", "model.safetensors", "--data", "classes"),
        ),
        True,
    ),
    ("checkpoints", "model.pth", (("check", "--model", "model.pth"), own("model.pth")), True),
    ("checkpoints", "official_mjp.safetensors", (own("official_mjp.safetensors"),), True),
    ("checkpoints", "prior.safetensors", (PRIOR,), True),
    ("training", "trained/checkpoint.pt", (TRAIN_AGAIN,), False),
    ("training", "trained/metrics.jsonl", (TRAIN_AGAIN, CURVES), False),
    ("training", "trained/model.safetensors", (TRAIN_AGAIN, EVALUATE), False),
    ("store", "run/cells.*.parquet", (REPORT, AGAIN), False),
    ("store", "run/experiment.yaml", (REPORT, AGAIN), False),
    ("store", "run/experiments/small.yaml", (REPORT,), False),
    ("store", "run/log.jsonl", (REPORT, AGAIN), False),
    ("store", "run/.lock", (AGAIN,), False),
    ("store", "run/rows/*/00000.*.parquet", (REPORT, AGAIN), False),
    ("federation", "federation/federation.json", (COMPARE, FEDERATE), False),
    ("federation", "federation/metrics.jsonl", (COMPARE, FEDERATE), False),
    ("federation", "federation/checkpoint.pt", (FEDERATE,), False),
    ("federation", "federation/model.safetensors", (COMPARE, FEDERATE), False),
    ("federation", f"federation/uploads/{UPLOAD}.json", (FEDERATE,), False),
    ("federation", f"federation/uploads/{UPLOAD}.safetensors", (FEDERATE,), False),
    ("federation", "federation/uploads/weights/*.safetensors", (FEDERATE,), False),
    ("federation", "federation/attack/cells.*.parquet", (COMPARE, FEDERATE), False),
    ("federation", "federation/attack/rows/*/00000.*.parquet", (COMPARE, FEDERATE), False),
    ("data", "images/0.png", (ATTACK,), False),
    ("data", "images/labels.csv", (ATTACK, ("sample", "--from", "images", "--out", "out")), False),
    (
        "data",
        "images.zip",
        (
            ("attack", "experiment.yaml", "--images", "images.zip", "--out", "o"),
            ("sample", "--from", "images.zip", "--out", "out"),
        ),
        True,
    ),
    (
        "data",
        "classes/class_0/000.png",
        (
            TRAIN,
            FEDERATE_NEW := ("federate", "federation.yaml", "--data", "classes", "--out", "out"),
            ("sample", "--from", "classes", "--out", "out"),
            ("evaluate", "--checkpoint", "model.safetensors", "--data", "classes"),
        ),
        False,
    ),
    (
        "data",
        "reference/0.png",
        (
            (
                "score",
                "--reference",
                "reference",
                "--reconstruction",
                "reconstruction",
                "--out",
                "s.csv",
            ),
        ),
        False,
    ),
    (
        "data",
        "reconstruction/0.png",
        (
            (
                "score",
                "--reference",
                "reference",
                "--reconstruction",
                "reconstruction",
                "--out",
                "s.csv",
            ),
        ),
        False,
    ),
)
"""Room, file, the commands that read it, and whether the command reads nothing beside it: a command
that goes on with what is whole may end well."""

HARMLESS = (
    "one bit",
    "another bit",
    "many bits",
    "bit at the start",
    "bits at the start",
    "with more",
    "nul",
)
"""Damages that a file may bear."""


def place(folder: Path, file: str) -> Path:
    """The file, whose name may hold a star."""
    return next(iter(sorted(folder.glob(file))), folder / file) if "*" in file else folder / file


def file_case(
    room: str,
    file: str,
    argv: tuple[str, ...],
    title: str,
    damage: Damage,
    *,
    alone: bool = False,
    certain: bool | None = None,
) -> Case:
    """A command that meets one damaged file."""
    if certain is None:
        endless = title == "nearly whole" and file.endswith(".yaml")  # YAML has no end to miss
        certain = alone and title not in HARMLESS and not endless
    copied = {file.split("/")[0], *(("run",) if argv == AGAIN else ())}
    copied |= {"federation"} if argv == FEDERATE else set()
    copied |= {"trained"} if argv == TRAIN_AGAIN else set()
    words = tuple(part.replace("*", "") for part in (file.split("/")[-1],))
    return Case(
        room,
        f"{file} is {title}",
        argv,
        lambda folder: damage(place(folder, file)),
        copied=tuple(sorted(copied)),
        expected="refused" if certain else "survived",
        names=words if certain else (),
        codes=(*USUAL_CODES, NO_STORAGE) if title == "sparse" else USUAL_CODES,
    )
