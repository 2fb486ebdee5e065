"""Figures of position embeddings: beside other implementations, by hand, and where planted; and the
command `mjp analyse`: what it prints and writes, what is the same again, what it refuses."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
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
    Start,
    as_map,
    at,
    class_attention,
    cumulative_shares,
    divergence,
    figures_of,
    last_attention,
    neighbours_and_others,
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
    assert neighbours_and_others(table) == pytest.approx((-1 / 12, 0))


def start_of(model: Any, content: object) -> Start | None:
    recipe = content if isinstance(content, str) else json.dumps(content)
    return start_in(model, table_of(model), {"recipe": recipe})


@pytest.mark.parametrize(("init", "std"), [("paper", 1.0), ("controlled", 0.02)])
def test_the_start_is_drawn_again_from_the_recipe(init: str, std: float) -> None:
    """None where the file does not tell it."""
    config = small(model=MJP, jigsaw={"position_init": init})
    model = build_network(config)
    start, other = start_of(model, plain(config)), start_of(model, plain(small(model=MJP, seed=1)))
    assert start is not None
    assert start.share == pytest.approx(1)
    assert start.std == pytest.approx(std, rel=0.1)
    assert other is not None
    assert other.share < 0.1
    for content in (
        *("null", "{", "[" * 100_000, [1], {"name": "other", "surprise": 1}),
        plain(config) | {"initial": {"checkpoint": "a.safetensors", "model": None}},
        plain(small(model={**MJP, "depth": 3})),
    ):
        assert start_of(model, content) is None


def test_the_zoos_mjp_table_is_its_start_and_what_it_learned_is_a_grid() -> None:
    """Trained as the paper's code trains MJP, eight epochs; the controlled one is not noise. What
    weight decay alone leaves of a start is Π (1 - rate · decay) over all steps."""
    found = {}
    for name in ("cifar_vit_mjp", "cifar_vit_mjp_controlled"):
        model = load_model(name)
        start = start_in(model, table_of(model), read_metadata(f"packaged:{name}"))
        assert start is not None
        assert at(cumulative_shares(start.rest.centred()), 3) > 0.65
        variance = at(cumulative_shares(table_of(model).centred()), 3)
        found[name] = start.share, variance, start.left
    assert found["cifar_vit_mjp"][:2] == pytest.approx((0.993, 0.1214), abs=0.001)
    assert found["cifar_vit_mjp_controlled"][:2] == pytest.approx((0.058, 0.8136), abs=0.001)
    for recipe, steps, left in (
        (Recipe(), 1_281_167 // 1024, 1.4e-4),  # ImageNet, Table 7
        (Recipe(epochs=8, batch=128, lr=0.001), 390, found["cifar_vit_mjp"][2]),
    ):
        config = TrainingConfig("decay", recipe=recipe)
        rates = [learning_rate(config, step, steps) for step in range(recipe.epochs * steps)]
        product = np.prod(1 - np.array(rates) * recipe.weight_decay)
        assert product == pytest.approx(left, rel=0.03)


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
    """Heads that differ on equal images, then equal heads on images that differ."""
    model = tiny()
    _, same = last_attention(model, some_images(1).expand(4, -1, -1, -1))
    assert same["image_diversity"] == pytest.approx(0, abs=1e-12)
    assert same["head_diversity"] > 1e-4
    qkv, width = model.blocks[-1].attn.qkv, model.embed_dim
    with torch.no_grad():
        for part in (slice(0, width), slice(width, 2 * width)):
            qkv.weight[part] = qkv.weight[part][:8].repeat(3, 1)
            qkv.bias[part] = qkv.bias[part][:8].repeat(3)
    _, several = last_attention(model, some_images(4))
    assert several["head_diversity"] == pytest.approx(0, abs=1e-12)
    assert several["image_diversity"] > 1e-6
    assert 0.5 < several["attention_spread"] <= 1


# the command --------------------------------------------------------------------------------------


def analyse(*words: object, out: Path, code: int = 0) -> list[dict[str, str]]:
    """What the command writes into analysis.csv; it ends with this code."""
    assert main(["analyse", *map(str, words), "--out", str(out), "--threads", "1"]) == code
    with (out / "analysis.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def linear_one(tmp_path: Path) -> Path:
    """A model whose table is exactly linear in row and column."""
    model = tiny(torch.float32)
    with torch.no_grad():
        model.table[0, 1:] = torch.from_numpy(linear(4, 24).rows)
    return saved(tmp_path / "plain.safetensors", model)


LABEL = "@a|$x^$<script>[b](c)"


def test_a_grid_and_noise_are_told_apart_and_all_files_are_the_same_again(
    linear_one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A label is no formula, no element and no cell of Markdown; an image that cannot be read is
    left out and told."""
    model = tiny(torch.float32, unknown_embedding=True)
    with torch.no_grad():
        model.table.copy_(torch.randn(1, 17, 24, generator=torch.Generator().manual_seed(1)))
    noisy = saved(tmp_path / "noisy.safetensors", model)
    exposed = tiny(torch.float32, position_embedding="exposed")
    bare = saved(tmp_path / "bare.safetensors", exposed, position_embedding="exposed")
    images = class_folders(tmp_path / "images", images=2, side=40)
    (images / "class_0" / "000.png").write_bytes(b"no image")
    outs = [tmp_path / "one", tmp_path / "two"]
    for out in outs:
        words = (f"{LABEL}={linear_one}", f"MJP={noisy}", bare, "--images", images)
        rows = analyse(*words, out=out, code=3)
        printed, said = capsys.readouterr()
        assert "class_0/000.png" in said
        assert len(printed.splitlines()) == 10  # heads, rule, models, noise, the paper's, a path
    noise = [("noise", "N(0, 1), not trained")] * 10
    paper = [("paper", n) for n in ("DeiT-S", "DeiT-S+MJP", "DeiT-S+MJP (DAL-LN)")]
    by_kind = [(row["kind"], row["label"]) for row in rows]
    models = [("model", label) for label in (f"'{LABEL}", "MJP", "bare")]
    assert by_kind == [*models, *noise, *paper]
    grid, drawn, without = rows[:3]
    assert without["mae_2d"] == without["grid"] == ""
    assert float(without["head_diversity"]) > 0
    assert [float(grid[f"variance_{k}"]) for k in (3, 7)] == pytest.approx([100, 100])
    assert float(grid["mae_2d"]) == pytest.approx(0, abs=1e-5)
    assert grid["dimensions_for_90"] in ("1", "2")
    shares = [float(row["variance_3"]) for row in rows if row["kind"] == "noise"]
    assert min(shares) - 3 < float(drawn["variance_3"]) < max(shares) + 3
    assert len({*shares}) == 10
    assert (grid["images"], grid["grid"], grid["width"]) == ("5", "4", "24")
    texts = {"analysis.md", "analysis.csv"}
    pictures = {"analysis.png", *(f"attention_{at}.png" for at in (1, 2, 3))}
    assert {path.name for path in outs[0].iterdir()} == texts | pictures
    for name in texts:
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()
    for name in pictures:
        one, two = (np.array(Image.open(out / name)) for out in outs)
        assert (one == two).all()
        assert one.std() > 10  # there is something on it
    text = (outs[0] / "analysis.md").read_text(encoding="utf-8")
    assert "| @a\\|$x^$&lt;script&gt;\\[b\\](c) " in text
    assert "<script>" not in text


@pytest.mark.nightly
def test_the_share_of_a_tables_start_is_written(tmp_path: Path) -> None:
    """Noise beside the start from the recipe's seed."""
    config = small(model=MJP)
    model = build_network(config)
    with torch.no_grad():
        other = torch.from_numpy(noise_table(4, 16, seed=3).rows).float()
        model.table[0, 1:] = 1.06 * model.table[0, 1:] + other
    facts = {"num_heads": 2, "resize": 28, "recipe": plain(config)}
    path = saved(tmp_path / "mine.safetensors", model, **facts)
    (row, *_) = analyse(path, "--limit", 1, out=tmp_path / "out")
    assert float(row["start_share"]) == pytest.approx(50.9, abs=0.5)


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
