"""Ways that are timed in turn, their results and their tables.

Machines warm up, throttle and have other users, so two or more ways to the same result alternate
within each repeat, and a ratio is the median of the repeats' ratios, with the least and the most.

A benchmark writes benchmarks/results/NAME.json; its table stands in README.md between
`<!-- table: NAME begin -->` and `<!-- table: NAME end -->`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch

from mjp_privacy.experiment.run import run_experiment
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.training.evaluation import markdown_table

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "README.md", HERE / "results"
Row = Sequence[str]
Spread = Mapping[str, float]
"""median, min, max"""


@dataclass
class Timing:
    """What one way took in each repeat, and what it returned last."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    result: Any = None

    def facts(self, number: int) -> dict[str, dict[str, float]]:
        """Seconds for each of `number` images, by clock."""
        clocks = {"wall": self.wall, "cpu": self.cpu}
        return {
            clock: spread([one / number for one in seconds]) for clock, seconds in clocks.items()
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def alternate(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Timing]:
    """Runs every way once in each repeat, in the order given, all on the CPU."""
    timings = {name: Timing() for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            timings[name].result = work()
            timings[name].wall.append(time.perf_counter() - wall)
            timings[name].cpu.append(time.process_time() - cpu)
    return timings


def ratio(slow: Timing, fast: Timing, clock: str = "wall") -> dict[str, float]:
    """How many times longer `slow` took, repeat by repeat."""
    pairs = zip(getattr(slow, clock), getattr(fast, clock), strict=True)
    return spread([one / other for one, other in pairs])


def rows_of(experiment: Any, out: Path, **options: Any) -> pd.DataFrame:
    """The rows of a run into a fresh folder, on the CPU."""
    summary = run_experiment(experiment, out=out, device="cpu", **options)
    assert summary.exit_code == 0, summary
    assert not summary.inapplicable, summary.inapplicable
    store = RunStore(out)
    return pd.concat([store.read(run_id) for run_id in store.stored_cells()])


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures, without the machine's name; asked before the
    runs."""
    processor, listing = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if listing.exists() and (found := re.search(r"model name\s*:\s*(.*)", listing.read_text())):
        processor = found[1]
    return {
        "processor": f"{processor}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


# the page -----------------------------------------------------------------------------------------


def write_result(
    name: str, content: Mapping[str, Any], facts: Mapping[str, Any], table: Sequence[Row]
) -> None:
    """Write the result and its table, and print the table; facts: of the machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    whole = {"machine": facts, **content, "table": table}
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(*markdown_table(table[0], table[1:]), path, sep="\n")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(text: str) -> str:
    """The page's text with the tables of all results."""
    for file in RESULTS.glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        facts = content["machine"]
        where = f"{facts['processor']}, {facts['cores']} cores"
        told = f"{where}; {facts['threads']} thread(s), torch {facts['torch']}."
        begin, end = (f"<!-- table: {file.stem} {place} -->" for place in ("begin", "end"))
        head, *rows = content["table"]
        table = "\n".join([begin, *markdown_table(head, rows), "", told, end])
        text = re.sub(f"{begin}.*?{end}", lambda _, table=table: table, text, flags=re.DOTALL)
    return text


def milliseconds(seconds: Mapping[str, Spread]) -> str:
    return f"{1e3 * seconds['wall']['median']:.1f}"


def bracketed(values: Spread, form: str = ".2f") -> str:
    """ "1.81 (1.53 to 1.99)" """
    middle, low, high = (format(values[name], form) for name in ("median", "min", "max"))
    return f"{middle} ({low} to {high})"
