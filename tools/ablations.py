"""Evaluates and attacks the models of the paper's Tables 3 and 4 that are trained.

    python -m tools.ablations --runs results/training/ablations --data cifar10-test.zip \\
        --out results/ablations_run
    make results-check WRITE=1

A model of configs/ladder_ablations.yaml is trained where RUNS/LABEL/model.safetensors is there, or
where it comes with the package. What an earlier command with the same --out did is not done again,
unless the model was trained anew. results/ablations gets summary.csv and rows.parquet; then
`make results-check` writes its tables. What these files say of models that are not here stays, so
several machines can share the trainings:

    python -m tools.ablations --only H_0 H_1 …

One command at a time works in an OUT, another is refused; nor give two at once the same --publish.
Each worker of the attack has one thread, one a core: with more threads float32 sums are rounded in
another order, which moves counts of exact pictures where `pixel_lattice` is at the edge of its
precision.

Time: on one CPU core two to five minutes to evaluate a model on 10,000 images; to attack it on 100
with E_unk 85 s, E and F four minutes (`patch_jigsaw` sorts seven uploads a picture), others 30 to
50 s.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import lock
from tools import published_rows
from tools.published_rows import short_commits

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "ladder_ablations.yaml"
SOURCE = "CIFAR-10 test images"


def trained(
    config: Mapping[str, Any], runs: Path, only: Collection[str] | None = None
) -> dict[str, str]:
    """The checkpoint of each model that is there, by label, in the config's order: a path, or the
    name of a packaged model. only: no others than these."""
    checkpoints = {}
    for label, fields in config["models"].items():
        if only is not None and label not in only:
            continue
        file = runs / label / "model.safetensors"
        if file.is_file() or "model" in fields:
            checkpoints[label] = str(file) if file.is_file() else fields["model"]
    return checkpoints


def evaluated(checkpoints: Mapping[str, str], data: Path, out: Path, limit: list[str]) -> Path:
    """A CSV of `mjp evaluate`'s lines, one for each model; those of earlier commands are kept."""
    summaries = []
    for label, checkpoint in checkpoints.items():
        path = Path(checkpoint)
        content = path.read_bytes() if path.is_file() else checkpoint.encode()  # or a packaged name
        made_from = [hashlib.sha256(content).hexdigest(), data.name, data.stat().st_size, limit]
        key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
        folder = out / "evaluation" / f"{label}_{key}"
        if not (folder / "summary.csv").is_file():
            given = ["--checkpoint", f"{label}={checkpoint}", "--gamma", "0.27", *limit]
            _mjp("evaluate", *given, "--data", str(data), "--out", str(folder))
        summaries.append(pd.read_csv(folder / "summary.csv", float_precision="round_trip"))
    path = out / "summary.csv"
    pd.concat(summaries, ignore_index=True).to_csv(path, index=False)
    return path


def attacked(
    config: Mapping[str, Any], checkpoints: Mapping[str, str], data: Path, out: Path, limit: int
) -> Path:
    """The folder of the run of `mjp attack` over these models; OUT is that of one choice of --only,
    so that a run's log names the code that attacked these models and no others."""
    out.mkdir(parents=True, exist_ok=True)
    models = {label: config["models"][label] for label in checkpoints}
    grid = [{**e, "models": [m for m in e["models"] if m in models]} for e in config["grid"]]
    content = {**config, "models": models, "grid": [entry for entry in grid if entry["models"]]}
    chosen = out / CONFIG.name
    chosen.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
    files = [f"{label}={path}" for label, path in checkpoints.items() if Path(path).is_file()]
    given = ["--images", str(data), "--limit", str(limit), "--out", str(out / "attack")]
    _mjp("attack", str(chosen), *given, *(["--weights", *files] if files else []))
    return out / "attack"


def publish(evaluation: Path, run: Path, folder: Path, order: Sequence[str]) -> None:
    """Write what results/ablations holds beside its README: the models of this evaluation, and
    what stood there of others.

    order: the labels of all models, as the files shall list them
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary = folder / "summary.csv"
    frames = [
        pd.read_csv(path, float_precision="round_trip")
        for path in (evaluation, summary)
        if path.is_file()
    ]
    merged = pd.concat(frames, ignore_index=True).drop_duplicates("model")
    places = {label: place for place, label in enumerate(order)}
    merged = merged.sort_values("model", key=lambda labels: labels.map(places))
    facts = {"commit": _commits(run), "source": SOURCE, "models": {*frames[0]["model"]}}
    published_rows.write([run], folder / "rows.parquet", order=order, **facts)
    merged.to_csv(summary, index=False)


def _commits(run: Path) -> str:
    """The commits of the code that worked on a run, as the run's log has them."""
    events = map(json.loads, (run / "log.jsonl").read_text("utf-8").splitlines())
    return ", ".join(dict.fromkeys(short_commits(e["commit"]) for e in events if e.get("commit")))


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
    parser.add_argument("--only", nargs="+", metavar="LABEL", help="of the models, these")
    parser.add_argument("--publish", type=Path, default=ROOT / "results" / "ablations")
    parser.add_argument("--limit", type=int, default=100, help="attacked images")
    parser.add_argument("--evaluate-limit", type=int, help="evaluated images; all by default")
    given = parser.parse_args()
    whole = given.limit == parser.get_default("limit") and not given.evaluate_limit
    if not whole and given.publish == parser.get_default("publish"):
        parser.error("fewer images: expected --publish DIR, for results/ablations holds all")
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    data, out = given.data.resolve(), given.out.resolve()
    order = [*config["models"]]
    if unknown := {*(given.only or ())} - {*order}:
        parser.error(f"--only: expected labels among {', '.join(order)}, got {sorted(unknown)}")
    checkpoints = trained(config, given.runs.resolve(), given.only)
    if not checkpoints:
        parser.error(f"expected LABEL/model.safetensors in {given.runs}, got none")
    limit = ["--limit", str(given.evaluate_limit)] if given.evaluate_limit else []
    choice = "_".join(sorted(given.only)) if given.only else "all"
    try:
        with lock(out):
            evaluation = evaluated(checkpoints, data, out, limit)
            run = attacked(config, checkpoints, data, out / choice, given.limit)
            publish(evaluation, run, given.publish, order)
    except UserError as error:
        sys.exit(f"error: {error}")
    published = pd.read_csv(given.publish / "summary.csv")["model"]
    missing = [label for label in order if label not in {*published}]
    print(f"{len(checkpoints)} models; not trained yet: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
