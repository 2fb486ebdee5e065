"""A run folder: pictures bit for bit, readers in mid-run, damage, other formats, hostile files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mjp_privacy import cli
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment import store as store_module
from mjp_privacy.experiment.block_file import by_image
from mjp_privacy.experiment.store import CONVERT, RunStore, digest_of, stored_files
from mjp_privacy.report.lines import read_frame
from tests.helpers.runs import attack, flip, one_cell, photographs
from tests.store.material import CELL, rows_of, same_pictures, scores, tensors_of, write
from tools import convert_run

OLD_RUN = Path(__file__).parents[1] / "golden" / "oracle" / "old_run.zip"


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """Its name looks like an address."""
    return RunStore(tmp_path / "s3:run b'c")


def renamed(path: Path, make: Callable[[Path], object]) -> Path:
    """Another content for a file, which gets the name that fits it."""
    path.unlink()
    make(path)
    start, attempt, _, ending = path.name.split(".")
    return path.rename(path.with_name(f"{start}.{attempt}.{digest_of(path)}.{ending}"))


# rows and pictures --------------------------------------------------------------------------------


def test_pictures_come_back_bit_for_bit_and_small(store: RunStore) -> None:
    """test_machine.py has those of every kind."""
    assert scores(store) == store.finished("c1") == {}
    path = write(store, {"a": 5, "b": 700}).path
    assert store.pictures("c1", "c") is None
    assert pq.read_schema(path).field("target").metadata[b"same"] == b"plain"
    assert pq.read_schema(path).field("images").type == pa.binary(48)
    plain = torch.tensor([0.0, -0.0, float("nan"), 1 + 1e-7, 2.0, -1.0])
    pictures = {"images": plain, "plain": plain, "target": plain + 0.0}
    store.write("c2", 0, rows_of({"a": 1}), {"a": pictures})
    found = store.pictures("c2", "a")
    assert found is not None
    for name, tensor in pictures.items():
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes()


def test_rows_whose_strings_are_those_of_pandas_3_are_read(store: RunStore) -> None:
    with pd.option_context("future.infer_string", True):
        content = pq.read_schema(write(store, {"a": 1}).path)
    assert content.field("image_id").type == pa.string()
    assert scores(store) == {"a": 1}


def test_files_of_other_columns_are_read_in_order_compacted_together_and_full_ones_stay(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {f"{block}": -1.0 if block == 3 else float(block) for block in range(8)}
    for block in (5, 0, 7, 1, 2, 3, 4, 6):
        status = "failed" if block == 3 else "ok"
        path = write(store, {f"{block}": block}, block=block, status=status).path
    rows = rows_of({"x": 9}).assign(**{"once.diagnostic": 2.5, "psnr.standard": 5e-324})
    store.write("c1", 9, rows, by_image(["x"], tensors_of([9])))
    assert store.read("c1")["image_id"].tolist() == [*numbers, "x"]
    assert store.read("c1", ["image_id", "no such"]).columns.tolist() == ["image_id"]
    monkeypatch.setattr(store_module, "FULL", 3 * path.stat().st_size)
    assert store.compact("c1", fewest_files=5) == 9
    assert 3 <= len(store.files("c1")) <= 5  # with pictures and without
    assert scores(store) == numbers | {"x": 5e-324}
    assert store.read("c1")["once.diagnostic"].dropna().tolist() == [2.5]
    assert {"c0ffee": {"april.py": "1f"}} in [about["code"] for about in store.about("c1")]
    monkeypatch.setattr(store_module, "FULL", 1000)
    assert store.compact("c1", fewest_files=1) == 0  # they are full


def test_readers_in_mid_run_see_whole_states(store: RunStore) -> None:
    """While blocks are written again and compacted, four threads read with stores of their own:
    every image is there, its scores and pictures are of a number that it had."""
    images, latest = [f"{at}" for at in range(12)], 0

    def write_next() -> None:
        nonlocal latest
        latest += 1
        first = 3 * (latest % 4)
        write(store, dict.fromkeys(images[first : first + 3], latest), block=latest % 4)
        store.write_cells([CELL])
        if latest % 5 == 0:
            store.compact("c1", fewest_files=1)

    def look(thread: int) -> None:
        own = RunStore(store.root)
        for turn in range(25):
            begun, known = latest, scores(own)
            shown = own.pictures("c1", images[(thread + turn) % 12])
            assert [cell["run_id"] for cell in own.read_cells()] == ["c1"]
            assert own.damaged() == []
            assert len(own.about("c1")) >= 1
            assert len(read_frame(own, "c1")) == 12
            assert {*known} == {*images}
            assert all(begun - 4 <= value <= latest for value in known.values())
            assert shown is not None
            assert same_pictures(shown, round(float(shown["images"].flatten()[0]) * 1000))

    for _ in range(4):
        write_next()
    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(look, thread) for thread in range(4)]
        while not all(reader.done() for reader in readers):
            write_next()
    for reader in readers:
        reader.result()


# cells --------------------------------------------------------------------------------------------


def test_cells_come_back_exactly(store: RunStore) -> None:
    cells: list[dict[str, Any]] = [
        {**CELL, "dal_lambda": None, "paper_row": {"model": "DeiT-S"}, "mean": [0.5, 0.25]},
        {**CELL, "run_id": "c2", "gamma": 1, "round": 3, "other": "x", "mean": []},
        {**CELL, "run_id": "c3", "round": "last", "other": 1, "paper_row": None},
    ]
    store.write_cells(cells[:1])
    store.write_cells(cells)
    assert store.read_cells() == cells
    file, copy = stored_files(store.root)
    assert file.path.read_bytes() == copy.path.read_bytes()
    assert pq.read_table(file.path)["attack"].to_pylist() == ["april"] * 3


@pytest.mark.parametrize("run_id", ["a/b", None, "no model"])
def test_a_cell_that_lacks_something_or_whose_name_is_a_path(store: RunStore, run_id: Any) -> None:
    kept = {n: v for n, v in CELL.items() if (n, run_id) != ("model", "no model")}
    store.write_cells([CELL, {**kept, "run_id": run_id}])
    with pytest.raises(UserError, match="cell 1"):
        store.read_cells()
    images = photographs(store.root.parent / "images", 1)
    with pytest.raises(UserError, match="cell 1"):  # it is no new folder
        attack(images, store.root, one_cell())


# damage -------------------------------------------------------------------------------------------


def test_what_rots_in_mid_run_is_noticed_by_whoever_reads_it(store: RunStore) -> None:
    """Without a look at the digests: pages have checksums of their own."""
    path = write(store, {str(at): at for at in range(40)}).path
    content, noticed = path.read_bytes(), 0
    pages = int.from_bytes(content[-8:-4], "little")
    for at in range(60):
        own = RunStore(store.root)
        place = 4 + at * (len(content) - pages - 12) // 60
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        noticed += 1
        with contextlib.suppress(UserError):
            assert scores(own) == {str(n): float(n) for n in range(40)}
            assert all(same_pictures(own.pictures("c1", str(n)), n) for n in (0, 39))
            noticed -= 1
    assert noticed > 40


def test_what_cannot_be_read_now_is_not_damaged(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = write(store, {"a": 1}).path, Path.open

    def stale(self: Path, *arguments: Any, **named: Any) -> Any:
        if self == path:
            raise OSError(5, "input/output error")
        return opened(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", stale)
    with pytest.raises(UserError, match=path.name):
        store.damaged()


@pytest.mark.parametrize(
    "kind", ["garbage", "folder", "pipe", "link to nowhere", "of another cell"]
)
def test_what_is_no_file_of_the_cell_is_named(store: RunStore, kind: str) -> None:
    write(store, {"a": 1})
    path = store.folder("c1") / f"00001.0002.{'0' * 16}.parquet"
    if kind == "garbage":
        path = renamed(write(store, {"b": 1}, block=1).path, lambda to: to.write_bytes(b"PAR1" * 9))
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "of another cell":
        path = Path(shutil.move(write(store, {"b": 1}, cell="c2", block=1).path, path.parent))
    else:
        path.symlink_to("nowhere")
    if kind != "garbage":
        assert store.damaged() == [path]
    with pytest.raises(UserError, match=path.name):
        store.read("c1")
    assert scores(store.without([path])) == {"a": 1.0}


HOSTILE: list[dict[str, Any]] = [
    *({"image_id": ids} for ids in (["a", "a"], ["a", None], [1, 2])),
    {"psnr.standard": ["1", "2"]},
    *({"status": words} for words in (["ok", "splendid"], None)),
    {"block": ["0", "1"]},
    {"label": ["x", "y"]},
]


@pytest.mark.parametrize("changes", HOSTILE, ids=str)
def test_hostile_values_are_refused_in_one_line(store: RunStore, changes: dict[str, Any]) -> None:
    """Of a file by another hand: its columns are changed, its name is right."""
    write(store, {"c": 1}, block=1)
    path = write(store, {"a": 1, "b": 2}).path
    [(name, values)] = changes.items()
    table = pq.read_table(path)
    place = table.column_names.index(name)
    table = table.remove_column(place)
    table = table if values is None else table.add_column(place, name, pa.array(values))
    path = renamed(path, lambda to: pq.write_table(table, to))
    with pytest.raises(UserError, match="c1" if "label" in changes else path.name) as refused:
        store.read("c1")
    assert "\n" not in str(refused.value)
    assert scores(store.without([path])) == {"c": 1.0}


# places -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True])
def test_an_old_folder_is_refused_and_the_converter_named(
    tmp_path: Path, lost: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    zipfile.ZipFile(OLD_RUN).extractall(tmp_path)
    if lost:
        (tmp_path / "cells.json").unlink()
    words = ["demo", "--out", str(tmp_path), "--limit", "1", "--device", "cpu"]
    assert cli.main(["attack", *words]) == 2
    [said] = capsys.readouterr().err.strip().splitlines()
    assert CONVERT in said
    assert str(tmp_path) in said


# tools/convert_run.py: an older run folder, whole or damaged, becomes one of now ------------------


@pytest.fixture
def old(tmp_path: Path) -> Path:
    zipfile.ZipFile(OLD_RUN).extractall(tmp_path / "old")
    return tmp_path / "old"


def test_what_stands_in_it(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values and pictures are compared with a run of now in tests/golden/test_oracle.py."""
    new = RunStore(tmp_path / "new")
    assert convert_run.main([str(old), str(new.root)]) == 0
    assert capsys.readouterr().err == ""
    cells = json.loads((old / "cells.json").read_text())["cells"]
    assert new.read_cells() == cells
    assert new.damaged() == []
    assert new.stored_cells() == sorted(path.name for path in (old / "rows").iterdir())
    codes = json.loads((old / "code.json").read_text())
    for cell in cells:
        for about in new.about(cell["run_id"]):
            assert about["cell"] == cell
            assert about["made_with"]["torch"]
            assert all(codes[digest] == files for digest, files in about["code"].items())
    assert (new.root / "experiments" / "old_run.yaml").is_file()


@pytest.mark.parametrize("kind", ["rows/*/00000.parquet", "reconstructions/*/*", "images.csv"])
def test_what_is_damaged_is_left_out_and_named(
    old: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sorted(old.glob(kind))[0]
    flip(path, 0.6)
    new = RunStore(tmp_path / "new")
    assert convert_run.main([str(old), str(new.root)]) == 3
    assert path.relative_to(old).as_posix() in capsys.readouterr().err
    if path.suffix != ".csv":
        assert len(new.read(path.parent.name)) == 1  # of the other block
        assert new.pictured(path.parent.name) == []
