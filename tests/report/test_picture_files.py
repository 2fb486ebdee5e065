"""Pictures as files: what they hold, what they are called, and what of an earlier report goes."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mjp_privacy.cli import main
from mjp_privacy.core.text import formula_free
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report import pictures as picture_files
from mjp_privacy.report.lines import Line
from mjp_privacy.report.pictures import COLUMNS, LONGEST, UniqueNames, pixels, write_pictures
from mjp_privacy.report.runs import load_runs
from tests.helpers import runs
from tests.helpers.report_rows import add_pictures, cell, image_id, image_rows, write_rows
from tests.helpers.report_rows import write_pictures as store_pictures

HOSTILE = ["../../etc/passwd", "/abs", "..", ".", "", "CON", "nul.txt", "a\\..\\b", "-rf", ".hid"]
HOSTILE += ["猫", "犬", "é", "e\N{COMBINING ACUTE ACCENT}", "A", "a", "x" * 500, "x" * 501, "a\0b"]
HOSTILE += [
    "original",
    "fed",
    "index.csv",
    "=1+1",
    "line\nbreak",
    "\ud800",
    "<script>",
    "a b",
    "a_b",
]


def run_of(folder: Path, cells: list[dict[str, Any]], images: Mapping[str, float]) -> list[Line]:
    """A run in which every cell has these images, with their PSNR."""
    store = RunStore(folder)
    store.write_cells(cells)
    for entry in cells:
        rows = [row for name, value in images.items() for row in image_rows(entry, name, value)]
        write_rows(store, entry, rows)
        store_pictures(store, entry, images)
    return list(load_runs([folder]).lines)


def named(lines: list[Line], name: str = "plain") -> dict[int, str]:
    return {line.number: name for line in lines}


def index(folder: Path) -> list[dict[str, str]]:
    with (folder / "index.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def files(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in paths}


# what they hold -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run: APRIL on plain and shuffled images, whose pictures are not exact."""
    root = tmp_path_factory.mktemp("pictures")
    grid = [{"models": ["MJP"], "settings": ["a", "b", "c"], "gammas": [0.5]}]
    config = runs.tiny(models={"MJP": runs.MJP}, grid=grid)
    runs.attack(runs.photographs(root / "images", 4), root / "run", config)
    return root / "run"


@pytest.mark.parametrize(("setting", "reference"), [("a", "original"), ("b", "fed"), ("c", "fed")])
def test_mjp_score_gives_the_scores_of_the_run(
    attacked: Path, tmp_path: Path, setting: str, reference: str, capsys: Any
) -> None:
    """In (c), scored against `original`; `fed` must then give other figures."""
    lines = [line for line in load_runs([attacked]).lines if line.cell.setting == setting]
    (line,) = lines
    write_pictures(lines, [], tmp_path, client_names=named(lines), all_images=True)
    right = "original" if setting == "c" else reference
    folders = [tmp_path / "plain" / right, tmp_path / "plain" / "april"]
    found = scores(folders[0], folders[1], tmp_path / "scores.csv")
    by_file = {Path(row["file"]).name: row for row in index(tmp_path) if row["line"]}
    stored = {
        metric: line.scored(metric, "paper") for metric in ("psnr", "mse", "ssim", "fft2d", "lpips")
    }
    assert len(found) == 4 * 5
    for (file, metric), value in found.items():
        expected = stored[metric][by_file[file]["image_id"]]
        assert value == pytest.approx(expected, abs=1e-6), (file, metric)
        if metric == "psnr":
            assert float(by_file[file]["psnr_paper"]) == expected
            assert by_file[file]["reference"] == f"plain/{right}/{file}"
    if setting == "c":
        wrong = scores(tmp_path / "plain" / "fed", folders[1], tmp_path / "other.csv")
        assert wrong != found


def scores(reference: Path, reconstruction: Path, out: Path) -> dict[tuple[str, str], float]:
    """What `mjp score` says in the paper's variant, by file and metric."""
    argv = ["score", "--reference", str(reference), "--reconstruction", str(reconstruction)]
    assert main([*argv, "--out", str(out), "--device", "cpu"]) == 0
    with out.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] == "paper"]
    return {(row["image"], row["metric"]): float(row["value"]) for row in rows}


def test_bytes_are_rounded_half_to_even_and_missing_is_grey() -> None:
    values = [0.0, 0.5 / 255, 1.5 / 255, 1.0, 2.0, -1.0, math.nan, math.inf]
    shown = pixels(torch.tensor(values, dtype=torch.float64).reshape(1, 2, 4))
    assert shown.shape == (2, 4, 3)
    assert shown[..., 0].ravel().tolist() == [0, 0, 2, 255, 255, 0, 128, 255]
    assert np.array_equal(shown[..., 0], shown[..., 2])


def test_only_the_images_asked_for_are_written(tmp_path: Path) -> None:
    lines = run_of(tmp_path / "run", [cell("x")], {"a": 20.0, "b": 21.0, "c": 22.0})
    asked = ["b", "not there"]
    written = write_pictures(lines, asked, tmp_path / "out", client_names=named(lines))
    assert {path.relative_to(tmp_path / "out").as_posix() for path in written} == {
        *("plain/april/b.png", "plain/original/b.png", "plain/fed/b.png", "index.csv")
    }
    assert files(tmp_path / "out") == {p.relative_to(tmp_path / "out").as_posix() for p in written}
    rows = index(tmp_path / "out")
    assert tuple(rows[0]) == COLUMNS
    assert [(row["attack"], row["line"], row["psnr"]) for row in rows] == [
        *(("original", "", ""), ("fed", "", ""), ("april", "1", "21.0"))
    ]
    write_pictures(lines, [], tmp_path / "out", client_names=named(lines), all_images=True)
    assert len(files(tmp_path / "out")) == 10


def test_lines_without_pictures_or_truth(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run")
    cells = [cell("none"), cell("blind", attack="span")]
    store.write_cells(cells)
    for entry in cells:
        write_rows(store, entry, image_rows(entry, "u/0", 0.0, status="unscored", reason="-"))
    add_pictures(store, "blind", {"images": torch.rand(1, 3, 8, 8)}, ["u/0"])
    lines = list(load_runs([tmp_path / "run"]).lines)
    out = tmp_path / "out"
    assert write_pictures(lines[:1], ["u/0"], out, client_names=named(lines)) == []
    assert not out.exists()
    write_pictures(lines, ["u/0"], out, client_names=named(lines))
    assert files(out) == {"plain/span/u_0.png", "index.csv"}
    (row,) = index(out)
    assert (row["psnr"], row["psnr_paper"], row["reference"]) == ("", "", "")


# what they are called -----------------------------------------------------------------------------


def is_safe(name: str) -> bool:
    kept = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-")
    stem = name.split(".")[0].upper()
    devices = {"CON", "PRN", "AUX", "NUL", *(f"{p}{i}" for p in ("COM", "LPT") for i in range(10))}
    return (
        0 < len(name) <= LONGEST + 4
        and set(name) <= kept
        and name[0] not in ".-"
        and name[-1] != "."
        and ".." not in name
        and stem not in devices
    )


def test_names_are_unique_stable_and_told_by_their_text() -> None:
    names = UniqueNames(taken=("Original",))
    given = [names.of(text) for text in HOSTILE]
    assert len({name.casefold() for name in (*given, "original")}) == len(HOSTILE) + 1
    assert all(is_safe(name) for name in given)
    assert [names.of(text) for text in HOSTILE] == given
    assert UniqueNames().of("MJP γ .27 / ViT") == "MJP_gamma_.27_ViT"
    forged = UniqueNames()
    first, second = forged.of("a b"), forged.of("a_b")
    third = UniqueNames(taken=(first, second)).of("a_b")
    assert len({first, second, third}) == 3


def test_hostile_labels_and_ids_stay_inside(tmp_path: Path) -> None:
    """Every image of every line has a file of its own, and nothing lies outside the folder."""
    texts = [text for text in HOSTILE if text not in ("", "\ud800", "a\0b")]  # not for Parquet
    cells = [cell(f"id{i}", attack=text, model=text) for i, text in enumerate(texts[:9])]
    cells += [cell("same", attack="original", model="A"), cell("again", attack="Fed", model="A")]
    images = dict.fromkeys(texts, 20.0)
    lines = run_of(tmp_path / "run", cells, images)
    names = {line.number: line.cell.model.label for line in lines}
    out = tmp_path / "deep" / "down" / "pictures"
    written = write_pictures(lines, texts, out, client_names=names)
    pictures = [path for path in written if path.suffix == ".png"]
    assert len({str(path).casefold() for path in pictures}) == len(pictures)
    for path in pictures:
        assert all(is_safe(part) for part in path.relative_to(out).parts)
    rows = [row for row in index(out) if row["line"]]
    assert len({(row["line"], row["file"]) for row in rows}) == len(lines) * len(texts)
    assert {row["image_id"] for row in rows} == set(map(formula_free, texts))
    assert {p.name for p in (tmp_path / "deep").rglob("*") if p.is_file()} == {
        *(path.name for path in written)
    }


def test_two_clients_of_one_name_do_not_share_their_originals(tmp_path: Path) -> None:
    """Other models take other crops, so the same image is not the same picture."""
    lines = run_of(tmp_path / "run", [cell("x"), cell("y", model="ViT-S", size=32)], {"a": 20.0})
    write_pictures(lines, ["a"], tmp_path / "out", client_names=named(lines))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"plain", "plain-line002", "index.csv"}
    assert {row["client"] for row in index(tmp_path / "out")} == {"plain"}


# pictures of an earlier report --------------------------------------------------------------------


def test_stale_pictures_go_and_all_else_stays(tmp_path: Path) -> None:
    lines = run_of(tmp_path / "run", [cell("x"), cell("y", attack="span")], {"a": 9.0, "b": 9.5})
    out = tmp_path / "out"
    write_pictures(lines, ["a", "b"], out, client_names=named(lines, "old"))
    (out / "old" / "april" / "mine.png").write_bytes(b"mine")
    (out / "notes.png").write_bytes(b"mine")
    write_pictures(lines[:1], ["b"], out, client_names=named(lines, "new"))
    assert files(out) == {
        *("new/april/b.png", "new/original/b.png", "new/fed/b.png", "index.csv"),
        *("old/april/mine.png", "notes.png"),
    }
    assert not (out / "old" / "span").exists()
    assert write_pictures([], [], out, client_names={}) == []
    assert files(out) == {"old/april/mine.png", "notes.png"}


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
    kept = [tmp_path / "victim.png", tmp_path / "top" / "victim.png", out / "a" / "b" / "c"]
    kept = [
        *kept[:2],
        kept[2] / "victim.png",
        out / "a" / "april" / "notes.txt",
        out / "victim.png",
    ]
    kept += [tmp_path / "else" / "april" / "victim.png", out / ".git" / "x" / "y.png"]
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
    lines = run_of(tmp_path / "run", [cell("x")], names)
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
