"""`mjp check --model`: what is said of a model before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attacks import ATTACKS
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.check_model import ModelQuestion, check_model
from tests.helpers.models import saved, state_of

UP_TO_208 = (
    "no: N = 196 patches > D = 192: closed forms need patches <= width; up to 208 px they apply"
)


def table(model: str, **asked: object) -> dict[str, str]:
    """The lines of attacks, by attack."""
    text = check_model(ModelQuestion(model, **asked))  # type: ignore[arg-type]
    lines = text.split("\n\n")[1].splitlines()[1:]
    return dict(line.split(maxsplit=1) for line in lines)  # type: ignore[misc]


def notes(model: str, **asked: object) -> str:
    text = check_model(ModelQuestion(model, **asked))  # type: ignore[arg-type]
    return " ".join(text.split("\n\n")[0].split())


def test_a_model_out_of_reach_says_the_inequality_and_the_way_out() -> None:
    out_of_reach = table("vit_tiny_patch16_224")
    assert set(out_of_reach) == set(ATTACKS)
    for name in ("patch_gradient", "plain_step", "masked_span", "multi_round"):
        assert out_of_reach[name] == UP_TO_208
    assert out_of_reach["patch_prior"] == "yes"
    for size in (192, 208):
        within = table("vit_tiny_patch16_224", img_size=size)
        assert within["patch_gradient"] == "yes"
        assert within["multi_round"] == "yes, 6 uploads of the same picture"
    assert table("vit_tiny_patch16_224", img_size=224)["patch_gradient"] == UP_TO_208
    assert (
        table("vit_tiny_patch16_224", img_size=160)["april"]
        == "yes, of a client that trains a block 0 without norm1 and residuals"
    )


def test_the_first_line_states_the_model() -> None:
    said = notes("cifar_vit_mjp", mjp=True)
    assert said == (
        "cifar_vit_mjp: N = 64 patches of 7×7 at 56 px, width D = 160, p = 147 values a patch, 4 "
        "blocks, 5 heads, E_unk (it can mask)"
    )
    said = notes("vit_base_patch32_224")
    assert "p = 3072 values a patch, 12 blocks, 12 heads, no E_unk (it cannot mask)" in said
    assert "D = 768 < p = 3072: the embedding drops 2304 directions of a patch, so april, " in said
    assert "no prior was fitted to patches of 32×32: `fitted` derives their covariance" in said
    assert "--mjp asks about this model as an MJP client" in said


def test_the_client_is_asked_about() -> None:
    batched = table("cifar_vit", batch=2)
    assert "2" in batched["april"]
    assert batched["april"].startswith("no: ")
    assert batched["patch_gradient"] == "yes"
    assert "batch 2: closed forms that apply return mixtures" in notes("cifar_vit", batch=2)
    withheld = table("cifar_vit", withhold=("pos_embed",))
    assert withheld["patch_gradient"] == "no: the upload holds no gradient of pos_embed"
    assert withheld["token_span"] == "yes"


def test_a_plain_model_as_an_mjp_client() -> None:
    plain = table("cifar_vit")
    assert (
        plain["pixel_lattice"]
        == "no: the model has no unknown embedding, so no patch can be masked"
    )
    assert table("cifar_vit", mjp=True)["pixel_lattice"] == "yes"
    assert "with an E_unk that was not trained" in notes("cifar_vit", mjp=True)
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
    ("asked", "said"),
    [
        ({"model": "deit_smal"}, "Unknown model 'deit_smal'. Did you mean deit_small?"),
        ({"model": "nowhere.safetensors"}, "No checkpoint at nowhere.safetensors"),
        ({"model": "nowhere.safetensors"}, "Check the path given to --model."),
        ({"model": "no/where"}, "Check the path given to --model."),
        (
            {"model": "vit_tinny_patch16_224"},
            "Unknown model 'vit_tinny_patch16_224'. Did you mean vit_tiny_patch16_224?",
        ),
        (
            {"model": "vit_tinny_patch16_224"},
            "and every plain timm ViT or DeiT by its name, such as vit_tiny_patch16_224.",
        ),
        (
            {"model": "deit3_small_patch16_224"},
            "'deit3_small_patch16_224'. timm has it, but it is no plain ViT: it has layer scale.",
        ),
        ({"model": "resnet50"}, "'resnet50'. timm has it, but it is no plain ViT. Available: "),
        ({"model": "cifar_vit", "batch": 0}, "--batch: expected 1 or more images, got 0."),
        (
            {"model": "cifar_vit", "withhold": ("pos_embd",)},
            "--withhold: expected a parameter of the model, got 'pos_embd'. Did you mean pos_embed",
        ),
        (
            {"model": "cifar_vit", "withhold": ("zzz",)},
            "got 'zzz'. Such are pos_embed and head.bias.",
        ),
        ({"model": "cifar_vit", "img_size": 57}, "got 57/7"),
    ],
)
def test_mistakes(asked: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_model(ModelQuestion(**asked))  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_a_file_that_is_no_vit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a plain ViT classifier"):
        check_model(ModelQuestion(str(saved(tmp_path, {"fc.weight": torch.zeros(2, 2)}))))


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--model", "cifar_vit", "--batch", "2"], 0, "attack "),
        ([], 2, "expected a folder of recorded uploads or --model NAME|FILE, got none of them"),
        (["uploads", "--model", "cifar_vit"], 2, "got both. Give one of the two."),
        (["uploads", "--img-size", "64"], 2, "expected --img-size with --model NAME|FILE, got a "),
        (["--model", "cifar_vitt"], 2, "Did you mean cifar_vit?"),
        (
            ["--model", "cifar_vit", "--num-heads", "3", "--mean", "0.5", "--std", "0.5"],
            0,
            "--num-heads, --mean, --std: of no effect here, what applies does not depend on it",
        ),
        (["uploads", "--num-heads", "3"], 2, "expected --num-heads with --model NAME|FILE"),
    ],
)
def test_the_command(
    argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *argv]) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
