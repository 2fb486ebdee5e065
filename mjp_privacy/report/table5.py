"""The paper's Table 5 from the rows of a run: its groups, order, columns, definitions and digits.

    Model | Set. | γ | Acc. | MSE | FFT2D | PSNR | SSIM | LPIPS | n | what really leaks

Rows are those of the published attack, in float32 where a client has several precisions. Beneath
the rows that stand for one of the paper's the paper prints its own, in grey; nothing is subtracted.
The last two columns are no part of the paper's table: how many pictures the means are of, and what
the best attack of the same run gets from the same client. A run without the paper's rows gets the
same table of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.schema import height_width, size_text
from mjp_privacy.metrics.statistics import Summary
from mjp_privacy.models.sizes import PAPERS_SIZE, is_papers_model
from mjp_privacy.report.answer import LADDER
from mjp_privacy.report.card import ABSENT, NOT_RUN, card_figure, card_row
from mjp_privacy.report.clients import PUBLISHED, Client, attacked_ones, same_client, short_gamma
from mjp_privacy.report.figures import (
    ARROWS,
    METRICS,
    TITLES,
    accuracies,
    summary,
)
from mjp_privacy.report.lines import Line
from mjp_privacy.report.text import DASH, DECIMALS, TextTable, capped, csv_text, percent

TITLE = "Table 5"
GROUP_OF_SETTING = {"a": 1, "b": 2, "c": 4}
SCALE = {"acc": 100}  # in percent
LEAK = (
    *("leak_attack", "leak_uploads", "leak_exact", "leak_at_20", "leak_of", "leak_median"),
    *("leak_missing", "leak_target"),
)
"""Columns of table5.csv."""


# the paper's Table 5 as printed -------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedRow:
    """One printed row; accuracy in percent, PSNR in dB."""

    group: int  # (1)-(4)
    model: str
    setting: str
    acc: float
    mse: float
    fft2d: float
    psnr: float
    ssim: float
    lpips: float
    repeats: bool = False  # the five scores of another row, digit for digit

    @property
    def label(self) -> str:
        """The row's name, such as `(2) DeiT-S b`."""
        return f"({self.group}) {self.model} {self.setting}"


TABLE5 = (
    PublishedRow(1, "ViT-S", "a", 78.1, 0.0278, 0.0039, 19.27, 0.5203, 0.3623),
    PublishedRow(1, "DeiT-S", "a", 79.8, 0.0350, 0.0057, 18.94, 0.5182, 0.3767),
    PublishedRow(1, "DeiT-S (w/o PEs)", "a", 77.5, 0.0379, 0.0082, 20.22, 0.5912, 0.2692),
    PublishedRow(1, "DeiT-S+MJP", "a", 80.5, 0.1055, 0.0166, 11.52, 0.4053, 0.6545),
    PublishedRow(2, "ViT-S", "b", 18.7, 0.0327, 0.0016, 18.44, 0.6065, 0.2836),
    PublishedRow(2, "DeiT-S", "b", 36.0, 0.0391, 0.0024, 17.60, 0.5991, 0.3355),
    PublishedRow(2, "DeiT-S (w/o PEs)", "b", 77.5, 0.0379, 0.0025, 20.25, 0.6655, 0.2370),
    PublishedRow(2, "DeiT-S+MJP", "b", 62.9, 0.1043, 0.0059, 11.66, 0.4493, 0.6519),
    PublishedRow(
        *(3, "DeiT-S+MJP (w/o)", "a", 40.6, 0.1043, 0.0059, 11.66, 0.4493, 0.6519),
        repeats=True,  # those of (2) DeiT-S+MJP b
    ),
    PublishedRow(4, "DeiT-S+MJP", "c", 62.9, 0.1706, 0.0338, 8.07, 0.0875, 0.8945),
)


def published_row(model: str, setting: str) -> PublishedRow:
    """The printed row of a model in a setting, as in `published_row("DeiT-S", "b")`."""
    by_name = {f"{row.model} {row.setting}": row for row in TABLE5}
    if row := by_name.get(f"{model} {setting}"):
        return row
    raise unknown_name("paper_row of the paper's Table 5", f"{model} {setting}", by_name)


# ours ---------------------------------------------------------------------------------------------


def _leak(client: Client, clients: Sequence[Client]) -> dict[str, Any]:
    """What the best attack gets of one upload, or else of several, under LEAK; of shuffled pictures
    (b) what the same upload gives of the plain ones (c), where that was asked."""
    cell = client.cell
    order = "cb" if cell.setting == "b" else cell.setting
    same = [c for c in clients if same_client(c) == same_client(client) and c.cell.setting in order]
    same.sort(key=lambda o: (order.index(o.cell.setting), o.cell.dtype != cell.dtype))
    for other in same:
        for line in (other.one_upload, other.any_uploads):
            if line is not None:
                # planned rows of an attack on the trained model are not there: more may leak
                missing = any(x.not_run > 0 and x.competes for x in other.attacks)
                of = card_figure(other, line)
                counts = (of.attack, line.uploads, of.exact, of.above_20, of.of)
                target = "plain" if other.cell.setting != cell.setting else ""
                return dict(zip(LEAK, (*counts, of.median, missing, target), strict=True))
    return {}


@dataclass(frozen=True)
class Row:
    """One of our rows, and the paper's that it stands for."""

    group: int  # (1) to (4), as the paper numbers them
    line: Line
    paper: PublishedRow | None
    client: Client
    leak: Mapping[str, Any]
    """Under LEAK; empty where no attack that knows the client was run."""

    @property
    def key(self) -> tuple[object, ...]:
        """What rows of other precisions share."""
        return self.paper, self.line.cell.setting, same_client(self.client)

    @property
    def n(self) -> str:
        """How many pictures its means are of: `200`, or `5 of 6` where others have no score."""
        counts = self.scores["psnr"].counts
        return f"{counts.ok}" if counts.ok == counts.total else f"{counts.ok} of {counts.total}"

    @cached_property
    def scores(self) -> dict[str, Summary]:
        """Accuracy as a share, and the five metrics as the paper's scripts define them."""
        of_metric = {metric: summary(self.line, metric, "paper") for metric in METRICS}
        return {"acc": accuracies(self.line)[0], **of_metric}


def table5_rows(clients: Sequence[Client]) -> list[Row]:
    """The rows in the paper's order; those that stand for none of its rows only where none does."""
    attacked = attacked_ones(clients)
    rows = []
    for client in attacked:
        for line in client.attacks:
            if line.cell.known_as == PUBLISHED:
                named = line.cell.paper_row  # that the config says this line stands for
                paper = None if named is None else published_row(named["model"], named["setting"])
                group = paper.group if paper else GROUP_OF_SETTING[line.cell.setting]
                if line.cell.checkpoint == "random":  # beside which the paper's say nothing
                    paper = None
                leak = _leak(client, attacked)
                rows.append(Row(group, line, paper, client, leak))
    if not any(row.scores["psnr"].n for row in rows):
        return []
    rows = [row for row in rows if row.line.cell.paper_row] or rows
    single = {row.key for row in rows if row.line.cell.dtype == "float32"}
    kept = [row for row in rows if row.line.cell.dtype == "float32" or row.key not in single]
    places = {row: at for at, row in enumerate(TABLE5)}
    return sorted(kept, key=lambda r: (r.group, places.get(r.paper, 0) if r.paper else 0))


# as text ------------------------------------------------------------------------------------------


def _leak_text(row: Row) -> str:
    """`20 of 20 exactly: patch_gradient`, or how many are at 20 dB where none is exact."""
    if not row.leak:
        adaptive = any(line.cell.known_as != PUBLISHED for line in row.client.attacks)
        why = card_row(row.client).absent["one_upload"] if adaptive else ABSENT["ok"]
        return NOT_RUN if why == ABSENT["ok"] else why
    attack, uploads, exact, at_20, of, median, missing, target = row.leak.values()
    text = f"{exact} of {of} exactly"
    text += "" if exact else f", {at_20 or 'none'} at 20 dB or more, median {capped(median, 1)} dB"
    text += f" from {uploads} uploads" if uploads > 1 else ""
    text += " of the plain picture" if target else ""
    return f"{text}: {attack}{'; rows are missing' if missing else ''}"


def table5(rows: Sequence[Row]) -> TextTable | None:
    """The table as the paper prints it, with its own rows in grey; None without rows."""
    if not rows:
        return None
    header = ["", "Model", "Set.", "γ", *(f"{TITLES[n]} {ARROWS[n]}" for n in ("acc", *METRICS))]
    body: list[tuple[str, ...]] = []
    muted: set[int] = set()
    shown_group = 0
    alike = Counter((x.line.cell.model, x.line.cell.setting, x.line.cell.gamma) for x in rows)
    for at, row in enumerate(rows):
        cell = row.line.cell
        number = "" if row.group == shown_group else f"({row.group})"
        shown_group = row.group
        ratio = short_gamma(cell.gamma) if cell.gamma else DASH
        accuracy, *others = row.scores.values()
        scores = [percent(SCALE["acc"] * accuracy.mean, accuracy.n)]
        scores += [digits(n, s.mean) for n, s in zip(METRICS, others, strict=True)]
        same = alike[cell.model, cell.setting, cell.gamma]
        name = cell.model if same == 1 else row.client.title  # which says what else differs
        body.append((number, name, cell.setting, ratio, *scores, row.n, _leak_text(row)))
        if row.paper and (at + 1 == len(rows) or rows[at + 1].paper != row.paper):
            printed = [digits(name, getattr(row.paper, name)) for name in ("acc", *METRICS)]
            star = " †" if row.paper.repeats else ""
            muted.add(len(body))
            name = f"the paper's {row.paper.model}{star}"
            body.append(("", name, row.paper.setting, DASH, *printed, "", ""))
    align = "lllr" + "r" * (2 + len(METRICS)) + "l"
    header += ["n", "what really leaks"]
    caption = differences(rows)
    return TextTable(TITLE, caption, tuple(header), tuple(body), align, frozenset(muted))


def digits(name: str, value: float) -> str:
    """A figure with the paper's digits: .0278, 19.27, 78.1."""
    if math.isnan(value):
        return DASH
    text = f"{value:.{DECIMALS[name]}f}"
    return text.removeprefix("0") if name in ("mse", "fft2d", "ssim", "lpips") else text


def differences(rows: Sequence[Row]) -> str:
    """One line under the table: what differs from the paper's, and what was not run."""
    cells = [row.line.cell for row in rows]
    said = []
    if any(row.paper for row in rows):
        papers = all(cell.data_is_papers for cell in cells)
        others = "of" if papers else "that are not"
        said.append(f"Ours: pictures {others} the paper's 1,000 of ImageNet")
        if not all(is_papers_model(c.architecture, c.pixels) for c in cells):
            sizes = sorted({c.pixels or 0 for c in cells}, key=height_width)
            pixels = " and ".join(map(size_text, sizes))
            said.append(f"models that are not the paper's, at {pixels} px (paper: {PAPERS_SIZE})")
        said.append(f"{', '.join(sorted({cell.dtype for cell in cells}))} (paper: not said)")
        gammas = ", ".join(sorted({short_gamma(c.gamma) for c in cells if c.gamma}))
        if gammas:
            said.append(f"γ {gammas} (paper: .27 by its poster, .9 by its code)")
    else:
        said.append("Metrics as the paper defines them")
    line = "; ".join(said) + "."
    if untrained := sorted({row.line.cell.model for row in rows if row.client.untrained}):
        line += f" Not trained with MJP, E_unk set: {', '.join(untrained)}."
    if drawn := sorted({cell.model for cell in cells if cell.checkpoint == "random"}):
        line += f" Random weights, never trained, so without the paper's row: {', '.join(drawn)}."
    if any(row.paper and row.paper.repeats for row in rows):
        line += " † The paper prints the five scores of another row here."
    line += (
        " Scores are the paper's scripts', of pictures rounded to 8 bits; PSNR is capped at 100 "
        "a picture; n: pictures in the means. What really leaks: the best attack of this run on "
        "the same upload, per picture; exact is equal in every 8-bit value."
    )
    if any(row.leak.get("leak_target") for row in rows):
        line += " Of the plain picture: what leaks of (b) is compared with it, as in (c)."
    if any(_leak_text(row) == NOT_RUN for row in rows):
        line += (
            f" {NOT_RUN}: no attack that knows this client stands in this run; "
            f"mjp attack {LADDER} --weights FILE runs them."
        )
    return line


def table5_csv(rows: Sequence[Row]) -> str:
    """The table at full precision: ours with 95 % intervals and n, the paper's beside it."""
    records = []
    for row in rows:
        cell = row.line.cell
        record: dict[str, object] = {"group": row.group, "line": row.line.number}
        record |= {"model": cell.model, "setting": cell.setting, "gamma": cell.gamma}
        record |= {"dtype": cell.dtype, "size": cell.size, "client": row.client.title}
        for name, score in row.scores.items():
            scale = SCALE.get(name, 1)
            record |= {f"{name}_mean": scale * score.mean, f"{name}_low": scale * score.low}
            record |= {f"{name}_high": scale * score.high, f"{name}_n": score.n}
        record |= dict.fromkeys(LEAK) | dict(row.leak)
        record["paper_model"] = row.paper.model if row.paper else None
        record["paper_setting"] = row.paper.setting if row.paper else None
        for name in ("acc", *METRICS):
            record[f"paper_{name}"] = getattr(row.paper, name) if row.paper else math.nan
        records.append(record)
    return csv_text(pd.DataFrame(records, dtype=object))
