"""Fixtures of several unit test files."""

from pathlib import Path

import pytest

from mjp_privacy.report.write import ReportSummary, write_report
from tests.helpers.report_rows import COUNT, small_run, synthetic_run


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReportSummary]:
    """One report for all tests that only read it: RUN beside OUT."""
    folder = tmp_path_factory.mktemp("report")
    synthetic_run(folder / "run", COUNT)
    return folder / "out", write_report([folder / "run"], folder / "out")


@pytest.fixture(scope="session")
def everything(
    written: tuple[Path, ReportSummary], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ReportSummary]:
    """The report of the same run with every line, note and diagnostic."""
    out = tmp_path_factory.mktemp("everything") / "out"
    return out, write_report([written[0].parent / "run"], out, everything=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one small line."""
    return small_run(tmp_path / "run")
