"""One upload as files: a model, what one client sent, what is known of that client, and perhaps
the truth. In memory it is a `ClientUpdate` (`memory.py`).

    upload = Upload.load("uploads/round_3.json")     # read when they are asked for
    upload.tensors(), upload.model(), upload.truth()
    write_upload(folder, name, header, update, inputs, plain)

    DIR/NAME.safetensors   tensors by parameter name, each of the parameter's own shape
    DIR/NAME.json          the header; written last, so that an upload without one is unfinished
    DIR/weights/SHA.safetensors   weights from before a round, each stored once
    DIR/truth/NAME.safetensors    private images, for scoring only; may be absent

Everything in a header is known to the server, which gave its clients their recipe. Files carry
their own digests (`models/tensor_files.py`), and a header that of its weights' file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from mjp_privacy.client.config import MOST_IMAGES, ClientConfig, client_recipe, told_client
from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import FileKind, is_there, read_json_value, typed
from mjp_privacy.core.schema import (
    Label,
    Many,
    Mean,
    NotNegative,
    Share,
    Size,
    Spread,
    Switch,
    Whole,
    height_width,
    parse,
    schema,
)
from mjp_privacy.core.text import shown
from mjp_privacy.data.files import is_usable
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.checkpoint_files import file_sha256
from mjp_privacy.models.checkpoints import METADATA
from mjp_privacy.models.loading import outline_model
from mjp_privacy.models.tensor_files import (
    BLANK_DIGEST,
    FLOATS,
    TensorFile,
    check_digest,
    save_tensors,
    write_with_digest,
)
from mjp_privacy.models.timm_networks import TimmNetwork, stated_by
from mjp_privacy.models.zoo import ModelSpec

# the header --------------------------------------------------------------------------------------

HEADER = FileKind(
    "the JSON header of an upload, with fields such as label and weights",
    "Mend it as mjp_privacy/uploads/record.py describes it, and take out its `seal` where you "
    "changed it; or record this upload again, or take its files out.",
    1 << 20,
)
ClassIndex = Annotated[int, Field(strict=True, ge=0, lt=1_000_000)]
InsideFolder = Annotated[str, Field(strict=True, min_length=1, max_length=500)]
Digest = Annotated[str, Field(strict=True, max_length=64, pattern=r"^[0-9a-f]{64}$")]
Levels = Annotated[dict[Label, NotNegative], Field(max_length=10_000)]

NOT_STATED = ("name", "mean", "std", "adapters", "checkpoint", "where", "summary")
"""Fields of a model that stand elsewhere in a header, or nowhere."""


@schema
class UploadHeader:
    """One client's message in one round."""

    label: Label
    """What tables call this client and its model."""
    weights: InsideFolder
    """The file of the weights before the round, relative to the folder: safetensors, or any
    checkpoint that `load_model` reads."""
    mean: tuple[Mean, Mean, Mean]
    """Mean and standard deviation that the client normalised its images with; never guessed."""
    std: tuple[Spread, Spread, Spread]
    format: Annotated[int, Field(strict=True, ge=1, le=1)] = 1
    weights_sha256: Digest | None = None
    model: Annotated[dict[Label, Any], Many] = dataclasses.field(default_factory=dict)
    """Arguments of `load_model` that the weights file does not tell: model (its name), num_heads,
    img_size and other fields of `ModelSpec`, unknown_init."""
    round: Whole = 0
    client: Label = "0"
    series: Label | None = None
    """Uploads with the same series name hold the same images, as an attacker assumes of one
    client's rounds; None: this upload stands alone."""
    dtype: Literal["float32", "float64"] = "float32"
    """The precision in which the client computed."""
    gamma: Share = 0.0
    """MJP's shuffle ratio; 0: nothing is shuffled."""
    recipe: ClientConfig = ClientConfig()
    """The client, as the attack's configs describe it. Those of its fields that are `BESIDE` stand
    in the file beside this one. Gradients that show their `autocast` need not say it."""
    noise: Levels = dataclasses.field(default_factory=dict)
    """By parameter, the standard deviation of what the recipe's defences added to every entry."""
    rounding: Levels = dataclasses.field(default_factory=dict)
    """The same for errors that leave a zero entry zero: quantisation and dropped entries."""
    undeclared: Switch = False
    """Whether one of the recipe's defences changed the upload and did not say by how much."""
    labels: Annotated[tuple[ClassIndex, ...], Field(max_length=MOST_IMAGES)] | None = None
    """Classes of the images, where the attacker knows them; None: read from the gradient."""
    partial: Switch = False
    """Whether only some of the tensors that were sent were written down."""

    @property
    def facts(self) -> dict[str, Any]:
        """Every field by its name, those of the client among them."""
        return {n: v for n, v in {**vars(self), **vars(self.recipe)}.items() if n != "recipe"}


BESIDE = ("kind", "batch", "steps", "optimizer", "momentum", "lr", "weight_decay", "autocast")
"""Fields of a client that stand in a header's file beside its recipe; `kind` is its `upload`."""
IN_FILE = (
    *("label", "weights", "mean", "std", "format", "weights_sha256", "model", "round", "client"),
    *("series", "kind", "dtype", *BESIDE[1:], "gamma", "recipe"),
    *("noise", "rounding", "undeclared", "labels", "partial"),
)
"""The fields of the file, in its order."""
ALWAYS = ("label", "weights", "mean", "std", "format", "round", "client", "kind")
"""Fields that stand in the file also where they have their default."""


def written(header: UploadHeader) -> dict[str, Any]:
    """What a header's file holds: its fields, but for those that have their default."""
    blank = UploadHeader(header.label, header.weights, header.mean, header.std)
    client = header.recipe
    usual = {**vars(ClientConfig()), **vars(blank), "recipe": {}, "lr": None}
    known = {**vars(client), **vars(header), **client.stated, "recipe": client_recipe(client)}
    return {n: known[n] for n in IN_FILE if n in ALWAYS or known[n] != usual[n]}


def read_client(content: MutableMapping[str, Any], path: Path) -> None:
    """Bring the fields of a client that a header's file holds together, as its `recipe`."""
    recipe = content.get("recipe", {})
    if not isinstance(recipe, Mapping):
        return  # which is refused with the other fields
    beside = {name: content.pop(name, None) for name in BESIDE}
    told = {name: value for name, value in beside.items() if value is not None}
    try:
        content["recipe"] = told_client({**recipe, **told}, "recipe")
    except UserError as error:
        fields = "fields of one client's config, whose `upload` is the header's `kind`"
        raise header_refusal(path, "recipe", fields, " ".join(str(error).split())) from error


def check_header(header: UploadHeader, path: Path) -> None:
    """Raise for fields that do not fit each other, and for weights outside of the folder."""
    places = PurePosixPath(header.weights), PureWindowsPath(header.weights)
    if any(place.is_absolute() or place.drive or ".." in place.parts for place in places):
        got = repr(shown(header.weights))
        raise header_refusal(path, "weights", "a file inside the uploads' folder", got)
    model = {name: value for name, value in header.model.items() if name != "unknown_init"}
    if strange := [name for name in NOT_STATED if name in model]:
        others = "another field than those of the header itself"
        raise header_refusal(path, f"model.{strange[0]}", others, shown(model[strange[0]], 60))
    try:
        parse(ModelSpec, {"name": model.pop("model", "any"), **model}, "it")
    except UserError as error:
        got = " ".join(str(error).split())
        raise header_refusal(path, "model", "arguments of `load_model`", got) from error
    if header.labels is not None and len(header.labels) != header.recipe.batch:
        each = f"one for each of {header.recipe.batch} image(s) of the batch"
        raise header_refusal(path, "labels", each, str(len(header.labels)))


def header_refusal(path: Path, field: str, expected: str, got: str) -> BadFile:
    """The error for one field: header_refusal(path, "lr", "a number above 0", "none")."""
    return dataclasses.replace(HEADER, expected=expected).refusal(path, got.rstrip("."), field)


# its files ---------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class Upload:
    """One client's message in one round, as files that are read at every call."""

    folder: Path
    name: str
    header: UploadHeader

    @classmethod
    def load(cls, header: str | Path) -> Upload:
        """The upload whose header is this file. Each mistake in it is a UserError that names file
        and field; one that carries a seal must be as it was recorded."""
        path = Path(header)
        if not is_usable(path.stem):
            raise HEADER.refusal(path, "a name with control characters or bytes of no Unicode")
        content = read_json_value(path, HEADER)
        sealed = isinstance(content, dict) and "seal" in content
        if isinstance(content, dict):
            content.pop("seal", None)
            read_client(content, path)
        upload = cls(path.parent, path.stem, typed(content, path, HEADER, UploadHeader))
        check_header(upload.header, path)
        if sealed:
            check_digest(path, HEADER, needed=True)
        return upload

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
        return self.header.recipe.partners == "fresh"

    def tensor_file(self) -> TensorFile:
        """The file of its tensors, whose header is sound."""
        return TensorFile(self.path, TENSORS, FLOATS)

    @cached_property
    def sent(self) -> tuple[str, ...]:
        """The names of its tensors, sorted; none where the file cannot be read."""
        try:
            return tuple(sorted(self.tensor_file().names))
        except UserError:
            return ()

    def tensors(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The tensors by parameter name: all, or those of `names` that it holds."""
        file = self.tensor_file()
        chosen = [name for name in file.names if names is None or name in names]
        return file.tensors(chosen, finite=True) if chosen else {}

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


def write_upload(
    folder: Path,
    name: str,
    header: UploadHeader,
    update: ClientUpdate,
    inputs: ClientInput | None = None,
    plain: Tensor | None = None,
    photographs: Sequence[str] = (),
) -> Path:
    """Write an update of one step as an upload of this name; the file of its tensors. Files are
    renamed into place when they are complete, the header last.

    header  the client, its label and the file of weights, which is there; precision, round and
            errors come from the update
    inputs, plain  what was fed, and the images before the shuffle: the truth for scoring
    photographs    what each image was cut from, where several may be crops of one
    """
    fields: dict[str, Any] = {
        "dtype": str(update.dtype).removeprefix("torch."),
        "round": update.round,
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
        ids = tuple(inputs.image_ids)
        facts = {"image_ids": json.dumps(ids)}
        if tuple(photographs) not in ((), ids):
            facts["photographs"] = json.dumps(list(photographs))
        save_tensors(there.truth_path, told, facts, digest=True)
    tensors = {key: stored(grad[0]) for key, grad in update.grads.items()}
    save_tensors(there.path, tensors, {}, digest=True)
    content = {"seal": BLANK_DIGEST, **written(there.header)}
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_with_digest(there.header_path, lambda file: file.write_bytes(text.encode()))
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
    "the metadata, and perhaps `photographs`, which several images may be crops of; under MJP "
    "`mask` and `permutation` (B, N)",
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
        photographs = self.file.metadata_value("photographs") or ids
        if shapes.keys() not in ({"images"}, {"images", "mask", "permutation"}):
            raise self._refusal(f"tensors of the names {shown(', '.join(shapes), 100)}")
        if self.file.dtypes["images"] not in FLOATS:
            raise self._refusal(f"entries of type {self.file.dtypes['images']}", "images")
        for field, names in (("image_ids", ids), ("photographs", photographs)):
            usable = isinstance(names, list) and all(
                isinstance(name, str) and name.strip() and is_usable(name) for name in names
            )
            if not usable or (len(names),) != shapes["images"][:1] or len(set(ids)) < len(ids):
                got = f"{shown(names, 100)} for images of the shape {shapes['images']}"
                raise self._refusal(got, field)
        self.image_ids: tuple[str, ...] = tuple(ids)
        self.photographs: tuple[str, ...] = tuple(photographs)
        """What each image was cut from; where nothing is said of it, each is a photograph."""

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
