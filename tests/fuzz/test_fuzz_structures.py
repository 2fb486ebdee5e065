"""The gate under content that hypothesis draws: any value, any text, any header."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, read_csv, read_json_lines, read_json_value, yaml_value
from mjp_privacy.core.text import shown
from mjp_privacy.data.labels import parse_label_file
from mjp_privacy.experiment.config import parse_experiment
from mjp_privacy.federation.config import load_federation
from mjp_privacy.models.tensor_files import TensorFile
from mjp_privacy.training.config_files import load_training
from mjp_privacy.uploads.header import read_header
from tests.inputs import base
from tests.inputs.case import CONTROL
from tests.inputs.tensors import file_of

KIND = FileKind("a file", "Make it again.", 1 << 20)

drawn = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""The same examples each time, as many as the profile says (tests/conftest.py)."""

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def answered(read: Any, *arguments: Any) -> None:
    """Read it; what is raised must be a UserError that a terminal can show."""
    said = ""
    try:
        read(*arguments)
    except UserError as error:
        said = str(error)
    assert not CONTROL.search(said)
    assert len(said) < 5000


@given(content=values)
@drawn
def test_any_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))
    answered(read_json_value, path, KIND)
    answered(read_json_lines, path, KIND)
    answered(read_header, path)


@given(content=st.binary(max_size=200))
@drawn
def test_any_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for read in (read_json_value, read_json_lines, read_csv, TensorFile):
        answered(read, path, KIND)
    answered(parse_label_file, "labels", content)
    answered(yaml_value, content.decode("utf-8", "replace"), "a text")


yaml_text = st.lists(
    st.sampled_from(
        [*list("&*!|>{}[],:#-?%@`'\" \n\t"), "a", "1", "~", "<<: ", "&a ", "*a", "!!int "]
    ),
    max_size=40,
).map("".join)


@given(text=yaml_text | st.text(max_size=60))
@drawn
def test_any_yaml(text: str) -> None:
    answered(yaml_value, text, "a text")


cells = st.text(alphabet=st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["0.png", "1", "-1", "file", "label", '"', "9" * 50, "n01440764", " ", "nan"]
)


@given(rows=st.lists(st.lists(cells, max_size=4), max_size=5), end=st.sampled_from(["\n", "\r\n"]))
@drawn
def test_any_table(path: Path, rows: list[list[str]], end: str) -> None:
    text = end.join(",".join(row) for row in rows)
    path.write_text(text, newline="")
    answered(read_csv, path, KIND)
    answered(parse_label_file, "labels", text.encode())
    answered(parse_label_file, "labels", ("file,label\n" + text).encode())


numbers = st.integers(-2, 1 << 70) | st.sampled_from([0, 1, 4, 8]) | leaves
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F64", "U8", "F8_E5M2", "x"]) | leaves,
        "shape": st.lists(numbers, max_size=4) | leaves,
        "data_offsets": st.lists(numbers, max_size=3) | leaves,
        "more": leaves,
    },
)
headers = st.dictionaries(
    st.text(max_size=8) | st.just("__metadata__"), entries | values, max_size=4
)


@given(header=headers, data=st.binary(max_size=40))
@drawn
def test_any_header_of_tensors(path: Path, header: dict[str, Any], data: bytes) -> None:
    path.write_bytes(file_of(header, data))
    answered(lambda: TensorFile(path, KIND).tensors(finite=True))


CONFIGS = {
    "experiment": (base.EXPERIMENT, lambda content: parse_experiment(content, "the config")),
    "training": (base.TRAINING, load_training),
    "federation": (base.FEDERATION, load_federation),
}


@pytest.mark.parametrize("kind", CONFIGS)
@given(data=st.data())
@drawn
def test_any_value_in_any_field_of_a_config(kind: str, data: st.DataObject) -> None:
    content, load = CONFIGS[kind]
    tree = json.loads(json.dumps(content))
    inner = tree
    while True:
        key = data.draw(st.sampled_from(sorted(inner)), label="field")
        if isinstance(inner[key], dict) and inner[key] and data.draw(st.booleans()):
            inner = inner[key]
            continue
        break
    inner[key] = data.draw(values, label="value")
    answered(load, tree)


@given(text=st.text())
@drawn
def test_any_text_is_shown_in_one_line(text: str) -> None:
    assert not CONTROL.search(shown(text))
    assert "\n" not in shown(text)
    assert len(shown(text)) <= 300
    shown(text).encode()


def test_yaml_of_base_configs_is_what_is_loaded() -> None:
    for content, load in CONFIGS.values():
        load(yaml.safe_load(yaml.safe_dump(content)))
