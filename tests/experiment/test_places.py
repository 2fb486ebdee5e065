"""Files in place of a run's folders: one sentence that helps, from `attack` and `report`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mjp_privacy.experiment.places import check_places

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.loading import load_runs
from tests.helpers.runs import attack, one_cell, same_rows


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    attack(images, out, one_cell())
    return out


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.mark.parametrize("place", ["rows", "rows/ID", "reconstructions", "reconstructions/ID"])
def test_a_file_in_place_of_a_folder_is_named_and_made_again_without_it(
    images: Path, whole: Path, damaged: Path, place: str
) -> None:
    (run_id,) = RunStore(damaged).stored_cells()
    path = damaged / place.replace("ID", run_id)
    shutil.rmtree(path)
    path.write_text("x")
    for command in (lambda: attack(images, damaged, one_cell()), lambda: load_runs([damaged])):
        with pytest.raises(UserError) as caught:
            command()
        said = str(caught.value)
        assert said.startswith(f"{path}: expected a folder, with the ")
        assert "got a file or a link to nowhere. Put the folder back if you have it; else" in said
    path.unlink()
    attack(images, damaged, one_cell())
    same_rows(damaged, whole)


@pytest.mark.parametrize("name", ["experiments", "damaged"])
def test_of_every_folder(damaged: Path, name: str) -> None:
    shutil.rmtree(damaged / name, ignore_errors=True)
    (damaged / name).symlink_to("nowhere")
    with pytest.raises(UserError, match=f"{name}: expected a folder"):
        check_places(damaged)


def test_other_files_beside_the_cells_are_nobodys_business(damaged: Path) -> None:
    (damaged / "rows" / "notes.txt").write_text("mine")
    (damaged / "notes").write_text("mine")
    check_places(damaged)
