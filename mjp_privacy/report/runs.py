"""Read run folders as lines of a table, with a message for every way a folder can be wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

import pandas as pd
import yaml

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import FileKind, is_there, reason, yaml_value
from mjp_privacy.core.text import plain, shown
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models.tensor_files import check_digest
from mjp_privacy.report.lines import Line
from mjp_privacy.report.rows import STAGE, cell_scores
from mjp_privacy.uploads.folder import REFUSED

__all__ = ["Loaded", "load_runs"]

AGAIN = "Run the attack again; it continues where it stopped."
EXPERIMENT = FileKind("the experiment of a run", "Run the attack again.", 1 << 24)


@dataclass(frozen=True)
class Loaded:
    """The lines of all runs, how long their stages took, and what else of the runs is damaged."""

    lines: Sequence[Line]
    timings: pd.DataFrame
    remarks: Sequence[str] = ()

    @property
    def many_runs(self) -> bool:
        """Whether the lines come from more than one run, so that tables need a column for it."""
        return len({line.run for line in self.lines}) > 1


def load_runs(runs: Sequence[Path], progress: Progress | None = None) -> Loaded:
    """Lines of all runs, concatenated in the order given.

    progress: counts the cells that were read
    """
    check_folders(runs)
    lines: list[Line] = []
    timings, remarks = [], []
    stores = [RunStore(run).without(RunStore(run).damaged()) for run in runs]
    for store, name in zip(stores, run_names(runs), strict=True):
        cells = store.read_cells()
        if not cells:
            raise UserError(
                f"{store.root} is an empty run: expected at least one cell in its list, but there "
                "is none. Run the attack again, with at least one model, setting and attack."
            )
        loaded: list[Line] = []
        for cell in map(CellFacts.read, cells):
            loaded.append(_line(store, name, cell, len(lines) + len(loaded) + 1))
            if progress:
                progress.advance()
        if all(not line.stored and line.cell.outcome.status == "ok" for line in loaded):
            _refuse_empty(store, loaded)
        lines += [line for line in loaded if not _is_refused(line)]
        remarks += _refused(name, loaded)
        timings += [_timings(line) for line in loaded]
        remarks += [f"DAMAGED: {name}: {words}" for words in _damaged_lists(store)]
    return Loaded(lines, pd.concat(timings, ignore_index=True), remarks)


def _refuse_empty(store: RunStore, lines: Sequence[Line]) -> None:
    damaged = [path for line in lines for path in line.left_out]
    if damaged:
        place = shown(damaged[0].relative_to(store.root))
        raise UserError(f"{store.root}: all of its rows are damaged ({place}). {AGAIN}")
    raise UserError(
        f"{store.root} is an empty run: expected rows of its {len(lines)} cell(s) under "
        f"{store.root / 'rows'}, but there are none. {AGAIN}"
    )


def _refused(name: str, lines: Sequence[Line]) -> list[str]:
    """A sentence for uploads that could not be attacked: they are no client's line."""
    cells = [line.cell for line in lines if _is_refused(line)]  # one for each attack
    count = max((cell.outcome.planned_images for cell in cells), default=0)
    if not count:
        return []
    return [
        f"REFUSED: {name}: {count} upload(s) could not be attacked and are in no figure. "
        "`mjp check` names what is wrong with each; mended, the same attack takes them in."
    ]


def _is_refused(line: Line) -> bool:
    return line.cell.model.label == REFUSED


def _damaged_lists(store: RunStore) -> Iterator[str]:
    """A sentence for each damaged file beside the rows."""
    for path in sorted(store.left_out):
        if path.parent == store.root:
            yield f"{shown(path.name)}: cells are those that rows tell of; a run lists them again"
    for path in (store.root / "experiment.yaml", *sorted((store.root / "experiments").glob("*"))):
        try:
            if is_there(path):
                check_digest(path, EXPERIMENT, needed=False)
        except BadFile as error:
            place = shown(path.relative_to(store.root))
            yield f"{place} ({error.got}): the run of that experiment writes it again"


def _line(store: RunStore, name: str, cell: CellFacts, number: int) -> Line:
    table = cell_scores(store, cell.run_id)
    if (cell.client.batch or 1) > 1:
        # an earlier version took the pictures for those of the labels in their order: nobody knows
        table.keys = [key for key in table.keys if key[0] != "gradient_residual"]
    planned = max(0, cell.outcome.planned_images - len(table.unreadable))
    counted = replace(cell, outcome=replace(cell.outcome, planned_images=planned))
    folder = store.folder(cell.run_id)
    damaged = sorted(path for path in store.left_out if path.parent == folder)
    return Line(number, name, counted, table, store, left_out=damaged)


def _timings(line: Line) -> pd.DataFrame:
    """A row for each block and stage: how many seconds an image took, and on what device.

    The images of a block share its time equally.
    """
    names = [n for n in line.store.cell(line.run_id).columns if n.startswith(STAGE)]
    if not names:
        return pd.DataFrame()
    blocks = line.store.read(line.run_id, ["block", *names]).groupby("block")[names]
    seconds, images = blocks.mean(), blocks.count()
    made_with = line.store.about(line.run_id)[-1].get("made_with", {})
    return pd.concat(
        pd.DataFrame(
            {"stage": name.removeprefix(STAGE), "seconds": seconds[name], "images": images[name]}
        )
        for name in names
    ).assign(line=line.number, device=made_with.get("device", ""))


RUN = ("cells.*.parquet", "rows/*/*.parquet", "cells.json")
"""What makes a folder a run: one of these files; the last is that of an earlier version."""

OTHERS = {
    "index.html": "the folder of a report",
    "uploads.jsonl": "a folder of uploads",
    "metrics.jsonl": "the folder of a training or a federation",
    "federation.json": "the folder of a federation",
}
"""What a folder is that holds one of these files."""

NAMED = 5
"""Runs inside a folder that are called by their paths."""

MOST_LOOKED_AT = 1000
"""Entries of a folder among which runs are looked for."""


def check_folders(runs: Sequence[Path]) -> None:
    """Raise unless these are run folders, each of them once."""
    if not runs:
        raise UserError("Expected one or more run folders, got none. Give the --out of a run.")
    seen: dict[Path, Path] = {}
    for run in runs:
        _check_folder(run)
        first = seen.setdefault(run.resolve(), run)
        if first is not run:
            raise UserError(
                f"Expected different runs, but {shown(run)} is the same folder as {shown(first)}: "
                "its lines would be in the table twice. Name it once."
            )


def run_names(runs: Sequence[Path]) -> list[str]:
    """What a report calls these runs: their folders' names, or paths where names are equal."""
    names = [plain(run.resolve().name) for run in runs]
    return names if len(set(names)) == len(names) else [plain(str(run)) for run in runs]


def check_out(out: Path, runs: Sequence[Path]) -> None:
    """Raise where a report cannot be written: over a run, or among its rows and pictures."""
    try:
        is_file = out.exists() and not out.is_dir()
    except (OSError, ValueError) as error:
        raise UserError(
            f"Expected a folder to write the report into, but {shown(out)} is "
            f"{reason(error)}. Give another --out."
        ) from error
    if is_file:
        raise UserError(
            f"Expected a folder to write the report into, but {shown(out)} is a file. Give "
            "another --out."
        )
    place = out.resolve()
    for run in runs:
        if place == run.resolve():
            raise UserError(
                f"Expected a folder of its own for the report, but {shown(out)} is the run itself. "
                f"Give another --out, such as {shown(out / 'report')}."
            )
        for part in ("rows", "experiments"):
            if place.is_relative_to(run.resolve() / part):
                raise UserError(
                    f"Expected a folder of its own for the report, but {shown(out)} lies among "
                    f"the {part} of the run. Give another --out, such as {shown(run / 'report')}."
                )


@contextmanager
def nothing_in_the_way(out: Path) -> Iterator[None]:
    """Name the file or folder that stands where the report wants to write another kind of thing."""
    try:
        yield
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise UserError(
            f"The report cannot be written into {shown(out)}: {error.strerror} "
            f"({shown(error.filename2 or error.filename)}). Give another --out, or take it away."
        ) from error


def _check_folder(run: Path) -> None:
    give = "Give the folder that was the --out of `mjp attack`."
    try:
        is_folder, exists = run.is_dir(), run.exists()
    except (OSError, ValueError) as error:
        raise UserError(
            f"Expected a run folder, but {shown(run)} is {reason(error)}. {give}"
        ) from error
    if not is_folder:
        fault = "is a file" if exists else "does not exist"
        raise UserError(f"Expected a run folder, but {shown(run)} {fault}. {give}")
    if _is_run(run):
        return
    try:
        instead = "got other files" if any(run.iterdir()) else "the folder is empty"
        known = (f"it is {words}" for name, words in OTHERS.items() if is_there(run / name))
        instead = next(known, instead)
    except OSError as error:
        instead = f"it cannot be listed ({reason(error)})"
    raise UserError(
        f"{shown(run)} is not a run folder: expected cells.….parquet in it; {instead}. "
        f"{_runs_inside(run) or give}"
    )


def _is_run(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in RUN)


def _runs_inside(folder: Path) -> str:
    """Which runs lie in the folder, as advice; empty where none does."""
    try:
        entries = sorted(islice(folder.iterdir(), MOST_LOOKED_AT))
    except OSError:
        return ""
    inside = [path for path in entries if _is_run(path)]
    if not inside:
        return ""
    named = " ".join(shown(path) for path in inside[:NAMED])
    more = f" … ({len(inside)} in all)" if len(inside) > NAMED else ""
    return f"Give what lies in it: {named}{more}."


# where the numbers come from ----------------------------------------------------------------------

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
        RunConfig(run, name, *_experiment(path))
        for name, (run, path) in zip(names, places, strict=True)
    ]


def _kept(run: Path) -> list[Path]:
    return sorted((run / "experiments").glob("*.yaml")) or [run / "experiment.yaml"]


def _experiment(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The resolved config and the software it was made with; empty where unreadable."""
    try:
        check_digest(path, EXPERIMENT)
        with EXPERIMENT.reading(path):
            content = _content(EXPERIMENT.text(path), shown(path))
    except UserError:
        return {}, {}
    fields = _mapping(content)
    return _mapping(fields.get("experiment")), _mapping(fields.get("made_with"))


@lru_cache(16)
def _content(text: str, where: str) -> Any:
    """What a YAML text says: a report asks it three times."""
    return yaml_value(text, where)


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
            parts.append(_attack_again(config, lines) + (" --add" if config.run in begun else ""))
            begun.add(config.run)
    names = [f"again/{_named(run)}" for run in runs]
    parts.append(f"mjp report {' '.join(map(quote, names))} --out again/report")
    return "\n".join(parts)


def _attack_again(of_run: RunConfig, lines: Sequence[Line]) -> str:
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
