"""Evaluates and attacks the models of the paper's Tables 3 and 4 that are trained.

    python -m tools.ablations --runs results/training/ablations --data cifar10-test.zip \\
        --out results/ablations_run
    make results-check WRITE=1

A model of configs/ladder_ablations.yaml is trained where RUNS/LABEL/model.safetensors is there, or
where it comes with the package. What an earlier command with the same --out did is not done again,
unless the model was trained anew. results/ablations gets summary.csv and rows.parquet; then
`make results-check` writes its tables. Each worker of the attack has one thread, one a core: with
more threads float32 sums are rounded in another order, which moves counts of exact pictures where
`pixel_lattice` is at the edge of its precision.

Time: on one CPU core two to five minutes to evaluate a model on 10,000 images; to attack it on 100
with E_unk 85 s, E and F four minutes (`patch_jigsaw` sorts seven uploads a picture), others 30 to
50 s.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from mjp_privacy.core.errors import UserError
from tools import published_rows

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "ladder_ablations.yaml"
SOURCE = "CIFAR-10 test images"


def trained(config: Mapping[str, Any], runs: Path) -> dict[str, str]:
    """The checkpoint of each model that is there, by label, in the config's order: a path, or the
    name of a packaged model."""
    checkpoints = {}
    for label, fields in config["models"].items():
        file = runs / label / "model.safetensors"
        if file.is_file() or "model" in fields:
            checkpoints[label] = str(file) if file.is_file() else fields["model"]
    return checkpoints


def evaluated(checkpoints: Mapping[str, str], data: Path, out: Path) -> pd.DataFrame:
    """The lines of `mjp evaluate`, one for each model; those of earlier commands are kept."""
    summaries = []
    for label, checkpoint in checkpoints.items():
        path = Path(checkpoint)
        content = path.read_bytes() if path.is_file() else checkpoint.encode()  # or a packaged name
        made_from = [hashlib.sha256(content).hexdigest(), data.name, data.stat().st_size]
        key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
        folder = out / "evaluation" / f"{label}_{key}"
        if not (folder / "summary.csv").is_file():
            given = ["--checkpoint", f"{label}={checkpoint}", "--gamma", "0.27"]
            _mjp("evaluate", *given, "--data", str(data), "--out", str(folder))
        summaries.append(pd.read_csv(folder / "summary.csv", float_precision="round_trip"))
    return pd.concat(summaries, ignore_index=True)


def attacked(
    config: Mapping[str, Any], checkpoints: Mapping[str, str], data: Path, out: Path
) -> Path:
    """The folder of the run of `mjp attack` over these models."""
    out.mkdir(parents=True, exist_ok=True)
    models = {label: config["models"][label] for label in checkpoints}
    grid = [{**e, "models": [m for m in e["models"] if m in models]} for e in config["grid"]]
    content = {**config, "models": models, "grid": [entry for entry in grid if entry["models"]]}
    chosen = out / CONFIG.name
    chosen.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
    files = [f"{label}={path}" for label, path in checkpoints.items() if Path(path).is_file()]
    given = ["--images", str(data), "--limit", "100", "--out", str(out / "attack")]
    _mjp("attack", str(chosen), *given, *(["--weights", *files] if files else []))
    return out / "attack"


def _mjp(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "mjp_privacy", *arguments], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Evaluate, attack and publish the models that are trained; say which are not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="holds LABEL/model.safetensors")
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-10 test images")
    parser.add_argument("--out", type=Path, required=True, help="of evaluations and the attack")
    given = parser.parse_args()
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    data, out = given.data.resolve(), given.out.resolve()
    folder = ROOT / "results" / "ablations"
    checkpoints = trained(config, given.runs.resolve())
    if lost := {*pd.read_csv(folder / "summary.csv")["model"]} - {*checkpoints}:
        parser.error(f"{folder} has rows of models that {given.runs} lacks: {sorted(lost)}")
    summary = evaluated(checkpoints, data, out)
    run = attacked(config, checkpoints, data, out)
    events = map(json.loads, (run / "log.jsonl").read_text("utf-8").splitlines())
    commits = dict.fromkeys(event["commit"] for event in events if event.get("commit"))
    try:
        facts = {"commit": published_rows.short_commits(", ".join(commits)), "source": SOURCE}
        published_rows.write([run], folder / "rows.parquet", **facts)
    except UserError as error:
        sys.exit(f"error: {error}")
    summary.to_csv(folder / "summary.csv", index=False)
    missing = [label for label in config["models"] if label not in checkpoints]
    print(f"{len(checkpoints)} models; not trained yet: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
