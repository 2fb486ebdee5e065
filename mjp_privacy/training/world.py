"""The processes that train together: one, or as many as torchrun started."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mjp_privacy.core.device import pick_device
from mjp_privacy.core.errors import UserError


@dataclass(frozen=True)
class World:
    """This process's place among `size`."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """The one that writes files and talks."""
        return self.rank == 0

    def part(self, batch: int) -> slice:
        """This process's places in a global batch: every size-th, so that the copies of repeated
        augmentation go to different processes, as with DeiT's sampler."""
        return slice(self.rank, batch, self.size)

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over the processes."""
        if self.size > 1:
            dist.all_reduce(numbers)
            numbers = numbers / self.size
        return numbers

    def agreed(self, yes: bool) -> bool:
        """What the first process says; clocks differ."""
        if self.size == 1:
            return yes
        said = torch.tensor(float(yes), device=self.device)
        dist.broadcast(said, 0)
        return bool(said)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def join(device: str, batch: int, *, pairs: bool = False) -> World:
    """The world that torchrun's environment describes, or this process alone.

    pairs  images are mixed in pairs, so each process needs an even number of them
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    place = pick_device(device)
    unit = size * (2 if pairs else 1)
    if batch % unit:
        even = " an even number each, for mixup," if pairs else ""
        raise UserError(
            f"Expected a batch that {size} process{'es' if size > 1 else ''} can share equally,"
            f"{even} got {batch}. Give --batch {batch - batch % unit or unit}."
        )
    if size == 1:
        return World(place)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    return World(place, dist.get_rank(), size)
