"""A cell made definite: its model is loaded, its run_id fixed, its table facts written down."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from mjp_privacy.client.config import client_facts, client_identity
from mjp_privacy.data import Preprocessing
from mjp_privacy.experiment.config import AttackConfig, Cell, Experiment
from mjp_privacy.interfaces import Attack, Control
from mjp_privacy.metrics import lpips_backbone
from mjp_privacy.models import ModelCard, Victim

UNRESOLVED = "unresolved"


def cell_key(cell: Cell, experiment: Experiment) -> str:
    """Which line of the table this is, whatever checkpoint fills it."""
    own = {
        "model": cell.model,
        "setting": cell.setting,
        "gamma": cell.gamma,
        "dtype": cell.dtype,
        "attack": _attack_identity(cell.attack),
        "note": None,
        "paper_setting": None,
    }
    client = client_identity(cell.client)
    return _digest({"cell": own, "client": client, "seed": experiment.seed})


def run_id(cell: Cell, experiment: Experiment, model: Victim | None, true_labels: bool) -> str:
    """Hash of the resolved cell, all that decides its rows: no path, no device, no limit.

    The model's label is part of it: a row carries it, so two labels of one checkpoint are two cells
    with rows of their own. Labels of images are not: another label of a finished image is an error.
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
    """A label is part of it where there is one: rows carry it. Of a file given as an option its
    content counts, not its path."""
    content = dataclasses.asdict(attack)
    content["options"] = {name: _content(value) for name, value in attack.options.items()}
    return content if attack.label else {name: content[name] for name in ("name", "options")}


def _content(value: Any) -> Any:
    if isinstance(value, str) and Path(value).is_file():
        return hashlib.sha256(Path(value).read_bytes()).hexdigest()
    return value


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _model_facts(model: Victim | None) -> dict[str, Any]:
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


def cell_facts(
    cell: Cell,
    experiment: Experiment,
    model: Victim | None,
    *,
    true_labels: bool,
    attack: Attack | Control,
    images: int,
    data: str,
    labels: str,
    reason: str = "",
) -> dict[str, Any]:
    """What cells.json holds of a cell: the constant columns of its rows, and its table notes."""
    config = experiment.models[cell.model]
    card = model.card if model else None
    dal = cell.client.dal and model is not None and model.dal_regressor is not None
    notes = [*(card.checkpoint.notes if card else ()), config.note, cell.note]
    return {
        "run_id": run_id(cell, experiment, model, true_labels),
        "cell_key": cell_key(cell, experiment),
        "model": cell.model,
        "checkpoint_sha": card.checkpoint.sha256 if card else "",
        "architecture": card.architecture if card else "",
        "setting": cell.setting,
        "gamma": cell.gamma,
        "attack": cell.attack.title,
        "attack_name": cell.attack.name,
        "role": attack.role if isinstance(attack, Control) else "attack",
        "uploads": 0 if isinstance(attack, Control) else attack.uploads,
        "dtype": cell.dtype,
        "seed": experiment.seed,
        "trained_gamma": card.trained_gamma if card else config.trained_gamma,
        "position_embedding": model.position_embedding if model else "",
        "victim": "intact" if isinstance(attack, Control) else attack.victim,
        "first_block": model.first_block if model else "",
        "engine": str(cell.attack.options.get("engine", "batched")),
        "attack_options": json.dumps(cell.attack.options, sort_keys=True, default=str),
        "mode": cell.client.mode,
        "loss": cell.client.loss,
        "batch": cell.client.batch,
        "dal": dal,
        "dal_lambda": cell.client.dal_lambda if dal else None,
        **client_facts(cell.client),
        "checkpoint": card.checkpoint.source if card else "",
        "size": card.img_size if card else 0,
        "mean": list(card.mean) if card else [],
        "std": list(card.std) if card else [],
        "resize": _preprocessing(card)[0],
        "interpolation": _preprocessing(card)[1],
        "lpips": lpips_backbone(),
        "planned_images": images,
        "paper_row": _paper_row(cell, experiment) if _published(attack) else None,
        "notes": [note for note in notes if note],
        "status": "failed" if reason else "ok",
        "reason": reason,
        "data": data,
        "data_is_papers": experiment.data_is_papers,
        "labels": labels,
        "true_labels": true_labels,
    }


def _published(attack: Attack | Control) -> bool:
    """Whether the paper's figures may stand beside it."""
    return not isinstance(attack, Control) and attack.published


def _preprocessing(card: ModelCard | None) -> tuple[int, str]:
    """Short side before the crop, and the filter; 0 and nothing where no model was loaded."""
    if card is None:
        return 0, ""
    side = Preprocessing(card.img_size, card.resize, card.interpolation).short_side  # type: ignore[arg-type]
    return side, card.interpolation


def _paper_row(cell: Cell, experiment: Experiment) -> dict[str, str] | None:
    paper = experiment.models[cell.model].paper
    if paper is None:
        return None
    return {"model": paper, "setting": cell.paper_setting or cell.setting}
