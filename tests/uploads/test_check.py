"""`mjp check`: what is said of recorded uploads, and of a model before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attacks import ATTACKS
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.uploads.check import check_model
from tests.helpers.federations import run
from tests.helpers.models import saved, state_of
from tests.helpers.uploads import NAME, change, change_upload, check_uploads, copied, edit_all

HEAD = ("head.weight", "head.bias")


@pytest.fixture(scope="session")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain federation's uploads, the classifier's gradient among them."""
    names = ("pos_embed", "patch_embed.proj.weight", *HEAD)
    record = {"rounds": [1], "images": 2, "probes": [{"uploads": 2}], "parameters": names}
    return run(tmp_path_factory.mktemp("head"), record=record) / "uploads"


@pytest.fixture
def headed(with_head: Path, tmp_path: Path) -> Path:
    """A copy of them to spoil."""
    return copied(with_head, tmp_path / "headed")


def other_weights(folder: Path) -> None:
    edit_all(folder, weights_sha256=None)
    for path in folder.glob("weights/*.safetensors"):
        change(path, lambda held: held | {HEAD[0]: 2 * held[HEAD[0]].flip(0).contiguous()})


def other_sign(folder: Path) -> None:
    change_upload(folder, lambda held: {name: -tensor for name, tensor in held.items()})


def other_labels(folder: Path) -> None:
    """Two labels at once, as mixup or a batch has them."""
    second = torch.eye(len(load_file(folder / f"{NAME}.safetensors")[HEAD[1]]))[0]
    change_upload(folder, lambda held: held | {HEAD[1]: held[HEAD[1]] - 0.5 * second})


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
        ({"kind": "weight_difference", "optimizer": "adamw", "steps": 2}, ["which holds no"]),
        ({"kind": "weight_difference", "optimizer": "lion"}, ["which holds no", "lion"]),
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


def test_one_plain_step_is_exact_unless_its_numbers_leave_their_range(headed: Path) -> None:
    """Divided by a tiny learning rate, sound weights are infinite: a fault of their uploads."""
    edit_all(headed, kind="weight_difference", lr=0.1, momentum=0.9)
    text, usable = check_uploads(headed)
    assert usable
    assert "approximate" not in text
    assert "applies: patch_gradient" in text
    assert "not april: " in text
    edit_all(headed, momentum=0.0, lr=1e-320)
    text, usable = check_uploads(headed)
    assert "FAULT" in text
    assert not usable


# a model ------------------------------------------------------------------------------------------


def first_lines(model: str, **asked: Any) -> str:
    return " ".join(check_model(model, **asked).text().split("\n\n")[0].split())


def table(model: str, **asked: Any) -> dict[str, str]:
    return dict(check_model(model, **asked).attacks)


def test_a_model_out_of_reach_says_the_inequality_and_the_way_out() -> None:
    out_of_reach = table("vit_tiny_patch16_224")
    assert set(out_of_reach) == set(ATTACKS)
    for name in ("patch_gradient", "plain_step", "masked_span", "multi_round"):
        assert out_of_reach[name].startswith("no: N = 196 patches > D = 192")
        assert "208 px" in out_of_reach[name]
    assert out_of_reach["patch_prior"] == "yes"
    for size in (192, 208):
        within = table("vit_tiny_patch16_224", img_size=size)
        assert within["patch_gradient"] == "yes"
        assert within["multi_round"].startswith("yes, 6 uploads")
    assert table("vit_tiny_patch16_224", img_size=224) == out_of_reach
    assert "norm1" in table("vit_tiny_patch16_224", img_size=160)["april"]


@pytest.mark.parametrize(
    ("model", "asked", "named"),
    [
        ("cifar_vit_mjp", {"mjp": True}, ["N = 64", "7×7", "D = 160", "p = 147", "(it can mask)"]),
        ("vit_base_patch32_224", {}, ["p = 3072", "12 blocks", "(it cannot mask)", "--mjp"]),
        ("cifar_vit", {"mjp": True}, ["E_unk that was not trained"]),
        ("cifar_vit", {"batch": 2}, ["batch 2", "mixtures"]),
    ],
)
def test_the_first_lines_state_the_model(
    model: str, asked: dict[str, Any], named: list[str]
) -> None:
    said = first_lines(model, **asked)
    assert all(words in said for words in named), said


def test_the_client_is_asked_about() -> None:
    batched, withheld = table("cifar_vit", batch=2), table("cifar_vit", withhold=("pos_embed",))
    assert batched["april"].startswith("no: ")
    assert batched["patch_gradient"] == "yes"
    assert withheld["patch_gradient"].startswith("no: ")
    assert "pos_embed" in withheld["patch_gradient"]
    assert withheld["token_span"] == "yes"
    assert table("cifar_vit")["pixel_lattice"].startswith("no: ")  # no unknown embedding
    assert table("cifar_vit", mjp=True)["pixel_lattice"] == "yes"
    assert table("cifar_vit_mjp")["pixel_lattice"] == "yes"


def test_files_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    save_file(state_of(unknown_embedding=True), path)
    said = first_lines(str(path))
    assert "N = 16 patches of 8×8 at 32 px, width D = 24" in said
    assert "heads not known, E_unk (it can mask)" in said
    assert "N = 36 patches > D = 24" in table(str(path), img_size=48)["masked_span"]
    assert "no E_unk" in first_lines(str(saved(tmp_path, {"model": state_of()})))
    other = saved(tmp_path, {"fc.weight": torch.zeros(2, 2)})
    with pytest.raises(UserError, match=other.name):
        check_model(str(other))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"model": "deit_smal"}, ["deit_smal", "deit_small"]),
        ({"model": "nowhere.safetensors"}, ["nowhere.safetensors", "--model"]),
        ({"model": "resnet50"}, ["ResNet", "patch_embed.proj"]),
        ({"model": "cifar_vit", "batch": 0}, ["--batch", "0"]),
        ({"model": "cifar_vit", "withhold": ("pos_embd",)}, ["'pos_embd'", "pos_embed"]),
        ({"model": "cifar_vit", "img_size": 57}, ["57/7"]),
    ],
)
def test_mistakes_are_named(asked: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check_model(**asked)
    assert all(words in str(caught.value) for words in named), caught.value


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        (["--model", "cifar_vit", "--batch", "2"], 0, "attack "),
        ([], 2, "--model"),
        (["uploads", "--model", "cifar_vit"], 2, "both"),
        (["uploads", "--img-size", "64"], 2, "--img-size"),
    ],
)
def test_the_command(
    argv: list[str], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *argv]) == code
    printed = capsys.readouterr()
    assert named in printed.out + printed.err
