"""A folder of recorded uploads.

    DIR/NAME.safetensors, DIR/NAME.json   an upload and its header (`header.py`)
    DIR/weights/SHA.safetensors           weights before a round, each stored once
    DIR/truth/NAME.safetensors            private images, for scoring only; may be absent

Files are renamed into place when they are complete, an upload's header last. A killed recorder
thus leaves only whole uploads, and parts that can be recognised because their header is missing.
Each file carries its own digest (`models/tensor_files.py`), and a header that of its weights' file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mjp_privacy.client.recorded.header import HEADER, UploadHeader, read_header, write_header
from mjp_privacy.client.recorded.recorded_upload import (
    TRUTH_FOLDER,
    WEIGHTS_FILE,
    RecordedUpload,
)
from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.text import shown
from mjp_privacy.data.ids import is_usable
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.checkpoint_files import file_sha256
from mjp_privacy.models.spec import METADATA
from mjp_privacy.models.tensor_files import TensorFile, save_tensors

WEIGHTS = "weights"
UPLOADS, RECEIVED = "uploads", "received"
"""Folders inside a federation's that hold uploads."""


HOW_TO_RECORD = (
    "`mjp federate` records such folders; mjp_privacy/federation/README.md describes the files, "
    "for those of another training."
)


@dataclass(frozen=True)
class UploadFolder:
    """Reads and writes a folder of uploads: `UploadFolder(Path("run/uploads")).entries()`."""

    root: Path

    def names(self) -> list[str]:
        """The names of all uploads that have a header, sorted."""
        if not self.root.is_dir():
            raise UserError(
                f"{shown(self.root)}: expected a folder of recorded uploads, but there is no "
                f"folder of this name. {HOW_TO_RECORD}"
            )
        names = sorted(path.stem for path in self.root.glob("*.json"))
        inside = [name for name in (UPLOADS, RECEIVED) if any((self.root / name).glob("*.json"))]
        if inside and not any((self.root / f"{name}.safetensors").exists() for name in names):
            raise UserError(
                f"{shown(self.root)}: expected a folder of recorded uploads, got a federation's. "
                f"Its uploads are in {shown(self.root / inside[0])}: give that folder."
            )
        if not names:
            raise UserError(
                f"{shown(self.root)}: expected NAME.json beside NAME.safetensors for each upload, "
                f"but no file in this folder ends in .json. {HOW_TO_RECORD}"
            )
        return names

    def upload(self, name: str) -> RecordedUpload:
        """The upload of this name; a UserError where its header is not sound."""
        if not is_usable(name):
            raise HEADER.refusal(
                self.root / f"{name}.json", "a name with control characters or bytes of no Unicode"
            )
        return RecordedUpload(self.root, name, read_header(self.root / f"{name}.json"))

    def entries(self) -> list[RecordedUpload]:
        """Every upload, sorted by name; a UserError where one has no sound header.

        `examined.examine` passes over such uploads and says why.
        """
        return [self.upload(name) for name in self.names()]

    def unfinished(self) -> list[str]:
        """Files of tensors without a header: the recorder was stopped between the two."""
        return sorted(
            path.name
            for path in self.root.glob("*.safetensors")
            if not path.with_suffix(".json").exists()
        )

    # writing ----------------------------------------------------------------------------------

    def record_weights(self, model: LoadedModel) -> str:
        """Store the model's weights unless they are there already; their file, in the folder.

        It is named after the tensors and the metadata: equal tensors with other heads, another
        activation or normalisation are another model.
        """
        digest = hashlib.sha256(json.dumps(_card_metadata(model), sort_keys=True).encode())
        for name, parameter in sorted(model.named_parameters()):
            digest.update(name.encode() + stored(parameter).numpy().tobytes())
        place = f"{WEIGHTS}/{digest.hexdigest()[:16]}.safetensors"
        if not _holds(self.root / place, model):
            save_weights(self.root / place, model)
        return place

    def record(
        self,
        update: ClientUpdate,
        header: UploadHeader,
        names: Sequence[str],
        *,
        inputs: ClientInput | None = None,
        plain: Tensor | None = None,
        series: Sequence[str] | None = None,
        only: Collection[str] | None = None,
    ) -> list[Path]:
        """Write the n uploads of an update under these names; the files of their tensors.

        header  what they share; round, kind, batch and the like come from the update
        inputs, plain  what was fed, and the images before the shuffle: the truth for scoring
        series  the series name of each upload
        only    those of the names that are written; None: all
        """
        paths, weights = [], self.root / header.weights
        weights_sha256 = file_sha256(weights) if weights.is_file() else None
        for step, name in enumerate(names):
            if only is not None and name not in only:
                continue
            images = slice(step * update.batch, (step + 1) * update.batch)
            known = inputs is not None and bool((inputs.labels[images] >= 0).all())
            labels = tuple(inputs.labels[images].tolist()) if inputs is not None and known else None
            fields: dict[str, Any] = {
                "kind": update.kind,
                "dtype": str(update.dtype).removeprefix("torch."),
                "batch": update.batch,
                "steps": update.steps,
                "optimizer": update.optimizer,
                "lr": update.lr,
                "weight_decay": update.weight_decay,
                "momentum": update.momentum,
                "autocast": update.autocast,
                "noise": {key: float(level[step]) for key, level in update.noise.items()},
                "rounding": {key: float(level[step]) for key, level in update.rounding.items()},
                "undeclared": update.undeclared is not None and bool(update.undeclared[step]),
                "round": update.round,
                "weights_sha256": weights_sha256,
                "labels": labels if header.labels is None else header.labels,
                "series": None if series is None else series[step],
            }
            if inputs is not None and plain is not None:
                self._record_truth(name, inputs, plain, images)
            path = self.root / f"{name}.safetensors"
            tensors = {key: stored(grad[step]) for key, grad in update.grads.items()}
            save_tensors(path, tensors, {}, digest=True)
            write_header(path.with_suffix(".json"), dataclasses.replace(header, **fields))
            paths.append(path)
        return paths

    def _record_truth(self, name: str, inputs: ClientInput, plain: Tensor, images: slice) -> None:
        """Write what one upload was made of: these of the update's images."""
        tensors = {"images": stored(plain[images])}
        if inputs.mask is not None and inputs.permutation is not None:
            tensors |= {"mask": stored(inputs.mask[images])}
            tensors |= {"permutation": stored(inputs.permutation[images])}
        metadata = {"image_ids": json.dumps(list(inputs.image_ids[images]))}
        path = self.root / TRUTH_FOLDER / f"{name}.safetensors"
        save_tensors(path, tensors, metadata, digest=True)


def save_weights(path: Path, model: LoadedModel, facts: Mapping[str, Any] | None = None) -> None:
    """Write the model as a checkpoint whose metadata hold all that `load_model` needs, and the
    file's own digest.

    facts: further entries of the metadata.
    """
    tensors = {name: stored(p) for name, p in model.named_parameters()}
    save_tensors(path, tensors, weights_metadata(model, facts), digest=True)


def weights_metadata(model: LoadedModel, facts: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The metadata of that file, without its digest."""
    return {**_card_metadata(model), **_as_json(facts or {})}


def _holds(path: Path, model: LoadedModel) -> bool:
    """Whether a file of weights is there and holds this model; earlier versions wrote no digest."""
    if not path.is_file():
        return False
    try:
        file = TensorFile(path, WEIGHTS_FILE)
        tensors = file.tensors()
    except BadFile:
        return False
    parameters = dict(model.named_parameters())
    return (
        file.metadata == _card_metadata(model)
        and tensors.keys() == parameters.keys()
        and all(tensors[name].equal(stored(p)) for name, p in parameters.items())
    )


def stored(tensor: Tensor) -> Tensor:
    """The tensor as safetensors can write it: detached, contiguous, on the CPU."""
    return tensor.detach().cpu().contiguous()


def _card_metadata(model: LoadedModel) -> dict[str, str]:
    """What `load_model` needs to know about the weights, beside the tensors."""
    card = model.card
    facts = {
        **{name: getattr(card, name) for name in METADATA if hasattr(card, name)},
        "num_heads": model.blocks[0].attn.num_heads,  # type: ignore[union-attr]
        "position_embedding": model.position_embedding,
        "first_block": model.first_block,
        "dal": model.dal_kind,
        "adapters": None if model.adapters is None else model.adapters.text,
    }
    return _as_json(facts)


def _as_json(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in facts.items() if value is not None}
