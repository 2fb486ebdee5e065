"""One command's work on one run folder: model by model, block of images by block, cell by cell.

    decode -> Setting.prepare -> client gradient (once per input, precision and victim)
           -> Attack.run -> stored -> scored -> rows

A unit, one image in one cell, is finished when its rows are on disk. Blocks are fixed by the
config, so a killed run goes on where it stopped and ends with the same rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacks import find_attack
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.progress import RunProgress
from mjp_privacy.data import ImageRecord, ImageSource
from mjp_privacy.experiment.block import Block
from mjp_privacy.experiment.cell import CellWork
from mjp_privacy.experiment.config import Cell, Experiment, expand
from mjp_privacy.experiment.facts import cell_facts, cell_key
from mjp_privacy.experiment.inventory import Inventory
from mjp_privacy.experiment.provenance import provenance, write_provenance
from mjp_privacy.experiment.residual import RESIDUAL_OVER
from mjp_privacy.experiment.rows import reasoned_rows
from mjp_privacy.experiment.simulated import Workbench
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.interfaces import Control
from mjp_privacy.models import Victim, load_model

NOT_RUN = "not run yet: the run ended before this cell; run the same command again"


@dataclass(frozen=True)
class RunSummary:
    """What became of a run. exit_code: 0 all done, 3 some image or cell failed."""

    out: Path
    cells: int
    images: int
    failures: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return 3 if self.failures else 0


@dataclass
class Run:
    """One command's work on one run folder."""

    experiment: Experiment
    source: ImageSource
    records: Sequence[ImageRecord]
    store: RunStore
    device: torch.device

    def execute(self) -> RunSummary:
        self.cells = expand(self.experiment)
        self.attacks = {c: find_attack(c.attack.name, c.attack.options) for c in self._distinct()}
        self._check_steps()
        self.inventory = self._inventory()
        absent = self.inventory.check_known()
        self.facts: dict[Cell, dict[str, Any]] = {}
        self.failures: dict[str, None] = {}  # an ordered set
        write_provenance(self.store, self.experiment, self.device)
        self.planned = [self._facts(cell, None, NOT_RUN) for cell in self.cells]
        self._write_cells()
        total = sum(len(self._records(cell.model)) for cell in self.cells)
        with RunProgress(total, self.store.root / "log.jsonl") as self.progress:
            self._say_start()
            if absent:
                self.progress.say(
                    f"{len(absent)} image(s) of this run folder are no longer among the images "
                    f"({absent[0]}, …); their rows stay in its tables"
                )
            for name in self.experiment.models:
                cells = [cell for cell in self.cells if cell.model == name]
                if cells:
                    self._run_model(name, cells)
        self._write_cells()
        return RunSummary(self.store.root, len(self.cells), len(self.records), tuple(self.failures))

    def _inventory(self) -> Inventory:
        return Inventory(self.store, self.source, self.records)

    def _say_start(self) -> None:
        """Each command's circumstances go to the log; a change of threads is said."""
        facts = provenance(self.device)
        self.progress.say(
            f"{len(self.records)} images, {len(self.cells)} cells, {facts['threads']} thread(s) on "
            f"{self.device}",
            images=len(self.records),
            **facts,
        )
        timed = self.store.read_timings()
        before = set(timed["threads"]) if "threads" in timed else set()
        if before - {facts["threads"]}:
            self.progress.say(
                f"earlier parts of this run had {sorted(before)} thread(s): float32 scores of "
                "APRIL move with their number, float64 ones do not"
            )

    def _distinct(self) -> Iterable[Cell]:
        """The cells, each once: two of one key would fight over the same rows."""
        seen: set[str] = set()
        for cell in self.cells:
            key = cell_key(cell, self.experiment)
            if key in seen:
                raise UserError(
                    f"The grid holds {cell.model}, setting {cell.setting}, gamma {cell.gamma}, "
                    f"{cell.dtype}, {cell.attack.title} twice. Expected each cell once."
                )
            seen.add(key)
            yield cell

    def _check_steps(self) -> None:
        """Every model's images fill whole steps of all its clients."""
        for name in dict.fromkeys(cell.model for cell in self.cells):
            batches = {cell.client.batch for cell in self.cells if cell.model == name}
            together, images = math.lcm(*batches), len(self._records(name))
            if images % together:
                raise UserError(
                    f"{images} images do not fill the client steps of {name} "
                    f"(client.batch {', '.join(map(str, sorted(batches)))}). Expected a multiple "
                    f"of {together}, such as --limit {max(images // together, 1) * together}."
                )

    # one model --------------------------------------------------------------------------------

    def _run_model(self, name: str, cells: list[Cell]) -> None:
        model, reason = self._load(name)
        for cell in cells:
            self.facts[cell] = self._facts(cell, model, reason)
        self._write_cells()
        if model is None:
            self._fail_cells(name, cells, reason)
            return
        bench = self._bench(name, model)
        for block in self._blocks(name):
            self._run_block(bench, block, cells)

    def _load(self, name: str) -> tuple[Victim | None, str]:
        try:
            model = self._loaded(name)
            self.inventory.check_model(model)
        except UserError as error:
            return None, str(error)
        report = model.card.checkpoint
        said = "; ".join(report.notes) or "complete"
        self.progress.say(
            f"{name}: {report.source} ({report.layout}), sha256 {report.sha256[:12]}, {said}",
            missing=report.missing,
            unexpected=report.unexpected,
            beside=report.beside,
        )
        if report.unexpected:
            self.progress.say(f"{name}: not used of the checkpoint: {', '.join(report.unexpected)}")
        return model, ""

    def _loaded(self, name: str) -> Victim:
        config = self.experiment.models[name]
        fields = {k: v for k, v in vars(config).items() if k not in ("model", "paper", "note")}
        return load_model(config.model, **fields)

    def _facts(self, cell: Cell, model: Victim | None, reason: str) -> dict[str, Any]:
        return cell_facts(
            cell,
            self.experiment,
            model,
            true_labels=all(r.label is not None for r in self._records(cell.model)),
            attack=self.attacks[cell],
            images=len(self._records(cell.model)),
            data=self.source.path.resolve().name,
            labels=self.source.labels_described,
            reason=reason,
        )

    def _fail_cells(self, name: str, cells: list[Cell], reason: str) -> None:
        self.progress.say(f"{name}: FAILED. {reason}")
        self.failures[f"{name}: {reason}"] = None
        for cell in cells:
            for block in self._blocks(name):
                reasons = dict.fromkeys(block.records, reason)
                rows = reasoned_rows(self.facts[cell], reasons, "failed")
                self.store.write_rows(self.facts[cell]["run_id"], block.index, rows)
            self.progress.advance(len(self._records(name)), name)

    # one block --------------------------------------------------------------------------------

    def _bench(self, name: str, model: Victim) -> Workbench:
        return Workbench(model, self.experiment, self.device)

    def _records(self, name: str) -> Sequence[ImageRecord]:
        """The images of this model's cells."""
        return self.records

    def _blocks(self, name: str) -> Iterable[Block]:
        size, records = self.experiment.block, self._records(name)
        for index, start in enumerate(range(0, len(records), size)):
            yield Block(index, records[start : start + size])

    def _run_block(self, bench: Workbench, block: Block, cells: list[Cell]) -> None:
        pending = {}
        for cell in cells:
            left = self.inventory.unfinished(self.facts[cell]["run_id"], block)
            self.progress.skip(len(block.records) - len(left))
            if left:
                pending[cell] = left
        if not pending:
            return
        started = time.monotonic()
        images, lost = self.inventory.decode(block, bench.model)
        self._timing("decode", time.monotonic() - started, len(images), self.facts[cells[0]])
        for record, reason in lost.items():
            self.failures[f"{record.image_id}: {reason}"] = None
        for cell, left in pending.items():
            self._run_cell(bench, block, cell, left, images, lost)
        bench.forget()

    def _run_cell(
        self,
        bench: Workbench,
        block: Block,
        cell: Cell,
        left: Sequence[ImageRecord],
        images: Mapping[ImageRecord, torch.Tensor],
        lost: Mapping[ImageRecord, str],
    ) -> None:
        facts = self.facts[cell]
        lost = {**lost, **block.broken(lost, cell.client.batch)}
        # The whole block, also where some of its images are finished: their float32 numbers move
        # with the batch, and must be those of a run that never stopped.
        todo = [record for record in block.records if record not in lost]
        reasons = {record: lost[record] for record in block.records if record in lost}
        parts = [reasoned_rows(facts, reasons, "failed")]
        if todo:
            work = CellWork(bench, cell, self.attacks[cell], self._needs(cell, bench.model), facts)
            try:
                result = work.run(todo, [images[record] for record in todo])
            except UserError as error:  # such as images too small to score: the other cells run
                result = work.failed(todo, str(error))
            parts.append(result.rows)
            if result.tensors:
                self.store.merge_reconstructions(
                    facts["run_id"], block.index, result.tensors, result.image_ids
                )
            for record, reason in result.failed.items():
                self.failures[f"{cell.model}, {cell.setting}, {record.image_id}: {reason}"] = None
            for stage, seconds in result.seconds.items():
                self._timing(stage, seconds, len(todo), facts)
        order = [record.image_id for record in block.records]
        self.store.merge_rows(facts["run_id"], block.index, parts, order)
        self.progress.advance(len(left), f"{cell.model} {cell.setting} {cell.dtype}")

    def _needs(self, cell: Cell, model: Victim) -> list[str]:
        """Union over the attacks that share this cell's gradient, so that it never depends on
        which of them are finished already, and what every attack's residual is taken over."""

        def gradient(cell: Cell) -> tuple[Any, ...]:
            attack = self.attacks[cell]
            victim = None if isinstance(attack, Control) else attack.victim
            return cell.model, cell.setting, cell.gamma, cell.dtype, cell.client, victim

        sharing = [self.attacks[other] for other in self.cells if gradient(other) == gradient(cell)]
        attacks = [attack for attack in sharing if not isinstance(attack, Control)]
        named = [name for attack in attacks for name in attack.needs(model)]
        return list(dict.fromkeys([*named, RESIDUAL_OVER]))

    # records of the run -----------------------------------------------------------------------

    def _timing(self, stage: str, seconds: float, images: int, facts: Mapping[str, Any]) -> None:
        if images:
            self.store.append_timing(
                {
                    "run_id": facts["run_id"],
                    "stage": stage,
                    "seconds": round(seconds, 6),
                    "images": images,
                    "device": str(self.device),
                    "threads": torch.get_num_threads(),
                }
            )

    def _write_cells(self) -> None:
        self.store.merge_cells([*self.facts.values()], self.planned)
