"""Tables as text, shared by Markdown, LaTeX and HTML and not yet escaped for any of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.cell_columns import CLIENT_FACTS, client_text, options_text, scalar_text
from mjp_privacy.report.lines import MARKS
from mjp_privacy.report.published import ARROWS, METRICS, TITLES
from mjp_privacy.report.tables.figures import Table
from mjp_privacy.report.worst_case import RULES

DASH = "–"

DECIMALS = {"acc": 1, "acc_altered": 1, "mse": 4, "fft2d": 4, "psnr": 2, "ssim": 4, "lpips": 4}

FULL = 100
"""Images from which a percentage has a decimal."""

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
    """A table whose cells are text; `align` has one letter for each column: l or r."""

    title: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str
    muted: frozenset[int] = frozenset()  # places of rows that are shown in grey


def number(value: float | None, decimals: int, *, sign: bool = False) -> str:
    """A number as text: `number(1.234, 2)` is `1.23`, and NaN is a dash.

    Small numbers that these decimals would show as zero are written as in `1.0e-05`.
    """
    if value is None or math.isnan(value):
        return DASH
    plus = "+" if sign else ""
    if math.isinf(value):
        return f"{value:{plus}}"
    if value != 0 and abs(value) < 0.5 * 10**-decimals:
        return f"{value:{plus}.1e}"
    return f"{value:{plus}.{decimals}f}"


def percent(value: float | None, n: int) -> str:
    """A share of n images in percent: `62.9`, without the decimal that fewer than 100 cannot
    have."""
    return number(value, DECIMALS["acc"] if n >= FULL else 0)


def below_cap(value: float, decimals: int) -> str:
    """A PSNR below the cap, with as many decimals as keep it there: `99.98`, not `100.0`."""
    while value < PSNR_CAP <= float(f"{value:.{decimals}f}") and decimals < 9:
        decimals += 1
    return number(value, decimals)


def capped(value: float | None, decimals: int) -> str:
    """A PSNR as tables show it: `≥ 100` from the cap on, above which nothing is told apart."""
    if value is not None and value >= PSNR_CAP:
        return f"≥ {PSNR_CAP:.0f}"
    return DASH if value is None else below_cap(value, decimals)


def score(record: Record, name: str) -> str:
    """`mean [low, high]`, with its n where that differs from the line's."""
    decimals = DECIMALS[name]
    mean, low, high = (record[f"{name}_{part}"] for part in ("mean", "lo", "hi"))
    if math.isnan(mean):
        return DASH
    if name.startswith("acc") and record[f"{name}_n"] < FULL:
        decimals = 0
    if name == "psnr" and mean >= PSNR_CAP:
        return capped(mean, decimals)
    shown = below_cap if name == "psnr" else number
    interval = DASH if math.isnan(low) else f"{shown(low, decimals)}, {shown(high, decimals)}"
    n = record[f"{name}_n"]
    other_n = "" if n == record["n"] else f" (n={n})"
    return f"{shown(mean, decimals)} [{interval}]{other_n}"


def gamma(value: float | None) -> str:
    """γ without trailing zeros, a dash where it is unknown."""
    return DASH if value is None or math.isnan(value) else f"{value:g}"


def attack(record: Record) -> str:
    """The attack's label, with a mark where the line is a control or an oracle selection."""
    return f"{record['attack']}{MARKS.get(str(record['role']), '')}"


def varying_titles(varying: Sequence[str]) -> list[str]:
    """Headers of the entries in which lines differ; several facts of the client share a column."""
    client, others = _split(varying)
    return [*(["client"] if client else []), *(title_of(key) for key in others)]


def varying_cells(record: Record, varying: Sequence[str]) -> list[str]:
    """The cells of one line under the headers of `varying_titles`."""
    client, others = _split(varying)
    text = [client_text(record, client)] if client else []
    return [*text, *(_varying_cell(record, key) for key in others)]


def _split(varying: Sequence[str]) -> tuple[list[str], list[str]]:
    client = [key for key in varying if key in CLIENT_FACTS]
    client = client if len(client) > 1 else []
    return client, [key for key in varying if key not in client]


def title_of(key: str) -> str:
    """What tables call a cell entry: `server_lr` is `server lr`."""
    return COLUMN_TITLES.get(key, key.replace("_", " "))


def _varying_cell(record: Record, key: str) -> str:
    if key == "attack_options":
        return options_text(record[key])
    most = "≤ " if key == "uploads" and record["role"] in REDUCTIONS and record[key] > 1 else ""
    return most + scalar_text(record[key])


def unscored(record: Record) -> str:
    """How many images have no score, by kind: `2 failed, 1 not run`, or `0`."""
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
    """One mapping from column to value for every line."""
    return [{str(k): v for k, v in row.items()} for row in table.frame.to_dict("records")]


def main_table(table: Table, *, many_runs: bool, caption: str, title: str) -> TextTable:
    """Every line of `table` with its counts, its scores and what bounds them."""
    rows = records(table)
    remarks = any(remark(row) for row in rows)
    several_dtypes = len({row["dtype"] for row in rows}) > 1
    header = ["#", *(["Run"] if many_runs else []), "Model", "Set.", "γ", "Attack"]
    header += [*(["dtype"] if several_dtypes else []), *varying_titles(table.varying)]
    left = len(header)
    header += ["n", "not scored", f"PSNR {ARROWS['psnr']}", "median", "exact", "≥ 20 dB"]
    header += [f"{TITLES[metric]} {ARROWS[metric]}" for metric in METRICS if metric != "psnr"]
    header += [f"Acc. {ARROWS['acc']}", "Acc. altered", "grey", "rank ceiling", "cond(A)"]
    align = "r" + "l" * (left - 1) + "r" * (len(header) - left)
    body = [_main_row(row, table.varying, many_runs, several_dtypes) for row in rows]
    if remarks:
        header, align = [*header, "Remark"], align + "l"
        body = [[*cells, remark(row)] for cells, row in zip(body, rows, strict=True)]
    return TextTable(title, caption, tuple(header), tuple(map(tuple, body)), align)


def _main_row(
    record: Record, varying: Sequence[str], many_runs: bool, several_dtypes: bool
) -> list[str]:
    run = [str(record["run"])] if many_runs else []
    tried = record["n"] + record["n_failed"] + record["n_unsupported"]
    others = [metric for metric in METRICS if metric != "psnr"]
    return [
        *(str(record["line"]), *run, str(record["model"]), str(record["setting"])),
        *(gamma(record["gamma"]), attack(record)),
        *([str(record["dtype"])] if several_dtypes else []),
        *varying_cells(record, varying),
        *(str(record["n"]), unscored(record), score(record, "psnr")),
        capped(record["psnr_median"], 2),
        *(
            (str(record["psnr_exact"]), f"{record['psnr_at_20']} of {tried}")
            if record["n"]
            else (DASH, DASH)
        ),
        *(score(record, name) for name in (*others, "acc", "acc_altered")),
        *(number(record["grey_mean"], 2), number(record["ceiling_mean"], 2)),
        condition(record["cond_a_median"]),
    ]


def condition(value: float) -> str:
    """A condition number such as `1.2e+07`, or a dash."""
    return DASH if math.isnan(value) else f"{value:.1e}"


def comparison_table(table: Table) -> TextTable | None:
    """Our figures, the paper's and the difference, for every line that has a row in the paper.

    None where no line has one.
    """
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
        "Differences are ours − the paper's, unadjusted: they also contain the effect of other "
        "images and checkpoints than the paper's (see the notes). A difference in accuracy is "
        "printed only where the images are the paper's. † This row of the paper repeats the five "
        "scores of another of its rows."
    )
    return TextTable("Beside the paper", caption, header, tuple(body), "rll" + "r" * len(names))


def _comparison_rows(record: Record) -> list[tuple[str, ...]]:
    names = ("acc", *METRICS)
    ratio = f" γ={gamma(record['gamma'])}" if record["gamma"] else ""
    name = f"{record['model']} {record['setting']}{ratio}, {record['attack']}, {record['dtype']}"
    dagger = " †" if isinstance(record["paper_row_repeats"], str) else ""

    def cells(part: str, sign: bool) -> list[str]:
        few = record["acc_n"] < FULL and part != "paper"
        decimals = {**DECIMALS, "acc": 0} if few else DECIMALS
        return [number(record[f"{n}_{part}"], decimals[n], sign=sign) for n in names]

    return [
        (str(record["line"]), name, "ours", *cells("mean", False)),
        ("", f"{record['paper_row']}{dagger}", "paper", *cells("paper", False)),
        ("", "", "difference", *cells("difference", True)),
    ]


def one_line(text: str) -> str:
    """The text on one line, without characters that steer a terminal: those become spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
