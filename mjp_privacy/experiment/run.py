"""The way in: from a config and images, or from recorded uploads, to a finished run folder.

    source of uploads -> make_plan (`plan`) -> work (`work`) -> Saver.save (`save`)

`run_experiment` simulates the clients, `attack_uploads` reads recorded uploads; they differ only in
the source that they hand to `_execute`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.groups import group_uploads
from mjp_privacy.core.device import pick_device
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder
from mjp_privacy.core.lock import locked
from mjp_privacy.core.progress import RunProgress
from mjp_privacy.data import open_images
from mjp_privacy.experiment.applicability import Forecast, Refusals, forecast
from mjp_privacy.experiment.block import ImageNote
from mjp_privacy.experiment.chosen_images import chosen_images
from mjp_privacy.experiment.conditions import decided
from mjp_privacy.experiment.config import Experiment
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.description import describe
from mjp_privacy.experiment.failures import Failure, failure_lines, failures_of
from mjp_privacy.experiment.finished import Finished
from mjp_privacy.experiment.inventory import Inventory
from mjp_privacy.experiment.other_code import (
    Stale,
    check_stale,
    code_of_cells,
    kept_cells,
    refuse_other_code,
)
from mjp_privacy.experiment.overrides import with_changes
from mjp_privacy.experiment.plan import Plan, make_plan
from mjp_privacy.experiment.provenance import provenance, write_provenance
from mjp_privacy.experiment.recorded import Recorded, recorded_experiment
from mjp_privacy.experiment.replaced import replaced_cells
from mjp_privacy.experiment.save import Saver
from mjp_privacy.experiment.simulated import Simulated
from mjp_privacy.experiment.source import UploadSource
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.work import (
    BlockResult,
    BlockSkipped,
    ModelOpened,
    Result,
    work,
)

__all__ = ["RunSummary", "attack_uploads", "run_experiment"]

NOT_RUN = "not run yet: the run ended before this cell; run the same command again"


@dataclass(frozen=True)
class RunSummary:
    """How a run ended: its folder, its size, and what failed or did not apply."""

    out: Path
    cells: int
    images: int
    failures: tuple[str, ...]  # one for each model, image, or image in a model and setting
    inapplicable: tuple[str, ...] = ()  # why attacks were refused, with the number of images
    failed_because: tuple[str, ...] = ()  # the failures by reason, each reason once
    of_other_code: int = 0  # number of cells with kept results that other code made
    unrecorded: int = 0  # and of those with results of code that was not recorded

    @property
    def exit_code(self) -> int:
        """0 if everything was done, 3 if some image or cell failed."""
        return 3 if self.failures else 0


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
    device: str = "auto",
    stale: Stale = "ask",
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
    stale    what to do with finished images whose attack or defence has other code now: "ask", that
             is stop and name the files that changed; "fresh": make them again; "keep" them
    """
    check_stale(stale)
    if isinstance(weights, Mapping):
        weights = [f"{name}={path}" for name, path in weights.items()]
    experiment = with_changes(load_experiment(config), weights=weights, gamma=gamma, model=model)
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
    source = Simulated(experiment, opened, chosen, pick_device(device))
    root = output_folder(Path(out))
    return _execute(
        experiment, source, len(chosen), root, source.device, stale, remarks, passed_over
    )


def attack_uploads(
    experiment: Experiment,
    folder: str | Path,
    out: str | Path,
    *,
    limit: int | None = None,
    device: str = "auto",
    stale: Stale = "ask",
) -> RunSummary:
    """Attack every recorded upload of a folder. Called again, it does only what is not finished.

    attack_uploads(load_experiment("configs/uploads.yaml"), "results/quick/uploads", "results/out")

    experiment  names the attacks; models and clients are those of the uploads
    limit       number of images for each line of the table; at least one step of a client is read
    stale       as in `run_experiment`; a defence's code does not count, for it ran before
    """
    check_stale(stale)
    uploads = UploadFolder(Path(folder)).entries()
    groups = {group.name: group for group in group_uploads(uploads, limit)}
    images = len({record.image_id for group in groups.values() for record in group.records})
    root = output_folder(Path(out))
    source = Recorded(Path(folder), groups, pick_device(device))
    named = recorded_experiment(experiment, groups)
    return _execute(named, source, images, root, source.device, stale)


def _execute(
    experiment: Experiment,
    source: UploadSource,
    images: int,
    root: Path,
    device: torch.device,
    stale: Stale,
    remarks: Sequence[str] = (),
    passed_over: Sequence[ImageNote] = (),
) -> RunSummary:
    """Plan, work and save; a lock keeps other processes out of the folder.

    remarks      what is said at the start about the experiment
    passed_over  files that are no images and are left out of the plan: failures without rows
    """
    with locked(root):
        store = RunStore(root)
        plan = make_plan(experiment, source)
        inventory = Inventory(store)
        absent = source.check(inventory)
        codes = code_of_cells(plan, with_defenses=isinstance(source, Simulated))
        finished = Finished(store, again=stale == "fresh")
        if stale == "ask":
            refuse_other_code(plan, source, codes, finished)
        write_provenance(store, experiment, device)
        planned = [
            describe(cell, experiment, plan.attacks[cell], source, None, NOT_RUN)
            for cell in plan.cells
        ]
        saver = Saver(store, inventory, planned, device, tuple(codes.values()))
        saver.begin()
        if passed_over:
            inventory.note(passed_over)
        failures = [Failure(note.reason, image=note.record.image_id) for note in passed_over]
        refusals = Refusals()
        kept: set[str] = set()  # run_ids of cells that hold results of other code
        unrecorded: set[str] = set()  # and of code that was not recorded
        with RunProgress(plan.units, root / "log.jsonl") as progress:
            _say_start(progress, plan, images, store, device, absent)
            foreseen = forecast(plan, source)
            _say_foreseen(progress, remarks, foreseen)
            for result in work(plan, source, finished, codes):
                if isinstance(result, ModelOpened) and (lost := replaced_cells(store, result)):
                    progress.say(lost)
                saver.save(result)
                _say(progress, result, foreseen)
                failures += failures_of(result)
                refusals.add(result)
                if isinstance(result, BlockSkipped):
                    kept |= result.of_other_code.keys()
                    unrecorded |= result.unrecorded.keys()
            if said := kept_cells(kept, unrecorded, plan):
                progress.say(said)
    each = tuple(dict.fromkeys(map(str, failures)))
    counts = refusals.lines(), failure_lines(failures), len(kept), len(unrecorded)
    return RunSummary(root, len(plan.cells), images, each, *counts)


# what a person sees -------------------------------------------------------------------------------


def _say_start(
    progress: RunProgress,
    plan: Plan,
    images: int,
    store: RunStore,
    device: torch.device,
    absent: Sequence[str],
) -> None:
    """Log the command's versions and machine; warn of another number of threads than before, and
    of images that are gone."""
    facts = provenance(device)
    progress.say(
        f"{images} images, {len(plan.cells)} cells, {facts['threads']} thread(s) on {device}",
        images=images,
        **facts,
    )
    timed = store.read_timings()
    earlier = set(timed["threads"]) if "threads" in timed else set()
    if earlier - {facts["threads"]}:
        progress.say(
            f"earlier parts of this run had {sorted(earlier)} thread(s): float32 scores of "
            "APRIL depend slightly on their number, float64 ones do not"
        )
    if absent:
        progress.say(
            f"{len(absent)} image(s) of this run folder are no longer among the images that were "
            f"given ({absent[0]}, …); their rows stay in its tables"
        )


def _say_foreseen(progress: RunProgress, remarks: Sequence[str], foreseen: Forecast) -> None:
    """Say what does not apply and which models fail, before anything is computed."""
    for remark in remarks:
        progress.say(remark)
    for model, reason in foreseen.unopened.items():
        progress.say(f"{model}: FAILED. {reason}")
    for line in foreseen.lines:
        progress.say(f"not applicable: {line}")


def _say(progress: RunProgress, result: Result, foreseen: Forecast) -> None:
    if isinstance(result, BlockSkipped):
        progress.skip(
            result.units, sum(result.of_other_code.values()), sum(result.unrecorded.values())
        )
    elif isinstance(result, BlockResult):
        facts = result.facts
        progress.advance(result.units, f"{facts.model.label} {facts.setting} {facts.dtype}")
    elif isinstance(result, ModelOpened) and result.reason != foreseen.unopened.get(result.model):
        _say_model(progress, result)


def _say_model(progress: RunProgress, opened: ModelOpened) -> None:
    report, name = opened.report, opened.model
    if report is None:
        progress.say(f"{name}: FAILED. {opened.reason}")
        return
    notes = "; ".join(report.notes) or "complete"
    progress.say(
        f"{name}: {report.source} ({report.layout}), sha256 {report.sha256[:12]}, {notes}",
        missing=report.missing,
        unexpected=report.unexpected,
        beside=report.beside,
    )
    if report.unexpected:
        progress.say(f"{name}: tensors of the checkpoint not used: {', '.join(report.unexpected)}")
