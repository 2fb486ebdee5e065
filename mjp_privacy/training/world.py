"""The processes that train together: one, or as many as torchrun started."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mjp_privacy.errors import UserError
from mjp_privacy.runner import pick_device


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
        """This process's slice of a global batch."""
        share = batch // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over the processes."""
        if self.size > 1:
            dist.all_reduce(numbers)
            numbers = numbers / self.size
        return numbers

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def join(device: str, batch: int) -> World:
    """The world that torchrun's environment describes, or this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    place = pick_device(device)
    if size == 1:
        return World(place)
    if batch % size:
        raise UserError(
            f"Expected a batch that {size} processes can share equally, got {batch}. "
            f"Give --batch {batch - batch % size or size}."
        )
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    return World(place, dist.get_rank(), size)
