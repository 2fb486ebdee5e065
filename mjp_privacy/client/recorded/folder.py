"""A folder of recorded uploads.

    DIR/NAME.safetensors, DIR/NAME.json   an upload and its header (`header.py`)
    DIR/weights/SHA.safetensors           weights before a round, each stored once
    DIR/truth/NAME.safetensors            private images, for scoring only; may be absent

Files are renamed into place when they are complete, an upload's header last. A killed recorder
thus leaves only whole uploads, and parts that can be recognised because their header is missing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from mjp_privacy.client.recorded.header import UploadHeader, header_text, read_header
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.tensor_files import save_tensors
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.spec import METADATA

WEIGHTS, TRUTH = "weights", "truth"


@dataclass(frozen=True)
class RecordedTruth:
    """The private images that an upload was made of, and how they were shuffled."""

    images: Tensor  # (B, C, S, S) in [0, 1], before any shuffle
    image_ids: tuple[str, ...]
    mask: Tensor | None  # (B, N) of the first local step
    permutation: Tensor | None


@dataclass(frozen=True)
class RecordedUpload:
    """One upload's place and header; its tensors are read from disk at every call."""

    folder: Path
    name: str
    header: UploadHeader

    @property
    def path(self) -> Path:
        """The file of its tensors."""
        return self.folder / f"{self.name}.safetensors"

    @property
    def weights_path(self) -> Path:
        """The file of the weights before the round."""
        return self.folder / self.header.weights

    def files(self) -> list[Path]:
        """Every file that belongs to it; that of its private images may be absent."""
        truth = self.folder / TRUTH / f"{self.name}.safetensors"
        return [self.path, self.path.with_suffix(".json"), self.weights_path, truth]

    def tensors(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The tensors by parameter name: all, or those of `names` that the file holds."""
        try:
            with safe_open(self.path, "pt") as file:
                wanted = [n for n in file.keys() if names is None or n in names]
                return {name: file.get_tensor(name) for name in wanted}
        except (OSError, SafetensorError) as error:
            raise _unreadable(self.path, error) from error

    def names(self) -> list[str]:
        """The names of its tensors, read without the tensors."""
        try:
            with safe_open(self.path, "pt") as file:
                return sorted(file.keys())
        except (OSError, SafetensorError) as error:
            raise _unreadable(self.path, error) from error

    def truth(self) -> RecordedTruth | None:
        """Its private images, or None where nobody kept them."""
        path = self.folder / TRUTH / f"{self.name}.safetensors"
        if not path.is_file():
            return None
        tensors = read_tensors(path)
        with safe_open(path, "pt") as file:
            ids = tuple(json.loads((file.metadata() or {}).get("image_ids", "[]")))
        if "images" not in tensors or len(ids) != len(tensors["images"]):
            raise UserError(
                f"{path}: expected the tensor `images` and, in the metadata, one of `image_ids` "
                f"for each image, got {', '.join(sorted(tensors))} and {len(ids)} image_ids. Take "
                "the file out to attack without scores."
            )
        return RecordedTruth(
            tensors["images"].float(), ids, tensors.get("mask"), tensors.get("permutation")
        )


HOW_TO_RECORD = (
    "`mjp federate` records such folders; mjp_privacy/federation/README.md describes the files, "
    "for those of another training."
)


@dataclass(frozen=True)
class UploadFolder:
    """Reads and writes a folder of uploads: `UploadFolder(Path("run/uploads")).entries()`."""

    root: Path

    def entries(self) -> list[RecordedUpload]:
        """Every upload that has a header, sorted by name."""
        if not self.root.is_dir():
            raise UserError(
                f"{self.root}: expected a folder of recorded uploads, but there is no folder of "
                f"this name. {HOW_TO_RECORD}"
            )
        headers = sorted(self.root.glob("*.json"))
        uploads = [RecordedUpload(self.root, p.stem, read_header(p)) for p in headers]
        if not uploads:
            raise UserError(
                f"{self.root}: expected NAME.json beside NAME.safetensors for each upload, but no "
                f"file in this folder ends in .json. {HOW_TO_RECORD}"
            )
        return uploads

    def unfinished(self) -> list[str]:
        """Files of tensors without a header: the recorder was stopped between the two."""
        return sorted(
            path.name
            for path in self.root.glob("*.safetensors")
            if not path.with_suffix(".json").is_file()
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
        if not (self.root / place).is_file():
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
    ) -> list[Path]:
        """Write the n uploads of an update under these names; the files of their tensors.

        header  what they share; round, kind, batch and the like come from the update
        inputs, plain  what was fed, and the images before the shuffle: the truth for scoring
        series  the series name of each upload
        """
        paths = []
        for step, name in enumerate(names):
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
                "noise": {key: float(level[step]) for key, level in update.noise.items()},
                "rounding": {key: float(level[step]) for key, level in update.rounding.items()},
                "undeclared": update.undeclared is not None and bool(update.undeclared[step]),
                "round": update.round,
                "labels": labels if header.labels is None else header.labels,
                "series": None if series is None else series[step],
            }
            if inputs is not None and plain is not None:
                self._record_truth(name, inputs, plain, images)
            path = self.root / f"{name}.safetensors"
            save_tensors(path, {key: stored(grad[step]) for key, grad in update.grads.items()}, {})
            text = header_text(dataclasses.replace(header, **fields))
            write_atomically(path.with_suffix(".json"), partial(Path.write_text, data=text))
            paths.append(path)
        return paths

    def _record_truth(self, name: str, inputs: ClientInput, plain: Tensor, images: slice) -> None:
        """Write what one upload was made of: these of the update's images."""
        tensors = {"images": stored(plain[images])}
        if inputs.mask is not None and inputs.permutation is not None:
            tensors |= {"mask": stored(inputs.mask[images])}
            tensors |= {"permutation": stored(inputs.permutation[images])}
        metadata = {"image_ids": json.dumps(list(inputs.image_ids[images]))}
        save_tensors(self.root / TRUTH / f"{name}.safetensors", tensors, metadata)


def save_weights(path: Path, model: LoadedModel, facts: Mapping[str, Any] | None = None) -> None:
    """Write the model as a checkpoint whose metadata hold all that `load_model` needs.

    facts: further entries of the metadata.
    """
    tensors = {name: stored(p) for name, p in model.named_parameters()}
    save_tensors(path, tensors, {**_card_metadata(model), **_as_json(facts or {})})


def stored(tensor: Tensor) -> Tensor:
    """The tensor as safetensors can write it: detached, contiguous, on the CPU."""
    return tensor.detach().cpu().contiguous()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file; UserError if it is missing or cut off."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path.name}: expected a whole safetensors file, got one that cannot be read ({error}). "
        "It may be cut off: record or copy it again, or take it and its .json out."
    )


def _card_metadata(model: LoadedModel) -> dict[str, str]:
    """What `load_model` needs to know about the weights, beside the tensors."""
    card = model.card
    facts = {
        **{name: getattr(card, name) for name in METADATA if hasattr(card, name)},
        "num_heads": model.blocks[0].attn.num_heads,  # type: ignore[union-attr]
        "position_embedding": model.position_embedding,
        "first_block": model.first_block,
        "dal": model.dal_kind,
    }
    return _as_json(facts)


def _as_json(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in facts.items() if value is not None}
