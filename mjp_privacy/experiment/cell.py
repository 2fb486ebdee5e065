"""One cell on one block of images: observe the uploads, attack them, score the reconstructions.

`work` calls `CellWork.run`. Uploads come from a `source`, attacks run in `step_by_step`; scores and
`diagnostics` become `rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from torch import Tensor

from attacks.budget import over_budget
from mjp_privacy.core.machine import clock, torch_generator
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment import shared_truth
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.diagnostics import (
    Scene,
    diagnose,
    mask_agreement,
    without_truth,
)
from mjp_privacy.experiment.matched import matched
from mjp_privacy.experiment.refusals import NO_TRUTH, refused_by_network, refused_by_setting
from mjp_privacy.experiment.rows import reasoned_rows, scored_rows
from mjp_privacy.experiment.source import BlockUploads
from mjp_privacy.experiment.step_by_step import OVER, reconstruct, without_reconstruction
from mjp_privacy.experiment.unshuffled import unshuffled_uploads
from mjp_privacy.experiment.valid_reconstruction import checked_reconstruction
from mjp_privacy.interfaces import Attack, Control, Reconstruction, Refusal, Truth
from mjp_privacy.metrics import score
from mjp_privacy.models import LoadedModel

NO_PICTURE = "the attack names the masked positions and makes no picture"


@dataclass(frozen=True)
class CellRows:
    """The results of one cell on images of one block."""

    rows: pd.DataFrame
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # of reconstructed images, to store
    image_ids: Sequence[str] = ()  # of `tensors`
    failed: Mapping[ImageRecord, str] = field(default_factory=dict)  # with the reason
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage
    traces: Mapping[str, str] = field(default_factory=dict)  # tracebacks, by reason


@dataclass(frozen=True)
class CellWork:
    """One cell on one block: CellWork(...).run(records) gives its rows."""

    uploads: BlockUploads
    model: LoadedModel
    cell: Cell
    attack: Attack | Control
    gradients: Sequence[str]  # the parameters whose gradients the clients upload
    facts: CellFacts

    def run(self, records: Sequence[ImageRecord]) -> CellRows:
        """Observe, attack and score these images: whole client steps, in order."""
        if isinstance(self.attack, Control):
            return self._run_control(self.attack, records)
        return self._run_attack(self.attack, records)

    def _run_attack(self, attack: Attack, records: Sequence[ImageRecord]) -> CellRows:
        if (refusal := self._refusal(attack, records)) is not None:
            return self._unsupported(records, refusal.text)
        observation = self.uploads.observe(self.cell, attack, self.gradients, records)
        scene = Scene.of(observation, self.cell, self.model)
        if (refusal := attack.unsupported(scene.view)) is not None:
            return self._unsupported(records, refusal.text)
        device = self.model.like.device
        started = clock(device)
        batch = scene.view.updates[0].batch
        traces: dict[str, str] = {}
        reconstruction, reasons = reconstruct(
            attack,
            scene.view,
            len(records) // batch,
            lambda step: self._generator(records, step),
            self.cell.attack.seconds,
            traces,
        )
        attacked_at = clock(device)
        reconstruction = self._checked(scene, reconstruction, len(reasons))
        checked_at = clock(device)
        if self.uploads.scored:
            reconstruction, reasons = matched(
                reconstruction, reasons, scene.target, scene.view.pool
            )
        failed = {records[place]: reason for place, reason in reasons.items()}
        rows = self._scored(scene, records, reconstruction, failed)
        seconds = {
            **observation.seconds,
            "attack": attacked_at - started,
            "residual": checked_at - attacked_at,
            "score": clock(device) - checked_at,
        }
        return replace(rows, failed=failed, seconds=seconds, traces=traces)

    def _refusal(self, attack: Attack, records: Sequence[ImageRecord]) -> Refusal | None:
        """Why the attack does not apply, as far as that is known before any upload; or None."""
        if (refusal := refused_by_network(self.cell, self.model, attack)) is not None:
            return refusal
        return self.uploads.lacks(attack, records) or refused_by_setting(self.cell, attack)

    def _run_control(self, control: Control, records: Sequence[ImageRecord]) -> CellRows:
        """Score a control; it reads the truth, so no upload is made for it."""
        if not self.uploads.scored:
            return self._unsupported(records, NO_TRUTH.text)
        if (refusal := refused_by_network(self.cell, self.model, control)) is not None:
            return self._unsupported(records, refusal.text)
        observation = self.uploads.observe(self.cell, None, (), records)
        scene = Scene.of(observation, self.cell, self.model)
        truth = Truth(scene.plain, scene.inputs.labels, scene.inputs.image_ids)
        generator = self._generator(records, 0)
        answer = control.run(scene.view, truth, scene.inputs, generator=generator)
        reconstruction = checked_reconstruction(answer, scene.view, len(records))
        reasons = without_reconstruction(reconstruction, len(records))
        failed = {records[place]: reason for place, reason in reasons.items()}
        reconstruction = self._checked(scene, reconstruction, len(reasons))
        return replace(self._scored(scene, records, reconstruction, failed), failed=failed)

    def _generator(self, records: Sequence[ImageRecord], step: int) -> torch.Generator:
        """The generator for the attack's random choices from this step on.

        It is seeded by the step's first image, so it does not depend on the rest of the block.
        """
        first = records[step * self.cell.client.batch].image_id
        named = (self.cell.model, self.cell.attack.name, first)
        return torch_generator("attack", self.facts.seed, *named)

    def _unsupported(self, records: Sequence[ImageRecord], reason: str) -> CellRows:
        """Rows of images that this attack does not apply to."""
        reasons = dict.fromkeys(records, reason)
        return CellRows(reasoned_rows(self.facts, reasons, "unsupported"))

    def failed(self, records: Sequence[ImageRecord], reason: str, trace: str = "") -> CellRows:
        """Rows of images for which this cell failed, all with the same reason."""
        reasons, traces = dict.fromkeys(records, reason), {reason: trace} if trace else {}
        rows = reasoned_rows(self.facts, reasons, "failed")
        return CellRows(rows, failed=reasons, traces=traces)

    # score ------------------------------------------------------------------------------------

    def _checked(self, scene: Scene, made: Reconstruction, failed: int) -> Reconstruction:
        """The reconstruction with diagnostics that need no private image. They take a gradient
        for each upload, so they are timed apart from the scores.

        failed  how many of its images failed
        """
        if made.images is None or failed + len(made.inapplicable) >= len(made.images):
            return made
        images, mode = made.images.float().cpu(), self.cell.client.mode
        checks = without_truth(scene.view, made, images, scene.models, mode)
        return replace(made, diagnostics={**made.diagnostics, **checks})

    def _scored(
        self,
        scene: Scene,
        records: Sequence[ImageRecord],
        reconstruction: Reconstruction,
        failed: Mapping[ImageRecord, str],
    ) -> CellRows:
        """Rows of every image: its scores, or the reason why it has none."""
        inapplicable = {records[at]: why for at, why in reconstruction.inapplicable.items()}
        parts = [
            reasoned_rows(self.facts, inapplicable, "unsupported"),
            reasoned_rows(self.facts, failed, "failed"),
        ]
        places = [at for at, r in enumerate(records) if r not in failed and r not in inapplicable]
        kept = [records[at] for at in places]
        tensors: dict[str, Tensor] = {}
        if kept and reconstruction.images is not None:
            # The scored images are exactly the stored ones, float32, so that scores can be
            # recomputed from the files.
            images = reconstruction.images.float().cpu()
            shown = scene, kept, places, reconstruction, images
            if self.uploads.scored:
                labelled = all(record.label is not None for record in records)
                made, tensors = self._pictures(*shown, labelled)
            else:
                made, tensors = self._pictures_without_truth(*shown)
            parts.insert(0, made)
        elif kept and reconstruction.mask is not None:
            known = self.uploads.scored  # without the truth the true mask is not known either
            agreement = mask_agreement(reconstruction.mask, scene.inputs) if known else {}
            unshuffled = unshuffled_uploads(scene.view, self.cell.gamma)
            diagnostics = {**reconstruction.diagnostics, **agreement, **unshuffled}
            parts.append(self._unscored(kept, places, diagnostics, NO_PICTURE))
        rows = pd.concat([part for part in parts if len(part)])
        rows = self._said_late(rows, records, reconstruction)
        return CellRows(rows, tensors, [r.image_id for r in kept] if tensors else [])

    def _said_late(
        self, rows: pd.DataFrame, records: Sequence[ImageRecord], made: Reconstruction
    ) -> pd.DataFrame:
        """The rows, with the reason in those of pictures that the attack had no time to finish."""
        seconds, cut = self.cell.attack.seconds, made.diagnostics.get(OVER)
        if seconds is None or cut is None:
            return rows
        late = {records[at].image_id for at, value in enumerate(cut.tolist()) if value == 1}
        here = rows["image_id"].isin(late) & (rows["status"] == "ok")
        return rows.assign(reason=rows["reason"].mask(here, over_budget(seconds)))

    def _pictures(
        self,
        scene: Scene,
        records: Sequence[ImageRecord],
        places: Sequence[int],
        reconstruction: Reconstruction,
        images: Tensor,
        labelled: bool,
    ) -> tuple[pd.DataFrame, dict[str, Tensor]]:
        """Rows with the scores of the images at these places, and the tensors to store."""
        chosen, everything = list(places), len(places) == len(images)
        tensors = {name: t[chosen] for name, t in {"images": images, **scene.tensors()}.items()}
        limits = shared_truth.limits(self.uploads, self.cell, self.model, scene)
        diagnosed = diagnose(self.cell, scene, reconstruction, images, limits)
        diagnostics = {**reconstruction.diagnostics, **diagnosed}
        device = self.model.like.device
        known = shared_truth.references(self.uploads, scene.target, device)
        correct = shared_truth.accuracy(self.uploads, self.cell, scene, labelled)
        rows = scored_rows(
            self.facts,
            records,
            score(tensors["images"], known if everything else known.at(chosen)),
            {name: values.cpu()[chosen] for name, values in diagnostics.items()},
            {name: None if right is None else right[chosen] for name, right in correct.items()},
        )
        return rows, tensors

    def _pictures_without_truth(
        self,
        scene: Scene,
        records: Sequence[ImageRecord],
        places: Sequence[int],
        reconstruction: Reconstruction,
        images: Tensor,
    ) -> tuple[pd.DataFrame, dict[str, Tensor]]:
        """The same without private images to compare with: diagnostics, but no scores."""
        unshuffled = unshuffled_uploads(scene.view, self.cell.gamma)
        diagnostics = {**reconstruction.diagnostics, **unshuffled}
        rows = self._unscored(records, places, diagnostics, NO_TRUTH.text)
        tensors = {"images": images[list(places)]}
        if reconstruction.mask is not None:
            tensors["named_mask"] = reconstruction.mask[list(places)].cpu()
        return rows, tensors

    def _unscored(
        self,
        records: Sequence[ImageRecord],
        places: Sequence[int],
        diagnostics: Mapping[str, Tensor],
        reason: str,
    ) -> pd.DataFrame:
        """Rows with these diagnostics, and with the status `unscored` for every score."""
        chosen = {name: values.cpu()[list(places)] for name, values in diagnostics.items()}
        rows = scored_rows(self.facts, records, {}, chosen, {})
        reasons = dict.fromkeys(records, reason)
        parts = rows, reasoned_rows(self.facts, reasons, "unscored")
        return pd.concat([part for part in parts if len(part)])
