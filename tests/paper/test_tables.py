"""Tables of models, their own start, and how alike their rows are."""

import json
from typing import Literal, cast

import numpy as np
import pytest
import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.models.families import build_other
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.paper.positions import (
    PositionTable,
    as_map,
    at,
    beside_start,
    explained_variance,
    neighbours_and_others,
    noise_table,
    position_table,
    similarity,
    start_in,
)
from mjp_privacy.training.config import Recipe, TrainingConfig, plain
from mjp_privacy.training.learner import build_network, learning_rate
from tests.helpers.models import tiny
from tests.helpers.training import small

MJP = {"unknown_embedding": True}


def test_a_table_is_that_of_the_patches_alone() -> None:
    model = tiny(unknown_embedding=True)
    table = position_table(model, "M")
    assert table is not None
    assert (table.grid, table.width) == (4, 24)
    assert (table.rows == model.table[0, 1:].detach().numpy()).all()
    assert table.places()[[0, 3, 4, 15]].tolist() == [[0, 0, 0], [3, 0, 3], [4, 1, 0], [15, 3, 3]]


@pytest.mark.parametrize("reading", ["exposed", "strict"])
def test_a_model_without_position_embeddings_has_none(reading: str) -> None:
    assert position_table(tiny(position_embedding=reading), "M") is None


def test_rows_that_are_all_equal_tell_no_place() -> None:
    model = tiny()
    with torch.no_grad():
        model.table[:] = model.table[:, 5:6]
    assert position_table(model, "M") is None


def test_a_grid_of_four_patches_is_too_small() -> None:
    with pytest.raises(UserError, match=r"M: expected a grid of at least 3×3 .*got 2×2"):
        position_table(tiny(img_size=16), "M")


@pytest.mark.parametrize("family", ["swin", "resnet"])
def test_other_networks_of_table_1_are_refused(family: Literal["swin", "resnet"]) -> None:
    other = build_other(Sizes(family, 32, 4, 24, (1, 1), 5, num_heads=3))
    with pytest.raises(
        UserError, match=f"Net is a {family}: expected a plain ViT, which has one embedding"
    ):
        position_table(cast(LoadedModel, other), "Net")


def test_similarities_by_hand() -> None:
    rows = np.zeros((9, 2))
    rows[0], rows[1], rows[3] = (1, 0), (0, 2), (-3, 0)
    table = PositionTable(3, rows)
    cosines = similarity(table)
    assert cosines[0, [0, 1, 3, 8]].tolist() == [1, 0, -1, 0]
    assert as_map(table)[1, 0] == cosines[0, 3]  # in the tile of patch 0, row 1 and column 0
    assert as_map(table)[3:6, :3].flatten().tolist() == cosines[3].tolist()
    # 12 pairs share a side, of which one has -1: patches 0 and 3
    assert neighbours_and_others(table) == pytest.approx((-1 / 12, 0))


def test_a_table_is_split_into_its_start_and_the_rest() -> None:
    start, learned = noise_table(6, 30, 0), noise_table(6, 30, 1)
    trained = PositionTable(6, 0.9 * start.rows + 0.1 * learned.rows + 5)
    split = beside_start(trained, start)
    assert split.share == pytest.approx(0.81 / 0.82, abs=0.02)
    assert split.left == pytest.approx(0.9, abs=0.02)
    assert split.std == pytest.approx(1, abs=0.05)
    along = float((split.rest.rows * start.centred()).sum())
    assert along == pytest.approx(0, abs=1e-9)
    together = split.share * (trained.centred() ** 2).sum() + (split.rest.rows**2).sum()
    assert together == pytest.approx((trained.centred() ** 2).sum())
    assert beside_start(learned, start).share < 0.05


def of_recipe(config: TrainingConfig) -> dict[str, str]:
    return {"recipe": json.dumps(plain(config))}


def test_the_start_is_drawn_again_from_the_recipe() -> None:
    for jigsaw, std in (("paper", 1.0), ("controlled", 0.02)):
        config = small(model=MJP, jigsaw={"position_init": jigsaw})
        model = build_network(config)
        table = position_table(model, "M")
        assert table is not None
        start = start_in(model, table, of_recipe(config))
        assert start is not None
        assert start.share == pytest.approx(1)
        assert start.std == pytest.approx(std, rel=0.1)
        other = start_in(model, table, of_recipe(small(model=MJP, seed=1)))
        assert other is not None
        assert other.share < 0.1


def test_no_start_where_the_file_does_not_tell_it() -> None:
    config = small(model=MJP)
    model = build_network(config)
    table = position_table(model, "M")
    assert table is not None
    initial = plain(config) | {"initial": {"checkpoint": "a.safetensors", "model": None}}
    deeper = small(model={**MJP, "depth": 3})
    for metadata in (
        {},
        {"recipe": "{"},
        {"recipe": "[" * 100_000},
        {"recipe": "[1]"},
        {"recipe": json.dumps({"name": "other"} | {"surprise": 1})},
        {"recipe": json.dumps(initial)},
        of_recipe(deeper),
    ):
        assert start_in(model, table, metadata) is None


def test_the_zoos_mjp_table_is_its_start_and_what_it_learned_is_a_grid() -> None:
    """Trained as the paper's code trains MJP, eight epochs; the controlled one is not noise."""
    shares = {}
    for name in ("cifar_vit_mjp", "cifar_vit_mjp_controlled"):
        model = load_model(name)
        table = position_table(model, name)
        assert table is not None
        start = start_in(model, table, read_metadata(f"packaged:{name}"))
        assert start is not None
        shares[name] = start.share, at(explained_variance(table), 3)
        assert at(explained_variance(start.rest), 3) > 0.65
    assert shares["cifar_vit_mjp"] == pytest.approx((0.993, 0.1214), abs=0.001)
    assert shares["cifar_vit_mjp_controlled"] == pytest.approx((0.058, 0.8136), abs=0.001)


def test_the_papers_recipe_forgets_its_start_and_the_zoos_does_not() -> None:
    """What weight decay alone leaves of it: Π (1 - rate · decay), the product over all steps."""
    for recipe, steps, left in (
        (Recipe(), 1_281_167 // 1024, 1.4e-4),  # ImageNet, Table 7
        (Recipe(epochs=8, batch=128, lr=0.001), 390, 0.93),  # CIFAR-10, as `cifar_vit_mjp`
    ):
        config = TrainingConfig("decay", recipe=recipe)
        rates = [learning_rate(config, step, steps) for step in range(recipe.epochs * steps)]
        product = np.prod(1 - np.array(rates) * recipe.weight_decay)
        assert product == pytest.approx(left, rel=0.03)
    name = "cifar_vit_mjp"
    model = load_model(name)
    table = position_table(model, name)
    assert table is not None
    start = start_in(model, table, read_metadata(f"packaged:{name}"))
    assert start is not None
    assert start.left == pytest.approx(0.93, abs=0.01)
