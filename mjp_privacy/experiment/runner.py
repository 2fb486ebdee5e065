"""The way in: an experiment, images and a folder to a finished run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mjp_privacy.core.device import pick_device
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder
from mjp_privacy.core.lock import locked
from mjp_privacy.data import ImageRecord, ImageSource, open_images, spread_subset
from mjp_privacy.experiment.config import Experiment
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.overrides import with_gamma, with_weights
from mjp_privacy.experiment.run import Run, RunSummary
from mjp_privacy.experiment.store import RunStore

__all__ = ["RunSummary", "pick_device", "run_experiment"]


def run_experiment(
    config: str | Path | Mapping[str, Any] | Experiment,
    *,
    images: str | Path | None = None,
    out: str | Path,
    weights: Sequence[str] | Mapping[str, str | Path] = (),
    labels: str | Path | None = None,
    limit: int | None = None,
    gamma: float | None = None,
    device: str = "auto",
) -> RunSummary:
    """Attack every image in every cell; the same call again goes on or finds nothing to do.

    config   a YAML file, a mapping or an Experiment
    images   a folder, a zip, or "embedded"; None: what the config says
    weights  "PATH", "NAME=PATH" or {NAME: PATH}: checkpoints of the config's models
    limit    a seeded, nested subset spread over the classes
    """
    experiment = load_experiment(config)
    if gamma is not None:
        experiment = with_gamma(experiment, gamma)
    if isinstance(weights, Mapping):
        weights = [f"{name}={path}" for name, path in weights.items()]
    experiment = with_weights(experiment, tuple(weights))
    if not experiment.grid:
        raise UserError(
            f"The config {experiment.name!r} holds no models: expected `models` and `grid`, or "
            "--uploads DIR to attack recorded uploads."
        )
    path = images if images is not None else experiment.images
    if path is None:
        raise UserError("No images given: expected --images PATH (a folder, a zip or 'embedded').")
    source = open_images(path, labels)
    records = spread_subset(_chosen(source, experiment), limit, experiment.seed)
    place = pick_device(device)
    store = RunStore(output_folder(Path(out)))
    with locked(store.root):
        return Run(experiment, source, records, store, place).execute()


def _chosen(source: ImageSource, experiment: Experiment) -> tuple[ImageRecord, ...]:
    """The images of the experiment's classes; all where they carry no labels."""
    choice = experiment.classes
    if choice is None:
        return source.records
    chosen = tuple(r for r in source.records if r.label is None or choice.holds(r.label))
    if not chosen:
        raise UserError(
            f"None of the {len(source.records)} images of {source.path} has a class index that "
            f"leaves {', '.join(map(str, choice.remainders))} when divided by {choice.modulo} "
            "(the config's `classes`). Give images of these classes, or take `classes` out."
        )
    return chosen
