"""Recorded uploads carry their digests; and what `check` says of those that can be attacked."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mjp_privacy.client.recorded.examined import examine
from mjp_privacy.client.recorded.folder import UploadFolder, _holds
from mjp_privacy.experiment.check_uploads import check_uploads
from mjp_privacy.models import load_model
from mjp_privacy.models.checkpoint_files import file_sha256
from mjp_privacy.models.tensor_files import DIGEST_KEY, digests, save_tensors
from tests.helpers.federations import run
from tests.helpers.runs import TINY, said
from tests.helpers.uploads import NAME, ONE, attacked, copied, edit, edit_all


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
    assert all(len({*digests.__wrapped__(path)}) == 1 for path in recorded)
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
    path = tmp_path / folder.record_weights(model)
    whole = path.read_bytes()
    flip_last(path)
    folder.record_weights(model)
    assert path.read_bytes() == whole
    tensors = load_file(path)
    metadata = unsealed(path)
    save_tensors(path, tensors, metadata)
    before = path.read_bytes()
    folder.record_weights(model)
    assert path.read_bytes() == before
    assert digests.__wrapped__(path)[0] is None
    tensors["cls_token"] = tensors["cls_token"] + 1
    save_tensors(path, tensors, metadata)
    assert not _holds(path, model)


# what `check` says -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain federation's uploads, the classifier's gradient among them."""
    record = {"rounds": [1], "images": 2, "probes": [{"uploads": 2}], "parameters": OWN}
    return run(tmp_path_factory.mktemp("head"), record=record) / "uploads"


@pytest.fixture
def headed(with_head: Path, tmp_path: Path) -> Path:
    """A copy of them to spoil."""
    return copied(with_head, tmp_path / "headed")


HEAD = ("head.weight", "head.bias")


OWN = ("pos_embed", "patch_embed.proj.weight", *HEAD)


def other_weights(folder: Path) -> None:
    for path in folder.glob("weights/*.safetensors"):
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = {k: v for k, v in file.metadata().items() if k != DIGEST_KEY}
        tensors["head.weight"] = 2 * tensors["head.weight"].flip(0).contiguous()
        save_file(tensors, path, metadata)
    for path in folder.glob("*.json"):
        header = json.loads(path.read_text())
        header.pop("weights_sha256", None)
        path.write_text(json.dumps(header))


def other_sign(folder: Path) -> None:
    path = folder / f"{NAME}.safetensors"
    save_file({name: -tensor for name, tensor in load_file(path).items()}, path)


def other_labels(folder: Path) -> None:
    """Two labels at once, as mixup or a batch has them."""
    path = folder / f"{NAME}.safetensors"
    tensors = load_file(path)
    tensors["head.bias"] = tensors["head.bias"] - 0.5 * torch.eye(len(tensors["head.bias"]))[0]
    save_file(tensors, path)


@pytest.mark.parametrize("spoil", [other_weights, other_sign, other_labels])
def test_a_classifiers_gradient_of_something_else_is_said(
    headed: Path, spoil: Callable[[Path], None]
) -> None:
    assert "does not fit" not in check_uploads(headed)[0]
    spoil(headed)
    assert f"gradient in {NAME} does not fit weights/" in check_uploads(headed)[0]


def test_attacks_are_asked_with_what_is_recorded(headed: Path) -> None:
    applies = [line for line in check_uploads(headed)[0].splitlines() if "applies: " in line]
    assert applies
    for line in applies:
        for named in ("patch_prior", "inverting_gradients", "multi_round with the 2", "plain_step"):
            assert named in line
    for path in [path for path in headed.glob("*.json") if "at00001" not in path.name]:
        path.unlink()
        path.with_suffix(".safetensors").unlink()
    assert "not multi_round: " in check_uploads(headed)[0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gamma": 0.27}, ["unk_embed"]),
        ({"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}, ["normalised", "mean"]),
        ({"kind": "weight_difference", "momentum": 0.9, "steps": 3}, ["approximate", "0.9"]),
        ({"kind": "weight_difference", "optimizer": "adamw"}, ["approximate", "adamw"]),
        (
            {"kind": "weight_difference", "optimizer": "adamw", "steps": 2},
            ["which holds no gradient"],
        ),
        ({"kind": "weight_difference", "optimizer": "lion"}, ["which holds no gradient", "lion"]),
        ({"partial": False}, ["not uploaded"]),
    ],
)
def test_what_weakens_attacks_silently_is_said(
    folder: Path, changes: dict[str, Any], named: list[str]
) -> None:
    before = check_uploads(folder)[0]
    edit_all(folder, lr=0.1, **changes)
    text = check_uploads(folder)[0]
    assert all(words in text for words in named)
    assert not all(words in before for words in named)


def test_one_plain_step_is_exact(folder: Path) -> None:
    edit_all(folder, kind="weight_difference", lr=0.1, momentum=0.9)
    text, usable = check_uploads(folder)
    assert usable
    assert "approximate" not in text
    assert "applies: patch_gradient" in text
    assert "not april: " in text


def test_numbers_at_the_edge_of_their_range_are_a_fault_of_their_uploads(folder: Path) -> None:
    """Divided by such a learning rate, sound weights are infinite."""
    edit_all(folder, kind="weight_difference", lr=1e-320)
    text, usable = check_uploads(folder)
    assert "FAULT" in text
    assert not usable
