"""Training configs: rows over a base, derived numbers, mistakes."""

from pathlib import Path

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.training.config import TrainingConfig, plain
from mjp_privacy.training.config_files import load_training
from mjp_privacy.training.published import TABLE3, TABLE4, counterpart
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
            assert counterpart(plain(config)) is None


@pytest.mark.parametrize("row", TABLE4_ROWS)
def test_a_row_of_table_4_has_the_switches_its_name_says(row: str) -> None:
    config = load_training(CONFIGS / "imagenet.yaml", row)
    expected = TABLE3[0.03] if row == "J" else TABLE4[row]
    assert counterpart(plain(config)) == expected
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
    found = counterpart(plain(config))
    assert found is not None
    assert found.row == f"γ = {float(row.removeprefix('gamma_')):g}"
    assert config.jigsaw.gamma == float(row.removeprefix("gamma_"))


def test_models_the_paper_has_not_stand_beside_none() -> None:
    assert counterpart(plain(load_training(CONFIGS / "zoo.yaml", "vit_closed_form"))) is None
    assert counterpart(plain(load_training(CONFIGS / "zoo.yaml", "vit_paper_positions"))) is None
    assert counterpart(plain(small(jigsaw={"gamma": 0.5}))) is None
    fine_tuned = small(jigsaw={"gamma": 0.27}, initial={"checkpoint": "x.pth"})
    assert counterpart(plain(fine_tuned)) is None
    for row in ("vit_jp", "vit_mjp_controlled"):
        assert counterpart(plain(load_training(CONFIGS / "zoo.yaml", row))) is None
    assert counterpart(plain(load_training(CONFIGS / "zoo.yaml", "vit_mjp"))) == TABLE3[0.27]
    for changes in ({"share": 1.0}, {"mask_per": "image"}, {"dal_lambda": 0.1}):
        assert counterpart(plain(small(jigsaw={"gamma": 0.27, **changes}))) is None
    assert counterpart(plain(small(jigsaw={"gamma": 0.27}))) == TABLE3[0.27]


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


def test_the_command_line_goes_before_the_file() -> None:
    config = load_training(content(), None, epochs=7, seed=3, lr=None, initial="x.pth")
    assert (config.recipe.epochs, config.seed, config.recipe.lr) == (7, 3, 0.003)
    assert config.initial is not None
    assert config.initial.checkpoint == "x.pth"
    assert isinstance(config, TrainingConfig)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": {"epoch": 3}}, ["recipe.epoch", "Did you mean epochs"]),
        ({"recipe": {"batch": 0}}, ["recipe.batch", "greater than or equal to 1"]),
        ({"recipe": {"warmup_epochs": 9}}, ["warmup_epochs", "0 to epochs (2)", "9"]),
        ({"jigsaw": {"first_epoch": 9}}, ["first_epoch", "0 to epochs (2)"]),
        ({"jigsaw": {"gamma": 1.5}}, ["jigsaw.gamma", "1.5"]),
        ({"jigsaw": {"shuffle": "patch"}}, ["jigsaw.shuffle", "patch"]),
        ({"model": {"position_embedding": "none"}}, ["none to mask", "unknown_embedding: false"]),
        ({"model": {"patch_size": 5}}, ["img_size divisible by patch_size", "28/5"]),
        ({"model": {"std": [1, 0, 1]}}, ["model.std.1", "greater than or equal to 0.0001; got 0"]),
        ({"augmentation": {"rand_augment": "rand-m9"}}, ["memory", "rand_augment: null"]),
        ({"augmentation": {"erasing": 0.25}}, ["memory", "erasing: 0"]),
    ],
)
def test_a_mistake_says_what_was_expected(changes: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        small(**changes)
    for word in words:
        assert word in str(error.value)


def test_rows_are_asked_for_by_name() -> None:
    with pytest.raises(UserError, match=r"holds \d+ rows: expected --row NAME.*vit_mjp"):
        load_training(CONFIGS / "zoo.yaml")
    with pytest.raises(UserError, match=r"Unknown row 'vit_mpj'. Did you mean vit_mjp"):
        load_training(CONFIGS / "zoo.yaml", "vit_mpj")
    with pytest.raises(UserError, match=r"No config at .*zooo.yaml.*Did you mean .*zoo.yaml"):
        load_training(CONFIGS / "zooo.yaml", "vit")


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
