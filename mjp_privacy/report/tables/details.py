"""What bounds the scores, how long it took, and whether pictures point to their own image."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mjp_privacy.metrics.matching import (
    MOST,
    MOST_MATCHED,
    SIDE,
    Pointing,
    identify,
    matched_distances,
    matched_psnr,
    shrink,
)
from mjp_privacy.metrics.statistics import independent_trials
from mjp_privacy.report.figures import Measure, Table, measured, present, varying_columns
from mjp_privacy.report.lines import (
    ATTACK_FACTS,
    COMMAND_FACTS,
    MODEL_FACTS,
    STAGE,
    Line,
    client_text,
    scalar_text,
)
from mjp_privacy.report.tables.text import (
    DASH,
    Column,
    Record,
    TextTable,
    attack,
    capped,
    condition,
    gamma,
    number,
    records,
    table_of,
)
from mjp_privacy.report.worst_case import picture_ids

if TYPE_CHECKING:
    from torch import Tensor

DIAGNOSTICS_CAPTION = (
    "Ceiling: PSNR of the true patch embeddings inverted by minimum norm, against the image that "
    "the client fed: the limit that the rank of the embedding sets to attacks without a prior. "
    "Oracle in place: the same with the patches left in the order they were fed, in (c) below the "
    "ceiling. Ceiling − PSNR: mean over images, both capped at 100 dB. Below grey: images for "
    "which a uniform grey scores better; there the attack failed, which measures no protection. "
    "PSNR is of the standard variant; exact in 8 bits counts by the paper variant. Medians: "
    "cond(A), the numerical rank of A at the gradient's precision, its nonzero rows, shuffled "
    "patches. Empty masks: images in which no patch was shuffled."
)


def diagnostics_table(standard: Table) -> TextTable:
    """Ceiling, conditioning and number of shuffled patches, for every line."""

    def fact_of(title: str, name: str, decimals: int | None = None) -> Column:
        shown = scalar_text if decimals is None else lambda value: number(value, decimals)
        return Column(title, lambda record: shown(record[name]))

    columns = [
        Column("#", lambda r: r["line"]),
        Column("Model", lambda r: r["model"], "l"),
        Column("Set.", lambda r: r["setting"], "l"),
        Column("γ", lambda r: scalar_text(r["gamma"]), "l"),
        Column("Attack", attack, "l"),
        Column("dtype", lambda r: r["dtype"], "l"),
        Column("PSNR median", lambda r: capped(r["psnr_median"], 2)),
        Column("exact in 8 bits", lambda r: r["psnr_exact"] if r["n"] else DASH),
        Column("below grey", _below_grey),
        Column("ceiling (n)", _ceiling),
        fact_of("ceiling − PSNR", "ceiling_distance", 2),
        fact_of("oracle in place", "in_place_mean", 2),
        Column("cond(A)", lambda r: condition(r["cond_a_median"])),
        fact_of("rank(A)", "rank_a_median"),
        fact_of("nonzero rows", "nonzero_rows_median"),
        fact_of("shuffled patches", "shuffled_patches_median"),
        fact_of("empty masks", "empty_masks"),
    ]
    title = "Ceilings and the linear system"
    return table_of(title, DIAGNOSTICS_CAPTION, columns, records(standard))


def _below_grey(record: Record) -> str:
    share, n = record["below_grey"], record["below_grey_n"]
    return DASH if math.isnan(share) else f"{round(share * n / 100)} of {n}"


def _ceiling(record: Record) -> str:
    mean = number(record["ceiling_mean"], 2)
    return mean if mean == DASH else f"{mean} ({record['ceiling_n']})"


REGIONS_CAPTION = (
    "Mask precision: the share of the patches taken for shuffled that are; mask recall: the share "
    "of the shuffled patches that are found. PSNR, unmasked and masked: over the pixels of patches "
    "that were not shuffled and that were; the mean image on the former is their floor. Oracle "
    "permutation: the attack's patches put back with the true permutation, which is no attack's "
    "result. Jigsaw, direct and neighbour: the share of shuffled patches put back into their "
    "place, and of neighbouring pairs restored. Gradient residual: the relative distance of the "
    "reconstruction's gradient from the uploaded one, without the private image. Means, PSNR "
    "capped at 100 dB, or medians where said; n where it differs from the line's."
)


def regions_table(lines: Sequence[Line]) -> TextTable | None:
    """The lines that have such diagnostics, with a column for each; None where no line has any."""
    measures = present(lines)
    shown = [line for line in lines if present([line])]
    columns = [
        Column("#", lambda line: line.number),
        Column("Model", lambda line: line.cell.model.label, "l"),
        Column("Set.", lambda line: line.cell.setting, "l"),
        Column("γ", lambda line: gamma(line.cell.gamma), "l"),
        Column("Attack", lambda line: line.title, "l"),
        Column("dtype", lambda line: line.cell.dtype, "l"),
        *(Column(measure.title, partial(_figure, measure)) for measure in measures),
    ]
    title = "Masks, regions and residuals"
    return table_of(title, REGIONS_CAPTION, columns, shown) if shown else None


def _figure(measure: Measure, line: Line) -> str:
    value, n = measured(line, measure)
    same_n = n == line.count("psnr", "standard")
    return DASH if not n else number(value, measure.decimals) + ("" if same_n else f" (n={n})")


STAGES = ("decode", "gradient", "attack", "score")

TIMING_CAPTION = (
    "Wall-clock seconds per image on the machine that ran each stage, with one thread, median over "
    "blocks of images; the times of these stages are not among the scores. The time of a gradient "
    "that several attacks share is counted for the first of them. Another machine gives other "
    "figures, so compare only lines with the same device."
)


def timing_table(lines: Sequence[Line]) -> TextTable | None:
    """Medians over the blocks of each attack and dtype; None where nothing was timed.

    The images of a block share its time equally.
    """
    read = [_seconds(line) for line in lines]
    if not any(len(seconds) for seconds in read):
        return None
    keys = ["attack", "dtype", "device", "line", "block"]
    blocks = pd.concat(read).melt(keys, var_name="stage", value_name="seconds").dropna()
    timed = blocks.groupby([*keys, "stage"])["seconds"].agg(["mean", "count"]).reset_index()
    timed["stage"] = timed["stage"].str.removeprefix(STAGE)
    order = {stage: place for place, stage in enumerate(STAGES)}
    timed["order"] = timed["stage"].map(order).fillna(len(order))
    stages = timed.groupby(["attack", "dtype", "device", "order", "stage"])
    rows = stages.agg(images=("count", "sum"), seconds=("mean", "median")).reset_index()
    columns = [
        *(Column(t, itemgetter(t.lower()), "l") for t in ("Attack", "dtype", "Stage", "Device")),
        Column("Images", itemgetter("images")),
        Column("s / image", lambda row: f"{row['seconds']:.3g}"),
    ]
    return table_of("Time", TIMING_CAPTION, columns, rows.to_dict("records"))


def _seconds(line: Line) -> pd.DataFrame:
    """How many seconds each stage took for each image, and what it ran on."""
    names = [name for name in line.store.cell(line.run_id).columns if name.startswith(STAGE)]
    if not names:
        return pd.DataFrame()
    made_with = line.store.about(line.run_id)[-1].get("made_with", {})
    facts: dict[str, Any] = {"attack": line.attack, "dtype": line.cell.dtype, "line": line.number}
    read = line.store.read(line.run_id, ["block", *names])
    return read.assign(**facts, device=made_with.get("device", ""))


# does a picture point to its own image? -----------------------------------------------------------

IDENTIFICATION = "Does a reconstruction point to its own image?"

IDENTIFICATION_CAPTION = (
    f"Each reconstruction is compared with the originals of all images of its row: at most {MOST} "
    "of the line's with a reconstruction, evenly spaced in the order of their ids. First: its own "
    "is the nearest, as count, share and Wilson 95 % interval; then the mean of 1 / rank. Equally "
    "near ones rank before it; other crops of its photograph are others. Chance: the same for an "
    "order drawn by lot, so rows of other numbers of images do not compare. Original: the plain "
    f"picture, in (b) too. Pictures are shrunk by area to at most {SIDE} pixels a side. Pixels: "
    "mean squared error. LPIPS: with AlexNet. Features: cosine of AlexNet's last convolutions, "
    "averaged over space; it was trained on ImageNet's labels and is not the attacked network. "
    "Patches matched, where the client shuffles: squared error after patches were assigned one to "
    f"one (Hungarian method), each shrunk by itself, on at most {MOST_MATCHED} of the images. PSNR "
    "matched: their median at full size; the order is found with the original at hand, so it is an "
    "upper bound."
)


@dataclass(frozen=True)
class Pair:
    """A reconstruction and its original, small and, where the client shuffled, at full size."""

    small: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor] | None
    photograph: str
    patch: int  # pixels a side of a patch of a picture that was shuffled


def identification_table(lines: Sequence[Line], *, many_runs: bool = False) -> TextTable | None:
    """A row for each line whose reconstructions and originals are stored; None where none is.

    A line needs two such images of equal size.
    """
    known = {*ATTACK_FACTS, *COMMAND_FACTS, *MODEL_FACTS, "gamma", "setting"}
    facts = [key for key in varying_columns(lines) if key not in known]
    dtypes = len({line.cell.dtype for line in lines}) > 1
    read = [(line, pairs) for line in lines if len(pairs := _pairs(line)) > 1]
    found = [(line, *_identified(pairs, len(line.images))) for line, pairs in read]
    names = (
        *("images", "chance", "pixels first", "LPIPS first", "features first"),
        *("patches matched first", "chance, matched", "PSNR matched"),
    )
    columns = [
        Column("#", lambda row: row[0].number),
        Column("Run", lambda row: row[0].run, "l") if many_runs else None,
        Column("Line", lambda row: _line_name(row[0], facts, dtypes), "l"),
        *(Column(name, itemgetter(at)) for at, name in enumerate(names, 1)),
    ]
    return table_of(IDENTIFICATION, IDENTIFICATION_CAPTION, columns, found) if found else None


def evenly_spaced(names: Sequence[str], most: int) -> list[str]:
    """At most `most` of the names, first and last among them, equally far apart."""
    if len(names) <= most:
        return list(names)
    return [names[at] for at in np.linspace(0, len(names) - 1, most).round().astype(int)]


def _pairs(line: Line) -> list[Pair]:
    """The stored pictures of a line that have originals; none where they differ in size."""
    scored = sorted({*line.scored("psnr", "standard").index} & {*picture_ids(line)})
    chosen = evenly_spaced(scored, MOST)
    matched = set(evenly_spaced(chosen, MOST_MATCHED))
    pairs: list[Pair] = []
    for image_id in chosen:
        tensors = line.reconstruction(image_id)
        if tensors is None or not {"images", "plain"} <= tensors.keys():
            continue
        both = tensors["images"].float(), tensors["plain"].float()
        small = shrink(both[0][None])[0], shrink(both[1][None])[0]
        if pairs and small[0].shape != pairs[0].small[0].shape:
            return []
        photograph = image_id if line.groups is None else str(line.groups[image_id])
        full = both if image_id in matched and "mask" in tensors else None
        patch = _patch_size(both[0], tensors["mask"].numel()) if full else 0
        pairs.append(Pair(small, full, photograph, patch))
    return pairs


def _stacked(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    import torch

    images, originals = zip(*pairs, strict=True)
    return torch.stack(images), torch.stack(originals)


def _patch_size(image: Tensor, patches: int) -> int:
    """Pixels a side of a patch of a square grid of so many; 0 where there is no such grid."""
    grid, (height, width) = math.isqrt(patches), image.shape[-2:]
    whole = grid * grid == patches and grid > 0 and height == width and height % grid == 0
    return height // grid if whole else 0


def _line_name(line: Line, facts: Sequence[str], dtypes: bool) -> str:
    cell, client = line.cell, client_text(line.cell.columns, facts)
    parts = [line.label, *([f"γ={gamma(cell.gamma)}"] if cell.gamma else [])]
    parts += [cell.dtype] if dtypes else []
    return ", ".join([*parts, *([client] if client != DASH else [])])


def _identified(pairs: Sequence[Pair], of: int) -> list[str]:
    """How often pictures point to their own image; `of`: images of the line."""
    shuffled = [pair for pair in pairs if pair.full]
    matched, psnr, size = None, None, shuffled[-1].patch if len(shuffled) > 1 else 0
    if size:
        full = _stacked(pair.full for pair in shuffled if pair.full)
        matched = matched_distances(*full, size)
        psnr = float(np.median(matched_psnr(*full, size)))
    found = identify(*_stacked(pair.small for pair in pairs), matched=matched)
    trials, of_matched = (
        independent_trials([pair.photograph for pair in some]) for some in (pairs, shuffled)
    )
    whole = (found.pixels, found.perceptual, found.features)
    ranked = [_pointing(pointing, trials) for pointing in whole]
    ranked.append(_pointing(found.patches, of_matched))
    few = DASH if found.patches is None else _chance(found.patches.first.of)
    return [f"{found.n} of {of}", _chance(found.n), *ranked, few, capped(psnr, 2)]


def _pointing(pointing: Pointing | None, trials: float) -> str:
    if pointing is None:
        return DASH
    mean = math.floor(1000 * pointing.reciprocal_rank + 1e-9) / 1000  # 1 stands for all firsts
    return f"{replace(pointing.first, trials=trials).text()}; {mean:.3f}"


def _chance(n: int) -> str:
    """Share of firsts and mean 1 / rank of an order drawn by lot: 1 / n, and Σ (1 / r) / n."""
    return f"{100 / n:.1f} %; {sum(1 / rank for rank in range(1, n + 1)) / n:.3f}"
