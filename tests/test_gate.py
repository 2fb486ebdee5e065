"""No source reads a file beside the gate, whose checks it would need again, nor runs what a file
holds; the limits of SECURITY.md are those of the code. The house has floors, listed once in
CONTRIBUTING.md: a room imports only what stands below it, and no file is part of a circle.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

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


HOLD_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
"""Modules whose files can hold code. Ruff finds their calls, eval, exec and shells."""
SAFETY = ("weights_only", "allow_pickle")
RUN_CODE = {"__import__", "compile", "runpy.run_path", "os.execv", "os.execvp", "os.spawnv"}


def runs_code(tree: ast.AST) -> Iterator[str]:
    """What could run code of a stranger, beside what ruff's rules find (pyproject.toml)."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            names = [str(node.module)] if isinstance(node, ast.ImportFrom) else names
            yield from (name for name in names if name.partition(".")[0] in HOLD_CODE)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            words = {ast.unparse(word) for word in node.keywords if word.arg in SAFETY}
            dynamic = called.endswith("import_module") and not isinstance(
                node.args[0], ast.Constant
            )
            unsafe = called == "torch.load" and "weights_only=True" not in words
            if called in RUN_CODE or dynamic or unsafe or "allow_pickle=True" in words:
                yield called


def test_nothing_in_the_source_runs_what_a_file_holds() -> None:
    found = {(place, said) for place, tree in sources().items() for said in runs_code(tree)}
    assert found == {("mjp_privacy/core/registry.py", "import_module")}  # names in our own source


# files of strangers -------------------------------------------------------------------------------

READERS = {
    *("read_text", "read_bytes", "open_binary", "open_text"),
    *("read_parquet", "read_excel", "read_pickle", "read_feather", "read_hdf"),
    *("ParquetFile", "ParquetDataset", "read_schema", "open_file", "memory_map"),
    *("safe_open", "load_file", "extractall", "fromfile", "genfromtxt", "loadtxt", "imread"),
    "memmap",
}
"""Functions that read a file, whatever they are called on."""
OF_MODULES = {
    *("torch.load", "json.load", "json.loads", "pickle.load", "pickle.loads", "np.load"),
    *("numpy.load", "pd.read_table", "pd.read_json", "yaml.load", "yaml.safe_load"),
    *("yaml.full_load", "yaml.unsafe_load", "yaml.safe_load_all", "Image.open", "csv.reader"),
    *("joblib.load", "shelve.open", "dill.load", "marshal.load", "shutil.unpack_archive"),
    *("csv.DictReader", "zipfile.ZipFile", "tarfile.open", "gzip.open", "io.open", "io.FileIO"),
    *("os.open", "OmegaConf.load", "pd.read_csv", "pq.read_metadata"),
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
    "mjp_privacy/paper/image_sets.py": (
        {"tarfile.open", "zipfile.ZipFile"},
        "a bounded archive, under its kind's reading(); the zip is written",
    ),
    "mjp_privacy/__main__.py": ({"os.open", "open"}, "the null device, and descriptors 0 to 2"),
    "mjp_privacy/core/files.py": ({"os.open", "open"}, "for fsync, the lock, to append lines"),
    "mjp_privacy/core/machine.py": ({"read_text"}, "what the system says of its memory"),
    "mjp_privacy/experiment/block_file.py": ({"ParquetFile", "loads"}, STORED_ROWS),
    "mjp_privacy/experiment/code.py": ({"read_bytes"}, SHIPPED),
    "mjp_privacy/experiment/engines/slurm.py": ({"read_text"}, "a line of our own command"),
    "mjp_privacy/experiment/engines/tasks.py": ({"read_text"}, "lines of our own processes"),
    "mjp_privacy/experiment/store.py": ({"loads"}, STORED),
    "mjp_privacy/federation/flower/run.py": ({"read_bytes", "read_text", "loads"}, LOGS),
    "mjp_privacy/federation/flower/app.py": ({"loads"}, "what our own server sent"),
    "mjp_privacy/federation/commands.py": ({"read_text"}, SHIPPED),
    "mjp_privacy/federation/rounds.py": ({"loads"}, "its own text, for the form that JSON gives"),
    "mjp_privacy/report/lines.py": ({"loads"}, STORED),
    "mjp_privacy/report/write.py": ({"read_text"}, SHIPPED),
    "mjp_privacy/training/config.py": ({"loads"}, "text that the gate has read"),
    "mjp_privacy/training/run_files.py": ({"loads"}, "its own text"),
    "mjp_privacy/uploads/folder.py": ({"open"}, "under its kind's reading()"),
    "attacks/breaching.py": ({"read_text"}, SHIPPED),
}
"""Reads outside the gate: the functions, and why."""


def reads(tree: ast.AST) -> set[str]:
    """The calls that read a file."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {_name(call) for call in calls if _is_reading(call)}


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


# floors -------------------------------------------------------------------------------------------


def floors() -> list[list[str]]:
    """Rooms from the ground up, those of one floor together: paths under the root."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.split("<!-- floors:begin -->")[1].split("<!-- floors:end -->")[0]
    lines = [line for line in block.splitlines() if line and not line.startswith("```")]
    rooms = [line.split("  ")[0].split(", ") for line in lines]
    return [
        [room if room.startswith("attacks") else f"mjp_privacy/{room}" for room in floor]
        for floor in rooms
    ]


def floor_of(file: Path, rooms: list[list[str]]) -> tuple[int, str]:
    """The number of the floor and the room of a file: the innermost room that holds it."""
    known = {room: number for number, floor in enumerate(rooms) for room in floor}
    for place in (file, *file.parents):
        if place.as_posix() in known:
            return known[place.as_posix()], place.as_posix()
    raise AssertionError(f"{file} stands in no room: give it a floor in CONTRIBUTING.md")


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a source imports, anywhere in it: modules, or names in modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where a room's needs stand"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(name: str) -> Path | None:
    """The file of this project that a dotted name lives in: `a.b.thing` is in a/b.py."""
    parts = name.split(".")
    if parts[0] not in (*PACKAGES, "benchmarks", "tests", "tools"):  # the last stand in no room
        return None
    while parts:
        place = Path(*parts)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if (ROOT / file).is_file():
                return file
        parts.pop()
    return None


@cache
def arrows() -> dict[Path, set[Path]]:
    """Every file of the packages, and those that it imports."""
    trees = {Path(place): tree for place, tree in sources().items() if "/" in place}
    return {
        file: {target for name in imported(tree) if (target := file_of(name)) is not None} - {file}
        for file, tree in trees.items()
    }


def test_a_room_imports_only_what_stands_below_it() -> None:
    rooms = floors()
    broken = [
        f"{file} (floor {floor}) imports {target} (floor {above})"
        for file, targets in arrows().items()
        for floor, room in [floor_of(file, rooms)]
        for target in sorted(targets)
        for above, other in [floor_of(target, rooms)]
        if other != room and above >= floor
    ]
    assert not broken, "\n".join(broken)


def test_every_room_exists_and_stands_on_one_floor_and_the_top_is_small() -> None:
    rooms = [room for floor in floors() for room in floor]
    assert len(rooms) == len(set(rooms))
    assert [room for room in rooms if not (ROOT / room).exists()] == []
    loose = {file.name for file in (ROOT / "mjp_privacy").glob("*.py")} - {"__init__.py"}
    assert loose <= {"interfaces.py", "cli.py", "__main__.py"}


def test_no_file_is_part_of_a_circle() -> None:
    TopologicalSorter(arrows()).prepare()  # a CycleError names the files
