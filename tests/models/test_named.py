"""Checkpoints of a command line: which of them its --model, --mean and --std are about."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.zoo import NamedCheckpoint, keep_earlier, named_checkpoints
from mjp_privacy.training.evaluation import load_checkpoint
from mjp_privacy.training.evaluation_arguments import EvaluationArguments


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    """A file that states nothing of itself."""
    path = tmp_path / "silent.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    return path


def test_options_are_about_the_files_that_do_not_state_it(silent: Path) -> None:
    mixed = named_checkpoints(["cifar_vit", "timm:resnet18", str(silent)], "--checkpoint")
    assert [item.described for item in mixed] == [False, False, True]
    stating = named_checkpoints(["cifar_vit", "cifar_vit_mjp"], "--checkpoint")
    assert [item.described for item in stating] == [True, True]


def test_a_model_that_states_its_mean_keeps_it_beside_one_that_does_not() -> None:
    arguments = EvaluationArguments(("cifar_vit",), model="vit_tiny_patch16_224", mean=(0.1,))
    source = named_checkpoints(["cifar_vit"], "--checkpoint")[0].source
    own = load_checkpoint(NamedCheckpoint("cifar_vit", source, described=False), arguments)
    assert own.card.mean == pytest.approx((0.4914, 0.4822, 0.4465))
    given = EvaluationArguments(("cifar_vit",), mean=(0.1,))
    replaced = load_checkpoint(NamedCheckpoint("cifar_vit", source), given)
    assert replaced.card.mean == pytest.approx((0.1, 0.1, 0.1))


def test_a_name_that_is_nearly_right_is_corrected_and_a_path_is_a_path() -> None:
    with pytest.raises(UserError, match=r"cifar_vit\?"):
        named_checkpoints(["cifar_vitt"], "--checkpoint")
    assert named_checkpoints(["cifar_vit.pth"], "--checkpoint")[0].source == "cifar_vit.pth"


@pytest.mark.parametrize(
    ("text", "labels", "lost"),
    [
        ("model,top1\na,1\nb,2\n", ["a"], "b"),
        ("kind,model\nmodel,c\nnoise,d\n", ["a", "b"], "c"),
        ("model\na\nb\n", ["b", "a", "c"], ""),
        ("model\n'=a\n", ["=a"], ""),
        ("", ["a"], ""),
    ],
)
def test_a_table_of_other_models_is_not_replaced(
    tmp_path: Path, text: str, labels: list[str], lost: str
) -> None:
    if text:
        (tmp_path / "summary.csv").write_text(text, encoding="utf-8")
    named = [NamedCheckpoint(label, "x") for label in labels]
    if not lost:
        keep_earlier(tmp_path, "summary.csv", named)
        return
    with pytest.raises(UserError, match=lost):
        keep_earlier(tmp_path, "summary.csv", named)
