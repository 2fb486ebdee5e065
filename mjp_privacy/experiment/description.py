"""Describes a cell: collects its facts from the config and, once it is loaded, from its model."""

from __future__ import annotations

import json
from typing import Any

from mjp_privacy.data import Preprocessing
from mjp_privacy.experiment.cell_facts import (
    AttackFacts,
    CellFacts,
    ClientFacts,
    CommandFacts,
    ModelFacts,
    OutcomeFacts,
)
from mjp_privacy.experiment.config import Cell, Experiment
from mjp_privacy.experiment.identity import cell_key, run_id
from mjp_privacy.experiment.source import UploadSource
from mjp_privacy.interfaces import Attack, Control
from mjp_privacy.metrics import lpips_backbone
from mjp_privacy.models import LoadedModel


def describe(
    cell: Cell,
    experiment: Experiment,
    attack: Attack | Control,
    source: UploadSource,
    model: LoadedModel | None,
    reason: str = "",
) -> CellFacts:
    """The facts of a cell, as cells.json and its rows state them.

    model   None if it is not loaded
    reason  why not
    """
    records = source.records(cell.model)
    true_labels = all(record.label is not None for record in records)
    notes = [experiment.models[cell.model].note, cell.note]
    if model is not None:
        notes = [*model.card.checkpoint.notes, *notes]
    return CellFacts(
        model=_model_facts(cell, experiment, model),
        attack=_attack_facts(cell, experiment, attack),
        setting=cell.setting,
        gamma=cell.gamma,
        dtype=cell.dtype,
        seed=experiment.seed,
        client=ClientFacts.of(
            cell.client, localizes=model is not None and model.dal_regressor is not None
        ),
        outcome=OutcomeFacts(
            run_id=run_id(cell, experiment, model, true_labels),
            cell_key=cell_key(cell, experiment),
            planned_images=len(records),
            notes=tuple(note for note in notes if note),
            status="failed" if reason else "ok",
            reason=reason,
        ),
        command=CommandFacts(
            data=source.data,
            data_is_papers=experiment.data_is_papers,
            labels=source.labels,
            true_labels=true_labels,
            lpips=lpips_backbone(),
        ),
        other=source.columns(cell.model),
    )


def _model_facts(cell: Cell, experiment: Experiment, model: LoadedModel | None) -> ModelFacts:
    """Facts of the model; most are empty until its checkpoint was read."""
    if model is None:
        return ModelFacts(
            label=cell.model,
            checkpoint_sha="",
            architecture="",
            trained_gamma=experiment.models[cell.model].trained_gamma,
            position_embedding="",
            first_block="",
            checkpoint="",
            size=0,
            mean=(),
            std=(),
            resize=0,
            interpolation="",
        )
    card = model.card
    crop = Preprocessing(card.img_size, card.resize, card.interpolation)  # type: ignore[arg-type]
    return ModelFacts(
        label=cell.model,
        checkpoint_sha=card.checkpoint.sha256,
        architecture=card.architecture,
        trained_gamma=card.trained_gamma,
        position_embedding=model.position_embedding,
        first_block=model.first_block,
        checkpoint=card.checkpoint.source,
        size=card.img_size,
        mean=card.mean,
        std=card.std,
        resize=crop.short_side,
        interpolation=card.interpolation,
    )


def _attack_facts(cell: Cell, experiment: Experiment, attack: Attack | Control) -> AttackFacts:
    shared: dict[str, Any] = {
        "title": cell.attack.title,
        "name": cell.attack.name,
        "engine": str(cell.attack.options.get("engine", "batched")),
        "options": json.dumps(cell.attack.options, sort_keys=True, default=str),
    }
    if isinstance(attack, Control):
        return AttackFacts(role=attack.role, uploads=0, victim="intact", **shared)
    paper = experiment.models[cell.model].paper if attack.published else None
    setting = cell.paper_setting or cell.setting
    return AttackFacts(
        uploads=attack.uploads,
        victim=attack.victim,
        paper_row=None if paper is None else {"model": paper, "setting": setting},
        **shared,
    )
