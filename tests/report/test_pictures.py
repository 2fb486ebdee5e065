"""Pictures as files and on the page: what they hold, their names, and which are chosen."""

import base64
import csv
import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from mjp_privacy.cli import main
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report import pictures as picture_files
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.lines import Line
from mjp_privacy.report.pictures import (
    COLUMNS,
    LARGEST_SIDE,
    LONGEST,
    SMALL_SIDE,
    data_uri,
    fill_gallery,
    images_in_order,
    pixels,
    unique,
    write_pictures,
)
from mjp_privacy.report.write import write_report
from tests.helpers import runs
from tests.helpers.report_rows import (
    add_pictures,
    cell,
    image_id,
    image_row,
    intact,
    lines_of,
    only_line,
    photograph,
    run_of,
    small_run,
    write_rows,
)
from tests.helpers.report_rows import write_pictures as store_pictures

HOSTILE = ["../../etc/passwd", "/abs", "..", ".", "", "CON", "nul.txt", "a\\..\\b", "-rf", ".hid"]
HOSTILE += ["猫", "犬", "é", "e\N{COMBINING ACUTE ACCENT}", "A", "a", "x" * 500, "x" * 501, "a\0b"]
HOSTILE += ["original", "fed", "index.csv", "=1+1", "line\nbreak", "\ud800", "<script>", "a b"]
HOSTILE += ["a_b"]


def pictured(folder: Path, cells: list[dict[str, Any]], images: Mapping[str, float]) -> list[Line]:
    """A run in which every cell has these images, with their PSNR."""
    store = RunStore(folder)
    store.write_cells(cells)
    for entry in cells:
        write_rows(store, entry, [image_row(name, value) for name, value in images.items()])
        store_pictures(store, entry, images)
    return lines_of(folder)


def named(lines: list[Line], name: str = "plain") -> dict[int, str]:
    return {line.number: name for line in lines}


def index(folder: Path) -> list[dict[str, str]]:
    with (folder / "index.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def files(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in paths}


# what they hold -----------------------------------------------------------------------------------


def test_mjp_score_gives_the_scores_of_the_run(tmp_path: Path) -> None:
    """APRIL on plain and shuffled images, in the paper's variant; in (c) `fed` gives other figures
    than the original."""

    def scores(folder: Path, reference: str) -> dict[tuple[str, str], float]:
        place = folder / "plain"
        argv = ["--reference", str(place / reference), "--reconstruction", str(place / "april")]
        argv += ["--out", str(tmp_path / "scores.csv"), "--device", "cpu"]
        assert main(["score", *argv]) == 0
        rows = pd.read_csv(tmp_path / "scores.csv").query("variant == 'paper'")
        return {(row.image, row.metric): row.value for row in rows.itertuples()}

    grid = [{"models": ["MJP"], "settings": ["a", "b", "c"], "gammas": [0.5]}]
    config = runs.tiny(models={"MJP": runs.MJP}, grid=grid)
    runs.attack(runs.photographs(tmp_path / "images", 4), tmp_path / "run", config)
    for line in lines_of(tmp_path / "run"):
        out, right = tmp_path / line.cell.setting, "fed" if line.cell.setting == "b" else "original"
        write_pictures([line], [], out, client_names=named([line]), all_images=True)
        by_file = {Path(row["file"]).name: row for row in index(out) if row["line"]}
        found = scores(out, right)
        assert len(found) == 4 * 5
        for (file, metric), value in found.items():
            expected = line.scored(metric, "paper")[by_file[file]["image_id"]]
            assert value == pytest.approx(expected, abs=1e-6), (file, metric)
            assert by_file[file]["reference"] == f"plain/{right}/{file}"
        assert (scores(out, "fed") != found) == (line.cell.setting == "c")


def test_bytes_are_rounded_half_to_even_and_missing_is_grey() -> None:
    values = [0.0, 0.5 / 255, 1.5 / 255, 1.0, 2.0, -1.0, math.nan, math.inf]
    shown = pixels(torch.tensor(values, dtype=torch.float64).reshape(1, 2, 4))
    assert shown[..., 0].ravel().tolist() == [0, 0, 2, 255, 255, 0, 128, 255]


def test_lines_without_pictures_or_truth(tmp_path: Path) -> None:
    run_of(tmp_path / "run", (cell("none"), ["unscored"]), (cell("x", attack="span"), ["unscored"]))
    add_pictures(RunStore(tmp_path / "run"), "x", {"images": torch.rand(1, 3, 8, 8)}, [image_id(0)])
    lines, out = lines_of(tmp_path / "run"), tmp_path / "out"
    assert write_pictures(lines[:1], [image_id(0)], out, client_names=named(lines)) == []
    assert not out.exists()
    write_pictures(lines, [image_id(0)], out, client_names=named(lines))
    (row,) = index(out)
    assert files(out) == {row["file"], "index.csv"}
    assert row["reference"] == ""


# what they are called -----------------------------------------------------------------------------


SAFE = re.compile(
    r"(?!.*\.\.)(?!(con|prn|aux|nul|(com|lpt)\d)(\..*)?$)[a-z0-9_+][a-z0-9._+-]*(?<!\.)", re.I
)


def test_names_are_unique_and_told_by_their_text() -> None:
    taken = {"original"}
    given = [unique(text, f"{at}", taken) for at, text in enumerate((*HOSTILE, *HOSTILE))]
    assert len({name.casefold() for name in (*given, "original")}) == 2 * len(HOSTILE) + 1
    assert all(SAFE.fullmatch(name) and len(name) <= LONGEST for name in given)
    assert unique("MJP γ .27 / ViT", "", set()) == "MJP_gamma_.27_ViT"
    taken = {"a_b", "a_b-line002"}
    assert unique("a/b", "line002", taken) not in ("a_b", "a_b-line002")


def test_two_clients_of_one_name_do_not_share_their_originals(tmp_path: Path) -> None:
    """Other models take other crops, so the same image is not the same picture."""
    lines = pictured(tmp_path / "run", [cell("x"), cell("y", model="ViT-S", size=32)], {"a": 20.0})
    write_pictures(lines, ["a"], tmp_path / "out", client_names=named(lines))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"plain", "plain-line002", "index.csv"}


# pictures of an earlier report --------------------------------------------------------------------


def test_only_images_asked_for_are_written_and_stale_ones_go(tmp_path: Path) -> None:
    images = {"a": 20.0, "b": 21.0, "c": 22.0}
    lines = pictured(tmp_path / "run", [cell("x"), cell("y", attack="span")], images)
    out = tmp_path / "out"
    written = write_pictures(lines, ["a", "b"], out, client_names=named(lines, "old"))
    assert files(out) == {path.relative_to(out).as_posix() for path in written}
    listed = [row["file"] for row in index(out)]  # private pictures of both lines once
    assert sorted(listed) == sorted(files(out) - {"index.csv"})
    (out / "old" / "april" / "mine.png").write_bytes(b"mine")
    (out / "notes.png").write_bytes(b"mine")
    write_pictures(lines[:1], ["b", "not there"], out, client_names=named(lines, "new"))
    mine = {"old/april/mine.png", "notes.png"}
    new = {"new/april/b.png", "new/original/b.png", "new/fed/b.png", "index.csv"}
    assert files(out) == new | mine
    rows = [(row["attack"], row["line"]) for row in index(out)]
    assert rows == [("original", ""), ("fed", ""), ("april", "1")]
    assert not (out / "old" / "span").exists()
    write_pictures(lines[:1], [], out, client_names=named(lines), all_images=True)
    assert len(files(out) - mine) == 10
    assert write_pictures([], [], out, client_names={}) == []
    assert files(out) == mine


DAMAGED = {
    "nothing": "",
    "zero byte": "\0",
    "half a line": ",".join(COLUMNS) + "\nplain,april,1,a,plain/april/a.png,\nplain,ap",
    "open quote": ",".join(COLUMNS) + '\n"plain',
    "column twice": ",".join((*COLUMNS, "file")) + "\n",
    "of no report": "file,what\nplain/april/a.png,mine\n",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_list_of_pictures_is_written_anew(kind: str, tmp_path: Path) -> None:
    lines, out = pictured(tmp_path / "run", [cell("x")], {"b": 9.0}), tmp_path / "out"
    picture = out / "plain" / "april" / "a.png"
    picture.parent.mkdir(parents=True)
    picture.touch()
    (out / "index.csv").write_text(DAMAGED[kind])
    write_pictures([], [], out, client_names={})
    assert picture.exists() == (out / "index.csv").exists() == (kind != "half a line")
    write_pictures(lines, ["b"], out, client_names=named(lines))
    assert len(index(out)) == 3


@pytest.mark.parametrize(
    "listed",
    [
        *("../victim.png", "../../victim.png", "a/../../victim.png", "/tmp/x/victim.png"),
        *("link/april/victim.png", "a/april/..", "a/b/c/victim.png", "a/april/notes.txt"),
        *("a\\..\\victim.png", "a/april/\0.png", f"a/b/{'x' * 5000}.png", "", ".git/x/y.png"),
    ],
)
def test_an_index_that_names_other_files_removes_none(tmp_path: Path, listed: str) -> None:
    out = tmp_path / "top" / "out"
    beside = ("victim.png", "top/victim.png", "else/april/victim.png")
    inside = ("a/b/c/victim.png", "a/april/notes.txt", "victim.png", ".git/x/y.png")
    kept = [*(tmp_path / name for name in beside), *(out / name for name in inside)]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"keep")
    (out / "link").symlink_to(tmp_path / "else")
    with (out / "index.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS, restval="")
        rows.writeheader()
        rows.writerow({"file": listed})
    write_pictures([], [], out, client_names={})
    assert all(path.read_bytes() == b"keep" for path in kept)


def test_a_killed_report_leaves_no_picture_unlisted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {image_id(i): 20.0 for i in range(3)}
    lines = pictured(tmp_path / "run", [cell("x")], names)
    out, rounded = tmp_path / "out", picture_files.pixels
    calls: list[int] = []

    def killed(image: torch.Tensor) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return rounded(image)

    monkeypatch.setattr(picture_files, "pixels", killed)
    with pytest.raises(KeyboardInterrupt):
        write_pictures(lines, list(names), out, client_names=named(lines))
    assert len(files(out)) == 6
    monkeypatch.undo()
    write_pictures([], [], out, client_names={})
    assert files(out) == set()


# on the page --------------------------------------------------------------------------------------


def test_images_are_quantiles_of_the_psnr(tmp_path: Path) -> None:
    """21 images: 10 %, 50 % and 90 % first, then the ends, then the rest; without scores the first
    by name."""
    psnr = (*(float(7 * i % 21) for i in range(20)), 20.5)
    line = only_line(small_run(tmp_path, psnr))
    by_score = [image_id(i) for i in np.argsort(psnr, kind="stable")]
    order = list(images_in_order(set(line.images), line))
    assert order[:3] == [(by_score[place], True) for place in (2, 10, 18)]
    assert order[3:5] == [(by_score[0], False), (by_score[20], False)]
    assert sorted(order) == sorted({*order})
    assert {name for name, _ in order} == set(by_score)
    by_name = [(image_id(i), i < 3) for i in range(5)]
    assert list(images_in_order({name for name, _ in by_name}, None)) == by_name


ATTACKS = {
    "april": [9.0, 8.0, 7.0],
    "masked_span": [30.0, 12.0, 20.0],
    "pixel_lattice": [20.0, 25.0, 15.0],
    "rounds": [28.0, 40.0, 50.0],
}


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """April, two attacks on one upload, one on several; all with pictures."""
    folder, shared = tmp_path_factory.mktemp("strip"), {"setting": "c", "gamma": 0.27}
    cells = {name: intact(name, **shared) for name in ATTACKS}
    cells["april"] = cell("april", **shared)
    cells["rounds"] |= {"attack_name": "multi_round", "uploads": 6}
    run_of(folder, *((entry, ATTACKS[name], {"zero_rows": 50.0}) for name, entry in cells.items()))
    for name, entry in cells.items():
        stored = {image_id(i): psnr for i, psnr in enumerate(ATTACKS[name])}
        store_pictures(RunStore(folder), entry, stored)
    return folder


def decoded(uri: str) -> tuple[str, np.ndarray]:
    head, _, data = uri.partition(",")
    with Image.open(io.BytesIO(base64.b64decode(data))) as opened:
        return head, np.asarray(opened.convert("RGB"))


def test_every_line_shows_the_same_images(ladder: Path) -> None:
    contents = read_contents([ladder])
    assert {shown.image_id for shown in contents.gallery.shown} == {image_id(i) for i in range(3)}
    for shown in contents.gallery.shown:
        assert set(shown.lines) == {line.number for line in contents.every_line}
        for line in contents.every_line:
            stored = line.reconstruction(shown.image_id)
            assert stored is not None
            _, drawn = decoded(contents.gallery.pictures[shown.lines[line.number]["made"]])
            np.testing.assert_array_equal(drawn, pixels(stored["images"]))
    (first,) = (shown for shown in contents.gallery.shown if shown.image_id == image_id(1))
    assert first.lines[contents.derived[0].number] == first.lines[3]  # the same picture, kept once


@pytest.mark.parametrize(
    ("sides", "rows"),
    [
        ((32, 32), "1001/0010/0100/1001"),
        ((16, 64), "10010010/01001001"),
        ((64, 16), "10/01/00/10/01/00/10/01"),
    ],
)
def test_a_mask_has_the_rows_of_its_picture(
    tmp_path: Path, sides: tuple[int, int], rows: str
) -> None:
    """Two rows of eight patches are not four of four."""
    folder, mask = small_run(tmp_path, [20.0]), torch.arange(16)[None] % 3 == 0
    tensors = {"images": torch.rand(1, 3, *sides), "mask": mask}
    add_pictures(RunStore(folder), "small", tensors, [image_id(0)])
    (shown,) = read_contents([folder]).gallery.shown
    assert shown.lines[1]["mask"] == rows


def test_a_control_has_pictures_where_no_attack_has(tmp_path: Path) -> None:
    """Then the card's strip has no line by which pictures could be chosen."""
    facts = {"setting": "c", "gamma": 0.5}
    control, lost = intact("grey", attack="grey", role="floor", **facts), intact("lost", **facts)
    run_of(tmp_path, (control, [10.0]), (lost, ["failed"]))
    store_pictures(RunStore(tmp_path), control, {image_id(0): 10.0})
    summary = write_report([tmp_path], tmp_path / "report")
    assert [shown.image_id for shown in summary.contents.gallery.shown] == [image_id(0)]
    assert summary.made_nothing


@pytest.mark.parametrize(
    ("bound", "value", "images"),
    [("MOST_IMAGES", 2, 2), ("MOST_PICTURES", 5, 1), ("MOST_BYTES", 1, 1)],
)
def test_a_full_page_takes_no_more(
    ladder: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, images: int
) -> None:
    lines = lines_of(ladder)
    monkeypatch.setattr(picture_files, bound, value)
    assert len(fill_gallery(lines, lines[0]).shown) == images


@pytest.mark.parametrize(
    ("side", "shown"),
    [(SMALL_SIDE, SMALL_SIDE), (SMALL_SIDE + 1, SMALL_SIDE + 1), (384, LARGEST_SIDE)],
)
def test_small_pictures_lose_nothing_and_large_ones_stay_alike(side: int, shown: int) -> None:
    image = photograph(3, side).mul(255).round() / 255
    head, found = decoded(data_uri(image))
    assert head == f"data:image/{'png' if side == SMALL_SIDE else 'webp'};base64"
    assert found.shape == (shown, shown, 3)
    expected = torch.nn.functional.avg_pool2d(image, side // shown).permute(1, 2, 0).numpy()
    assert np.abs(found / 255 - expected).mean() < (1e-6 if side == SMALL_SIDE else 0.02)
