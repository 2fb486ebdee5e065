"""Nobody but the gate opens a file to read it: whoever does would need all its checks again.

What counts as reading: functions of libraries that take a path, `open` without a mode that writes,
and parsers of text that came from a file. A file that may do one of these stands in ALLOWED.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mjp_privacy", "attacks")
GATE = ("mjp_privacy/core/read.py", "mjp_privacy/models/tensor_files.py")

READERS = {
    *("read_text", "read_bytes", "open_binary", "open_text"),
    *("read_parquet", "read_csv", "read_excel", "read_pickle", "read_feather", "read_hdf"),
    *("ParquetFile", "ParquetDataset", "read_metadata", "read_schema", "open_file", "memory_map"),
    *("safe_open", "load_file", "fromfile", "genfromtxt", "loadtxt", "imread", "memmap"),
}
"""Functions that read a file, whatever they are called on."""

OF_MODULES = {
    "torch": {"load"},
    "json": {"load", "loads"},
    "pickle": {"load", "loads"},
    "np": {"load"},
    "numpy": {"load"},
    "pd": {"read_table", "read_json"},
    "yaml": {"load", "safe_load", "full_load", "unsafe_load", "safe_load_all"},
    "Image": {"open"},
    "csv": {"reader", "DictReader"},
    "zipfile": {"ZipFile"},
    "tarfile": {"open"},
    "gzip": {"open"},
    "io": {"open", "FileIO"},
    "os": {"open"},
    "OmegaConf": {"load"},
}
"""The same by the name that stands before the dot."""

OWN = {"source", "self", "store"}
"""What has methods of these names of its own: source.read_bytes is behind the gate already."""

STORED_ROWS = "a run's own files, named by their digest; any error of pyarrow is turned there"
STORED = "JSON in a cell of the table: the gate has read the table that it stands in"
BEHIND = "text that the gate has read"
SHIPPED = "a file of the installation"
LOGS = "the end of what our own workers printed, for a message"

ALLOWED: dict[str, tuple[set[str], str]] = {
    "mjp_privacy/data/decoding.py": ({"Image.open"}, "the gate of images, after its own checks"),
    "mjp_privacy/data/files.py": ({"zipfile.ZipFile"}, "the gate of zips, after ZIP.check"),
    "mjp_privacy/paper/cifar10.py": (
        {"tarfile.open", "zipfile.ZipFile"},
        "a bounded archive, under its kind's reading(); the zip is written",
    ),
    "mjp_privacy/__main__.py": ({"os.open", "open"}, "the null device, and descriptors 0 to 2"),
    "mjp_privacy/core/files.py": ({"os.open", "open"}, "for fsync, the lock, to append lines"),
    "mjp_privacy/core/machine.py": ({"read_text"}, "what the system says of its memory"),
    "mjp_privacy/experiment/block_file.py": ({"ParquetFile", "loads"}, STORED_ROWS),
    "mjp_privacy/experiment/code.py": ({"read_bytes"}, SHIPPED),
    "mjp_privacy/experiment/engines/coordinator.py": ({"read_text"}, LOGS),
    "mjp_privacy/experiment/engines/slurm.py": ({"read_text"}, "a line of our own command"),
    "mjp_privacy/experiment/engines/worker.py": ({"read_text"}, "a line of our own command"),
    "mjp_privacy/federation/flower/run.py": ({"read_bytes", "loads"}, LOGS),
    "mjp_privacy/federation/flower/strategy.py": ({"loads"}, "what our own server sent"),
    "mjp_privacy/federation/listing.py": ({"read_text"}, SHIPPED),
    "mjp_privacy/federation/rounds.py": ({"loads"}, "its own text, for the form that JSON gives"),
    "mjp_privacy/report/answer.py": ({"loads"}, STORED),
    "mjp_privacy/report/lines.py": ({"loads"}, STORED),
    "mjp_privacy/report/charts/curves.py": ({"loads"}, STORED),
    "mjp_privacy/report/page/page.py": ({"read_text"}, SHIPPED),
    "mjp_privacy/training/config_files.py": ({"loads"}, BEHIND),
    "mjp_privacy/training/snapshots.py": ({"loads"}, "its own text"),
    "attacks/breaching.py": ({"read_text"}, SHIPPED),
}
"""Reads outside the gate: the functions, and why."""


def reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the name of each call that reads a file, but for those whose errors the gate
    turns: inside `with KIND.reading(path):`."""
    turned = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and any(_is_gate(item) for item in node.items)
        for inner in ast.walk(node)
    }
    own = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in turned:
            name = _called(node.func)
            if name not in own and _is_reading(name, node):
                yield node.lineno, name


def _is_gate(item: ast.withitem) -> bool:
    call = item.context_expr
    return isinstance(call, ast.Call) and _called(call.func).endswith(".reading")


def _called(function: ast.expr) -> str:
    """The name of a function as it is written: json.loads, path.open, safe_open."""
    if isinstance(function, ast.Name):
        return function.id
    if not isinstance(function, ast.Attribute):
        return ""
    before = function.value
    owner = before.id if isinstance(before, ast.Name) else ""
    if isinstance(before, ast.Attribute):
        owner = before.attr
    return f"{owner}.{function.attr}"


def _is_reading(name: str, call: ast.Call) -> bool:
    owner, _, function = name.rpartition(".")
    if function in OF_MODULES.get(owner, ()):
        return not (name == "os.open" and "O_WRONLY" in ast.unparse(call))
    if owner in OWN:
        return False
    if function == "open":
        return _opens_a_file(name == "open", call)
    return function in READERS


def _opens_a_file(built_in: bool, call: ast.Call) -> bool:
    """Whether an `open` may read: `open(path)` and `path.open("rb")`, not `path.open("w")`.

    Where a method's first word is no mode, it is one of something else: source.open(model).
    """
    words = [
        *call.args[1 if built_in else 0 :],
        *(k.value for k in call.keywords if k.arg == "mode"),
    ]
    modes = [word.value for word in words if isinstance(word, ast.Constant)]
    mode = next((mode for mode in modes if isinstance(mode, str)), "r")
    if words and not modes and not built_in:
        return False
    return not set(mode) & set("wax") or "+" in mode


@cache
def found() -> list[tuple[str, int, str]]:
    """Every read outside the gate: file, line, function."""
    return [
        (place, line, name)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not (place := path.relative_to(ROOT).as_posix()).startswith(GATE)
        for line, name in reads(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_nobody_else_reads_files() -> None:
    strangers = [
        f"{place}:{line} {name}"
        for place, line, name in found()
        if not {name, name.rpartition(".")[2]} & ALLOWED.get(place, (set(), ""))[0]
    ]
    assert not strangers, "\n".join(
        ["these read files without the gate (mjp_privacy/core/read.py):", *strangers]
    )


def test_what_is_allowed_is_done() -> None:
    done: dict[str, set[str]] = {}
    for place, _, name in found():
        done.setdefault(place, set()).update({name, name.rpartition(".")[2]})
    idle = [place for place, (names, _) in ALLOWED.items() if not names & done.get(place, set())]
    assert not idle, f"ALLOWED names files that read nothing any more: {', '.join(idle)}"
    assert all(reason for _, reason in ALLOWED.values())


@pytest.mark.parametrize(
    "code",
    [
        "open(path)",
        "open(path, 'rb')",
        "path.open()",
        "path.open('r+b')",
        "path.open(mode='rb')",
        "path.read_text()",
        "json.loads(text)",
        "yaml.safe_load(text)",
        "torch.load(path, weights_only=True)",
        "safe_open(path, 'pt')",
        "pd.read_csv(path)",
        "pq.ParquetFile(path)",
        "Image.open(path)",
        "np.load(path)",
        "csv.DictReader(file)",
        "os.open(path, os.O_RDONLY)",
    ],
)
def test_it_sees_a_read(code: str) -> None:
    assert list(reads(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "with KIND.reading(path), safe_open(path, 'pt') as file:\n    file.keys()",
        "with self.kind.reading(path):\n    json.loads(text)",
        "path.open('w')",
        "open(path, 'ab')",
        "path.write_text(text)",
        "source.open(model)",
        "source.read_bytes(record)",
        "os.open(os.devnull, os.O_WRONLY)",
    ],
)
def test_it_sees_nothing_else(code: str) -> None:
    assert not list(reads(ast.parse(code)))
