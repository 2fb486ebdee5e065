"""Stored tensors as pictures, and the scores and names beside them."""

import math
from pathlib import Path

import pytest
import torch

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.pictures.pixels import picture, psnr_text, shorten
from mjp_privacy.report.write import write_report
from tests.helpers.report_rows import cell, image_rows, write_pictures, write_rows


def test_a_run_without_reconstructions_has_no_pictures(run: Path, tmp_path: Path) -> None:
    stale = tmp_path / "out" / "figures" / "line_007_of_an_earlier_report.png"
    stale.parent.mkdir(parents=True)
    stale.touch()
    for name in ("strip.png", "rounds.png", "tradeoff.svg", "mine.png"):
        stale.with_name(name).touch()
    summary = write_report([run], tmp_path / "out")
    assert [path.name for path in summary.files if path.suffix == ".png"] == []
    charts = {path.name for path in summary.files if path.suffix == ".svg"}
    left = {path.name for path in stale.parent.iterdir()}
    assert left == {"mine.png", *charts}
    assert "tradeoff.svg" not in charts


def test_a_run_without_a_score_has_no_figures(tmp_path: Path) -> None:
    RunStore(tmp_path / "run").write_cells([cell("x", status="unsupported", reason="D < N + 1")])
    summary = write_report([tmp_path / "run"], tmp_path / "out")
    names = {path.relative_to(tmp_path / "out").as_posix() for path in summary.files}
    assert names - {"pictures/index.csv"} == {
        *("index.html", "table.md", "table.tex", "table.csv", "samples.csv")
    }
    assert not summary.any_failed


def test_one_image_and_odd_labels_can_be_drawn(tmp_path: Path) -> None:
    """Mathematics in a label is text; an id may hold anything, and makes no path."""
    store = RunStore(tmp_path / "run")
    label = r"$\frac{1$ ../..\ :*?"
    entry = cell("x", model=label, attack=f"{label}/..", setting="c", gamma=0.27)
    store.write_cells([entry])
    write_rows(store, entry, image_rows(entry, r"../../$\a{", 15.0))
    write_pictures(store, entry, {r"../../$\a{": 15.0})
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    write_report([tmp_path / "run"], tmp_path / "out", pictures="all")
    made = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert all(path.is_relative_to(tmp_path / "out") for path in made)
    pictures = [path for path in made if path.suffix == ".png"]
    assert {path.relative_to(tmp_path / "out").parts[0] for path in pictures} == {
        *("figures", "pictures")
    }


def test_pictures_are_clipped_and_grey_where_there_is_no_number() -> None:
    image = torch.tensor([math.nan, -1.0, 2.0, 0.25]).reshape(1, 2, 2)
    shown = picture(image)
    assert shown.shape == (2, 2, 3)
    assert shown[..., 0].ravel().tolist() == [0.5, 0.0, 1.0, 0.25]


@pytest.mark.parametrize(
    ("psnr", "expected"),
    [(19.25, "19.2 dB"), (100.0, "100.0 dB"), (100.01, ">100 dB"), (math.inf, "exact")],
)
def test_scores_over_pictures_are_capped_as_in_tables(psnr: float, expected: str) -> None:
    assert psnr_text(psnr) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("abcdefg", "abcdefg"), ("abcdefgh", "abc…fgh"), ("0123456789", "012…789"), ("", "")],
)
def test_long_names_lose_their_middle(text: str, expected: str) -> None:
    assert shorten(text, 7) == expected
