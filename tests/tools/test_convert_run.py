"""tools/convert_run.py: of a damaged folder what is whole, of another one nothing. What a whole one
becomes: tests/golden/test_oracle.py."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mjp_privacy.experiment.store import RunStore
from tests.golden import oracle
from tests.helpers.uploads import flip
from tools.convert_run import main, seal_of


@pytest.fixture
def old(tmp_path: Path) -> Path:
    zipfile.ZipFile(oracle.HOME / "old_run.zip").extractall(tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.parametrize("kind", ["rows/*/00000.parquet", "reconstructions/*/*", "images.csv"])
def test_what_is_damaged_is_left_out_and_named(
    old: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sorted(old.glob(kind))[0]
    flip(path, 8 * (path.stat().st_size * 6 // 10))
    new = RunStore(tmp_path / "new")
    assert main([str(old), str(new.root)]) == 3
    assert path.relative_to(old).as_posix() in capsys.readouterr().err
    if path.suffix != ".csv":
        assert len(new.read(path.parent.name)) == 1  # of the other block
        assert new.pictured(path.parent.name) == []


def changed(before: str, after: str) -> Callable[[Path], object]:
    """The list of cells says something else."""

    def change(old: Path) -> None:
        content = (old / "cells.json").read_text()
        (old / "cells.json").write_text(content.replace(before, after, 1))

    return change


def of_another_format(old: Path) -> None:
    """A whole list of cells, with its own seal."""
    changed('"format": 2', '"format": 3')(old)
    digest, held = seal_of(old / "cells.json")
    changed(str(held), digest)(old)


@pytest.mark.parametrize(
    "spoil",
    [
        shutil.rmtree,
        lambda old: (old / "cells.json").unlink(),
        changed("grey", "grex"),
        of_another_format,
        lambda old: (old.parent / "new").write_text("taken"),
    ],
    ids=["no folder", "no cells", "damaged", "another format", "taken"],
)
def test_other_folders_are_refused(
    old: Path, tmp_path: Path, spoil: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(old)
    assert main([str(old), str(tmp_path / "new")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "new").is_dir()
