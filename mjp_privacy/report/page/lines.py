"""The lines of the tables with their per-image scores, as the page sorts and compares them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.card import PLAIN_TO_SEE, exact_pictures, floor_values
from mjp_privacy.report.clients import Client
from mjp_privacy.report.lines import Line, image_counts, not_run, summary
from mjp_privacy.report.notes import Flag, figure_flags
from mjp_privacy.report.page.content import PageLine
from mjp_privacy.report.published import METRICS

PER_IMAGE = (*METRICS, "gradient_residual")


def page_line(line: Line, client: Client, title: str, flags: Sequence[Flag]) -> PageLine:
    """One line; `title` is what the report calls its client."""
    counts = image_counts(line, "standard")
    scores = {}
    for metric in PER_IMAGE:
        cap = PSNR_CAP if metric == "psnr" else float("inf")
        score = summary(line, metric, _variant(metric), cap=cap)
        if score.n:
            scores[metric] = (score.mean, score.low, score.high)
    return PageLine(
        number=line.number,
        run=line.run,
        model=line.cell.model.label,
        client=title,
        setting=line.cell.setting,
        gamma=line.cell.gamma,
        dtype=line.cell.dtype,
        attack=line.attack,
        role=line.role,
        uploads=line.uploads,
        n=counts.ok,
        not_scored=counts.total - counts.ok + not_run(line),
        exact=exact_pictures(line),
        above_20=int((line.scored("psnr", "standard") >= PLAIN_TO_SEE).sum()),
        of=counts.ok + counts.failed + counts.unsupported,
        scores=scores,
        median_psnr=summary(line, "psnr", "standard", interval=False).median,
        marks=tuple(flag.key for flag in flags),
        folded=_folded(line, client),
        remark="" if counts.ok else line.reason,
    )


def _variant(metric: str) -> str:
    return "standard" if metric in METRICS else "diagnostic"


def line_flags(line: Line, client: Client) -> tuple[Flag, ...]:
    """The flags of an attack's line or a worst case; controls have none."""
    if line.role in ("floor", "ceiling"):
        return ()
    return figure_flags(client, line, floor_values(client))


def _folded(line: Line, client: Client) -> bool:
    return line.role in ("floor", "ceiling") or line.cell.dtype == "float64"


def scores_by_line(
    lines: Sequence[Line], image_ids: Sequence[str]
) -> dict[int, dict[str, tuple[float | None, ...]]]:
    """Every line's scores by metric, in the order of `image_ids`; None where there is none."""
    scores: dict[int, dict[str, tuple[float | None, ...]]] = {}
    for line in lines:
        places = line.images.places(image_ids)
        of_line = {}
        for metric in PER_IMAGE:
            if line.count(metric, _variant(metric)):
                of_line[metric] = tuple(_values_at(line, metric, _variant(metric), places))
        scores[line.number] = of_line
    return scores


def exact_by_line(
    lines: Sequence[Line], image_ids: Sequence[str]
) -> dict[int, tuple[bool | None, ...]]:
    """By line and image: whether the picture equals the original in every 8-bit value."""
    exact = {}
    for line in lines:
        values = _values_at(line, "psnr", "paper", line.images.places(image_ids))
        exact[line.number] = tuple(
            None if value is None else value == float("inf") for value in values
        )
    return exact


def _values_at(
    line: Line, metric: str, variant: str, places: NDArray[np.integer]
) -> list[float | None]:
    """The scores at these places among the line's images; None where there is none, and for -1."""
    column = line.column(metric, variant)
    values = np.full(len(line.images) + 1, np.nan)  # the last one for -1
    scored = column.scored
    values[column.at[scored]] = column.values[scored]
    return [None if value != value else value for value in values[places].tolist()]
