"""`check` on what a header cannot know: whose weights, which priors, which labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mjp_privacy.experiment.check_uploads import check_uploads
from mjp_privacy.models.tensor_files import DIGEST_KEY
from tests.helpers.federations import run

NAME = "b1s1_r00001_000_at00001"
HEAD = ("head.weight", "head.bias")
OWN = ("pos_embed", "patch_embed.proj.weight", *HEAD)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain federation's uploads, the classifier's gradient among them."""
    record = {"rounds": [1], "images": 2, "probes": [{"uploads": 2}], "parameters": OWN}
    return run(tmp_path, record=record) / "uploads"


def test_the_right_weights_fit_the_classifiers_gradient(folder: Path) -> None:
    assert "does not fit" not in check_uploads(folder)[0]


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
def test_a_classifiers_gradient_of_something_else_is_said(folder: Path, spoil: object) -> None:
    spoil(folder)  # type: ignore[operator]
    text, _ = check_uploads(folder)
    assert f"the classifier's gradient in {NAME} does not fit weights/" in text


def test_attacks_whose_prior_is_derived_for_the_patches_apply(folder: Path) -> None:
    lines = check_uploads(folder)[0].splitlines()
    applies = [line for line in lines if line.startswith("  applies: ")]
    assert applies
    assert all("patch_prior" in line for line in applies)


def test_attacks_on_several_uploads_are_asked_with_those_that_are_recorded(folder: Path) -> None:
    applies = [line for line in check_uploads(folder)[0].splitlines() if "applies: " in line]
    for line in applies:
        assert ", multi_round with the 2 recorded (6 by default), " in line
        assert ", plain_step with the 2 recorded (4 by default), " in line
    single = [path for path in folder.glob("*.json") if "at00001" not in path.name]
    for path in single:
        path.unlink()
        path.with_suffix(".safetensors").unlink()
    text = check_uploads(folder)[0]
    assert "not multi_round: it needs 2 uploads of the same images; 1 is recorded" in text


def test_labels_are_read_off_as_the_attack_reads_them(folder: Path) -> None:
    assert "inverting_gradients" in next(
        line for line in check_uploads(folder)[0].splitlines() if "applies:" in line
    )


def test_a_shuffle_without_an_unknown_embedding_is_said(folder: Path) -> None:
    for path in folder.glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"gamma": 0.27}))
    assert "has no unk_embed" in check_uploads(folder)[0]


def test_numbers_at_the_edge_of_their_range_are_a_fault_of_their_uploads(folder: Path) -> None:
    """Divided by such a learning rate, sound weights are infinite."""
    for path in folder.glob("*.json"):
        header = json.loads(path.read_text())
        path.write_text(json.dumps(header | {"kind": "weight_difference", "lr": 1e-320}))
    text, usable = check_uploads(folder)
    assert "FAULT" in text
    assert not usable
