"""The processes that train one model together: a single one, or as many as torchrun started."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def joined(device: str, batch: int, *, pairs: bool = False) -> Iterator[World]:
    """The processes that torchrun's environment names, joined until the end of the `with` block;
    without it this process is alone.

    If one process raises, it leaves at once with its own reason, and those that wait for it say
    that another one ended.

    pairs  images are mixed in pairs, so each process needs an even number of them
    """
    world = _join(device, batch, pairs=pairs)
    try:
        yield world
    except BaseException as error:
        _leave_the_others(world)
        if _is_of_another(error, world):
            raise UserError(
                f"Process {world.rank} of {world.size} waited for another one, which has ended; "
                "that one's line says why. What was saved is kept."
            ) from None
        raise
    world.wait()
    _leave(world)


def _leave(world: World) -> None:
    """Leave the group of processes; the world cannot be used afterwards."""
    if world.size > 1:
        # gloo's threads drop the last tensors, for which they need Python's lock; whoever joins
        # them while holding it, as the destructor of DDP's reducer does, would wait forever
        time.sleep(SETTLE)
        dist.destroy_process_group()


def _leave_the_others(world: World) -> None:
    """Leave without waiting for anybody, after an error. NCCL may wait for all when its group is
    destroyed; it is left to the end of the process, at which torchrun ends the others."""
    if world.device.type != "cuda":
        _leave(world)


def _is_of_another(error: BaseException, world: World) -> bool:
    """Whether this is what a process gets that waits for one that has ended."""
    lost = isinstance(error, dist.DistError) or "gloo" in str(error)
    return world.size > 1 and isinstance(error, RuntimeError) and lost


def _join(device: str, batch: int, *, pairs: bool) -> World:
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
