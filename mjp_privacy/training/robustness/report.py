"""The tables of `mjp evaluate --imagenet-c | -a | -o`: a sentence, then the figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mjp_privacy.data.corruptions.names import CORRUPTIONS, SEVERITIES
from mjp_privacy.training.robustness.corruption_errors import (
    AGAINST_ALEXNET,
    NORMALISED,
    UNNORMALISED,
)
from mjp_privacy.training.robustness.line import Line
from mjp_privacy.training.robustness.published import CAVEATS

OWN = (
    "These images were made by `mjp sample --corrupt`: our own code, not the official files; "
    "corrupted.json beside them says what differs. Compare models with each other, not with "
    "figures of ImageNet-C."
)
HEADS = ("corruption", *(str(severity) for severity in SEVERITIES), "mean")


def markdown(lines: Sequence[Line]) -> str:
    """All lines, model by model and set by set, with notes below."""
    parts = []
    for key in dict.fromkeys((line.images, line.model) for line in lines):
        group = [line for line in lines if (line.images, line.model) == key]
        corrupted = any(line.corruption for line in group)
        parts += _corruption_table(group) if corrupted else _plain_table(group)
        parts.append("")
    return "\n".join([*parts, *(f"- {note}" for note in _notes(lines)), ""])


def _corruption_table(lines: Sequence[Line]) -> list[str]:
    model, images = lines[0].model, lines[0].images
    by_place = {(line.corruption, line.severity, line.measure): line for line in lines}
    counts = sorted({line.figure.n for line in lines if line.measure == "error"})
    numbers = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    present = [name for name in CORRUPTIONS if (name, None, "mean error") in by_place]
    printed = any(line.paper is not None for line in lines)
    against = [AGAINST_ALEXNET] if any(line.measure == AGAINST_ALEXNET for line in lines) else []
    text = [
        f"**{model}** on {images}: {_summary(lines, present)} "
        f"{numbers} images in each of {len(present) * len(SEVERITIES)} cells.",
        "",
        *_head([*HEADS, *against, *(["paper's mean"] if printed else [])]),
    ]
    for name in present:
        cells = [name]
        cells += [_with_interval(by_place[name, severity, "error"]) for severity in SEVERITIES]
        total = by_place[name, None, "mean error"]
        cells += [_with_interval(total)]
        cells += [_with_interval(by_place[name, None, measure]) for measure in against]
        cells += [_beside(total)] if printed else []
        text.append(_row(cells))
    rest = [line for line in lines if not line.corruption]
    return [*text, "", *_plain_rows(rest)] if rest else text


def _summary(lines: Sequence[Line], present: Sequence[str]) -> str:
    """The sentence on mCE, or why there is none."""
    means = {line.measure: line for line in lines}
    if UNNORMALISED not in means:
        missing = [name for name in CORRUPTIONS if name not in present]
        return f"no mCE, which is a mean over all 15 corruptions; missing: {', '.join(missing)}."
    plain = f"{means[UNNORMALISED].figure.percent:.1f} unnormalised"
    if NORMALISED not in means:
        other = "and none against AlexNet, whose errors are among ImageNet's 1000 classes"
        return f"mCE {plain}, {other};"
    return f"mCE {means[NORMALISED].figure.percent:.1f} against AlexNet, {plain};"


def _plain_table(lines: Sequence[Line]) -> list[str]:
    first = lines[0]
    figure = f"{first.measure} {first.figure.percent:.1f} % of {first.figure.n} images"
    return [f"**{first.model}** on {first.images}: {figure}.", "", *_plain_rows(lines)]


def _plain_rows(lines: Sequence[Line]) -> list[str]:
    printed = any(line.paper is not None for line in lines)
    rows = _head(["measure", "%", "interval", "n", *(["paper's"] if printed else [])])
    for line in lines:
        figure = line.figure
        n = f"{figure.n}" + (f" ({figure.failed} unreadable)" if figure.failed else "")
        cells = [line.measure, _with_interval(line), figure.interval, n]
        rows.append(_row([*cells, *([_beside(line)] if printed else [])]))
    return rows


def _notes(lines: Sequence[Line]) -> Iterable[str]:
    if any(line.images == "our own corruptions" for line in lines):
        yield OWN
    if any(line.corruption for line in lines):
        yield (
            "Errors in %, with Wilson's 95 % interval; means over severities with a bootstrap over "
            "images. mCE is the mean of the 15 means: unnormalised as they are, or each divided by "
            "AlexNet's published error on the official files."
        )
    yield (
        "Photographs are cut out as the sets' official scripts do it: short side 256 for a side of "
        "224, bilinear; pictures of ImageNet-C are cut out already."
    )
    if any("difference to" in line.measure for line in lines):
        yield "Differences are paired: each image under one model with itself under the other."
    if any(line.measure == "AUPR" for line in lines):
        yield (
            "AUPR: strange images told from those of --data by the largest softmax share among the "
            "200 classes. It grows with the share of strange images, which chance would reach."
        )
    if any(line.measure == "RMS calibration error" for line in lines):
        yield (
            "RMS calibration error over all bins of 100 images; the official code leaves out the "
            "last bin."
        )
    if any(line.corruption and line.paper is not None for line in lines):
        yield from CAVEATS


def _head(heads: Sequence[str]) -> list[str]:
    return [_row(heads), "|" + "---|" * len(heads)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _with_interval(line: Line) -> str:
    figure = line.figure
    if math.isnan(figure.percent):
        return "–"
    interval = "" if math.isnan(figure.low) else f" [{figure.low:.1f}, {figure.high:.1f}]"
    return f"{figure.percent:.1f}{interval}"


def _beside(line: Line) -> str:
    if line.paper is None:
        return "–"
    return f"{line.paper:g} ({line.figure.percent - line.paper:+.1f})"
