"""Does a reconstruction point to its own image among all of the line's? As a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mjp_privacy.metrics.matching import (
    MOST,
    MOST_MATCHED,
    SIDE,
    Identification,
    Pointing,
    identify,
    matched_distances,
    matched_psnr,
    shrink,
)
from mjp_privacy.metrics.statistics import Floats, independent_trials
from mjp_privacy.report.cell_columns import ATTACK_FACTS, COMMAND_FACTS, MODEL_FACTS, client_text
from mjp_privacy.report.lines import Line
from mjp_privacy.report.tables.figures import varying_columns
from mjp_privacy.report.tables.text import DASH, TextTable, gamma, number
from mjp_privacy.report.worst_case import picture_ids

TITLE = "Does a reconstruction point to its own image?"

CAPTION = (
    "Every reconstruction is compared with the originals of all images of its row, its own among "
    "them. First: the own one is the nearest, as count, share and Wilson 95 % interval; behind it "
    "the mean of 1 / rank. Chance: the same two for an order drawn by lot; it depends on how many "
    "images there are, so rows with other numbers of images do not compare. Where another original "
    "is as near as the own one, the own one ranks behind it; other crops of the same photograph "
    "are others, and each crop counts singly. Original: the plain picture, in (b) too. "
    f"Images: those compared, of all of the line, at most {MOST}, evenly spaced in the order of "
    "their ids; images without a reconstruction are not among them. Pictures are shrunk by area to "
    f"at most {SIDE} pixels a side. Pixels: mean squared error. LPIPS: with AlexNet. Features: "
    "cosine of the last convolutions of AlexNet, trained on ImageNet's labels and not the attacked "
    "network, averaged over space. Patches matched, where the client shuffles: squared error after "
    "the patches of the reconstruction were assigned one to one to those of each original "
    f"(Hungarian method), on at most {MOST_MATCHED} of the images, evenly spaced, each patch "
    "shrunk by itself; so its chance is higher. PSNR matched: the median over these images, at "
    "full size, against the own original; the best order of patches is found with the original at "
    "hand, so it is an upper bound."
)


@dataclass(frozen=True)
class _Read:
    """Reconstructions and originals of one line: all of them small, a few at full size."""

    small: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor] | None  # None: nothing was shuffled
    patch_size: int
    of: int  # images of the line
    trials: tuple[float, float]  # as how many independent images small and full count


def identification_table(lines: Sequence[Line], *, many_runs: bool = False) -> TextTable | None:
    """A row for each line whose reconstructions and originals are stored; None where none is.

    A line needs two such images of equal size.
    """
    facts = [
        key
        for key in varying_columns(lines)
        if key not in ATTACK_FACTS | COMMAND_FACTS | MODEL_FACTS
    ]
    dtypes = len({line.cell.dtype for line in lines}) > 1
    rows = []
    for line in lines:
        read = _read(line)
        if read is not None:
            run = [line.run] if many_runs else []
            rows.append((str(line.number), *run, _name(line, facts, dtypes), *_cells(read)))
    if not rows:
        return None
    left = [*(["Run"] if many_runs else []), "Line"]
    header = ("#", *left, "images", "chance", "pixels first", "LPIPS first", "features first")
    header += ("patches matched first", "chance, matched", "PSNR matched")
    align = "r" + "l" * len(left) + "r" * (len(header) - 1 - len(left))
    return TextTable(TITLE, CAPTION, header, tuple(rows), align)


def evenly_spaced(names: Sequence[str], most: int) -> list[str]:
    """At most `most` of the names, first and last among them, equally far apart."""
    if len(names) <= most:
        return list(names)
    return [names[at] for at in np.linspace(0, len(names) - 1, most).round().astype(int)]


def _read(line: Line) -> _Read | None:
    """The stored pictures of a line; None for fewer than two, or without their originals."""
    scored = sorted({*line.scored("psnr", "standard").index} & {*picture_ids(line)})
    chosen = evenly_spaced(scored, MOST)
    matched = set(evenly_spaced(chosen, MOST_MATCHED))
    small: list[tuple[Tensor, Tensor]] = []
    full: list[tuple[Tensor, Tensor]] = []
    photographs: tuple[list[str], list[str]] = [], []  # of small, of full
    patches = 0
    for image_id in chosen:
        tensors = line.reconstruction(image_id)
        if tensors is None or not {"images", "plain"} <= tensors.keys():
            continue
        image, original = tensors["images"].float(), tensors["plain"].float()
        if small and shrink(image[None])[0].shape != small[0][0].shape:
            return None
        small.append((shrink(image[None])[0], shrink(original[None])[0]))
        photograph = (line.groups or {}).get(image_id, image_id)
        photographs[0].append(photograph)
        if image_id in matched and "mask" in tensors:
            patches = tensors["mask"].numel()
            full.append((image, original))
            photographs[1].append(photograph)
    if len(small) < 2:
        return None
    patch_size = _patch_size(full[0][0], patches) if len(full) > 1 else 0
    return _Read(
        _stacked(small),
        _stacked(full) if patch_size else None,
        patch_size,
        len(line.images),
        (independent_trials(photographs[0]), independent_trials(photographs[1])),
    )


def _stacked(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, originals = zip(*pairs, strict=True)
    return torch.stack(images), torch.stack(originals)


def _patch_size(image: Tensor, patches: int) -> int:
    """Pixels a side of a patch of a square grid of so many; 0 where there is no such grid."""
    grid, (height, width) = math.isqrt(patches), image.shape[-2:]
    whole = grid * grid == patches and grid > 0 and height == width and height % grid == 0
    return height // grid if whole else 0


def _name(line: Line, facts: Sequence[str], dtypes: bool) -> str:
    cell = line.cell
    client = client_text(cell.columns, [key for key in facts if key not in ("gamma", "setting")])
    parts = [line.label, *([f"γ={gamma(cell.gamma)}"] if cell.gamma else [])]
    parts += [cell.dtype] if dtypes else []
    return ", ".join([*parts, *([client] if client != DASH else [])])


def _cells(read: _Read) -> list[str]:
    matched: Floats | None = None
    psnr = math.nan
    if read.full is not None:
        matched = matched_distances(*read.full, read.patch_size)
        psnr = float(np.median(matched_psnr(*read.full, read.patch_size)))
    found: Identification = identify(*read.small, matched=matched)
    of_whole, of_matched = read.trials
    whole = (found.pixels, found.perceptual, found.features)
    ranked = [_pointing(pointing, of_whole) for pointing in whole]
    ranked.append(_pointing(found.patches, of_matched))
    few = DASH if found.patches is None else _chance(found.patches.first.of)
    return [f"{found.n} of {read.of}", _chance(found.n), *ranked, few, number(psnr, 2)]


def _pointing(pointing: Pointing | None, trials: float) -> str:
    if pointing is None:
        return DASH
    mean = math.floor(1000 * pointing.reciprocal_rank + 1e-9) / 1000  # 1 stands for all firsts
    return f"{replace(pointing.first, trials=trials).text()}; {mean:.3f}"


def _chance(n: int) -> str:
    """Share of firsts and mean 1 / rank of an order drawn by lot: 1 / n, and Σ (1 / r) / n."""
    return f"{100 / n:.1f} %; {sum(1 / rank for rank in range(1, n + 1)) / n:.3f}"
