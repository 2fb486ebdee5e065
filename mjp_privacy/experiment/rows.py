"""Makes rows: one for each image, metric and variant. Images that failed get rows too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from torch import Tensor

from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.store import CELL_COLUMNS, ROW_COLUMNS
from mjp_privacy.metrics import METRICS

SCORES = [(METRICS[key].name, METRICS[key].variant) for key in METRICS]
ACCURACY = [("top1", "intact"), ("top1", "altered")]
COLUMNS = [*ROW_COLUMNS, *CELL_COLUMNS, "group"]


def scored_rows(
    facts: CellFacts,
    records: Sequence[ImageRecord],
    scores: Mapping[tuple[str, str], npt.NDArray[np.float64]],
    diagnostics: Mapping[str, Tensor],
    accuracy: Mapping[str, Tensor | None],
) -> pd.DataFrame:
    """Rows of images that have a reconstruction: scores, diagnostics and the model's accuracy.

    scores       {(metric, variant): (m,)}
    diagnostics  {name: (m,)}; a NaN gets no row
    accuracy     {"intact" or "altered": (m,) whether the model was right, None without labels}
    """
    rows: list[dict[str, Any]] = []
    for index, record in enumerate(records):
        shared = _shared(facts, record)
        for (metric, variant), values in scores.items():
            rows.append(_row(shared, metric, variant, float(values[index])))
        for name, measured in diagnostics.items():
            value = float(measured[index])
            if not math.isnan(value):  # NaN: it does not apply to this image
                rows.append(_row(shared, name, "diagnostic", value))
        for variant, correct in accuracy.items():
            if correct is None:
                reason = "the images carry no true labels"
                rows.append(_row(shared, "top1", variant, np.nan, "unscored", reason))
            else:
                rows.append(_row(shared, "top1", variant, float(correct[index])))
    return pd.DataFrame(rows, columns=COLUMNS)


def reasoned_rows(
    facts: CellFacts, reasons: Mapping[ImageRecord, str], status: str
) -> pd.DataFrame:
    """Rows of images without scores: a row for every score, with this status and the reason."""
    rows = [
        _row(_shared(facts, record), metric, variant, np.nan, status, reason)
        for record, reason in reasons.items()
        for metric, variant in (*SCORES, *ACCURACY)
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def _shared(facts: CellFacts, record: ImageRecord) -> dict[str, Any]:
    """The columns that all rows of one image in one cell have in common."""
    all_columns = facts.columns
    names = [name for name in (*ROW_COLUMNS, *CELL_COLUMNS) if name in all_columns]
    columns = {name: all_columns[name] for name in names}
    for name in ("trained_gamma", "dal_lambda"):
        columns[name] = np.nan if columns[name] is None else float(columns[name])
    source = "prediction" if record.label is None else record.label_source
    return columns | {
        "image_id": record.image_id,
        "label_source": source,
        "group": record.group,
    }


def _row(
    shared: Mapping[str, Any],
    metric: str,
    variant: str,
    value: float,
    status: str = "ok",
    reason: str = "",
) -> dict[str, Any]:
    return {
        **shared,
        "metric": metric,
        "variant": variant,
        "value": value,
        "status": status,
        "reason": reason,
    }
