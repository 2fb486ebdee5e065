"""`mjp check --model`: what is said of a model before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attacks import ATTACKS
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.uploads.check import ModelQuestion, check_model
from tests.helpers.models import saved, state_of


def table(model: str, **asked: object) -> dict[str, str]:
    """The lines of attacks, by attack."""
    text = check_model(ModelQuestion(model, **asked)).text()  # type: ignore[arg-type]
    lines = text.split("\n\n")[1].splitlines()[1:]
    return dict(line.split(maxsplit=1) for line in lines)  # type: ignore[misc]


def notes(model: str, **asked: object) -> str:
    text = check_model(ModelQuestion(model, **asked)).text()  # type: ignore[arg-type]
    return " ".join(text.split("\n\n")[0].split())


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
        ("vit_base_patch32_224", {}, ["drops 2304 directions", "32×32"]),
        ("cifar_vit", {"mjp": True}, ["E_unk that was not trained"]),
        ("cifar_vit", {"batch": 2}, ["batch 2", "mixtures"]),
    ],
)
def test_the_first_lines_state_the_model(
    model: str, asked: dict[str, object], named: list[str]
) -> None:
    assert all(words in notes(model, **asked) for words in named), notes(model, **asked)


def test_the_client_is_asked_about() -> None:
    batched = table("cifar_vit", batch=2)
    assert batched["april"].startswith("no: ")
    assert batched["patch_gradient"] == "yes"
    withheld = table("cifar_vit", withhold=("pos_embed",))
    assert withheld["patch_gradient"].startswith("no: ")
    assert "pos_embed" in withheld["patch_gradient"]
    assert withheld["token_span"] == "yes"
    assert table("cifar_vit")["pixel_lattice"].startswith("no: ")  # no unknown embedding
    assert table("cifar_vit", mjp=True)["pixel_lattice"] == "yes"
    assert table("cifar_vit_mjp")["pixel_lattice"] == "yes"


def test_files_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    save_file(state_of(unknown_embedding=True), path)
    said = notes(str(path))
    assert "N = 16 patches of 8×8 at 32 px, width D = 24" in said
    assert "heads not known, E_unk (it can mask)" in said
    assert "N = 36 patches > D = 24" in table(str(path), img_size=48)["masked_span"]
    pth = saved(tmp_path, {"model": state_of()})
    assert "no E_unk" in notes(str(pth))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"model": "deit_smal"}, ["deit_smal", "deit_small"]),
        ({"model": "nowhere.safetensors"}, ["nowhere.safetensors", "--model"]),
        ({"model": "no/where"}, ["no/where", "--model"]),
        ({"model": "vit_tinny_patch16_224"}, ["vit_tinny", "vit_tiny_patch16_224", "timm"]),
        ({"model": "deit3_small_patch16_224"}, ["deit3_small_patch16_224", "layer scale"]),
        ({"model": "resnet50"}, ["resnet50", "no plain ViT"]),
        ({"model": "cifar_vit", "batch": 0}, ["--batch", "0"]),
        ({"model": "cifar_vit", "withhold": ("pos_embd",)}, ["'pos_embd'", "pos_embed"]),
        ({"model": "cifar_vit", "withhold": ("zzz",)}, ["'zzz'", "head.bias"]),
        ({"model": "cifar_vit", "img_size": 57}, ["57/7"]),
    ],
)
def test_mistakes_are_named(asked: dict[str, object], named: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check_model(ModelQuestion(**asked))  # type: ignore[arg-type]
    assert all(words in str(caught.value) for words in named), caught.value


def test_a_file_that_is_no_vit(tmp_path: Path) -> None:
    path = saved(tmp_path, {"fc.weight": torch.zeros(2, 2)})
    with pytest.raises(UserError, match=path.name):
        check_model(ModelQuestion(str(path)))


KNOWN = ["--num-heads", "3", "--mean", "0.5", "--std", "0.5"]


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        (["--model", "cifar_vit", "--batch", "2"], 0, "attack "),
        ([], 2, "--model"),
        (["uploads", "--model", "cifar_vit"], 2, "both"),
        (["uploads", "--img-size", "64"], 2, "--img-size"),
        (["--model", "cifar_vitt"], 2, "cifar_vit?"),
        (["--model", "cifar_vit", *KNOWN], 0, "--num-heads, --mean, --std"),  # of no effect here
        (["uploads", "--num-heads", "3"], 2, "--num-heads"),
    ],
)
def test_the_command(
    argv: list[str], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *argv]) == code
    printed = capsys.readouterr()
    assert named in printed.out + printed.err
