"""Where a run goes, whether it may, and which experiments a folder holds.

RUN/experiment.yaml         the experiment of the last command, resolved, and what ran it
RUN/experiments/NAME.yaml   the same of each experiment that filled the folder
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import check_own, output_folder
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.experiment.cell_facts import cell_key
from mjp_privacy.experiment.config import Experiment, expand, load_experiment
from mjp_privacy.experiment.overrides import with_weights
from mjp_privacy.experiment.store import stored_files
from mjp_privacy.models.tensor_files import BLANK_DIGEST, write_with_digest

SHIPPED = ("packaged:", "timm:")
GENERIC_STEMS = ("model", "pytorch_model", "open_clip_model")  # names that all weights have
DIGITS = 6
LOG = "log.jsonl"
OF_A_RUN = ("rows", "experiments", "experiment.yaml", LOG, "cells.json")
"""Names in a folder in which a run has begun, beside its list of cells."""
NOT_IN_A_FILE_NAME = re.compile(r"[^A-Za-z0-9_-]")


def run_folder(
    experiment: Experiment,
    weights: Sequence[str] = (),
    *,
    gamma: float | None = None,
    model: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of a command that gives none: results/NAME, or results/NAME/WEIGHTS-1f09c3 where
    only the weights say what the models are.

    A line of a table is the same for every checkpoint, so two models in one folder would replace
    each other. The digits are of the weights and of the options that make another model of them. A
    file called model.safetensors, as trainings write it, is known by its folder's name.
    """
    folder = Path("results") / experiment.name
    if any(config.model or config.checkpoint for config in experiment.models.values()):
        return folder
    given = {m.checkpoint for m in with_weights(experiment, weights).models.values()}
    name = next(iter(given), None) if len(given) == 1 else None
    if name is None:
        return folder
    stem, content = name.rpartition(":")[2], name
    if name != "random" and not name.startswith(SHIPPED):
        from mjp_privacy.models.checkpoint_files import file_sha256, located

        path = Path(name).resolve()
        stem = path.parent.name if path.stem in GENERIC_STEMS else path.stem
        content = file_sha256(located(name))
    options = {key: value for key, value in (model or {}).items() if value not in (None, ())}
    text = json.dumps([content, options, gamma], sort_keys=True)
    return folder / f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"


def run_root(out: Path, into: bool) -> Path:
    """The folder given as --out, made if it is not there. Raises for a folder with other things in
    it and no run, somebody's photographs, or a slip; into: unless that is meant."""
    if not (into or any((out / name).exists() for name in OF_A_RUN) or stored_files(out)):
        check_own(out, "mjp attack", do="--into to write beside them")
    return output_folder(out)


def file_of(
    root: Path, experiment: Experiment, listed: Collection[str], *, uploads: bool, add: bool
) -> Path:
    """The file of an experiment in RUN/experiments. UserError where the folder holds others, and
    none that it is, that it adds lines to or that it is a part of, unless it is to be added.

    listed   the keys of the lines that the folder has
    uploads  its lines are those of recorded uploads, which come and go: the name alone counts
    """
    planned = {cell_key(cell, experiment) for cell in expand(experiment)}
    folder = root / "experiments"
    own = folder / f"{NOT_IN_A_FILE_NAME.sub('_', experiment.name)}.yaml"
    known = sorted(folder.glob("*.yaml"), key=lambda path: (path != own, path))
    if not known or (uploads and own in known):
        return own
    differing: list[list[str]] = []
    for path in known:
        try:
            before = load_experiment(path)
        except UserError:  # of another version
            continue
        lines = {cell_key(cell, before) for cell in expand(before)}
        if before.name == experiment.name and (lines >= planned or lines <= planned):
            return path
        differing.append(_differing(_by_line(before), _by_line(experiment)) or ["grid"])
    fits = not uploads and (planned.issuperset(listed) or planned.issubset(listed))
    if not (fits or add):
        nearest = first_of(min(differing, key=len, default=[]), 6)
        raise UserError(
            f"{shown(root)} holds the run of {first_of([shown(p.stem, 60) for p in known], 3)}, "
            f"and {experiment.name!r} as it is given now is another experiment"
            f"{nearest and f' (it differs in {nearest})'}. Expected the same one, or the same with "
            "more lines or fewer: give another --out, or --add to have both in one table."
        )
    digest = hashlib.sha256(json.dumps(sorted(planned)).encode()).hexdigest()[:DIGITS]
    return own.with_stem(f"{own.stem}-{digest}") if own in known else own


def _by_line(experiment: Experiment) -> dict[str, Any]:
    """The fields of an experiment, and in place of the grid what its lines are of."""
    fields = {f.name: getattr(experiment, f.name) for f in dataclasses.fields(experiment)}
    lines = expand(experiment)
    told = {n: {getattr(line, n) for line in lines} for n in ("model", "setting", "gamma")}
    return {name: value for name, value in fields.items() if name != "grid"} | told


def _differing(before: Any, now: Any, place: str = "") -> list[str]:
    """The fields in which two experiments differ: ["client.defenses", "attacks.0.options.ridge"].
    What a run does not keep of a path does not count."""
    if dataclasses.is_dataclass(now) and type(before) is type(now):
        names = [field.name for field in dataclasses.fields(now)]
        before, now = ({name: getattr(one, name) for name in names} for one in (before, now))
    elif isinstance(now, tuple) and isinstance(before, tuple) and len(before) == len(now):
        before, now = dict(enumerate(before)), dict(enumerate(now))
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        both = [(before.get(key), now.get(key), f"{place}.{key}") for key in {**before, **now}]
        return [name for each in both for name in _differing(*each)]
    return [] if before == now or place.endswith(".checkpoint") else [place[1:]]


def write_experiment(
    root: Path, file: Path, experiment: Experiment, made_with: Mapping[str, str | int]
) -> None:
    """Write the complete experiment and the provenance of this command as RUN/experiment.yaml, and
    as its own file of those that filled the folder."""
    fields: dict[str, Any] = TypeAdapter(Experiment).dump_python(experiment, mode="json")
    for model in fields["models"].values():
        if model["checkpoint"]:
            model["checkpoint"] = Path(model["checkpoint"]).name
    content = {"experiment": fields, "made_with": dict(made_with)}
    text = f"# {BLANK_DIGEST}\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True)}"
    for path in (root / "experiment.yaml", file):
        write_with_digest(path, lambda at: at.write_text(text, encoding="utf-8"))
