"""One process, one worker and two workers on the same run: seconds, ratio, equal rows.

    python -m benchmarks.workers                                             the demo
    python -m benchmarks.workers --config ladder_finetuned --weights model.safetensors \
        --images imagenet_sample/ --limit 40 --block 5                       the ladder

Each way runs into a fresh folder. `here` is this process alone; every process computes with one
thread, and the workers' start is counted.
"""

from __future__ import annotations

import dataclasses
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import tyro

from benchmarks.page import Row, alternate, bracketed, machine, ratio, rows_of, write_result
from mjp_privacy.experiment.config import Experiment, load_experiment
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.report.lines import STAGE

ONE, TWO, HERE = "1 worker", "2 workers", "here"
WAYS = {
    HERE: EngineConfig(),
    ONE: EngineConfig(kind="local", workers=1),
    TWO: EngineConfig(kind="local", workers=2),
}


def attacked(experiment: Experiment, options: dict[str, Any], engine: EngineConfig) -> pd.DataFrame:
    """The rows of the experiment but for times, in a fixed order."""
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(experiment, Path(folder), engine=engine, **options)
    timings = [name for name in rows if name.startswith(STAGE) or name == "seconds.diagnostic"]
    return rows.drop(columns=timings).sort_values(["run_id", "image_id"], ignore_index=True)


def main(
    config: str = "demo",
    images: str | None = None,
    weights: tuple[str, ...] = (),
    limit: int | None = None,
    block: int | None = None,
    repeats: int = 5,
    name: str = "workers",
) -> None:
    """block: images of one, in place of the config's; name: of the file with the results."""
    facts, experiment = machine(), load_experiment(config)
    if block:
        experiment = dataclasses.replace(experiment, block=block)
    options = {"images": images, "weights": weights, "limit": limit}
    ways = {way: partial(attacked, experiment, options, engine) for way, engine in WAYS.items()}
    timings = alternate(ways, repeats)
    one, two = timings[ONE].result, timings[TWO].result
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    seconds = {way: timing.facts(1)["wall"] for way, timing in timings.items()}
    ratios = {f"{slow} / {TWO}": ratio(timings[slow], timings[TWO]) for slow in (ONE, HERE)}
    about = {"config": config, "limit": limit, "block": block, "repeats": repeats}
    table: list[Row] = [("", "seconds", "beside 2 workers")]
    for way, spent in seconds.items():
        beside = ratios.get(f"{way} / {TWO}")
        table.append((way, bracketed(spent, ".1f"), bracketed(beside) if beside else ""))
    content = {**about, "rows": len(one), "seconds": seconds, "ratios": ratios}
    write_result(name, content, facts, table)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
