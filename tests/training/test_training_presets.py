"""Training as ours, as the paper prints it, and as its authors' code does it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_mapping
from mjp_privacy.training.config import plain
from mjp_privacy.training.config_files import load_training
from mjp_privacy.training.evaluation import EVALUATION_CHOICES
from mjp_privacy.training.learner import dal_weight
from mjp_privacy.training.published import (
    CHOICES,
    EMPTY_PUZZLE,
    counterpart,
    deviations,
    preset_fields,
)
from tests.helpers.training import content, small

ROOT = Path(__file__).resolve().parents[2]
IMAGENET = ROOT / "configs" / "training" / "imagenet.yaml"


def test_the_authors_code_differs_from_ours_in_these_fields_alone() -> None:
    ours = load_training(IMAGENET, "J")
    code = load_training(IMAGENET, "J", preset="authors_code")
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


def test_ours_is_what_the_table_of_choices_says() -> None:
    config = load_training(IMAGENET, "J")
    for choice in CHOICES:
        part, name = choice.field.split(".")
        assert getattr(getattr(config, part), name) == choice.ours, choice.field


def test_the_paper_keeps_what_it_does_not_print() -> None:
    config = load_training(content(model={"drop_path": 0.3}), preset="paper")
    assert config.model.drop_path == 0.3
    assert (config.jigsaw.gamma, config.jigsaw.dal_schedule) == (0.03, "constant")
    assert preset_fields("ours") == {}


def test_a_row_goes_before_a_preset_and_a_preset_before_the_base() -> None:
    for row, gamma in (("gamma_0.27", 0.27), ("J", 0.1)):
        assert load_training(IMAGENET, row, preset="authors_code").jigsaw.gamma == gamma


def test_gamma_zero_of_the_authors_code_is_row_d() -> None:
    zero = load_training(IMAGENET, "gamma_0", preset="authors_code")
    d = load_training(IMAGENET, "D", preset="authors_code")
    assert replace(zero, name=d.name) == d
    ours = load_training(IMAGENET, "gamma_0")
    assert (ours.model.unknown_embedding, ours.jigsaw.shuffle) == (True, "patches")


def test_the_weight_of_dal_rises_over_the_warm_up_and_falls_to_half() -> None:
    config = load_training(IMAGENET, "J", preset="authors_code")
    weights = [dal_weight(config, epoch * 10 + 3, 10) for epoch in range(300)]
    assert weights[0] == 0
    assert weights[19] == weights[20] == pytest.approx(0.01)
    assert weights[7] == pytest.approx(0.01 * 7 / 19)
    assert weights[160] == pytest.approx(0.0075)  # half way along the cosine
    assert weights[299] == pytest.approx(0.005 + 0.0025 * (1 + math.cos(math.pi * 279 / 280)))
    assert sorted(weights[20:], reverse=True) == weights[20:]
    assert {dal_weight(small(), step, 10) for step in range(50)} == {0.01}


def test_an_earlier_runs_record_equals_that_of_the_same_config() -> None:
    record = plain(load_training(IMAGENET, "J"))
    assert "preset" not in record
    assert "dal_schedule" not in record["jigsaw"]
    assert plain(load_training(IMAGENET, "J", preset="paper"))["preset"] == "paper"


def test_a_preset_that_does_not_exist_is_refused_with_the_others() -> None:
    with pytest.raises(UserError, match="authors_code") as error:
        load_training(content(preset="authors"), None)
    assert "preset" in str(error.value)
    with pytest.raises(UserError, match="preset"):
        load_training(content(preset=3), None)
    with pytest.raises(UserError, match="jigsaw"):
        load_training({**content(), "jigsaw": 5, "preset": "paper"}, None)


def test_the_table_of_deviations_stands_in_the_docs() -> None:
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert deviations() in text
    assert deviations(EVALUATION_CHOICES) in text
    assert EMPTY_PUZZLE in text


def test_the_authors_hand_their_drop_path_to_a_swin() -> None:
    table1 = read_mapping(ROOT / "configs" / "training" / "table1.yaml")
    dropping = {**table1, "model": {**table1["model"], "drop_path": 0.1}}
    for row, drop_path in (("swin_mjp", 0.1), ("vit_mjp", 0)):
        config = load_training(dropping, row, preset="authors_code")
        assert (config.model.drop_path, config.jigsaw.dal_schedule) == (
            drop_path,
            "rising_then_halving",
        )


def test_another_schedule_of_dal_has_no_printed_row() -> None:
    assert counterpart(plain(load_training(IMAGENET, "gamma_0.03"))) is not None
    authors = load_training(IMAGENET, "gamma_0.03", preset="authors_code")
    assert counterpart(plain(authors)) is None
