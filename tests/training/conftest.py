"""What the tests of whole trainings share."""

from pathlib import Path

import pytest

from tests.helpers.training import class_folders


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Labelled images of three classes."""
    return class_folders(tmp_path / "data")
