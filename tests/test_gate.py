"""What no source does: run what a file holds, or read a file beside the gate, whose checks it would
need again. And the limits of SECURITY.md are those of the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mjp_privacy", "attacks")
GATE = ("mjp_privacy/core/read.py", "mjp_privacy/models/tensor_files.py")


@cache
def sources() -> dict[str, ast.AST]:
    """Every file of the product by its path, parsed."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {
        file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted([*files, *ROOT.glob("*.py")])
    }


# code of strangers --------------------------------------------------------------------------------

HOLD_CODE = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
"""Modules whose files can hold code."""
RUN_CODE = {
    *("eval", "exec", "compile", "__import__", "yaml.load", "runpy.run_path"),
    *("os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv"),
}
LOAD_CODE = {"read_pickle", "extractall", "unsafe_load", "full_load", "unpack_archive"}


def runs_code(tree: ast.AST) -> Iterator[str]:
    """What could run code of a stranger, as it is written."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            names = [str(node.module)] if isinstance(node, ast.ImportFrom) else names
            if any(name.partition(".")[0] in HOLD_CODE for name in names):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            last = called.rpartition(".")[2]
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if (
                called in RUN_CODE
                or last in LOAD_CODE
                or options.get("shell") == "True"
                or (called == "torch.load" and options.get("weights_only") != "True")
                or options.get("allow_pickle", "False") != "False"
                or (last == "import_module" and not isinstance(node.args[0], ast.Constant))
            ):
                yield ast.unparse(node)


def test_nothing_in_the_source_runs_what_a_file_holds() -> None:
    found = {
        f"{place}: {said.partition('(')[0]}"
        for place, tree in sources().items()
        for said in runs_code(tree)
    }
    assert found == {"mjp_privacy/core/registry.py: import_module"}  # names in our own source


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib.externals import loky",
        "eval(text)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, Loader=yaml.Loader)",
        "numpy.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "zipfile.ZipFile(path).extractall()",
        "importlib.import_module(name)",
    ],
)
def test_what_must_not_be_is_found(line: str) -> None:
    assert list(runs_code(ast.parse(line))) == [line]
    assert not list(runs_code(ast.parse("model.eval()\ntorch.load(p, weights_only=True)")))


# files of strangers -------------------------------------------------------------------------------

READERS = {
    *("read_text", "read_bytes", "open_binary", "open_text"),
    *("read_parquet", "read_csv", "read_excel", "read_pickle", "read_feather", "read_hdf"),
    *("ParquetFile", "ParquetDataset", "read_metadata", "read_schema", "open_file", "memory_map"),
    *("safe_open", "load_file", "fromfile", "genfromtxt", "loadtxt", "imread", "memmap"),
}
"""Functions that read a file, whatever they are called on."""
OF_MODULES = {
    *("torch.load", "json.load", "json.loads", "pickle.load", "pickle.loads", "np.load"),
    *("numpy.load", "pd.read_table", "pd.read_json", "yaml.load", "yaml.safe_load"),
    *("yaml.full_load", "yaml.unsafe_load", "yaml.safe_load_all", "Image.open", "csv.reader"),
    *("csv.DictReader", "zipfile.ZipFile", "tarfile.open", "gzip.open", "io.open", "io.FileIO"),
    *("os.open", "OmegaConf.load"),
}
"""The same by the name that stands before the dot."""
OWN = {"source", "self", "store"}
"""What has methods of these names of its own: source.read_bytes is behind the gate already."""

STORED_ROWS = "a run's own files, named by their digest; any error of pyarrow is turned there"
STORED = "JSON in a cell of the table: the gate has read the table that it stands in"
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
    "mjp_privacy/federation/flower/run.py": ({"read_bytes", "read_text", "loads"}, LOGS),
    "mjp_privacy/federation/flower/app.py": ({"loads"}, "what our own server sent"),
    "mjp_privacy/federation/listing.py": ({"read_text"}, SHIPPED),
    "mjp_privacy/federation/rounds.py": ({"loads"}, "its own text, for the form that JSON gives"),
    "mjp_privacy/report/lines.py": ({"loads"}, STORED),
    "mjp_privacy/report/page/page.py": ({"read_text"}, SHIPPED),
    "mjp_privacy/training/config.py": ({"loads"}, "text that the gate has read"),
    "mjp_privacy/training/snapshots.py": ({"loads"}, "its own text"),
    "attacks/breaching.py": ({"read_text"}, SHIPPED),
}
"""Reads outside the gate: the functions, and why."""


def reads(tree: ast.AST) -> set[str]:
    """The calls that read a file, but for those whose errors the gate turns: inside
    `with KIND.reading(path):`."""
    nodes = list(ast.walk(tree))
    gates = [
        node
        for node in nodes
        if isinstance(node, ast.With)
        and any(".reading(" in ast.unparse(item.context_expr) for item in node.items)
    ]
    turned = {id(inner) for gate in gates for inner in ast.walk(gate)}
    own = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES)
        for alias in node.names
    }
    calls = [node for node in nodes if isinstance(node, ast.Call) and id(node) not in turned]
    return {_name(call) for call in calls if _name(call) not in own and _is_reading(call)}


def _name(call: ast.Call) -> str:
    """The function with what stands before its dot: json.loads, path.open, safe_open."""
    return ".".join(ast.unparse(call.func).split(".")[-2:])


def _is_reading(call: ast.Call) -> bool:
    owner, _, function = _name(call).rpartition(".")
    if _name(call) in OF_MODULES:
        return "O_WRONLY" not in ast.unparse(call)
    if function != "open" or owner in OWN:
        return function in READERS and owner not in OWN
    words = call.args if owner else call.args[1:]
    words = [*words, *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [word.value for word in words if isinstance(word, ast.Constant)]
    if words and not modes and owner:
        return False  # no mode, so no file: source.open(model)
    mode = next((mode for mode in modes if isinstance(mode, str)), "r")
    return not set(mode) & set("wax") or "+" in mode


def test_nobody_else_reads_files_and_what_is_allowed_is_done() -> None:
    for place, tree in sources().items():
        if not place.startswith(GATE):
            allowed, _ = ALLOWED.get(place, (set(), ""))
            names = {name: {name, name.rpartition(".")[2]} for name in reads(tree)}
            strangers = [name for name, both in names.items() if not both & allowed]
            assert not strangers, f"{place} reads without mjp_privacy/core/read.py: {strangers}"
            assert bool(names) == bool(allowed), f"{place} reads nothing any more"
    assert set(ALLOWED) <= set(sources())


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
        "pq.ParquetFile(path)",
        "Image.open(path)",
        "csv.DictReader(file)",
        "os.open(path, os.O_RDONLY)",
    ],
)
def test_it_sees_a_read(code: str) -> None:
    assert reads(ast.parse(code))


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
    assert not reads(ast.parse(code))


# limits -------------------------------------------------------------------------------------------


def test_the_pages_limits_are_those_of_the_code() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    limits = re.findall(r"^\| [^|]+ \| ([^|]+) \| `([\w.]+:\w+)` \|$", page, re.MULTILINE)
    assert len(limits) >= 20
    for figure, name in limits:
        assert (name, figure.strip()) == (name, _shown(name))


def _shown(constant: str) -> str:
    """A constant as the page writes it: bytes of files in MiB, GiB or TiB, others in full."""
    module, _, name = constant.partition(":")
    value = getattr(import_module(module), name)
    size = getattr(value, "max_bytes", None)
    if size is None and not name.endswith("BYTES"):
        return f"{value:,}"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if (size or value) >= scale:
            return f"{(size or value) / scale:,.0f} {unit}"
    return f"{size or value} bytes"
