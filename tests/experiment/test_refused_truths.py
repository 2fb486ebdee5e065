"""Private images that are damaged: their upload fails alone, and is scored against nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mjp_privacy.client.recorded.examined import examine
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.experiment.check_uploads import check_uploads
from tests.helpers.uploads import NAME, ONE, attacked, change_truth, edit_all

Spoil = Callable[[Path], None]


def truth_file(path: str) -> Spoil:
    """The file of private images in place of something else."""

    def spoil(folder: Path) -> None:
        place = folder / "truth" / f"{NAME}.safetensors"
        place.unlink()
        place.symlink_to(path)

    return spoil


def truth(name: str, made: Callable[[], torch.Tensor]) -> Spoil:
    return lambda folder: change_truth(folder, lambda held: held | {name: made()})


def masked(mask: torch.Tensor, permutation: torch.Tensor) -> Spoil:
    tensors = {"mask": mask, "permutation": permutation}
    return lambda folder: change_truth(folder, lambda held: held | tensors)


def no_ids(folder: Path) -> None:
    path = folder / "truth" / f"{NAME}.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"image_ids", b"image_idx"))


ORDER, NONE = torch.arange(16).unsqueeze(0), torch.zeros(1, 16, dtype=torch.bool)
TRUTHS: list[tuple[Spoil, str]] = [
    (
        truth("images", lambda: torch.rand(1, 3, 64, 64)),
        "images: expected an upload's private images",
    ),
    (truth("images", lambda: torch.rand(2, 3, 32, 32)), "1 ids for images of shape (2, 3, 32, 32)"),
    (truth("images", lambda: torch.full((1, 3, 32, 32), torch.nan)), "NaN or infinite"),
    (truth("images", lambda: 2 * torch.ones(1, 3, 32, 32)), "values from 2 to 2"),
    (truth("images", lambda: torch.ones(1, 3, 32, 32, dtype=torch.uint8)), "entries of type U8"),
    (truth("masks", lambda: NONE), "masks: expected an upload's private images"),
    (truth("mask", lambda: NONE), "one of mask and permutation without the other"),
    (masked(NONE.float(), ORDER), "mask: expected an upload's private images"),
    (masked(NONE[:, :9], ORDER), "the shape (1, 9) where its upload needs (1, 16)"),
    (masked(7 * NONE.int() + 2, ORDER), "entries other than 0 and 1"),
    (masked(NONE, ORDER + 1), "rows that are no order of the patches 0 to 15"),
    (masked(NONE, ORDER * 0), "rows that are no order of the patches 0 to 15"),
    (masked(NONE, ORDER.flip(-1).contiguous()), "patches that move and that `mask` does not name"),
    (no_ids, "no list of ids"),
    (truth_file("/dev/zero"), "a device"),
    (truth_file("/"), "a folder"),
]


@pytest.mark.parametrize(("spoil", "said"), TRUTHS)
def test_a_fault_is_named(folder: Path, spoil: Spoil, said: str) -> None:
    edit_all(folder, series=None)
    spoil(folder)
    examined = examine(UploadFolder(folder))
    assert said in examined.reasons[NAME]
    assert len(examined.sound) == 3


@pytest.mark.parametrize(("spoil", "said"), [TRUTHS[0], TRUTHS[-1]])
def test_a_faulty_truth_fails_its_upload_alone(folder: Path, spoil: Spoil, said: str) -> None:
    """Neither is its upload scored against something else, nor its line left without scores."""
    edit_all(folder, series=None)
    spoil(folder)
    assert said in check_uploads(folder)[0]
    _, scores, _ = attacked(folder, **ONE)
    (failed,) = scores[scores.status == "failed"].itertuples()
    assert failed.image_id == NAME
    assert said in failed.reason
    assert (scores.status == "ok").sum() == 3
