"""Two or more ways to the same result, measured in turn: medians, spread, ratios.

Machines warm up, throttle and have other users, so the ways alternate within each repeat, and a
ratio is the median of the repeats' own ratios, with the smallest and the largest beside it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


@dataclass
class Timing(Generic[T]):
    """What one way took in each repeat, and what it returned last."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    result: T | None = None

    def facts(self, number: int) -> dict[str, Any]:
        """Seconds for each of `number` images: median, smallest and largest."""
        return {
            clock: {
                name: statistic(seconds) / number
                for name, statistic in (("median", median), ("min", min), ("max", max))
            }
            for clock, seconds in (("wall", self.wall), ("cpu", self.cpu))
        }


def alternate(ways: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, Timing[T]]:
    """Runs every way once in each repeat, in the order given."""
    timings: dict[str, Timing[T]] = {name: Timing() for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            _wait_for_the_device()
            wall, cpu = time.perf_counter(), time.process_time()
            timings[name].result = work()
            _wait_for_the_device()
            timings[name].wall.append(time.perf_counter() - wall)
            timings[name].cpu.append(time.process_time() - cpu)
    return timings


def _wait_for_the_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(slow: Timing[Any], fast: Timing[Any], clock: str = "wall") -> dict[str, float]:
    """How many times longer `slow` took: the median of the repeats' ratios, and their range."""
    pairs = zip(getattr(slow, clock), getattr(fast, clock), strict=True)
    ratios = [one / other for one, other in pairs]
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures, without the machine's name."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """The model of the processor and whether torch may use its widest vectors."""
    model = platform.processor() or platform.machine()
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        lines = [line for line in listing.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
