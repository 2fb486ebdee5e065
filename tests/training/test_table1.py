"""Training and evaluation of Table 1's families: ResNet, ViT and Swin."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.training.config_files import load_training
from mjp_privacy.training.evaluation import write_evaluation
from mjp_privacy.training.evaluation_arguments import EvaluationArguments
from mjp_privacy.training.learner import build_network, build_optimizer
from mjp_privacy.training.published import TABLE1, counterpart
from mjp_privacy.training.trainer import train
from tests.helpers.families import checkpoint, family_config, family_content
from tests.helpers.training import CLASSES, curve

TABLE = Path(__file__).parents[2] / "configs" / "training" / "table1.yaml"


@pytest.mark.parametrize("family", ["swin", "resnet"])
def test_a_run_learns_colours_and_exports_what_it_trained(
    data: Path, tmp_path: Path, family: str
) -> None:
    config = load_training(family_content(family), epochs=3)
    path = train(config, data=data, val=data, out=tmp_path / "run", device="cpu")
    lines = curve(tmp_path / "run")
    assert lines[-1]["val_top1"] > 60
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (lines[-1]["dal"] > 0) == (family == "swin")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    trained = load_model(checkpoint=path).state_dict()
    floats = {name: t for name, t in state["model"].items() if t.is_floating_point()}
    assert all(torch.equal(trained[name], tensor) for name, tensor in floats.items())


def test_a_swins_table_starts_and_decays_as_the_authors_code_has_it() -> None:
    config = family_config("swin", img_size=56)
    model = build_network(config)
    table = model.get_parameter("absolute_pos_embed")
    assert 0.9 < float(table.detach().std()) < 1.1
    decaying, spared = build_optimizer(model, config).param_groups[::-1]
    if not decaying["weight_decay"]:
        decaying, spared = spared, decaying
    assert any(parameter is table for parameter in decaying["params"])
    relative = model.get_parameter("layers.0.blocks.0.attn.relative_position_bias_table")
    assert any(parameter is relative for parameter in spared["params"])


def test_evaluation_has_a_line_for_each_family(data: Path, tmp_path: Path) -> None:
    files = [f"{f}={checkpoint(tmp_path / f, f, num_classes=CLASSES)}" for f in ("swin", "resnet")]
    arguments = EvaluationArguments((*files,), data=data, out=tmp_path / "out", limit=6)
    lines = write_evaluation(arguments).text.splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in lines[2:4]}
    assert set(cells) == {"swin", "resnet"}
    assert float(cells["swin"][2]) >= 1
    assert cells["resnet"][2] == "–"  # no patch embedding
    assert [row[4] for row in cells.values()] == ["6", "6"]
    assert (tmp_path / "out" / "summary.csv").is_file()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"family": "swin", "stages": None}, "stages"),
        ({"family": "vit"}, "stages"),
        ({"family": "resnet"}, "position_embedding"),
        ({"model": {"index_embedding": True}}, "index_embedding"),
        ({"initial": {"checkpoint": "x"}}, "initial"),
        ({"family": "mixer"}, "family"),
    ],
)
def test_fields_that_contradict_the_family_are_refused(changes: dict[str, Any], said: str) -> None:
    content = family_content("swin")
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(content.get(key), dict)
        content[key] = {**content[key], **value} if both else value
    if changes.get("family") == "resnet":
        content["model"] |= {"unknown_embedding": False, "dal": "none"}
    with pytest.raises(UserError, match=said):
        load_training(content)


@pytest.mark.parametrize(
    ("row", "gamma", "printed"),
    [
        ("resnet", 0.27, TABLE1[0]),
        ("resnet_mjp", 0.03, TABLE1[1]),
        ("swin_relative", 0.27, TABLE1[4]),
        ("swin_mjp", 0.03, TABLE1[5]),
        ("swin_mjp", 0.27, None),
        ("swin", 0.27, None),
    ],
)
def test_the_papers_row_stands_beside_models_of_its_switches(
    row: str, gamma: float, printed: object
) -> None:
    config = load_training(TABLE, row)
    assert counterpart(replace(config, jigsaw=replace(config.jigsaw, gamma=gamma))) == printed


@pytest.mark.parametrize("row", ["resnet", "vit", "swin"])
def test_every_family_of_the_stock_config_has_a_plain_row_and_one_with_mjp(row: str) -> None:
    without, masking = load_training(TABLE, row), load_training(TABLE, f"{row}_mjp")
    assert (without.jigsaw.shuffle, masking.jigsaw.shuffle) == ("none", "patches")
    assert masking.model.unknown_embedding == (row != "resnet")
    for config in (without, masking):
        assert config.model.img_size // config.model.patch_size == 14
        assert config.recipe == load_training(TABLE, "vit").recipe
