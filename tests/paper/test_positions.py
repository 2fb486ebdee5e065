"""Figures of position embeddings: beside other implementations, by hand, and where planted; and the
command `mjp analyse`: what it prints and writes, what is the same again, what it refuses."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.linalg
import torch
from PIL import Image
from scipy.spatial.distance import jensenshannon, pdist

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.models import load_model
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.models.loading import build_other
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.paper.positions import (
    BATCH,
    FOLDS,
    PositionTable,
    as_map,
    at,
    beside_start,
    class_attention,
    cumulative_shares,
    divergence,
    figures_of,
    last_attention,
    noise_table,
    place_error,
    position_table,
    projection,
    similarity,
    start_in,
)
from mjp_privacy.training.config import Recipe, TrainingConfig, plain
from mjp_privacy.training.learner import build_network, learning_rate
from tests.helpers.models import PATCHES, some_images, tiny
from tests.helpers.refusals import refused
from tests.helpers.training import class_folders, small
from tests.training.test_evaluation import saved

MJP = {"unknown_embedding": True}

# tables


def table_of(model: Any) -> PositionTable:
    table = position_table(model, "M")
    assert table is not None
    return table


def test_a_table_is_that_of_the_patches_alone_and_none_where_no_place_is_told() -> None:
    model = tiny(unknown_embedding=True)
    table = table_of(model)
    assert (table.grid, table.width) == (4, 24)
    assert (table.rows == model.table[0, 1:].detach().numpy()).all()
    assert table.places()[[0, 3, 4, 15]].tolist() == [[0, 0, 0], [3, 0, 3], [4, 1, 0], [15, 3, 3]]
    with torch.no_grad():
        model.table[:] = model.table[:, 5:6]
    for without in (model, *(tiny(position_embedding=one) for one in ("exposed", "strict"))):
        assert position_table(without, "M") is None
    with pytest.raises(UserError, match="Net"):
        position_table(build_other(Sizes("swin", 32, 4, 24, (1, 1), 5, num_heads=3)), "Net")  # type: ignore[arg-type]


def test_similarities_by_hand() -> None:
    rows = np.zeros((9, 2))
    rows[0], rows[1], rows[3] = (1, 0), (0, 2), (-3, 0)
    table = PositionTable(3, rows)
    cosines = similarity(table)
    assert cosines[0, [0, 1, 3, 8]].tolist() == [1, 0, -1, 0]
    assert as_map(table)[1, 0] == cosines[0, 3]  # in the tile of patch 0, row 1 and column 0
    assert as_map(table)[3:6, :3].flatten().tolist() == cosines[3].tolist()
    # 12 pairs share a side, of which one has -1: patches 0 and 3
    numbers = figures_of(table).numbers
    found = numbers["neighbour_similarity"], numbers["other_similarity"]
    assert found == pytest.approx((-1 / 12, 0))


@pytest.mark.parametrize(("init", "std"), [("paper", 1.0), ("controlled", 0.02)])
def test_the_start_is_drawn_again_from_the_recipe(init: str, std: float) -> None:
    """None where the file does not tell it."""
    config = small(model=MJP, jigsaw={"position_init": init})
    model = build_network(config)
    table = table_of(model)
    for recipe, share in ((plain(config), 100), (plain(small(model=MJP, seed=1)), 0)):
        start = start_in(model, table, {"recipe": json.dumps(recipe)})
        assert start is not None
        numbers, _ = beside_start(table, start)
        assert numbers["start_share"] == pytest.approx(share, abs=10 if share == 0 else 1e-4)
        assert numbers["start_std"] == pytest.approx(std if share else 1, rel=0.1)
    for recipe in (
        *(None, [1], {"name": "other", "surprise": 1}),
        plain(config) | {"initial": {"checkpoint": "a.safetensors", "model": None}},
        plain(small(model={**MJP, "depth": 3})),
    ):
        assert start_in(model, table, {"recipe": json.dumps(recipe)}) is None
    for text in ("{", "[" * 100_000):
        assert start_in(model, table, {"recipe": text}) is None


def test_the_zoos_mjp_table_is_its_start_and_what_it_learned_is_a_grid() -> None:
    """Trained as the paper's code trains MJP, eight epochs; the controlled one is not noise. What
    weight decay alone leaves of a start is Π (1 - rate · decay) over all steps."""
    left = 0.0
    for name, share, variance in (
        ("cifar_vit_mjp_controlled", 5.8, 0.8136),
        ("cifar_vit_mjp", 99.3, 0.1214),
    ):
        model = load_model(name)
        table = table_of(model)
        start = start_in(model, table, read_metadata(f"packaged:{name}"))
        assert start is not None
        numbers, rest = beside_start(table, start)
        assert at(cumulative_shares(rest.centred()), 3) > 0.65
        assert numbers["start_share"] == pytest.approx(share, abs=0.1)
        assert at(cumulative_shares(table.centred()), 3) == pytest.approx(variance, abs=0.001)
        left = numbers["start_left"]
    for recipe, steps, expected in (
        (Recipe(), 1_281_167 // 1024, 1.4e-4),  # ImageNet, Table 7
        (Recipe(epochs=8, batch=128, lr=0.001), 390, left),
    ):
        config = TrainingConfig("decay", recipe=recipe)
        rates = [learning_rate(config, step, steps) for step in range(recipe.epochs * steps)]
        product = np.prod(1 - np.array(rates) * recipe.weight_decay)
        assert product == pytest.approx(expected, rel=0.03)


# variance, energy and places


def test_variance_and_energy_beside_eigenvalues() -> None:
    """Of the covariance, and of the Gram matrix of the rows as they are."""
    table = noise_table(6, 20, seed=1)
    moved = PositionTable(6, table.rows + 3)
    for curve, matrix in (
        (cumulative_shares(table.centred()), np.cov(table.rows.T)),
        (cumulative_shares(moved.rows), moved.rows.T @ moved.rows),
    ):
        eigenvalues = np.sort(np.linalg.eigvalsh(matrix))[::-1]
        assert curve == pytest.approx(np.cumsum(eigenvalues) / eigenvalues.sum())
    for squares, enough in (((18, 8, 2), 2), ((17, 1, 2), 2), ((2, 2, 1), 3)):  # 90 % exactly
        rows = np.zeros((9, 3))
        rows[:3] = np.diag(np.sqrt(squares))
        figures = figures_of(PositionTable(3, rows))
        assert figures.numbers["dimensions_for_90"] == enough
        assert at(figures.energy, 3) == at(figures.energy, 99) == 1


def test_the_projection_keeps_distances_where_it_loses_nothing_and_has_one_sign() -> None:
    generator = np.random.default_rng(3)
    table = PositionTable(5, generator.normal(size=(25, 3)) @ generator.normal(size=(3, 12)))
    points = projection(table, 3)
    assert pdist(points) == pytest.approx(pdist(table.rows))
    assert (np.diff((points**2).sum(axis=0)) <= 0).all()
    mirrored = PositionTable(5, table.rows * np.array([1, -1] * 6))
    assert np.abs(points).max(axis=0) == pytest.approx(points.max(axis=0))
    assert projection(mirrored) == pytest.approx(projection(table))


def linear(grid: int, width: int, noise: float = 0.0) -> PositionTable:
    """Row and column through a random linear map, with an offset."""
    generator = np.random.default_rng(0)
    places = PositionTable(grid, np.zeros((grid**2, 1))).places()[:, 1:]
    rows = places @ generator.normal(size=(2, width)) + generator.normal(size=width)
    return PositionTable(grid, rows + noise * generator.normal(size=rows.shape))


@pytest.mark.parametrize("width", [6, 60])
def test_errors_are_those_of_another_solver(width: int) -> None:
    """Ridge regression over the same folds, its intercept free, with a penalty that goes to zero:
    the least norm, where there are more numbers than patches."""
    table = linear(6, width, noise=1.0)
    places, errors = table.places(), []
    order = np.random.default_rng(derive_seed("folds", 0, 0)).permutation(len(places))
    for fold in np.array_split(order, FOLDS):
        known = np.array([patch for patch in range(len(places)) if patch not in fold])
        middle, target = table.rows[known].mean(0), places[known].mean(0)
        rows = table.rows[known] - middle
        kernel = rows @ rows.T + 1e-7 * np.eye(len(known))
        duals = scipy.linalg.solve(kernel, places[known] - target)
        predicted = (table.rows[fold] - middle) @ rows.T @ duals + target
        errors.append(np.abs(predicted - places[fold]).mean(axis=0))
    number, row, column = np.mean(errors, axis=0)
    error = place_error(table, repeats=1)
    assert error["mae_1d"] == pytest.approx(number, rel=1e-5)
    assert error["mae_2d"] == pytest.approx((row + column) / 2, rel=1e-5)
    assert error["mae_1d"] < 6 * row + column  # a patch's number is 6 rows and a column
    assert math.isnan(error["mae_1d_std"])  # of one draw of the folds
    assert math.isnan(error["mae_2d_std"])
    assert place_error(table, seed=4) == place_error(table, seed=4) != place_error(table, seed=5)
    assert place_error(table)["mae_2d_std"] > 0
    # 3×3: rows miss the middle by 1, 0, 1; numbers 0 to 8 by 4, 3, 2, 1, 0, 1, 2, 3, 4
    error = place_error(noise_table(3, 2, 0))
    assert (error["constant_1d"], error["constant_2d"]) == pytest.approx((20 / 9, 2 / 3))


# attention


def test_the_maps_are_those_computed_by_hand() -> None:
    """Head by head, however many pictures are seen at once; and no hook stays."""
    model, x = tiny(unknown_embedding=True), some_images(BATCH + 3)
    last, width = model.blocks[-1], model.embed_dim
    tokens = last.norm1(model.blocks[:-1](model.embed(x)))
    weight, bias = last.attn.qkv.weight, last.attn.qkv.bias
    query = tokens[:, :1] @ weight[:width].T + bias[:width]
    key = tokens @ weight[width : 2 * width].T + bias[width : 2 * width]
    by_hand = []
    for part in torch.arange(width).chunk(3):
        scores = query[..., part] @ key[..., part].mT / math.sqrt(width // 3)
        by_hand.append(scores.softmax(-1)[:, 0, 1:])
    expected = torch.stack(by_hand, dim=1).detach().numpy()  # (B, heads, N)
    assert class_attention(model, x) == pytest.approx(expected, rel=1e-9)
    assert (expected.sum(-1) < 1).all()  # the class token looks at itself, too
    maps, _ = last_attention(model, x)
    assert maps.shape == (BATCH + 3, 3, 4, 4)
    assert not model.blocks[-1].attn._forward_pre_hooks
    assert maps.sum((-1, -2)) == pytest.approx(1)
    assert maps[1, 2].flatten() == pytest.approx(expected[1, 2] / expected[1, 2].sum())


def test_the_divergence_is_jensen_and_shannons() -> None:
    even, apart = np.full((4, 1, 16), 1 / 16), np.eye(16)[:4, None]
    assert (divergence(even), divergence(apart)) == pytest.approx((0, 1))
    assert math.isnan(divergence(even[:1]))
    maps = np.random.default_rng(0).dirichlet(np.ones(PATCHES), size=(2, 5))
    pairs = zip(*maps, strict=True)
    expected = np.mean([jensenshannon(one, other, base=2) ** 2 for one, other in pairs])
    assert divergence(maps) == pytest.approx(expected)


def test_heads_and_images_are_told_apart() -> None:
    """On equal images the heads alone differ."""
    _, same = last_attention(tiny(), some_images(1).expand(4, -1, -1, -1))
    assert same["image_diversity"] == pytest.approx(0, abs=1e-12)
    assert same["head_diversity"] > 1e-4
    _, several = last_attention(tiny(), some_images(4))
    assert several["image_diversity"] > 1e-6
    assert 0.5 < several["attention_spread"] <= 1


# the command --------------------------------------------------------------------------------------


LABEL = "@a|$x^$<script>[b](c)"


def test_a_grid_and_noise_are_told_apart_and_all_files_are_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A label is no formula, no element and no cell of Markdown; an image that cannot be read is
    left out and told."""
    plain_one, model = tiny(torch.float32), tiny(torch.float32, unknown_embedding=True)
    exposed = tiny(torch.float32, position_embedding="exposed")
    with torch.no_grad():
        plain_one.table[0, 1:] = torch.from_numpy(linear(4, 24).rows)
        model.table.copy_(torch.randn(1, 17, 24, generator=torch.Generator().manual_seed(1)))
    files = [
        f"{LABEL}={saved(tmp_path / 'plain.safetensors', plain_one)}",
        f"MJP={saved(tmp_path / 'noisy.safetensors', model)}",
        saved(tmp_path / "bare.safetensors", exposed, position_embedding="exposed"),
    ]
    images = class_folders(tmp_path / "images", images=2, side=40)
    (images / "class_0" / "000.png").write_bytes(b"no image")
    outs = [tmp_path / "one", tmp_path / "two"]
    for out in outs:
        words = ["analyse", *files, "--images", images, "--out", out, "--threads", 1]
        assert main([*map(str, words)]) == 3
        printed, said = capsys.readouterr()
        assert "class_0/000.png" in said
        assert len(printed.splitlines()) == 10  # heads, rule, models, noise, the paper's, a path
    rows = pd.read_csv(outs[0] / "analysis.csv")
    models = [f"'{LABEL}", "MJP", "bare"]
    paper = ["DeiT-S", "DeiT-S+MJP", "DeiT-S+MJP (DAL-LN)"]
    assert rows["label"].tolist() == [*models, *["N(0, 1), not trained"] * 10, *paper]
    grid, drawn, without = (rows.iloc[place] for place in range(3))
    assert without[["mae_2d", "grid"]].isna().all()
    assert without["head_diversity"] > 0
    assert [grid["variance_3"], grid["variance_7"]] == pytest.approx([100, 100])
    assert grid["mae_2d"] == pytest.approx(0, abs=1e-5)
    shares = rows.loc[rows["kind"] == "noise", "variance_3"]
    assert shares.min() - 3 < drawn["variance_3"] < shares.max() + 3
    assert shares.nunique() == 10
    assert (grid["images"], grid["grid"], grid["width"]) == (5, 4, 24)
    pictures = {"analysis.png", *(f"attention_{at}.png" for at in (1, 2, 3))}
    assert {path.name for path in outs[0].iterdir()} == {"analysis.md", "analysis.csv"} | pictures
    for path in outs[0].iterdir():
        assert path.read_bytes() == (outs[1] / path.name).read_bytes()
        if path.suffix == ".png":
            assert np.array(Image.open(path)).std() > 10  # there is something on it
    text = (outs[0] / "analysis.md").read_text(encoding="utf-8")
    assert "| @a\\|$x^$&lt;script&gt;\\[b\\](c) " in text
    assert "<script>" not in text


def test_mistakes_are_said_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in class_folders(tmp_path / "spoiled", images=1, side=40).rglob("*.png"):
        path.write_bytes(b"no image")
    Path("words.txt").write_text("no weights")
    exposed = tiny(torch.float32, position_embedding="exposed")
    saved(Path("bare.safetensors"), exposed, position_embedding="exposed")
    for named, *words in (
        ("nowhere.pth", "nowhere.pth"),
        ("cifar_vit?", "cifar_vitt"),
        ("NAME=PATH", "a=cifar_vit", "a=cifar_vit_mjp"),
        ("seed: ", "cifar_vit", "--seed", "-1"),
        ("--threads", "cifar_vit", "--threads", "0"),
        ("2×2", "cifar_vit", "--img-size", "14"),
        ("--images", "cifar_vit", "--images", "spoiled"),
        ("--out", "cifar_vit", "--images", "."),
        ("words.txt", "words.txt"),
        ("bare", "bare.safetensors"),
        ("--img-size", "cifar_vit", "bare.safetensors"),
        ("checkpoints",),
    ):
        refused(capsys, named, "analyse", *words, "--out", "out")
    refused(capsys, "spoiled", "analyse", "cifar_vit", "--out", "spoiled")
