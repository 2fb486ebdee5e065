"""Configs of a training: rows, presets, printed rows, and fields with values that are none."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_mapping
from mjp_privacy.training.config import PUBLISHED, TrainingConfig, load_training, merged
from mjp_privacy.training.evaluation import TABLE1, TABLE3, TABLE4, counterpart
from mjp_privacy.training.learner import dal_weight
from tests.helpers.families import family_content
from tests.helpers.training import content, small

CONFIGS = Path(__file__).parents[2] / "configs" / "training"


def stock(name: str, row: str, **changes: Any) -> TrainingConfig:
    return load_training(CONFIGS / f"{name}.yaml", row, **changes)


# the paper's rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["imagenet", "cifar10"])
def test_all_rows_of_tables_3_and_4_have_a_config(name: str) -> None:
    """A row has the switches that its name says."""
    kinds = {"(PCA)": "pca", "(LN)": "linear", "(NLN)": "nonlinear"}
    for row, printed in TABLE4.items():
        config, said = stock(name, row), printed.row
        assert config.name.endswith(row)
        if name == "imagenet":
            assert counterpart(config) == (TABLE3[0.03] if row == "J" else printed)
        assert (config.model.position_embedding == "none") == ("− PEs" in said)
        assert (config.jigsaw.shuffle == "patches") == ("JP" in said)
        assert (config.jigsaw.shuffle == "patches_and_pixels") == ("SPP" in said)
        assert config.model.unknown_embedding == ("UNK" in said)
        assert config.model.index_embedding == ("IDX" in said)
        assert config.model.dal == next((k for word, k in kinds.items() if word in said), "none")
    for gamma, printed in TABLE3.items():
        config = stock(name, f"gamma_{gamma:g}")
        assert (config.jigsaw.gamma, counterpart(config)) == (gamma, printed)


def test_every_family_of_table_1_has_a_plain_row_and_one_with_mjp() -> None:
    for row, gamma, printed in (
        ("resnet", 0.27, TABLE1[0]),
        ("resnet_mjp", 0.03, TABLE1[1]),
        ("swin_relative", 0.27, TABLE1[4]),
        ("swin_mjp", 0.03, TABLE1[5]),
        ("swin_mjp", 0.27, None),
        ("swin", 0.27, None),
    ):
        config = stock("table1", row)
        assert counterpart(replace(config, jigsaw=replace(config.jigsaw, gamma=gamma))) == printed
    for family in ("resnet", "vit", "swin"):
        without, masking = stock("table1", family), stock("table1", f"{family}_mjp")
        assert (without.jigsaw.shuffle, masking.jigsaw.shuffle) == ("none", "patches")
        assert masking.model.unknown_embedding == (family != "resnet")
        for config in (without, masking):
            assert config.model.img_size // config.model.patch_size == 14
            assert config.recipe == stock("table1", "vit").recipe


def test_models_the_paper_has_not_stand_beside_none() -> None:
    for row in ("J_controlled", "A_paper_positions", "E_paper_positions", "G_controlled"):
        assert counterpart(stock("imagenet", row)) is None
    assert counterpart(stock("zoo", "vit_closed_form")) is None
    for changes in ({"share": 1.0}, {"dal_lambda": 0.1}, {"gamma": 0.5}):
        assert counterpart(small(jigsaw={"gamma": 0.27, **changes})) is None
    assert counterpart(small(jigsaw={"gamma": 0.27})) == TABLE3[0.27]
    assert counterpart(small(jigsaw={"gamma": 0.27}, initial={"checkpoint": "x.pth"})) is None
    assert counterpart(stock("zoo", "vit_mjp")) == TABLE3[0.27]
    assert counterpart(stock("imagenet", "gamma_0.03", preset="authors_code")) is None


def test_the_recipe_is_table_7() -> None:
    config = stock("imagenet", "J")
    recipe, augmentation, jigsaw = config.recipe, config.augmentation, config.jigsaw
    assert (recipe.epochs, recipe.batch, config.lr) == (300, 1024, 0.001)
    assert (config.warmup_epochs, config.first_epoch) == (20, 20)
    assert (recipe.weight_decay, recipe.label_smoothing) == (0.05, 0.1)
    assert recipe.clip_grad
    assert augmentation.repeats > 1
    assert (augmentation.rand_augment or "").startswith("rand-m9-mstd0.5")
    assert (augmentation.mixup, augmentation.cutmix, augmentation.erasing) == (0.8, 1.0, 0.25)
    assert (jigsaw.dal_lambda, jigsaw.share, jigsaw.mask_per) == (0.01, 0.5, "batch")
    assert (jigsaw.dal_target, jigsaw.position_init, jigsaw.gamma) == ("raw", "paper", 0.03)
    shorter = small(recipe={"epochs": 30, "warmup_epochs": None})
    assert shorter.warmup_epochs == shorter.first_epoch == pytest.approx(2)
    rows = ("vit", "vit_jp", "vit_mjp", "vit_mjp_controlled", "vit_paper_positions")
    taking = [row for row in rows if stock("zoo", row).positions_as_paper]
    assert taking == ["vit_mjp", "vit_paper_positions"]


# presets ------------------------------------------------------------------------------------------


def test_the_authors_code_differs_from_ours_in_these_fields_alone() -> None:
    ours, code = stock("imagenet", "J"), stock("imagenet", "J", preset="authors_code")
    assert (code.jigsaw.gamma, code.jigsaw.dal_schedule) == (0.1, "rising_then_halving")
    assert (code.model.drop_path, code.recipe.precision) == (0, "float32")
    same = replace(
        code,
        preset="ours",
        jigsaw=replace(code.jigsaw, gamma=0.03, dal_schedule="constant"),
        model=replace(code.model, drop_path=0.1),
        recipe=replace(code.recipe, precision="bfloat16"),
    )
    assert same == ours
    row_first = stock("imagenet", "gamma_0.27", preset="authors_code")
    assert row_first.jigsaw.gamma == 0.27
    table1 = read_mapping(CONFIGS / "table1.yaml")
    dropping = {**table1, "model": {**table1["model"], "drop_path": 0.1}}
    for row, drop_path in (("swin_mjp", 0.1), ("vit_mjp", 0)):  # a Swin keeps it
        config = load_training(dropping, row, preset="authors_code")
        assert config.model.drop_path == drop_path
        assert config.jigsaw.dal_schedule == "rising_then_halving"
    papers = load_training(content(model={"drop_path": 0.3}), preset="paper")
    assert papers.model.drop_path == 0.3  # which it does not print
    assert (papers.jigsaw.gamma, papers.jigsaw.dal_schedule) == (0.03, "constant")


def test_the_weight_of_dal_rises_over_the_warm_up_and_falls_to_half() -> None:
    config = stock("imagenet", "J", preset="authors_code")
    weights = [dal_weight(config, epoch * 10 + 3, 10) for epoch in range(300)]
    assert weights[0] == 0
    assert weights[19] == weights[20] == pytest.approx(0.01)
    assert weights[7] == pytest.approx(0.01 * 7 / 19)
    assert weights[160] == pytest.approx(0.0075)  # half way along the cosine
    assert weights[299] == pytest.approx(0.005 + 0.0025 * (1 + math.cos(math.pi * 279 / 280)))
    assert sorted(weights[20:], reverse=True) == weights[20:]
    assert {dal_weight(small(), step, 10) for step in range(50)} == {0.01}


def test_the_docs_have_what_each_preset_sets() -> None:
    text = (CONFIGS.parents[1] / "docs" / "paper.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+)\.(\w+) \| (.+?) \| (.+?) \| (.+?) \|", text, re.MULTILINE)
    assert len(rows) == 5
    for part, name, ours, *others in rows:
        for preset, said in zip(PUBLISHED["presets"], (ours, *others), strict=True):
            found = getattr(getattr(stock("imagenet", "J", preset=preset), part), name)
            assert str(found) == (ours if said == "not printed" else said)


# mistakes -----------------------------------------------------------------------------------------

BARE = {"position_embedding": "none", "unknown_embedding": False, "dal": "none"}


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("vit", {"recipe": {"epoch": 3}}, "recipe.epoch.* epochs"),
        ("vit", {"recipe": {"epochs": 10**9}}, "recipe.epochs"),
        ("vit", {"recipe": {"clip_grad": 0}}, "clip_grad"),  # which would stop every weight
        ("vit", {"recipe": {"ema_decay": 1}}, "ema_decay"),  # an average of the first weights alone
        ("vit", {"recipe": {"warmup_epochs": 9}}, "warmup_epochs"),
        ("vit", {"jigsaw": {"first_epoch": 9}}, "first_epoch"),
        ("vit", {"model": {"position_embedding": "none"}}, "unknown_embedding: false"),
        ("vit", {"model": {"patch_size": 5}}, "28/5"),
        ("vit", {"model": {"embed_dim": 16384, "depth": 512, "num_heads": 2}}, "parameters"),
        ("vit", {"augmentation": {"rand_augment": "rand-m9"}}, "rand_augment: null"),
        ("vit", {"preset": "authors"}, "authors_code"),
        ("vit", {"stages": [1, 1]}, "stages"),
        ("swin", {"stages": None}, "stages"),
        ("swin", {"family": "resnet", "model": BARE | {"dal": "linear"}}, "position"),
        ("swin", {"model": {"index_embedding": True}}, "index_embedding"),
        ("swin", {"initial": {"checkpoint": "x"}}, "initial"),
    ],
)
def test_a_mistake_is_named(family: str, changes: dict[str, Any], named: str) -> None:
    """Any value in any field: tests/inputs/test_readers.py."""
    fields = content() if family == "vit" else family_content(family)
    with pytest.raises(UserError, match=named) as caught:
        load_training(merged(fields, changes))
    assert len(str(caught.value)) < 3000


def test_rows_are_asked_for_by_name_and_the_command_line_goes_before_the_file() -> None:
    for name, row, named in (
        ("zoo", None, "vit_mjp"),
        ("zoo", "vit_mpj", r"vit_mjp\?"),
        ("zooo", "vit", "zoo.yaml"),
    ):
        with pytest.raises(UserError, match=named):
            stock(name, row)  # type: ignore[arg-type]
    config = load_training(content(), None, epochs=7, seed=3, lr=None, initial="x.pth")
    assert (config.recipe.epochs, config.seed, config.recipe.lr) == (7, 3, 0.003)
    assert config.initial is not None
    assert config.initial.checkpoint == "x.pth"
