"""Readers of files from outside under what hypothesis draws: only a UserError may come out.

First the gate, which meets any text and any header; then every reader, which meets changed bytes
of a file that it reads. `make nightly` draws more of each. Any value in any field of a config:
tests/experiment/test_config.py.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from attacks.prior.files import load_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, csv_rows, read_json_lines, read_json_value, yaml_value
from mjp_privacy.data import open_images
from mjp_privacy.data.decoding import decode_image
from mjp_privacy.data.labels import parse_label_file
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.federation.comparison import defence_text
from mjp_privacy.federation.rounds import evaluations, stored_config
from mjp_privacy.models import load_model
from mjp_privacy.models.loading import outline_model
from mjp_privacy.models.tensor_files import TensorFile
from mjp_privacy.report.runs import load_runs
from mjp_privacy.training.run_files import (
    METRICS,
    TrainingCheckpoint,
    load_checkpoint,
    points_of,
    whole_lines,
)
from mjp_privacy.uploads.check import check_uploads
from mjp_privacy.uploads.folder import examine
from mjp_privacy.uploads.record import Upload
from tests.inputs import base as good
from tests.inputs.base import CONTROL
from tests.inputs.tensors import tensor_changes, with_tensors

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
yaml_text = st.lists(
    st.sampled_from(
        [*list("&*!|>{}[],:#-?%@`'\" \n\t"), "a", "1", "~", "<<: ", "&a ", "*a", "!!int "]
    ),
    max_size=40,
).map("".join)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def answered(read: Any, *arguments: Any) -> bool:
    """Whether it is refused; what is raised must be a UserError that a terminal can show."""
    said = ""
    try:
        read(*arguments)
    except UserError as error:
        said = str(error)
    assert not CONTROL.search(said)
    assert len(said) < 5000
    return bool(said)


def table(path: Path, kind: FileKind) -> None:
    list(csv_rows(kind.text(path), path, kind))


@given(
    content=st.binary(max_size=200)
    | values.map(lambda content: json.dumps(content).encode())
    | yaml_text.map(str.encode)
)
@drawn
def test_any_bytes_any_json_any_yaml(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for read in (read_json_value, read_json_lines, table, TensorFile):
        answered(read, path, KIND)
    answered(Upload.load, path)
    answered(parse_label_file, "labels", content)
    answered(yaml_value, content.decode("utf-8", "replace"), "a text")


# every reader of a file ---------------------------------------------------------------------------


def uploads(folder: Path) -> None:
    check_uploads(folder / "uploads")
    refused = examine(folder / "uploads").reasons
    if refused:  # each is a row of its own; here it counts as what a reader raises
        raise UserError("; ".join(refused.values()))


def truth(folder: Path) -> None:
    upload = Upload.load(folder / "uploads" / f"{good.UPLOAD}.json")
    file = upload.truth_file()
    assert file is not None
    file.check_shapes(upload.header.recipe.batch, good.SIDE, (good.SIDE // good.PATCH) ** 2)
    file.read()


def checkpoint(file: str) -> Callable[[Path], object]:
    return lambda at: load_model(checkpoint=at / file, num_heads=2, mean=0.5, std=0.25)


def state(folder: Path) -> None:
    identity = {"config": "{}", "images": "", "validation": "", "initial": ""}
    load_checkpoint(folder / "trained", identity, TrainingCheckpoint, 1)


def mending(folder: Path) -> None:
    """As a run that goes on does."""
    store = RunStore(folder / "run")
    whole = store.without(store.damaged())
    for run_id in store.stored_cells():
        whole.read(run_id)


def rows(folder: Path) -> None:
    """As if the name fitted whatever the file holds."""
    store = RunStore(folder / "run")
    for run_id in store.stored_cells():
        store.read(run_id)
        store.pictures(run_id, "0.png")


def curves(folder: Path) -> None:
    points_of(folder / "trained")
    whole_lines(folder / "trained" / METRICS)


def comparison(folder: Path) -> None:
    evaluations(folder / "federation")
    defence_text(stored_config(folder / "federation"))


def zipped(folder: Path) -> None:
    source = open_images(folder / "images.zip")
    for record in source.records[:4]:
        source.decode(record)


HEADER, TENSORS = f"uploads/{good.UPLOAD}.json", f"uploads/{good.UPLOAD}.safetensors"
MODEL, ROWS = "model.safetensors", "run/rows/*/00000.*.parquet"
READERS: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "upload header": (HEADER, uploads),
    "upload": (TENSORS, uploads),
    "tensors of an upload": (
        TENSORS,
        lambda at: Upload.load(at / "uploads" / f"{good.UPLOAD}.json").tensors(),
    ),
    "truth": (f"uploads/truth/{good.UPLOAD}.safetensors", truth),
    "weights": ("uploads/weights/*.safetensors", uploads),
    "checkpoint": (MODEL, lambda at: load_model(checkpoint=at / MODEL)),
    "outline": (MODEL, lambda at: outline_model(checkpoint=at / MODEL)),
    "checkpoint of the authors": (
        "official_mjp.safetensors",
        checkpoint("official_mjp.safetensors"),
    ),
    "checkpoint pth": ("model.pth", checkpoint("model.pth")),
    "prior": ("prior.safetensors", lambda at: load_prior(at / "prior.safetensors")),
    "training state": ("trained/checkpoint.pt", state),
    "training curves": (f"trained/{METRICS}", curves),
    "federation": ("federation/federation.json", comparison),
    "a federation's metrics": ("federation/metrics.jsonl", comparison),
    "cells": ("run/cells.*.parquet", lambda at: RunStore(at / "run").read_cells()),
    "rows": (ROWS, mending),
    "rows and pictures under their name": (ROWS, rows),
    "report of rows": (ROWS, lambda at: load_runs([at / "run"])),
    "report of cells": ("run/cells.*.parquet", lambda at: load_runs([at / "run"])),
    "image": ("images/0.png", lambda at: decode_image((at / "images/0.png").read_bytes())),
    "labels in a folder": ("images/labels.csv", lambda at: open_images(at / "images")),
    "zip": ("images.zip", zipped),
}
"""By name, a place in the good inputs and what reads it."""


@pytest.fixture(scope="module")
def work(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers") / "work"
    shutil.copytree(base, folder)
    return folder


edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "drop", "insert", "repeat"]),
        st.floats(0, 1, exclude_max=True) | st.floats(0, 0.02),
        st.binary(min_size=1, max_size=6) | st.sampled_from([b"\0" * 40, b"9" * 40, b"\x1b[2J"]),
    ),
    min_size=1,
    max_size=4,
)


def changed(content: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    """The content with some bytes flipped, cut off, dropped, put in or there twice."""
    for kind, share, other in changes:
        at = int(share * len(content))
        first, last = {
            "flip": (bytes(b ^ other[0] for b in content[at : at + 1]), at + 1),
            "cut": (b"", len(content)),
            "drop": (b"", at + len(other)),
            "insert": (other, at),
            "repeat": (b"", max(0, at - 50)),
        }[kind]
        content = content[:at] + first + content[last:]
    return content


def met(reader: str, folder: Path, spoil: Callable[[Path], object]) -> bool:
    """Whether the reader refuses its file spoiled; the file is whole again afterwards."""
    file, read = READERS[reader]
    place = sorted(folder.glob(file))[0]
    whole = place.read_bytes()
    spoil(place)
    try:
        return answered(read, folder)
    finally:
        place.unlink(missing_ok=True)
        place.write_bytes(whole)


@pytest.mark.parametrize("reader", READERS)
@given(changes=edits)
@example(changes=[])
@settings(drawn, max_examples=settings.default.max_examples // 5)
def test_every_reader_meets_changed_bytes(work: Path, reader: str, changes: Any) -> None:
    """What was not changed it reads: else nothing but the first check of each would be tried."""
    refused = met(
        reader, work, lambda place: place.write_bytes(changed(place.read_bytes(), changes))
    )
    assert changes or refused == (reader == "training state")  # another config's


OF_TENSORS = {
    "tensors of an upload": ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight"),
    "truth": ("images", "mask", "permutation"),
    "weights": ("patch_embed.proj.weight", "pos_embed", "cls_token"),
    "checkpoint": ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight"),
    "checkpoint of the authors": ("pos_embed.weight",),
    "prior": ("mean", "frequencies", "spectrum", "patch_mean", "patch_covariance"),
}


@pytest.mark.parametrize("reader", OF_TENSORS)
def test_every_reader_of_tensors_meets_other_shapes_and_types(work: Path, reader: str) -> None:
    """Headers that lie are tried once, of the reader that all have (tests/models)."""
    changes = tensor_changes(*OF_TENSORS[reader])
    assert sum(met(reader, work, with_tensors(change)) for change in changes) > 10
