"""The way in: from a config and images, or from recorded uploads, to a finished run folder.

`run_experiment` simulates the clients, `attack_uploads` reads recorded uploads; they differ only in
the source of uploads that they order work for (`execution`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mjp_privacy.client.recorded.examined import check_some, examine
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.groups import group_uploads
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder
from mjp_privacy.data import open_images
from mjp_privacy.data.places import keep_apart
from mjp_privacy.experiment.chosen_images import chosen_images
from mjp_privacy.experiment.conditions import decided
from mjp_privacy.experiment.config import Experiment
from mjp_privacy.experiment.config_files import check_attacks, load_experiment
from mjp_privacy.experiment.engines.devices import devices
from mjp_privacy.experiment.engines.options import EngineConfig, engine_config, threads_of
from mjp_privacy.experiment.execution import Order, RunSummary
from mjp_privacy.experiment.job import Job
from mjp_privacy.experiment.other_code import Stale, check_stale
from mjp_privacy.experiment.overrides import with_changes
from mjp_privacy.experiment.recorded import Recorded, recorded_experiment
from mjp_privacy.experiment.simulated import Simulated

__all__ = ["EngineConfig", "RunSummary", "attack_uploads", "run_experiment"]


def run_experiment(
    config: str | Path | Mapping[str, Any] | Experiment,
    *,
    images: str | Path | None = None,
    out: str | Path,
    weights: Sequence[str] | Mapping[str, str | Path] = (),
    labels: str | Path | None = None,
    limit: int | None = None,
    gamma: float | None = None,
    model: Mapping[str, Any] | None = None,
    attack_seconds: float | None = None,
    device: str = "auto",
    stale: Stale = "ask",
    engine: EngineConfig | str | None = None,
) -> RunSummary:
    """Attack every image in every cell. Called again, it does only what is not finished yet.

    run_experiment("configs/demo.yaml", images="embedded", out="results/demo", limit=2)

    config   a YAML file, a mapping or an Experiment
    images   a folder, a zip, or "embedded"; None: what the config says
    weights  "PATH", "NAME=PATH" or {NAME: PATH}: checkpoints of the config's models
    limit    number of images: a seeded subset spread over the classes, part of any larger one; a
             file that is no image is a failure, and another one is taken in its place
    gamma    shuffle ratio of all cells in settings b and c; None: what the config says
    model    fields of `ModelConfig` for all models: {"img_size": 192, "mean": (0.5,)}
    attack_seconds  how long an attack may take over one image; None: what the config says
    stale    what to do with finished images whose attack or defence has other code now: "ask", that
             is stop and name the files that changed; "fresh": make them again; "keep" them
    engine   who does the work: None, this process; "local", "ray" or "slurm"; the YAML file of a
             site; or an EngineConfig, such as EngineConfig(kind="local", workers=2)
    """
    check_stale(stale)
    if isinstance(weights, Mapping):
        weights = [f"{name}={path}" for name, path in weights.items()]
    experiment = with_changes(
        load_experiment(config),
        weights=weights,
        gamma=gamma,
        model=model,
        attack_seconds=attack_seconds,
    )
    check_attacks(experiment.attacks, experiment.name)
    if not experiment.grid:
        raise UserError(
            f"The config {experiment.name!r} holds no models: expected `models` and `grid`, or "
            "--uploads DIR to attack recorded uploads."
        )
    path = images if images is not None else experiment.images
    if path is None:
        raise UserError("No images given: expected --images PATH (a folder, a zip or 'embedded').")
    experiment, remarks = decided(experiment)
    opened = open_images(path, labels)
    chosen, passed_over = chosen_images(opened, experiment, limit)
    workers = _workers(engine)
    here, there = devices(device, workers)
    source = Simulated(experiment, opened, chosen, here)
    source.check_models()
    keep_apart(out, {"--images": path, "--labels": labels})
    root = output_folder(Path(out))
    job = _job(
        experiment,
        root,
        there,
        stale,
        workers,
        images=str(path),
        labels=None if labels is None else str(labels),
        chosen=tuple(record.image_id for record in chosen),
    )
    return Order(root, job, source, workers, stale, len(chosen), remarks, passed_over).execute()


def attack_uploads(
    experiment: Experiment,
    folder: str | Path,
    out: str | Path,
    *,
    limit: int | None = None,
    attack_seconds: float | None = None,
    device: str = "auto",
    stale: Stale = "ask",
    engine: EngineConfig | str | None = None,
) -> RunSummary:
    """Attack every recorded upload of a folder. Called again, it does only what is not finished.

    attack_uploads(load_experiment("configs/uploads.yaml"), "results/quick/uploads", "results/out")

    experiment  names the attacks; models and clients are those of the uploads
    limit       number of images for each line of the table; at least one step of a client is read
    stale       as in `run_experiment`; a defence's code does not count, for it ran before
    engine      as in `run_experiment`
    """
    check_stale(stale)
    experiment = with_changes(experiment, attack_seconds=attack_seconds)
    check_attacks(experiment.attacks, experiment.name)
    uploads = UploadFolder(Path(folder))
    examined = examine(uploads)
    check_some(examined, uploads)
    groups = {group.name: group for group in group_uploads(examined.sound, limit)}
    images = len({record.image_id for group in groups.values() for record in group.records})
    root = output_folder(Path(out))
    workers = _workers(engine)
    here, there = devices(device, workers)
    source = Recorded(Path(folder), groups, here, examined.reasons)
    named = recorded_experiment(experiment, groups, examined.reasons)
    paths: dict[str, Any] = {"uploads": str(folder), "limit": limit, "refused": examined.reasons}
    job = _job(named, root, there, stale, workers, **paths)
    remarks = examined.remarks
    return Order(root, job, source, workers, stale, images, remarks).execute()


def _workers(engine: EngineConfig | str | None) -> EngineConfig:
    """Who works, from whatever a caller gives as `engine`."""
    return engine if isinstance(engine, EngineConfig) else engine_config(engine, {})


def _job(
    experiment: Experiment,
    root: Path,
    device: torch.device,
    stale: Stale,
    workers: EngineConfig,
    **paths: Any,
) -> Job:
    """The run as its workers know it.

    device: theirs; paths: the fields of `Job` that say where images or uploads are
    """
    here = workers.kind == "here"
    threads = torch.get_num_threads() if here else threads_of(workers, device.type == "cuda")
    folder = str(Path.cwd())
    again = stale == "fresh"
    return Job(str(root.resolve()), experiment, str(device), threads, again, folder, **paths)
