"""The table of what bounds the scores: ceilings and the linear system that attacks solve."""

from __future__ import annotations

import math

from mjp_privacy.report.cell_columns import scalar_text
from mjp_privacy.report.tables.figures import Table
from mjp_privacy.report.tables.text import (
    DASH,
    Record,
    TextTable,
    attack,
    capped,
    condition,
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
