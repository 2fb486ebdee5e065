"""Where a report's numbers come from, and the commands that make them again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from mjp_privacy.report.loading import Line

CONFIG = "config.yaml"


def read_experiment(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The resolved config of a run and the software it was made with; empty where unreadable."""
    try:
        content = yaml.safe_load((run / "experiment.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}, {}
    if not isinstance(content, dict):
        return {}, {}
    config, software = content.get("experiment"), content.get("made_with")
    return (
        config if isinstance(config, dict) else {},
        software if isinstance(software, dict) else {},
    )


def config_name(runs: Sequence[Path], run: Path) -> str:
    """The file beside the page that holds a run's config."""
    return CONFIG if len(runs) == 1 else f"config_{[*runs].index(run) + 1}.yaml"


def config_text(config: dict[str, Any]) -> str:
    """The config as `mjp attack` reads it."""
    return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def provenance(runs: Sequence[Path], lines: Sequence[Line]) -> tuple[tuple[str, str], ...]:
    """Software, config hash, weights and images of every run, as (heading, text)."""
    facts: list[tuple[str, str]] = []
    for run in runs:
        config, software = read_experiment(run)
        prefix = f"{run.resolve().name}: " if len(runs) > 1 else ""
        facts += [(f"{prefix}{name}", str(value)) for name, value in software.items()]
        if not config:
            facts.append((f"{prefix}config", "experiment.yaml is missing or cannot be read"))
        else:
            digest = hashlib.sha256(config_text(config).encode()).hexdigest()
            facts.append((f"{prefix}config, sha256", digest))
        images = run / "images.csv"
        if images.is_file():
            digest = hashlib.sha256(images.read_bytes()).hexdigest()
            facts.append((f"{prefix}list of images and their hashes (images.csv), sha256", digest))
    return (*facts, *_weights(lines))


def _weights(lines: Sequence[Line]) -> list[tuple[str, str]]:
    models = {
        (line.cell.model.label, line.cell.model.checkpoint, line.cell.model.checkpoint_sha)
        for line in lines
        if line.cell.model.checkpoint
    }
    return [
        (f"weights of {label}", f"{checkpoint}, sha256 {sha}")
        for label, checkpoint, sha in sorted(models, key=str)
    ]


def commands(runs: Sequence[Path], lines: Sequence[Line]) -> str:
    """Shell commands that attack and report again; words in capitals stand for your own files."""
    parts = []
    for run in runs:
        config, _ = read_experiment(run)
        if config:
            name = config_name(runs, run)
            parts.append(_attack(config, name, run.resolve().name, lines))
    names = [f"again/{run.resolve().name}" for run in runs]
    parts.append(f"mjp report {' '.join(map(quote, names))} --out again/report")
    return "\n".join(parts)


def _attack(config: dict[str, Any], name: str, run: str, lines: Sequence[Line]) -> str:
    own = [line for line in lines if line.run.endswith(run)]
    words = [f"mjp attack {name} --out {quote(f'again/{run}')}"]
    if any("round" in line.cell.other for line in own):
        words.append("--uploads UPLOADS")
    elif config.get("images") != "embedded":
        words.append("--images IMAGES")
    planned = max((line.cell.outcome.planned_images for line in own), default=0)
    words += [f"--limit {planned}"] if planned else []
    weights = [
        f"{quote(label)}=FILE"
        for label, model in (config.get("models") or {}).items()
        if isinstance(model, dict) and _is_file(model.get("checkpoint"))
    ]
    words += [f"--weights {' '.join(weights)}"] if weights else []
    return " ".join(words)


def _is_file(checkpoint: Any) -> bool:
    suffixes = (".safetensors", ".pth", ".pt", ".bin")
    return isinstance(checkpoint, str) and checkpoint.endswith(suffixes)
