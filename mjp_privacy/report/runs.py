"""Read run folders as lines of a table, with a message for every way a folder can be wrong."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from shlex import quote
from typing import Any

import pandas as pd
import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import check_each_once, check_own, is_locked
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import FileKind, reason, yaml_value
from mjp_privacy.core.text import first_of, plain, shown
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models.tensor_files import check_digest
from mjp_privacy.report.lines import Line, read_frame
from mjp_privacy.uploads.folder import REFUSED

AGAIN = "Run the attack again; it continues where it stopped."
EXPERIMENT = FileKind("the experiment of a run", "Run the attack again.", 1 << 24)


@dataclass(frozen=True)
class Loaded:
    """The lines of all runs, and what else of the runs is damaged or was refused."""

    lines: Sequence[Line]
    remarks: Sequence[str] = ()
    damaged: Sequence[str] = ()
    """Files of rows that are in no figure, and lists of cells that are damaged or missing."""

    @property
    def many_runs(self) -> bool:
        """Whether the lines come from more than one run, so that tables need a column for it."""
        return len({line.run for line in self.lines}) > 1


def load_runs(runs: Sequence[Path], progress: Progress | None = None) -> Loaded:
    """Lines of all runs, concatenated in the order given; `progress` counts the cells."""
    check_folders(runs)
    paths = [run.resolve() for run in runs]
    names = list[str]()
    for depth in range(1, 1 + max((len(path.parts) for path in paths), default=0)):
        names = [plain("/".join(path.parts[-depth:])) for path in paths]
        if len(set(names)) == len(names):
            break
    lines: list[Line] = []
    remarks: list[str] = []
    damaged: list[str] = []
    for run, name in zip(runs, names, strict=True):
        store = RunStore(run).without(RunStore(run).damaged())
        loaded: list[Line] = []
        images: list[pd.Index] = []
        known = store.cell_list()
        for cell in map(CellFacts.read, known.cells):
            frame, folder = read_frame(store, cell.run_id), store.folder(cell.run_id)
            if same := [index for index in images if index.equals(frame.index)]:
                frame.index = same[0]  # names take more memory than scores
            else:
                images.append(frame.index)
            number = len(lines) + len(loaded) + 1
            left_out = sorted(path for path in store.left_out if path.parent == folder)
            loaded.append(Line(number, name, cell, frame, store, left_out=left_out))
            if progress:
                progress.advance()
        of_rows = [shown(path.relative_to(store.root)) for line in loaded for path in line.left_out]
        if all(line.stored.empty and line.cell.status == "ok" for line in loaded):
            if of_rows:
                named = first_of(of_rows, NAMED)
                raise UserError(f"{store.root}: all of its rows are damaged ({named}). {AGAIN}")
            now = "An attack is working in it: wait for its rows." if is_locked(run) else AGAIN
            raise UserError(
                f"{store.root} is an empty run: expected rows of its {len(loaded)} cell(s) under "
                f"{store.root / 'rows'}, but there are none. {now}"
            )
        of_run = f"{name}: " if len(runs) > 1 else ""
        damaged += [f"{of_run}{file}" for file in filter(None, (known.lost, *of_rows))]
        refused = [line for line in loaded if line.cell.model == REFUSED]
        lines += [line for line in loaded if line not in refused]
        if count := max((line.planned for line in refused), default=0):
            remarks.append(
                f"REFUSED: {name}: {count} upload(s) could not be attacked and are in no figure. "
                "`mjp check` names what is wrong with each; mended, the same attack takes them in."
            )
        if known.lost:
            remarks.append(
                f"DAMAGED: {name}: {shown(known.lost)} is damaged or missing: cells are those of "
                "its copy; a run lists them again"
            )
    return Loaded(lines, remarks, damaged)


# folders ------------------------------------------------------------------------------------------

RUN = ("cells.*.parquet", "rows/*/*.parquet", "cells.json")
"""What makes a folder a run: one of these files; the last is that of an earlier version."""

NAMED = 5
"""Damaged files that are called by their paths."""


def check_folders(runs: Sequence[Path]) -> None:
    """Raise unless these are run folders, each of them once."""
    for run in runs:
        try:
            if any(next(run.glob(pattern), None) for pattern in RUN):
                continue
            got = "it is a file" if run.exists() else "it does not exist"
            if run.is_dir():
                got = "it holds other files" if any(run.iterdir()) else "it is empty"
        except (OSError, ValueError) as error:
            got = f"it cannot be used: {reason(error)}"
        raise UserError(
            f"{shown(run)} is not a run folder: expected cells.….parquet in it; {got}. Give the "
            "folder that was the --out of `mjp attack`."
        )
    check_each_once(runs, "run folders")


def check_out(out: Path, runs: Sequence[Path], own: Collection[str]) -> None:
    """Raise where a report cannot be written: in a run, except as RUN/report, whatever that holds,
    or among files of other names than a report's own; the runs themselves may lie beside it."""
    place, roots = Path(os.path.realpath(out)), [run.resolve() for run in runs]
    if place in [root / "report" for root in roots]:
        return
    if any(place.is_relative_to(root) for root in roots):
        raise UserError(
            f"Expected a folder of its own for the report, but {shown(out)} lies in a run. "
            "Give another --out."
        )
    around = [root.relative_to(place).parts[0] for root in roots if place in root.parents]
    check_own(out, "mjp report", [*own, *map(escape, around)])


# where the numbers come from ----------------------------------------------------------------------


@dataclass(frozen=True)
class RunConfig:
    """An experiment that a run's folder was filled by; its fields are empty where unreadable."""

    run: Path
    file: str  # what the config is called beside the page
    fields: Mapping[str, Any]
    software: Mapping[str, Any]  # that it was made with

    @property
    def text(self) -> str:
        """The config as `mjp attack` reads it."""
        return str(yaml.safe_dump(self.fields, sort_keys=False, allow_unicode=True))

    @property
    def name(self) -> str:
        """The run's folder, as it may stand in a command that somebody pastes into a terminal."""
        return plain(self.run.resolve().name)

    def of(self, lines: Sequence[Line]) -> list[Line]:
        """Those of its run."""
        root = RunStore(self.run).root
        return [line for line in lines if line.store.root == root]


def run_configs(runs: Sequence[Path]) -> list[RunConfig]:
    """Every experiment of these run folders; runs of earlier versions have kept the last one."""
    places = [
        (run, path)
        for run in runs
        for path in sorted((run / "experiments").glob("*.yaml")) or [run / "experiment.yaml"]
    ]
    found = []
    for number, (run, path) in enumerate(places, 1):
        fields: dict[str, Any] = {}  # unreadable
        with suppress(UserError):
            check_digest(path, EXPERIMENT)
            with EXPERIMENT.reading(path):
                fields = _mapping(yaml_value(EXPERIMENT.text(path), shown(path)))
        file = f"config_{number}.yaml" if len(places) > 1 else "config.yaml"
        parts = (_mapping(fields.get(name)) for name in ("experiment", "made_with"))
        found.append(RunConfig(run, file, *parts))
    return found


def _mapping(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}


def provenance(configs: Sequence[RunConfig], lines: Sequence[Line]) -> tuple[tuple[str, str], ...]:
    """Software, config hash, weights and images of every run, as (heading, text)."""
    facts: list[tuple[str, str]] = []
    last = {config.run: config for config in configs}
    for config in configs:
        of_run = f"{config.name}: " if len(last) > 1 else ""
        prefix = f"{config.file}: " if len(configs) > 1 else ""
        facts += [(f"{prefix}{name}", str(value)) for name, value in config.software.items()]
        digest = hashlib.sha256(config.text.encode()).hexdigest()
        known = (f"{prefix}config, sha256", digest)
        missing = (f"{prefix}config", "experiment.yaml is missing or cannot be read")
        facts.append(known if config.fields else missing)
        if config is last[config.run] and (digest := _images_digest(config.of(lines))):
            facts.append((f"{of_run}images and their hashes, sha256", digest))
    cells = (line.cell for line in lines)
    weights = {
        (f"weights of {cell.model}", f"{cell.checkpoint}, sha256 {cell.checkpoint_sha}")
        for cell in cells
        if cell.checkpoint
    }
    return (*facts, *sorted(weights))


def _images_digest(lines: Sequence[Line]) -> str:
    """The SHA-256 of the names of a run's images and of their hashes; "" where no row has any."""
    hashes: dict[str, str] = {}
    for line in lines:
        if hashes.keys() >= set(line.images):
            continue
        rows = line.store.read(line.cell.run_id, ["image_id", "sha256", "pixel_sha256"])
        if {"sha256", "pixel_sha256"} <= set(rows):
            both = rows["sha256"].fillna("") + " " + rows["pixel_sha256"].fillna("")
            hashes |= dict(zip(rows["image_id"], both, strict=True))
    listed = "".join(f"{image} {hashes[image]}\n" for image in sorted(hashes))
    return hashlib.sha256(listed.encode("utf-8", "replace")).hexdigest() if listed else ""


def commands(configs: Sequence[RunConfig], lines: Sequence[Line]) -> str:
    """Shell commands that attack and report again; words in capitals stand for your own files."""
    parts: list[str] = []
    begun: set[Path] = set()
    for config in configs:
        if not config.fields:
            continue
        own = config.of(lines)
        words = [f"mjp attack {config.file} --out {quote(f'again/{config.name}')}"]
        if any("round" in line.cell.other for line in own):
            words.append("--uploads UPLOADS")
        elif config.fields.get("images") != "embedded":
            words.append("--images IMAGES")
        planned = max((line.planned for line in own), default=0)
        words += [f"--limit {planned}"] if planned else []
        weights = [
            f"{quote(plain(str(label)))}=FILE"
            for label, model in _mapping(config.fields.get("models")).items()
            if str(_mapping(model).get("checkpoint")).endswith(WEIGHTS)
        ]
        words += ["--weights", *weights] if weights else []
        words += ["--add"] if config.run in begun else []
        parts.append(" ".join(words))
        begun.add(config.run)
    names = dict.fromkeys(f"again/{config.name}" for config in configs)
    return "\n".join([*parts, f"mjp report {' '.join(map(quote, names))} --out again/report"])


WEIGHTS = (".safetensors", ".pth", ".pt", ".bin")
"""How the names of files of weights end."""
