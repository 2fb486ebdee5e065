"""CPU seconds of `pixel_lattice` on planted uploads, stage by stage.

    python -m benchmarks.lattice [--pictures 6] [--repeats 5] [--side 192] [--gamma .27]

The pictures are crops of scikit-image's photographs; an upload G = A^T X has random rows A, rounded
to float32, so that no model is needed. One thread, CPU time, medians over repeats and pictures with
their range; repeats go round the pictures. Stages: the lattice and the masked patches in it, the
unmasked patches, the places of the masked ones. Recovery is checked beside the time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
import tyro
from torch import Tensor

from attacks.equations.span import hull_rows, split_hull
from attacks.jigsaw import solve
from attacks.lattice.unmixing import unmix
from benchmarks.alternating import machine
from benchmarks.page import write_result
from mjp_privacy.data import load_images
from mjp_privacy.models.jigsaw import Grid, to_patches

PATCH = 16
STAGES = ("masked patches", "unmasked patches", "places")


@dataclass(frozen=True)
class Arguments:
    pictures: int = 6
    repeats: int = 5
    side: int = 192
    gamma: float = 0.27
    width: int = 192  # D, the length of a row of A


@dataclass(frozen=True)
class Planted:
    """One upload: all that a lattice needs, and the answer."""

    patches: Tensor  # (N, p)
    hidden: Tensor  # (N,) bool
    wide: Tensor  # (k, p + 1) the masked patches' hull
    partial: Tensor  # the unmasked patches but for differences of masked ones


def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    facts = machine()
    uploads = planted(arguments)
    seconds: list[list[tuple[float, ...]]] = [[] for _ in uploads]
    exact = [False] * len(uploads)
    for _ in range(arguments.repeats):
        for index, upload in enumerate(uploads):
            times, exact[index] = attack(upload, Grid.of(arguments.side, PATCH))
            seconds[index].append(times)
    rows = {}
    for number, stage in enumerate((*STAGES, "all")):
        each = [median((*t, sum(t))[number] for t in times) for times in seconds]
        rows[stage] = {"median": median(each), "min": min(each), "max": max(each)}
    content = {**vars(arguments), "exact": sum(exact), "seconds_per_image": rows}
    write_result("lattice", content, facts)


def planted(arguments: Arguments) -> list[Planted]:
    """Uploads of crops, with masks and rows drawn from a seed."""
    generator = torch.Generator().manual_seed(0)
    uploads = []
    images = load_images("embedded", size=arguments.side, limit=arguments.pictures)
    for image in images:
        patches = to_patches(image.image, PATCH).double()
        number = len(patches)
        hidden = torch.zeros(number, dtype=torch.bool)
        count = int(arguments.gamma * number)
        hidden[torch.randperm(number, generator=generator)[:count]] = True
        rows = torch.randn(number, arguments.width, generator=generator, dtype=torch.float64)
        x = 2 * patches - 1
        gradient = (rows.mT @ x).float().double()
        q = torch.linalg.qr(rows[~hidden].mT)[0]
        rest = gradient - q @ (q.mT @ gradient)
        total = rows[hidden].sum(0).unsqueeze(1)
        wide = hull_rows(rest, total - q @ (q.mT @ total), count)
        basis, anchor = split_hull(wide)
        outer = gradient - total * anchor
        outer = outer - outer @ basis.mT @ basis
        partial = torch.linalg.lstsq(rows[~hidden].mT, outer).solution
        uploads.append(Planted(patches, hidden, wide, partial))
    return uploads


def attack(upload: Planted, grid: Grid) -> tuple[tuple[float, ...], bool]:
    """CPU seconds of each stage, and whether every patch was found."""
    clock = [time.process_time()]
    hidden, patches = upload.hidden, upload.patches.clone()
    half = (0.5,) * 3
    unmixed = unmix(upload.wide, mean=half, std=half, patch_size=PATCH)
    clock.append(time.process_time())
    if unmixed is None:
        return (clock[1] - clock[0], 0.0, 0.0), False
    guess = patches[~hidden].mean(-1, keepdim=True).expand(-1, patches.shape[1])
    patches[~hidden], _ = unmixed.complete(upload.partial, guess)
    clock.append(time.process_time())
    pieces = unmixed.patches.clamp(0, 1)
    if len(pieces) == int(hidden.sum()):
        order = solve(patches, hidden, pieces, grid=grid, patch_size=PATCH)
        patches[hidden] = pieces
        placed = torch.empty_like(patches)
        placed[order] = patches
        members = torch.full((len(hidden),), -1)
        members[hidden] = torch.arange(len(pieces))
        placed_members = torch.empty_like(members)
        placed_members[order] = members
        patches = unmixed.continued(placed, placed_members, grid)
    clock.append(time.process_time())
    first, second, third = (after - before for before, after in pairwise(clock))
    distance = (patches[:, None] - upload.patches).abs().amax(-1)
    return (first, second, third), bool((distance.amin(0) < 1e-6).all())


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
