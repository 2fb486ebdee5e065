"""Fixtures of several test files of the report."""

from pathlib import Path

import pytest

from mjp_privacy.report.write import ReportSummary, write_report
from tests.helpers.report_rows import small_run, synthetic_run


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReportSummary]:
    """One report for all tests that only read it: RUN beside OUT."""
    folder = tmp_path_factory.mktemp("report")
    synthetic_run(folder / "run")
    return folder / "out", write_report([folder / "run"], folder / "out")


@pytest.fixture(scope="session")
def page_folder(written: tuple[Path, ReportSummary]) -> Path:
    """The folder of that report."""
    return written[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one small line."""
    return small_run(tmp_path / "run")
