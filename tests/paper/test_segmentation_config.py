"""The config of a segmentation: what it refuses, what it leaves alone, and the files that come with
the package."""

from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.paper.segmentation import MJP, PLAIN, counterpart
from mjp_privacy.training.config import plain
from mjp_privacy.training.config_files import load_training
from tests.helpers.segmentation import content, small
from tests.helpers.training import content as classification

CONFIGS = Path(__file__).parents[2] / "configs" / "training"
DEIT_ROWS = ["plain_linear", "mjp_linear", "plain_upernet", "mjp_upernet"]


def test_a_classifiers_config_is_recorded_as_before() -> None:
    recorded = plain(load_training(classification()))
    assert "task" not in recorded
    assert "segmentation" not in recorded
    assert plain(small())["task"] == "segmentation"
    assert plain(small())["segmentation"]["head"] == "linear"


def test_the_task_can_be_given_beside_the_config() -> None:
    without = {name: part for name, part in content().items() if name != "task"}
    del without["segmentation"]
    assert load_training(without, task="segmentation").task == "segmentation"
    assert load_training(without).task == "classification"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"segmentation": {"head": "unet"}}, "segmentation.head: Input should be 'linear' or"),
        ({"segmentation": {"channels": 7}}, "channels: Input should be greater than or equal to 8"),
        ({"segmentation": {"scales": [2.0, 0.5]}}, "scales: expected the smaller one first"),
        ({"segmentation": {"scales": [0.0, 2.0]}}, "scales.0: Input should be greater than"),
        ({"model": {"num_classes": 256}}, "expected at most 255 classes, got 256"),
        (
            {"segmentation": {"head": "upernet"}, "model": {"depth": 3}},
            "head upernet reads four blocks of a ViT: expected depth 4 or more, got 3",
        ),
        ({"jigsaw": {"shuffle": "patches"}}, "MJP enters through the weights to start from"),
        ({"model": {"dal": "linear"}}, "expected jigsaw.shuffle: none and model.dal: none"),
        ({"augmentation": {"mixup": 0.8}}, "expected rand_augment: null, mixup: 0, cutmix: 0"),
        ({"augmentation": {"rand_augment": "rand-m9"}}, "and has no other augmentation"),
        ({"data": {"store": "memory"}}, "task segmentation reads files"),
        (
            {"family": "resnet", "stages": [1], "model": {"position_embedding": "none"}},
            "has heads for family vit or swin, got resnet",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        small(**changes)
    assert said in str(caught.value)


def test_fields_of_a_segmentation_without_the_task_are_refused() -> None:
    with pytest.raises(UserError, match="these fields are read with task: segmentation alone"):
        load_training(classification(segmentation={"head": "upernet"}))


@pytest.mark.parametrize("row", DEIT_ROWS)
@pytest.mark.parametrize("name", ["ade20k.yaml", "shapes.yaml"])
def test_rows_are_what_their_names_say(name: str, row: str) -> None:
    config = load_training(CONFIGS / name, row)
    assert config.task == "segmentation"
    assert config.segmentation.head == row.split("_")[1]
    assert config.model.unknown_embedding == row.startswith("mjp")
    assert config.initial is not None
    assert not config.positions_as_paper
    if name == "ade20k.yaml":
        assert (config.model.img_size, config.model.num_classes) == (512, 150)
        assert counterpart(config, 2000) is None


def test_only_the_papers_model_on_all_pictures_stands_beside_its_figures() -> None:
    plain_swin, mjp_swin = (
        load_training(CONFIGS / "ade20k.yaml", row) for row in ("swin_upernet", "swin_mjp_upernet")
    )
    assert counterpart(plain_swin, 2000) == PLAIN
    assert counterpart(mjp_swin, 2000) == MJP
    assert (PLAIN.miou, PLAIN.macc, MJP.miou, MJP.macc) == (43.87, 55.22, 44.03, 55.5)
    assert counterpart(plain_swin, 1999) is None
    linear = load_training(CONFIGS / "ade20k.yaml", "swin_linear")
    assert counterpart(linear, 2000) is None
