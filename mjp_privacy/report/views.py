"""The table as words: what Markdown, LaTeX and HTML print alike, still unescaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mjp_privacy.report.facts import CLIENT_FACTS, client_text, options_text, scalar_text
from mjp_privacy.report.loading import MARKS
from mjp_privacy.report.published import ARROWS, METRICS, TITLES
from mjp_privacy.report.reductions import RULES
from mjp_privacy.report.tables import Table

DASH = "–"

DECIMALS = {"acc": 1, "acc_altered": 1, "mse": 4, "fft2d": 4, "psnr": 2, "ssim": 4, "lpips": 4}

COLUMN_TITLES = {
    "position_embedding": "PE",
    "label_source": "labels",
    "attack_options": "options",
    "attack_name": "attack's name",
}
REDUCTIONS = frozenset(rule.name for rule in RULES)

Record = Mapping[str, Any]


@dataclass(frozen=True)
class TextTable:
    """Cells as text. `align` has a letter a column: l or r."""

    title: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str


def number(value: float | None, decimals: int, *, sign: bool = False) -> str:
    """Fixed decimals; scientific where those would show a zero that is none; a dash for NaN."""
    if value is None or math.isnan(value):
        return DASH
    plus = "+" if sign else ""
    if math.isinf(value):
        return f"{value:{plus}}"
    if value != 0 and abs(value) < 0.5 * 10**-decimals:
        return f"{value:{plus}.1e}"
    return f"{value:{plus}.{decimals}f}"


def score(record: Record, name: str) -> str:
    """`mean [low, high]`, with n where it is not the line's own."""
    decimals = DECIMALS[name]
    mean, low, high = (record[f"{name}_{part}"] for part in ("mean", "lo", "hi"))
    if math.isnan(mean):
        return DASH
    interval = DASH if math.isnan(low) else f"{number(low, decimals)}, {number(high, decimals)}"
    n = record[f"{name}_n"]
    other_n = "" if n == record["n"] else f" (n={n})"
    return f"{number(mean, decimals)} [{interval}]{other_n}"


def gamma(value: float | None) -> str:
    return DASH if value is None or math.isnan(value) else f"{value:g}"


def attack(record: Record) -> str:
    """The attack's label, marked where the line is a control or an oracle selection."""
    return f"{record['attack']}{MARKS.get(str(record['role']), '')}"


def varying_titles(varying: Sequence[str]) -> list[str]:
    """Headers of what the lines differ in; several facts of the client share one column."""
    client, others = _split(varying)
    return [*(["client"] if client else []), *(title_of(key) for key in others)]


def varying_cells(record: Record, varying: Sequence[str]) -> list[str]:
    client, others = _split(varying)
    text = [client_text(record, client)] if client else []
    return [*text, *(_varying_cell(record, key) for key in others)]


def _split(varying: Sequence[str]) -> tuple[list[str], list[str]]:
    client = [key for key in varying if key in CLIENT_FACTS]
    client = client if len(client) > 1 else []
    return client, [key for key in varying if key not in client]


def title_of(key: str) -> str:
    return COLUMN_TITLES.get(key, key.replace("_", " "))


def _varying_cell(record: Record, key: str) -> str:
    if key == "attack_options":
        return options_text(record[key])
    most = "≤ " if key == "uploads" and record["role"] in REDUCTIONS and record[key] > 1 else ""
    return most + scalar_text(record[key])


def unscored(record: Record) -> str:
    kinds = ("failed", "unsupported", "unscored", "not_run")
    names = [(kind, kind.replace("_", " ")) for kind in kinds]
    counts = [f"{record[f'n_{kind}']} {name}" for kind, name in names if record[f"n_{kind}"]]
    return ", ".join(counts) or "0"


def remark(record: Record) -> str:
    """Why a line has no figures, or not all of them."""
    if record["status"] != "ok":
        return f"{record['status']}: {record['reason'] or 'no reason given'}"
    return str(record["reason"]) if not record["n"] else ""


def records(table: Table) -> list[dict[str, Any]]:
    return [{str(k): v for k, v in row.items()} for row in table.frame.to_dict("records")]


def main_table(table: Table, *, many_runs: bool, caption: str) -> TextTable:
    """Every line with its accuracies and the five scores."""
    rows = records(table)
    remarks = any(remark(row) for row in rows)
    header = ["#", *(["Run"] if many_runs else []), "Model", "Set.", "γ", "trained γ", "Attack"]
    header += ["dtype", *varying_titles(table.varying)]
    left = len(header)
    header += ["n", "not scored", f"Acc. {ARROWS['acc']}", "Acc. altered"]
    header += [f"{TITLES[metric]} {ARROWS[metric]}" for metric in METRICS]
    header += ["grey", "ceiling", "cond(A)"]
    align = "r" + "l" * (left - 1) + "r" * (len(header) - left)
    body = [_main_row(row, table.varying, many_runs) for row in rows]
    if remarks:
        header, align = [*header, "Remark"], align + "l"
        body = [[*cells, remark(row)] for cells, row in zip(body, rows, strict=True)]
    title = f"Table 5, {table.variant} variant of the metrics"
    return TextTable(title, caption, tuple(header), tuple(map(tuple, body)), align)


def _main_row(record: Record, varying: Sequence[str], many_runs: bool) -> list[str]:
    run = [str(record["run"])] if many_runs else []
    return [
        *(str(record["line"]), *run, str(record["model"]), str(record["setting"])),
        *(gamma(record["gamma"]), gamma(record["trained_gamma"])),
        *(attack(record), str(record["dtype"])),
        *varying_cells(record, varying),
        *(str(record["n"]), unscored(record)),
        *(score(record, name) for name in ("acc", "acc_altered", *METRICS)),
        number(record["grey_mean"], 2),
        number(record["ceiling_mean"], 2),
        condition(record["cond_a_median"]),
    ]


def condition(value: float) -> str:
    return DASH if math.isnan(value) else f"{value:.1e}"


def comparison_table(table: Table) -> TextTable | None:
    """Ours, the paper's and the difference, one below the other; None where no line has a row."""
    body: list[tuple[str, ...]] = []
    for record in records(table):
        if not isinstance(record["paper_row"], str):
            continue
        body += _comparison_rows(record)
    if not body:
        return None
    names = ("acc", *METRICS)
    header = ("#", "Line", "", *(f"{TITLES[name]} {ARROWS[name]}" for name in names))
    caption = (
        "Differences are ours − paper's, unadjusted: they mix what was attacked with which images "
        "and checkpoints were at hand (see the notes). A difference in accuracy is printed only "
        "where the images are the paper's. † This row of the paper repeats the five scores of "
        "another of its rows."
    )
    return TextTable("Beside the paper", caption, header, tuple(body), "rll" + "r" * len(names))


def _comparison_rows(record: Record) -> list[tuple[str, ...]]:
    names = ("acc", *METRICS)
    ratio = f" γ={gamma(record['gamma'])}" if record["gamma"] else ""
    name = f"{record['model']} {record['setting']}{ratio}, {record['attack']}, {record['dtype']}"
    dagger = " †" if isinstance(record["paper_row_repeats"], str) else ""

    def cells(part: str, sign: bool) -> list[str]:
        return [number(record[f"{n}_{part}"], DECIMALS[n], sign=sign) for n in names]

    return [
        (str(record["line"]), name, "ours", *cells("mean", False)),
        ("", f"{record['paper_row']}{dagger}", "paper", *cells("paper", False)),
        ("", "", "difference", *cells("difference", True)),
    ]


def diagnostics_table(paper: Table, standard: Table) -> TextTable:
    """What bounds the scores: ceiling, conditioning, and how much was shuffled."""
    header = (
        *("#", "Model", "Set.", "γ", "Attack", "dtype", "PSNR median", "exact images"),
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
        "The ceiling is the PSNR of the true embeddings through the minimum-norm inverse, against "
        "the image that the client fed: the rank limit of attacks without a prior. In "
        "(c) nobody reaches it without putting the patches back; the same oracle left in the fed "
        "order is beside it (oracle in place), and a blurred guess may beat that. The distance to "
        "the ceiling is a mean over images, both capped at 100 dB. Below grey: images for which a "
        "uniform grey scores better than the attack; there the attack failed, and its score does "
        "not measure protection. PSNR is of the "
        "standard variant; exact in 8 bits counts by the paper's. Medians: cond(A) and the number "
        "of the nonzero rows of A, its numerical rank at the precision of the client's gradient, "
        "and the number of patches that were shuffled."
    )
    pairs = zip(records(paper), records(standard), strict=True)
    body = tuple(_diagnostics_row(record, rounded["psnr_exact"]) for rounded, record in pairs)
    align = "rlllll" + "r" * (len(header) - 6)
    return TextTable("Ceilings and the linear system", caption, header, body, align)


def _diagnostics_row(record: Record, exact_in_8_bits: int) -> tuple[str, ...]:
    n = record["n"]
    ceiling = number(record["ceiling_mean"], 2)
    empty = record["empty_masks"]
    return (
        *(str(record["line"]), str(record["model"]), str(record["setting"])),
        *(scalar_text(record["gamma"]), attack(record), str(record["dtype"])),
        number(record["psnr_median"], 2),
        *((str(record["psnr_exact"]), str(exact_in_8_bits)) if n else (DASH, DASH)),
        DASH if math.isnan(record["below_grey"]) else f"{record['below_grey']:.0f} %",
        ceiling if ceiling == DASH else f"{ceiling} ({record['ceiling_n']})",
        number(record["ceiling_distance"], 2),
        number(record["in_place_mean"], 2),
        condition(record["cond_a_median"]),
        scalar_text(record["rank_a_median"]),
        scalar_text(record["nonzero_rows_median"]),
        scalar_text(record["shuffled_patches_median"]),
        DASH if empty is None or math.isnan(empty) else f"{empty:.0f}",
    )
