"""Files that are no images, on real runs: in no figure, named once; and pictures of equal names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.write import write_report
from tests.helpers.ladder_rows import run_of
from tests.helpers.report_rows import add_pictures, cell, image_id, photograph
from tests.helpers.runs import attack, names, photographs, rows, tiny

ATTACKS = [{"name": "patch_gradient"}, {"name": "patch_prior"}, {"name": "grey"}]


def config(**changes: Any) -> dict[str, Any]:
    models = {"ViT": tiny()["models"]["ViT"]}
    grid = [{"models": ["ViT"], "settings": ["a"]}]
    return tiny(attacks=ATTACKS, models=models, grid=grid, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six photographs and a file that is no image."""
    images = photographs(tmp_path / "images")
    (images / "labels.csv").unlink()
    (images / "broken.jpg").write_bytes(b"no image")
    return images


def test_a_file_that_is_no_image_is_in_no_figure_and_named_once(
    folder: Path, tmp_path: Path
) -> None:
    done = attack(folder, tmp_path / "run", config())
    assert (done.exit_code, len(done.failures)) == (3, 1)
    contents = read_contents([tmp_path / "run"])
    for line in contents.lines:
        assert set(line.rows["image_id"]) == set(names(6))
    (row,) = contents.card.rows
    for figure in (row.one_upload, row.floor):
        assert figure is not None
        assert (figure.of, figure.n) == (6, 6)
    assert "6 of 6 exactly" in contents.card.verdict
    assert "partly_inapplicable" not in {flag.key for flag in contents.card.flags}
    for table in contents.tables:
        assert not table.frame[["n_failed", "n_not_run"]].any(axis=None)
    summary = write_report([tmp_path / "run"], tmp_path / "report")
    assert summary.console.count("broken.jpg") == 1
    assert summary.not_run == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("broken.jpg") == 1
    assert "6 of 7" not in page
    assert "broken.jpg" in (tmp_path / "report" / "samples.csv").read_text()


def test_what_shares_a_step_with_it_is_in_no_figure_either(folder: Path, tmp_path: Path) -> None:
    (folder / "0.png").unlink()
    attack(folder, tmp_path / "run", config(client={"batch": 2}, block=6))
    contents = read_contents([tmp_path / "run"])
    assert {len(set(line.rows["image_id"])) for line in contents.lines} == {4}
    mate = set(names(6)) - {"0.png", *contents.lines[0].rows["image_id"]}
    assert "broken.jpg" in contents.reasons[0]
    assert mate.pop() in contents.reasons[1]


@pytest.mark.nightly
def test_a_limit_is_filled_from_files_that_are_images(folder: Path, tmp_path: Path) -> None:
    attack(folder, tmp_path / "six", config(), limit=6)
    assert sorted(rows(tmp_path / "six")["image_id"].unique()) == names(6)
    for limit in (1, 3, 6):
        summary = attack(folder, tmp_path / f"run{limit}", config(), limit=limit)
        read = rows(tmp_path / f"run{limit}")
        assert read["image_id"].nunique() == limit
        assert "broken.jpg" not in set(read["image_id"])
        passed = [failure for failure in summary.failures if failure.startswith("broken.jpg: ")]
        assert summary.exit_code == (3 if passed else 0)
    (folder / "broken.jpg").unlink()
    attack(folder, tmp_path / "without", config(), limit=3)
    assert set(rows(tmp_path / "without")["image_id"]) == set(rows(tmp_path / "run3")["image_id"])


def test_a_limit_on_files_none_of_which_is_an_image(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "images" / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"images.*empty"):
        attack(tmp_path / "images", tmp_path / "run", config(), limit=1)


def test_pictures_of_two_runs_with_equal_names_are_not_mixed(tmp_path: Path) -> None:
    for at, name in enumerate(("one", "two")):
        run_of(tmp_path / name, (cell("april", setting="c", gamma=0.27), [20.0]))
        plain = photograph(at)[None]
        tensors = {"images": plain * 0.5, "target": plain, "plain": plain}
        add_pictures(RunStore(tmp_path / name), "april", tensors, [image_id(0)])
    gallery = read_contents([tmp_path / "one", tmp_path / "two"]).gallery
    (shown,) = gallery.shown
    assert set(shown.originals) == {1, 2}
    assert len({gallery.pictures[key] for key in shown.originals.values()}) == 2
