"""What a report of very many rows leaves out, and where it says so."""

from pathlib import Path

import pandas as pd
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report import published as differences
from mjp_privacy.report import write as data_files
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.page import page as data
from mjp_privacy.report.write import write_report
from tests.helpers.ladder_rows import ladder_run


def files_of(run: Path, out: Path) -> dict[str, bytes]:
    write_report([run], out)
    names = ("table.csv", "table.md", "samples.csv", "choices.csv", "index.html")
    return {name: (out / name).read_bytes() for name in names}


@pytest.mark.nightly
def test_a_compacted_run_gives_the_same_report(tmp_path: Path) -> None:
    ladder_run(tmp_path / "run")
    before = files_of(tmp_path / "run", tmp_path / "before")
    store = RunStore(tmp_path / "run")
    assert sum(store.compact(run_id, fewest_files=1) for run_id in store.stored_cells()) > 3
    assert files_of(tmp_path / "run", tmp_path / "after") == before


def test_of_many_rows_a_text_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder_run(tmp_path / "run")
    out = tmp_path / "out"
    write_report([tmp_path / "run"], out)
    assert (out / "samples.csv").is_file()
    monkeypatch.setattr(data_files, "MOST_ROWS", 10)
    write_report([tmp_path / "run"], out)
    assert not (out / "samples.csv").exists()  # that of the earlier report is removed
    text = (out / "samples.txt").read_text()
    assert "read_parquet('run/rows/**/*.parquet'" in text
    assert str(tmp_path) not in text
    assert "samples.txt" in (out / "index.html").read_text()


def test_a_page_compares_line_by_line_on_some_of_many_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder_run(tmp_path / "run")
    contents = read_contents([tmp_path / "run"])
    assert data.page_images(contents) == contents.image_ids
    monkeypatch.setattr(data, "MOST_COMPARED", 1)
    first, *_, last = contents.image_ids
    assert data.page_images(contents) == [first, last]
    write_report([tmp_path / "run"], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "on 2 of them" in page


@pytest.mark.nightly
def test_of_many_choices_a_parquet_file_holds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder_run(tmp_path / "run")
    out = tmp_path / "out"
    write_report([tmp_path / "run"], out)
    text = pd.read_csv(out / "choices.csv", dtype={"image_id": str})
    monkeypatch.setattr(data_files, "MOST_ROWS", 3)
    write_report([tmp_path / "run"], out)
    assert not (out / "choices.csv").exists()
    stored = pd.read_parquet(out / "choices.parquet")
    assert len(stored) > 3
    pd.testing.assert_frame_equal(stored, text, check_dtype=False)


def test_notes_say_from_how_many_images_on_nothing_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder_run(tmp_path / "run")
    lines = read_contents([tmp_path / "run"]).lines
    (said,) = (note for note in differences.method(lines) if "resamples" in note)
    assert "with 2000 resamples and a fixed seed. " in said
    monkeypatch.setattr(differences, "MOST_DRAWN", 2)
    (said,) = (note for note in differences.method(lines) if "resamples" in note)
    assert "or beyond 2 of them from their mean, spread and skewness. " in said
