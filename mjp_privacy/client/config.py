"""The client of a cell: how it makes its update, and how that enters a cell's identity."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from mjp_privacy.client.defenses.registry import StepDefense, canonical, check_order, defense_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.fields import STRICT

Share = Annotated[float, Field(ge=0, le=1)]


def _one_line(item: Any) -> str:
    try:
        return canonical(_mapping(item) if isinstance(item, str) and item.startswith("{") else item)
    except UserError as error:  # pydantic says in which field
        raise PydanticCustomError("defense", str(error)) from error


def _mapping(text: str) -> Any:
    """YAML's braces, as they come from the command line."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(
            f"A defense is written as in {{dp_sgd: 0.5}} or dp_sgd 0.5; got {text!r}."
        ) from error


DefenseText = Annotated[str, BeforeValidator(_one_line)]


@dataclass(frozen=True, config=STRICT)
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
    defenses: tuple[DefenseText, ...] = ()
    """What is done to the upload, in this order: `{dp_sgd: 0.5}`, `{top_k: 0.1}`, `int8`, ..."""
    steps: int = 1
    """Local steps on the step's own images, each with a fresh mask, before weights are sent."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Of the local steps."""
    momentum: float = 0.0
    """Of SGD; from zero at the start of every upload."""

    @property
    def withheld(self) -> tuple[str, ...]:
        """`withhold`, and the table where it is no parameter."""
        fixed = ("pos_embed",) if self.positions == "sinusoidal" else ()
        return tuple(dict.fromkeys((*self.withhold, *fixed)))

    @property
    def one_plain_step(self) -> bool:
        """Whether what it uploads is the gradient of one step, or one step of plain SGD."""
        return self.steps == 1 and self.optimizer == "sgd" and self.momentum == 0

    @property
    def clips(self) -> bool:
        """Whether each example's gradient is shrunk by a factor that nobody is told."""
        return any(isinstance(defense_of(text), StepDefense) for text in self.defenses)

    @property
    def pseudo_gradient(self) -> Literal["exact", "approximate"]:
        """Whether one gradient can be computed from the upload, but for defences. Momentum's first
        step is a plain one."""
        one = self.steps == 1 and self.optimizer == "sgd"
        return "exact" if one else "approximate"


FIRST_FIELDS = ("mode", "loss", "batch", "dal", "dal_lambda")
"""In every cell's identity; fields that came later enter it where they are not at their default,
so that runs made before them stay finished."""


MOST_STEPS = 1_000_000
"""Below this, so that a local step's number and its round's make one number."""


def local_round(round: int, step: int) -> int:
    """The number that the choices of a local step are drawn for: the round's own for the first
    one, and for the others one that no round and no other step has."""
    return round if step == 0 else -(round * MOST_STEPS + step)


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
    if not 0 <= client.momentum < 1:
        raise UserError(
            f"{where}.momentum: expected 0 or a number above, below 1, got {client.momentum}."
        )
    _check_local_training(client, where)
    check_order(client.defenses, where)
    _check_moving(client, where)


def _check_local_training(client: ClientConfig, where: str) -> None:
    if not 1 <= client.steps < MOST_STEPS:
        raise UserError(
            f"{where}.steps: expected 1 to {MOST_STEPS - 1} local steps, got {client.steps}."
        )
    if client.optimizer != "sgd" and client.momentum:
        raise UserError(
            f"{where}.momentum: expected 0 where the optimizer is {client.optimizer}, got "
            f"{client.momentum}: it has its own. Set one of the two back."
        )
    if client.upload == "weight_difference" or client.one_plain_step:
        return
    field = next(f for f in ("steps", "optimizer", "momentum") if _changed(client, f))
    raise UserError(
        f"{where}.{field}: expected upload: weight_difference, got upload: {client.upload} with "
        f"{field} {getattr(client, field)}: one gradient is not what such a client made. Set "
        "upload: weight_difference."
    )


def _check_moving(client: ClientConfig, where: str) -> None:
    """The server here steps along clean gradients of one step."""
    if client.position_noise and client.server_lr:
        raise UserError(
            f"{where}.position_noise: expected 0 where server_lr is above 0, got "
            f"{client.position_noise}: the server here steps along gradients without noise, and "
            "its steps would give the noise away. Set one of the two to 0."
        )
    if client.position_noise and client.defenses:
        raise UserError(
            f"{where}.position_noise: expected 0 where there are defenses, got "
            f"{client.position_noise}. Give one of the two; gaussian_noise is on every parameter."
        )
    if client.server_lr and (client.defenses or not client.one_plain_step):
        field = "defenses" if client.defenses else "steps"
        raise UserError(
            f"{where}.{field}: expected none of its kind where server_lr is above 0: the server "
            "here steps along the clean gradients of one step. Set server_lr: 0."
        )


def _changed(client: ClientConfig, name: str) -> bool:
    default = {field.name: field.default for field in dataclasses.fields(client)}[name]
    return bool(getattr(client, name) != default)


def client_facts(client: ClientConfig) -> dict[str, Any]:
    """The fields after the first ones as columns of a table."""
    later = [f.name for f in dataclasses.fields(client) if f.name not in FIRST_FIELDS]
    return {name: getattr(client, name) for name in later} | {
        "withhold": ", ".join(client.withheld),
        "defenses": " + ".join(client.defenses),
        "pseudo_gradient": client.pseudo_gradient,
    }
