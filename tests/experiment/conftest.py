"""What tests share: photographs, a run that nobody changes, recorded uploads."""

from pathlib import Path

import pytest

from tests.helpers import federations, uploads
from tests.helpers.runs import attack, photographs, tiny


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six photographs of the classes 0 to 5, which nobody changes."""
    return photographs(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of them: one block of the tiny configs."""
    return photographs(tmp_path_factory.mktemp("three"), 3)


@pytest.fixture(scope="session")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of `tiny` in both precisions, which nobody changes."""
    out = tmp_path_factory.mktemp("whole")
    summary = attack(images, out, tiny(dtypes=["float32", "float64"]))
    assert (summary.exit_code, summary.cells, summary.images) == (0, 10, 6)
    return out


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain federation's uploads: two images in rounds 1 and 2."""
    return federations.run(tmp_path_factory.mktemp("federation")) / "uploads"


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy of these uploads to spoil."""
    return uploads.copied(recorded, tmp_path / "uploads")
