"""safetensors: the header is checked before a byte of a tensor is allocated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mjp_privacy.core.errors import BadFile, NoFile
from mjp_privacy.core.read import FileKind
from mjp_privacy.models.tensor_files import FLOATS, TensorFile, header_bytes
from tests.inputs.tensors import HEADER_CHANGES, file_of, header_of, with_header

WEIGHTS = FileKind("weights", "Copy them again.", 1 << 20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int64)}
    save_file(tensors, tmp_path / "w.safetensors", {"heads": "3", "bad": "{"})
    return tmp_path / "w.safetensors"


def said(path: Path) -> str:
    with pytest.raises(BadFile) as raised:
        TensorFile(path, WEIGHTS)
    text = str(raised.value)
    assert text.startswith(str(path))
    assert "\x1b" not in text
    assert len(text) < 800
    return text


def test_a_sound_file(path: Path) -> None:
    file = TensorFile(path, WEIGHTS)
    assert file.names == ["a", "b"]
    assert file.shapes == {"a": (2, 3), "b": (4,)}
    assert file.dtypes == {"a": "F32", "b": "I64"}
    assert file.metadata_value("heads") == 3
    assert file.metadata_value("none") is None
    assert torch.equal(file.tensors(["a"])["a"], torch.arange(6.0).reshape(2, 3))
    assert set(file.tensors(finite=True)) == {"a", "b"}


def test_every_type_that_is_read_has_the_size_that_the_library_writes(tmp_path: Path) -> None:
    types = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
    types |= {"BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16}
    types |= {"I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
    assert set(types) == set(SIZES)
    for name, dtype in types.items():
        save_file({"x": torch.zeros(3, dtype=dtype)}, tmp_path / f"{name}.safetensors")
        assert TensorFile(tmp_path / f"{name}.safetensors", WEIGHTS).dtypes == {"x": name}


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NoFile):
        TensorFile(tmp_path / "none", WEIGHTS)


@pytest.mark.parametrize("change", [c for c in HEADER_CHANGES if c not in ("float8",)])
def test_a_header_that_lies(path: Path, change: str) -> None:
    with_header(HEADER_CHANGES[change])(path)
    if change in ("a name with escapes", "metadata of 10^5 names", "10^5 empty tensors"):
        file = TensorFile(path, WEIGHTS) if path.stat().st_size < WEIGHTS.max_bytes else None
        assert file is None or len(file.names) == 3
        return
    said(path)


@pytest.mark.parametrize(
    ("dtype", "words"),
    [("F8_E4M3", "entries of type F8_E4M3 where F64, F32"), ("C64", "entries of type C64")],
)
def test_types_that_nobody_reads(path: Path, dtype: str, words: str) -> None:
    def change(header: dict[str, Any]) -> None:
        header["a"]["dtype"] = dtype

    with_header(change)(path)
    assert words in said(path)


def test_a_type_that_this_reader_does_not_take(path: Path) -> None:
    with pytest.raises(BadFile, match=r"w.safetensors, b: .* type I64 where F64, F32, F16, BF16"):
        TensorFile(path, WEIGHTS, FLOATS)


def test_tensors_that_overlap_or_leave_gaps(path: Path) -> None:
    header, data = header_of(path.read_bytes())
    name, other = sorted(("a", "b"), key=lambda n: header[n]["data_offsets"][0])
    begin, end = header[name]["data_offsets"]
    header[other] = header[name]
    path.write_bytes(file_of(header, data[: end - begin]))
    assert "tensors that overlap or leave gaps" in said(path)
    del header[other]
    header[name] = {**header[name], "data_offsets": [8, end - begin + 8]}
    path.write_bytes(file_of(header, data))
    assert "tensors that overlap or leave gaps" in said(path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: b"", "cut off, or no safetensors file at all"),
        (lambda content: content[:5], "cut off, or no safetensors file at all"),
        (lambda content: b"\xff" * 8 + content[8:], "cut off, or no safetensors file at all"),
        (lambda content: content[:-1], "it is cut off"),
        (lambda content: content + b"more", "bytes of tensors where its header says"),
        (lambda content: file_of("[]", b""), "a header that lists no tensors"),
        (lambda content: file_of("5", b""), "a header that lists no tensors"),
        (lambda content: file_of("[" * 100_000, b""), "RecursionError"),
        (lambda content: file_of('{"a": 1, "a": 2}', b""), "the field 'a' is given twice"),
        (lambda content: file_of('{"a": NaN}', b""), "NaN, which is no number"),
        (lambda content: content[:9] + b"\xff" + content[10:], "UnicodeDecodeError"),
    ],
)
def test_damaged_bytes(path: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    path.write_bytes(damage(path.read_bytes()))
    assert words in said(path)


def test_nothing_is_allocated_for_what_a_header_claims(path: Path) -> None:
    import tracemalloc

    huge = {"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    path.write_bytes(file_of(huge, b""))
    tracemalloc.start()
    assert "it is cut off" in said(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none(path: Path, number: float) -> None:
    tensors = {"a": torch.tensor([1.0, number, 2.0]), "b": torch.ones(2)}
    save_file(tensors, path)
    file = TensorFile(path, WEIGHTS)
    assert "a" in file.tensors()
    with pytest.raises(BadFile, match=r", a: .*got 1 of 3 numbers that are NaN or infinite"):
        file.tensors(finite=True)


def test_metadata_that_is_no_json(path: Path) -> None:
    with pytest.raises(BadFile, match="JSONDecodeError"):
        TensorFile(path, WEIGHTS).metadata_value("bad")


def test_a_header_is_written_as_the_library_reads_it(tmp_path: Path) -> None:
    header = {"é": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
    content = header_bytes(header)
    assert json.loads(content[8:]) == header
    (tmp_path / "x.safetensors").write_bytes(content + b"\1\2")
    assert TensorFile(tmp_path / "x.safetensors", WEIGHTS).tensors()["é"].tolist() == [1, 2]


def test_a_pipe_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "got a folder" in said(tmp_path / "folder")
