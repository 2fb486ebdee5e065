"""What a report of very many rows leaves out, and where it says so."""

from pathlib import Path

import pytest

from mjp_privacy.experiment.compaction import compact
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report import samples
from mjp_privacy.report.page import build
from mjp_privacy.report.recent import Recent
from mjp_privacy.report.write import write_report
from tests.helpers.ladder_rows import ladder_run


def files_of(run: Path, out: Path) -> dict[str, bytes]:
    write_report([run], out)
    names = ("table.csv", "table.md", "samples.csv", "choices.csv", "index.html")
    return {name: (out / name).read_bytes() for name in names}


def test_a_compacted_run_gives_the_same_report(tmp_path: Path) -> None:
    ladder_run(tmp_path / "run")
    before = files_of(tmp_path / "run", tmp_path / "before")
    assert compact(RunStore(tmp_path / "run"), fewest_files=1) > 3
    assert files_of(tmp_path / "run", tmp_path / "after") == before


def test_of_many_rows_a_text_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder_run(tmp_path / "run")
    out = tmp_path / "out"
    write_report([tmp_path / "run"], out)
    assert (out / "samples.csv").is_file()
    monkeypatch.setattr(samples, "MOST_ROWS", 10)
    write_report([tmp_path / "run"], out)
    assert not (out / "samples.csv").exists()  # that of the earlier report is removed
    text = (out / "samples.txt").read_text()
    assert "rows are more than a CSV file is good for" in text
    assert "rows/<run_id>/*.parquet" in text
    assert str(tmp_path) not in text
    assert "samples.txt" in (out / "index.html").read_text()


def test_a_page_compares_line_by_line_on_some_of_many_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder_run(tmp_path / "run")
    monkeypatch.setattr(build, "MOST_COMPARED", 1)
    write_report([tmp_path / "run"], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "two lines are compared image by image on" in page
    assert build.compared_images([str(i) for i in range(9)], ["4"], 3) == ["0", "4", "8"]


def test_what_was_read_last_is_kept_as_far_as_there_is_room() -> None:
    recent, made = Recent(room=10), []

    def get(key: str) -> str:
        return recent.get(key, lambda: made.append(key) or key, lambda _: 4)

    for key in "abacb":
        assert get(key) == key
    assert made == ["a", "b", "c", "b"]  # b was asked for longest ago when c came
