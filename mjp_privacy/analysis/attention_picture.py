"""Photographs beside where the heads of the last block look (Fig. 8)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mjp_privacy.analysis.analysed import Analysed
from mjp_privacy.core.files import write_atomically
from mjp_privacy.training.drawing import drawn, plain_texts

MOST_HEADS = 8
"""Heads drawn; all enter the figures."""


@plain_texts()
def draw_attention(result: Analysed, pixels: Tensor, path: Path) -> None:
    """A row for each image (B, 3, S, S): the image, then the map of every head, each to its own
    largest value."""
    from matplotlib.figure import Figure

    maps = result.attention.maps[: len(pixels), :MOST_HEADS]
    rows, heads = maps.shape[:2]
    figure = Figure(figsize=(1.5 * (heads + 1), 1.5 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, heads + 1, squeeze=False)
    for row in range(rows):
        panels[row, 0].imshow(pixels[row].permute(1, 2, 0).numpy(), interpolation="nearest")
        for head in range(heads):
            panels[row, head + 1].imshow(maps[row, head], cmap="viridis", interpolation="nearest")
            if row == 0:
                panels[row, head + 1].set_title(f"head {head + 1}", fontsize=7)
        for panel in panels[row]:
            panel.set_axis_off()
    figure.suptitle(f"{drawn(result.label)}: [CLS] of the last block", fontsize=9)
    write_atomically(path, lambda place: figure.savefig(place, dpi=100, format="png"))
