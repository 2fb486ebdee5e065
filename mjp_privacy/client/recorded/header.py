"""The header of a recorded upload: the JSON file beside its tensors.

    NAME.safetensors   tensors by parameter name, each of the parameter's own shape
    NAME.json          this header; written last, so that an upload without one is unfinished

Everything in it is known to the server, which gave its clients their recipe. Private images, where
somebody kept them for scoring, lie in a folder of their own.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.fields import STRICT, parse

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Channels = tuple[float, float, float]


@dataclass(frozen=True, config=STRICT)
class UploadHeader:
    """One client's message in one round."""

    label: str
    """What tables call this client and its model."""
    weights: str
    """The file of the weights before the round, relative to the folder: safetensors, or any
    checkpoint that `load_model` reads."""
    mean: Channels
    """Mean and standard deviation that the client normalised its images with; never guessed."""
    std: Channels
    format: Literal[1] = 1
    weights_sha256: str | None = None
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of `load_model` that the weights file does not tell: model, num_heads, img_size."""
    round: Annotated[int, Field(ge=0)] = 0
    client: str = "0"
    series: str | None = None
    """Uploads with the same series name hold the same images, as an attacker assumes of one
    client's rounds; None: this upload stands alone."""
    kind: Literal["gradient", "weight_difference"] = "gradient"
    """weight_difference: weights after minus weights before."""
    dtype: Literal["float32", "float64"] = "float32"
    """The precision in which the client computed."""
    batch: Count = 1
    steps: Count = 1
    optimizer: str = "sgd"
    momentum: Share = 0.0
    lr: float | None = None
    weight_decay: float = 0.0
    gamma: Share = 0.0
    """MJP's shuffle ratio; 0: nothing is shuffled."""
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other fields of a client in the attack's configs: dal, mask, withhold, defenses, ..."""
    noise: dict[str, float] = dataclasses.field(default_factory=dict)
    """By parameter, the standard deviation of what the recipe's defences added to every entry."""
    rounding: dict[str, float] = dataclasses.field(default_factory=dict)
    """The same for errors that leave a zero entry zero: quantisation and dropped entries."""
    undeclared: bool = False
    """Whether one of the recipe's defences changed the upload and did not say by how much."""
    labels: tuple[int, ...] | None = None
    """Classes of the images, where the attacker knows them; None: read from the gradient."""
    partial: bool = False
    """Whether only some of the tensors that were sent were written down."""

    def client_config(self, where: str) -> ClientConfig:
        """The same client as the attack's configs describe it.

        where: the upload's name, which opens the message about a mistake in the recipe.
        """
        client_fields = {field.name for field in dataclasses.fields(ClientConfig)}
        shared = {name: getattr(self, name) for name in SHARED_WITH_CLIENT if name in client_fields}
        if self.lr is not None:
            shared["lr"] = self.lr
        content = {**self.recipe, "upload": self.kind, **shared}
        return parse(ClientConfig, content, f"{where}, recipe", {})

    def hides_an_error(self, client: ClientConfig) -> bool:
        """Whether attacks are told too little of what the recipe's defences did to this upload.

        client: the recipe's. A defence that only scales examples has nothing to declare.
        """
        return self.undeclared or (client.has_errors and not (self.noise or self.rounding))


SHARED_WITH_CLIENT = ("batch", "steps", "optimizer", "momentum", "weight_decay")
"""Fields that a header and a client's config have in common."""


def read_header(path: Path) -> UploadHeader:
    """Read and check a header; a misspelt or missing field is a UserError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path.name}: expected the JSON header of an upload, got a file that cannot be read "
            f"({error}). Record this upload again, or take its files out."
        ) from error
    if not isinstance(content, dict):
        raise UserError(
            f"{path.name}: expected a JSON object with fields such as label and weights, got "
            f"{type(content).__name__}."
        )
    header = parse(UploadHeader, content, path.name, {})
    _check(header, path.name)
    return header


def _check(header: UploadHeader, where: str) -> None:
    weights = Path(header.weights)
    if weights.is_absolute() or ".." in weights.parts:
        raise UserError(
            f"{where}, weights: expected a file inside the uploads' folder, got {header.weights!r}."
        )
    if not all(math.isfinite(n) for n in (*header.mean, *header.std)) or min(header.std) <= 0:
        raise UserError(
            f"{where}: expected finite mean and std above 0, got {header.mean} and {header.std}."
        )
    if header.kind == "weight_difference" and not (header.lr and 0 < header.lr < math.inf):
        raise UserError(
            f"{where}, lr: a weight difference is a gradient times the client's learning rate; "
            f"expected a number above 0, got {header.lr}."
        )
    if header.labels is not None and len(header.labels) != header.batch:
        raise UserError(
            f"{where}, labels: expected one for each of {header.batch} image(s), got "
            f"{len(header.labels)}."
        )


def header_text(header: UploadHeader) -> str:
    """The header as JSON; most fields are left out where they have their default."""
    fields = {field.name: field for field in dataclasses.fields(header)}
    always = ("label", "weights", "mean", "std", "format", "round", "client", "kind")
    content = {
        name: value
        for name, value in dataclasses.asdict(header).items()
        if name in always or value != _default(fields[name])
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
