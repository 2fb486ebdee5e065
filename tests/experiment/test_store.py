"""The run folder: whole files only, replaced and ordered as said, and readable when half there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically, write_json
from mjp_privacy.experiment.store import RunStore


def part(values: dict[str, float], status: str = "ok") -> pd.DataFrame:
    """Two rows an image."""
    rows = [
        {
            **{"image_id": image_id, "metric": metric, "variant": "paper"},
            **{"value": value, "status": status},
        }
        for image_id, value in values.items()
        for metric in ("mse", "psnr")
    ]
    return pd.DataFrame(rows, columns=["image_id", "metric", "variant", "value", "status"])


def read(store: RunStore) -> list[tuple[str, float]]:
    """Image and value in stored order, the second metric left out."""
    rows = store.read_rows("cell")
    rows = rows[rows["metric"] == "mse"]
    return list(zip(rows["image_id"], rows["value"], strict=True))


# atomic files -------------------------------------------------------------------------------------


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_atomically(path, fail)
    assert list(path.parent.iterdir()) == []
    write_atomically(path, lambda temporary: temporary.write_text("old"))
    with pytest.raises(RuntimeError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]
    write_atomically(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new"


def test_the_temporary_file_is_in_the_same_folder_and_hidden(tmp_path: Path) -> None:
    seen: list[tuple[Path, int]] = []

    def write(path: Path) -> None:
        path.touch()
        seen.append((path, path.stat().st_ino))

    write_atomically(tmp_path / "00000.parquet", write)
    ((temporary, inode),) = seen
    assert temporary.parent == tmp_path  # a rename across file systems is no rename
    assert temporary.name.startswith(".")
    assert (tmp_path / "00000.parquet").stat().st_ino == inode  # renamed, not copied


def test_json_holds_no_nan_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"γ": 0.27})
    assert path.read_text(encoding="utf-8") == '{\n "γ": 0.27\n}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"gamma": float("nan")})
    assert json.loads(path.read_text()) == {"γ": 0.27}


# rows ---------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path)


def test_rows_of_a_cell_that_has_none_are_empty(store: RunStore) -> None:
    rows = store.read_rows("cell")
    assert rows.empty
    assert {"run_id", "image_id", "value", "status", "label_source"} <= set(rows.columns)


def test_merged_rows_replace_those_of_their_images_in_the_blocks_order(store: RunStore) -> None:
    order = ["c", "a", "b"]
    store.merge_rows("cell", 0, [part({"a": 1.0, "b": 2.0}, "failed")], order)
    assert read(store) == [("a", 1.0), ("b", 2.0)]
    store.merge_rows("cell", 0, [part({}), part({"b": 20.0}), part({"c": 30.0})], order)
    assert read(store) == [("c", 30.0), ("a", 1.0), ("b", 20.0)]
    assert list(store.read_rows("cell")["metric"]) == ["mse", "psnr"] * 3


def test_values_come_back_to_the_last_bit(store: RunStore) -> None:
    values = {"a": np.inf, "b": 1 / 3, "c": np.nan, "d": 5e-324, "e": -0.0}
    store.merge_rows("cell", 0, [part(values)], list(values))
    found = dict(read(store))
    for name, value in values.items():
        assert np.float64(found[name]).tobytes() == np.float64(value).tobytes()


def test_blocks_are_read_in_their_order_and_temporary_files_are_not(store: RunStore) -> None:
    for block in (10, 2, 0):
        store.write_rows("cell", block, part({f"image {block}": float(block)}))
    (store.rows_path("cell", 3).parent / ".00003.parquet.77.tmp").write_bytes(b"half")
    assert [value for _, value in read(store)] == [0.0, 2.0, 10.0]


@pytest.mark.parametrize("failed_block", [0, 1])
def test_of_an_image_in_two_blocks_the_rows_that_did_not_fail_count(
    store: RunStore, failed_block: int
) -> None:
    store.write_rows("cell", failed_block, part({"x": np.nan}, "failed"))
    store.write_rows("cell", 1 - failed_block, part({"x": 1.0, "y": 2.0}))
    assert sorted(read(store)) == [("x", 1.0), ("y", 2.0)]


def test_of_an_image_that_failed_in_two_blocks_the_later_rows_count(store: RunStore) -> None:
    store.write_rows("cell", 0, part({"x": 1.0}, "failed"))
    store.write_rows("cell", 1, part({"x": 2.0}, "failed"))
    assert read(store) == [("x", 2.0)]


# reconstructions ----------------------------------------------------------------------------------


def tensors(*levels: float, mask: bool = True) -> dict[str, torch.Tensor]:
    images = torch.stack([torch.full((3, 4, 4), level) for level in levels])
    found = {"images": images, "target": images, "input": images + 1}  # two share their memory
    return found | ({"mask": images[:, 0, 0] > 0.5} if mask else {})


def test_merged_reconstructions_replace_those_of_their_ids(store: RunStore) -> None:
    store.pictures.put("cell", 0, tensors(0.1, 0.2, 0.3), ["a", "b", "c"])
    store.pictures.put("cell", 0, tensors(0.9, 0.4), ["b", "d"])
    store.pictures.put("cell", 1, tensors(0.5), ["e"])
    found = {name: store.find_reconstruction("cell", name) for name in "abcdef"}
    assert found.pop("f") is None
    levels = dict(zip("abcde", (0.1, 0.9, 0.3, 0.4, 0.5), strict=True))
    for name, stored in found.items():
        assert stored is not None
        expected = {key: value[0] for key, value in tensors(levels[name]).items()}
        assert stored.keys() == expected.keys()
        assert all(stored[key].equal(expected[key]) for key in expected), name


def test_a_tensor_that_an_image_lacks_is_zero_for_it(store: RunStore) -> None:
    """An attack that was edited between two runs may name masks now."""
    store.pictures.put("cell", 0, tensors(0.1, 0.9, mask=False), ["a", "b"])
    store.pictures.put("cell", 0, tensors(0.9), ["b"])
    masks = [store.find_reconstruction("cell", name)["mask"].any() for name in "ab"]  # type: ignore[index]
    assert masks == [False, True]
    store.pictures.put("cell", 0, tensors(0.3, 0.4, mask=False), ["a", "b"])
    assert "mask" not in store.find_reconstruction("cell", "a")  # type: ignore[operator]


def test_dropped_images_leave_no_row_and_no_picture(store: RunStore) -> None:
    store.write_rows("cell", 0, part({"a": 1.0, "b": 2.0}))
    store.pictures.put("cell", 0, tensors(0.1, 0.2), ["a", "b"])
    for dropped, left in ((["a", "other"], ["b"]), (["b"], [])):
        store.drop_images("cell", 0, dropped)
        assert [name for name, _ in read(store)] == left
        assert store.reconstructed("cell") == left
    store.drop_images("cell", 0, ["a"])  # no file any more
    assert not store.reconstruction_path("cell", 0).exists()


def test_reconstructions_keep_type_and_every_bit(store: RunStore) -> None:
    images = torch.rand(2, 3, 8, 8).transpose(2, 3)  # not contiguous
    order = torch.arange(4).repeat(2, 1)
    store.write_reconstructions("cell", 0, {"images": images, "permutation": order}, ["a", "b"])
    found = store.find_reconstruction("cell", "b")
    assert found is not None
    assert found["images"].equal(images[1])
    assert found["permutation"].dtype == torch.int64


def test_a_cell_without_reconstructions_has_none(store: RunStore) -> None:
    assert store.find_reconstruction("cell", "a") is None


# cells, images, timings ---------------------------------------------------------------------------


def entry(key: str, **facts: Any) -> dict[str, Any]:
    """What every entry has, and these facts."""
    needed = {"model": "m", "setting": "a", "gamma": 0.0, "attack": "x", "dtype": "float32"}
    return {"run_id": key, "cell_key": key, **needed, "seed": 0, "status": "ok", **facts}


def test_cells_come_in_the_order_planned_and_replace_those_of_their_key(store: RunStore) -> None:
    planned = [entry("a", n=0), entry("b", n=0), entry("c", n=0)]
    store.merge_cells([], planned)
    store.merge_cells([entry("c", n=1), entry("a", n=1)], planned)
    found = [(cell["cell_key"], cell["n"]) for cell in store.read_cells()]
    assert found == [("a", 1), ("b", 0), ("c", 1)]
    store.merge_cells([entry("d", n=2)], [entry("d", n=0), entry("c", n=0)])
    found = [(cell["cell_key"], cell["n"]) for cell in store.read_cells()]
    assert found == [("d", 2), ("c", 1), ("a", 1), ("b", 0)]


def test_a_folder_that_is_no_run(store: RunStore) -> None:
    with pytest.raises(UserError, match=r"is not a run folder: expected cells\.json"):
        store.read_cells()


TWICE = json.dumps({"cells": [entry("a"), entry("b"), entry("a")]})
WITHOUT = json.dumps({"cells": [{"cell_key": "a"}]})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": []}', "null", '"x"', TWICE, WITHOUT])
def test_a_damaged_list_of_cells(store: RunStore, content: str) -> None:
    path = store.root / "cells.json"
    path.write_text(content)
    with pytest.raises(
        UserError, match=r"cells\.json.*expected the list of a run.s cells.*Run the attack again"
    ):
        store.read_cells()
    store.merge_cells([entry("a")], [entry("a")])  # which mends it
    assert store.read_cells() == [entry("a")]


def test_images_keep_names_that_look_like_numbers_or_nothing(store: RunStore) -> None:
    ids = ["001", "NA", "nan", 'a,"b".png', "line\nbreak.png", "1e5", "ü.png", " x"]
    digest = "1" * 32 + "e" + "5" * 31  # reads as a number, too
    table = pd.DataFrame(
        {
            "image_id": ids,
            "label": range(len(ids)),
            "label_source": "csv",
            "sha256": digest,
            "pixel_sha256": digest,
            "status": "ok",
            "reason": "",
        }
    )
    store.write_images(table)
    found = store.read_images()
    assert list(found["image_id"]) == ids
    assert list(found["label"]) == list(range(len(ids)))
    assert set(found["sha256"]) == set(found["pixel_sha256"]) == {digest}
    assert set(found["reason"]) == {""}


def test_images_without_labels_stay_without(store: RunStore) -> None:
    assert store.read_images().empty
    table = {"image_id": ["a"], "label": [None], "label_source": ["none"], "sha256": ["x"]}
    store.write_images(pd.DataFrame(table | {"pixel_sha256": "y", "status": "ok", "reason": ""}))
    assert store.read_images()["label"].isna().all()


def test_a_timing_cut_off_by_a_kill_costs_that_line_alone(store: RunStore) -> None:
    assert store.read_timings().empty
    store.append_timing({"stage": "attack", "seconds": 1.0})
    with (store.root / "timings.jsonl").open("a") as file:
        file.write('{"stage": "score", "sec')
    assert list(store.read_timings()["seconds"]) == [1.0]
    store.append_timing({"stage": "attack", "seconds": 2.0})
    store.append_timing({"stage": "attack", "seconds": 3.0})
    assert list(store.read_timings()["seconds"]) == [1.0, 2.0, 3.0]


def test_images_are_packed_without_loss() -> None:
    from mjp_privacy.experiment.packing import pack, unpack

    plain = torch.randint(0, 256, (3, 3, 8, 8)).float() / 255
    given = {"plain": plain, "input": plain.flip(0), "images": torch.rand(3, 3, 8, 8)}
    for target in (plain, plain.flip(0), torch.rand(3, 3, 8, 8)):
        packed, metadata = pack({**given, "target": target, "mask": torch.ones(3, 4).bool()})
        assert packed["plain"].dtype == packed["input"].dtype == torch.uint8
        assert packed["images"].dtype == torch.float32
        found = unpack(packed, metadata)
        assert found.keys() == {"plain", "input", "images", "target", "mask"}
        assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
        assert torch.equal(found["target"], target)
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack({"plain": every.float() / 255})[0]["plain"], every)


def test_a_second_process_is_refused_and_leftovers_are_swept(tmp_path: Path) -> None:
    from mjp_privacy.core.files import lock

    leftover = tmp_path / "rows" / "x" / ".00000.parquet.1.tmp"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    with lock(tmp_path):
        assert not leftover.exists()
        other = pytest.raises(UserError, match="Another process is working in")
        with other, lock(tmp_path):
            pass
    with lock(tmp_path):
        pass


def test_a_folder_whose_name_looks_like_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run:1/rows/… would be one to pyarrow: a scheme and a path."""
    monkeypatch.chdir(tmp_path)
    store = RunStore(Path("run:1"))
    assert store.root == tmp_path / "run:1"
    assert RunStore(Path("run/a:1")).root == Path("run/a:1")
    rows = pd.DataFrame({"image_id": ["a"], "run_id": ["cell"]})
    store.write_rows("cell", 0, rows)
    assert RunStore(Path("run:1")).read_rows("cell").equals(rows)
