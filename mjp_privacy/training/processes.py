"""The processes that train one model together: a single one, or as many as torchrun started."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mjp_privacy.core.device import pick_device
from mjp_privacy.core.errors import UserError

SETTLE = 0.2  # seconds for the threads of a process group to come to rest


@dataclass(frozen=True)
class World:
    """This process among all: its number `rank` of `size`, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def part(self, batch: int) -> slice:
        """This process's images of a global batch: every size-th one, so that the copies of
        repeated augmentation go to different processes, as with DeiT's sampler."""
        return slice(self.rank, batch, self.size)

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over the processes."""
        if self.size > 1:
            dist.all_reduce(numbers)
            numbers = numbers / self.size
        return numbers

    def agreed(self, yes: bool) -> bool:
        """The first process's answer for all, because the processes' clocks differ."""
        if self.size == 1:
            return yes
        answer = torch.tensor(float(yes), device=self.device)
        dist.broadcast(answer, 0)
        return bool(answer)

    def wait(self) -> None:
        """Wait until all processes have come to this point."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        """Leave the group of processes; the world cannot be used afterwards."""
        if self.size > 1:
            dist.barrier()
            # gloo's threads drop the last tensors, for which they need Python's lock; whoever joins
            # them while holding it, as the destructor of DDP's reducer does, would wait forever
            time.sleep(SETTLE)
            dist.destroy_process_group()


def join(device: str, batch: int, *, pairs: bool = False) -> World:
    """Join the processes that torchrun's environment names; without it this process is alone.

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
