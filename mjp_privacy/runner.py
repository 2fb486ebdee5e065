"""Runs an experiment: model by model, block of images by block, cell by cell.

    decode -> Setting.prepare -> client gradient (once per input, precision and victim)
           -> Attack.run -> stored -> scored -> rows

A unit, one image in one cell, is finished when its rows are on disk. Blocks are fixed by the
config, so a killed run goes on where it stopped and ends with the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from attacks import find_attack
from mjp_privacy.block import Block, Workbench
from mjp_privacy.cells import cell_facts, cell_key
from mjp_privacy.config import Cell, Experiment, expand, load_experiment, with_gamma, with_weights
from mjp_privacy.data import ImageRecord, ImageSource, open_images, spread_subset
from mjp_privacy.errors import UserError
from mjp_privacy.interfaces import Attack
from mjp_privacy.inventory import Inventory
from mjp_privacy.models import Victim, load_model
from mjp_privacy.progress import RunProgress
from mjp_privacy.rows import reasoned_rows
from mjp_privacy.store import RunStore, write_atomically


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
    path = images if images is not None else experiment.images
    if path is None:
        raise UserError("No images given: expected --images PATH (a folder, a zip or 'embedded').")
    source = open_images(path, labels)
    records = spread_subset(source.records, limit, experiment.seed)
    run = Run(experiment, source, records, RunStore(Path(out)), pick_device(device))
    return run.execute()


def pick_device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: expected auto, cpu or cuda, got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device here. Use --device cpu or auto.")
    use_cuda = name != "cpu" and torch.cuda.is_available()
    if use_cuda:  # float32 must mean float32
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
    return torch.device("cuda" if use_cuda else "cpu")


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
        self.inventory = Inventory(self.store, self.source, self.records)
        self.inventory.check_known()
        self.facts: dict[Cell, dict[str, Any]] = {}
        self.failures: list[str] = []
        self._write_experiment()
        total = len(self.records) * len(self.cells)
        with RunProgress(total, self.store.root / "log.jsonl") as self.progress:
            for name in self.experiment.models:
                cells = [cell for cell in self.cells if cell.model == name]
                if cells:
                    self._run_model(name, cells)
        self._write_cells()
        return RunSummary(self.store.root, len(self.cells), len(self.records), tuple(self.failures))

    def _distinct(self) -> Iterable[Cell]:
        """The cells, each once: two of one key would fight over the same rows."""
        seen: set[str] = set()
        for cell in self.cells:
            key = cell_key(cell, self.experiment)
            if key in seen:
                raise UserError(
                    f"The grid holds {cell.model}, setting {cell.setting}, gamma {cell.gamma}, "
                    f"{cell.dtype}, {cell.attack.name} twice. Expected each cell once."
                )
            seen.add(key)
            yield cell

    # one model --------------------------------------------------------------------------------

    def _run_model(self, name: str, cells: list[Cell]) -> None:
        model, reason = self._load(name)
        for cell in cells:
            self.facts[cell] = self._facts(cell, model, reason)
        self._write_cells()
        if model is None:
            self._fail_cells(name, cells, reason)
            return
        bench = Workbench(model, self.experiment, self.device)
        for index, records in self._blocks():
            self._run_block(bench, Block(index, records), cells)

    def _load(self, name: str) -> tuple[Victim | None, str]:
        config = self.experiment.models[name]
        fields = {k: v for k, v in vars(config).items() if k not in ("model", "paper", "note")}
        try:
            model = load_model(config.model, **fields)
            self._check_labels(model)
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

    def _check_labels(self, model: Victim) -> None:
        classes = model.card.num_classes
        wrong = [r for r in self.records if r.label is not None and not 0 <= r.label < classes]
        if wrong:
            raise UserError(
                f"Image {wrong[0].image_id} has label {wrong[0].label}, but the model has "
                f"{classes} classes ({len(wrong)} such images). Give the labels of the model's own "
                "classes with --labels, or images without labels."
            )

    def _facts(self, cell: Cell, model: Victim | None, reason: str) -> dict[str, Any]:
        return cell_facts(
            cell,
            self.experiment,
            model,
            true_labels=all(record.label is not None for record in self.records),
            victim=self._attack(cell).victim,
            data=self.source.path.name,
            labels=self.source.labels_described,
            reason=reason,
        )

    def _attack(self, cell: Cell) -> Attack:
        return self.attacks[cell]

    def _fail_cells(self, name: str, cells: list[Cell], reason: str) -> None:
        self.progress.say(f"{name}: FAILED. {reason}")
        self.failures.append(f"{name}: {reason}")
        for cell in cells:
            for index, records in self._blocks():
                rows = reasoned_rows(self.facts[cell], dict.fromkeys(records, reason), "failed")
                self.store.write_rows(self.facts[cell]["run_id"], index, rows)
            self.progress.advance(len(self.records), name)

    # one block --------------------------------------------------------------------------------

    def _blocks(self) -> Iterable[tuple[int, Sequence[ImageRecord]]]:
        size = self.experiment.block
        for index, start in enumerate(range(0, len(self.records), size)):
            yield index, self.records[start : start + size]

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
        images, unreadable = self.inventory.decode(block, bench.model)
        self._timing("decode", time.monotonic() - started, len(images), self.facts[cells[0]])
        self.failures += [
            f"{record.image_id}: {reason}"
            for record, reason in unreadable.items()
            if f"{record.image_id}: {reason}" not in self.failures
        ]
        for cell, left in pending.items():
            self._run_cell(bench, block, cell, left, images, unreadable)
        bench.forget()

    def _run_cell(
        self,
        bench: Workbench,
        block: Block,
        cell: Cell,
        left: Sequence[ImageRecord],
        images: Mapping[ImageRecord, torch.Tensor],
        unreadable: Mapping[ImageRecord, str],
    ) -> None:
        facts, attack = self.facts[cell], self._attack(cell)
        todo = [record for record in left if record in images]
        lost = {record: unreadable[record] for record in left if record in unreadable}
        parts = [reasoned_rows(facts, lost, "failed")]
        if todo:
            needs = self._needs(cell, bench.model)
            result = bench.attack(cell, attack, needs, facts, todo, [images[r] for r in todo])
            parts.append(result.rows)
            if result.tensors:
                self.store.merge_reconstructions(
                    facts["run_id"], block.index, result.tensors, result.image_ids
                )
            self.failures += [f"{cell.model}, {cell.setting}: {reason}" for reason in result.failed]
            for stage, seconds in result.seconds.items():
                self._timing(stage, seconds, len(todo), facts)
        order = [record.image_id for record in block.records]
        self.store.merge_rows(facts["run_id"], block.index, parts, order)
        self.progress.advance(len(left), f"{cell.model} {cell.setting} {cell.dtype}")

    def _needs(self, cell: Cell, model: Victim) -> list[str]:
        """Union over the attacks that share this cell's gradient, so that it never depends on
        which of them are finished already."""
        names: list[str] = []
        for other, attack in self.attacks.items():
            if _same_gradient(other, cell) and attack.victim == self._attack(cell).victim:
                names += [name for name in attack.needs(model) if name not in names]
        return names

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

    def _write_experiment(self) -> None:
        from mjp_privacy.provenance import provenance

        content = {"experiment": _plain(self.experiment), "made_with": provenance(self.device)}
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_atomically(
            self.store.root / "experiment.yaml", lambda path: path.write_text(text, "utf-8")
        )

    def _write_cells(self) -> None:
        """This command's cells in their order, then older ones that it does not replace."""
        mine = [self.facts[cell] for cell in self.cells if cell in self.facts]
        keys = {facts["cell_key"] for facts in mine}
        try:
            older = [f for f in self.store.read_cells() if f["cell_key"] not in keys]
        except UserError:
            older = []
        self.store.write_cells([*mine, *older])


def _same_gradient(one: Cell, other: Cell) -> bool:
    def fields(cell: Cell) -> tuple[Any, ...]:
        return cell.model, cell.setting, cell.gamma, cell.dtype

    return fields(one) == fields(other)


def _plain(experiment: Experiment) -> dict[str, Any]:
    """Fields for a YAML file: tuples as lists, and checkpoints by file name only."""
    from pydantic import TypeAdapter

    content: dict[str, Any] = TypeAdapter(Experiment).dump_python(experiment, mode="json")
    for model in content["models"].values():
        if model["checkpoint"]:
            model["checkpoint"] = Path(model["checkpoint"]).name
    return content
