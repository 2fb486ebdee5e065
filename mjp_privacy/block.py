"""One block of images in one cell: upload, attack, score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attacks.controls import psnr
from mjp_privacy.config import Cell
from mjp_privacy.data import ImageRecord
from mjp_privacy.interfaces import Attack, AttackerView, ClientInput, Reconstruction, Truth
from mjp_privacy.metrics import score
from mjp_privacy.rows import reasoned_rows, scored_rows
from mjp_privacy.seeding import torch_generator
from mjp_privacy.settings import SETTINGS
from mjp_privacy.workbench import Workbench


@dataclass(frozen=True)
class Block:
    """A fixed slice of the run's images, cut into client steps of `batch` images."""

    index: int
    records: Sequence[ImageRecord]
    batch: int = 1

    def steps(self) -> list[Sequence[ImageRecord]]:
        starts = range(0, len(self.records), self.batch)
        return [self.records[start : start + self.batch] for start in starts]

    def broken(self, lost: Mapping[ImageRecord, str]) -> dict[ImageRecord, str]:
        """Why images that can be read have no upload: another one of their step cannot."""
        reasons: dict[ImageRecord, str] = {}
        for step in self.steps():
            bad = [record.image_id for record in step if record in lost]
            reason = f"its client step also holds {', '.join(bad)}, which cannot be used"
            reasons |= {record: reason for record in step if bad and record not in lost}
        return reasons


@dataclass(frozen=True)
class BlockResult:
    """Rows of every image of the block, and the tensors of those that were reconstructed."""

    rows: pd.DataFrame
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    image_ids: list[str] = field(default_factory=list)
    failed: Mapping[ImageRecord, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CellWork:
    """One cell at its model's workbench. `facts`: the constant columns of the cell's rows."""

    bench: Workbench
    cell: Cell
    attack: Attack
    needs: Sequence[str]
    facts: Mapping[str, Any]

    def run(self, records: Sequence[ImageRecord], images: Sequence[Tensor]) -> BlockResult:
        """Upload, attack and score these images: whole client steps, in order."""
        bench, seconds = self.bench, dict[str, float]()
        plain = torch.stack(list(images))
        inputs = bench.inputs(self.cell, records, plain)
        update = bench.update(self.cell, self.attack, self.needs, inputs, seconds)
        victim = bench.victim(self.attack.victim, self.cell.dtype)
        view = AttackerView(victim, [update], bench.pixels)
        reason = self.attack.unsupported(view)
        if reason:
            rows = reasoned_rows(self.facts, dict.fromkeys(records, reason), "unsupported")
            return BlockResult(rows)
        started = bench.clock()
        found, reasons = self._reconstruct(view, records)
        seconds["attack"] = bench.clock() - started
        started = bench.clock()
        result = self._scored(records, plain, inputs, found, reasons)
        seconds["score"] = bench.clock() - started
        return replace(result, failed=reasons, seconds=seconds)

    def failed(self, records: Sequence[ImageRecord], reason: str) -> BlockResult:
        """Rows of images that this cell cannot do."""
        reasons = dict.fromkeys(records, reason)
        return BlockResult(reasoned_rows(self.facts, reasons, "failed"), failed=reasons)

    # attack -----------------------------------------------------------------------------------

    def _reconstruct(
        self, view: AttackerView, records: Sequence[ImageRecord]
    ) -> tuple[Reconstruction, dict[ImageRecord, str]]:
        """The reconstruction, and the reasons of images whose numbers broke down."""
        seed = self.bench.experiment.seed
        named = (self.cell.model, self.cell.attack.name, records[0].image_id)
        try:
            found = self.attack.run(view, generator=torch_generator("attack", seed, *named))
        except torch.linalg.LinAlgError as error:
            if len(records) > view.updates[0].batch:
                return self._step_by_step(view, records)
            reason = f"the attack's linear algebra broke down: {error}"
            return Reconstruction(None), dict.fromkeys(records, reason)
        assert found.images is not None
        finite = found.images.isfinite().flatten(1).all(-1).tolist()
        reason = "the reconstruction is not finite"
        return found, {r: reason for r, fine in zip(records, finite, strict=True) if not fine}

    def _step_by_step(
        self, view: AttackerView, records: Sequence[ImageRecord]
    ) -> tuple[Reconstruction, dict[ImageRecord, str]]:
        """Each client step alone, so that one that breaks down does not take the block along."""
        update, size = view.updates[0], view.pixels.size
        parts: list[Reconstruction] = []
        reasons: dict[ImageRecord, str] = {}
        for step, start in enumerate(range(0, len(records), update.batch)):
            grads = {name: grad[step : step + 1] for name, grad in update.grads.items()}
            members = records[start : start + update.batch]
            alone = replace(view, updates=[replace(update, grads=grads)])
            found, why = self._reconstruct(alone, members)
            lost = torch.full((len(members), len(view.pixels.mean), size, size), torch.nan)
            parts.append(found if found.images is not None else Reconstruction(lost))
            reasons |= why
        images = torch.cat([p.images.cpu() for p in parts if p.images is not None])
        names = dict.fromkeys(name for part in parts for name in part.diagnostics)
        missing = torch.full((update.batch,), torch.nan)
        diagnostics = {
            name: torch.cat([part.diagnostics.get(name, missing).cpu() for part in parts])
            for name in names
        }
        return Reconstruction(images, diagnostics=diagnostics), reasons

    # score ------------------------------------------------------------------------------------

    def _scored(
        self,
        records: Sequence[ImageRecord],
        plain: Tensor,
        inputs: ClientInput,
        found: Reconstruction,
        reasons: Mapping[ImageRecord, str],
    ) -> BlockResult:
        failed = reasoned_rows(self.facts, reasons, "failed")
        kept = [at for at, record in enumerate(records) if record not in reasons]
        if not kept:
            return BlockResult(failed)
        tensors = self._tensors(plain, inputs, found, kept)
        labelled = all(record.label is not None for record in records)
        diagnostics = {name: values.cpu()[kept] for name, values in found.diagnostics.items()}
        correct = self.bench.accuracy(self.cell, inputs, labelled)
        rows = scored_rows(
            self.facts,
            [records[at] for at in kept],
            score(tensors["images"], tensors["target"], device=self.bench.device),
            diagnostics | self._diagnostics(inputs, tensors["target"], kept),
            {name: None if right is None else right[kept] for name, right in correct.items()},
        )
        ids = [records[at].image_id for at in kept]
        return BlockResult(pd.concat([rows, failed]) if len(failed) else rows, tensors, ids)

    def _tensors(
        self, plain: Tensor, inputs: ClientInput, found: Reconstruction, kept: list[int]
    ) -> dict[str, Tensor]:
        """What is stored is what is scored: float32, so scores can be made again from the files."""
        assert found.images is not None
        target = SETTINGS[self.cell.setting].target(Truth(plain, None, inputs.image_ids), inputs)
        tensors = {
            "images": found.images.float().cpu()[kept],
            "target": target[kept],
            "plain": plain[kept],
            "input": inputs.images[kept],
        }
        if inputs.mask is not None and inputs.permutation is not None:
            tensors |= {"mask": inputs.mask[kept], "permutation": inputs.permutation[kept]}
        return tensors

    def _diagnostics(
        self, inputs: ClientInput, target: Tensor, kept: list[int]
    ) -> dict[str, Tensor]:
        """Ceiling, floor and the realised mask.

        The ceiling is the oracle inverse against the image the client fed. In setting c that is
        out of an attack's reach until it puts the patches back; the same oracle left in the order
        it was fed stands beside it.
        """
        oracle = self.bench.oracle(self.cell, inputs)[kept]
        grey = torch.full_like(target, 0.5)
        found = {
            "ceiling_psnr": psnr(oracle, inputs.images[kept]),
            "grey_psnr": psnr(grey, target),
        }
        if self.cell.setting == "c":
            found["oracle_in_place_psnr"] = psnr(oracle, target)
        if inputs.mask is not None and inputs.permutation is not None:
            count = inputs.mask.sum(-1)
            moved = (inputs.permutation != torch.arange(inputs.permutation.shape[-1])).sum(-1)
            found |= {
                "shuffled_patches": count[kept],
                "moved_patches": moved[kept],
                "empty_mask": (count == 0).double()[kept],
            }
        return found
