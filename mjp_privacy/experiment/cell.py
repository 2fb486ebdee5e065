"""One cell on one block of images: observe the uploads, attack them, score the reconstructions.

    Worker.work_block ─ attack_cell ─ CellTask.run ─ run_steps ─ Attack.run

A block is attacked at once. Where memory does not hold it, it is halved; where something else
fails, each client step is attacked alone, so that what one image, attack or defence breaks stays
with it. Rows of a block that was halved carry the diagnostic `images_together`: each image's
upload is the same up to rounding, and random choices of an attack are drawn for the first image of
a piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.budget import OVER, SECONDS, over_budget
from attacks.equations import CERTAIN
from attacks.step import Done, Pieces, checked_reconstruction, run_steps
from attacks.step import without_reconstruction as unfinished
from mjp_privacy.client.gradients import predict
from mjp_privacy.core.errors import UserError, format_error, format_traceback
from mjp_privacy.core.machine import (
    clock,
    free_bytes,
    out_of_memory,
    release_memory,
    torch_generator,
    workers_beside,
)
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.block_file import Pictures, by_image
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.diagnostics import (
    bounds,
    diagnose,
    gradient_fit,
    mask_agreement,
    undeclared_error,
    unshuffled_uploads,
)
from mjp_privacy.experiment.source import (
    NO_TRUTH,
    Block0,
    ModelUploads,
    Observation,
    refused_by_network,
    refused_by_setting,
)
from mjp_privacy.interfaces import Control, Reconstruction
from mjp_privacy.metrics.matching import assigned
from mjp_privacy.metrics.scores import References, metrics_of_size, prepare, score
from mjp_privacy.uploads.checks import of_recorded

NO_PICTURE = "the attack names the masked positions and makes no picture"
TOGETHER = "images_together"
COPIES = 6  # of an image's uploads that are alive at once, counted in the attack's float64
SHARE = 0.5  # of the free memory that uploads may take
PLACE = "matched_place"
"""Diagnostic: the place, from 0, at which the attack returned this image's reconstruction in its
pool."""
BLOCKS0: dict[str, Block0] = {"intact": "intact", "altered": "april_block"}
"""The variants of `top1`, and block 0 of the model that makes each prediction."""


@dataclass(frozen=True)
class CellResult:
    rows: pd.DataFrame  # a row for each image, in their order: status, reason, scores, diagnostics
    pictures: Pictures = field(default_factory=dict)
    traces: Mapping[str, str] = field(default_factory=dict)  # tracebacks, by the rows' reason
    remark: str = ""  # what is said of it while the run goes on


def without_scores(records: Sequence[ImageRecord], status: str, reason: str) -> CellResult:
    """Rows of images of one status, without scores."""
    return CellResult(pd.DataFrame({"status": [status] * len(records), "reason": reason}))


def failed(records: Sequence[ImageRecord], error: BaseException) -> CellResult:
    """Rows of images that an error made fail, with its traceback where it is no user's mistake."""
    known = isinstance(error, UserError)
    reason = str(error) if known else format_error(error)
    result = without_scores(records, "failed", reason)
    return result if known else replace(result, traces={reason: format_traceback(error)})


@dataclass(frozen=True)
class CellTask:
    """A cell on a block: CellTask(...).run(records) attacks these images of it together."""

    uploads: ModelUploads
    cell: Cell
    gradients: Sequence[str]  # the parameters whose gradients the clients upload
    facts: CellFacts
    residual: bool  # whether the gradient of each reconstruction is compared with the upload

    @property
    def device(self) -> torch.device:
        return self.uploads.model.like.device

    def run(self, records: Sequence[ImageRecord]) -> CellResult:
        """Observe, attack and score these images: whole client steps, in order."""
        cell, uploads, count, attack = self.cell, self.uploads, len(records), self.cell.attacker
        untold = not cell.uploads and not uploads.scored
        refusal = NO_TRUTH if untold else refused_by_network(cell, uploads.model)
        refusal = refusal or uploads.lacks(cell, records) or refused_by_setting(cell)
        if refusal is not None:
            return without_scores(records, "unsupported", refusal.text)
        seen = uploads.observe(cell, self.gradients, records)

        def generator_of(step: int) -> torch.Generator:
            """For the attack's random choices from this step on; seeded by its first image, so that
            it does not depend on the rest of the block."""
            named = (cell.model, cell.attack.name, records[step * cell.client.batch].image_id)
            return torch_generator("attack", self.facts.seed, *named)

        if isinstance(attack, Control):
            answer = attack.run(seen.view, seen.plain, seen.inputs)
            made = checked_reconstruction(answer, seen.view, count)
            return self._scored(seen, records, Done(made, unfinished(made, count)))
        started = clock(self.device)
        if (refusal := attack.unsupported(seen.view)) is not None:
            return without_scores(records, "unsupported", refusal.text)
        done = run_steps(attack, seen.view, count, generator_of, cell.attack.seconds)
        attacked_at = clock(self.device)
        done = self._checked(seen, done)
        checked_at = clock(self.device)
        if uploads.scored:
            done = in_the_order_of(seen.target, done, seen.view.pool)
        result = self._scored(seen, records, done)
        taken = {
            **seen.seconds,
            "attack": attacked_at - started,
            "residual": checked_at - attacked_at,
            "score": clock(self.device) - checked_at,
        }
        columns = {f"stage_seconds.{stage}": each / count for stage, each in taken.items()}
        return replace(result, rows=result.rows.assign(**columns), traces=done.traces)

    def _checked(self, seen: Observation, done: Done) -> Done:
        """The reconstruction with diagnostics that need no private image. A residual takes a
        gradient for each upload, so they are timed apart from the scores."""
        made = done.reconstruction
        if made.images is None or len(done.failed) + len(made.inapplicable) >= len(made.images):
            return done
        checks = undeclared_error(seen.view)
        if self.residual:
            images, mode = made.images.float().cpu(), self.cell.client.mode
            fit = gradient_fit(seen.view, images, made.mask, seen.models, mode)
            checks |= {} if fit is None else {"gradient_residual": fit.scaled}
        with_checks = replace(made, diagnostics={**made.diagnostics, **checks})
        return replace(done, reconstruction=with_checks)

    def _scored(self, seen: Observation, records: Sequence[ImageRecord], done: Done) -> CellResult:
        """A row for every image: its scores, or the reason why it has none."""
        made, known = done.reconstruction, self.uploads.scored
        told = {at: ("unsupported", why) for at, why in made.inapplicable.items()}
        told |= {at: ("failed", why) for at, why in done.failed.items()}
        each = [told.get(at, ("ok", "")) for at in range(len(records))]
        rows = pd.DataFrame(each, columns=["status", "reason"])
        places: list[int] = np.flatnonzero(rows["status"] == "ok").tolist()
        diagnostics: dict[str, Tensor] = dict(made.diagnostics) if places else {}
        tensors: dict[str, Tensor] = {}
        columns: dict[str, NDArray[np.float64]] = {}
        if places and made.images is None:  # an attack that only names the masked positions
            agreement = mask_agreement(made.mask, seen.inputs) if known else {}
            diagnostics |= {**agreement, **unshuffled_uploads(seen.view, self.cell.gamma)}
            rows.loc[places] = ["unscored", NO_PICTURE]
        elif places and made.images is not None:
            # The scored images are exactly the stored ones, float32, so that scores can be
            # recomputed from the files.
            images = made.images.float().cpu()
            if known:
                tensors = {"images": images, **seen.tensors()}
                columns = self._scores(seen, records, images, places)
                memo = self.uploads.memo  # bounds are those of all cells of one client
                key = memo.content(seen.inputs.images), memo.content(seen.target)
                make = partial(bounds, seen, self.uploads.model)
                limits = memo.once(("bounds", self.cell.setting, *key), make)
                diagnostics |= diagnose(seen, made, images, limits)
                if self.uploads.declared and CERTAIN in diagnostics:
                    diagnostics |= of_recorded(seen.view, images, diagnostics)
            else:
                named = {} if made.mask is None else {"named_mask": made.mask.cpu()}
                tensors = {"images": images, **named}
                diagnostics |= of_recorded(seen.view, images, diagnostics)
                diagnostics |= unshuffled_uploads(seen.view, self.cell.gamma)
                rows.loc[places] = ["unscored", NO_TRUTH.text]
        for name, values in diagnostics.items():
            columns[f"{name}.diagnostic"] = values.cpu().double().numpy()[places]
        scored = pd.DataFrame(columns, index=places, dtype=np.float64).reindex(rows.index)
        rows = self._with_time(pd.concat([rows, scored], axis=1), made)
        pictured = [records[at].image_id for at in places] if tensors else []
        stored = {name: tensor[places] for name, tensor in tensors.items()}
        return CellResult(rows, by_image(pictured, stored))

    def _with_time(self, rows: pd.DataFrame, made: Reconstruction) -> pd.DataFrame:
        """The rows; those of images whose attack was ended by its time say so, also where it offers
        nothing of them."""
        seconds = self.cell.attack.seconds
        if seconds is not None and OVER in made.diagnostics:
            late = (made.diagnostics[OVER].cpu().numpy() == 1) & (rows["status"] != "failed")
            if late.any():
                rows.loc[late, f"{OVER}.diagnostic"] = 1.0
                rows.loc[late, f"{SECONDS}.diagnostic"] = seconds
            rows.loc[late & (rows["status"] == "ok"), "reason"] = over_budget(seconds)
        return rows

    def _scores(
        self,
        seen: Observation,
        records: Sequence[ImageRecord],
        images: Tensor,
        places: list[int],
    ) -> dict[str, NDArray[np.float64]]:
        """The scores of the images at these places, and whether the model classified their inputs
        correctly: NaN for an image without a label, or of which nobody recorded how it was fed."""
        memo, target, inputs = self.uploads.memo, seen.target, seen.inputs
        metrics = metrics_of_size(*target.shape[-2:])
        make = partial(prepare, target, metrics, device=self.device)
        references: References = memo.recent(memo.content(target), make)
        every = len(places) == len(images)
        scores = score(images[places], references if every else references.at(list(places)))
        columns = {f"{metric}.{variant}": values for (metric, variant), values in scores.items()}
        labelled = torch.tensor([record.label is not None for record in records])
        labelled &= not self.cell.gamma or inputs.mask is not None  # else what was fed is not known
        client, fed = self.cell.client, (memo.content(inputs.images), memo.content(inputs.mask))

        def predicted(block0: Block0) -> Tensor:
            model = self.uploads.accuracy_model(self.cell, block0)
            return predict(model, inputs.images, inputs.mask).cpu()

        for variant, block0 in BLOCKS0.items():
            if block0 == "april_block" and seen.view.model.family != "vit":
                continue  # only a plain ViT has a block 0 to alter
            correct = torch.full((len(images),), torch.nan, dtype=torch.float64)
            if labelled.any():
                key = ("prediction", block0, client.positions, client.adapters, *fed)
                classes = memo.once(key, partial(predicted, block0))
                right = (classes == inputs.labels.cpu()).double()
                correct = right.where(labelled, torch.nan)
            columns[f"top1.{variant}"] = correct.numpy()[places]
        return columns


def attack_cell(task: CellTask, records: Sequence[ImageRecord]) -> CellResult:
    """The cell's result for these images: whole client steps of a block, in order."""
    client, most = task.cell.client, len(records)
    if not client.undivided:
        most = _that_fit(task, most)
    cause = "" if most == len(records) else "memory holds fewer images"

    def smaller(piece: Sequence[ImageRecord], error: BaseException) -> list[Sequence[ImageRecord]]:
        nonlocal cause, most
        if out_of_memory(error):
            _forget(task)
        if client.undivided or len(piece) == client.batch:
            return []
        if not out_of_memory(error):
            return _steps(piece, client.batch)
        cause = cause or f"out of memory with {len(piece)} images"
        most = min(most, max(len(piece) // client.batch // 2, 1) * client.batch)
        return _steps(piece, most)

    pieces, parts = Pieces(_steps(records, most), smaller), list[CellResult]()
    for piece in pieces:
        with pieces:
            if len(piece) > most:
                raise MemoryError  # as an earlier piece has found out
            result = task.run(piece)
            if cause and len(piece) < len(records):
                _forget(task)
                ok = result.rows["status"] == "ok"
                together = ok.map({True: float(len(piece))})
                rows = result.rows.assign(**{f"{TOGETHER}.diagnostic": together})
                result = replace(result, rows=rows)
            parts.append(result)
        if pieces.failed is not None and not out_of_memory(pieces.failed):
            parts.append(failed(piece, pieces.failed))
        elif pieces.failed is not None:
            free = (free_bytes(task.device) or 0) / 2**30
            reason = (
                f"out of memory with {len(piece)} image(s) that belong together, and {free:.1f} "
                "GiB free: expected more memory, or a smaller client.batch"
            )
            parts.append(without_scores(piece, "failed", reason))
    facts, remark = task.facts, ""
    if cause:
        remark = (
            f"{facts.model} {facts.setting} {facts.attack} {facts.dtype}: {cause}, "
            f"computed {most} at a time. Their rows say so ({TOGETHER}): float32 APRIL and random "
            "choices of an attack may differ from those of a whole block"
        )
    return CellResult(
        pd.concat([part.rows for part in parts], ignore_index=True),
        {name: pictures for part in parts for name, pictures in part.pictures.items()},
        {reason: text for part in parts for reason, text in part.traces.items()},
        remark,
    )


def _steps(records: Sequence[ImageRecord], size: int) -> list[Sequence[ImageRecord]]:
    return [records[at : at + size] for at in range(0, len(records), size)]


def _that_fit(task: CellTask, images: int) -> int:
    """How many of the images are computed together: as many as memory holds the uploads of."""
    batch, free = task.cell.client.batch, free_bytes(task.device)
    if not free or not task.cell.uploads:
        return images
    parameters = dict(task.uploads.model.named_parameters())
    entries = sum(parameters[name].numel() for name in task.gradients if name in parameters)
    each = entries * task.cell.uploads * COPIES * torch.float64.itemsize
    while images > batch and images * each > SHARE * free / workers_beside():
        images = max(images // batch // 2, 1) * batch
    return images


def _forget(task: CellTask) -> None:
    """Drop what cells of the block share; later cells compute it again."""
    task.uploads.memo.clear()
    release_memory(task.device)


def in_the_order_of(target: Tensor, done: Done, pool: int) -> Done:
    """What an attack on batches returned, reordered so that place i belongs to the target's image
    i.

    An attack on a batch cannot say which of its pictures is which image: before they are scored,
    they are assigned one to one within each pool, and rows say from which place each one came.
    """
    answer = done.reconstruction
    if pool == 1 or answer.images is None:
        return done
    images = answer.images.float().cpu()  # as they are stored and scored
    starts = range(0, len(images), pool)
    own = [assigned(images[at : at + pool], target[at : at + pool]) for at in starts]
    order = torch.cat([places + at for places, at in zip(own, starts, strict=True)])
    moved = {int(old): new for new, old in enumerate(order)}

    def ordered(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[order.to(values.device)]

    diagnostics = {name: values.cpu()[order] for name, values in answer.diagnostics.items()}
    reordered = Reconstruction(
        ordered(answer.images),
        ordered(answer.mask),
        ordered(answer.permutation),
        {**diagnostics, PLACE: torch.cat(own).double()},
        {moved[at]: reason for at, reason in answer.inapplicable.items()},
    )
    return Done(reordered, {moved[at]: why for at, why in done.failed.items()}, done.traces)
