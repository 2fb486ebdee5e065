"""Plan, work and save, in one process or by an engine: what `run` calls with a ready source.

make_plan -> work, here or handed out (engines/) -> messages -> ledger, display, summary
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mjp_privacy.core.files import lock
from mjp_privacy.core.progress import Progress
from mjp_privacy.experiment.applicability import Refusals, forecast
from mjp_privacy.experiment.block import ImageNote
from mjp_privacy.experiment.compaction import compact
from mjp_privacy.experiment.description import describe
from mjp_privacy.experiment.engines.coordinator import TaskLost
from mjp_privacy.experiment.engines.hand_out import handed_out
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.start import start_engine
from mjp_privacy.experiment.failures import Failure, failure_lines, failures_of
from mjp_privacy.experiment.finished import Finished
from mjp_privacy.experiment.inventory import Inventory
from mjp_privacy.experiment.job import Job
from mjp_privacy.experiment.mending import Examination
from mjp_privacy.experiment.messages import BlockSkipped, Message, ModelOpened
from mjp_privacy.experiment.narration import say, say_foreseen, say_mended, say_start
from mjp_privacy.experiment.other_code import (
    Stale,
    code_of_cells,
    kept_cells,
    refuse_other_code,
)
from mjp_privacy.experiment.plan import Plan, check_partners, make_plan
from mjp_privacy.experiment.provenance import provenance, write_provenance
from mjp_privacy.experiment.replaced import replaced_cells
from mjp_privacy.experiment.save import RunLedger, written
from mjp_privacy.experiment.source import UploadSource
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.work import Codes, work

LOG = "log.jsonl"
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
    not_done: tuple[str, ...] = ()  # blocks that no worker of an engine finished, and why

    @property
    def exit_code(self) -> int:
        """0 if everything was done, 3 if some image, cell or block failed."""
        return 3 if self.failures or self.not_done else 0


@dataclass(frozen=True)
class Order:
    """What a command asks for: Order(root, job, source, engine, "ask", 20).execute()."""

    root: Path  # the run folder, as the command named it
    job: Job
    source: UploadSource
    engine: EngineConfig
    stale: Stale
    images: int  # number of images, as it is shown
    remarks: Sequence[str] = ()  # what is said at the start about the experiment
    passed_over: Sequence[ImageNote] = ()
    """Files that are no images and are left out of the plan: failures without rows."""

    @property
    def device(self) -> torch.device:
        """Where gradients are computed."""
        return torch.device(self.job.device)

    @property
    def in_this_process(self) -> bool:
        """Whether the work is done here, and not handed out to an engine."""
        return self.engine.kind == "here"

    def execute(self) -> RunSummary:
        """Plan, work and save; a lock keeps other commands out of the folder."""
        root, experiment = self.root, self.job.experiment
        with lock(root):
            examined = Examination.of(root)
            store = RunStore(root)
            plan = make_plan(experiment, self.source)
            if self.job.uploads is None:  # recorded clients are as they were
                check_partners(plan)
            finished = Finished(store, again=self.stale == "fresh", damage=examined.damage)
            inventory = Inventory(store, finished.images)
            absent = self.source.check(inventory)
            codes = code_of_cells(plan, with_defenses=self.job.uploads is None)
            if self.stale == "ask":
                refuse_other_code(plan, self.source, codes, finished)
            examined.mend()
            inventory.begin()
            made_with = provenance(self.device, self.job.threads)
            write_provenance(store, experiment, made_with)
            planned = [
                describe(cell, experiment, plan.attacks[cell], self.source, None, NOT_RUN)
                for cell in plan.cells
            ]
            ledger = RunLedger(
                store,
                inventory,
                planned,
                self.device,
                self.job.threads,
                tuple(codes.values()),
                at_once=self.in_this_process,
            )
            ledger.begin()
            with Progress("attack", plan.units, "images", root / LOG) as progress:
                where = self._where()
                say_mended(progress, examined.said, len(inventory.lost))
                say_start(progress, plan, self.images, store, made_with, where, absent)
                run = _Run(self, plan, ledger, progress)
                run.begin()
                with closing(self._messages(plan, finished, codes)) as messages:
                    run.listen(messages)
                if progress.done == plan.units and not progress.fresh:
                    progress.say(f"all {plan.units} units are finished already; nothing to do")
        return run.summary()

    def _messages(
        self, plan: Plan, finished: Finished, codes: Codes
    ) -> Generator[Message | TaskLost, None, None]:
        """Everything that is not finished, done here or by an engine; closed, the engine stops."""
        if self.in_this_process:
            shutil.rmtree(self.job.path.parent, ignore_errors=True)  # tells old workers to stop
            return written(finished.store, work(plan, self.source, finished, codes))
        on_gpu = self.device.type == "cuda"
        engine = start_engine(self.engine, self.job.path, self.job.threads, on_gpu)
        return handed_out(plan, self.source, finished, codes, self.job, engine)

    def _where(self) -> str:
        """Where the work is done, in words: "2 thread(s) on cpu"."""
        engine = "" if self.in_this_process else f"engine {self.engine.kind}, each worker "
        return f"{engine}{self.job.threads} thread(s) on {self.device}"


@dataclass
class _Run:
    """What is heard of a run, written down and counted."""

    order: Order
    plan: Plan
    ledger: RunLedger
    progress: Progress
    failures: list[Failure] = field(default_factory=list, init=False)
    not_done: dict[str, list[str]] = field(default_factory=dict, init=False)
    """Blocks that no worker finished, by reason."""
    refusals: Refusals = field(default_factory=Refusals, init=False)
    kept: set[str] = field(default_factory=set, init=False)
    """run_ids of cells that hold results of other code."""
    unrecorded: set[str] = field(default_factory=set, init=False)
    """And of code that was not recorded."""

    def begin(self) -> None:
        """Note what is known before any work."""
        if self.order.passed_over:
            self.ledger.inventory.note(self.order.passed_over)
        self.failures += [
            Failure(note.reason, image=note.record.image_id) for note in self.order.passed_over
        ]
        self.foreseen = forecast(self.plan, self.order.source)
        say_foreseen(self.progress, self.order.remarks, self.foreseen)

    def listen(self, messages: Iterator[Message | TaskLost]) -> None:
        """Write down, show and count every message."""
        for message in messages:
            if isinstance(message, TaskLost):
                self._note_lost(message)
                continue
            if isinstance(message, ModelOpened) and (
                lost := replaced_cells(self.ledger.store, message)
            ):
                self.progress.say(lost)
            self.ledger.save(message)
            say(self.progress, message, self.foreseen)
            self.failures += failures_of(message)
            self.refusals.add(message)
            if isinstance(message, BlockSkipped):
                self.kept |= message.of_other_code.keys()
                self.unrecorded |= message.unrecorded.keys()
        self.ledger.end()
        self.ledger.inventory.tidy()
        self._compact()
        if said := kept_cells(self.kept, self.unrecorded, self.plan):
            self.progress.say(said)

    def _compact(self) -> None:
        """Put the rows of cells with very many blocks into few files."""
        try:
            compact(self.ledger.store)
        except (ValueError, OSError, TypeError, NotImplementedError) as error:  # pyarrow's errors
            self.progress.say(f"rows were left in the files of their blocks: {error}")

    def _note_lost(self, lost: TaskLost) -> None:
        """Say that a block was not done; the whole error stands in the log."""
        *trace, reason = lost.reason.splitlines()
        if trace:
            reason += f" (a fault of mjp-privacy: its place is in {self.order.root / LOG})"
        block = f"{lost.model}, block {lost.block}"
        self.not_done.setdefault(reason, []).append(block)
        self.progress.say(f"{block} was not done: {reason}", error=lost.reason)

    def summary(self) -> RunSummary:
        """How the run ended."""
        each = tuple(dict.fromkeys(map(str, self.failures)))
        counts = failure_lines(self.failures), len(self.kept), len(self.unrecorded)
        return RunSummary(
            self.ledger.store.root,
            len(self.plan.cells),
            self.order.images,
            each,
            self.refusals.lines(),
            *counts,
            tuple(f"{'; '.join(blocks)}: {why}" for why, blocks in self.not_done.items()),
        )
