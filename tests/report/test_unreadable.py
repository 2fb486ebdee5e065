"""Files that are no images: named once, and in no figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attacks.april import April
from mjp_privacy.core.errors import UserError
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.figures import success_share
from mjp_privacy.report.write import write_report
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


def test_a_file_that_is_no_image_is_in_no_figure(folder: Path, tmp_path: Path) -> None:
    summary = attack(folder, tmp_path / "run", config())
    assert (summary.exit_code, len(summary.failures)) == (3, 1)
    contents = read_contents([tmp_path / "run"])
    for line in contents.lines:
        share = success_share(line, 20)
        assert share.of == 6
        assert set(line.rows["image_id"]) == set(names(6))
    for figure in (contents.card.rows[0].one_upload, contents.card.rows[0].floor):
        assert figure is not None
        assert (figure.of, figure.n) == (6, 6)
    assert "6 of 6 exactly" in contents.card.verdict
    assert "partly_inapplicable" not in {flag.key for flag in contents.card.flags}
    assert dict(contents.card.facts)["The pictures"].startswith("6 pictures at")
    assert set(contents.standard.frame["n_failed"]) == {0}
    assert set(contents.standard.frame["n_not_run"]) == {0}


def test_it_is_said_once_with_its_name(folder: Path, tmp_path: Path) -> None:
    attack(folder, tmp_path / "run", config())
    summary = write_report([tmp_path / "run"], tmp_path / "report")
    sentence = (
        "1 file is no readable image: broken.jpg (not an image in a format that Pillow can read); "
        "in no figure"
    )
    assert summary.console.count("broken.jpg") == 1
    assert sentence in summary.console
    assert "failed" not in summary.console
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("broken.jpg") == 1
    assert "6 of 7" not in page
    assert (summary.failed_images, summary.not_run) == (3, 0)  # once a line: nothing is hidden
    samples = (tmp_path / "report" / "samples.csv").read_text()
    assert "broken.jpg" in samples


def test_what_shares_a_step_with_it_is_in_no_figure_either(folder: Path, tmp_path: Path) -> None:
    (folder / "0.png").unlink()
    attack(folder, tmp_path / "run", config(client={"batch": 2}, block=6))
    contents = read_contents([tmp_path / "run"])
    assert {len(set(line.rows["image_id"])) for line in contents.lines} == {4}
    first, second = contents.reasons[:2]
    assert first.startswith("1 file is no readable image: broken.jpg (not an image")
    mate = set(names(6)) - {"0.png", *contents.lines[0].rows["image_id"]}
    assert second == f"1 image is in a client step with such a file: {mate.pop()}; in no figure"


def test_a_failure_of_an_attack_stays_a_picture_that_was_not_recovered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: April, *_: Any, **__: Any) -> None:
        raise UserError("no solution")

    monkeypatch.setattr(April, "run", broken)
    attack(folder, tmp_path / "run", config() | {"attacks": [{"name": "april"}, *ATTACKS]})
    april = read_contents([tmp_path / "run"]).lines[0]
    assert success_share(april, 20).text().startswith("0 of 6")


@pytest.mark.nightly
def test_a_limit_is_filled_from_files_that_are_images(folder: Path, tmp_path: Path) -> None:
    attack(folder, tmp_path / "six", config(), limit=6)
    assert len(attack(folder, tmp_path / "all", config()).failures) == 1
    order = list(rows(tmp_path / "six")["image_id"].unique())
    assert sorted(order) == names(6)
    for limit in (1, 3, 6):
        summary = attack(folder, tmp_path / f"run{limit}", config(), limit=limit)
        read = rows(tmp_path / f"run{limit}")
        assert read["image_id"].nunique() == limit
        assert set(read["status"]) <= {"ok", "unscored"}
        passed = [f for f in summary.failures if f.startswith("broken.jpg: not an image")]
        assert summary.exit_code == (3 if passed else 0)
        assert all(failure.endswith("another file replaced it") for failure in passed)
        assert "broken.jpg" not in set(read["image_id"])
    (folder / "broken.jpg").unlink()
    attack(folder, tmp_path / "without", config(), limit=3)
    assert set(rows(tmp_path / "without")["image_id"]) == set(rows(tmp_path / "run3")["image_id"])


def test_a_limit_on_files_none_of_which_is_an_image(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "images" / name).write_bytes(b"")
    with pytest.raises(UserError) as caught:
        attack(tmp_path / "images", tmp_path / "run", config(), limit=1)
    assert "None of the 2 files of" in str(caught.value)
    assert "is a readable image: " in str(caught.value)
    assert "the file is empty (0 bytes). Give a folder or zip of photographs." in str(caught.value)
