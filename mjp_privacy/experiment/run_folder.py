"""Where a run goes if no folder is given.

    results/NAME                  for a config that names its models
    results/NAME/WEIGHTS          for one whose models are whatever the weights are, such as `own`
    results/NAME/WEIGHTS-1f09c3   the same where that folder holds runs of another model

Lines of a table are the same for every checkpoint, so two models in one folder would replace each
other. The six digits are a digest of what makes a model another one: the same command finds its own
folder again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.config import Experiment, expand
from mjp_privacy.experiment.overrides import decided, with_changes, with_weights
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models import load_model

SHIPPED = ("packaged:", "timm:")
GENERIC_STEMS = ("model", "pytorch_model", "open_clip_model")  # names that all weights have
DIGITS = 6

ModelKey = tuple[str, str, str, int, tuple[float, ...], tuple[float, ...]]
"""A model's label, checkpoint sha256, architecture, image size, mean and std."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, and a sentence if it is another one than the weights' name says."""

    path: Path
    remark: str = ""


def run_folder(
    experiment: Experiment,
    weights: Sequence[str] = (),
    *,
    gamma: float | None = None,
    model: Mapping[str, Any] | None = None,
) -> RunFolder:
    """The folder of a command that gives none: an experiment and what the command line changes.

    run_folder(load_experiment("own"), ["vit.safetensors"]).path  # results/own/vit

    A file called model.safetensors, as trainings write it, is known by its folder's name.
    """
    plain = _named_after(experiment, weights)
    if plain == Path("results") / experiment.name:
        return RunFolder(plain)
    held = _models_in(plain)
    siblings = list(plain.parent.glob(f"{plain.name}-{'[0-9a-f]' * DIGITS}"))
    if not (held or siblings):
        return RunFolder(plain)
    changed = with_changes(experiment, weights=weights, gamma=gamma, model=model)
    models, gammas = _models_of(changed), _gammas_of(changed)
    text = json.dumps([sorted(models), sorted(gammas)])
    own = plain.with_name(f"{plain.name}-{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}")
    if own in siblings:
        return RunFolder(own, f"this run's folder is {own}; {plain} was that of another model")
    if not held or (held <= models and gammas <= _gammas_in(plain)):
        return RunFolder(plain)
    return RunFolder(
        own, f"{plain} holds another model or gamma ({_described(plain)}): this run goes to {own}"
    )


def _named_after(experiment: Experiment, weights: Sequence[str]) -> Path:
    """results/NAME, or results/NAME/WEIGHTS where only the weights say what the models are."""
    folder = Path("results") / experiment.name
    if any(model.model or model.checkpoint for model in experiment.models.values()):
        return folder
    checkpoints = {m.checkpoint for m in with_weights(experiment, tuple(weights)).models.values()}
    name = next(iter(checkpoints), None) if len(checkpoints) == 1 else None
    if name is None:
        return folder
    if name.startswith(SHIPPED):
        return folder / name.partition(":")[2]
    path = Path(name).resolve()
    return folder / (path.parent.name if path.stem in GENERIC_STEMS else path.stem)


# what is to be run --------------------------------------------------------------------------------


def _models_of(experiment: Experiment) -> set[ModelKey]:
    """The experiment's models, loaded one after the other, for only then all of this is known."""
    keys: set[ModelKey] = set()
    for label, config in experiment.models.items():
        card = load_model(config.model, **config.loading()).card
        sha = card.checkpoint.sha256
        keys.add((label, sha, card.architecture, card.img_size, card.mean, card.std))
    return keys


def _gammas_of(experiment: Experiment) -> set[float]:
    return {cell.gamma for cell in expand(decided(experiment)[0]) if cell.gamma}


# what a folder holds ------------------------------------------------------------------------------


def _models_in(folder: Path) -> set[ModelKey]:
    """The models that a run of this folder opened; empty for a folder that holds none."""
    return {
        (m.label, m.checkpoint_sha, m.architecture or "", m.size or 0, m.mean or (), m.std or ())
        for m in (facts.model for facts in _cells_in(folder))
        if m.checkpoint_sha
    }


def _gammas_in(folder: Path) -> set[float]:
    return {facts.gamma for facts in _cells_in(folder) if facts.gamma}


def _described(folder: Path) -> str:
    """Its models and the gammas of its cells: vit.safetensors, sha256 1f09…, 56 px, gamma 0.27."""
    models = [facts.model for facts in _cells_in(folder) if facts.model.checkpoint_sha]
    words = [f"{m.checkpoint}, sha256 {str(m.checkpoint_sha)[:12]}, {m.size} px" for m in models]
    words += [f"gamma {gamma:g}" for gamma in sorted(_gammas_in(folder))]
    return ", ".join(dict.fromkeys(words))


def _cells_in(folder: Path) -> list[CellFacts]:
    try:
        return [CellFacts.read(columns) for columns in RunStore(folder).read_cells()]
    except UserError:
        return []
