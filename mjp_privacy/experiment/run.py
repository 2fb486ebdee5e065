"""The way in: from a config and images, or from recorded uploads, to a finished run folder.

`run_experiment` simulates the clients, `attack_uploads` reads recorded uploads; they differ only in
the source of uploads. Both look at the folder, plan, have the work done here (`work`) or by an
engine (`engines`), and tell what happens. Nobody else writes what is about the whole run.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from mjp_privacy.core.errors import StorageError, UserError
from mjp_privacy.core.files import lock
from mjp_privacy.core.machine import one_thread, out_of_memory
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.stop import interrupted
from mjp_privacy.core.text import counted, first_of, shown
from mjp_privacy.data import open_images
from mjp_privacy.data.images import keep_apart
from mjp_privacy.experiment.cell_facts import CellFacts, describe
from mjp_privacy.experiment.code import Stale, check_stale, differences
from mjp_privacy.experiment.config import Cell, Experiment, check_attacks, load_experiment
from mjp_privacy.experiment.engines.options import (
    EngineConfig,
    devices,
    engine_config,
    settled,
    visible_gpus,
    workers_here,
)
from mjp_privacy.experiment.engines.tasks import Coordinator, Engine, Job, LocalEngine, Task
from mjp_privacy.experiment.overrides import check_models, decided, with_changes
from mjp_privacy.experiment.recorded import Recorded
from mjp_privacy.experiment.run_folder import LOG, file_of, run_root, write_experiment
from mjp_privacy.experiment.simulated import Simulated
from mjp_privacy.experiment.source import UploadSource
from mjp_privacy.experiment.store import NOT_DONE, CellList, NoRun, RunStore
from mjp_privacy.experiment.work import News, OpenModel, Worker
from mjp_privacy.uploads.folder import REFUSED, examine

__all__ = ["EngineConfig", "RunSummary", "attack_uploads", "run_experiment"]

NOT_RUN = "not run yet: the run ended before this cell; run the same command again"
NAMED = 10  # damaged files that are called by their names
PLACES = 3  # places of failures of one reason that are


@torch.inference_mode(False)
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
    into: bool = False,
    add: bool = False,
) -> RunSummary:
    """Attack every image in every cell. Called again, it does only what is not finished yet.

    run_experiment("configs/demo.yaml", images="embedded", out="results/demo", limit=2)

    config   a YAML file, a mapping or an Experiment
    images   a folder, a zip, or "embedded"; None: what the config says
    weights  "PATH", "NAME=PATH" or {NAME: PATH}: checkpoints of the config's models
    limit    number of images: a seeded subset spread over the classes, part of any larger one; a
             file that is no image, or is smaller than a model's patch, is a failure, and another
             one is taken in its place
    gamma    shuffle ratio of all cells in settings b and c; None: what the config says
    model    fields of `ModelConfig` for all models: {"img_size": 192, "mean": (0.5,)}
    attack_seconds  how long an attack may take over one image; None: what the config says
    stale    what to do with finished images whose attack or defence has other code now: "ask", that
             is stop and name the files that changed; "fresh": make them again; "keep" them
    engine   who does the work: None or "here", this process; "local", "ray" or "slurm"; the YAML
             file of a site; or an EngineConfig, such as EngineConfig(kind="local", workers=2).
             Whoever does it works with one thread, and makes the same rows
    into     whether `out` may hold other files and no run
    add      whether it may hold another experiment, with which this one shares a table then
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
    check_models(experiment, experiment.name)
    experiment, remarks = decided(experiment)
    opened = open_images(path, labels)
    workers = engine_config(engine)
    here, there = devices(device, workers)
    source = Simulated(experiment, opened, (), here)
    source.choose(limit)
    source.check_models()
    source.check_withheld()
    keep_apart(out, {"--images": path, "--labels": labels})
    root = run_root(Path(out), into)
    places: dict[str, Any] = {
        "images": str(path),
        "labels": None if labels is None else str(labels),
        "chosen": tuple(record.image_id for record in source.chosen),
    }
    job = Job.of(experiment, root, there, stale, **places)
    return Run(root, job, source, workers, add, remarks).run()


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
    into: bool = False,
    add: bool = False,
) -> RunSummary:
    """Attack every recorded upload of a folder. Called again, it does only what is not finished.

    attack_uploads(load_experiment("configs/uploads.yaml"), "results/quick/uploads", "results/out")

    experiment  names the attacks; models and clients are those of the uploads
    limit       number of images for each line of the table; at least one step of a client is read
    stale       as in `run_experiment`; a defence's code does not count, for it ran before
    engine, into, add   as in `run_experiment`
    """
    check_stale(stale)
    experiment = with_changes(experiment, attack_seconds=attack_seconds)
    check_attacks(experiment.attacks, experiment.name)
    keep_apart(out, {"--uploads": folder}, around=True)
    examined = examine(Path(folder))
    examined.check_some()
    workers = engine_config(engine)
    here, there = devices(device, workers)
    source = Recorded(Path(folder), examined.known, here, examined.reasons, limit)
    places: dict[str, Any] = {"uploads": str(folder), "limit": limit, "refused": source.refused}
    root = run_root(Path(out), into)
    job = Job.of(source.experiment(experiment), root, there, stale, **places)
    return Run(root, job, source, workers, add, examined.remarks).run()


@dataclass
class Run:
    """What a command asks for, and what is known of it so far: Run(root, job, ...).run()."""

    root: Path  # the run folder, as the command named it
    job: Job
    source: UploadSource
    engine: EngineConfig
    add: bool  # whether the folder may hold another experiment
    remarks: Sequence[str] = ()  # what is said at the start about the experiment
    facts: dict[Cell, CellFacts] = field(default_factory=dict, init=False)
    not_done: dict[str, list[str]] = field(default_factory=dict, init=False)
    """Blocks that no worker finished, by reason."""

    def run(self) -> RunSummary:
        """Plan and work; a lock keeps other commands out of the folder."""
        job, source = self.job, self.source
        with lock(self.root):
            self.store = RunStore(self.root)
            damaged = self.store.damaged()
            whole = self.store.without(damaged)
            try:
                known = whole.cell_list()
            except NoRun:
                known = CellList([])
            stored = known.cells
            keys = {str(columns.get("cell_key")) for columns in stored}
            file = file_of(self.root, job.experiment, keys, uploads=source.recorded, add=self.add)
            again = job.stale == "fresh"
            self.worker = Worker(job.experiment, source, whole, job.made_with, again)
            self.plan = self.worker.plan
            absent = source.check(whole)
            if job.stale == "ask":
                self._refuse_other_code()
            self.store.set_aside(damaged)
            self.worker.store = self.store
            write_experiment(self.root, file, job.experiment, job.made_with)
            self.listed = self._listed(stored)
            self.store.write_cells(list(self.listed.values()))
            largest, self.unopened = self._outlined()
            engine, remark = settled(self.engine, self.plan, largest, job.device)
            with Progress("attack", self.plan.units, "images", self.root / LOG) as self.progress:
                self._say_start(damaged, absent, engine, remark)
                if known.lost:
                    self.progress.say(
                        f"{known.lost}, the list of cells, is damaged or missing: it is written "
                        "anew, as its copy has it"
                    )
                with one_thread():
                    if engine.kind == "here":
                        self._here()
                    else:
                        self._elsewhere(engine)
                rows = self._rows()
                for run_id in self.store.stored_cells():  # very many blocks into few files
                    try:
                        self.store.compact(run_id)
                    # pyarrow's errors are of these classes
                    except (ValueError, OSError, TypeError, NotImplementedError) as error:
                        left = "rows were left in the files of their blocks"
                        self.progress.say(f"{run_id}: {left}: {error}")
                return self._summary(rows)

    def _here(self) -> None:
        shutil.rmtree(self.job.path.parent, ignore_errors=True)  # tells old workers to stop
        for model, blocks in self.plan.blocks.items():
            self._note_model(self.worker.open(model))
            for block in blocks:
                opened, cells = self.worker.open(model), self.plan.cells_of(model)
                for news in self.worker.work_block(opened, block, cells):
                    self._note(news)

    def _elsewhere(self, engine: EngineConfig) -> None:
        """Have an engine do it. Each model is opened here as well, for only its weights tell which
        rows belong to a cell; its tasks are under way while the next one is opened."""
        file, on_gpu = self.job.path, torch.device(self.job.device).type == "cuda"
        started: Engine
        if engine.kind == "ray":  # packages of an engine are imported where it is asked for
            from mjp_privacy.experiment.engines.ray import RayEngine

            started = RayEngine(engine, file, on_gpu)
        elif engine.kind == "slurm":
            from mjp_privacy.experiment.engines.slurm import SlurmEngine

            started = SlurmEngine(engine, file, on_gpu)
        else:
            gpus = visible_gpus() if on_gpu else ()
            started = LocalEngine(file, workers_here(engine, on_gpu), gpus)
        with Coordinator(self.job, list(self.plan.blocks), started) as coordinator:
            for number, (model, blocks) in enumerate(self.plan.blocks.items()):
                opened = OpenModel(self.plan, self.source, model)
                self._note_model(opened)
                tasks = []
                for block in blocks:
                    for group, cells in enumerate(self.plan.groups(model)):
                        if any(self.worker.left(opened, block, cell) for cell in cells):
                            tasks.append(Task(number, block.index, group))
                        else:
                            self._note(News(model, finished=len(block.records) * len(cells)))
                del opened
                coordinator.submit(tasks)
                for news in coordinator.news():
                    self._note(news)
            for news in coordinator.wait():
                self._note(news)

    # before the work ----------------------------------------------------------------------------

    def _refuse_other_code(self) -> None:
        """Raise if other code made finished units of this plan, naming the files that differ. Only
        weights tell which rows belong to a cell, so models are opened, but only in a folder that
        holds results of other code."""
        worker = self.worker
        units = (worker.finished(run_id).values() for run_id in worker.store.stored_cells())
        made_by = {unit.code for of_cell in units for unit in of_cell}
        if not made_by - {code.digest for code in worker.codes.values()}:
            return
        run_ids: dict[Cell, str] = {}
        for model in self.plan.blocks:
            opened = OpenModel(self.plan, self.source, model)
            if opened.uploads is not None:
                run_ids |= {cell: facts.run_id for cell, facts in opened.facts.items()}
        cells, differing = worker.of_other_code(run_ids), dict[str, None]()
        for cell, digests in cells.items():
            abouts = worker.store.about(run_ids[cell])
            recorded = {d: files for about in abouts for d, files in about.get("code", {}).items()}
            for digest in sorted(digests):
                now = worker.codes[cell].files
                differing |= dict.fromkeys(differences(recorded.get(digest), now))
        if cells:
            raise UserError(
                f"{len(cells)} of {counted(len(self.plan.cells), 'cell')} hold results made by "
                f"other code ({', '.join(differing)}): --fresh makes these again, --keep keeps "
                'them. From Python: stale="fresh" or stale="keep".'
            )

    def _listed(self, stored: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The cells of the folder by their key: planned ones first, then those of other commands.

        A planned cell stays as it was listed until its model is opened. The line of uploads that an
        earlier command refused goes, and so do lines of this folder of uploads that are no more:
        their files may have been mended since.
        """
        experiment = self.job.experiment
        planned = [
            describe(cell, experiment, self.source, None, NOT_RUN).columns
            for cell in self.plan.cells
        ]
        listed = {str(columns["cell_key"]): dict(columns) for columns in planned}
        for columns in stored:
            key, model = str(columns.get("cell_key")), columns.get("model")
            if self.source.recorded:
                if model == REFUSED:  # its rows go too
                    for file in self.store.files(str(columns.get("run_id"))):
                        file.path.unlink(missing_ok=True)
                    continue
                of_folder = columns.get("data") == self.source.data
                if key not in listed and of_folder and model not in experiment.models:
                    continue
            listed[key] = {**listed.get(key, {}), **columns}
        return listed

    def _say_start(
        self, damaged: Sequence[Path], absent: Sequence[str], engine: EngineConfig, remark: str
    ) -> None:
        """Log the command's versions and machine, and say what is known before any work."""
        say = self.progress.say
        if damaged:
            names = [str(path.relative_to(self.store.root)) for path in damaged]
            say(
                f"{len(damaged)} file(s) are not as they were written: they go into damaged, and "
                f"the command that plans them makes them again ({first_of(names, NAMED)})"
            )
        used = [model for model in self.plan.blocks if model != REFUSED]
        self.images = len({name for model in used for name in self.plan.images(model)})
        where = "this process, one thread" if engine.kind == "here" else f"engine {engine.kind}"
        workers = f", {engine.workers} worker(s) of one thread" if engine.workers else ""
        say(
            f"{counted(self.images, 'image')}, {counted(len(self.plan.cells), 'cell')}, "
            f"{where}{workers} on {self.job.device}",
            images=self.images,
            **self.job.made_with,
        )
        if absent:
            say(
                f"{len(absent)} image(s) of this run folder are no longer among the images that "
                f"were given ({first_of(absent, 1)}); their rows stay in its tables"
            )
        for line in filter(None, (remark, *self.remarks)):
            say(line)
        for model, reason in self.unopened.items():
            say(f"{model}: FAILED. {reason}")

    def _outlined(self) -> tuple[int, dict[str, str]]:
        """What the headers of files of weights tell: the bytes of the largest model's weights, and
        the models that cannot be opened, with the reason."""
        largest, unopened = 0, dict[str, str]()
        for model in self.plan.blocks:
            try:
                parameters = self.source.outline(model).parameters()
                largest = max(largest, sum(p.numel() * p.element_size() for p in parameters))
            except UserError as error:
                unopened[model] = str(error)
            except Exception as error:  # it is opened again in the run, which tells what it is
                if interrupted() or out_of_memory(error):
                    raise
        return largest, unopened

    # while the work goes on ---------------------------------------------------------------------

    def _note_model(self, opened: OpenModel) -> None:
        """List the cells of a model that was opened, or could not be, and say so."""
        self._say_replaced(opened)
        self.facts |= opened.facts
        for facts in opened.facts.values():
            self.listed[str(facts.cell_key)] = dict(facts.columns)
        self.store.write_cells(list(self.listed.values()))
        if opened.uploads is None:
            if self.unopened.get(opened.name) != opened.reason:
                self._say(f"{opened.name}: FAILED. {opened.reason}", opened.trace)
            return
        report = opened.uploads.model.card.checkpoint
        notes = "; ".join(report.notes) or "complete"
        if report.stored_as:
            notes += f"; stored as {report.stored_as}, used as float32"
        if report.unexpected:
            notes += f"; tensors of the checkpoint not used: {', '.join(report.unexpected)}"
        self.progress.say(
            f"{opened.name}: {report.source} ({report.layout}), sha256 {report.sha256[:12]}, "
            f"{notes}",
            missing=report.missing,
            unexpected=report.unexpected,
            beside=report.beside,
        )

    def _say_replaced(self, opened: OpenModel) -> None:
        """Say which finished cells leave the tables, because their lines are this model's now,
        another one under the same name; their rows stay on disk, under their run_ids."""
        lost = []
        for facts in opened.facts.values():
            before = self.listed.get(str(facts.cell_key), {})
            run_id = str(before.get("run_id"))
            others = before.get("status") == "ok" and run_id != facts.run_id
            if others and self.store.files(run_id):
                lost.append(f"{facts.attack} ({facts.setting})")
        if lost:
            self.progress.say(
                f"{opened.name}: {len(lost)} finished cell(s) of {self.root} leave its tables, "
                "because this run has another model, other labels or other options under the same "
                f"name: {first_of(list(dict.fromkeys(lost)), PLACES)}. Their rows stay, and the "
                "command that made them shows them again. To have both, give this run an --out of "
                "its own"
            )

    def _note(self, news: News) -> None:
        """Show and count what is told of a block."""
        for text, trace in news.messages:
            self._say(text, trace)
        self.progress.skip(news.finished)
        if news.units:
            self.progress.advance(news.units, news.where)
        if news.lost:
            *before, reason = news.error.splitlines()
            self.not_done.setdefault(reason, []).append(news.lost)
            self._say(f"{news.lost} was not done: {reason}", "\n".join(before))

    def _say(self, text: str, trace: str) -> None:
        """Say something; of code that failed, the log gets the place."""
        if trace:
            where = f". The traceback is in {shown(self.root / LOG)}."
            self.progress.say(f"{text.rstrip('.')}{where}", traceback=trace)
        else:
            self.progress.say(text)

    # after the work -----------------------------------------------------------------------------

    def _rows(self) -> pd.DataFrame:
        """A row for each planned image in each cell: its status, the reason, and its place.
        StorageError where there are fewer than were written: somebody has taken them away."""
        names = ["image_id", "status", "reason"]
        found = [pd.DataFrame(columns=[*names, "run_id", "place"], dtype=object)]
        for cell, facts in self.facts.items():
            planned = self.plan.images(cell.model)
            rows = self.store.read(facts.run_id, names)
            lost = sorted({*planned} - {*rows["image_id"]})
            if lost and not self.not_done:
                raise StorageError(
                    f"rows of {len(lost)} image(s) in {shown(self.store.folder(facts.run_id))} "
                    f"({first_of(lost, 1)}) were deleted while the command worked",
                    errno.ENOENT,
                )
            rows = rows[rows["image_id"].isin(planned)].assign(run_id=facts.run_id)
            place = f"{cell.model}, {cell.setting}, " + rows["image_id"]
            place = place.mask(rows["status"] == "unreadable", rows["image_id"])
            rows["place"] = place.mask(rows["reason"] == facts.reason, cell.model)
            found.append(rows)
        return pd.concat(found, ignore_index=True)

    def _summary(self, rows: pd.DataFrame) -> RunSummary:
        progress, plan = self.progress, self.plan
        if not progress.fresh and progress.done == plan.units:
            progress.say(f"all {plan.units} units are finished already; nothing to do")
        kept = 0
        if not self.worker.again:
            run_ids = {cell: facts.run_id for cell, facts in self.facts.items()}
            kept = len(self.worker.of_other_code(run_ids))
        if kept:
            progress.say(
                f"{kept} of {counted(len(plan.cells), 'cell')} hold results made by other code, "
                "which were kept; --fresh makes them again"
            )
        failures: dict[str, list[str]] = {}
        for note in self.source.passed_over:
            failures.setdefault(note.reason, []).append(note.record.image_id)
        not_done = rows[rows["status"].isin(NOT_DONE)]
        for place, reason in not_done[["place", "reason"]].itertuples(index=False):
            failures.setdefault(reason, []).append(place)
        told = []
        for reason, places in failures.items():
            of = list(dict.fromkeys(places))
            more = f"; … ({len(of)} in all)" if len(of) > PLACES else ""
            told.append(f"{'; '.join(of[:PLACES])}{more}: {reason}")
        refused = rows[rows["status"] == "unsupported"].groupby("reason")["run_id"]
        ranked = refused.agg(["size", "nunique"]).sort_values("size", ascending=False)
        return RunSummary(
            self.store.root,
            len(plan.cells),
            self.images,
            tuple(told),
            tuple(
                f"{counted(number, 'row')} in {counted(cells, 'cell')}: {why}"
                for why, number, cells in ranked.itertuples()
            ),
            kept,
            tuple(f"{'; '.join(blocks)}: {why}" for why, blocks in self.not_done.items()),
        )


@dataclass(frozen=True)
class RunSummary:
    """How a run ended: its folder, its size, and what failed or did not apply."""

    out: Path
    cells: int
    images: int
    failures: tuple[str, ...]  # by reason, each of images, models or images in a model and setting
    inapplicable: tuple[str, ...] = ()  # why attacks were refused, with the number of images
    of_other_code: int = 0  # number of cells with kept results that other code made
    not_done: tuple[str, ...] = ()  # blocks that no worker of an engine finished, and why

    @property
    def exit_code(self) -> int:
        """0 if everything was done, 3 if some image, cell or block failed."""
        return 3 if self.failures or self.not_done else 0
