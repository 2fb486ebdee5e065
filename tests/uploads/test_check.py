"""`mjp check`: what is said of recorded uploads, and of a model before anything is computed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from attacks import ATTACKS
from attacks.equations import TABLE
from mjp_privacy import save_upload
from mjp_privacy.cli import main
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.diagnostics import shows_no_mask, unshuffled_uploads
from mjp_privacy.interfaces import AttackerView, ClientInput, Pixels
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.uploads.check import ModelAnswer, check_model
from tests.helpers.models import saved, state_of
from tests.helpers.planted import gradient_of
from tests.helpers.runs import MJP as TINY_MJP
from tests.helpers.uploads import (
    ONE,
    attacked,
    check_uploads,
    edit_all,
    load_uploads,
)

DIFFERENCE = {"kind": "weight_difference", "lr": 0.1}


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ({"gamma": 0.27}, ["unk_embed"]),
        ({"mean": [0.5] * 3, "std": [0.5] * 3}, ["normalised", "mean", "the weights file"]),
        (DIFFERENCE | {"momentum": 0.9, "steps": 3}, ["approximate", "0.9"]),
        (DIFFERENCE | {"optimizer": "adamw"}, ["approximate", "adamw"]),
        (DIFFERENCE | {"optimizer": "adamw", "steps": 2}, ["which holds no"]),
        ({"partial": False}, ["not uploaded"]),
    ],
)
def test_what_weakens_attacks_silently_is_said(
    folder: Path, spoil: dict[str, Any], named: list[str]
) -> None:
    """And a row of an attack that does not apply says why as `check` does."""
    before = check_uploads(folder)[0]
    edit_all(folder, **spoil)
    text = check_uploads(folder)[0]
    assert all(words in text for words in named)
    assert not any(words in before for words in named)
    if "which holds no" in named:
        summary, scores, _ = attacked(folder, **ONE)
        assert summary.exit_code == 0
        assert set(scores.status) == {"unsupported"}
        assert "AdamW" in scores.reason.iloc[0] in text


def test_one_plain_step_is_exact_unless_its_numbers_leave_their_range(folder: Path) -> None:
    """Divided by a tiny learning rate, sound weights are infinite: a fault of their uploads."""
    edit_all(folder, **DIFFERENCE, momentum=0.9)
    text, usable = check_uploads(folder)
    assert usable
    assert "approximate" not in text
    assert "applies: patch_gradient" in text
    (line,) = [line for line in text.splitlines() if "not april, " in line]
    assert "april_prior" in line  # for one reason
    edit_all(folder, momentum=0.0, lr=1e-320)
    text, usable = check_uploads(folder)
    assert "FAULT" in text
    assert not usable


def test_an_autocast_that_a_header_leaves_out_is_read_off_the_gradient(
    halved: tuple[LoadedModel, dict[str, Tensor]], tmp_path: Path
) -> None:
    model, sent = halved
    save_upload(tmp_path, model, sent, labels=3)
    (upload,) = load_uploads(tmp_path)
    assert upload.header.recipe.autocast == "bf16"
    edit_all(tmp_path, autocast="none")
    assert check_uploads(tmp_path)[1]


@pytest.mark.parametrize("spoiled", ["", "bfloat16", "noise", "noise untold", "weights", "labels"])
def test_a_classifiers_gradient_fits_the_weights_up_to_declared_errors(
    spoiled: str, tmp_path: Path
) -> None:
    model = load_model("cifar_vit")
    images = torch.rand(1, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    sent = gradient_of(model, images, torch.tensor([3]))
    if spoiled == "bfloat16":
        sent = {name: g.bfloat16() for name, g in sent.items()}
    elif spoiled.startswith("noise"):
        generator = torch.Generator().manual_seed(1)
        sent = {n: g + 3e-3 * torch.randn(g.shape, generator=generator) for n, g in sent.items()}
    elif spoiled == "labels":  # as mixup has them
        sent["head.bias"] = sent["head.bias"] - 0.5 * torch.eye(10)[0]
    elif spoiled == "weights":
        with torch.no_grad():
            model.head.weight.copy_(2 * model.head.weight.flip(0))
    save_upload(tmp_path, model, sent, labels=3, noise=3e-3 if spoiled == "noise" else 0.0)
    fits = spoiled in ("", "bfloat16", "noise")
    assert ("does not fit" in check_uploads(tmp_path)[0]) != fits


# uploads in which nothing was shuffled ------------------------------------------------------------


def of_two(**client: Any) -> dict[str, Any]:
    return {"upload": "weight_difference", "lr": 0.1, **client}


@pytest.mark.parametrize(
    ("client", "shows"),
    [
        ({}, True),
        (of_two(), True),
        (of_two(optimizer="adamw", lr=1e-3), True),
        ({"defenses": ["dp_sgd 0 clip 0.1"]}, True),  # every gradient as a whole becomes smaller
        # zero rows are filled: every upload looked as if nothing had been masked
        (of_two(optimizer="adamw", lr=1e-3, defenses=["dp_sgd 0.5"]), False),
        ({"defenses": ["gaussian_noise 0.1"]}, False),
        ({"position_noise": 0.1}, False),
        # rows are emptied: every upload looked as if something had been masked
        ({"defenses": ["prune 0.01"]}, False),
        ({"defenses": ["int8"]}, False),
        (of_two(lr=1e-4, defenses=["prune 0.5"]), False),
        (of_two(lr=1e-6), False),
    ],
    ids=str,
)
def test_errors_hide_what_was_masked(client: dict[str, Any], shows: bool) -> None:
    """Images 0 and 2 of four have some patches masked."""
    model, mask = load_model(**TINY_MJP), torch.zeros(4, 16, dtype=torch.bool)
    mask[[0, 2], :5] = True
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    inputs = ClientInput(images, torch.arange(4), list("abcd"), mask)
    update = make_upload(model, [inputs], ClientConfig(**client), names=[TABLE])
    view = AttackerView(model, [update], Pixels(32, model.card.mean, model.card.std))
    found, counted = shows_no_mask(view, update), unshuffled_uploads(view, 0.5)
    shown = torch.full((4,), torch.nan, dtype=torch.float64) if found is None else found
    expected = [0.0, 1.0, 0.0, 1.0] if shows else [torch.nan] * 4
    torch.testing.assert_close(shown, torch.tensor(expected).to(shown), equal_nan=True)
    assert counted.keys() == ({"unshuffled_uploads"} if found is not None else set())
    assert all(values.equal(shown) or not shows for values in counted.values())


# a model ------------------------------------------------------------------------------------------


TINY, FAR = "vit_tiny_patch16_224", "no: N = 196 patches > D = 192"
NORMED = "vit_base_patch16_rpn_224"
KEPT: dict[str, Any] = {"withhold": ("pos_embed",)}
ANSWERS: list[tuple[str, dict[str, Any], list[str], dict[str, str]]] = [
    # the model, what is asked, what the first lines say, and how answers begin
    (TINY, {}, [], {"patch_gradient": FAR, "masked_span": FAR, "patch_prior": "yes"}),
    (TINY, {"img_size": 208}, [], {"patch_gradient": "yes", "multi_round": "yes, 6 uploads"}),
    ("cifar_vit_mjp", {"mjp": True}, ["N = 64 patches of 7×7", "D = 160", "p = 147"], {}),
    ("cifar_vit_mjp", {}, ["(it can mask)"], {}),
    ("vit_base_patch32_224", {}, ["p = 3072", "12 blocks", "it cannot mask"], {}),
    ("cifar_vit", {"mjp": True}, ["E_unk that was not trained"], {"pixel_lattice": "yes"}),
    ("cifar_vit", {}, [], {"pixel_lattice": "no: "}),
    (
        "cifar_vit",
        {"batch": 2},
        [],
        {"april": "no: ", "patch_gradient": "yes, mixtures", "token_peeling": "yes"},
    ),
    ("vit_small_patch14_reg4_dinov2", {}, [], {"token_peeling": "no: B T = 1 × 1374"}),
    ("cait_xxs24_224", {}, [], {"token_peeling": "no: B T = 1 × 196"}),
    (
        "cifar_vit",
        {"withhold": ("pos_embed",)},
        [],
        {"patch_gradient": "no: ", "token_span": "yes"},
    ),
    ("nest_tiny", {}, ["N = 3136", "4×4", "D = 96", "Nest"], {}),
    # a norm behind the two layers is told without weights
    (NORMED, {"img_size": 64}, [], {"token_peeling": "no: ", "token_span": "yes"}),
    ("vit_relpos_small_patch16_224", {"img_size": 64}, [], {"token_peeling": "yes"}),
]


@pytest.mark.parametrize(("model", "asked", "said", "answers"), ANSWERS)
def test_a_model_is_stated_and_every_attack_has_an_answer(
    model: str, asked: dict[str, Any], said: list[str], answers: dict[str, str]
) -> None:
    told = check_model(model, **asked)
    assert set(told.attacks) == set(ATTACKS)
    assert all(words in first_lines(told) for words in said), first_lines(told)
    assert not asked.get("mjp") or "--mjp" not in first_lines(told)
    assert all(told.attacks[name].startswith(begins) for name, begins in answers.items())


def test_attacks_of_one_reason_stand_together() -> None:
    told = check_model("swin_tiny_patch4_window7_224")
    reasons = [
        answer.removeprefix("no: ") for answer in told.attacks.values() if answer[:2] == "no"
    ]
    assert len({*reasons}) < len(reasons)
    assert all(told.text().count(f": {reason}") == 1 for reason in reasons)
    assert "same picture" not in check_model("cifar_vit").attacks["shared_picture"]


def first_lines(told: ModelAnswer) -> str:
    return " ".join(told.text().split("\n\n")[0].split())


def test_files_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    save_file(state_of(unknown_embedding=True), path)
    said = first_lines(check_model(str(path)))
    assert "N = 16 patches of 8×8 at 32 px, width D = 24" in said
    assert "heads not known, E_unk (it can mask)" in said
    assert "N = 36 patches > D = 24" in check_model(str(path), img_size=48).attacks["masked_span"]
    assert "no E_unk" in check_model(str(saved(tmp_path, {"model": state_of()}))).text()
    other = saved(tmp_path, {"fc.weight": torch.zeros(2, 2)})
    with pytest.raises(UserError, match=other.name):
        check_model(str(other))


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        (["--model", "cifar_vit", "--batch", "2"], 0, ["attack "]),
        ([], 2, ["--model"]),
        (["uploads", "--model", "cifar_vit"], 2, ["both"]),
        (["uploads", "--img-size", "64"], 2, ["--img-size"]),
        (["--model", "deit_smal"], 2, ["deit_smal", "deit_small"]),
        (["--model", "siglip2"], 2, ["vit_base_patch16_siglip_224"]),
        (["--model", "vit_tiny"], 2, ["mean vit_tiny_patch16_224, vit_tiny_patch16_384"]),
        (["--model", "naflexvit_base_patch16_gap"], 2, ["attack_gradients"]),
        (["--model", "nowhere.safetensors"], 2, ["nowhere.safetensors"]),
        (["--model", "resnet50"], 2, ["ResNet", "patch_embed.proj"]),
        (["--model", "vit_small_r26_s32_224"], 2, ["2048"]),
        (["--model", "vit_small_patch16_223"], 2, ["vit_small_patch16_224"]),
        (["--model", "cifar_vit", "--batch", "0"], 2, ["batch", "0"]),
        (["--model", "cifar_vit", "--withhold", "pos_embd"], 2, ["'pos_embd'", "pos_embed"]),
        (["--model", "cifar_vit", "--img-size", "57"], 2, ["57/7"]),
    ],
)
def test_the_command(
    argv: list[str], code: int, named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *argv]) == code
    printed = capsys.readouterr()
    assert all(words in printed.out + printed.err for words in named), printed.err
