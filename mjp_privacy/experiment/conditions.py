"""Decides the conditions in an experiment's grid by what its models are, before cells are made.

    only_with: unknown_embedding   leaves out models that cannot mask
    trained_gamma: true            takes the shuffle ratio that a model was trained with

Only the headers of weights are read (`models.outline`).
"""

from __future__ import annotations

import dataclasses

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import Experiment, GridEntry, ModelConfig, attacks_of
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.outline import check_names, outline_model


def decided(experiment: Experiment) -> tuple[Experiment, tuple[str, ...]]:
    """The experiment without conditions, and a sentence for each thing that they decided.

    A model of an unknown name is a UserError, and so is one that a condition depends on and that
    cannot be read.
    """
    _check_model_names(experiment)
    outlines = Outlines(experiment)
    grid: list[GridEntry] = []
    left_out: dict[str, list[str]] = {}  # attacks that are left out, by model
    remarks: dict[str, None] = {}  # an ordered set
    for entry in experiment.grid:
        if entry.only_with is None and not entry.trained_gamma:
            grid.append(entry)
            continue
        for model in entry.models:
            outline = outlines[model]
            if entry.only_with == "unknown_embedding" and outline.unk_embed is None:
                titles = [attack.title for attack in attacks_of(entry, experiment)]
                left_out.setdefault(model, []).extend(titles)
                continue
            alone = dataclasses.replace(entry, models=(model,), only_with=None, trained_gamma=False)
            trained = outline.card.trained_gamma
            if entry.trained_gamma and trained:
                alone = dataclasses.replace(alone, gammas=(trained,))
                remark = f"{model}: gamma {trained:g}, as it was trained; --gamma replaces it"
                remarks[remark] = None
            grid.append(alone)
    for model, titles in left_out.items():
        kept = {a.title for e in grid if model in e.models for a in attacks_of(e, experiment)}
        gone = ", ".join(title for title in dict.fromkeys(titles) if title not in kept)
        remarks[
            f"{model}: no unknown embedding (E_unk), so it cannot mask and its lines under MJP are "
            f"left out ({gone or 'of attacks that run without it'}); configs/ladder_vit.yaml runs "
            "a plain model as an MJP client"
        ] = None
    if not grid:
        raise UserError(
            f"Nothing is left of the grid of {experiment.name!r}: {'; '.join(remarks)}. Expected a "
            "model that has what the grid's `only_with` asks for."
        )
    return dataclasses.replace(experiment, grid=tuple(grid)), tuple(remarks)


def _check_model_names(experiment: Experiment) -> None:
    """Raise for a model whose name nobody knows, with the nearest one."""
    for label, model in experiment.models.items():
        try:
            check_names(model.model, model.checkpoint)
        except UserError as error:
            raise UserError(f"models.{label}: {error}") from error


class Outlines(dict[str, LoadedModel]):
    """Outlines of an experiment's models by label, each made when it is first asked for."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        self.models = experiment.models

    def __missing__(self, label: str) -> LoadedModel:
        config: ModelConfig = self.models[label]
        self[label] = outline_model(config.model, whole=True, **config.loading())
        return self[label]
