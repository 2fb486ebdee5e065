"""Where a run's uploads come from. `simulated` makes them, `recorded` reads them from files; a run
is given one of the two and does not know which.

    UploadSource --open(model)--> ModelUploads --block(images)--> BlockUploads
                                                                      | observe(cell, attack)
                                                                      v
                                                                  Observation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.block import Block, ImageNote
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.inventory import Inventory
from mjp_privacy.experiment.memo import Memo
from mjp_privacy.experiment.variants import Block0
from mjp_privacy.interfaces import Attack, ClientInput, ClientUpdate, Refusal
from mjp_privacy.models import LoadedModel


@dataclass(frozen=True)
class Observation:
    """Images of one block as their client has them, and what it uploaded."""

    photographs: Tensor  # (m, C, S, S) in [0, 1], as they were read
    plain: Tensor  # (m, C, S, S), as they entered round 0: augmented, not shuffled
    inputs: ClientInput  # of round 0
    models: Sequence[LoadedModel]  # that the client trained, one an upload
    updates: Sequence[ClientUpdate]  # none for a control
    labels: Tensor | None  # (m,) as the attacker knows them
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What was spent on it, by stage; on the first cell that asks for an upload."""


class BlockUploads(Protocol):
    """One block of one model's images."""

    @property
    def notes(self) -> Sequence[ImageNote]:
        """Of every image of the block, in order."""
        ...

    @property
    def memo(self) -> Memo: ...

    @property
    def scored(self) -> bool:
        """Whether the private images are known, to score against."""
        ...

    def lacks(self, attack: Attack, records: Sequence[ImageRecord]) -> Refusal | None:
        """Why uploads as this attack needs them cannot be had of these images, or None."""
        ...

    def observe(
        self,
        cell: Cell,
        attack: Attack | None,
        names: Sequence[str],
        records: Sequence[ImageRecord],
    ) -> Observation:
        """These images, whole client steps in order, as the cell's client and attacker see them.

        attack: None for a control, for which no upload is made; names: the parameters whose
        gradients are uploaded.
        """
        ...

    def accuracy_model(self, cell: Cell, block0: Block0) -> LoadedModel:
        """The float32 model of the cell's client, whose accuracy stands beside its scores."""
        ...


class ModelUploads(Protocol):
    """One loaded model and the uploads of its clients."""

    @property
    def model(self) -> LoadedModel: ...

    def block(self, block: Block) -> BlockUploads: ...


class UploadSource(Protocol):
    """All uploads of a run."""

    @property
    def data(self) -> str:
        """What the images are called in notes."""
        ...

    @property
    def labels(self) -> str:
        """Where their labels come from, in a sentence."""
        ...

    def records(self, model: str) -> Sequence[ImageRecord]:
        """The images of this model's cells, whole client steps in order."""
        ...

    def columns(self, model: str) -> Mapping[str, Any]:
        """What only this source knows of a model's cells."""
        ...

    def open(self, model: str) -> ModelUploads:
        """The model loaded; a UserError where it cannot be: its cells fail, others run."""
        ...

    def check(self, inventory: Inventory) -> list[str]:
        """Refuse a run folder that holds other images under the same names. Returns the names
        that the folder knows and this source has not."""
        ...
