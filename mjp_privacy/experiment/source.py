"""The contract for where a run's uploads come from.

`simulated` computes them from private images, `recorded` reads them from files. `plan`, `work` and
`cell` use one of the two by these protocols and do not know which.

    UploadSource --open(model)--> ModelUploads --block(images)--> BlockUploads
                                                                      | observe(cell, attack)
                                                                      v
                                                                  Observation
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import first_of
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.block import Block, ImageNote
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.inventory import Inventory
from mjp_privacy.experiment.memo import Memo
from mjp_privacy.experiment.variants import Block0
from mjp_privacy.interfaces import Attack, ClientInput, ClientUpdate, Control, Refusal
from mjp_privacy.models import LoadedModel

NAMED = 3  # refused images that a message names


@dataclass(frozen=True)
class Observation:
    """Images of one block as their client has them, and what the client uploaded."""

    photographs: Tensor  # (m, C, S, S) in [0, 1], as they were read
    plain: Tensor  # (m, C, S, S), as they entered round 0: augmented, not shuffled
    inputs: ClientInput  # of round 0
    models: Sequence[LoadedModel]  # that the client trained, one for each upload
    updates: Sequence[ClientUpdate]  # none for a control
    labels: Tensor | None  # (m,) as the attacker knows them; None: it does not
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time spent on the uploads, by stage. An upload that several cells share is counted for the
    first cell that needs it."""


class BlockUploads(Protocol):
    """The uploads of one block of images for one model."""

    @property
    def notes(self) -> Sequence[ImageNote]:
        """A note for every image of the block, in order."""

    @property
    def memo(self) -> Memo:
        """Values that several cells of this block share."""

    @property
    def scored(self) -> bool:
        """Whether the private images are known, so that reconstructions can be scored."""

    def lacks(self, attack: Attack, records: Sequence[ImageRecord]) -> Refusal | None:
        """Why this source has no uploads of these images as the attack needs them, or None."""

    def observe(
        self,
        cell: Cell,
        attack: Attack | None,
        names: Sequence[str],
        records: Sequence[ImageRecord],
    ) -> Observation:
        """What the cell's client and attacker have of these images.

        attack   None for a control, for which no upload is made
        names    the parameters whose gradients are uploaded
        records  images of the block in order, whole client steps
        """

    def accuracy_model(self, cell: Cell, block0: Block0) -> LoadedModel:
        """The float32 model whose accuracy is reported beside the cell's scores."""


class ModelUploads(Protocol):
    """One loaded model and the uploads of its clients."""

    @property
    def model(self) -> LoadedModel:
        """The loaded model, in float32."""

    def block(self, block: Block) -> BlockUploads:
        """Read the images of a block."""


class Outlook(Protocol):
    """What is known of a model's uploads before its weights or any upload are read."""

    def refuses(
        self,
        cell: Cell,
        attack: Attack | Control,
        names: Callable[[LoadedModel], Sequence[str]],
        records: Sequence[ImageRecord],
    ) -> Refusal | None:
        """Why the cell's attack will not apply to these images, or None.

        names    the parameters that the cell's clients upload, of a model without weights
        records  images of one block in order, whole client steps
        """


class EachRefused(UserError):
    """None of a model's images can be attacked, and each has a reason of its own."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = reasons  # by image_id
        named = first_of(list(reasons), NAMED)
        super().__init__(f"{len(reasons)} refused: {named}. Their rows say why")


class UploadSource(Protocol):
    """All uploads of a run, for each of its models."""

    @property
    def data(self) -> str:
        """The name of the images in a table's notes, such as their folder's."""

    @property
    def labels(self) -> str:
        """Where the images' labels come from, in words."""

    def records(self, model: str) -> Sequence[ImageRecord]:
        """The images of this model's cells, whole client steps in order."""

    def columns(self, model: str) -> Mapping[str, Any]:
        """Columns of a model's cells that only this kind of source has."""

    def open(self, model: str) -> ModelUploads:
        """Load the model. A UserError fails the cells of this model; those of others still run."""

    def foresee(self, model: str) -> Outlook:
        """What the model's outline tells. A UserError is one that `open` would raise."""

    def check(self, inventory: Inventory) -> list[str]:
        """Raise if the run folder holds other images under the same names.

        Returns the ids of images that the folder holds and this source does not have.
        """
