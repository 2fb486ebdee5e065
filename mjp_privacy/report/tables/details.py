"""What bounds the scores, how long it took, and whether pictures point to their own image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.metrics.matching import (
    MOST,
    MOST_MATCHED,
    SIDE,
    Identification,
    Pointing,
    identify,
    matched_distances,
    matched_psnr,
    shrink,
)
from mjp_privacy.metrics.statistics import Floats, independent_trials
from mjp_privacy.report.figures import Measure, Table, measured, present, varying_columns
from mjp_privacy.report.lines import (
    ATTACK_FACTS,
    COMMAND_FACTS,
    MODEL_FACTS,
    Line,
    client_text,
    scalar_text,
)
from mjp_privacy.report.tables.text import (
    DASH,
    Record,
    TextTable,
    attack,
    capped,
    condition,
    gamma,
    number,
    records,
)
from mjp_privacy.report.worst_case import picture_ids


def diagnostics_table(paper: Table, standard: Table) -> TextTable:
    """Ceiling, conditioning and number of shuffled patches, for every line."""
    header = (
        *("#", "Model", "Set.", "γ", "Attack", "dtype", "PSNR median"),
        *(
            "exact in 8 bits",
            "below grey",
            "ceiling (n)",
            "ceiling − PSNR",
            "oracle in place",
            "cond(A)",
            "rank(A)",
            "nonzero rows",
            "shuffled patches",
            "empty masks",
        ),
    )
    caption = (
        "The ceiling is the PSNR of the true patch embeddings inverted by minimum norm, against "
        "the image that the client fed to its model: the limit that the rank of the embedding sets "
        "to attacks without a prior. In setting (c) no attack reaches it without putting the "
        "patches back; the same oracle with the patches left in the order they were fed stands "
        "beside it (oracle in place), and even a blurred guess may beat that one. The distance to "
        "the ceiling is a mean over images, with both PSNRs capped at 100 dB. Below grey: the "
        "share of images for which a uniform grey scores better than the attack; there the attack "
        "failed, and its score does not measure protection. PSNR is of the standard variant; exact "
        "in 8 bits counts by the paper variant. Medians are given of cond(A), of the numerical "
        "rank of A at the precision of the client's gradient, of the number of its nonzero rows, "
        "and of the number of shuffled patches; empty masks counts the images in which no patch "
        "was shuffled."
    )
    pairs = zip(records(paper), records(standard), strict=True)
    body = tuple(_diagnostics_row(record, rounded["psnr_exact"]) for rounded, record in pairs)
    align = "rlllll" + "r" * (len(header) - 6)
    return TextTable("Ceilings and the linear system", caption, header, body, align)


def _below_grey(record: Record) -> str:
    n = record["below_grey_n"]
    return f"{round(record['below_grey'] * n / 100)} of {n}"


def _diagnostics_row(record: Record, exact_in_8_bits: int) -> tuple[str, ...]:
    n = record["n"]
    ceiling = number(record["ceiling_mean"], 2)
    empty = record["empty_masks"]
    return (
        *(str(record["line"]), str(record["model"]), str(record["setting"])),
        *(scalar_text(record["gamma"]), attack(record), str(record["dtype"])),
        capped(record["psnr_median"], 2),
        str(exact_in_8_bits) if n else DASH,
        DASH if math.isnan(record["below_grey"]) else _below_grey(record),
        ceiling if ceiling == DASH else f"{ceiling} ({record['ceiling_n']})",
        number(record["ceiling_distance"], 2),
        number(record["in_place_mean"], 2),
        condition(record["cond_a_median"]),
        scalar_text(record["rank_a_median"]),
        scalar_text(record["nonzero_rows_median"]),
        scalar_text(record["shuffled_patches_median"]),
        DASH if empty is None or math.isnan(empty) else f"{empty:.0f}",
    )


REGIONS_CAPTION = (
    "Mask precision: the share of the patches the attacker takes for shuffled that are shuffled; "
    "mask recall: the share of the shuffled patches it finds. PSNR, unmasked and masked: over the "
    "pixels of the patches that were not shuffled and of those that were; the mean image on the "
    "unmasked patches is the floor of the former. PSNR, oracle permutation: the attack's patches "
    "put back with the true permutation, which is not an attack's result. Jigsaw, direct and "
    "neighbour: the share of shuffled patches put back into their place, and of neighbouring pairs "
    "restored. Gradient residual: the relative distance of the gradient that the reconstruction "
    "gives from the uploaded one; the private image is not used. Figures are means, with PSNR "
    "capped at 100 dB, or medians where the column says so; n is given where it differs from the "
    "line's."
)


def regions_table(lines: Sequence[Line]) -> TextTable | None:
    """The lines that have such diagnostics, with a column for each; None where no line has any."""
    measures = present(lines)
    shown = [line for line in lines if present([line])]
    if not shown:
        return None
    header = ("#", "Model", "Set.", "γ", "Attack", "dtype", *(m.title for m in measures))
    body = tuple(_row(line, measures) for line in shown)
    align = "rlllll" + "r" * len(measures)
    return TextTable("Masks, regions and residuals", REGIONS_CAPTION, header, body, align)


def _row(line: Line, measures: Sequence[Measure]) -> tuple[str, ...]:
    cell = line.cell
    return (
        *(str(line.number), cell.model.label, cell.setting, gamma(cell.gamma)),
        *(line.title, cell.dtype),
        *(_figure(line, measure) for measure in measures),
    )


def _figure(line: Line, measure: Measure) -> str:
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


def timing_table(lines: Sequence[Line], timings: pd.DataFrame) -> TextTable | None:
    """Medians over the blocks of each attack and dtype; None where nothing was timed."""
    timed = timings[timings["images"] > 0] if len(timings) else timings
    if timed.empty:
        return None
    cells = {line.number: line.cell for line in lines}
    timed = timed[timed["line"].isin(cells)]
    order = {stage: place for place, stage in enumerate(STAGES)}
    timed = timed.assign(
        attack=timed["line"].map({n: cell.attack.title for n, cell in cells.items()}),
        dtype=timed["line"].map({n: cell.dtype for n, cell in cells.items()}),
        order=timed["stage"].map(order).fillna(len(order)),
    )
    keys = ["attack", "dtype", "device", "order", "stage"]
    stages = timed.groupby(keys, dropna=False).agg({"images": "sum", "seconds": "median"})
    rows = tuple(
        (
            *(str(row[key]) for key in ("attack", "dtype", "stage", "device", "images")),
            f"{row['seconds']:.3g}",
        )
        for row in stages.reset_index().to_dict("records")
    )
    header = ("Attack", "dtype", "Stage", "Device", "Images", "s / image")
    return TextTable("Time", TIMING_CAPTION, header, rows, "llllrr")


# does a picture point to its own image? -----------------------------------------------------------

IDENTIFICATION = "Does a reconstruction point to its own image?"

IDENTIFICATION_CAPTION = (
    "Every reconstruction is compared with the originals of all images of its row, its own among "
    "them. First: the own one is the nearest, as count, share and Wilson 95 % interval; behind it "
    "the mean of 1 / rank. Chance: the same two for an order drawn by lot; it depends on how many "
    "images there are, so rows with other numbers of images do not compare. Where another original "
    "is as near as the own one, the own one ranks behind it; other crops of the same photograph "
    "are others, and each crop counts singly. Original: the plain picture, in (b) too. "
    f"Images: those compared, of all of the line, at most {MOST}, evenly spaced in the order of "
    "their ids; images without a reconstruction are not among them. Pictures are shrunk by area to "
    f"at most {SIDE} pixels a side. Pixels: mean squared error. LPIPS: with AlexNet. Features: "
    "cosine of the last convolutions of AlexNet, trained on ImageNet's labels and not the attacked "
    "network, averaged over space. Patches matched, where the client shuffles: squared error after "
    "the patches of the reconstruction were assigned one to one to those of each original "
    f"(Hungarian method), on at most {MOST_MATCHED} of the images, evenly spaced, each patch "
    "shrunk by itself; so its chance is higher. PSNR matched: the median over these images, at "
    "full size, against the own original; the best order of patches is found with the original at "
    "hand, so it is an upper bound."
)


@dataclass(frozen=True)
class _Read:
    """Reconstructions and originals of one line: all of them small, a few at full size."""

    small: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor] | None  # None: nothing was shuffled
    patch_size: int
    of: int  # images of the line
    trials: tuple[float, float]  # as how many independent images small and full count


def identification_table(lines: Sequence[Line], *, many_runs: bool = False) -> TextTable | None:
    """A row for each line whose reconstructions and originals are stored; None where none is.

    A line needs two such images of equal size.
    """
    facts = [
        key
        for key in varying_columns(lines)
        if key not in ATTACK_FACTS | COMMAND_FACTS | MODEL_FACTS
    ]
    dtypes = len({line.cell.dtype for line in lines}) > 1
    rows = []
    for line in lines:
        read = _read_pictures(line)
        if read is not None:
            run = [line.run] if many_runs else []
            rows.append(
                (str(line.number), *run, _line_name(line, facts, dtypes), *_identified(read))
            )
    if not rows:
        return None
    left = [*(["Run"] if many_runs else []), "Line"]
    header = ("#", *left, "images", "chance", "pixels first", "LPIPS first", "features first")
    header += ("patches matched first", "chance, matched", "PSNR matched")
    align = "r" + "l" * len(left) + "r" * (len(header) - 1 - len(left))
    return TextTable(IDENTIFICATION, IDENTIFICATION_CAPTION, header, tuple(rows), align)


def evenly_spaced(names: Sequence[str], most: int) -> list[str]:
    """At most `most` of the names, first and last among them, equally far apart."""
    if len(names) <= most:
        return list(names)
    return [names[at] for at in np.linspace(0, len(names) - 1, most).round().astype(int)]


def _read_pictures(line: Line) -> _Read | None:
    """The stored pictures of a line; None for fewer than two, or without their originals."""
    scored = sorted({*line.scored("psnr", "standard").index} & {*picture_ids(line)})
    chosen = evenly_spaced(scored, MOST)
    matched = set(evenly_spaced(chosen, MOST_MATCHED))
    small: list[tuple[Tensor, Tensor]] = []
    full: list[tuple[Tensor, Tensor]] = []
    photographs: tuple[list[str], list[str]] = [], []  # of small, of full
    patches = 0
    for image_id in chosen:
        tensors = line.reconstruction(image_id)
        if tensors is None or not {"images", "plain"} <= tensors.keys():
            continue
        image, original = tensors["images"].float(), tensors["plain"].float()
        if small and shrink(image[None])[0].shape != small[0][0].shape:
            return None
        small.append((shrink(image[None])[0], shrink(original[None])[0]))
        photograph = (line.groups or {}).get(image_id, image_id)
        photographs[0].append(photograph)
        if image_id in matched and "mask" in tensors:
            patches = tensors["mask"].numel()
            full.append((image, original))
            photographs[1].append(photograph)
    if len(small) < 2:
        return None
    patch_size = _patch_size(full[0][0], patches) if len(full) > 1 else 0
    return _Read(
        _stacked(small),
        _stacked(full) if patch_size else None,
        patch_size,
        len(line.images),
        (independent_trials(photographs[0]), independent_trials(photographs[1])),
    )


def _stacked(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, originals = zip(*pairs, strict=True)
    return torch.stack(images), torch.stack(originals)


def _patch_size(image: Tensor, patches: int) -> int:
    """Pixels a side of a patch of a square grid of so many; 0 where there is no such grid."""
    grid, (height, width) = math.isqrt(patches), image.shape[-2:]
    whole = grid * grid == patches and grid > 0 and height == width and height % grid == 0
    return height // grid if whole else 0


def _line_name(line: Line, facts: Sequence[str], dtypes: bool) -> str:
    cell = line.cell
    client = client_text(cell.columns, [key for key in facts if key not in ("gamma", "setting")])
    parts = [line.label, *([f"γ={gamma(cell.gamma)}"] if cell.gamma else [])]
    parts += [cell.dtype] if dtypes else []
    return ", ".join([*parts, *([client] if client != DASH else [])])


def _identified(read: _Read) -> list[str]:
    matched: Floats | None = None
    psnr: float | None = None
    if read.full is not None:
        matched = matched_distances(*read.full, read.patch_size)
        psnr = float(np.median(matched_psnr(*read.full, read.patch_size)))
    found: Identification = identify(*read.small, matched=matched)
    of_whole, of_matched = read.trials
    whole = (found.pixels, found.perceptual, found.features)
    ranked = [_pointing(pointing, of_whole) for pointing in whole]
    ranked.append(_pointing(found.patches, of_matched))
    few = DASH if found.patches is None else _chance(found.patches.first.of)
    return [f"{found.n} of {read.of}", _chance(found.n), *ranked, few, capped(psnr, 2)]


def _pointing(pointing: Pointing | None, trials: float) -> str:
    if pointing is None:
        return DASH
    mean = math.floor(1000 * pointing.reciprocal_rank + 1e-9) / 1000  # 1 stands for all firsts
    return f"{replace(pointing.first, trials=trials).text()}; {mean:.3f}"


def _chance(n: int) -> str:
    """Share of firsts and mean 1 / rank of an order drawn by lot: 1 / n, and Σ (1 / r) / n."""
    return f"{100 / n:.1f} %; {sum(1 / rank for rank in range(1, n + 1)) / n:.3f}"
