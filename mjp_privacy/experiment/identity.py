"""Two hashes that identify a cell: `cell_key` its line in a table, `run_id` its rows on disk.

They stay the same from one version to the next, so that a run folder made earlier can be continued.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from mjp_privacy.client.config import client_identity
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.experiment.config import AttackConfig, Cell, Experiment
from mjp_privacy.models import LoadedModel

UNRESOLVED = "unresolved"
OPTION = FileKind("a file that an attack's option names", "Give a smaller file.", 1 << 31)


def cell_key(cell: Cell, experiment: Experiment) -> str:
    """The hash of the cell's line in the table, the same for every checkpoint of its model."""
    identity = {
        "model": cell.model,
        "setting": cell.setting,
        "gamma": cell.gamma,
        "dtype": cell.dtype,
        "attack": _attack_identity(cell.attack),
        "note": None,
        "paper_setting": None,
    }
    client = client_identity(cell.client)
    return _digest({"cell": identity, "client": client, "seed": experiment.seed})


def run_id(cell: Cell, experiment: Experiment, model: LoadedModel | None, true_labels: bool) -> str:
    """The hash of all that decides the cell's rows; paths, the device and a limit do not.

    The model's label is part of it, because rows state it: one checkpoint under two labels makes
    two cells. The labels of images are not: a finished image with another label is an error.
    """
    content: dict[str, Any] = {
        "label": cell.model,
        "model": _model_facts(model),
        "setting": cell.setting,
        "gamma": cell.gamma,
        "attack": _attack_identity(cell.attack),
        "dtype": cell.dtype,
        "seed": experiment.seed,
        "client": client_identity(cell.client),
        "block": experiment.block,
        "true_labels": true_labels,
    }
    if model is None:
        content["model"] = UNRESOLVED
    return _digest(content)


def _attack_identity(attack: AttackConfig) -> dict[str, Any]:
    """The attack's name and options, and its label if it has one, because rows state the label.

    A file that is given as an option enters by its content, not by its path.
    """
    content = dataclasses.asdict(attack)
    del content["seconds"]  # rows within it are those that the attack makes without it
    content["options"] = {name: _content(value) for name, value in attack.options.items()}
    return content if attack.label else {name: content[name] for name in ("name", "options")}


def _content(value: Any) -> Any:
    if isinstance(value, str) and is_there(Path(value)) and Path(value).is_file():
        return OPTION.sha256(Path(value))
    return value


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _model_facts(model: LoadedModel | None) -> dict[str, Any]:
    if model is None:
        return {}
    card = model.card
    return {
        "name": card.name,
        "architecture": card.architecture,
        "classes": card.num_classes,
        "sha256": card.checkpoint.sha256,
        "filled": card.checkpoint.notes,
        "pixels": (card.img_size, card.resize, card.interpolation, card.mean, card.std),
        "position_embedding": model.position_embedding,
        "unknown_embedding": model.unk_embed is not None,
        "index_embedding": model.index_embed is not None,
        "dal": model.dal_kind,
    }
