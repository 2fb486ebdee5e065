"""The way in: from a config and images, or from recorded uploads, to a finished run folder.

`run_experiment` simulates the clients, `attack_uploads` reads recorded uploads; they differ only in
the source of uploads. Both look at the folder, plan, have the work done here (`work`) or by an
engine (`engines`), and tell what happens. Nobody else writes what is about the whole run.
"""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from mjp_privacy.core.errors import StorageError, UserError
from mjp_privacy.core.files import lock
from mjp_privacy.core.machine import one_thread
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.text import counted, first_of, shown
from mjp_privacy.data import open_images
from mjp_privacy.data.decoding import Altered
from mjp_privacy.data.opening import keep_apart
from mjp_privacy.experiment.cell_facts import CellFacts, describe
from mjp_privacy.experiment.code import (
    Stale,
    cells_of_other_code,
    check_stale,
    code_of_cells,
    of_other_code,
    refuse_other_code,
)
from mjp_privacy.experiment.config import Cell, Experiment, check_attacks, load_experiment
from mjp_privacy.experiment.engines.coordinator import Coordinator, News, TaskLost
from mjp_privacy.experiment.engines.options import EngineConfig, engine_config
from mjp_privacy.experiment.engines.start import devices, settled, start_engine
from mjp_privacy.experiment.engines.worker import Job, Task
from mjp_privacy.experiment.overrides import decided, with_changes
from mjp_privacy.experiment.plan import (
    Finished,
    Forecast,
    check_partners,
    forecast,
    make_plan,
)
from mjp_privacy.experiment.recorded import Recorded, recorded_experiment
from mjp_privacy.experiment.run_folder import file_of, run_root, write_experiment
from mjp_privacy.experiment.simulated import Simulated, chosen_images
from mjp_privacy.experiment.source import ImageNote, UploadSource
from mjp_privacy.experiment.store import NOT_DONE, NoRun, RunStore
from mjp_privacy.experiment.work import CellDone, OpenModel, Worker
from mjp_privacy.uploads.faults import examine
from mjp_privacy.uploads.folder import REFUSED, group_uploads

__all__ = ["EngineConfig", "RunSummary", "attack_uploads", "run_experiment"]

LOG = "log.jsonl"
NOT_RUN = "not run yet: the run ended before this cell; run the same command again"
NAMED = 10  # damaged files that are called by their names
REPLACED = 3  # replaced cells that are
IMAGES_NAMED = 3  # images of a line that are
PLACE = ("model", "setting", "run_id")


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
             file that is no image is a failure, and another one is taken in its place
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
    experiment, remarks = decided(experiment)
    opened = open_images(path, labels)
    chosen, passed_over = chosen_images(opened, experiment, limit)
    workers = engine_config(engine, {})
    here, there = devices(device, workers)
    source = Simulated(experiment, opened, chosen, here)
    source.check_models()
    keep_apart(out, {"--images": path, "--labels": labels})
    root = run_root(Path(out), into)
    job = Job.of(
        experiment,
        root,
        there,
        stale,
        images=str(path),
        labels=None if labels is None else str(labels),
        chosen=tuple(record.image_id for record in chosen),
    )
    summary = Run(root, job, source, workers, add, remarks, passed_over, opened.altered).run()
    if opened.altered.remark:
        print(opened.altered.remark, file=sys.stderr)
    return summary


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
    refused = examined.reasons
    groups = group_uploads(examined.known, limit, examined.refused)
    root = run_root(Path(out), into)
    workers = engine_config(engine, {})
    here, there = devices(device, workers)
    source = Recorded(Path(folder), groups, here, refused)
    named = recorded_experiment(experiment, groups, refused)
    paths: dict[str, Any] = {"uploads": str(folder), "limit": limit, "refused": refused}
    job = Job.of(named, root, there, stale, **paths)
    return Run(root, job, source, workers, add, examined.remarks).run()


@dataclass
class Run:
    """What a command asks for, and what is known of it so far: Run(root, job, source,
    ...).run()."""

    root: Path  # the run folder, as the command named it
    job: Job
    source: UploadSource
    engine: EngineConfig
    add: bool  # whether the folder may hold another experiment
    remarks: Sequence[str] = ()  # what is said at the start about the experiment
    passed_over: Sequence[ImageNote] = ()
    """Files that are no images and are left out of the plan: failures without rows."""
    altered: Altered = field(default_factory=Altered)
    """Files whose pictures were turned, or are the first of several, as far as they were opened."""
    facts: dict[Cell, CellFacts] = field(default_factory=dict, init=False)
    not_done: dict[str, list[str]] = field(default_factory=dict, init=False)
    """Blocks that no worker finished, by reason."""

    def run(self) -> RunSummary:
        """Plan and work; a lock keeps other commands out of the folder."""
        job, recorded = self.job, self.job.uploads is not None
        with lock(self.root):
            self.store = RunStore(self.root)
            self.store.check_format()
            damaged = self.store.damaged()
            whole = self.store.without(damaged)
            try:
                stored = whole.read_cells()
            except NoRun:
                stored = []
            keys = {str(columns.get("cell_key")) for columns in stored}
            file = file_of(self.root, job.experiment, keys, uploads=recorded, add=self.add)
            self.plan = make_plan(job.experiment, self.source)
            if not recorded:  # recorded clients are as they were
                check_partners(self.plan)
            absent = self.source.check(whole)
            finished = Finished(whole, again=job.stale == "fresh")
            codes = code_of_cells(self.plan, with_defenses=not recorded)
            self.worker = Worker(self.plan, self.source, codes, finished, job.made_with)
            if job.stale == "ask":
                self._refuse_other_code(finished)
            self.store.set_aside(damaged)
            finished.store = self.store
            write_experiment(self.root, file, job.experiment, job.made_with)
            self.listed = self._listed(stored)
            self.store.write_cells(list(self.listed.values()))
            foreseen = forecast(self.plan, self.source)
            engine, remark = settled(self.engine, self.plan, foreseen, job.device)
            with Progress("attack", self.plan.units, "images", self.root / LOG) as progress:
                self.progress = progress
                self._say_start(damaged, absent, foreseen, engine, remark)
                with one_thread():
                    if engine.kind == "here":
                        self._here(foreseen)
                    else:
                        self._elsewhere(engine, foreseen)
                rows = self._rows()
                self._compact()
                return self._summary(rows, finished)

    def _here(self, foreseen: Forecast) -> None:
        """Do everything that is not finished in this process."""
        shutil.rmtree(self.job.path.parent, ignore_errors=True)  # tells old workers to stop
        for model, blocks in self.plan.blocks.items():
            self._note_model(self.worker.open(model), foreseen)
            for block in blocks:
                opened, cells = self.worker.open(model), self.plan.cells_of(model)
                for done in self.worker.work_block(opened, block, cells):
                    self._note(done)

    def _elsewhere(self, engine: EngineConfig, foreseen: Forecast) -> None:
        """Have an engine do it. Each model is opened here as well, for only its weights tell which
        rows belong to a cell; its tasks are under way while the next one is opened."""
        on_gpu = torch.device(self.job.device).type == "cuda"
        started = start_engine(engine, self.job.path, on_gpu)
        with Coordinator(self.job, list(self.plan.blocks), started) as coordinator:
            for number, (model, blocks) in enumerate(self.plan.blocks.items()):
                opened = OpenModel.of(self.plan, self.source, model)
                self._note_model(opened, foreseen)
                tasks = []
                for block in blocks:
                    for group, cells in enumerate(self.plan.groups(model)):
                        if any(self.worker.left(opened, block, cells).values()):
                            tasks.append(Task(number, block.index, group))
                        else:
                            self._note(CellDone(0, model, len(block.records) * len(cells)))
                del opened
                coordinator.submit(tasks)
                for news in coordinator.news():
                    self._note(news)
            for news in coordinator.wait():
                self._note(news)

    # before the work ----------------------------------------------------------------------------

    def _refuse_other_code(self, finished: Finished) -> None:
        """Raise if other code made finished units of this plan. Only weights tell which rows belong
        to a cell, so models are opened, but only in a folder that holds results of other code."""
        codes = self.worker.codes
        made_by = {u.code for r in finished.store.stored_cells() for u in finished.of(r).values()}
        if not made_by - {code.digest for code in codes.values()}:
            return
        run_ids: dict[Cell, str] = {}
        for model in self.plan.blocks:
            opened = OpenModel.of(self.plan, self.source, model)
            if opened.uploads is not None:
                run_ids |= {cell: facts.run_id for cell, facts in opened.facts.items()}
        refuse_other_code(self.plan, run_ids, codes, finished)

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
            if self.job.uploads is not None:
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
        self,
        damaged: Sequence[Path],
        absent: Sequence[str],
        foreseen: Forecast,
        engine: EngineConfig,
        remark: str,
    ) -> None:
        """Log the command's versions and machine, and say what is known before any work."""
        progress = self.progress
        if damaged:
            progress.say(
                f"{len(damaged)} file(s) are not as they were written: they go into damaged, "
                "and the command that plans them attacks their images again"
            )
        for path in damaged[:NAMED]:
            progress.say(f"  damaged: {shown(path.relative_to(self.store.root))}")
        records = {m: of for m, of in self.plan.blocks.items() if m != REFUSED}.values()
        self.images = len({r.image_id for of in records for block in of for r in block.records})
        where = "this process, one thread" if engine.kind == "here" else f"engine {engine.kind}"
        workers = f", {engine.workers} worker(s) of one thread" if engine.workers else ""
        progress.say(
            f"{self.images} images, {len(self.plan.cells)} cells, {where}{workers} on "
            f"{self.job.device}",
            images=self.images,
            **self.job.made_with,
        )
        if absent:
            progress.say(
                f"{len(absent)} image(s) of this run folder are no longer among the images that "
                f"were given ({first_of(absent, 1)}); their rows stay in its tables"
            )
        for line in (*([remark] if remark else ()), *self.remarks):
            progress.say(line)
        for model, reason in foreseen.unopened.items():
            progress.say(f"{model}: FAILED. {reason}")
        for line in foreseen.lines:
            progress.say(f"not applicable: {line}")

    # while the work goes on ---------------------------------------------------------------------

    def _note_model(self, opened: OpenModel, foreseen: Forecast) -> None:
        """List the cells of a model that was opened, or could not be, and say so."""
        if replaced := self._replaced(opened):
            self.progress.say(replaced)
        self.facts |= opened.facts
        for facts in opened.facts.values():
            self.listed[str(facts.outcome.cell_key)] = dict(facts.columns)
        self.store.write_cells(list(self.listed.values()))
        if opened.uploads is None:
            if opened.trace:
                self._say_fault(f"{opened.name}: FAILED. {opened.reason}.", opened.trace)
            elif foreseen.unopened.get(opened.name) != opened.reason:
                self.progress.say(f"{opened.name}: FAILED. {opened.reason}")
            return
        report = opened.uploads.model.card.checkpoint
        notes = "; ".join(report.notes) or "complete"
        if report.stored_as:
            notes += f"; stored as {report.stored_as}, used as float32"
        self.progress.say(
            f"{opened.name}: {report.source} ({report.layout}), sha256 {report.sha256[:12]}, "
            f"{notes}",
            missing=report.missing,
            unexpected=report.unexpected,
            beside=report.beside,
        )
        if report.unexpected:
            unused = ", ".join(report.unexpected)
            self.progress.say(f"{opened.name}: tensors of the checkpoint not used: {unused}")

    def _replaced(self, opened: OpenModel) -> str:
        """What is said of finished cells whose lines this model's cells take, because it is another
        model under the same name; their rows stay on disk, under their run_ids."""
        lost = []
        for facts in opened.facts.values():
            before = self.listed.get(str(facts.outcome.cell_key), {})
            run_id = str(before.get("run_id"))
            others = before.get("status") == "ok" and run_id != facts.run_id
            if others and self.store.files(run_id):
                lost.append(CellFacts.read(before))
        if not lost:
            return ""
        titles = dict.fromkeys(f"{facts.attack.title} ({facts.setting})" for facts in lost)
        made_of = dict.fromkeys(
            f"{f.model.checkpoint}, sha256 {str(f.model.checkpoint_sha)[:12]}, {f.model.size} px"
            for f in lost
        )
        return (
            f"{opened.name}: {len(lost)} finished cell(s) of {self.root} leave its tables, because "
            "this run has another model or other options under the same name: "
            f"{first_of(list(titles), REPLACED)}, made of {'; '.join(made_of)}. Their rows stay in "
            f"{self.root / 'rows'}; the command that made them shows them again. To have both, "
            "give this run an --out of its own"
        )

    def _note(self, news: News) -> None:
        """Show and count what is told of a block."""
        if isinstance(news, Altered):
            self.altered.turned.update(news.turned)
            self.altered.animated.update(news.animated)
            return
        if isinstance(news, TaskLost):
            *trace, reason = news.reason.splitlines()
            if trace:
                reason += f" (a fault of mjp-privacy: its place is in {self.root / LOG})"
            block = f"{news.model}, block {news.block}"
            self.not_done.setdefault(reason, []).append(block)
            self.progress.say(f"{block} was not done: {reason}", error=news.reason)
            return
        for text, traceback in news.messages:
            self._say_fault(text, traceback)
        if news.finished:
            self.progress.skip(news.finished)
        if news.units:
            self.progress.advance(news.units, news.where)

    def _say_fault(self, text: str, traceback: str) -> None:
        """Say that code of an attack, a defence or this package failed; the log gets its place."""
        if traceback:
            where = f" The traceback is in {shown(self.root / LOG)}."
            self.progress.say(f"{text}{where}", traceback=traceback)
        else:
            self.progress.say(text)

    # after the work -----------------------------------------------------------------------------

    def _rows(self) -> pd.DataFrame:
        """A row for each planned image in each cell: its status, the reason, and that of its model.
        StorageError where there are fewer than were written: somebody has taken them away."""
        names = ["image_id", "status", "reason"]
        found = [pd.DataFrame(columns=[*names, *PLACE, "of_model"], dtype=object)]
        for cell, facts in self.facts.items():
            planned = [r.image_id for block in self.plan.blocks[cell.model] for r in block.records]
            rows = self.store.read(facts.run_id, names)
            present = set(rows["image_id"])
            lost = [image_id for image_id in planned if image_id not in present]
            if lost and not self.not_done:
                raise StorageError(
                    f"rows of {len(lost)} image(s) in {shown(self.store.folder(facts.run_id))} "
                    f"({first_of(lost, 1)}) were deleted while the command worked",
                    errno.ENOENT,
                )
            place = dict(zip(PLACE, (facts.model.label, facts.setting, facts.run_id), strict=True))
            rows = rows[rows["image_id"].isin(planned)]
            found.append(rows.assign(**place, of_model=facts.outcome.reason))
        return pd.concat(found, ignore_index=True)

    def _compact(self) -> None:
        """Put the files of cells with very many blocks into few."""
        for run_id in self.store.stored_cells():
            try:
                self.store.compact(run_id)
            except (ValueError, OSError, TypeError, NotImplementedError) as error:  # pyarrow's
                self.progress.say(f"{run_id}: rows were left in the files of their blocks: {error}")

    def _summary(self, rows: pd.DataFrame, finished: Finished) -> RunSummary:
        """How the run ended, by its rows."""
        progress, plan = self.progress, self.plan
        if not progress.fresh and progress.done == plan.units:
            progress.say(f"all {plan.units} units are finished already; nothing to do")
        failed = self._failed(rows)
        told = failed[["model", "setting", "image_id", "reason"]].itertuples(index=False)
        failures = [f"{', '.join(filter(None, place))}: {why}" for *place, why in told]
        reasons = failed["reason"].where(failed["image_id"] != "", NOT_LOADED)
        refused = rows[rows["status"] == "unsupported"].groupby("reason")["run_id"]
        ranked = refused.agg(["size", "nunique"]).sort_values("size", ascending=False)
        kept = 0
        if not finished.again:
            run_ids = {cell: facts.run_id for cell, facts in self.facts.items()}
            kept = len(cells_of_other_code(plan, run_ids, self.worker.codes, finished))
        if kept:
            progress.say(
                f"{of_other_code(kept, plan)} made by other code, which were kept; --fresh "
                "makes them again"
            )
        return RunSummary(
            self.store.root,
            len(plan.cells),
            self.images,
            tuple(dict.fromkeys(failures)),
            tuple(
                f"{counted(number, 'row')} in {counted(cells, 'cell')}: {why}"
                for why, number, cells in ranked.itertuples()
            ),
            tuple(f"{_named(of)}: {why}" for why, of in failed.groupby(reasons, sort=False)),
            kept,
            tuple(f"{'; '.join(blocks)}: {why}" for why, blocks in self.not_done.items()),
        )

    def _failed(self, rows: pd.DataFrame) -> pd.DataFrame:
        """What failed, a row each: an image that is no image, a model that could not be loaded, or
        an image in a cell."""
        no_images = [{"image_id": n.record.image_id, "reason": n.reason} for n in self.passed_over]
        models = [
            {"model": facts.model.label, "reason": facts.outcome.reason}
            for facts in self.facts.values()
            if facts.outcome.status == "failed"
        ]
        own = rows[rows["status"].isin(NOT_DONE) & (rows["reason"] != rows["of_model"])]
        of_cell = own["status"] != "unreadable"  # which has nothing to do with the cell
        own = own.assign(**{name: own[name].where(of_cell, "") for name in PLACE})
        columns = [*PLACE, "image_id", "reason"]
        every = pd.concat([pd.DataFrame(no_images), pd.DataFrame(models), own])
        return every.reindex(columns=columns).fillna("").drop_duplicates()


# how a run ended ----------------------------------------------------------------------------------


NOT_LOADED = "not loaded, for the reason above; all of its rows failed"


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
    not_done: tuple[str, ...] = ()  # blocks that no worker of an engine finished, and why

    @property
    def exit_code(self) -> int:
        """0 if everything was done, 3 if some image, cell or block failed."""
        return 3 if self.failures or self.not_done else 0


def _named(failed: pd.DataFrame) -> str:
    """What failed for one reason: "1.png", "ViT, a, 2.png", "40 images in 2 cells (0.png, …)"; of
    models that could not be loaded their names."""
    images = [image for image in failed["image_id"].unique() if image]
    cells = failed.loc[failed["run_id"] != "", "run_id"].nunique()
    if not images:
        return ", ".join(failed["model"].unique())
    if len(images) == 1 and cells < 2:
        return ", ".join(filter(None, failed[["model", "setting", "image_id"]].iloc[0]))
    within = f" in {counted(cells, 'cell')}" if cells else ""
    return f"{counted(len(images), 'image')}{within} ({first_of(images, IMAGES_NAMED)})"
