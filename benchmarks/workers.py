"""One process, one worker and two workers on the same run: seconds, ratio, equal rows.

    python -m benchmarks.workers                                             the demo
    python -m benchmarks.workers --config ladder_finetuned --weights model.safetensors \
        --images imagenet_sample/ --limit 40 --block 5                       the ladder

Each way runs into a fresh folder. `here` is this process alone; every process computes with one
thread, and the workers' start is counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from functools import partial
from pathlib import Path

import pandas as pd

from benchmarks.alternating import alternate, machine, ratio
from benchmarks.page import write_result
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.run import run_experiment
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.lines import STAGE

ONE, TWO, HERE = "1 worker", "2 workers", "here"


def attacked(arguments: argparse.Namespace, engine: EngineConfig) -> pd.DataFrame:
    """Run the experiment into a fresh folder; its rows, in a fixed order."""
    experiment = load_experiment(arguments.config)
    if arguments.block:
        experiment = dataclasses.replace(experiment, block=arguments.block)
    with tempfile.TemporaryDirectory() as folder:
        run_experiment(
            experiment,
            images=arguments.images,
            out=folder,
            weights=arguments.weights,
            limit=arguments.limit,
            device="cpu",
            engine=engine,
        )
        store = RunStore(Path(folder))
        rows = pd.concat([store.read(run_id) for run_id in store.stored_cells()])
    timings = [name for name in rows if name.startswith(STAGE) or name == "seconds.diagnostic"]
    rows = rows.drop(columns=timings)
    return rows.sort_values(["run_id", "image_id"], ignore_index=True)


def main() -> None:
    """Run the three ways in turn, check that rows are equal, print and store the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="demo")
    parser.add_argument("--images")
    parser.add_argument("--weights", nargs="*", default=[])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--block", type=int, help="images of a block, in place of the config's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="workers", help="of the file with the results")
    arguments = parser.parse_args()
    facts = machine()
    ways = {
        HERE: EngineConfig(),
        ONE: EngineConfig(kind="local", workers=1),
        TWO: EngineConfig(kind="local", workers=2),
    }
    calls = {name: partial(attacked, arguments, engine) for name, engine in ways.items()}
    timings = alternate(calls, arguments.repeats)
    one, two = timings[ONE].result, timings[TWO].result
    assert one is not None
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    ratios = {f"{slow} / {TWO}": ratio(timings[slow], timings[TWO], "wall") for slow in (ONE, HERE)}
    content = {
        "config": str(arguments.config),
        "limit": arguments.limit,
        "block": arguments.block,
        "repeats": arguments.repeats,
        "rows": len(one),
        "seconds": {name: timing.facts(1)["wall"] for name, timing in timings.items()},
        "ratios": ratios,
    }
    write_result(arguments.name, content, facts, "ladder_workers")


if __name__ == "__main__":
    main()
