"""What the page's scripts read: lines, scores and pictures as JSON that no name breaks out of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Set
from typing import Any

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.page.content import PageContent, PageLine, PagePicture
from mjp_privacy.report.published import TITLES
from mjp_privacy.report.tables.text import DECIMALS

METRICS = ("psnr", "ssim", "lpips", "mse", "fft2d", "gradient_residual")
"""Scores in the page's order of columns; a page has those that one of its lines has."""

BETTER_FOR_ATTACKER = {"psnr": "more", "ssim": "more"}  # of the others, less
DIGITS = 6  # significant ones of a per-image score


def metric_title(metric: str) -> str:
    """What a column is called: `PSNR`, `gradient residual`."""
    return TITLES.get(metric, metric.replace("_", " "))


def metric_decimals(metric: str) -> int:
    """How many decimals a score is shown with."""
    return DECIMALS.get(metric, 4)


def capped_median(line: PageLine) -> float:
    """The median PSNR of a line as its mean is taken: no picture counts as more than the cap."""
    return line.median_psnr if math.isnan(line.median_psnr) else min(line.median_psnr, PSNR_CAP)


def metrics_of(content: PageContent) -> tuple[str, ...]:
    """The scores that at least one line or image has."""
    found: set[str] = set()
    for line in content.lines:
        found |= {name for name, (mean, _, _) in line.scores.items() if not math.isnan(mean)}
    for by_metric in content.scores.values():
        found |= set(by_metric)
    return tuple(metric for metric in METRICS if metric in found)


def page_data(content: PageContent, embedded: Set[str] = frozenset()) -> str:
    """The text of `<script type="application/json">`.

    `embedded` holds keys of pictures that the page shows anyway: the scripts take them from there.
    """
    data = {
        "cap": PSNR_CAP,
        "metrics": [_metric(name) for name in metrics_of(content)],
        "lines": [_line(line) for line in content.lines],
        "image_ids": content.image_ids,
        "scores": [
            [line, {name: [_plain(v) for v in values] for name, values in by_metric.items()}]
            for line, by_metric in content.scores.items()
        ],
        "exact": [[line, values] for line, values in content.exact.items()],
        "shown": [_picture(picture) for picture in content.shown],
        "pictures": [[k, uri] for k, uri in content.pictures.items() if k not in embedded],
    }
    return script_json(data)


def script_json(data: Any) -> str:
    """JSON that may stand inside a script element: it holds no `<`, `>`, `&` and only ASCII."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _metric(name: str) -> dict[str, Any]:
    return {
        **{"name": name, "title": metric_title(name), "decimals": metric_decimals(name)},
        "better": BETTER_FOR_ATTACKER.get(name, "less"),
    }


def _line(line: PageLine) -> dict[str, Any]:
    names = ("number", "run", "model", "client", "setting", "dtype", "attack", "role", "uploads")
    counts = ("n", "not_scored", "exact", "above_20", "of", "folded", "remark")
    return {
        **{name: getattr(line, name) for name in (*names, *counts)},
        **{"gamma": _missing(line.gamma), "median_psnr": _missing(capped_median(line))},
        "marks": line.marks,
        "scores": {name: _each(values, _missing) for name, values in line.scores.items()},
    }


def _picture(picture: PagePicture) -> dict[str, Any]:
    return {
        **{"image_id": picture.image_id, "original": picture.original, "fed": picture.fed},
        **{"masks": list(picture.masks.items()), "lines": list(picture.lines.items())},
        "inputs": list(picture.inputs.items()),
    }


def _each(values: Iterable[float], change: Any) -> list[Any]:
    return [change(value) for value in values]


def _missing(value: float | None) -> float | str | None:
    """JSON knows neither NaN nor infinity: null and "inf" stand for them."""
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def _plain(value: float | None) -> float | str | None:
    if value is None or not math.isfinite(value):
        return _missing(value)
    return float(f"{value:.{DIGITS}g}")
