"""The header of an upload: the JSON file beside its tensors, or the same facts in memory.

Everything in it is known to the server, which gave its clients their recipe. Private images, where
somebody kept them for scoring, lie in a folder of their own.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field

from mjp_privacy.client.config import ClientConfig, check_client
from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import FileKind, read_json_value, typed
from mjp_privacy.core.schema import (
    Label,
    Many,
    Mean,
    NotNegative,
    Positive,
    Share,
    Spread,
    Switch,
    Whole,
    parse,
    schema,
)
from mjp_privacy.core.text import shown
from mjp_privacy.models.tensor_files import BLANK_DIGEST, check_digest, write_with_digest
from mjp_privacy.models.zoo import ModelSpec

HEADER = FileKind(
    "the JSON header of an upload, with fields such as label and weights",
    "Mend it as mjp_privacy/uploads/header.py describes it, and take out its `seal` where you "
    "changed it; or record this upload again, or take its files out.",
    1 << 20,
)
MOST_IMAGES = 10_000
"""In one step of a client."""

Images = Annotated[int, Field(strict=True, ge=1, le=MOST_IMAGES)]
Steps = Annotated[int, Field(strict=True, ge=1, lt=1_000_000)]
ClassIndex = Annotated[int, Field(strict=True, ge=0, lt=1_000_000)]
InsideFolder = Annotated[str, Field(strict=True, min_length=1, max_length=500)]
Digest = Annotated[str, Field(strict=True, max_length=64, pattern=r"^[0-9a-f]{64}$")]
Levels = Annotated[dict[Label, NotNegative], Field(max_length=10_000)]
Kind = Literal["gradient", "weight_difference"]


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
    kind: Kind = "gradient"
    """weight_difference: weights after minus weights before."""
    dtype: Literal["float32", "float64"] = "float32"
    """The precision in which the client computed."""
    batch: Images = 1
    steps: Steps = 1
    optimizer: Label = "sgd"
    momentum: Share = 0.0
    lr: Positive | None = None
    weight_decay: NotNegative = 0.0
    autocast: Literal["none", "fp16", "bf16"] = "none"
    """The half precision in which the client computed products of matrices (`client.autocast`).
    Gradients that show it need not say it."""
    gamma: Share = 0.0
    """MJP's shuffle ratio; 0: nothing is shuffled."""
    recipe: Annotated[dict[Label, Any], Many] = dataclasses.field(default_factory=dict)
    """Other fields of a client in the attack's configs: dal, mask, withhold, defenses, ..."""
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

    def client_config(self, where: str) -> ClientConfig:
        """The same client as the attack's configs describe it.

        where: the upload's name, which opens the message about a mistake in the recipe. An
        optimiser that the configs do not know stays in the header alone.
        """
        shared = {name: getattr(self, name) for name in SHARED_WITH_CLIENT}
        if self.optimizer not in KNOWN_OPTIMIZERS:
            del shared["optimizer"]
        if self.lr is not None:
            shared["lr"] = self.lr
        content = {**self.recipe, "upload": self.kind, **shared}
        return parse(ClientConfig, content, f"{where}, recipe")


SHARED_WITH_CLIENT = ("batch", "steps", "optimizer", "momentum", "weight_decay", "autocast")
"""Fields that a header and a client's config have in common."""
KNOWN_OPTIMIZERS: tuple[str, ...] = get_args(get_type_hints(ClientConfig)["optimizer"])
ALWAYS = ("label", "weights", "mean", "std", "format", "round", "client", "kind")
"""Fields that stand in the file also where they have their default."""


def read_header(path: Path) -> UploadHeader:
    """Read and check a header; each mistake in it is a UserError that names file and field. One
    that carries a seal must be as it was recorded."""
    content = read_json_value(path, HEADER)
    sealed = isinstance(content, dict) and "seal" in content
    if sealed:
        del content["seal"]
    header = typed(content, path, HEADER, UploadHeader)
    check_header(header, path)
    if sealed:
        check_digest(path, HEADER, needed=True)
    return header


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
    if header.kind == "weight_difference" and header.lr is None:
        rate = "the learning rate, which a weight difference is a gradient times of"
        raise header_refusal(path, "lr", rate, "none")
    if header.labels is not None and len(header.labels) != header.batch:
        each = f"one for each of {header.batch} image(s) of the batch"
        raise header_refusal(path, "labels", each, str(len(header.labels)))
    try:
        parse(ClientConfig, header.recipe, "it")  # also what the header's own fields replace
        check_client(header.client_config("it"), None, "recipe")
    except UserError as error:
        fields = "fields of one client's config, whose `upload` is the header's `kind`"
        raise header_refusal(path, "recipe", fields, " ".join(str(error).split())) from error


def header_refusal(path: Path, field: str, expected: str, got: str) -> BadFile:
    """The error for one field: header_refusal(path, "lr", "a number above 0", "none")."""
    return dataclasses.replace(HEADER, expected=expected).refusal(path, got.rstrip("."), field)


def write_header(path: Path, header: UploadHeader) -> None:
    """Write the header as JSON with its digest; most fields are left out where they have their
    default."""
    blank = UploadHeader(header.label, header.weights, header.mean, header.std)
    fields = {field.name: getattr(header, field.name) for field in dataclasses.fields(header)}
    told = {n: v for n, v in fields.items() if n in ALWAYS or v != getattr(blank, n)}
    content = {"seal": BLANK_DIGEST, **told}
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_with_digest(path, lambda file: file.write_bytes(text.encode()))
