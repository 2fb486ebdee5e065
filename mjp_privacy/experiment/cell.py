"""One block of images in one cell: observe, attack, score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.client.gradients import predict
from mjp_privacy.client.settings import SETTINGS
from mjp_privacy.core.device import clock
from mjp_privacy.core.seeding import torch_generator
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.diagnostics import Scene, diagnose, mask_agreement, oracle, residual
from mjp_privacy.experiment.facts import CellFacts
from mjp_privacy.experiment.rows import reasoned_rows, scored_rows
from mjp_privacy.experiment.source import BlockUploads, Observation
from mjp_privacy.experiment.step_by_step import reconstruct, without_reconstruction
from mjp_privacy.interfaces import (
    Attack,
    AttackerView,
    Control,
    Pixels,
    Reconstruction,
    Refusal,
    Truth,
)
from mjp_privacy.metrics import score
from mjp_privacy.models import LoadedModel

NO_ONE_INPUT = Refusal(
    "target",
    "each upload was shuffled differently: there is no one shuffled image to reconstruct; "
    "score several uploads against the plain image (setting c)",
)
NO_TRUTH = "the private images were not given, so nothing is scored"
NO_PICTURE = "the attack names the masked positions and makes no picture"


@dataclass(frozen=True)
class CellRows:
    """What one cell made of images of one block: their rows, and the tensors of those that were
    reconstructed."""

    rows: pd.DataFrame
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    image_ids: Sequence[str] = ()
    failed: Mapping[ImageRecord, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CellWork:
    """One cell on one block's uploads."""

    uploads: BlockUploads
    model: LoadedModel
    cell: Cell
    attack: Attack | Control
    gradients: Sequence[str]  # names that the clients upload
    facts: CellFacts

    def run(self, records: Sequence[ImageRecord]) -> CellRows:
        """Observe, attack and score these images: whole client steps, in order."""
        if isinstance(self.attack, Control):
            return self._run_control(self.attack, records)
        return self._run_attack(self.attack, records)

    def _run_attack(self, attack: Attack, records: Sequence[ImageRecord]) -> CellRows:
        if (refusal := self._refusal(attack, records)) is not None:
            return self._unsupported(records, refusal.text)
        seen = self.uploads.observe(self.cell, attack, self.gradients, records)
        scene = self._scene(seen)
        if (refusal := attack.unsupported(scene.view)) is not None:
            return self._unsupported(records, refusal.text)
        device = self.model.cls_token.device
        started = clock(device)
        batch = scene.view.updates[0].batch
        made, reasons = reconstruct(
            attack, scene.view, len(records) // batch, lambda step: self._generator(records, step)
        )
        attacked = clock(device)
        failed = {records[place]: reason for place, reason in reasons.items()}
        rows = self._scored(scene, records, made, failed)
        seconds = {
            **seen.seconds,
            "attack": attacked - started,
            "score": clock(device) - attacked,
        }
        return replace(rows, failed=failed, seconds=seconds)

    def _refusal(self, attack: Attack, records: Sequence[ImageRecord]) -> Refusal | None:
        """Why nothing need be uploaded for this attack, or None."""
        if (lacking := self.uploads.lacks(attack, records)) is not None:
            return lacking
        setting = SETTINGS[self.cell.setting]
        several = attack.uploads > 1 and setting.shuffles and setting.against == "input"
        return NO_ONE_INPUT if several else None

    def _run_control(self, control: Control, records: Sequence[ImageRecord]) -> CellRows:
        """No upload is made for it: it has the truth."""
        if not self.uploads.scored:
            return self._unsupported(records, NO_TRUTH)
        scene = self._scene(self.uploads.observe(self.cell, None, (), records))
        truth = Truth(scene.plain, scene.inputs.labels, scene.inputs.image_ids)
        made = control.run(scene.view, truth, scene.inputs, generator=self._generator(records, 0))
        reasons = without_reconstruction(made, len(records))
        failed = {records[place]: reason for place, reason in reasons.items()}
        return replace(self._scored(scene, records, made, failed), failed=failed)

    def _scene(self, seen: Observation) -> Scene:
        setting, card = SETTINGS[self.cell.setting], self.model.card
        target = setting.target(Truth(seen.plain, None, seen.inputs.image_ids), seen.inputs)
        pixels = Pixels(card.img_size, card.mean, card.std)
        view = AttackerView(seen.models[0], seen.updates, pixels, seen.labels, setting.against)
        return Scene(seen.photographs, seen.plain, seen.inputs, target, seen.models, view)

    def _generator(self, records: Sequence[ImageRecord], step: int) -> torch.Generator:
        """Of the attack's random choices from this step on, named by the step's first image."""
        first = records[step * self.cell.client.batch].image_id
        named = (self.cell.model, self.cell.attack.name, first)
        return torch_generator("attack", self.facts.seed, *named)

    def _unsupported(self, records: Sequence[ImageRecord], reason: str) -> CellRows:
        """Rows of images that this attack does not apply to."""
        reasons = dict.fromkeys(records, reason)
        return CellRows(reasoned_rows(self.facts, reasons, "unsupported"))

    def failed(self, records: Sequence[ImageRecord], reason: str) -> CellRows:
        """Rows of images that this cell cannot do."""
        reasons = dict.fromkeys(records, reason)
        return CellRows(reasoned_rows(self.facts, reasons, "failed"), failed=reasons)

    # score ------------------------------------------------------------------------------------

    def _scored(
        self,
        scene: Scene,
        records: Sequence[ImageRecord],
        made: Reconstruction,
        failed: Mapping[ImageRecord, str],
    ) -> CellRows:
        """Rows of every image: scores, or the reason why it has none."""
        inapplicable = {records[at]: reason for at, reason in made.inapplicable.items()}
        parts = [
            reasoned_rows(self.facts, inapplicable, "unsupported"),
            reasoned_rows(self.facts, failed, "failed"),
        ]
        places = [at for at, r in enumerate(records) if r not in failed and r not in inapplicable]
        kept = [records[at] for at in places]
        tensors: dict[str, Tensor] = {}
        if kept and made.images is not None:
            # What is stored is what is scored: float32, so scores can be made again from the files.
            images = made.images.float().cpu()
            if self.uploads.scored:
                labelled = all(record.label is not None for record in records)
                scored = self._pictures(scene, kept, places, made, images, labelled)
            else:
                scored = self._pictures_without_truth(scene, kept, places, made, images)
            parts.insert(0, scored[0])
            tensors = scored[1]
        elif kept and made.mask is not None:
            beside = {**made.diagnostics, **mask_agreement(made.mask, scene.inputs)}
            parts.append(self._unscored(kept, places, beside, NO_PICTURE))
        rows = pd.concat([part for part in parts if len(part)])
        return CellRows(rows, tensors, [r.image_id for r in kept] if tensors else [])

    def _pictures(
        self,
        scene: Scene,
        records: Sequence[ImageRecord],
        places: Sequence[int],
        made: Reconstruction,
        images: Tensor,
        labelled: bool,
    ) -> tuple[pd.DataFrame, dict[str, Tensor]]:
        """Scores of the reconstructions at these places, and what is stored of them."""
        chosen = list(places)
        tensors = {name: t[chosen] for name, t in {"images": images, **scene.tensors()}.items()}
        bound = self.uploads.memo.once(
            ("oracle", *self._input_key(scene)), partial(oracle, self.model, scene.inputs)
        )
        beside = {**made.diagnostics, **diagnose(self.cell, scene, made, images, bound)}
        device = self.model.cls_token.device
        rows = scored_rows(
            self.facts,
            records,
            score(tensors["images"], tensors["target"], device=device),
            {name: values.cpu()[chosen] for name, values in beside.items()},
            {
                name: None if correct is None else correct[chosen]
                for name, correct in self._accuracy(scene, labelled).items()
            },
        )
        return rows, tensors

    def _pictures_without_truth(
        self,
        scene: Scene,
        records: Sequence[ImageRecord],
        places: Sequence[int],
        made: Reconstruction,
        images: Tensor,
    ) -> tuple[pd.DataFrame, dict[str, Tensor]]:
        """What stands beside reconstructions that nothing is compared with."""
        mode = self.cell.client.mode
        beside = {**made.diagnostics, **residual(scene.view, made, images, scene.models, mode)}
        rows = self._unscored(records, places, beside, NO_TRUTH)
        return rows, {"images": images[list(places)]}

    def _unscored(
        self,
        records: Sequence[ImageRecord],
        places: Sequence[int],
        beside: Mapping[str, Tensor],
        reason: str,
    ) -> pd.DataFrame:
        """Diagnostics, and every score `unscored`."""
        diagnostics = {name: values.cpu()[list(places)] for name, values in beside.items()}
        rows = scored_rows(self.facts, records, {}, diagnostics, {})
        reasons = dict.fromkeys(records, reason)
        return pd.concat([rows, reasoned_rows(self.facts, reasons, "unscored")])

    def _accuracy(self, scene: Scene, labelled: bool) -> dict[str, Tensor | None]:
        """Whether the intact and the altered model are right on this row's input; None where an
        image of the block carries no true label."""
        if not labelled:
            return {"intact": None, "altered": None}
        correct: dict[str, Tensor | None] = {}
        for column, block0 in (("intact", "intact"), ("altered", "april_block")):
            model = self.uploads.accuracy_model(self.cell, block0)  # type: ignore[arg-type]
            predicted = self.uploads.memo.once(
                ("prediction", block0, *self._input_key(scene)),
                partial(predict, model, scene.inputs.images, scene.inputs.mask),
            )
            correct[column] = predicted == scene.inputs.labels
        return correct

    def _input_key(self, scene: Scene) -> tuple[object, ...]:
        """All that decides what the client fed."""
        return self.cell.client, self.cell.setting, self.cell.gamma, scene.inputs.image_ids
