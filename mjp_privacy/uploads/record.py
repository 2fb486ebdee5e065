"""One upload as files: a model, what one client sent, what is known of that client, and perhaps
the truth. In memory it is a `ClientUpdate`, as it is for attacks.

    upload = Upload.load("uploads/round_3.json")     # read when they are asked for
    upload.tensors(), upload.model(), upload.labels(model), upload.truth()
    write_upload(folder, name, header, update, inputs, plain)

    DIR/NAME.safetensors   tensors by parameter name, each of the parameter's own shape
    DIR/NAME.json          the header; written last, so that an upload without one is unfinished
    DIR/weights/SHA.safetensors   weights from before a round, each stored once
    DIR/truth/NAME.safetensors    private images, for scoring only; may be absent

Everything in a header is known to the server, which gave its clients their recipe. Files carry
their own digests (`models/tensor_files.py`), and a header that of its weights' file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mjp_privacy.client.traces import HEAD, HEAD_BIAS, label_in_gradient, shown_autocast
from mjp_privacy.client.upload import weights_of
from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.core.schema import Size, height_width
from mjp_privacy.core.text import shown
from mjp_privacy.data.files import is_usable
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate, Pixels
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.checkpoint_files import file_sha256
from mjp_privacy.models.checkpoints import METADATA
from mjp_privacy.models.loading import outline_model
from mjp_privacy.models.tensor_files import FLOATS, TensorFile, check_digest, save_tensors
from mjp_privacy.models.timm_networks import TimmNetwork, stated_by
from mjp_privacy.uploads.header import HEADER, UploadHeader, read_header, write_header

TENSORS = FileKind(
    "the tensors of an upload: a whole safetensors file of floating-point numbers of one type",
    "Record or copy it again, or take it and its .json out.",
    1 << 38,
)
WEIGHTS_FILE = FileKind(
    "a file beside the uploads with the weights from before the round",
    "Put it there, or mend the header.",
    1 << 38,
)


UNKNOWN_LABEL = -1


@dataclass(frozen=True)
class Upload:
    """One client's message in one round, as files that are read at every call."""

    folder: Path
    name: str
    header: UploadHeader

    @classmethod
    def load(cls, header: str | Path) -> Upload:
        """The upload whose header is this file; a UserError where that is not sound."""
        path = Path(header)
        if not is_usable(path.stem):
            raise HEADER.refusal(path, "a name with control characters or bytes of no Unicode")
        return cls(path.parent, path.stem, read_header(path))

    @property
    def path(self) -> Path:
        """The file of its tensors."""
        return self.folder / f"{self.name}.safetensors"

    @property
    def header_path(self) -> Path:
        """The file of its header."""
        return self.folder / f"{self.name}.json"

    @property
    def weights_path(self) -> Path:
        """The file of the weights before the round."""
        return self.folder / self.header.weights

    @property
    def truth_path(self) -> Path:
        """The file of its private images, which may be absent."""
        return self.folder / "truth" / f"{self.name}.safetensors"

    @property
    def shuffles_images(self) -> bool:
        """Whether the uploads of its series hold other images in every round."""
        return self.header.recipe.get("partners") == "fresh"

    # what was sent

    def tensor_file(self) -> TensorFile:
        """The file of its tensors, whose header is sound."""
        return TensorFile(self.path, TENSORS, FLOATS)

    def tensors(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The tensors by parameter name: all, or those of `names` that it holds."""
        file = self.tensor_file()
        chosen = [name for name in file.names if names is None or name in names]
        return file.tensors(chosen, finite=True) if chosen else {}

    # the model it was made with

    def model(self) -> LoadedModel:
        """The model whose weights the client started from, as the header describes it."""
        return self._opened_by(load_model)

    def outline(self) -> LoadedModel:
        """The same model without its weights (`outline_model`)."""
        return self._opened_by(outline_model)

    def _opened_by(self, load: Callable[..., LoadedModel]) -> LoadedModel:
        self.check_weights()
        fields: dict[str, Any] = {"mean": self.header.mean, "std": self.header.std}
        fields |= self.header.model
        # An absolute path is never taken for a word such as timm:NAME.
        model = load(fields.pop("model", None), checkpoint=self.weights_path.absolute(), **fields)
        if model.family not in ("vit", "timm"):
            raise UserError(
                f"{shown(self.weights_path.name)}: expected the weights of a plain ViT, got a "
                f"{model.family}. Uploads of other networks are only simulated: give the weights "
                "as a model of a config."
            )
        return model

    def check_weights(self) -> None:
        """Raise unless the header names a regular file in the folder; a link may not lead out."""
        WEIGHTS_FILE.check(self.weights_path)
        with WEIGHTS_FILE.reading(self.weights_path):
            inside = self.weights_path.resolve().is_relative_to(self.folder.resolve())
        if not inside:
            got = "a link that leads out of the uploads' folder"
            raise WEIGHTS_FILE.refusal(self.weights_path, got)

    def check_seals(self) -> None:
        """Raise unless the tensors and the private images are as they were recorded. Files without
        a seal, as strangers write them, pass."""
        check_digest(self.path, TENSORS)
        if self.has_truth:
            check_digest(self.truth_path, TRUTH)

    # its pictures

    @property
    def has_truth(self) -> bool:
        """Whether somebody kept its private images."""
        return is_there(self.truth_path)

    def truth_file(self) -> TruthFile | None:
        """The file of its private images, of which the header alone is read; None if absent."""
        return TruthFile(self.truth_path) if self.has_truth else None

    def truth(self) -> RecordedTruth | None:
        """Its private images, or None where nobody kept them."""
        file = self.truth_file()
        return None if file is None else file.read()

    def labels(self, model: LoadedModel) -> Tensor:
        """The labels (B,) as recorded, or else as the gradient of the classifier tells them.

        Where that was not sent, or the batch is larger than one, labels are UNKNOWN_LABEL.
        """
        if self.header.labels is not None:
            return torch.tensor(self.header.labels)
        label = shown_labels(stacked([self], [HEAD, HEAD_BIAS], torch.device("cpu")), model)
        return torch.full((self.header.batch,), UNKNOWN_LABEL) if label is None else label


# uploads together ---------------------------------------------------------------------------------

SHARED_WITH_UPDATE = (
    *("kind", "batch", "steps", "optimizer", "lr", "weight_decay", "momentum", "autocast", "round"),
)
"""Fields that a header and a `ClientUpdate` have in common."""


def stacked(uploads: Sequence[Upload], names: Sequence[str], device: torch.device) -> ClientUpdate:
    """Uploads of one kind of client as one update with a leading axis, on the device.

    It holds those of the names that every upload has. What the uploads share, such as the learning
    rate, is taken from the first one.
    """
    header = uploads[0].header
    parts = [upload.tensors(names) for upload in uploads]
    common = [name for name in names if all(name in part for part in parts)]
    dtype = getattr(torch, header.dtype)
    grads = {name: torch.stack([part[name] for part in parts]).to(device, dtype) for name in common}
    client = header.client_config(uploads[0].name)
    undeclared = [  # a defence that only scales examples has nothing to declare
        each.undeclared or (client.has_errors and not (each.noise or each.rounding))
        for each in (upload.header for upload in uploads)
    ]

    def levels(of: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
        """Standard deviations (n,) by name, but for those that are zero in every upload."""
        told = [name for name in common if any(each.get(name) for each in of)]
        values = {name: [each.get(name, 0.0) for each in of] for name in told}
        return {n: torch.tensor(v, dtype=torch.float64).to(device) for n, v in values.items()}

    shared = {name: getattr(header, name) for name in SHARED_WITH_UPDATE}
    if header.autocast == "none":
        shared["autocast"] = shown_autocast(grads)
    return ClientUpdate(
        grads,
        dtype=dtype,
        client=header.client,
        partners=client.partners,
        dal_lambda=client.dal_lambda if client.dal else 0.0,
        position_noise=client.position_noise,
        noise=levels([upload.header.noise for upload in uploads]),
        rounding=levels([upload.header.rounding for upload in uploads]),
        clipped=client.clips,
        undeclared=torch.tensor(undeclared) if client.defenses else None,
        **shared,
    )


def shown_labels(update: ClientUpdate, model: LoadedModel) -> Tensor | None:
    """The labels (n,) that the classifier's gradient tells of n single images; else None."""
    return label_in_gradient(classifier_gradient(update, model)) if update.batch == 1 else None


def classifier_gradient(update: ClientUpdate, model: LoadedModel) -> dict[str, Tensor]:
    """The gradient of the classifier's weight and bias (n, *shape) as far as they were sent."""
    sent = {name: update.grads[name] for name in (HEAD, HEAD_BIAS) if name in update.grads}
    if update.kind == "gradient":
        return sent
    assert update.lr
    before = {name: model.get_parameter(name).detach().to(sent[name]) for name in sent}
    return {n: -d / update.lr - update.weight_decay * before[n] for n, d in sent.items()}


def view_of(
    updates: Sequence[ClientUpdate],
    models: Sequence[LoadedModel],
    labels: Tensor | None,
    against: Literal["input", "plain"] = "plain",
) -> AttackerView:
    """What an attacker sees of the update of each round, and the model that the round began
    with."""
    first = models[0]
    with_weights = [
        replace(update, weights_before=None if model is first else weights_of(model))
        for update, model in zip(updates, models, strict=True)
    ]
    pixels = Pixels(first.card.img_size, first.card.mean, first.card.std)
    return AttackerView(first, with_weights, pixels, labels, against)


def write_upload(
    folder: Path,
    name: str,
    header: UploadHeader,
    update: ClientUpdate,
    inputs: ClientInput | None = None,
    plain: Tensor | None = None,
) -> Path:
    """Write an update of one step as an upload of this name; the file of its tensors. Files are
    renamed into place when they are complete, the header last.

    header  the file of weights, which is there, and the label; round, kind and the like come from
            the update
    inputs, plain  what was fed, and the images before the shuffle: the truth for scoring
    """
    fields: dict[str, Any] = {field: getattr(update, field) for field in SHARED_WITH_UPDATE}
    fields |= {
        "dtype": str(update.dtype).removeprefix("torch."),
        "noise": {key: float(level[0]) for key, level in update.noise.items()},
        "rounding": {key: float(level[0]) for key, level in update.rounding.items()},
        "undeclared": update.undeclared is not None and bool(update.undeclared[0]),
    }
    weights = folder / header.weights
    if header.weights_sha256 is None and weights.is_file():
        fields["weights_sha256"] = file_sha256(weights)
    if inputs is not None and header.labels is None and bool((inputs.labels >= 0).all()):
        fields["labels"] = tuple(inputs.labels.tolist())
    there = Upload(folder, name, replace(header, **fields))
    if inputs is not None and plain is not None:
        kept = {"images": plain, "mask": inputs.mask, "permutation": inputs.permutation}
        told = {key: stored(tensor) for key, tensor in kept.items() if tensor is not None}
        ids = json.dumps(list(inputs.image_ids))
        save_tensors(there.truth_path, told, {"image_ids": ids}, digest=True)
    tensors = {key: stored(grad[0]) for key, grad in update.grads.items()}
    save_tensors(there.path, tensors, {}, digest=True)
    write_header(there.header_path, there.header)
    return there.path


# weights beside uploads ---------------------------------------------------------------------------


def record_weights(folder: Path, model: LoadedModel) -> str:
    """Store the model's weights unless they are there already; their file, in the folder.

    It is named after the tensors and the metadata: equal tensors with other heads, another
    activation or normalisation are another model.
    """
    digest = hashlib.sha256(json.dumps(weights_metadata(model), sort_keys=True).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + stored(parameter).numpy().tobytes())
    place = f"weights/{digest.hexdigest()[:16]}.safetensors"
    try:
        check_digest(folder / place, WEIGHTS_FILE)
    except BadFile:  # not there, or damaged
        save_weights(folder / place, model)
    return place


def save_weights(path: Path, model: LoadedModel, facts: Mapping[str, Any] | None = None) -> None:
    """Write the model as a checkpoint whose metadata hold all that `load_model` needs, and the
    file's own digest.

    facts: further entries of the metadata.
    """
    tensors = {name: stored(p) for name, p in model.named_parameters()}
    save_tensors(path, tensors, weights_metadata(model, facts), digest=True)


def weights_metadata(model: LoadedModel, facts: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The metadata of that file, without its digest."""
    card = model.card
    if isinstance(model, TimmNetwork):
        return stated_by(model)
    known = {
        **{name: getattr(card, name) for name in METADATA if hasattr(card, name)},
        "num_heads": model.blocks[0].attn.num_heads,  # type: ignore[union-attr]
        "position_embedding": model.position_embedding,
        "first_block": model.first_block,
        "dal": model.dal_kind,
        "adapters": None if model.adapters is None else model.adapters.text,
    }
    texts = {name: json.dumps(value) for name, value in known.items() if value is not None}
    return texts | {n: json.dumps(value) for n, value in (facts or {}).items() if value is not None}


def stored(tensor: Tensor) -> Tensor:
    """The tensor as safetensors can write it: detached, contiguous, on the CPU."""
    return tensor.detach().cpu().contiguous()


# private images -----------------------------------------------------------------------------------

TRUTH = FileKind(
    "an upload's private images: `images` (B, 3, S, S) from 0 to 1, one of `image_ids` for each in "
    "the metadata, under MJP `mask` and `permutation` (B, N)",
    "Mend that file, or take it out to attack without scores.",
    4 << 30,
)

OUTSIDE = 1e-5
"""How far rounding takes a pixel out of [0, 1]."""


@dataclass(frozen=True)
class RecordedTruth:
    """The private images of an upload, and how they were shuffled."""

    images: Tensor  # (B, C, H, W) in [0, 1], before any shuffle
    image_ids: tuple[str, ...]
    mask: Tensor | None  # (B, N) bool, of the first local step
    permutation: Tensor | None  # (B, N)


class TruthFile:
    """A file of private images whose header is sound: TruthFile(path).image_ids."""

    def __init__(self, path: Path) -> None:
        self.file = TensorFile(path, TRUTH)
        shapes, ids = self.file.shapes, self.file.metadata_value("image_ids")
        if shapes.keys() not in ({"images"}, {"images", "mask", "permutation"}):
            raise self._refusal(f"tensors of the names {shown(', '.join(shapes), 100)}")
        if self.file.dtypes["images"] not in FLOATS:
            raise self._refusal(f"entries of type {self.file.dtypes['images']}", "images")
        usable = isinstance(ids, list) and all(
            isinstance(name, str) and name.strip() and is_usable(name) for name in ids
        )
        if not usable or (len(set(ids)),) != shapes["images"][:1]:
            got = f"{shown(ids, 100)} for images of the shape {shapes['images']}"
            raise self._refusal(got, "image_ids")
        self.image_ids: tuple[str, ...] = tuple(ids)

    def check_shapes(self, batch: int, size: Size, patches: int) -> None:
        """Raise unless it holds the images of such a batch, for a model of this input size."""
        places = (batch, patches)
        images = (batch, 3, *height_width(size))
        expected = {"images": images, "mask": places, "permutation": places}
        for name, shape in self.file.shapes.items():
            if shape != expected[name]:
                raise self._refusal(f"{shape} where its upload needs {expected[name]}", name)

    def read(self) -> RecordedTruth:
        """The images and the shuffle; to be called after `check_shapes`."""
        tensors = self.file.tensors(finite=True)
        images = tensors["images"].float()
        low, high = (float(bound) for bound in images.aminmax())
        if low < -OUTSIDE or high > 1 + OUTSIDE:
            raise self._refusal(f"values from {low:.3g} to {high:.3g}", "images")
        if "mask" not in tensors:
            return RecordedTruth(images, self.image_ids, None, None)
        mask, permutation = tensors["mask"], tensors["permutation"].long()
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise self._refusal("entries other than 0 and 1", "mask")
        places = torch.arange(mask.shape[-1])
        if not torch.equal(permutation.sort(-1).values, places.expand_as(permutation)):
            got = f"rows that are no order of the patches 0 to {len(places) - 1}"
            raise self._refusal(got, "permutation")
        if bool(((permutation != places) & ~mask.bool()).any()):
            raise self._refusal("patches that move and that `mask` does not name", "permutation")
        return RecordedTruth(images, self.image_ids, mask.bool(), permutation)

    def _refusal(self, got: str, field: str = "") -> BadFile:
        return TRUTH.refusal(self.file.path, got, field)
