"""Uploads that are sound alone and contradict each other, and those that only differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.groups import group_uploads
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.check_uploads import check_uploads
from tests.helpers.uploads import (
    NAME,
    ONE,
    as_float64,
    attacked,
    change_upload,
    edit,
    edit_all,
)

OTHER = NAME.replace("_000_", "_001_")


def test_headers_of_a_series_that_contradict_each_other_fail_that_series(folder: Path) -> None:
    edit(folder, mean=[0.1, 0.1, 0.1])
    text, usable = check_uploads(folder)
    assert not usable
    assert "series b1s1_r00001_000: mean is (0.1, 0.1, 0.1) in " in text
    _, scores, _ = attacked(folder, **ONE)
    failed = scores[scores.status == "failed"]
    assert sorted(failed.image_id) == [NAME, NAME.replace("at00001", "at00002")]
    assert failed.reason.str.contains("Expected the same in all uploads of a series").all()
    assert (scores.status == "ok").sum() == 1


def same_image(folder: Path) -> None:
    held = folder / "truth" / f"{OTHER}.safetensors"
    (folder / "truth" / f"{NAME}.safetensors").write_bytes(held.read_bytes())


def test_two_uploads_of_one_image_in_one_line_are_an_error(folder: Path) -> None:
    same_image(folder)
    with pytest.raises(UserError, match="an image of the same name"):
        group_uploads(UploadFolder(folder).entries())


def test_two_uploads_of_one_image_in_one_line_fail_alone(folder: Path) -> None:
    edit_all(folder, series=None)
    same_image(folder)
    _, scores, _ = attacked(folder, **ONE)
    failed = scores[scores.status == "failed"]
    assert sorted(failed.image_id) == [NAME, OTHER]
    assert failed.reason.str.contains("an image of the same name").all()
    assert (scores.status == "ok").sum() == 2


def test_a_batch_that_fits_into_no_block_fails_alone(folder: Path) -> None:
    for path in folder.glob("truth/*"):
        path.unlink()
    edit_all(folder, series=None, labels=None, batch=9)
    edit(folder, batch=9973)
    edit(folder, OTHER, batch=9967)
    text, _ = check_uploads(folder)
    refused = [line for line in text.splitlines() if "batch: expected one of which a block" in line]
    assert len(refused) == 1
    assert "got 9967" in refused[0] or "got 9973" in refused[0]


def test_two_precisions_in_one_folder_are_two_lines(folder: Path) -> None:
    edit_all(folder, series=None)
    edit(folder, dtype="float64")
    change_upload(folder, as_float64)
    summary, scores, rows = attacked(folder, **ONE)
    assert summary.exit_code == 0
    assert sorted(scores.dtype) == ["float32", "float32", "float32", "float64"]
    assert {"small, round 1, float32", "small, round 1, float64"} <= set(rows.model)


def test_an_upload_without_truth_leaves_its_neighbours_their_scores(folder: Path) -> None:
    edit_all(folder, series=None)
    (folder / "truth" / f"{NAME}.safetensors").unlink()
    _, scores, _ = attacked(folder, **ONE)
    assert sorted(scores.status) == ["ok", "ok", "ok", "unscored"]
