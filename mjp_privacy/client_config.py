"""The client of a cell: how it makes its update, and how that enters a cell's identity."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from mjp_privacy.errors import UserError

_STRICT = ConfigDict(extra="forbid")
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=_STRICT)
class ClientConfig:
    """How the client makes its gradient. Each field is a column of every row."""

    mode: Literal["eval", "train"] = "eval"
    loss: Literal["cross_entropy"] = "cross_entropy"
    batch: int = 1
    dal: bool = False
    """Add dal_lambda * L_DAL over the unmasked positions to the loss."""
    dal_lambda: float = 0.01
    plain_share: Share = 0.0
    """Probability that a step is not shuffled at all; the paper trains with .5."""
    mask: Literal["image", "batch"] = "image"
    """A puzzle for each image, or one for all images of a step: the first one's."""
    augment: Literal["none", "flip", "crop", "mixup"] = "none"
    """What every round does to the image before the shuffle. What is scored against is the image
    of round 0 after it."""
    withhold: tuple[str, ...] = ()
    """Parameters whose gradient is not uploaded, such as a frozen pos_embed."""
    positions: Literal["own", "sinusoidal"] = "own"
    """sinusoidal: a fixed 2-D sine table in place of the learned one, and no gradient of it."""
    position_noise: float = 0.0
    """Gaussian noise on what is uploaded of pos_embed, all rows; its standard deviation relative
    to the root mean square of the nonzero entries."""
    server_lr: float = 0.0
    """Between rounds all weights move by this along the mean gradient of the block's images, as in
    a federation that trains; 0: every round has the same weights."""
    upload: Literal["gradient", "weight_difference"] = "gradient"
    """weight_difference: weights after one SGD step minus those before, in the client's dtype."""
    lr: float = 0.1
    """Of that step."""
    weight_decay: float = 0.0
    """Of that step; it enters a weight difference only."""

    @property
    def withheld(self) -> tuple[str, ...]:
        """`withhold`, and the table where it is no parameter."""
        fixed = ("pos_embed",) if self.positions == "sinusoidal" else ()
        return tuple(dict.fromkeys((*self.withhold, *fixed)))


FIRST_FIELDS = ("mode", "loss", "batch", "dal", "dal_lambda")
"""In every cell's identity; fields that came later enter it where they are not at their default,
so that runs made before them stay finished."""


def client_identity(client: ClientConfig) -> dict[str, Any]:
    """What of the client decides a cell's key and run_id."""
    return {
        field.name: getattr(client, field.name)
        for field in dataclasses.fields(client)
        if field.name in FIRST_FIELDS or getattr(client, field.name) != field.default
    }


def client_recipe(client: ClientConfig) -> dict[str, Any]:
    """The fields that are off their default, for a file."""
    return {
        field.name: getattr(client, field.name)
        for field in dataclasses.fields(client)
        if getattr(client, field.name) != field.default
    }


def check_client(client: ClientConfig, block: int, where: str) -> None:
    """Ranges, and that a block holds whole client steps. `where` ends before the field's name."""
    if client.batch < 1:
        raise UserError(f"{where}.batch: expected at least 1, got {client.batch}.")
    if block % client.batch:
        raise UserError(
            f"{where.removesuffix('client')}block: a block holds whole client steps; expected a "
            f"multiple of client.batch ({client.batch}), got {block}."
        )
    for name in ("dal_lambda", "position_noise", "server_lr", "weight_decay"):
        value = getattr(client, name)
        if not 0 <= value < math.inf:
            raise UserError(f"{where}.{name}: expected 0 or a number above, got {value}.")
    if not 0 < client.lr < math.inf:
        raise UserError(f"{where}.lr: expected a number above 0, got {client.lr}.")
    if client.position_noise and client.server_lr:
        raise UserError(
            f"{where}.position_noise: expected 0 where server_lr is above 0, got "
            f"{client.position_noise}: the server here steps along gradients without noise, and "
            "its steps would give the noise away. Set one of the two to 0."
        )


def client_facts(client: ClientConfig) -> dict[str, Any]:
    """The fields after the first ones as columns of a table."""
    later = [f.name for f in dataclasses.fields(client) if f.name not in FIRST_FIELDS]
    return {name: getattr(client, name) for name in later} | {
        "withhold": ", ".join(client.withheld)
    }
