"""One block of images in one cell: upload, attack, score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.client.settings import SETTINGS
from mjp_privacy.core.seeding import torch_generator
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.block import BlockResult
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.diagnostics import Scene, diagnose, mask_agreement, residual
from mjp_privacy.experiment.rows import reasoned_rows, scored_rows
from mjp_privacy.experiment.simulated import Workbench
from mjp_privacy.experiment.steps import joined, step_alone
from mjp_privacy.interfaces import (
    Attack,
    AttackerView,
    ClientInput,
    ClientUpdate,
    Control,
    Reconstruction,
    Setting,
    Truth,
)
from mjp_privacy.metrics import score
from mjp_privacy.models import Victim

NO_ONE_INPUT = (
    "each upload was shuffled differently: there is no one shuffled image to reconstruct; "
    "score several uploads against the plain image (setting c)"
)

NO_TRUTH = "the private images were not given, so nothing is scored"

NO_PICTURE = "the attack names the masked positions and makes no picture"


@dataclass(frozen=True)
class CellWork:
    """One cell at its model's workbench. `facts`: the constant columns of the cell's rows."""

    bench: Workbench
    cell: Cell
    attack: Attack | Control
    needs: Sequence[str]
    facts: Mapping[str, Any]

    def run(self, records: Sequence[ImageRecord], images: Sequence[Tensor]) -> BlockResult:
        """Upload, attack and score these images: whole client steps, in order."""
        photographs = torch.stack(list(images))
        if isinstance(self.attack, Control):
            return self._run_control(self.attack, records, photographs)
        return self._run_attack(self.attack, records, photographs)

    def _run_attack(
        self, attack: Attack, records: Sequence[ImageRecord], photographs: Tensor
    ) -> BlockResult:
        bench, cell, seconds = self.bench, self.cell, dict[str, float]()
        if (lacking := bench.lacks(attack, records)) is not None:
            return self._unsupported(records, lacking)
        if attack.uploads > 1 and self._setting.shuffles and self._setting.against == "input":
            return self._unsupported(records, NO_ONE_INPUT)
        rounds = [bench.steps(cell, records, photographs, r) for r in range(attack.uploads)]
        first = [steps[0] for steps in rounds]
        models = bench.models(cell, attack, first, seconds)
        updates = bench.updates(cell, attack, self.needs, rounds, models, seconds)
        scene = self._scene(records, photographs, first[0], models, updates)
        reason = attack.unsupported(scene.view)
        if reason:
            return self._unsupported(records, reason)
        started = bench.clock()
        found, reasons = self._reconstruct(attack, scene.view, records)
        seconds["attack"] = bench.clock() - started
        started = bench.clock()
        result = self._scored(scene, records, found, reasons)
        seconds["score"] = bench.clock() - started
        return replace(result, failed=reasons, seconds=seconds)

    def _run_control(
        self, control: Control, records: Sequence[ImageRecord], photographs: Tensor
    ) -> BlockResult:
        """No upload is made for it: it has the truth."""
        if not self.bench.has_truth:
            return self._unsupported(records, NO_TRUTH)
        inputs = self.bench.inputs(self.cell, records, photographs)
        scene = self._scene(records, photographs, inputs, [self.bench.model], [])
        truth = Truth(scene.plain, inputs.labels, inputs.image_ids)
        found = control.run(scene.view, truth, inputs, generator=self._generator(records))
        found, reasons = checked(found, records)
        return replace(self._scored(scene, records, found, reasons), failed=reasons)

    def _scene(
        self,
        records: Sequence[ImageRecord],
        photographs: Tensor,
        inputs: ClientInput,
        models: Sequence[Victim],
        updates: Sequence[ClientUpdate],
    ) -> Scene:
        against, pixels = self._setting.against, self.bench.pixels
        plain = self.bench.photographs(self.cell, records, photographs)
        target = self._setting.target(Truth(plain, None, inputs.image_ids), inputs)
        labels = self.bench.known_labels(inputs)
        view = AttackerView(models[0], updates, pixels, labels, against)
        return Scene(photographs, plain, inputs, target, models, view)

    @property
    def _setting(self) -> Setting:
        return SETTINGS[self.cell.setting]

    def _unsupported(self, records: Sequence[ImageRecord], reason: str) -> BlockResult:
        """Rows of images that this attack does not apply to."""
        reasons = dict.fromkeys(records, reason)
        return BlockResult(reasoned_rows(self.facts, reasons, "unsupported"))

    def failed(self, records: Sequence[ImageRecord], reason: str) -> BlockResult:
        """Rows of images that this cell cannot do."""
        reasons = dict.fromkeys(records, reason)
        return BlockResult(reasoned_rows(self.facts, reasons, "failed"), failed=reasons)

    # attack -----------------------------------------------------------------------------------

    def _generator(self, records: Sequence[ImageRecord]) -> torch.Generator:
        named = (self.cell.model, self.cell.attack.name, records[0].image_id)
        return torch_generator("attack", self.bench.experiment.seed, *named)

    def _reconstruct(
        self, attack: Attack, view: AttackerView, records: Sequence[ImageRecord]
    ) -> tuple[Reconstruction, dict[ImageRecord, str]]:
        """The reconstruction, and the reasons of images whose numbers broke down."""
        try:
            found = attack.run(view, generator=self._generator(records))
        except (torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:
            if len(records) > view.updates[0].batch:
                return self._step_by_step(attack, view, records)
            reason = f"the attack's linear algebra broke down: {error}"
            return Reconstruction(None), dict.fromkeys(records, reason)
        return checked(found, records)

    def _step_by_step(
        self, attack: Attack, view: AttackerView, records: Sequence[ImageRecord]
    ) -> tuple[Reconstruction, dict[ImageRecord, str]]:
        """Each client step alone, so that one that breaks down does not take the block along."""
        batch, size = view.updates[0].batch, view.pixels.size
        parts: list[Reconstruction] = []
        reasons: dict[ImageRecord, str] = {}
        for start in range(0, len(records), batch):
            members = records[start : start + batch]
            found, why = self._reconstruct(attack, step_alone(view, start // batch), members)
            lost = torch.full((len(members), len(view.pixels.mean), size, size), torch.nan)
            parts.append(found if found.images is not None else replace(found, images=lost))
            reasons |= why
        return joined(parts), reasons

    # score ------------------------------------------------------------------------------------

    def _scored(
        self,
        scene: Scene,
        records: Sequence[ImageRecord],
        found: Reconstruction,
        reasons: Mapping[ImageRecord, str],
    ) -> BlockResult:
        inapplicable = {records[at]: reason for at, reason in found.inapplicable.items()}
        others = [
            reasoned_rows(self.facts, inapplicable, "unsupported"),
            reasoned_rows(self.facts, reasons, "failed"),
        ]
        without = [rows for rows in others if len(rows)]
        kept = [at for at, r in enumerate(records) if r not in reasons and r not in inapplicable]
        if kept and found.images is None and found.mask is not None:
            without.append(self._without_picture(scene, [records[at] for at in kept], found, kept))
        if not kept or found.images is None:
            return BlockResult(pd.concat(without))
        # What is stored is what is scored: float32, so scores can be made again from the files.
        images = found.images.float().cpu()
        if not self.bench.has_truth:
            result = self._unscored(scene, [records[at] for at in kept], found, images, kept)
            return replace(result, rows=pd.concat([result.rows, *without]))
        tensors = {name: t[kept] for name, t in {"images": images, **scene.tensors()}.items()}
        labelled = all(record.label is not None for record in records)
        beside = {**found.diagnostics, **diagnose(self.bench, self.cell, scene, found, images)}
        correct = self.bench.accuracy(self.cell, scene.inputs, labelled)
        rows = scored_rows(
            self.facts,
            [records[at] for at in kept],
            score(tensors["images"], tensors["target"], device=self.bench.device),
            {name: values.cpu()[kept] for name, values in beside.items()},
            {name: None if right is None else right[kept] for name, right in correct.items()},
        )
        ids = [records[at].image_id for at in kept]
        return BlockResult(pd.concat([rows, *without]), tensors, ids)

    def _unscored(
        self,
        scene: Scene,
        records: Sequence[ImageRecord],
        found: Reconstruction,
        images: Tensor,
        kept: Sequence[int],
    ) -> BlockResult:
        """The reconstruction, and what stands beside it without truth."""
        mode = self.cell.client.mode
        told = {**found.diagnostics, **residual(scene.view, found, images, scene.models, mode)}
        diagnostics = {name: values.cpu()[list(kept)] for name, values in told.items()}
        rows = scored_rows(self.facts, records, {}, diagnostics, {})
        reasons = dict.fromkeys(records, NO_TRUTH)
        both = pd.concat([rows, reasoned_rows(self.facts, reasons, "unscored")])
        ids = [record.image_id for record in records]
        return BlockResult(both, {"images": images[list(kept)]}, ids)

    def _without_picture(
        self,
        scene: Scene,
        records: Sequence[ImageRecord],
        found: Reconstruction,
        kept: Sequence[int],
    ) -> pd.DataFrame:
        """Rows of an attack that names the masked positions only: every score `unscored`."""
        told = {**found.diagnostics, **mask_agreement(found.mask, scene.inputs)}
        diagnostics = {name: values.cpu()[list(kept)] for name, values in told.items()}
        rows = scored_rows(self.facts, records, {}, diagnostics, {})
        reasons = dict.fromkeys(records, NO_PICTURE)
        return pd.concat([rows, reasoned_rows(self.facts, reasons, "unscored")])


def checked(
    found: Reconstruction, records: Sequence[ImageRecord]
) -> tuple[Reconstruction, dict[ImageRecord, str]]:
    """With the reasons of images that have no finite reconstruction and should."""
    wanted = {at: record for at, record in enumerate(records) if at not in found.inapplicable}
    if found.images is None and found.mask is not None:
        return found, {}  # it names the mask and makes no picture
    if found.images is None:
        return found, dict.fromkeys(wanted.values(), "the attack returned no reconstruction")
    finite = found.images.isfinite().flatten(1).all(-1).tolist()
    reason = "the reconstruction is not finite"
    return found, {record: reason for at, record in wanted.items() if not finite[at]}
