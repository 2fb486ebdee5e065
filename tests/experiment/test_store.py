"""A run folder: pictures bit for bit, readers in mid-run, damage, other formats, hostile files; and
whatever happens to it, nothing that was written is lost or read wrong."""

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from mjp_privacy import cli
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment import store as store_module
from mjp_privacy.experiment.block_file import by_image
from mjp_privacy.experiment.store import CONVERT, RunStore, StoredFile, digest_of, stored_files
from mjp_privacy.report.lines import read_frame
from tests.helpers.runs import attack, flip, one_cell, photographs

CELL = {"run_id": "c1", "model": "ViT", "setting": "a", "gamma": 0.0, "attack": "april"}
CELL |= {"dtype": "float32", "seed": 0, "status": "ok", "notes": ["one", "two"], "round": None}


def rows_of(images: Mapping[str, int], status: str = "ok") -> pd.DataFrame:
    """A row for each image with the score of its number; what is not done has none."""
    numbers = pd.Series(list(images.values()), dtype=float)
    done = status == "ok"
    columns: dict[str, Any] = {
        "image_id": list(images),
        "label": pd.array([3] * len(images), dtype="Int64"),
        "label_source": "file",
        "group": list(images),
        "code": "c0ffee",
        "status": status,
        "reason": "" if done else "it broke",
        "psnr.standard": numbers if done else np.nan,
    }
    return pd.DataFrame(columns).assign(**{"stage_seconds.attack": 0.25})


def tensors_of(numbers: Sequence[int]) -> dict[str, Tensor]:
    """Every kind of picture that a run stores, by the numbers of their images."""
    number = torch.tensor(list(numbers), dtype=torch.int64)
    plain = ((number[:, None] + torch.arange(12)) % 256).float().div(255).reshape(-1, 3, 2, 2)
    return {
        "images": (number[:, None] / 1000 + torch.arange(12) / 77).float().reshape(-1, 3, 2, 2),
        "target": plain.clone(),
        "plain": plain,
        "input": plain.float() * 0.9 + 1e-3,
        "mask": (number[:, None] >> torch.arange(4)) % 2 == 1,
        "permutation": (number[:, None] + torch.arange(4)) % 4,
    }


def write(
    store: RunStore,
    images: Mapping[str, int],
    *,
    block: int = 0,
    cell: str = "c1",
    line: str | None = None,
    status: str = "ok",
) -> StoredFile:
    """Write images of a block by their numbers, with pictures where they were attacked; line: the
    key of the table's line that the cell belongs to, in place of its own."""
    facts = {**CELL, "run_id": cell, "cell_key": line or cell}
    about = {"cell": facts, "code": {"c0ffee": {"april.py": "1f"}}}
    done = images if status == "ok" else {}
    pictures = by_image(list(done), tensors_of(list(done.values())))
    path = store.write(cell, block, rows_of(images, status).assign(run_id=cell), pictures, about)
    return next(file for file in stored_files(path.parent) if file.path == path)


def scores(store: RunStore, cell: str = "c1") -> dict[str, float]:
    """What a reader sees of each image; -1: it was not done."""
    rows = store.read(cell)
    if "psnr.standard" not in rows:
        return dict.fromkeys(rows["image_id"], -1.0)
    return dict(
        zip(rows["image_id"], rows["psnr.standard"].fillna(-1.0).astype(float), strict=True)
    )


def same_pictures(found: Mapping[str, Tensor] | None, number: int) -> bool:
    """Whether these are the pictures of the image of this number, bit for bit."""
    if number < 0 or found is None:
        return number < 0 and found is None
    wanted = {name: tensor[0] for name, tensor in tensors_of([number]).items()}
    return wanted.keys() == found.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and found[name].numpy().tobytes() == tensor.numpy().tobytes()
        for name, tensor in wanted.items()
    )


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
    """`Folder` has those of every kind."""
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


# whatever happens ---------------------------------------------------------------------------------
#
# A model in memory knows which number each image was last written with. Files are written, written
# again with other images, left half by a kill, flipped, dropped, compacted and set aside. What is
# in no damaged file must be read as the model has it; what was in one may be older or missing, and
# the file must be named.

IMAGES = ("a.png", "class_1/b.png", "c:d", "e~1", "nan", "ü\n")
Key = tuple[str, str]  # a cell and an image

cells = st.sampled_from(["c1", "c2"])


class Folder(RuleBasedStateMachine):
    """A run folder and what should be in it."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp()) / "run"
        self.store = RunStore(self.root)
        self.number = 0
        self.sure: dict[Key, int] = {}  # what must be read; -1: not done
        self.open: set[Key] = set()  # what was in a damaged file: anything that was ever written
        self.ever: dict[Key, set[int]] = {}
        self.flipped: set[Path] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.root.parent)

    # what happens -------------------------------------------------------------------------------

    @rule(
        cell=cells,
        block=st.integers(0, 2),
        images=st.sets(st.sampled_from(IMAGES), min_size=1),
        status=st.sampled_from(["ok", "ok", "failed"]),
    )
    def write(self, cell: str, block: int, images: set[str], status: str) -> None:
        numbers = {image: self.number + at for at, image in enumerate(sorted(images))}
        self.number += len(images)
        write(self.store, numbers, block=block, cell=cell, status=status)
        for image, number in numbers.items():
            self.sure[cell, image] = number if status == "ok" else -1
            self.ever.setdefault((cell, image), set()).add(self.sure[cell, image])
            self.open.discard((cell, image))
        self._forget_what_is_gone()

    @rule(cell=cells, share=st.floats(0, 1))
    def killed_while_writing(self, cell: str, share: float) -> None:
        known = self.store.files(cell)
        content = known[-1].path.read_bytes() if known else bytes(999)
        self.store.folder(cell).mkdir(parents=True, exist_ok=True)
        half = self.store.folder(cell) / f".00000.{len(known) + 1:04d}.parquet.12@here.tmp"
        half.write_bytes(content[: int(share * len(content))])

    @precondition(lambda self: self._files())
    @rule(at=st.integers(0, 999), share=st.floats(0, 1), bit=st.integers(0, 7))
    def flip(self, at: int, share: float, bit: int) -> None:
        path = self._files()[at % len(self._files())]
        self._no_longer_sure(path)
        flip(path, share, bit)
        self.flipped.add(path)

    @precondition(lambda self: self._files())
    @rule(at=st.integers(0, 999))
    def drop(self, at: int) -> None:
        path = self._files()[at % len(self._files())]
        self._no_longer_sure(path)
        path.unlink()
        self._forget_what_is_gone()

    @rule(cell=cells, fewest=st.sampled_from([1, 3, 50]))
    def compact(self, cell: str, fewest: int) -> None:
        damaged = any(path.parent.name == cell for path in self.flipped)
        try:
            self.store.compact(cell, fewest)
        except (ValueError, UserError):
            assert damaged, "a whole cell could not be compacted"
            return
        if not damaged and not any(key[0] == cell for key in self.open):
            contents = RunStore(self.root).cell(cell).contents
            inside = [name for content in contents for name in content.ids]
            assert len(inside) == len({*inside}), "an image stands in two files"

    @rule()
    def open_again(self) -> None:
        self.store = RunStore(self.root)

    @rule()
    def set_aside(self) -> None:
        self.store.set_aside(self.store.damaged())
        self.flipped.clear()
        assert self.store.damaged() == []

    # what must be -------------------------------------------------------------------------------

    @invariant()
    def damage_is_named(self) -> None:
        assert {*self.store.damaged()} == self.flipped

    @invariant()
    def nothing_is_lost_or_wrong(self) -> None:
        whole = self.store.without(self.flipped) if self.flipped else self.store
        for cell in ("c1", "c2"):
            found = scores(whole, cell)
            wanted = {image: value for (of, image), value in self.sure.items() if of == cell}
            assert {image: found[image] for image in wanted} == wanted
            for image in found.keys() - wanted.keys():
                assert (cell, image) in self.open
                assert found[image] in self.ever[cell, image]
            done = {image for image, value in found.items() if value >= 0}
            assert {*whole.pictured(cell)} == {*whole.finished(cell)} == done
            for image, value in found.items():
                assert same_pictures(whole.pictures(cell, image), int(value))

    # the model ----------------------------------------------------------------------------------

    def _files(self) -> list[Path]:
        """Files of rows that are not damaged yet."""
        return [
            file.path
            for cell in self.store.stored_cells()
            for file in stored_files(self.store.folder(cell))
            if file.path not in self.flipped
        ]

    def _no_longer_sure(self, path: Path) -> None:
        """The images that count in this file may be older or missing from now on."""
        cell = path.parent.name
        rows = self.store.without(self.flipped).cell(cell)
        at = [file.path for file in rows.files].index(path)
        for image in (name for name, (place, _) in rows.place.items() if place == at):
            self.sure.pop((cell, image), None)
            self.open.add((cell, image))

    def _forget_what_is_gone(self) -> None:
        """Damaged files that a later one replaced need no mending."""
        self.flipped = {path for path in self.flipped if path.exists()}


TestFolder = Folder.TestCase
TestFolder.settings = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
