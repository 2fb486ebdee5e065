"""A picture of what the attacks made, the best first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mjp_privacy.core.drawing import plain_texts
from mjp_privacy.own.reconstructed import Reconstructed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS, COLUMNS = 4, 7  # images and attacks that are shown
SIDE = 2.1  # inches


@plain_texts()
def leak_figure(ranked: Sequence[Reconstructed], private: Tensor | None, title: str) -> Figure:
    """A row for each image of the step: the original where it was given, then every attack."""
    from matplotlib.figure import Figure

    shown = ranked[:COLUMNS]
    assert shown[0].images is not None
    count = min(len(shown[0].images), ROWS)
    columns = len(shown) + (private is not None)
    figure = Figure(figsize=(SIDE * columns, (SIDE + 0.5) * count + 0.4), dpi=150)
    grid = figure.subplots(count, columns, squeeze=False)
    for row in range(count):
        axes = list(grid[row])
        if private is not None:
            _panel(axes.pop(0), private[row], "original")
        for place, result in zip(axes, shown, strict=True):
            assert result.images is not None
            _panel(place, result.images[row], _title(result, row))
    figure.suptitle(title, fontsize=8, wrap=True)
    figure.tight_layout()
    return figure


def _panel(place: Axes, image: Tensor, title: str) -> None:
    place.imshow(
        image.nan_to_num(0.5).permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest"
    )
    place.set_title(title, fontsize=7)
    place.set_axis_off()


def _title(result: Reconstructed, row: int) -> str:
    """The attack, its residual or misfit and, where known, its score for one image."""
    if row in result.reasons:
        return f"{result.attack}\n{result.reasons[row][:40]}"
    parts: list[str] = []
    for name, checks in (("residual", result.residuals), ("misfit", result.misfits)):
        if checks is not None and not parts and not math.isnan(float(checks[row])):
            parts.append(f"{name} {float(checks[row]):.0e}")
    if result.scores is not None:
        of_image = result.scores.loc[result.scores["image"] == row].iloc[0]
        parts.append("exact" if of_image["exact"] else f"{of_image['psnr']:.1f} dB")
    return "\n".join([result.attack, ", ".join(parts)])
