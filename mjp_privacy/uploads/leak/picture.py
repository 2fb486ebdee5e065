"""A picture of what the attacks made, the best first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from torch import Tensor

from mjp_privacy.core.drawing import house_style
from mjp_privacy.uploads.leak.reconstructed import Reconstructed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS, COLUMNS = 4, 7  # images and attacks that are shown
SIDE = 2.1  # inches


@house_style()
def leak_figure(
    ranked: Sequence[Reconstructed], private: Tensor | None, title: str, batch: int = 1
) -> Figure:
    """A row for each image of the step: the original where it was given, then every attack.

    Attacks may return different numbers of pictures: a place that one does not have stays empty.
    Of batches without originals, whose order means nothing, pictures that are certain come first.
    """
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """One that a notebook shows, also where nothing imported pyplot."""

        def _repr_png_(self) -> bytes:
            image = BytesIO()
            self.savefig(image, format="png")
            return image.getvalue()

    shown = ranked[:COLUMNS]
    orders = [_order(result, private is not None, batch) for result in shown]
    rows = max(map(len, orders)) if private is None else len(private)
    count = min(rows, ROWS)
    columns = len(shown) + (private is not None)
    figure = NotebookFigure(figsize=(SIDE * columns, (SIDE + 0.5) * count + 0.4), dpi=150)
    grid = figure.subplots(count, columns, squeeze=False)
    for row in range(count):
        axes = list(grid[row])
        if private is not None:
            _panel(axes.pop(0), private[row], "original")
        for place, result, order in zip(axes, shown, orders, strict=True):
            if row < len(order):
                assert result.images is not None
                _panel(place, result.images[order[row]], _title(result, row, order[row]))
            else:
                place.set_axis_off()
    title = "\n".join([title, *_left_out(ranked, orders, count)])
    figure.suptitle(title, fontsize=8, wrap=True)
    figure.tight_layout()
    return figure


def _order(result: Reconstructed, originals: bool, batch: int) -> Sequence[int]:
    """Which of an attack's pictures stands in each row."""
    assert result.images is not None
    if originals and result.places:
        return result.places
    places = range(len(result.images))
    if batch == 1 or result.certain is None:
        return places
    certain = result.certain.tolist()
    return sorted(places, key=lambda place: not certain[place])


def _left_out(
    ranked: Sequence[Reconstructed], orders: Sequence[Sequence[int]], rows: int
) -> list[str]:
    """How much of what there is was drawn, where that is not all."""
    numbers = [
        (min(len(order), rows), 0 if result.images is None else len(result.images), result.attack)
        for result, order in zip(ranked, orders, strict=False)
    ]
    parts = [f"{drawn} of {there} pictures of {name}" for drawn, there, name in numbers]
    said = [part for part, (drawn, there, _) in zip(parts, numbers, strict=True) if drawn < there]
    if len(orders) < len(ranked):
        said.append(f"{len(orders)} of {len(ranked)} attacks")
    return [f"Drawn: {', '.join(said)}."] if said else []


def _panel(place: Axes, image: Tensor, title: str) -> None:
    place.imshow(
        image.nan_to_num(0.5).permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest"
    )
    place.set_title(title, fontsize=7)
    place.set_axis_off()


def _title(result: Reconstructed, row: int, place: int) -> str:
    """The attack, its residual or misfit, whether the picture at this place is certain and, where
    known, its score for the image of a row."""
    if place in result.reasons:
        return f"{result.attack}\n{result.reasons[place][:40]}"
    parts: list[str] = []
    for name, checks in (("residual", result.residuals), ("misfit", result.misfits)):
        if checks is not None and not parts and not math.isnan(float(checks[place])):
            parts.append(f"{name} {float(checks[place]):.0e}")
    if result.certain is not None and bool(result.certain[place]):
        parts.append("certain")
    if result.scores is not None:
        of_image = result.scores.loc[result.scores["image"] == row].iloc[0]
        parts.append("exact" if of_image["exact"] else f"{of_image['psnr']:.1f} dB")
    return "\n".join([result.attack, ", ".join(parts)])
