"""The contract for where a run's uploads come from, and what does not apply to them.

`simulated` computes them from private images, `recorded` reads them from files. `work` and
`cell` use one of the two by these classes and do not know which.

    UploadSource --open(model)--> ModelUploads --observe(cell)--> Observation
                                    read(block): the images that are at hand

A refusal says why there is nothing to attack or to score; `mjp check` foresees it for a model
(`foreseen`): an attack is asked by its own `unsupported`, with the view that a run would give it,
but of tensors on torch's meta device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from attacks import lacks_parts, traits_of
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.upload import with_sinusoidal_positions
from mjp_privacy.core.machine import clock
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.interfaces import (
    Attack,
    AttackerView,
    ClientInput,
    ClientUpdate,
    Control,
    Refusal,
)
from mjp_privacy.models import LoadedModel, MJPVisionTransformer
from mjp_privacy.models.mjp_vit import with_adapters, with_closed_form_block
from mjp_privacy.models.sizes import LowRank
from mjp_privacy.models.vit import copied
from mjp_privacy.uploads.folder import Series
from mjp_privacy.uploads.memory import view_of

META = torch.device("meta")
NO_ONE_INPUT = Refusal(
    "target",
    "each upload was shuffled differently: there is no single shuffled image to reconstruct; "
    "score several uploads against the plain image (setting c)",
)
NO_SERIES = Refusal(
    "uploads",
    "it reads several uploads of the same images, and this client shuffles its images before every "
    "round (client.partners: fresh); only attacks that find what uploads share apply",
)
NO_TRUTH = Refusal("target", "the private images were not given, so nothing is scored")
IN_STEP_OF = "its client step also holds"
"""How the reason of an image begins that was lost with another one of its step."""
RECENT = 2  # large values that a memo keeps


@dataclass(frozen=True)
class Block:
    """A fixed slice of the run's images, which holds whole client steps of every cell."""

    index: int
    records: Sequence[ImageRecord]


@dataclass(frozen=True)
class ImageNote:
    """An image as it was read: the hashes that identify it, or why it cannot be used."""

    record: ImageRecord
    sha256: str  # of the file; "" if there is no file
    pixel_sha256: str  # "" if there are no pixels
    reason: str = ""  # why it cannot be used; "" if it can


class Memo:
    """memo.once(("labels", ids), make) calls `make` the first time and then returns its value.

    A key must hold everything that the value depends on: a whole config, never parts of it. What a
    value computes from tensors can be kept under the tensors' contents:

        memo.once(("prediction", memo.content(images)), lambda: predict(model, images))
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._recent: dict[Hashable, Any] = {}
        self._contents: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._values)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of this key; `make` computes it if it is not there yet."""
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]

    def recent(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The same for values that are large: only the last ones are kept."""
        value = self._recent.pop(key) if key in self._recent else make()
        self._recent[key] = value  # at the end, as the last one used
        while len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        return value

    def content(self, tensor: Tensor | None) -> int:
        """A number that stands for a tensor's shape and values: equal tensors have the same one.
        The tensor must not be changed afterwards. None is -1."""
        if tensor is None:
            return -1
        for number, known in enumerate(self._contents):
            if known.dtype == tensor.dtype and torch.equal(known, tensor):
                return number
        self._contents.append(tensor)
        return len(self._contents) - 1

    def clear(self) -> None:
        self._values.clear()
        self._recent.clear()
        self._contents.clear()


@dataclass(frozen=True, eq=False)
class Observation:
    """Images of one block as their client, the attacker and the scorer of a cell have them."""

    cell: Cell
    photographs: Tensor  # (m, C, H, W) in [0, 1], as they were read
    plain: Tensor  # (m, C, H, W), as they entered round 0: augmented, not shuffled
    inputs: ClientInput  # of round 0
    models: Sequence[LoadedModel]  # that the client trained, one for each upload
    updates: Sequence[ClientUpdate]  # what it uploaded; none for a control
    labels: Tensor | None  # (m,) as the attacker knows them; None: it does not
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time spent on the uploads, by stage. An upload that several cells share is counted for the
    first cell that needs it."""

    @cached_property
    def target(self) -> Tensor:
        """(m, C, H, W), what a reconstruction is compared with."""
        against = SETTINGS[self.cell.setting].against
        return self.inputs.images if against == "input" else self.plain

    @cached_property
    def view(self) -> AttackerView:
        """All that an attack is given."""
        against = SETTINGS[self.cell.setting].against
        return view_of(self.updates, self.models, self.labels, against)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are stored beside the reconstruction."""
        inputs = self.inputs
        stored = {"target": self.target, "plain": self.plain, "input": inputs.images}
        if inputs.mask is not None and inputs.permutation is not None:
            stored |= {"mask": inputs.mask, "permutation": inputs.permutation}
        return stored


class ModelUploads(ABC):
    """One loaded model and the uploads of its clients, of one block of images at a time."""

    scored = True  # whether the private images are known, so that reconstructions can be scored
    declared = False  # whether a header says how pictures were normalised, which may be mistaken

    def __init__(self, variants: ModelVariants) -> None:
        self.variants = variants
        self.memo = Memo()  # values that several cells of a block share
        self.block: Block | None = None
        self.images: dict[ImageRecord, Tensor] = {}
        self.notes: list[ImageNote] = []  # for every image of the block, in order

    @property
    def model(self) -> LoadedModel:
        """The loaded model, in float32."""
        return self.variants.model

    def open(self, block: Block) -> float:
        """Read the images of a block, unless it is the one that was read last; the seconds that it
        took."""
        if block == self.block:
            return 0.0
        device, self.block = self.model.like.device, None
        self.memo.clear()
        started = clock(device)
        self.images, self.notes = {}, []
        self.read(block.records)
        self.block = block
        return clock(device) - started

    @abstractmethod
    def read(self, records: Sequence[ImageRecord]) -> None:
        """Fill `images` and `notes`."""

    @abstractmethod
    def observe(
        self, cell: Cell, names: Sequence[str], records: Sequence[ImageRecord]
    ) -> Observation:
        """What the cell's client and attacker have of these images.

        names    the parameters whose gradients are uploaded
        records  images of the block in order, whole client steps
        """

    def lacks(self, cell: Cell, records: Sequence[ImageRecord]) -> Refusal | None:
        """Why this source has no uploads of these images as an attack needs them, or None."""
        return None

    def accuracy_model(self, cell: Cell, block0: Block0) -> LoadedModel:
        """The float32 model whose accuracy is reported beside the cell's scores; recorded weights
        include the client's position table."""
        return self.variants.of(block0, "float32")


class UploadSource(ABC):
    """All uploads of a run, for each of its models."""

    data: str  # the name of the images in a table's notes, such as their folder's
    labels: str  # where the images' labels come from, in words
    place: str | None = None
    """What tells folders of recorded uploads of one name apart; None of images."""
    recorded: ClassVar[bool]  # whether the uploads were made before, by whoever it was
    passed_over: Sequence[ImageNote] = ()
    """Files that are no images and are left out of the plan: failures without rows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def records(self, model: str) -> Sequence[ImageRecord]:
        """The images of this model's cells, whole client steps in order."""

    def columns(self, model: str) -> Mapping[str, Any]:
        """Columns of a model's cells that only this kind of source has."""
        return {}

    def reasons(self, model: str) -> Mapping[str, str]:
        """Why images of a model that cannot be opened are not attacked, where each has a reason of
        its own, by image_id."""
        return {}

    @abstractmethod
    def open(self, model: str) -> ModelUploads:
        """Load the model. A UserError fails the cells of this model; those of others still run."""

    @abstractmethod
    def outline(self, model: str) -> LoadedModel:
        """The model without weights, as the header of its file tells. A UserError is one that
        `open` would raise."""

    @abstractmethod
    def check(self, store: RunStore) -> list[str]:
        """Raise if the run folder holds other images under the same names.

        Returns the ids of images that the folder holds and this source does not have.
        """


# copies of a model --------------------------------------------------------------------------------

Block0 = Literal["intact", "april_block"]


class ModelVariants:
    """A loaded model, which is never changed, and altered copies of it.

    seed  of the numbers that low-rank adapters start with
    """

    def __init__(self, model: LoadedModel, device: torch.device, seed: int = 0) -> None:
        self.model, self.seed = model.to(device), seed
        self._copies: dict[tuple[str, str, str, LowRank | None], LoadedModel] = {}

    def of(
        self,
        block0: Block0,
        dtype: str,
        positions: str = "own",
        adapters: LowRank | None = None,
    ) -> LoadedModel:
        """The model with block 0 intact or altered for APRIL, in a precision, with its own
        position table or the sine table, and with low-rank adapters where these are given:
        variants.of("april_block", "float64").

        The intact float32 model with its own table and no adapters is the loaded model itself.
        """
        key = (block0, dtype, positions, adapters)
        if key == ("intact", "float32", "own", None):
            return self.model
        if key not in self._copies:
            base = self.model if positions == "own" else with_sinusoidal_positions(self.model)
            alter = with_closed_form_block if block0 == "april_block" else copied
            altered: LoadedModel = alter(base)  # type: ignore[assignment]
            if adapters is not None:
                altered = with_adapters(altered, adapters, self.seed)
            self._copies[key] = altered.to(getattr(torch, dtype))
        return self._copies[key]


# what will not apply ------------------------------------------------------------------------------


def refused_by_setting(cell: Cell) -> Refusal | None:
    """Why the cell's setting leaves nothing to score its attack against, or None."""
    setting = SETTINGS[cell.setting]
    if cell.uploads > 1 and setting.shuffles and setting.against == "input":
        return NO_ONE_INPUT
    fresh = cell.uploads > 1 and cell.client.partners == "fresh"
    return NO_SERIES if fresh and "shared pictures" not in traits_of(cell.attack.name) else None


def refused_by_network(cell: Cell, model: MJPVisionTransformer) -> Refusal | None:
    """Why the attack or the client does not suit a network that is no plain ViT, or None."""
    if model.family == "vit":
        return None
    client, attack = cell.client, cell.attacker
    if client.positions != "own" or client.adapters is not None:
        text = f"clients of a {model.family} have positions: own and no low-rank adapters here"
        return Refusal("model", text)
    if client.mode == "train" and model.family == "resnet":
        text = "in training mode a ResNet's batch norm mixes images: clients need client.mode: eval"
        return Refusal("model", text)
    if isinstance(attack, Control) and attack.role == "floor":
        return None
    reason = lacks_parts(attack.name, model.family)
    return None if reason is None else Refusal("model", reason)


def refused_by_block(model: MJPVisionTransformer, attack: Attack) -> Refusal | None:
    """Why uploads of this model, made by somebody else, do not suit the attack; or None."""
    if (reason := lacks_parts(attack.name, model.family)) is not None:
        return Refusal("model", reason)
    if attack.victim == "intact" or model.first_block == "closed_form":
        return None
    return Refusal(
        "block",
        "it needs a client whose block 0 has neither norm1 nor residuals; this one trained the "
        "intact model",
    )


def foreseen(variants: ModelVariants, cell: Cell) -> Refusal | None:
    """Why the attack does not apply to simulated clients of a cell, or None; also where it would
    have to look at values, which are not there, or where its own code fails. Then it is asked in
    the run: foreseen(ModelVariants(outline_model("cifar_vit"), META), cell)."""
    if (refusal := refused_by_network(cell, variants.model)) is not None:
        return refusal
    if isinstance(cell.attacker, Control):
        return None
    if (refusal := refused_by_setting(cell)) is not None:
        return refusal
    client = cell.client
    model = variants.of(cell.victim, cell.dtype, client.positions, client.adapters)
    parameters = dict(model.named_parameters())
    trainer = FedSGDClient(model, client)
    try:
        needed = [name for name in cell.attacker.needs(model) if name in parameters]
        sent = {
            name: torch.empty(1, *parameters[name].shape, dtype=model.like.dtype, device=META)
            for name in trainer.wanted(needed)
        }
    except Exception:  # an attack of anybody's
        return None
    updates = [trainer.described(sent)] * cell.uploads
    labels = torch.zeros(updates[0].batch, dtype=torch.long)
    against = SETTINGS[cell.setting].against
    view = view_of(updates, [model] * len(updates), labels, against)
    try:
        return cell.attacker.unsupported(view)
    except Exception:  # on a tensor without values errors are of any class
        return None


def lacking(series: Sequence[Series], attack: Attack, model: LoadedModel) -> Refusal | None:
    """Why recorded uploads do not suit the attack: another block 0, or too few of them; or None."""
    if (refusal := refused_by_block(model, attack)) is not None:
        return refusal
    fewest = min(len(each.uploads) for each in series)
    if fewest < attack.uploads:
        are = "is" if fewest == 1 else "are"
        text = f"it needs {attack.uploads} uploads of the same images; {fewest} {are} recorded"
        return Refusal("uploads", text)
    return None
