"""Stored tensors as pictures, and the scores and names beside them."""

from pathlib import Path

from mjp_privacy.experiment.store import RunStore
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
