"""One block of images at one model: inputs, gradients and accuracies are made once and shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attacks.controls import oracle_inverse, psnr
from mjp_privacy.clients.fedsgd import FedSGDClient, predict
from mjp_privacy.config import Cell, Experiment
from mjp_privacy.data import ImageRecord
from mjp_privacy.interfaces import (
    Attack,
    AttackerView,
    ClientInput,
    ClientUpdate,
    Pixels,
    Reconstruction,
    Truth,
)
from mjp_privacy.metrics import score
from mjp_privacy.models import Victim
from mjp_privacy.models.closed_form_block import with_closed_form_block
from mjp_privacy.rows import reasoned_rows, scored_rows
from mjp_privacy.seeding import torch_generator
from mjp_privacy.settings import SETTINGS


@dataclass(frozen=True)
class Block:
    """A fixed slice of the run's images."""

    index: int
    records: Sequence[ImageRecord]


@dataclass(frozen=True)
class BlockResult:
    """Rows of every image of the block, and the tensors of those that were reconstructed."""

    rows: pd.DataFrame
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    image_ids: list[str] = field(default_factory=list)
    failed: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


class Workbench:
    """A model in the precisions and alterations that its cells need."""

    def __init__(self, model: Victim, experiment: Experiment, device: torch.device) -> None:
        self.model = model.to(device)
        self.experiment, self.device = experiment, device
        card = model.card
        self.pixels = Pixels(card.img_size, card.mean, card.std)
        self._victims: dict[tuple[str, str], Victim] = {("intact", "float32"): self.model}
        self._made: dict[tuple[Any, ...], Any] = {}

    def forget(self) -> None:
        """Drop what was made for one block."""
        self._made.clear()

    def victim(self, kind: str, dtype: str) -> Victim:
        key = (kind, dtype)
        if key not in self._victims:
            altered = with_closed_form_block(self.model)  # a copy
            victim = altered if kind == "april_block" else self._copy_of_intact()
            self._victims[key] = victim.to(getattr(torch, dtype))  # type: ignore[assignment]
        return self._victims[key]

    def _copy_of_intact(self) -> Victim:
        import copy

        return copy.deepcopy(self.model)

    # what cells share -------------------------------------------------------------------------

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def inputs(self, cell: Cell, records: Sequence[ImageRecord], images: Tensor) -> ClientInput:
        ids = tuple(record.image_id for record in records)
        labels = self._once(("labels", ids), lambda: self._labels(records, images))
        return self._once(
            ("inputs", cell.setting, cell.gamma, ids),
            lambda: SETTINGS[cell.setting].prepare(
                images,
                labels,
                ids,
                patch_size=self.model.patch_size,
                gamma=cell.gamma,
                round=0,
                seed=self.experiment.seed,
            ),
        )

    def _labels(self, records: Sequence[ImageRecord], images: Tensor) -> Tensor:
        """True labels; for images without one the intact model's prediction on the plain image."""
        labels = torch.tensor([-1 if r.label is None else r.label for r in records])
        if (labels < 0).any():
            labels = torch.where(labels < 0, predict(self.model, images, None), labels)
        return labels

    def update(
        self,
        cell: Cell,
        attack: Attack,
        needs: Sequence[str],
        inputs: ClientInput,
        seconds: dict[str, float],
    ) -> ClientUpdate:
        """The client's upload; its time goes to the first cell that asks for it."""
        victim = self.victim(attack.victim, cell.dtype)
        own = {name for name, _ in victim.named_parameters()}
        names = [name for name in needs if name in own]
        client = FedSGDClient(victim, self.experiment.client)
        key = ("update", attack.victim, cell.setting, cell.gamma, cell.dtype, inputs.image_ids)

        def timed() -> ClientUpdate:
            started = time.monotonic()
            update = client.update(inputs, names=names)
            seconds["gradient"] = time.monotonic() - started
            return update

        return self._once(key, timed)

    def accuracy(self, cell: Cell, inputs: ClientInput, labelled: bool) -> dict[str, Tensor | None]:
        """Whether the intact and the altered model are right on this row's input."""
        if not labelled:
            return {"intact": None, "altered": None}
        correct: dict[str, Tensor | None] = {}
        for variant, kind in (("intact", "intact"), ("altered", "april_block")):
            key = ("accuracy", kind, cell.setting, cell.gamma, inputs.image_ids)
            model = self.victim(kind, "float32")
            predicted = self._once(key, partial(predict, model, inputs.images, inputs.mask))
            correct[variant] = predicted == inputs.labels
        return correct

    # one cell ---------------------------------------------------------------------------------

    def attack(
        self,
        cell: Cell,
        attack: Attack,
        needs: Sequence[str],
        facts: Mapping[str, Any],
        records: Sequence[ImageRecord],
        images: Sequence[Tensor],
    ) -> BlockResult:
        """Upload, attack and score these images in this cell."""
        batch = self.experiment.client.batch
        if len(records) % batch:
            left = f"{len(records)} images left, which do not fill client steps of {batch}"
            return BlockResult(reasoned_rows(facts, dict.fromkeys(records, left), "unsupported"))
        plain = torch.stack(list(images))
        inputs = self.inputs(cell, records, plain)
        seconds: dict[str, float] = {}
        update = self.update(cell, attack, needs, inputs, seconds)
        view = AttackerView(self.victim(attack.victim, cell.dtype), [update], self.pixels)
        reason = attack.unsupported(view)
        if reason:
            return BlockResult(reasoned_rows(facts, dict.fromkeys(records, reason), "unsupported"))
        started = time.monotonic()
        found, reasons = self._run(attack, view, cell, records)
        seconds["attack"] = time.monotonic() - started
        started = time.monotonic()
        result = self._scored(cell, facts, records, plain, inputs, found, reasons)
        seconds["score"] = time.monotonic() - started
        return BlockResult(
            result.rows, result.tensors, result.image_ids, tuple(reasons.values()), seconds
        )

    def _run(
        self, attack: Attack, view: AttackerView, cell: Cell, records: Sequence[ImageRecord]
    ) -> tuple[Reconstruction, dict[ImageRecord, str]]:
        """The reconstruction, and the reasons of images whose numbers broke down."""
        generator = torch_generator(
            "attack", self.experiment.seed, cell.model, cell.attack.name, records[0].image_id
        )
        try:
            found = attack.run(view, generator=generator)
        except torch.linalg.LinAlgError as error:
            reason = f"the attack's linear algebra broke down: {error}"
            return Reconstruction(None), dict.fromkeys(records, reason)
        assert found.images is not None
        finite = found.images.isfinite().flatten(1).all(-1).tolist()
        reason = "the reconstruction is not finite"
        return found, {r: reason for r, fine in zip(records, finite, strict=True) if not fine}

    def _scored(
        self,
        cell: Cell,
        facts: Mapping[str, Any],
        records: Sequence[ImageRecord],
        plain: Tensor,
        inputs: ClientInput,
        found: Reconstruction,
        reasons: Mapping[ImageRecord, str],
    ) -> BlockResult:
        failed = reasoned_rows(facts, reasons, "failed")
        kept = [at for at, record in enumerate(records) if record not in reasons]
        if not kept:
            return BlockResult(failed)
        truth = Truth(plain, None, inputs.image_ids)
        target = SETTINGS[cell.setting].target(truth, inputs)
        assert found.images is not None
        # What is stored is what is scored: float32, so scores can be made again from the files.
        tensors = {
            "images": found.images.float().cpu()[kept],
            "target": target[kept],
            "plain": plain[kept],
            "input": inputs.images[kept],
        }
        if inputs.mask is not None and inputs.permutation is not None:
            tensors |= {"mask": inputs.mask[kept], "permutation": inputs.permutation[kept]}
        labelled = all(record.label is not None for record in records)
        diagnostics = {n: v.cpu()[kept] for n, v in found.diagnostics.items()}
        rows = scored_rows(
            facts,
            [records[at] for at in kept],
            score(tensors["images"], tensors["target"], device=self.device),
            diagnostics | self._diagnostics(cell, inputs, target, kept),
            {
                name: None if correct is None else correct[kept]
                for name, correct in self.accuracy(cell, inputs, labelled).items()
            },
        )
        ids = [records[at].image_id for at in kept]
        return BlockResult(pd.concat([rows, failed]) if len(failed) else rows, tensors, ids)

    def _diagnostics(
        self, cell: Cell, inputs: ClientInput, target: Tensor, kept: list[int]
    ) -> dict[str, Tensor]:
        """Ceilings and the realised mask. In setting c the oracle, too, is scored in place."""
        ids = inputs.image_ids
        oracle = self._once(
            ("oracle", cell.setting, cell.gamma, ids),
            lambda: oracle_inverse(self.model, inputs.images.to(self.device)).cpu(),
        )
        found = {"ceiling_psnr": psnr(oracle, target)[kept]}
        if cell.setting == "c":
            found["ceiling_unshuffled_psnr"] = psnr(oracle, inputs.images)[kept]
        if inputs.mask is not None and inputs.permutation is not None:
            count = inputs.mask.sum(-1)
            moved = (inputs.permutation != torch.arange(inputs.permutation.shape[-1])).sum(-1)
            found |= {
                "shuffled_patches": count[kept],
                "moved_patches": moved[kept],
                "empty_mask": (count == 0).double()[kept],
            }
        return found
