"""The only readers of files that come from outside, a user's as well as a run's own.

HEADER = FileKind("the JSON header of an upload", "Record it again, or take its files out.")
content = HEADER.bytes(path)        # a regular file of a bearable size, or a UserError
with HEADER.reading(path):          # any error of a library becomes a UserError
    library.load(path)

Whatever a file is instead of what is expected becomes one sentence that names it. By the same rules
images are decoded in `data` and tensors read in `models/tensor_files.py`; nobody else opens a file
(`tests/test_gate.py`). Below: JSON, CSV, and YAML, as which configs are written.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from mjp_privacy.core.errors import DISK_ERRORS, BadFile, NoFile, Unreadable, UserError
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.core.schema import listed_mistakes
from mjp_privacy.core.text import first_line, shown

T = TypeVar("T")

MIB = 1 << 20
OF_THE_MOMENT = DISK_ERRORS | {errno.ENOMEM, errno.EAGAIN, errno.EINTR}
"""Numbers of errors that say nothing of the file itself."""
NO_REGULAR_FILE = {
    **{stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"},
    **{stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"},
}


@dataclass(frozen=True)
class FileKind:
    """What a reader expects, and what its user can do where a file is something else."""

    expected: str  # such as "the JSON header of an upload"
    do: str  # a sentence or more, such as "Record this upload again."
    max_bytes: int = 64 * MIB

    def refusal(
        self, path: Path, got: str, field: str = "", error: type[BadFile] = BadFile
    ) -> BadFile:
        """The error for a file, or for one field in it: `raise KIND.refusal(path, "3 rows")`."""
        place = f"{shown(path)}, {shown(field)}" if field else shown(path)
        return error(path, f"{place}: expected {self.expected}; got {got}. {self.do}", got)

    def check(self, path: Path) -> int:
        """Raise unless this is a regular file of a bearable size; its size in bytes.

        Pipes and devices are refused unopened: reading one can take for ever.
        """
        with self.reading(path):
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                kind = NO_REGULAR_FILE.get(stat.S_IFMT(status.st_mode), "no regular file")
                raise self.refusal(path, kind)
            if status.st_size > self.max_bytes:
                limit = f"{self.max_bytes / MIB:,.1f} MiB"
                raise self.refusal(path, f"{status.st_size / MIB:,.1f} MiB, more than {limit}")
            return status.st_size

    def bytes(self, path: Path) -> bytes:
        """The content of a file; one that grows meanwhile is read as far as it was checked."""
        size = self.check(path)
        with self.reading(path), open(path, "rb", opener=without_waiting) as file:
            return file.read(size)

    def text(self, path: Path) -> str:
        """The content of a file in UTF-8."""
        content = self.bytes(path)
        with self.reading(path):
            return content.decode("utf-8-sig")

    def sha256(self, path: Path) -> str:
        """The SHA-256 of the file's bytes, in hexadecimal, whatever its size in memory."""
        self.check(path)
        with self.reading(path), path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(MIB):
                digest.update(chunk)
            return digest.hexdigest()

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Turn whatever a library raises on this file into a UserError: keep the body to the
        library's call, since the body's own mistakes are turned too."""
        try:
            yield
        except UserError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise  # a panic is a library's in Rust
            if isinstance(error, (FileNotFoundError, NotADirectoryError)):
                raise self.refusal(path, "no file of this name", error=NoFile) from error
            if isinstance(error, OSError) and error.errno in OF_THE_MOMENT:
                got = os.strerror(error.errno).lower()  # pyarrow says more, and the path again
                not_ours = error.errno in (errno.EACCES, errno.EPERM)
                do = "Give yourself the right to read it" if not_ours else "Mend that"
                message = f"{shown(path)}, {self.expected}, cannot be read: {got}. {do}."
                raise Unreadable(path, message, got) from error
            raise self.refusal(path, reason(error)) from error


def without_waiting(path: str, flags: int) -> int:
    """Open a file as `open` does, and never wait for somebody to write into it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def reason(error: BaseException) -> str:
    """What a library says in an error, as the end of a sentence: one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, MemoryError):
        return "a file that needs more memory than there is"
    return f"what cannot be read ({type(error).__name__}{first_line(error)})"


def is_there(path: Path) -> bool:
    """Whether there is anything of this name: a wrong kind of file is then refused by its reader,
    not passed over."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a NUL in the path, or a name that is too long
        return False


# JSON --------------------------------------------------------------------------------------------


def read_json(path: Path, kind: FileKind, schema: type[T]) -> T:
    """The content of a file as `schema`, a dataclass or TypedDict; each mistake in it is named."""
    return typed(read_json_value(path, kind), path, kind, schema)


def typed(content: Any, path: Path, kind: FileKind, schema: type[T]) -> T:
    """What was read from a file as `schema`; UserError with every mistake in it."""
    if not isinstance(content, Mapping):
        raise kind.refusal(path, f"{type(content).__name__} where named fields were expected")
    try:
        return TypeAdapter(schema).validate_python(dict(content))
    except ValidationError as error:
        got = listed_mistakes(error, schema)
        message = f"{shown(path)}: expected {kind.expected}; got {got}\n{kind.do}"
        raise BadFile(path, message, got) from error


def read_json_value(path: Path, kind: FileKind) -> Any:
    """The content of a JSON file, untyped: no name stands in it twice, and no NaN."""
    return json_value(kind.text(path), path, kind)


def json_value(text: str, path: Path, kind: FileKind) -> Any:
    """The value of a JSON text that a file holds; `path` and `kind` are for messages."""

    def constant(word: str) -> object:
        raise ValueError(f"{word} is no number in JSON")

    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_name = dict(pairs)
        if len(by_name) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"the field {shown(twice)!r} is given twice")
        return by_name

    with kind.reading(path):
        return json.loads(text, object_pairs_hook=fields, parse_constant=constant)


CHECK = b', "check": "'
"""Before the CRC-32 of what stands before it, at the end of a line of JSON."""


def json_lines(path: Path, kind: FileKind) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects of a file's lines of JSON, and the numbers of damaged lines; nothing of a file
    that is not there. A last line that a kill left unfinished does not count.

    Lines carry checksums (`files.append_json_line`); a file without any is of an earlier version.
    """
    objects, damaged = [], []
    content = kind.bytes(path) if is_there(path) else b""
    has_checks = CHECK in content
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        if not line.strip():
            continue
        body, _, check = line.rpartition(CHECK)
        try:
            if has_checks and check != b'%08x"}' % zlib.crc32(body):
                raise ValueError
            fields = json.loads(body + b"}" if has_checks else line)
            if not isinstance(fields, dict):
                raise TypeError
            objects.append(fields)
        except (ValueError, TypeError, RecursionError):
            damaged.append(number)
    return objects, damaged


def read_json_lines(path: Path, kind: FileKind) -> list[dict[str, Any]]:
    """The objects of all lines; a damaged one is an error."""
    objects, damaged = json_lines(path, kind)
    if damaged:
        got = f"{len(damaged)} damaged line(s), whose checksums are of other content"
        raise kind.refusal(path, got, f"line {damaged[0]}")
    return objects


# CSV ---------------------------------------------------------------------------------------------

MOST_LETTERS = 4096
"""Characters in one cell of a table."""


def csv_rows(
    text: str,
    path: Path,
    kind: FileKind,
    needed: Collection[str] = (),
    known: Collection[str] = (),
    *,
    column: Callable[[str], str] = str,
) -> Iterator[tuple[int, dict[str, str]]]:
    """Every row of a table by column, which the first line names, with the number of its line.

    needed  columns that have to be there
    known   with it, columns of any other name are refused
    column  what a column is called, from its name in the first line: `str.lower` where upper and
            lower case are the same
    """
    if "\0" in text:
        raise kind.refusal(path, "a zero byte, which no text holds")
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    with kind.reading(path):
        columns = [column(name) for name in next(lines, [])]
    fault = ""
    if twice := [name for name, number in Counter(columns).items() if number > 1]:
        fault = f"the column {shown(twice[0])} twice"
    elif missing := [name for name in needed if name not in columns]:
        fault = f"no column {', '.join(missing)} among {shown(', '.join(columns) or 'none')}"
    elif strange := [name for name in columns if known and name not in known]:
        fault = f"the unknown column {shown(strange[0])}"
    if fault:
        raise kind.refusal(path, fault, "line 1")
    while True:
        with kind.reading(path):
            cells = next(lines, None)
        if cells is None:
            return
        place = f"line {lines.line_num}"
        if cells and len(cells) != len(columns):
            raise kind.refusal(path, f"{len(cells)} cells under {len(columns)} columns", place)
        if (longest := max(map(len, cells), default=0)) > MOST_LETTERS:
            raise kind.refusal(path, f"a cell of {longest} characters", place)
        if cells:  # no empty line
            yield lines.line_num, dict(zip(columns, cells, strict=True))


# configs: YAML files of plain values, and the stock ones by their names ---------------------------

PACKAGE = Path(__file__).resolve().parents[1]
STOCK = next(
    (folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir()),
    PACKAGE / "configs",
)


def stock_config(path: str | Path) -> Path:
    """The file of this path, else the stock config that is meant by it, else the path as it is.

    stock_config("demo"), stock_config("configs/training/cifar10.yaml"): from any folder, as if it
    were the checkout; a file that is there comes first, also one in `configs/` of this folder
    """
    path = Path(path)
    is_name = not path.suffix
    if path.is_file() or path.is_absolute() or not path.parts:
        return path
    if not (is_name or path.parts[0] == "configs"):
        return path
    inside = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    name = inside.with_suffix(".yaml") if is_name else inside
    found = (folder / name for folder in (Path("configs"), STOCK))
    return next((file for file in found if file.is_file()), path)


def stock_configs() -> Mapping[str, Path]:
    """Every stock config by what a command takes for it, `configs/training/cifar10.yaml`."""
    files = sorted(STOCK.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {f"configs/{file.relative_to(STOCK).as_posix()}": file for file in files}


CONFIG = FileKind("a YAML file with fields such as `name:`", "Start from one in configs/.", 1 << 18)
MOST_NODES = 50_000
"""Fields and values of a file, each counted as often as anchors repeat it."""
ODD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-9_.]+)+)")
"""Whole numbers that begin with a zero, and numbers of base 60."""


class _Loader(yaml.SafeLoader):
    """Plain values only; `1e-3` is a number, as in YAML 1.2 and elsewhere. ValueError for what
    a few lines of anchors blow up, a field that stands twice, and numbers that mean something else
    elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes, self.sizes = 0, dict[int, int]()

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, or the one that an anchor stands for, which counts with all that it holds."""
        repeats, before = self.check_event(yaml.AliasEvent), self.nodes
        node = super().compose_node(parent, index)
        if repeats and id(node) not in self.sizes:
            raise ValueError("an anchor that holds itself")
        self.nodes += self.sizes[id(node)] if repeats else 1
        self.sizes[id(node)] = self.nodes - before
        if self.nodes > MOST_NODES:
            raise ValueError(f"more than {MOST_NODES} fields and values, as anchors repeat them")
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Named fields, each of which stands there once."""
        node = super().compose_mapping_node(anchor)
        names = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in names:
                raise _fault(key, "is given twice in one mapping")
            names.add(key.value)
        return node

    def compose_scalar_node(self, anchor: Any) -> Any:
        """A value, which is no number of another base."""
        node = super().compose_scalar_node(anchor)
        is_number = node.style is None and node.tag.endswith((":int", ":float"))
        if is_number and ODD_NUMBER.fullmatch(node.value):
            raise _fault(node, "is a number of another base. Write it as 10 or in quotes")
        return node


def _fault(node: yaml.ScalarNode, what: str) -> ValueError:
    return ValueError(f"line {node.start_mark.line + 1}: {shown(node.value, 60)!r} {what}")


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_mapping(path: Path) -> Mapping[str, Any]:
    """The top-level fields of a YAML file, or of a stock config by its path in the checkout."""
    path = stock_config(path)
    try:
        text = CONFIG.text(path)
    except NoFile as error:
        shipped = list(stock_configs())
        if not path.suffix:
            shipped = [name.removeprefix("configs/").removesuffix(".yaml") for name in shipped]
        names = [str(p) for p in sorted(path.parent.glob("*.y*ml"))] + shipped
        named = next((name for name in shipped if name.endswith(f"/{path}")), str(path))
        raise UserError(
            f"No config at {shown(path)!r}: expected a YAML file, or the name of a stock config."
            f"{did_you_mean(named, names)} Those shipped: mjp list configs."
        ) from error
    content = yaml_value(text, shown(path))
    if not isinstance(content, Mapping):
        got = "an empty file" if content is None else type(content).__name__
        raise CONFIG.refusal(path, got)
    return content


def yaml_value(text: str, where: str) -> Any:
    """The value of a YAML text; `where` names it in messages: yaml_value("[1, 2]", "--values")."""
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except Exception as error:  # YAMLError, and what its constructors raise on odd values
        text = " ".join(str(error).split()).replace('in "<unicode string>",', "at")
        text = shown(text or type(error).__name__)
        raise UserError(f"{where} is not valid YAML: {text}") from error
