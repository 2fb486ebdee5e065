"""`mjp check`: what is said of recorded uploads that can be attacked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mjp_privacy.models.tensor_files import DIGEST_KEY
from tests.helpers.checked import check_uploads
from tests.helpers.federations import run
from tests.helpers.uploads import NAME, copied, edit_all


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
    headed: Path, changes: dict[str, Any], named: list[str]
) -> None:
    before = check_uploads(headed)[0]
    edit_all(headed, lr=0.1, **changes)
    text = check_uploads(headed)[0]
    assert all(words in text for words in named)
    assert not all(words in before for words in named)


def test_one_plain_step_is_exact(headed: Path) -> None:
    edit_all(headed, kind="weight_difference", lr=0.1, momentum=0.9)
    text, usable = check_uploads(headed)
    assert usable
    assert "approximate" not in text
    assert "applies: patch_gradient" in text
    assert "not april: " in text


def test_numbers_at_the_edge_of_their_range_are_a_fault_of_their_uploads(headed: Path) -> None:
    """Divided by such a learning rate, sound weights are infinite."""
    edit_all(headed, kind="weight_difference", lr=1e-320)
    text, usable = check_uploads(headed)
    assert "FAULT" in text
    assert not usable
