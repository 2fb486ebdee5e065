"""What tests share: a workbench of attacks of their own, a run with them, recorded uploads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import federations, uploads
from tests.helpers.edited_code import TWO, Workbench, workbench
from tests.helpers.runs import attack, photographs


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    with workbench(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("images"))


@pytest.fixture
def run(bench: Workbench, images: Path, tmp_path: Path) -> Path:
    """A finished run of `tone` and `grey`, two blocks of three images each."""
    attack(images, tmp_path / "run", TWO)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain federation's uploads: two images in rounds 1 and 2."""
    return federations.run(tmp_path_factory.mktemp("federation")) / "uploads"


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy of these uploads to spoil."""
    return uploads.copied(recorded, tmp_path / "uploads")
