"""Where a report's numbers come from, and the commands that make them again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import yaml_value
from mjp_privacy.core.text import plain, shown
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models.tensor_files import check_digest
from mjp_privacy.report.lines import Line
from mjp_privacy.report.runs import EXPERIMENT

CONFIG = "config.yaml"


@dataclass(frozen=True)
class RunConfig:
    """An experiment that a run's folder was filled by; its fields are empty where unreadable."""

    run: Path
    file: str  # what the config is called beside the page
    fields: dict[str, Any]
    software: dict[str, Any]  # that it was made with


def run_configs(runs: Sequence[Path]) -> list[RunConfig]:
    """Every experiment of these run folders; runs of earlier versions have kept the last one."""
    places = [(run, path) for run in runs for path in _kept(run)]
    names = [CONFIG]
    if len(places) > 1:
        names = [f"config_{number}.yaml" for number in range(1, len(places) + 1)]
    return [
        RunConfig(run, name, *_read(path)) for name, (run, path) in zip(names, places, strict=True)
    ]


def _kept(run: Path) -> list[Path]:
    return sorted((run / "experiments").glob("*.yaml")) or [run / "experiment.yaml"]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The resolved config and the software it was made with; empty where unreadable."""
    try:
        check_digest(path, EXPERIMENT)
        with EXPERIMENT.reading(path):
            content = yaml_value(EXPERIMENT.text(path), shown(path))
    except UserError:
        return {}, {}
    fields = _mapping(content)
    return _mapping(fields.get("experiment")), _mapping(fields.get("made_with"))


def _mapping(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}


def _named(run: Path) -> str:
    """A run's folder, as it may stand in a command that somebody pastes into a terminal."""
    return plain(run.resolve().name)


def config_text(config: dict[str, Any]) -> str:
    """The config as `mjp attack` reads it."""
    return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def provenance(runs: Sequence[Path], lines: Sequence[Line]) -> tuple[tuple[str, str], ...]:
    """Software, config hash, weights and images of every run, as (heading, text)."""
    facts: list[tuple[str, str]] = []
    configs = run_configs(runs)
    for config in configs:
        prefix = _prefix(config, len(runs), len(configs))
        facts += [(f"{prefix}{name}", str(value)) for name, value in config.software.items()]
        if not config.fields:
            facts.append((f"{prefix}config", "experiment.yaml is missing or cannot be read"))
        else:
            digest = hashlib.sha256(config_text(config.fields).encode()).hexdigest()
            facts.append((f"{prefix}config, sha256", digest))
    for run in runs:
        prefix = f"{_named(run)}: " if len(runs) > 1 else ""
        root = RunStore(run).root
        if digest := _images_digest([line for line in lines if line.store.root == root]):
            facts.append((f"{prefix}images and their hashes, sha256", digest))
    return (*facts, *_weights(lines))


def _images_digest(lines: Sequence[Line]) -> str:
    """The SHA-256 of the names of a run's images and of their hashes; "" where no row has any."""
    hashes: dict[str, str] = {}
    for line in {line.images: line for line in lines}.values():  # equal images are one object
        rows = line.store.read(line.run_id, ["image_id", "sha256", "pixel_sha256"])
        if {"sha256", "pixel_sha256"} <= set(rows):
            both = rows["sha256"].fillna("") + " " + rows["pixel_sha256"].fillna("")
            hashes |= dict(zip(rows["image_id"], both, strict=True))
    listed = "".join(f"{image} {hashes[image]}\n" for image in sorted(hashes))
    return hashlib.sha256(listed.encode("utf-8", "replace")).hexdigest() if listed else ""


def _prefix(config: RunConfig, runs: int, configs: int) -> str:
    """What tells the facts of one config from those of others."""
    words = [_named(config.run)] if runs > 1 else []
    words += [plain(str(config.fields.get("name", config.file)))] if configs > runs else []
    return f"{', '.join(words)}: " if words else ""


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
    parts: list[str] = []
    begun: set[Path] = set()
    for config in run_configs(runs):
        if config.fields:
            parts.append(_attack(config, lines) + (" --add" if config.run in begun else ""))
            begun.add(config.run)
    names = [f"again/{_named(run)}" for run in runs]
    parts.append(f"mjp report {' '.join(map(quote, names))} --out again/report")
    return "\n".join(parts)


def _attack(of_run: RunConfig, lines: Sequence[Line]) -> str:
    config, name, run = of_run.fields, of_run.file, _named(of_run.run)
    root = RunStore(of_run.run).root
    own = [line for line in lines if line.store.root == root]
    words = [f"mjp attack {name} --out {quote(f'again/{run}')}"]
    if any("round" in line.cell.other for line in own):
        words.append("--uploads UPLOADS")
    elif config.get("images") not in ("embedded", "flat"):
        words.append("--images IMAGES")
    planned = max((line.cell.outcome.planned_images for line in own), default=0)
    words += [f"--limit {planned}"] if planned else []
    weights = [
        f"{quote(plain(str(label)))}=FILE"
        for label, model in _mapping(config.get("models")).items()
        if isinstance(model, dict) and _is_file(model.get("checkpoint"))
    ]
    words += [f"--weights {' '.join(weights)}"] if weights else []
    return " ".join(words)


def _is_file(checkpoint: Any) -> bool:
    suffixes = (".safetensors", ".pth", ".pt", ".bin")
    return isinstance(checkpoint, str) and checkpoint.endswith(suffixes)
