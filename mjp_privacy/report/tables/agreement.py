"""Do the metrics order the images of a line alike? Rank correlations as a table."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from mjp_privacy.metrics.rank_agreement import CLOSER, RankAgreement, rank_agreement
from mjp_privacy.report.loading import Line
from mjp_privacy.report.published import TITLES
from mjp_privacy.report.tables.text import DASH, TextTable

FEWEST = 3  # images; two are always in perfect order

CAPTION = (
    "Rank correlations between metrics (standard) over {n} images of line {line} that have all of "
    "them: Spearman's ρ above the diagonal, Kendall's τ-b below. Every metric is turned so that "
    "higher is a better reconstruction: 1 means that two metrics order the images alike, −1 in "
    "reverse; MSE and PSNR do so by definition. Images count equally, also where several are crops "
    "of one photograph. A dash: one of the metrics is the same for every image."
)


def agreement_table(line: Line) -> TextTable | None:
    """The table of one line; None with fewer than two metrics or three images."""
    scores = {metric: values for metric in CLOSER if len(values := line.scored(metric, "standard"))}
    if len(scores) < 2:
        return None
    common = pd.concat(scores, axis=1, join="inner")
    if len(common) < FEWEST:
        return None
    agreement = rank_agreement(
        {metric: common[metric].to_numpy(dtype=np.float64) for metric in scores}
    )
    names = [TITLES[metric] for metric in agreement.metrics]
    rows = tuple((name, *_cells(agreement, at)) for at, name in enumerate(names))
    caption = CAPTION.format(n=agreement.n, line=line.number)
    title = f"Do the metrics agree? {line.label}"
    return TextTable(title, caption, ("", *names), rows, "l" + "r" * len(names))


def _cells(agreement: RankAgreement, row: int) -> list[str]:
    def cell(column: int) -> str:
        if column == row:
            return ""
        values = agreement.spearman if column > row else agreement.kendall
        return correlation(float(values[row, column]))

    return [cell(column) for column in range(len(agreement.metrics))]


def correlation(value: float) -> str:
    """A number in [-1, 1] with two decimals, or as many as keep it apart from 1 and -1.

    correlation(0.9996)  # "0.9996"
    """
    if math.isnan(value):
        return DASH
    if abs(value) > 1 - 1e-12:
        return f"{round(value):d}"
    decimals = 2
    while abs(float(f"{value:.{decimals}f}")) == 1:
        decimals += 1
    return f"{value:.{decimals}f}"
