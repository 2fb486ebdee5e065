"""Pictures of shapes with label maps, drawn by code in ADE20K's layout: a set to try segmentation.

OUT/images/{training,validation}/NAME.jpg         photographs' format, their sizes differ
OUT/annotations/{training,validation}/NAME.png    0: no label (outlines), 1 to 6: the CLASSES
OUT/shapes.json                                   seed and number

A class shows in texture (a checked square, a striped triangle) or in where something is: the same
disc is another class above the horizon than below it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, write_atomically
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.core.text import shown

CLASSES = ("sky", "ground", "disc in the sky", "disc on the ground", "square", "triangle")
SKY, GROUND, HIGH_DISC, LOW_DISC, SQUARE, TRIANGLE = range(1, 7)
MOST = 100_000
WIDTHS, HEIGHTS = (72, 104), (64, 96)
SHAPES_IN_A_PICTURE = (3, 6)
MARKER = "shapes.json"
DESCRIPTION = FileKind("what `mjp sample --shapes` wrote", "Give another --out.", 1 << 20)

Pixels = NDArray[np.float64]
Labels = NDArray[np.uint8]


def make_shapes(out: Path, number: int, seed: int = 0) -> str:
    """Draw `number` training pictures and a quarter as many for validation; says what was done.

    A command that was stopped goes on: files that are there are drawn again, the same.
    """
    if not 1 <= number <= MOST:
        raise UserError(f"--shapes is a number of pictures: expected 1 to {MOST}, got {number}.")
    about = json.dumps({"seed": seed, "training": number, "classes": CLASSES}, indent=2) + "\n"
    _check_out(out, about)
    output_folder(out)
    write_atomically(out / MARKER, lambda path: path.write_text(about, encoding="utf-8"))
    numbers = {"training": number, "validation": max(number // 4, 1)}
    for split, many in numbers.items():
        for place in range(many):
            pixels, labels = drawn(derive_seed("shapes", seed, split, place))
            name = f"{split}/{place:06d}"
            for file, array, how in (
                (f"images/{name}.jpg", pixels, {"format": "JPEG", "quality": 95}),
                (f"annotations/{name}.png", labels, {"format": "PNG"}),
            ):
                write_atomically(out / file, partial(Image.fromarray(array).save, **how))
    return (
        f"Drew {number} training and {numbers['validation']} validation pictures with label maps "
        f"into {shown(out)}: synthetic shapes in ADE20K's layout, {len(CLASSES)} classes."
    )


def drawn(seed: int) -> tuple[NDArray[np.uint8], Labels]:
    """A picture (H, W, 3) and its label map (H, W)."""
    chance = np.random.default_rng(seed)
    width, height = chance.integers(*WIDTHS), chance.integers(*HEIGHTS)
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    horizon = height * chance.uniform(0.4, 0.6)
    above = rows < horizon
    labels: Labels = np.where(above, SKY, GROUND).astype(np.uint8)
    sky = _colour(chance) * (0.7 + 0.3 * rows / height)[..., None]
    ground = _striped(_colour(chance), _colour(chance), rows)
    pixels: Pixels = np.where(above[..., None], sky, ground)
    for _ in range(chance.integers(*SHAPES_IN_A_PICTURE)):
        _add_shape(pixels, labels, rows, columns, horizon, chance)
    pixels += chance.normal(0, 8, pixels.shape)
    return pixels.clip(0, 255).astype(np.uint8), labels


def _add_shape(
    pixels: Pixels,
    labels: Labels,
    rows: Pixels,
    columns: Pixels,
    horizon: float,
    chance: np.random.Generator,
) -> None:
    """Draw a shape over the picture; its outline has no label."""
    height, width = labels.shape
    radius = chance.uniform(7, 14)
    x, y = chance.uniform(radius, width - radius), chance.uniform(radius, height - radius)
    across, down = columns - x, rows - y
    one, other = _colour(chance), _colour(chance)
    kind = chance.integers(3)
    if kind == 0:  # how far outside the shape a pixel is, in pixels: below 0 inside
        outside = np.hypot(across, down) - radius
        label, texture = (
            (HIGH_DISC if y < horizon else LOW_DISC),
            np.broadcast_to(one, pixels.shape),
        )
    elif kind == 1:
        outside = np.maximum(abs(across), abs(down)) - radius
        label, texture = SQUARE, _striped(one, other, rows + 3 * (columns // 3 % 2))
    else:
        outside = np.maximum(down - radius, abs(across) * 0.9 - (down + radius) / 2)
        label, texture = TRIANGLE, _striped(one, other, columns)
    inside, outline = outside < -1, abs(outside) <= 1
    pixels[inside], pixels[outline] = texture[inside], 0
    labels[inside], labels[outline] = label, 0


def _colour(chance: np.random.Generator) -> Pixels:
    return chance.uniform(60, 230, 3)


def _striped(one: Pixels, other: Pixels, along: Pixels) -> Pixels:
    """Stripes of two colours, each three pixels wide."""
    return np.where((along // 3 % 2 == 0)[..., None], one, other)


def _check_out(out: Path, about: str) -> None:
    """Raise unless `out` is new, empty or holds the same set."""
    marker = out / MARKER
    same = is_there(marker) and DESCRIPTION.text(marker) == about
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not same):
        raise UserError(
            f"--out {shown(out)} is a file, or holds something other than these shapes. Expected a "
            "new or empty folder: give another name."
        )
