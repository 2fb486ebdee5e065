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
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from mjp_privacy.cli import COMMANDS
from tests.inputs.base import UPLOAD
from tests.inputs.forked import Outcome, forked
from tests.inputs.tensors import tensor_changes, with_metadata, with_state, with_tensors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds of processes as on Linux")

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
    """codes: those that are right; names: of which what is said holds one; file: what is spoiled, a
    place in a copy of the good inputs."""

    title: str
    argv: Words
    codes: tuple[int, ...] = (2, 3)
    names: Words = ()
    file: str = ""
    spoil: Spoil = lambda place: None

    def outcome(self, base: Path, folder: Path) -> Outcome:
        """Spoil a copy of the good inputs and call the command there."""
        shutil.copytree(base, folder)
        if self.file:
            place = next(iter(sorted(folder.glob(self.file))), folder / self.file)
            self.spoil(place)
        return forked(self.argv, folder)


MAYBE = (0, 2, 3)
"""The input may be legal, or what is whole goes on without it."""

ATTACK = ("attack", *GOOD["attack"])
AGAIN = with_words("attack", out="run")
REPORT = ("report", *GOOD["report"])
COMPARE = ("compare", *GOOD["compare"])
ATTACK_UPLOADS = ("attack", "uploads.yaml", "--uploads", "uploads", "--out", "out")
CHECK = ("check", "uploads")
CHECK_MODEL = ("check", "--model", "model.safetensors")
PRIOR = ("attack", "prior.yaml", "--images", "images", "--out", "out")
TRAIN_AGAIN = with_words("train", val="classes", out="trained")
FEDERATE_AGAIN = with_words("federate", out="federation")
ZIPPED = with_words("attack", images="images.zip")


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


def one_bit(place: Path) -> None:
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 4
    written(bytes(content))(place)


def a_pipe(place: Path) -> None:
    place.unlink()
    os.mkfifo(place)


def a_folder(place: Path) -> None:
    place.unlink()
    place.mkdir()


def endless(place: Path) -> None:
    place.unlink()
    place.symlink_to("/dev/zero")


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


def metadata(key: str, text: str) -> Spoil:
    """What a checkpoint says of its model."""
    return lambda place: written(with_metadata(place.read_bytes(), {key: text}))(place)


def tensors(change: str, *names: str) -> Spoil:
    """A change of `tensor_changes` by its name."""
    return with_tensors(tensor_changes(*names)[change])


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + k)}: &{chr(98 + k)} [{', '.join([f'*{chr(97 + k)}'] * 9)}]\n" for k in range(12)
)


def of_file(file: str, *cases: tuple[str, Words, Spoil]) -> list[Case]:
    """Cases that must be refused with the file's name."""
    name = file.rsplit("/", 1)[-1].replace("*", "")
    return [Case(f"{file}: {t}", argv, (2, 3), (name,), file, spoil) for t, argv, spoil in cases]


CONFIGS = [
    *of_file(
        "experiment.yaml",
        ("aliases", ATTACK, written(ALIASES)),
        ("deep", ATTACK, written("[" * 100_000)),
        ("python object", ATTACK, written("!!python/object/apply:os.system ['touch OWNED']\n")),
        ("not UTF-8", ATTACK, written(b"\xff\xfe\x00caf\xe9: [\xc3\x28]\n")),
        ("a pipe", ATTACK, a_pipe),
        ("an endless device", ATTACK, endless),
        ("a folder", ATTACK, a_folder),
    ),
    Case(
        "experiment.yaml: an image of 10^9 pixels a side",
        ATTACK,
        (2, 3),
        ("img_size",),
        "experiment.yaml",
        field("models.M.img_size", 10**9),
    ),
    *of_file("training.yaml", ("half", ("train", *GOOD["train"]), written("name: [small"))),
    *of_file(
        "federation.yaml",
        ("a name that is no attack", ("federate", *GOOD["federate"]), field("attacks.0.name", "f")),
    ),
    *of_file("site.yaml", ("null", (*ATTACK, "--engine", "site.yaml"), written("null\n"))),
]

HEADER = f"uploads/{UPLOAD}.json"
TENSORS = f"uploads/{UPLOAD}.safetensors"
TRUTH = f"uploads/truth/{UPLOAD}.safetensors"
UPLOADS = [
    Case(f"{file}: {title}", argv, (2, 3), (UPLOAD,), file, spoil)
    for file, title, argv, spoil in (
        (HEADER, "noise -1", ATTACK_UPLOADS, field("noise", {"entry": -1})),
        (HEADER, "a text of 5,000", CHECK, field("weights", "x" * 5000)),
        (HEADER, "a pipe", ATTACK_UPLOADS, a_pipe),
        (TENSORS, "half", CHECK, half),
        (TENSORS, "all float8", ATTACK_UPLOADS, tensors("all float8_e4m3fn")),
        (TRUTH, "no images", ATTACK_UPLOADS, tensors("images no rows", "images")),
        ("uploads/weights/*.safetensors", "one bit", CHECK, one_bit),
    )
]

MODEL = "model.safetensors"
OWN = own(MODEL)
CHECKPOINTS = [
    *of_file(
        MODEL,
        ("blocks.foo.weight", CHECK_MODEL, tensors("blocks.foo.weight")),
        ("a scalar", OWN, tensors("pos_embed scalar", "pos_embed")),
        ("NaN", OWN, tensors("patch_embed.proj.weight NaN", "patch_embed.proj.weight")),
        ("all complex64", OWN, tensors("all complex64")),
        (
            "a header as long as a disk",
            CHECK_MODEL,
            lambda place: written(struct.pack("<Q", 1 << 60) + place.read_bytes()[8:])(place),
        ),
    ),
    *of_file("model.pth", ("a list", own("model.pth"), with_state(lambda state: [1, 2]))),
    *of_file("prior.safetensors", ("half", PRIOR, half)),
    *(
        Case(f"{file}: {title}", argv, MAYBE, (), file, spoil)
        for file, title, argv, spoil in (
            (MODEL, "metadata", ("evaluate", *GOOD["evaluate"]), metadata("mean", "[" * 100_000)),
            (
                "trained/checkpoint.pt",
                "holds itself",
                TRAIN_AGAIN,
                with_state(lambda state: state.update(model=state)),
            ),
            (
                "federation/checkpoint.pt",
                "of numbers",
                FEDERATE_AGAIN,
                with_state(lambda state: dict.fromkeys(state, 5)),
            ),
        )
    ),
]

STORED = [
    Case(f"{file}: {spoil.__name__} for {argv[0]}", argv, MAYBE, (), file, spoil)
    for file, spoil, argv in (
        ("run/rows/*/00000.*.parquet", half, REPORT),
        ("run/rows/*/00000.*.parquet", one_bit, AGAIN),
        ("run/cells.*.parquet", half, REPORT),
        ("run/log.jsonl", half, REPORT),
        ("federation/metrics.jsonl", half, COMPARE),
        ("trained/metrics.jsonl", half, ("curves", *GOOD["curves"])),
    )
]


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


DATA = [
    *of_file(
        "images/labels.csv",
        ("5,000 digits", ATTACK, labels("0.png," + "9" * 5000, "1.png,1")),
        ("a name twice", ATTACK, labels("0.png,1", "0.png,2", "1.png,0", "2.png,0", "3.png,0")),
        ("strangers", ("sample", *GOOD["sample"]), labels("a.png,1", "b.png,2")),
        ("escapes", ATTACK, labels("0.png\x1b[2J,1", "\x1b]0;x\x07.png,2")),
    ),
    *of_file(
        "images.zip",
        ("half", ZIPPED, half),
        ("an entry outside", ZIPPED, zip_of({"../../0.png": png(8)})),
    ),
    *(
        Case(f"{file}: {title}", argv, MAYBE, (), file, spoil)
        for file, title, argv, spoil in (
            ("images.zip", "bomb", ZIPPED, zip_of({"0.png": b"\0" * (300 << 20), "1.png": png(8)})),
            ("images/0.png", "bomb", ATTACK, bomb),
            ("images/0.png", "2^62 pixels", ATTACK, written(png(2**31 - 1))),
            ("images/0.png", "a pipe", ATTACK, a_pipe),
            ("reference/0.png", "cut off", ("score", *GOOD["score"]), half),
            ("images/a\x1b[2Jb.png", "a terminal's code", ATTACK, written(b"x")),
        )
    ),
]

FULL = (*MAYBE, 74)


def null_device(place: Path) -> None:
    """One of our own: a superuser's command could replace the machine's."""
    try:
        os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("device files need a superuser")


INSIDE = {"attack": "images", "sample": "images", "train": "classes", "federate": "classes"}
THESIS = "place/thesis.txt"


def a_thesis(place: Path) -> None:
    place.parent.mkdir()
    place.write_text("mine")


WORDS = [
    Case("nothing", (), (2,)),
    Case("an unknown command", ("attac",), (2,), ("attac",)),
    Case("a command with escapes", ("a\x1b[2Jb",), (2,)),
    Case("a long command", ("x" * 5000,), (2,)),
    Case("--images is empty", with_words("attack", images=""), (2,), ("--images", "images")),
    Case("--out is empty", with_words("attack", out=""), FULL),
    Case("--seed of 10^30", (*ATTACK, "--seed", "1" + "0" * 30), (2,), ("seed",)),
    Case("--out without a value", (*ATTACK[:-2], "--out"), (2,), ("--out",)),
    Case("--out is a device", with_words("attack", out="null"), FULL, (), "null", null_device),
    Case(
        "--out is a device of score", with_words("score", out="null"), FULL, (), "null", null_device
    ),
    Case("--out is long", with_words("report", out="/".join(["x" * 200] * 30)), FULL),
    Case("--limit is a shell's word", with_words("analyse", limit="$(touch OWNED)"), (2,)),
    *(
        Case(f"--out of {c} inside its input", with_words(c, out=f"{place}/out"), (2,), ("--out",))
        for c, place in INSIDE.items()
    ),
    *(Case(f"an option of {c}", (c, *GOOD[c], "--surprize"), (2,), ("surprize",)) for c in GOOD),
    *(
        Case(f"--out of {c} holds others", with_words(c, out="place"), FULL, (), THESIS, a_thesis)
        for c in ("attack", "report", "sample", "train", "federate")
    ),
]

CASES = [*CONFIGS, *UPLOADS, *CHECKPOINTS, *STORED, *DATA, *WORDS]


@pytest.mark.parametrize("case", CASES, ids=[case.title[:80] for case in CASES])
def test_bad_input(case: Case, base: Path, tmp_path: Path) -> None:
    outcome = case.outcome(base, tmp_path / "inputs")
    assert not (faults := outcome.faults(case.codes, case.names)), "\n".join(faults)
    assert not (tmp_path / "inputs" / "OWNED").exists()
    thesis = tmp_path / "inputs" / THESIS
    assert not thesis.exists() or thesis.read_text() == "mine"


@pytest.mark.parametrize("command", GOOD)
def test_good_inputs_pass(command: str, base: Path, tmp_path: Path) -> None:
    """The same commands with what was not spoiled: the table measures the spoiling."""
    outcome = Case("good", (command, *GOOD[command])).outcome(base, tmp_path / "inputs")
    assert outcome.code == 0, outcome.said


def test_every_command_is_tried() -> None:
    assert set(COMMANDS) - {"demo"} <= {case.argv[0] for case in CASES if case.argv}


def test_a_hang_a_traceback_and_a_long_answer_are_faults() -> None:
    assert Outcome(2, "error: file.json, lr: expected a number").faults((2,), ("file.json",)) == []
    for outcome in (
        Outcome(-9, "", hung=True),
        Outcome(2, "Traceback (most recent call last)\nfile.json"),
        Outcome(70, "file.json"),
        Outcome(2, "file.json lr\n" * 100),
        Outcome(2, "file.json \x1b[2J"),
        Outcome(2, "error: lr"),
    ):
        assert outcome.faults((0, 2), ("file.json",))
