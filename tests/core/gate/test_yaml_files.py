"""Configs in YAML: nothing is executed, nothing grows, every mistake is named."""

import time
import tracemalloc
from pathlib import Path

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_mapping, yaml_value


def bomb(levels: int = 12, width: int = 9) -> str:
    """A few lines that stand for width ** levels values."""
    lines = [f"a0: &a0 [{', '.join('x' * width)}]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines) + "\n"


def mapping_bomb(levels: int = 12) -> str:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    for level in range(1, levels):
        before = f"*a{level - 1}"
        lines.append(f"a{level}: &a{level} {{p: {before}, q: {before}, r: {before}, s: {before}}}")
    return "\n".join(lines) + "\n"


def merge_bomb(levels: int = 15) -> str:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    for level in range(1, levels):
        before = f"*a{level - 1}"
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([before] * 9)}], k{level}: 1}}")
    return "\n".join(lines) + "\n"


def refused(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as raised:
        read_mapping(path)
    said = str(raised.value)
    assert path.name in said
    assert "\x1b" not in said
    assert len(said) < 800
    return said


def test_a_sound_config(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &base {x: 1}\nname: a\nmore: {<<: *base, y: [1, 2.5, null]}\n")
    assert read_mapping(path)["more"] == {"x": 1, "y": [1, 2.5, None]}


@pytest.mark.parametrize("text", [bomb(), mapping_bomb(), merge_bomb()])
def test_a_bomb_of_anchors_is_counted_not_built(tmp_path: Path, text: str) -> None:
    said = refused(tmp_path / "a.yaml", text)
    assert "at most 50000 fields and values" in said
    assert "anchors (&name, *name)" in said
    began = time.process_time()
    refused(tmp_path / "a.yaml", text)
    assert time.process_time() - began < 1  # built, it takes minutes
    tracemalloc.start()
    refused(tmp_path / "a.yaml", text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: &a [*a]\n", "an anchor that holds itself"),
        ("&a {x: *a}\n", "an anchor that holds itself"),
        ("a: [" * 5000, "not valid YAML"),
        ("[" * 100_000, "not valid YAML"),
        ("name: a\nname: b\n", "line 2: 'name' is given twice"),
        ("!!python/object/apply:os.system ['touch /tmp/owned']\n", "could not determine a constr"),
        ("a: !!python/name:os.system\n", "could not determine a constructor"),
        ("a: !!timestamp 2020-13-45\n", "not valid YAML"),
        ("a: !!int five\n", "not valid YAML"),
        ("a: !!float five\n", "not valid YAML"),
        ("a: !!binary x\n", "not valid YAML"),
        ("a: 2020-99-99\n", "not valid YAML"),
        ("a: 1" + "0" * 5000 + "\n", "not valid YAML"),
        ("? [a, b]\n: 1\n", "not valid YAML"),
        ("a: *nowhere\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        (b"a: \xff\xfe\n", "UnicodeDecodeError"),
        ("a: x\x00y\n", "not valid YAML"),
        ("a: x\x1b[2Jy\n", "not valid YAML"),
        ("[1, 2]\n", "expected a YAML file with fields such as `name:`; got list"),
        ("5\n", "got int"),
        ("", "got an empty file"),
        ("# only a comment\n", "got an empty file"),
        ("a: 010\n", "line 1: expected a number as 10 or 0.5, or a text in quotes; got 010, which"),
        ("a: 1\nb: [0777]\n", "line 2: expected a number as 10 or 0.5"),
        ("a: -010\n", "got -010, which YAML takes for a number of another base"),
        ("a: 1:30\n", "got 1:30, which YAML takes for a number of another base"),
        ("a: 1:30.5\n", "Write it without leading zeros and colons, or in quotes."),
        ("010: 1\n", "got 010"),
        ("b: &n [010]\na: *n\n", "line 1: expected a number"),
        ("a" * (1 << 19), "more than"),
    ],
)
def test_what_is_no_config(tmp_path: Path, content: str | bytes, words: str) -> None:
    assert words in refused(tmp_path / "a.yaml", content)


def test_a_long_list_without_anchors_is_counted_too(tmp_path: Path) -> None:
    said = refused(tmp_path / "a.yaml", "a: [" + "1," * 60_000 + "1]\n")
    assert "at most 50000 fields and values" in said


def test_no_config_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("name: a\n")
    with pytest.raises(UserError, match=r"No config at .*dmo.yaml.*Did you mean .*demo.yaml"):
        read_mapping(tmp_path / "dmo.yaml")


def test_a_folder_or_a_pipe_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UserError, match="got a folder"):
        read_mapping(tmp_path / "folder.yaml")


def test_a_value_on_a_command_line() -> None:
    assert yaml_value("[1, a, {b: 2}]", "--values") == [1, "a", {"b": 2}]
    assert yaml_value("", "--values") is None
    with pytest.raises(UserError, match="--values is not valid YAML"):
        yaml_value("[1,", "--values")


@pytest.mark.parametrize("text", ["1e-3", "0.001", "1.E-3", "+.1e-2", "10e-4"])
def test_numbers_are_written_as_everywhere_else(text: str) -> None:
    assert yaml_value(f"lr: {text}", "x") == {"lr": 0.001}


@pytest.mark.parametrize("text", ["1e", "e3", "1e-3x", "1-e3"])
def test_words_that_look_like_numbers_stay_words(text: str) -> None:
    assert yaml_value(f"name: {text}", "x") == {"name": text}


def test_other_numbers_and_texts_are_read_as_they_stand() -> None:
    text = "[10, 0, -3, 0.5, 007.5, 0x1F, 1e-3, 1_000, '010', \"1:30\", 08x, 12:30:a, 2020-01-01x]"
    expected = [10, 0, -3, 0.5, 7.5, 31, 1e-3, 1000, "010", "1:30", "08x", "12:30:a", "2020-01-01x"]
    assert yaml_value(text, "here") == expected
