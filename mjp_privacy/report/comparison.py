"""One picture of the same images in every line: original, client's input, reconstructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mjp_privacy.report.figures import DPI, INK, SIDE, save, show
from mjp_privacy.report.loading import Line
from mjp_privacy.report.pictures import (
    Picture,
    attack_text,
    choose,
    picture,
    psnr_text,
    shorten,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTILES = (0.25, 0.75)
PER_ROW = 8
HEAD = 0.62  # inches for a title of three short lines


@dataclass(frozen=True)
class Tile:
    """One picture (H, W, 3) and the title above it."""

    title: str
    image: Picture


def write_comparison(lines: Sequence[Line], path: Path) -> tuple[str, ...]:
    """Draw the picture; returns the image ids shown, none if no reconstructions are stored."""
    scored = [line for line in lines if len(line.scored("psnr", "standard"))]
    # an attack before any control; among equals min() takes the first
    first = min(scored, key=lambda line: line.role != "attack", default=None)
    chosen = choose(first, QUANTILES) if first else []
    rows = [(image_id, tiles_of(lines, image_id)) for image_id, _ in chosen]
    rows = [(image_id, tiles) for image_id, tiles in rows if tiles]
    if rows:
        save(_figure([tiles for _, tiles in rows]), path)
    return tuple(image_id for image_id, _ in rows)


def tiles_of(lines: Sequence[Line], image_id: str) -> list[Tile]:
    """The original and every line's reconstruction; an input stands before its first line."""
    tiles: list[Tile] = []
    fed: list[Picture] = []
    for line in lines:
        scores = line.scored("psnr", "standard")
        tensors = line.reconstruction(image_id)
        if tensors is None or image_id not in scores.index or "images" not in tensors:
            continue
        for kind, name in (("plain", "original"), ("input", "the client's input")):
            if kind not in tensors:
                continue
            image = picture(tensors[kind])
            if not any(image.shape == past.shape and (image == past).all() for past in fed):
                fed.append(image)
                ratio = f"\nγ = {line.cell.gamma:g}" if kind == "input" else ""
                tiles.append(Tile(name + ratio, image))
        tiles.append(Tile(_title(line, float(scores[image_id])), picture(tensors["images"])))
    return tiles


def _title(line: Line, psnr: float) -> str:
    cell = line.cell
    return (
        f"{shorten(cell.model.label, 20)} ({cell.setting})\n"
        f"{attack_text(line, 16)}, {cell.dtype.replace('float', 'f')}\n{psnr_text(psnr)}"
    )


def _figure(rows: Sequence[Sequence[Tile]]) -> Figure:
    from matplotlib.figure import Figure

    bands = [row[at : at + PER_ROW] for row in rows for at in range(0, len(row), PER_ROW)]
    columns = max(map(len, bands))
    width, height = SIDE * columns, (SIDE + HEAD) * len(bands)
    figure = Figure(figsize=(width, height), dpi=DPI)
    for number, band in enumerate(bands):
        bottom = height - (SIDE + HEAD) * (number + 1)
        for column, tile in enumerate(band):
            side = 0.97 * SIDE
            place = (column * SIDE / width, bottom / height, side / width, side / height)
            axes = figure.add_axes(place)
            show(axes, tile.image)
            axes.set_title(tile.title, fontsize=7, color=INK, parse_math=False)
    return figure
