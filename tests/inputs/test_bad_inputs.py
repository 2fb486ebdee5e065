"""Bad inputs of every command, chosen from what once broke one and from each kind of input.

Each ends with an exit code, in a few lines that name the file or the option, and never in a
traceback. What single readers refuse stands in `test_readers.py` and beside the readers' own tests:
pictures and zips in tests/data, uploads in tests/uploads, checkpoints in tests/training; folders
that hold something else in the tests of each command.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from mjp_privacy.cli import COMMANDS
from tests.inputs.base import UPLOAD, Outcome, called

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="bounds of processes as on Linux"),
    pytest.mark.timeout(60),
]

Words = tuple[str, ...]
Spoil = Callable[[Path], object]

GOOD: Mapping[str, Words] = {
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


def with_words(command: str, **options: str) -> Words:
    """The good command line with other values of options: out="x" is --out x."""
    words = [command, *GOOD[command]]
    for name, value in options.items():
        option = f"--{name}"
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return tuple(words)


class Case(NamedTuple):
    """codes: those that are right; name: what an answer holds; file: what is spoiled, a place in
    a copy of the good inputs."""

    argv: Words
    codes: tuple[int, ...] = (2, 3)
    name: str = ""
    file: str = ""
    spoil: Spoil = lambda place: None

    def outcome(self, base: Path, folder: Path) -> Outcome:
        """Spoil a copy of the good inputs and call the command there."""
        shutil.copytree(base, folder)
        if self.file:
            self.spoil(next(iter(sorted(folder.glob(self.file))), folder / self.file))
        return called(self.argv, folder)


ATTACK = ("attack", *GOOD["attack"])
ATTACK_UPLOADS = ("attack", "uploads.yaml", "--uploads", "uploads", "--out", "out")
CHECK = ("check", "uploads")
IDLE = [
    *(("gamma", "0.5"), ("client.defenses", "int8"), ("weights", "a.pth"), ("model", "vit")),
    *(("images", "photographs"), ("images", "embedded")),
]
"""Options of simulated clients, which say nothing of recorded uploads."""
ENGINES = {
    **{"here --workers 2": "workers", "local --partition gpu": "partition", "lokal": "local"},
    **{"slurm --address head:6379": "address", "local --workers 0": "workers"},
    **{"nowhere.yaml": "nowhere.yaml", "training.yaml": "engine:"},
}


def written(content: str) -> Spoil:
    """The file holds this instead."""
    return lambda place: place.write_text(content)


def field(path: str, value: Any) -> Spoil:
    """A field of a YAML or JSON file has this value: field("models.M.img_size", 10**9)."""

    def spoil(place: Path) -> None:
        content = yaml.safe_load(place.read_text())
        inner = content
        *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in above:
            inner = inner[part]
        inner[last] = value
        text = yaml.safe_dump(content) if place.suffix == ".yaml" else json.dumps(content)
        written(text)(place)

    return spoil


def texts(place: Path) -> None:
    """A folder of texts that are called pictures."""
    place.mkdir()
    for name in ("a.jpg", "b.jpg"):
        (place / name).write_text("text")


EMPTY_ZIP = "PK\x05\x06" + "\0" * 18
NAME = "models.M.model"
PRIOR = {"name": "april_prior", "label": "leak", "options": {"prior": "station"}}
MISTAKES: list[tuple[Words, str]] = [
    (("attack", "experimint.yaml"), "experiment.yaml"),
    (("attack", "experiment.yaml", "--out", "out"), "--images PATH"),
    *(
        (with_words("attack", images=name), name)
        for name in ("imagse", "~nobody-of-this-name/images")
    ),
    (with_words("attack", labels="lables.csv"), "lables.csv"),
    (with_words("attack", limit="0"), "got 0"),
    (with_words("attack", weights="Mm=x.pth"), "Mm"),
    (with_words("attack", out="model.pth/run"), "--out"),
    *((with_words("attack", **{name: "few"}), name) for name in ("limit", "device", "dtypes")),
    *((with_words("attack", **{name: "0"}), name) for name in ("block", "client.mode")),
    (with_words("attack", **{"num-heads": "0"}), "num_heads"),
    ((*ATTACK, "--fresh", "--keep"), "--keep"),
    (("federate", "minute", "--data", "classes", "--out", "out"), "federated/minute"),
    *(((*ATTACK_UPLOADS, f"--{name}", word), f"--{name.partition('.')[0]}") for name, word in IDLE),
    *(((*ATTACK, "--engine", *words.split()), name) for words, name in ENGINES.items()),
]
"""What a command line says wrong, and what is named."""
INSIDE = {"attack": "images", "sample": "images", "train": "classes", "federate": "classes"}
CASES = [
    Case((*ATTACK, "--engine", "site.yaml"), (2,), "site", "site.yaml", written("null\n")),
    Case(CHECK, (2, 3), UPLOAD, f"uploads/{UPLOAD}.json", field("weights", "x" * 5000)),
    Case(ATTACK, (2,), "labels", "images/labels.csv", written("file,label\n0.png\x1b[2J,1\n")),
    Case(ATTACK, (0, 2, 3), "", "images/a\x1b[2Jb.png", written("x")),
    Case(ATTACK, (2, 3), "img_size", "experiment.yaml", field("models.M.img_size", 10**9)),
    *(Case(words, (2,), name) for words, name in MISTAKES),
    Case(
        ATTACK, (2,), "experiment.yaml, attacks.0: ", "experiment.yaml", field("attacks.0", PRIOR)
    ),
    Case(ATTACK, (2,), "options: {ridge", "experiment.yaml", field("attacks.0.ridge", 1e-8)),
    Case(ATTACK, (2,), "experiment.yaml, models.M", "experiment.yaml", field(NAME, "vit_tny")),
    Case(with_words("attack", images="new"), (2,), "new", "new", Path.mkdir),
    Case(with_words("attack", images="new"), (2,), ".jpg", "new", texts),
    Case(
        with_words("attack", images="new.zip"),
        (2,),
        "new.zip",
        "new.zip",
        written(EMPTY_ZIP),
    ),
    *(Case(words, (2,)) for words in ((), ("a\x1b[2Jb",), ("x" * 5000,))),
    Case(ATTACK[:-1], (2,), "--out"),
    Case(with_words("report", out="/".join(["x" * 200] * 30)), (2, 74)),
    *(Case(with_words("attack", out=word), (2,)) for word in ("x" * 2001, "a\x1b[2J", "")),
    Case((*ATTACK, "--out", "again"), (2,), "--out"),
    Case(with_words("analyse", limit="$(touch OWNED)"), (2,)),
    Case(with_words("evaluate", gamma="few"), (2,), "--gamma"),
    Case(("report",), (2,), "run folder"),
    Case(
        (*with_words("federate"), "--attack-seconds", "9"),
        (2,),
        "--attack-seconds",
        "federation.yaml",
        field("attacks", []),
    ),
    *(Case(with_words(c, out=f"{place}/out"), (2,), "--out") for c, place in INSIDE.items()),
    *(Case((c, *GOOD[c], "--surprize"), (2,), "surprize") for c in GOOD),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{c.file} {c.argv[:1]}" for c in CASES])
def test_bad_input(case: Case, base: Path, tmp_path: Path) -> None:
    outcome = case.outcome(base, tmp_path / "inputs")
    assert not (faults := outcome.faults(case.codes, case.name)), "\n".join(faults)
    assert not (tmp_path / "inputs" / "OWNED").exists()
    assert outcome.code != 2 or not (tmp_path / "inputs" / "out" / "rows").exists()


@pytest.mark.parametrize("command", GOOD)
def test_good_inputs_pass(command: str, base: Path, tmp_path: Path) -> None:
    """The same commands with what was not spoiled: the table measures the spoiling."""
    outcome = Case((command, *GOOD[command])).outcome(base, tmp_path / "inputs")
    assert outcome.code == 0, outcome.said
    assert {*GOOD} == {*COMMANDS} - {"demo"}
