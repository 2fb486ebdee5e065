"""Configs of a training: rows, presets, printed rows, and fields with values that are none."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_mapping
from mjp_privacy.training.config import TrainingConfig, plain
from mjp_privacy.training.config_files import load_training
from mjp_privacy.training.learner import dal_weight
from mjp_privacy.training.published import (
    PUBLISHED,
    TABLE3,
    TABLE4,
    counterpart,
    preset_fields,
)
from mjp_privacy.training.trainer import train
from tests.helpers.training import content, small

CONFIGS = Path(__file__).parents[2] / "configs" / "training"


TABLE4_ROWS = list("ABCDEFGHIJ")


TABLE3_ROWS = ["gamma_0", "gamma_0.03", "gamma_0.09", "gamma_0.15", "gamma_0.21", "gamma_0.27"]


@pytest.mark.parametrize("name", ["imagenet.yaml", "cifar10.yaml"])
def test_all_rows_of_tables_3_and_4_have_a_config(name: str) -> None:
    controls = ["J_controlled", "A_paper_positions", "E_paper_positions", "G_controlled"]
    for row in TABLE4_ROWS + TABLE3_ROWS + controls:
        config = load_training(CONFIGS / name, row)
        assert config.name.endswith(row)
        if row in controls:
            assert counterpart(config) is None


@pytest.mark.parametrize("row", TABLE4_ROWS)
def test_a_row_of_table_4_has_the_switches_its_name_says(row: str) -> None:
    config = load_training(CONFIGS / "imagenet.yaml", row)
    expected = TABLE3[0.03] if row == "J" else TABLE4[row]
    assert counterpart(config) == expected
    name = TABLE4[row].row
    assert (config.model.position_embedding == "none") == ("− PEs" in name)
    assert (config.jigsaw.shuffle == "patches") == ("JP" in name)
    assert (config.jigsaw.shuffle == "patches_and_pixels") == ("SPP" in name)
    assert config.model.unknown_embedding == ("UNK" in name)
    assert config.model.index_embedding == ("IDX" in name)
    kinds = {"(PCA)": "pca", "(LN)": "linear", "(NLN)": "nonlinear"}
    assert config.model.dal == next((k for word, k in kinds.items() if word in name), "none")


@pytest.mark.parametrize("row", TABLE3_ROWS)
def test_a_row_of_table_3_has_its_ratio(row: str) -> None:
    config = load_training(CONFIGS / "cifar10.yaml", row)
    found = counterpart(config)
    assert found is not None
    assert found.row == f"γ = {float(row.removeprefix('gamma_')):g}"
    assert config.jigsaw.gamma == float(row.removeprefix("gamma_"))


def test_models_the_paper_has_not_stand_beside_none() -> None:
    assert counterpart(load_training(CONFIGS / "zoo.yaml", "vit_closed_form")) is None
    assert counterpart(load_training(CONFIGS / "zoo.yaml", "vit_paper_positions")) is None
    assert counterpart(small(jigsaw={"gamma": 0.5})) is None
    fine_tuned = small(jigsaw={"gamma": 0.27}, initial={"checkpoint": "x.pth"})
    assert counterpart(fine_tuned) is None
    for row in ("vit_jp", "vit_mjp_controlled"):
        assert counterpart(load_training(CONFIGS / "zoo.yaml", row)) is None
    assert counterpart(load_training(CONFIGS / "zoo.yaml", "vit_mjp")) == TABLE3[0.27]
    for changes in ({"share": 1.0}, {"mask_per": "image"}, {"dal_lambda": 0.1}):
        assert counterpart(small(jigsaw={"gamma": 0.27, **changes})) is None
    assert counterpart(small(jigsaw={"gamma": 0.27})) == TABLE3[0.27]
    authors = load_training(CONFIGS / "imagenet.yaml", "gamma_0.03", preset="authors_code")
    assert counterpart(authors) is None


def test_the_recipe_is_table_7() -> None:
    config = load_training(CONFIGS / "imagenet.yaml", "J")
    recipe, augmentation, jigsaw = config.recipe, config.augmentation, config.jigsaw
    assert (recipe.epochs, recipe.batch, config.lr) == (300, 1024, 0.001)
    assert (config.warmup_epochs, config.first_epoch) == (20, 20)
    assert (recipe.weight_decay, recipe.label_smoothing) == (0.05, 0.1)
    assert recipe.clip_grad
    assert augmentation.repeats > 1
    assert augmentation.rand_augment is not None
    assert augmentation.rand_augment.startswith("rand-m9-mstd0.5")
    assert (augmentation.mixup, augmentation.cutmix, augmentation.erasing) == (0.8, 1.0, 0.25)
    assert (jigsaw.dal_lambda, jigsaw.share, jigsaw.mask_per) == (0.01, 0.5, "batch")
    assert (jigsaw.dal_target, jigsaw.position_init, jigsaw.gamma) == ("raw", "paper", 0.03)


def test_warmup_and_first_epoch_are_shares_of_a_shorter_run() -> None:
    config = small(recipe={"epochs": 30, "warmup_epochs": None})
    assert config.warmup_epochs == config.first_epoch == pytest.approx(2)


def test_only_mjp_models_and_the_control_take_the_papers_positions() -> None:
    zoo = {
        row: load_training(CONFIGS / "zoo.yaml", row).positions_as_paper
        for row in ("vit", "vit_jp", "vit_mjp", "vit_mjp_controlled", "vit_paper_positions")
    }
    assert zoo == {
        "vit": False,
        "vit_jp": False,
        "vit_mjp": True,
        "vit_mjp_controlled": False,
        "vit_paper_positions": True,
    }


def test_the_printed_figures_are_the_papers() -> None:
    """Typed twice, from the paper's Tables 3 and 4."""
    table4 = {row: (model.top1, model.consistency) for row, model in TABLE4.items()}
    assert table4 == {
        "A": (79.8, 64.3),
        "B": (77.5, 100.0),
        "C": (74.9, 74.8),
        "D": (80.0, 64.0),
        "E": (79.2, 73.8),
        "F": (79.9, 79.6),
        "G": (80.1, 83.8),
        "H": (79.9, 83.4),
        "I": (80.0, 83.8),
        "J": (80.5, 82.9),
    }
    columns = zip(*((m.top1, m.diff_norm, m.consistency) for m in TABLE3.values()), strict=True)
    assert [list(column) for column in columns] == [
        [80.0, 80.5, 80.3, 80.4, 80.2, 80.3],
        [16.56, 8.96, 6.36, 5.23, 4.39, 3.97],
        [64.0, 82.9, 88.1, 90.5, 92.3, 93.1],
    ]


def test_the_authors_code_differs_from_ours_in_these_fields_alone() -> None:
    ours = load_training(CONFIGS / "imagenet.yaml", "J")
    code = load_training(CONFIGS / "imagenet.yaml", "J", preset="authors_code")
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


def test_the_paper_keeps_what_it_does_not_print() -> None:
    config = load_training(content(model={"drop_path": 0.3}), preset="paper")
    assert config.model.drop_path == 0.3
    assert (config.jigsaw.gamma, config.jigsaw.dal_schedule) == (0.03, "constant")
    assert preset_fields("ours") == {}


def test_a_row_goes_before_a_preset_and_a_preset_before_the_base() -> None:
    for row, gamma in (("gamma_0.27", 0.27), ("J", 0.1)):
        assert (
            load_training(CONFIGS / "imagenet.yaml", row, preset="authors_code").jigsaw.gamma
            == gamma
        )


def test_gamma_zero_of_the_authors_code_is_row_d() -> None:
    zero = load_training(CONFIGS / "imagenet.yaml", "gamma_0", preset="authors_code")
    d = load_training(CONFIGS / "imagenet.yaml", "D", preset="authors_code")
    assert replace(zero, name=d.name) == d
    ours = load_training(CONFIGS / "imagenet.yaml", "gamma_0")
    assert (ours.model.unknown_embedding, ours.jigsaw.shuffle) == (True, "patches")


def test_the_weight_of_dal_rises_over_the_warm_up_and_falls_to_half() -> None:
    config = load_training(CONFIGS / "imagenet.yaml", "J", preset="authors_code")
    weights = [dal_weight(config, epoch * 10 + 3, 10) for epoch in range(300)]
    assert weights[0] == 0
    assert weights[19] == weights[20] == pytest.approx(0.01)
    assert weights[7] == pytest.approx(0.01 * 7 / 19)
    assert weights[160] == pytest.approx(0.0075)  # half way along the cosine
    assert weights[299] == pytest.approx(0.005 + 0.0025 * (1 + math.cos(math.pi * 279 / 280)))
    assert sorted(weights[20:], reverse=True) == weights[20:]
    assert {dal_weight(small(), step, 10) for step in range(50)} == {0.01}


def test_the_authors_hand_their_drop_path_to_a_swin() -> None:
    table1 = read_mapping(CONFIGS / "table1.yaml")
    dropping = {**table1, "model": {**table1["model"], "drop_path": 0.1}}
    for row, drop_path in (("swin_mjp", 0.1), ("vit_mjp", 0)):
        config = load_training(dropping, row, preset="authors_code")
        assert (config.model.drop_path, config.jigsaw.dal_schedule) == (
            drop_path,
            "rising_then_halving",
        )


NUMBERS: list[Any] = ["5", True, [1], {}, math.nan, math.inf, -(10**9), 1e300, 2**64]
WRONG: dict[Any, list[Any]] = {
    int: [*NUMBERS, 2.5],
    float: NUMBERS,
    bool: ["yes", 1, 0, "true", [True], {}],
    str: [5, True, [1], {}, "x" * 5000, ""],
    tuple: [0.5, "0.5", [0.5], [0.5] * 4, [0.5, 0.5, "0.5"], [0.5, 0.5, 300], {}],
    Literal: ["no such word", 5, True, ["none"], {}],
}
"""Values that no field of a type takes."""


def wrong_fields(kind: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The place of each field, and each value that it must not take."""
    for name, hint in get_type_hints(kind).items():
        optional = get_origin(hint) in (typing.Union, types.UnionType)
        hint = get_args(hint)[0] if optional else hint  # the other one is None
        if dataclasses.is_dataclass(hint):
            yield from (((*above, name), value) for value in (5, "x", [1], True))
            yield from wrong_fields(hint, (*above, name))
        else:
            yield from (((*above, name), value) for value in WRONG[get_origin(hint) or hint])


@pytest.mark.parametrize("part", sorted(get_type_hints(TrainingConfig)))
def test_a_wrong_value_is_refused_by_its_field(part: str) -> None:
    for place, value in wrong_fields(TrainingConfig):
        if place[0] != part:
            continue
        config = content()
        inner = config
        for name in place[:-1]:
            inner[name] = dict(inner.get(name) or {})
            inner = inner[name]
        inner[place[-1]] = value
        with pytest.raises(UserError, match=place[-1]) as caught:
            load_training(config)
        assert len(str(caught.value)) < 3000


def test_the_table_of_choices_is_ours_and_stands_in_the_docs() -> None:
    """The fields of published.yaml have the values of our config, and docs/paper.md names them."""
    config = load_training(CONFIGS / "imagenet.yaml", "J")
    text = (CONFIGS.parents[1] / "docs" / "paper.md").read_text(encoding="utf-8")
    for choice in PUBLISHED["training"]:
        part, name = choice["field"].split(".")
        assert getattr(getattr(config, part), name) == choice["ours"]
    for choice in (*PUBLISHED["training"], *PUBLISHED["measuring"]):
        cells = ["not printed" if cell is None else str(cell) for cell in choice.values()]
        assert f"| {' | '.join(cells)} |" in text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"recipe": {"epoch": 3}}, r"recipe.epoch.* epochs\?"),
        ({"recipe": {"epochs": 10**9}}, "recipe.epochs"),
        ({"recipe": {"warmup_epochs": 9}}, "warmup_epochs"),
        ({"jigsaw": {"first_epoch": 9}}, "first_epoch"),
        ({"jigsaw": {"gammas": 1.5}}, r"jigsaw.gammas.* gamma\?"),
        ({"model": {"position_embedding": "none"}}, "unknown_embedding: false"),
        ({"model": {"patch_size": 5}}, "28/5"),
        ({"model": {"embed_dim": 16384, "depth": 512, "num_heads": 2}}, "parameters"),
        ({"augmentation": {"rand_augment": "rand-m9"}}, "rand_augment: null"),
        ({"augmentation": {"erasing": 0.25}}, "erasing: 0"),
        ({"preset": "authors"}, "authors_code"),
        ({"preset": 3}, "preset"),
        ({"jigsaw": 5, "preset": "paper"}, "jigsaw"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], named: str) -> None:
    fields = content(**{key: part for key, part in changes.items() if isinstance(part, dict)})
    with pytest.raises(UserError, match=named):
        load_training({**fields, **{k: p for k, p in changes.items() if not isinstance(p, dict)}})


def test_rows_are_asked_for_by_name() -> None:
    for name, row, named in (
        ("zoo.yaml", None, "vit_mjp"),
        ("zoo.yaml", "vit_mpj", r"vit_mjp\?"),
        ("zooo.yaml", "vit", "zoo.yaml"),
    ):
        with pytest.raises(UserError, match=named):
            load_training(CONFIGS / name, row)


def test_the_command_line_goes_before_the_file() -> None:
    config = load_training(content(), None, epochs=7, seed=3, lr=None, initial="x.pth")
    assert (config.recipe.epochs, config.seed, config.recipe.lr) == (7, 3, 0.003)
    assert config.initial is not None
    assert config.initial.checkpoint == "x.pth"


def test_an_earlier_runs_record_equals_that_of_the_same_config() -> None:
    record = plain(load_training(CONFIGS / "imagenet.yaml", "J"))
    assert not {"preset", "task", "family", "stages"} & set(record)
    assert "dal_schedule" not in record["jigsaw"]
    again = load_training(CONFIGS / "imagenet.yaml", "J", preset="paper")
    assert plain(again)["preset"] == "paper"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--epochs", "0"), ("--batch", "-3"), ("--lr", "nan"), ("--seed", str(2**63))),
        *(("--workers", "1000000"), ("--threads", "0"), ("--row", "A")),
        *(("--initial", "nowhere.pth"), ("--overlay", "nowhere"), ("--val", "nowhere")),
    ],
)
def test_options_are_as_bounded(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content()))
    out = tmp_path / "run"
    words = ["train", config, "--data", data, "--out", out, "--device", "cpu", option, value]
    assert main([*map(str, words)]) == 2
    said = capsys.readouterr().err
    assert option.strip("-") in said or value in said
    assert not (out / "checkpoint.pt").exists()


def test_weights_to_start_from_are_refused_before_any_image_is_read(
    tmp_path: Path, data: Path
) -> None:
    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pth")
    for image in data.rglob("*.png"):
        image.write_bytes(b"no image")
    config = small(initial={"checkpoint": str(tmp_path / "other.pth")})
    with pytest.raises(UserError, match=r"other\.pth"):
        train(config, data=data, out=tmp_path / "run", device="cpu")
