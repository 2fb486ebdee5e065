"""`run_attack.py CONFIG --uploads DIR`: the harness on uploads that anyone recorded.

The config gives the attacks; models, settings and clients are what the uploads' headers say. Rows,
tables and pictures are those of any run; without private images rows say `unscored`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.client.recorded.faults import faults
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.groups import Group, group_uploads
from mjp_privacy.client.recorded.loading import load_recorded
from mjp_privacy.core.device import pick_device
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder
from mjp_privacy.core.lock import locked
from mjp_privacy.data import ImageRecord, ImageSource
from mjp_privacy.experiment.block import Block
from mjp_privacy.experiment.config import Cell, Experiment, GridEntry, ModelConfig
from mjp_privacy.experiment.inventory import COLUMNS, Inventory
from mjp_privacy.experiment.recorded import RecordedBench
from mjp_privacy.experiment.run import Run, RunSummary
from mjp_privacy.experiment.simulated import Workbench
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models import Victim


def attack_uploads(
    experiment: Experiment,
    folder: str | Path,
    out: str | Path,
    *,
    limit: int | None = None,
    device: str = "auto",
) -> RunSummary:
    """Attack every recorded upload; the same call again goes on."""
    uploads = UploadFolder(Path(folder)).entries()
    groups = {group.name: group for group in group_uploads(uploads, limit)}
    store = RunStore(output_folder(Path(out)))
    records = tuple({r.image_id: r for g in groups.values() for r in g.records}.values())
    source = ImageSource(Path(folder), records, "as recorded", None)  # type: ignore[arg-type]
    with locked(store.root):
        run = RecordedRun(
            recorded_experiment(experiment, groups), source, records, store, pick_device(device)
        )
        run.groups = groups
        return run.execute()


def recorded_experiment(experiment: Experiment, groups: Mapping[str, Group]) -> Experiment:
    """The config's attacks on the uploads' models."""
    entries, models = [], {}
    for name, group in groups.items():
        header = group.header
        client = vars(header.client_config(group.series[0].first.name))
        models[name] = ModelConfig(checkpoint=str(group.series[0].first.weights_path))
        shuffles = header.gamma > 0
        entry = GridEntry((name,), ("c" if shuffles else "a",), (header.gamma,), client=client)
        entries.append(entry)
    batches = math.lcm(*(group.header.batch for group in groups.values()))
    whole = -(-experiment.block // batches) * batches
    dtypes = tuple(dict.fromkeys(group.header.dtype for group in groups.values()))
    if len(dtypes) > 1:
        raise UserError(
            f"The uploads were computed in {' and '.join(dtypes)}: expected one precision in a "
            "folder. Put them into folders of their own."
        )
    return replace(
        experiment,
        models=models,
        grid=tuple(entries),
        dtypes=dtypes,
        block=whole,
        images=None,
        classes=None,
        data_is_papers=False,
    )


@dataclass
class RecordedRun(Run):
    """A run whose cells each have their own uploads."""

    def __post_init__(self) -> None:
        self.groups: Mapping[str, Group] = {}

    def _records(self, name: str) -> Sequence[ImageRecord]:
        return self.groups[name].records

    def _loaded(self, name: str) -> Victim:
        """Its card names the uploads too, so that rows belong to these files alone."""
        group = self.groups[name]
        model = load_recorded(group.series[0].first)
        report = model.card.checkpoint
        note = f"{len(group.series)} recorded upload series, sha256 {group.digest()[:12]}"
        model.card = replace(model.card, checkpoint=replace(report, notes=(*report.notes, note)))
        return model

    def _facts(self, cell: Cell, model: Victim | None, reason: str) -> dict[str, Any]:
        group = self.groups[cell.model]
        own = {"round": group.header.round, "client_label": group.header.label}
        return super()._facts(cell, model, reason) | own

    def _bench(self, name: str, model: Victim) -> Workbench:
        self.inventory.group = self.groups[name]  # type: ignore[attr-defined]
        return RecordedBench(model, self.experiment, self.device, self.groups[name])

    def _inventory(self) -> Inventory:
        return RecordedInventory(self.store, self.source, self.records)


class RecordedInventory(Inventory):
    """Images that come from the truth folder, if from anywhere."""

    group: Group

    def check_known(self) -> list[str]:
        """Each group has its own images; they are checked as they are read."""
        return []

    def decode(
        self, block: Block, model: Victim
    ) -> tuple[dict[ImageRecord, Tensor], dict[ImageRecord, str]]:
        images: dict[ImageRecord, Tensor] = {}
        lost: dict[ImageRecord, str] = {}
        size = model.card.img_size
        for series in self.group.of(block.records):
            reason = next((f for upload in series.uploads for f in faults(upload, model)), None)
            truth = series.first.truth()
            for place, record in enumerate(series.records):
                blank = torch.full((3, size, size), torch.nan)
                image = blank if truth is None else truth.images[place]
                if reason is None and image.shape != blank.shape:
                    reason = (
                        f"its private image is {tuple(image.shape)}, and the model takes "
                        f"{tuple(blank.shape)}"
                    )
                if reason is None:
                    images[record] = image
                else:
                    lost[record] = reason
                self._noted(record, image, reason)
        self.store.write_images(pd.DataFrame(list(self.known.values()), columns=list(COLUMNS)))
        return images, lost

    def _noted(self, record: ImageRecord, image: Tensor, reason: str | None) -> None:
        self.known[record.image_id] = {
            "image_id": record.image_id,
            "label": record.label,
            "label_source": record.label_source,
            "sha256": "",
            "pixel_sha256": hashlib.sha256(image.numpy().tobytes()).hexdigest(),
            "status": "ok" if reason is None else "failed",
            "reason": reason or "",
        }
