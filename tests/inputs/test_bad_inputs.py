"""Bad inputs of every command, chosen from what once broke one and from each kind of input.

Each ends with an exit code, in a few lines that name the file or the option, and never in a
traceback. What single readers refuse stands in `test_readers.py` and beside the readers' own tests.
"""

import json
import os
import shutil
import stat
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from mjp_privacy.cli import COMMANDS
from tests.helpers.runs import flip
from tests.inputs.base import UPLOAD
from tests.inputs.called import Outcome, called
from tests.inputs.tensors import of_type, with_state, with_tensors

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
MAYBE, FULL = (0, 2, 3), (0, 2, 3, 74)
"""The input may be legal, or what is whole goes on without it; or the output has no room."""


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
REPORT = ("report", *GOOD["report"])
ATTACK_UPLOADS = ("attack", "uploads.yaml", "--uploads", "uploads", "--out", "out")
CHECK = ("check", "uploads")
ZIPPED = with_words("attack", images="images.zip")


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


def own(weights: str) -> Words:
    """`mjp attack own` of these weights."""
    heads = ("--num-heads", "2", "--mean", "0.5", "--std", "0.25")
    return ("attack", "own.yaml", "--weights", weights, *heads, "--images", "images", "--out", "o")


def written(content: bytes | str) -> Spoil:
    """The file holds this instead."""

    def spoil(place: Path) -> None:
        place.unlink(missing_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.encode())

    return spoil


def half(place: Path) -> None:
    content = place.read_bytes()
    written(content[: len(content) // 2])(place)


def a_pipe(place: Path) -> None:
    place.unlink()
    os.mkfifo(place)


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


def labels(*rows: str) -> Spoil:
    return written("\n".join(("file,label", *rows)) + "\n")


def png(side: int, content: bytes = b"") -> bytes:
    """A PNG of this size that holds these bytes."""

    def chunk(kind: bytes, inner: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + inner))
        return struct.pack(">I", len(inner)) + kind + inner + check

    size = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + size + (chunk(b"IDAT", content) if content else b"")


def bomb(place: Path) -> None:
    """A tenth of the rows of a black picture of 1.2 GB, in 120 kB."""
    written(png(20_000, zlib.compress(b"\0" * (60_001 * 2_000), 9)))(place)


def zip_of(entries: Mapping[str, bytes]) -> Spoil:
    def spoil(place: Path) -> None:
        with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in entries.items():
                archive.writestr(name, content)

    return spoil


def null_device(place: Path) -> None:
    """One of our own: a superuser's command could replace the machine's."""
    try:
        os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("device files need a superuser")


THESIS = "place/thesis.txt"


def a_thesis(place: Path) -> None:
    place.parent.mkdir()
    place.write_text("mine")


TRUTH, MODEL = f"uploads/truth/{UPLOAD}.safetensors", "model.safetensors"
REFUSED: list[tuple[str, Words, Spoil]] = [
    ("experiment.yaml", ATTACK, written(b"\xff\xfe\x00caf\xe9: [\xc3\x28]\n")),
    ("federation.yaml", ("federate", *GOOD["federate"]), field("attacks.0.name", "f")),
    ("site.yaml", (*ATTACK, "--engine", "site.yaml"), written("null\n")),
    (f"uploads/{UPLOAD}.json", ATTACK_UPLOADS, field("noise", {"entry": -1})),
    (f"uploads/{UPLOAD}.json", CHECK, field("weights", "x" * 5000)),
    (TRUTH, ATTACK_UPLOADS, with_tensors(lambda held: held.update(images=held["images"][:0]))),
    ("uploads/weights/*.safetensors", CHECK, flip),
    (MODEL, own(MODEL), with_tensors(partial(of_type, dtype=torch.complex64))),
    ("model.pth", own("model.pth"), with_state(lambda state: [1, 2])),
    ("images/labels.csv", ("sample", *GOOD["sample"]), labels("a.png,1", "b.png,2")),
    ("images/labels.csv", ATTACK, labels("0.png,cat")),
    ("images/labels.csv", ATTACK, labels("0.png\x1b[2J,1", "\x1b]0;x\x07.png,2")),
    ("images.zip", ZIPPED, zip_of({"../../0.png": png(8)})),
]
"""Files that must be refused with their names."""
BORNE: list[tuple[str, Words, Spoil]] = [
    (
        "trained/checkpoint.pt",
        with_words("train", val="held_out", out="trained"),
        with_state(lambda state: state.update(model=state)),
    ),
    (
        "federation/checkpoint.pt",
        with_words("federate", out="federation"),
        with_state(lambda state: dict.fromkeys(state, 5)),
    ),
    ("run/rows/*/00000.*.parquet", REPORT, half),
    ("run/log.jsonl", REPORT, half),
    ("images.zip", ZIPPED, zip_of({"0.png": b"\0" * (300 << 20), "1.png": png(8)})),
    ("images/0.png", ATTACK, bomb),
    ("images/0.png", ATTACK, written(png(2**31 - 1))),
    ("images/0.png", ATTACK, a_pipe),
    ("reference/0.png", ("score", *GOOD["score"]), half),
    ("images/a\x1b[2Jb.png", ATTACK, written(b"x")),
]
"""Files without which a command may go on."""
EMPTY_ZIP = b"PK\x05\x06" + bytes(18)
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
    ((*ATTACK, "--fresh", "--keep"), "--keep"),
    *(((*ATTACK_UPLOADS, f"--{name}", word), f"--{name.partition('.')[0]}") for name, word in IDLE),
    *(((*ATTACK, "--engine", *words.split()), name) for words, name in ENGINES.items()),
]
"""What a command line says wrong, and what is named."""
INSIDE = {"attack": "images", "sample": "images", "train": "classes", "federate": "classes"}
CASES = [
    *(Case(a, (2, 3), Path(f.replace("*", "")).stem, f, spoil) for f, a, spoil in REFUSED),
    *(Case(argv, MAYBE, "", file, spoil) for file, argv, spoil in BORNE),
    Case(ATTACK, (2, 3), "img_size", "experiment.yaml", field("models.M.img_size", 10**9)),
    *(Case(words, (2,), name) for words, name in MISTAKES),
    Case(
        ATTACK, (2,), "experiment.yaml, attacks.0: ", "experiment.yaml", field("attacks.0", PRIOR)
    ),
    Case(with_words("attack", images="new"), (2,), "new", "new", Path.mkdir),
    Case(with_words("attack", images="new.zip"), (2,), "new.zip", "new.zip", written(EMPTY_ZIP)),
    *(Case(words, (2,)) for words in ((), ("a\x1b[2Jb",), ("x" * 5000,))),
    Case(ATTACK[:-1], (2,), "--out"),
    *(Case(with_words(c, out="null"), FULL, "", "null", null_device) for c in ("attack", "score")),
    Case(with_words("report", out="/".join(["x" * 200] * 30)), FULL),
    *(Case(with_words("attack", out=word), (2,)) for word in ("x" * 2001, "a\x1b[2J", "")),
    Case((*ATTACK, "--out", "again"), (2,), "--out"),
    Case(with_words("analyse", limit="$(touch OWNED)"), (2,)),
    *(Case(with_words(c, out=f"{place}/out"), (2,), "--out") for c, place in INSIDE.items()),
    *(Case((c, *GOOD[c], "--surprize"), (2,), "surprize") for c in GOOD),
    *(
        Case(with_words(c, out="place"), FULL, "", THESIS, a_thesis)
        for c in ("attack", "report", "sample", "train", "federate")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{c.file} {c.argv[:1]}" for c in CASES])
def test_bad_input(case: Case, base: Path, tmp_path: Path) -> None:
    outcome = case.outcome(base, tmp_path / "inputs")
    assert not (faults := outcome.faults(case.codes, case.name)), "\n".join(faults)
    assert not (tmp_path / "inputs" / "OWNED").exists()
    assert outcome.code != 2 or not (tmp_path / "inputs" / "out" / "rows").exists()
    thesis = tmp_path / "inputs" / THESIS
    assert not thesis.exists() or thesis.read_text() == "mine"


@pytest.mark.parametrize("command", GOOD)
def test_good_inputs_pass(command: str, base: Path, tmp_path: Path) -> None:
    """The same commands with what was not spoiled: the table measures the spoiling."""
    outcome = Case((command, *GOOD[command])).outcome(base, tmp_path / "inputs")
    assert outcome.code == 0, outcome.said
    assert {*GOOD} == {*COMMANDS} - {"demo"}
