"""Recorded uploads carry their digests: a changed bit is named, and strangers' files pass."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mjp_privacy.core.read import FileKind
from mjp_privacy.models import load_model
from mjp_privacy.models.checkpoint_files import file_sha256
from mjp_privacy.models.tensor_files import DIGEST_KEY, check_digest, save_tensors
from mjp_privacy.uploads.faults import examine
from mjp_privacy.uploads.folder import UploadFolder
from mjp_privacy.uploads.record import _holds, record_weights
from tests.helpers.checked import check_uploads
from tests.helpers.runs import TINY, said
from tests.helpers.uploads import NAME, ONE, attacked, edit, edit_all


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def flip_last(path: Path) -> None:
    """The lowest bit of a number's mantissa, or of its exponent: the file stays readable."""
    flip(path, 8 * (path.stat().st_size - 3))


def unsealed(path: Path) -> dict[str, str]:
    """The metadata of a file without its seal."""
    with safe_open(path, "pt") as file:
        return {k: v for k, v in file.metadata().items() if k != DIGEST_KEY}


def weights_of(folder: Path) -> Path:
    return folder / json.loads((folder / f"{NAME}.json").read_text())["weights"]


def test_every_file_is_sealed_and_headers_name_their_weights(folder: Path) -> None:
    recorded = [path for path in folder.rglob("*") if path.is_file()]
    assert len(recorded) == 14  # four uploads of three files, two files of weights
    for path in recorded:
        check_digest(path, FileKind("an upload", "", 1 << 30), needed=True)
    for path in folder.glob("*.json"):
        header = json.loads(path.read_text())
        assert header["weights_sha256"] == file_sha256(folder / header["weights"])


@pytest.mark.parametrize("which", ["tensors", "truth", "weights"])
def test_a_flipped_bit_is_a_row_with_its_reason(folder: Path, which: str) -> None:
    edit_all(folder, series=None)
    places = {
        "tensors": folder / f"{NAME}.safetensors",
        "truth": folder / "truth" / f"{NAME}.safetensors",
        "weights": weights_of(folder),
    }
    flip_last(places[which])
    text, usable = check_uploads(folder)
    assert not usable
    assert any(f"FAULT  {NAME}: " in line and "changed" in line for line in text.splitlines())
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 3
    failed = scores[scores.status == "failed"].set_index("image_id").reason
    assert "changed" in failed[NAME]
    assert len(failed) == (2 if which == "weights" else 1)  # two uploads have these weights
    assert (scores.status == "ok").sum() == 4 - len(failed)


def test_no_flipped_bit_goes_unnoticed(folder: Path) -> None:
    draw = random.Random(16)
    path = folder / f"{NAME}.safetensors"
    whole = path.read_bytes()
    header = 8 * (8 + int.from_bytes(whole[:8], "little"))
    bits = [draw.randrange(8 * len(whole)) for _ in range(15)]
    bits += [draw.randrange(header) for _ in range(15)]
    seal = 8 * whole.index(DIGEST_KEY.encode())
    bits += range(seal, seal + 8 * 24, 23)  # its name, and how the digest begins
    for bit in bits:
        flip(path, bit)
        assert NAME in examine(UploadFolder(folder)).refused, bit
        path.write_bytes(whole)
    assert not examine(UploadFolder(folder)).refused


def test_files_of_strangers_without_seals_are_read(folder: Path) -> None:
    before = attacked(folder, **ONE)[1]
    for path in folder.rglob("*.safetensors"):
        if path.parent.name != "weights":
            save_file(load_file(path), path, unsealed(path) or None)
    for path in folder.glob("*.json"):
        header = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in header.items() if k != "seal"}))
    assert "note: " not in check_uploads(folder)[0]
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 0
    assert sorted(scores.value) == sorted(before.value)


def test_a_changed_header_is_read_and_said(folder: Path) -> None:
    assert not examine(UploadFolder(folder)).changed
    edit(folder, noise={"pos_embed": 0.25}, series=None)
    (remark,) = examine(UploadFolder(folder)).remarks
    assert NAME in remark
    assert f"note: {remark}" in check_uploads(folder)[0]
    attacked(folder, **ONE)
    assert remark in said(folder.parent / "run")


def test_no_changed_bit_of_a_header_is_silent(folder: Path) -> None:
    draw = random.Random(17)
    path = folder / f"{NAME}.json"
    whole = path.read_bytes()
    for bit in (draw.randrange(8 * len(whole)) for _ in range(20)):
        flip(path, bit)
        examined = examine(UploadFolder(folder))
        assert NAME in {*examined.refused, *examined.changed}, bit
        path.write_bytes(whole)


def test_damaged_weights_are_stored_again_and_those_of_earlier_versions_stay(
    tmp_path: Path,
) -> None:
    folder, model = UploadFolder(tmp_path), load_model(**TINY)
    path = tmp_path / record_weights(folder.root, model)
    whole = path.read_bytes()
    flip_last(path)
    record_weights(folder.root, model)
    assert path.read_bytes() == whole
    tensors = load_file(path)
    metadata = unsealed(path)
    save_tensors(path, tensors, metadata)
    before = path.read_bytes()
    record_weights(folder.root, model)
    assert path.read_bytes() == before
    tensors["cls_token"] = tensors["cls_token"] + 1
    save_tensors(path, tensors, metadata)
    assert not _holds(path, model)
