"""What the command line changes in an experiment: one gamma for all, checkpoints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from mjp_privacy.client.config import ClientConfig, client_identity
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.experiment.config import Experiment, GridEntry, attacks_of, client_fields


def with_gamma(experiment: Experiment, gamma: float) -> Experiment:
    """The same experiment with one shuffle ratio for every b and c; cells that become equal, once.

    An entry a model and setting, so that the order of the table stays.
    """
    if not 0.0 <= gamma <= 1.0:
        raise UserError(f"--gamma is a share of the patches, 0 to 1; got {gamma}.")
    grid: list[GridEntry] = []
    seen: set[tuple[str, ...]] = set()
    for entry in experiment.grid:
        names = [attack.title for attack in attacks_of(entry, experiment)]
        client = ClientConfig(**client_fields(entry, experiment))
        given = json.dumps(client_identity(client), sort_keys=True)
        for model in entry.models:
            for setting in entry.settings:
                new = tuple(name for name in names if (model, setting, name, given) not in seen)
                seen.update((model, setting, name, given) for name in new)
                if new:
                    note, paper = entry.note, entry.paper_setting
                    one = ((model,), (setting,), (gamma,), new, paper, note, entry.client)
                    grid.append(GridEntry(*one))
    return dataclasses.replace(experiment, grid=tuple(grid))


def with_weights(experiment: Experiment, weights: tuple[str, ...]) -> Experiment:
    """`PATH` for all models, or `NAME=PATH` for one, whose own goes first in any order."""
    models = experiment.models
    given: dict[str | None, str] = {}
    for item in weights:
        name = _model_of(item, list(models))
        path = item if name is None else item.removeprefix(f"{name}=")
        if not path or name in given:
            came = "two" if name in given else "none"
            raise UserError(
                f"--weights: expected one checkpoint for {name or 'all models'}, got {came}. "
                "Write PATH, or NAME=PATH, once for each model."
            )
        given[name] = path
    replaced = {}
    for label, config in models.items():
        checkpoint = given.get(label) or given.get(None) or config.checkpoint
        replaced[label] = dataclasses.replace(config, checkpoint=checkpoint)
    return dataclasses.replace(experiment, models=replaced)


def _model_of(item: str, labels: list[str]) -> str | None:
    """The model that `NAME=PATH` names; None for a `PATH`. Both may hold further '='."""
    named = [label for label in labels if item.startswith(f"{label}=")]
    if named:
        return max(named, key=len)
    if "=" not in item or Path(item).exists():
        return None
    unknown = unknown_name("model", item.partition("=")[0], labels)
    raise UserError(f"--weights {item}: no such file, and as NAME=PATH: {unknown}")
