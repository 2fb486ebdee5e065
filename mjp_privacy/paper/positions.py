"""What the position embeddings of a model hold, and where its last block looks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import entr
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.models import LoadedModel, MJPVisionTransformer
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.models.vit import Attention
from mjp_privacy.models.zoo import NamedCheckpoint
from mjp_privacy.training.config import recipe_in
from mjp_privacy.training.learner import build_network

Matrix = NDArray[np.float64]

LEAST_GRID = 3
"""Patches along a side: five folds need five patches, and Table 6 three directions."""


@dataclass(frozen=True)
class PositionTable:
    """rows[i] (D,) is the embedding of patch i, counted row by row; grid² of them.

    The class token's row and the unknown embedding are left out, as in the authors' script
    (`pestudy/absolute.py` takes the rows 1 to 196).
    """

    grid: int
    rows: Matrix

    @property
    def width(self) -> int:
        return int(self.rows.shape[1])

    def centred(self) -> Matrix:
        centred: Matrix = self.rows - self.rows.mean(axis=0)
        return centred

    def places(self) -> Matrix:
        """(N, 3): a patch's number in the sequence, its row and its column, all from 0."""
        number = np.arange(self.grid**2)
        return np.stack([number, number // self.grid, number % self.grid], axis=1).astype(float)


def position_table(model: MJPVisionTransformer, label: str) -> PositionTable | None:
    """The model's table in float64; None of a model without position embeddings.

    A model whose rows are all equal has none either: it tells no two places apart.
    label: the model's name, for messages
    """
    if model.family != "vit":
        raise UserError(
            f"{label} is a {model.family}: expected a plain ViT, which has one embedding for each "
            "patch and a class token that looks at all of them. Leave it out."
        )
    side = model.grid.rows
    if side != model.grid.columns:
        raise UserError(
            f"{label}: expected the positions of square pictures, got {side}×{model.grid.columns} "
            "patches. Give --img-size, a side in pixels."
        )
    if side < LEAST_GRID:
        raise UserError(
            f"{label}: expected a grid of at least {LEAST_GRID}×{LEAST_GRID} patches, got "
            f"{side}×{side}, too few to tell what positions hold. Give a larger "
            "--img-size."
        )
    if model.position_embedding != "learned" or model.pos_embed is None:
        return None
    table = PositionTable(model.grid.rows, model.table.detach()[0, 1:].double().cpu().numpy())
    return table if (table.rows != table.rows[0]).any() else None


def noise_table(grid: int, width: int, seed: int) -> PositionTable:
    """A table drawn from N(0, 1), as the paper's code starts MJP's; never trained."""
    generator = np.random.default_rng(derive_seed("noise table", grid, width, seed))
    return PositionTable(grid, generator.standard_normal((grid**2, width)))


# how many directions a table takes: Table 6, Figures 1 and 4 --------------------------------------

DIMENSIONS = (3, 4, 5, 6, 7)
"""Columns of the paper's Table 6."""


def cumulative_shares(rows: Matrix) -> Matrix:
    """Entry k-1 is the share of Σσ² that the k largest singular values of a matrix hold, up to 1.

    Of a table's rows it is their energy (Fig. 4); of the centred ones the variance that k
    dimensions of PCA keep (Table 6). The formula of the paper's Definition 1 is lost in the text at
    hand; it speaks of singular values σ and of PCA. As in every library's PCA, rows are centred and
    a direction counts by σ²: shares of σ would be far lower (35 for 46 % at three).
    """
    squares = np.linalg.svd(rows, compute_uv=False) ** 2
    shares: Matrix = np.cumsum(squares) / np.sum(squares)
    return shares


def at(curve: Matrix, dimensions: int) -> float:
    """The share that a curve reaches at so many dimensions: at(curve, 3)."""
    return float(curve[min(dimensions, len(curve)) - 1])


def projection(table: PositionTable, dimensions: int = 3) -> Matrix:
    """The patches (N, dimensions) along the first principal directions (Fig. 1 b).

    The sign of a direction is arbitrary: its largest coordinate is made positive.
    """
    left, sizes, _ = np.linalg.svd(table.centred(), full_matrices=False)
    coordinates: Matrix = left[:, :dimensions] * sizes[:dimensions]
    largest = np.abs(coordinates).argmax(axis=0)
    signs = np.sign(coordinates[largest, np.arange(coordinates.shape[1])])
    signed: Matrix = coordinates * np.where(signs == 0, 1, signs)
    return signed


# how alike the embeddings of two places are: the maps of the paper's poster -----------------------


def similarity(table: PositionTable) -> Matrix:
    """(N, N) cosine similarities of the rows as they are; a row of zeros is like no other."""
    lengths = np.linalg.norm(table.rows, axis=1, keepdims=True)
    directions = table.rows / np.where(lengths == 0, 1, lengths)
    cosines: Matrix = directions @ directions.T
    return cosines


def as_map(table: PositionTable) -> Matrix:
    """(G², G²): the tile in row r and column c is the map of patch (r, c)'s similarities."""
    grid = table.grid
    tiles = similarity(table).reshape(grid, grid, grid, grid)
    return tiles.transpose(0, 2, 1, 3).reshape(grid * grid, grid * grid)


# how well a linear map reads a patch's place: Table 8 ---------------------------------------------

FOLDS = 5
REPEATS = 10
"""Draws of the folds."""


def place_error(table: PositionTable, *, seed: int = 0, repeats: int = REPEATS) -> dict[str, float]:
    """Mean absolute errors in patches of a linear map to the places, with the standard deviation
    over draws of the folds (NaN of a single draw), and errors of the best guess without an
    embedding, the middle: mae_1d, mae_1d_std, mae_2d, mae_2d_std, constant_1d, constant_2d.

    As the authors' script does it (`pestudy/absolute.py`): linear regression with an intercept,
    five folds over the patches in random order, mean absolute error on the patches left out. Where
    an embedding has more numbers than there are patches, the regression is the one of least norm.
    The place is the number of the patch from 0 to N-1 (1D), or its row and its column from 0 to G-1
    (2D, the mean over both), not scaled: a 1D error of .945 is 14 times .0675, beside Table 8's 2D
    error of .076. Its ± is not explained. Here it is the standard deviation over draws of the
    folds, 4.5 % in 1D and 1.6 % in 2D for a ViT-Ti, as in Table 8's rows; over the folds it would
    be 11 %.
    """
    places = table.places()
    errors = np.zeros((repeats, FOLDS, 3))  # of number, row and column
    for draw in range(repeats):
        order = np.random.default_rng(derive_seed("folds", seed, draw)).permutation(len(places))
        for fold, left_out in enumerate(np.array_split(order, FOLDS)):
            known = np.setdiff1d(order, left_out)
            rows, targets = table.rows[known], places[known]
            middle, target = rows.mean(axis=0), targets.mean(axis=0)
            weights = np.linalg.lstsq(rows - middle, targets - target, rcond=None)[0]
            predicted = (table.rows[left_out] - middle) @ weights + target
            errors[draw, fold] = np.abs(predicted - places[left_out]).mean(axis=0)
    of_draws = errors.mean(axis=1)
    middle = np.abs(places - places.mean(axis=0)).mean(axis=0)
    found: dict[str, float] = {}
    for name, each in (("mae_1d", of_draws[:, 0]), ("mae_2d", of_draws[:, 1:].mean(axis=1))):
        found[name] = float(each.mean())
        found[f"{name}_std"] = float(each.std()) if repeats > 1 else math.nan
    return found | {"constant_1d": float(middle[0]), "constant_2d": float(middle[1:].mean())}


# how much of a trained table is still the noise it started from -----------------------------------


def start_in(
    model: MJPVisionTransformer, table: PositionTable, metadata: Mapping[str, str]
) -> PositionTable | None:
    """The table that training began with, drawn again from the recipe in the model's file; None
    where its metadata do not tell it: another trainer's file, one that was fine-tuned, or a table
    resampled for another grid. The paper's code starts MJP's table at N(0, 1) and its baseline's
    at N(0, .02²)."""
    config = recipe_in(metadata)
    if config is None or config.initial is not None or config.family != model.family:
        return None
    shape = config.model
    said = (shape.img_size // shape.patch_size, shape.embed_dim, shape.depth, shape.num_classes)
    if said != (model.grid.rows, model.embed_dim, len(model.blocks), model.num_classes):
        return None
    return position_table(build_network(config), "the start")


def beside_start(
    table: PositionTable, start: PositionTable
) -> tuple[dict[str, float], PositionTable]:
    """What a trained table has of its start, about their mean rows, and the table without it, which
    is what was learned:

    start_std    the standard deviation of the start
    start_left   by what it is multiplied in the table: training with weight decay shrinks it
    start_share  of the table's variance, that along the start in percent: 100 where training
                 changed its scale only
    """
    trained, drawn = table.centred(), start.centred()
    along = float((trained * drawn).sum() / (drawn**2).sum())
    share = along**2 * float((drawn**2).sum() / (trained**2).sum())
    numbers = {"start_std": float(start.rows.std()), "start_left": along}
    rest = PositionTable(table.grid, trained - along * drawn)
    return {**numbers, "start_share": 100 * share}, rest


# where the class token of the last block looks: Fig. 8 --------------------------------------------

BATCH = 32


def last_attention(model: MJPVisionTransformer, x: Tensor) -> tuple[Matrix, dict[str, float]]:
    """The last block's attention on normalised images x (B, 3, S, S), unshuffled: maps (images,
    heads, G, G), each of sum 1, and in numbers, NaN where there are fewer than two maps:

    head_diversity    divergence of the heads of one image, the mean over the images
    image_diversity   divergence of the images in one head, the mean over the heads
    attention_spread  the entropy of a map over that of an even one; 1: it looks everywhere alike

    The paper calls MJP's heads “more diverse and content-aware” and prints no number.
    """
    weights = np.concatenate([class_attention(model, part) for part in x.split(BATCH)])
    shares = weights / weights.sum(axis=-1, keepdims=True)
    numbers = {
        "head_diversity": divergence(shares.transpose(1, 0, 2)),
        "image_diversity": divergence(shares),
        "attention_spread": float(entr(shares).sum(-1).mean()) / math.log(shares.shape[-1]),
    }
    return shares.reshape(*shares.shape[:2], *model.grid), numbers


@torch.no_grad()
def class_attention(model: MJPVisionTransformer, x: Tensor) -> Matrix:
    """(B, heads, N): the last block's softmax weights of the class token on the patches."""
    attention = model.blocks[-1].attn
    assert isinstance(attention, Attention)
    entering: list[Tensor] = []
    hook = attention.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
    try:
        model.forward_features(x)
    finally:
        hook.remove()
    tokens = entering[0]
    split = attention.qkv(tokens).reshape(*tokens.shape[:2], 3, attention.num_heads, -1)
    query, key = split[:, 0, 0], split[:, :, 1]  # (B, heads, d) of [CLS]; (B, tokens, heads, d)
    scores = torch.einsum("bhd,bnhd->bhn", query * attention.scale, key)
    weights: Matrix = scores.double().softmax(dim=-1)[..., 1 : model.grid.patches + 1].cpu().numpy()
    return weights


def divergence(maps: Matrix) -> float:
    """The generalised Jensen-Shannon divergence of the maps along the first axis of (n, ..., N):
    the entropy of their mean minus the mean of their entropies, over log n, its mean. 0 where all
    are equal, 1 where no two look at the same patch."""
    if len(maps) < 2:
        return math.nan
    gained = entr(maps.mean(axis=0)).sum(-1) - entr(maps).sum(-1).mean(axis=0)
    return float(gained.mean()) / math.log(len(maps))


# all figures of a table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What a table holds.

    variance  `cumulative_shares` of its centred rows (Table 6); energy: of the rows (Fig. 4)
    numbers   by their column of analysis.csv: the table's size, shares in percent, errors in
              patches (Table 8), and the cosine similarity of patches that share a side, and of all
              other pairs
    """

    table: PositionTable
    variance: Matrix
    energy: Matrix
    numbers: Mapping[str, float]


def figures_of(table: PositionTable, *, seed: int = 0, repeats: int = REPEATS) -> Figures:
    """All figures of one table; seed, repeats: of the draws of the regression's folds."""
    variance, energy = cumulative_shares(table.centred()), cumulative_shares(table.rows)
    places, cosines = table.places()[:, 1:], similarity(table)
    steps = np.abs(places[:, None] - places[None]).sum(axis=-1)
    numbers = {
        **{"grid": table.grid, "width": table.width},
        **{f"variance_{k}": 100 * at(variance, k) for k in DIMENSIONS},
        **{f"energy_{k}": 100 * at(energy, k) for k in DIMENSIONS},
        "dimensions_for_90": int(np.searchsorted(energy, 0.9 - 1e-12)) + 1,
        **place_error(table, seed=seed, repeats=repeats),
        "neighbour_similarity": float(cosines[steps == 1].mean()),
        "other_similarity": float(cosines[steps > 1].mean()),
    }
    return Figures(table, variance, energy, numbers)


# a model and its figures as a flat row ------------------------------------------------------------

Row = dict[str, Any]
"""Of a `model`, of `noise` or of the `paper`: shares in percent, errors in patches."""
OF_SIZE = ("grid", "width", "constant_1d", "constant_2d")
"""Numbers of a table that its size says."""
MOSTLY = 50
"""The share of its own start, in percent, from which a table counts as mostly that."""
SEEDS_OF_NOISE = 10

Noise = Sequence[Figures]
"""Of tables of one size from N(0, 1), none of them trained, one for each seed."""


@dataclass(frozen=True)
class Analysed:
    """A model with its row and the maps (images, heads, G, G) of its last block's attention.

    figures  of its table; None without position embeddings
    learned  of what was learned beside the start, where that start makes up most of the table
    """

    model: LoadedModel
    row: Row
    figures: Figures | None
    learned: Figures | None
    maps: Matrix

    @property
    def label(self) -> str:
        return str(self.row["label"])


def analysed(
    checkpoint: NamedCheckpoint,
    model: LoadedModel,
    table: PositionTable | None,
    pixels: Tensor,
    seed: int,
) -> Analysed:
    """All figures of a model with this table, on these images (B, 3, S, S)."""
    row: Row = {"kind": "model", "label": checkpoint.label, "architecture": model.card.architecture}
    row["trained_gamma"] = model.card.trained_gamma
    figures = learned = None
    if table is not None:
        figures = figures_of(table, seed=seed)
        row |= figures.numbers
        start = start_in(model, table, read_metadata(checkpoint.source))
        if start is not None:
            numbers, without = beside_start(table, start)
            rest = figures_of(without, seed=seed)
            row |= numbers
            row |= {f"rest_{name}": n for name, n in rest.numbers.items() if name not in OF_SIZE}
            learned = rest if row["start_share"] > MOSTLY else None
    maps, looked = last_attention(model, model.normalize(pixels))
    return Analysed(model, {**row, **looked, "images": len(pixels)}, figures, learned, maps)


def noise(grid: int, width: int) -> Noise:
    """Each has one draw of the folds: what differs between tables is more than that."""
    tables = enumerate(noise_table(grid, width, seed) for seed in range(SEEDS_OF_NOISE))
    return [figures_of(table, seed=seed, repeats=1) for seed, table in tables]
