"""What a training runs on: a single process or as many as torchrun started, which train one model
together, and CPUs with or without products in bfloat16."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import pick_device
from mjp_privacy.core.text import one_line
from mjp_privacy.training.config import TrainingConfig

SETTLE = 0.2  # seconds for the threads of a process group to come to rest
LEAVE = 5.0  # seconds to leave a process group in after an error
LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "store->get",
)
"""What gloo and NCCL say of a process that has ended."""


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
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined(device: str, batch: int, *, pairs: bool = False) -> Iterator[World]:
    """The processes that torchrun's environment names, joined until the end of the `with` block;
    without it this process is alone.

    If one process raises, it leaves with its own reason and waits for nobody. Those that wait for
    it say that another one ended: at once on CPUs; on GPUs torchrun ends them within 30 s.

    pairs  images are mixed in pairs, so each process needs an even number of them
    """
    world = _join(device, batch, pairs=pairs)
    try:
        yield world
        world.wait()
    except BaseException as error:
        if world.size > 1 and world.device.type != "cuda":  # NCCL's group may wait for all others
            leaving = Thread(target=_leave, args=(world,), daemon=True)
            leaving.start()
            leaving.join(LEAVE)  # what is still under way has nobody to answer it
        if is_lost(error, world):
            raise UserError(
                f"Process {world.rank} of {world.size} waited for another one, which has ended "
                f"({one_line(error)}); that one's line says why. What was saved is kept."
            ) from error
        raise
    _leave(world)


def _leave(world: World) -> None:
    """Leave the group of processes; the world cannot be used afterwards."""
    if world.size > 1:
        # gloo's threads drop the last tensors, for which they need Python's lock; whoever joins
        # them while holding it, as the destructor of DDP's reducer does, would wait forever
        time.sleep(SETTLE)
        dist.destroy_process_group()


def is_lost(error: BaseException, world: World) -> bool:
    """Whether this is what a process gets that waits for one that has ended. Other errors of the
    libraries beneath, such as two processes on one GPU, are this process's own."""
    lost = any(sign in str(error) for sign in LOST)
    return world.size > 1 and isinstance(error, RuntimeError) and lost


def _join(device: str, batch: int, *, pairs: bool) -> World:
    """Meet the other processes, each on a GPU of its own where it is to be on one."""
    place = pick_device(device)
    try:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        number = int(os.environ.get("LOCAL_RANK", "0"))
        if size < 1 or number < 0:
            raise ValueError(f"{size} and {number}")
    except ValueError as error:
        raise UserError(
            "Expected whole numbers in the environment variables WORLD_SIZE and LOCAL_RANK, as "
            f"torchrun sets them; got: {one_line(error)}. Start with torchrun, or unset them."
        ) from error
    unit = size * (2 if pairs else 1)
    if batch % unit:
        even = " an even number each, for mixup," if pairs else ""
        raise UserError(
            f"Expected a batch that the processes ({size}) can share equally,{even} got {batch}. "
            f"Give --batch {batch - batch % unit or unit}."
        )
    if size == 1:
        return World(place)
    if place.type == "cuda":
        if number >= (there := torch.cuda.device_count()):
            raise UserError(
                f"Expected a GPU for each process of this machine, got {there} and a process "
                f"number {number}, counted from 0. Give --nproc_per_node={there}, or --device cpu."
            )
        place = torch.device("cuda", number)
        torch.cuda.set_device(place)
    try:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:  # ValueError: the environment lacks a part
        raise UserError(
            f"Expected {size} processes, as WORLD_SIZE says, at MASTER_ADDR and MASTER_PORT; got: "
            f"{one_line(error)}. Start them with torchrun, or unset WORLD_SIZE."
        ) from error
    return World(place, dist.get_rank(), size)


# products in bfloat16 -----------------------------------------------------------------------------

_aten = torch.ops.aten
PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
}
"""What is slow: all products that a ViT, a Swin or a ResNet trains with, as long as its
attention is made of them (`learner` switches fused attention off)."""
REMARK = (
    "note: torch has no fast bfloat16 on this CPU: products are computed in float32 and rounded, "
    "as a CPU with instructions for it does, in little more time than float32 takes"
)


class RoundedProducts(TorchDispatchMode):
    """While it is entered, products of bfloat16 tensors on the CPU are computed in float32 and
    rounded to bfloat16, forwards and backwards: with RoundedProducts(): ...

    On CPUs where torch has no fast ones it multiplies the numbers one by one, and a step of a small
    ViT takes twelve times as long.
    """

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function not in PRODUCTS or not any(map(_is_rounded, args)):
            return function(*args, **(kwargs or {}))
        wide = (arg.float() if _is_rounded(arg) else arg for arg in args)
        result = function(*wide, **(kwargs or {}))
        if isinstance(result, Tensor):
            return result.bfloat16()
        return tuple(part if part is None else part.bfloat16() for part in result)


def _is_rounded(arg: object) -> bool:
    return isinstance(arg, Tensor) and arg.dtype == torch.bfloat16 and arg.device.type == "cpu"


def rounds_products(config: TrainingConfig, device: torch.device) -> bool:
    """Whether a training in bfloat16 needs `RoundedProducts` here. It is not compiled then, because
    compiled code calls the slow products itself."""
    slow = device.type == "cpu" and not has_bfloat16()
    return slow and config.recipe.precision == "bfloat16"


def has_bfloat16() -> bool:
    """Whether the library that multiplies for torch (oneDNN) knows bfloat16 on this CPU."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported and torch.backends.mkldnn.is_available() and supported())
