"""The table of what bounds the scores: ceilings and the linear system that attacks solve."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from mjp_privacy.report.cell_columns import scalar_text
from mjp_privacy.report.lines import Line, Measure, measured, present
from mjp_privacy.report.tables.figures import Table
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
