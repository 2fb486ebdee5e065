"""How a client made what it sent, as its user says it in keyword arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from attacks.equations.weight_difference import INVERSIONS
from mjp_privacy.client.autocast import Autocast
from mjp_privacy.client.config import MOST_STEPS
from mjp_privacy.client.recorded.header import MOST_IMAGES
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean, unknown_name
from mjp_privacy.core.schema import MOST_NUMBER
from mjp_privacy.core.text import shown

Kind = Literal["gradient", "weight_difference"]
KINDS = ("gradient", "weight_difference")
AUTOCASTS = get_args(Autocast)


@dataclass(frozen=True)
class ClientStep:
    """The public facts of a client's step: ClientStep(kind="weight_difference", lr=0.1, steps=4).

    kind       gradient, or weight_difference: the weights after the step minus those before
    batch      images in each step
    lr, steps, optimizer, momentum, weight_decay
               of the client's training; they matter for weight differences alone
    dal_lambda weight of MJP's extra loss (DAL), where the client has it in its loss
    autocast   none, fp16 or bf16: the half precision of torch.autocast, where the client used it;
               a gradient that shows it need not say it
    noise      standard deviation, in the gradient's own units, of the noise that a defence added
               to every entry; not relative to its size
    rounding   the same for errors that leave a zero entry zero: quantised or dropped entries
    """

    kind: Kind = "gradient"
    batch: int = 1
    lr: float | None = None
    steps: int = 1
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    dal_lambda: float = 0.0
    noise: float = 0.0
    rounding: float = 0.0
    autocast: Autocast = "none"

    def __post_init__(self) -> None:
        for name in ("momentum", "weight_decay", "dal_lambda", "noise", "rounding"):
            if not is_number(value := getattr(self, name)) or not 0 <= value <= MOST_NUMBER:
                raise UserError(f"{name}: expected 0 or a number above it, got {said(value)}.")
        for name, most in (("batch", MOST_IMAGES), ("steps", MOST_STEPS - 1)):
            if not is_whole(number := getattr(self, name)) or number < 1:
                raise UserError(f"{name}: expected a whole number from 1, got {said(number)}.")
            if number > most:
                raise UserError(f"{name}: expected at most {most}, got {said(number)}.")
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise unknown_name("kind", shown(self.kind, 60), KINDS)
        if not isinstance(self.autocast, str) or self.autocast not in AUTOCASTS:
            raise unknown_name("autocast", shown(self.autocast, 60), AUTOCASTS)
        if self.kind == "weight_difference":
            self._check_difference()
        elif given := self._of_training():
            raise UserError(
                f"{', '.join(given)}: a gradient does not depend on them. If the client sent "
                "weights, give kind='weight_difference' and the weights after the step minus those "
                "before; else leave them out."
            )

    def _of_training(self) -> list[str]:
        """What was given of the client's training, as name=value."""
        fields = ("lr", "steps", "optimizer", "momentum", "weight_decay")
        values = {name: getattr(self, name) for name in fields}
        changed = {n: v for n, v in values.items() if v is not getattr(ClientStep, n)}
        return [
            f"{name}={said(value)}"
            for name, value in changed.items()
            if not isinstance(value, int | float | str) or value != getattr(ClientStep, name)
        ]

    def _check_difference(self) -> None:
        if not is_number(self.lr) or not 0 < (self.lr or 0) <= MOST_NUMBER:
            raise UserError(
                "kind='weight_difference': a weight difference is a gradient times the client's "
                f"learning rate; expected lr above 0, got {said(self.lr)}. Give lr=… and steps=…."
            )
        if self.momentum > 1:
            raise UserError(f"momentum: expected a share from 0 to 1, got {said(self.momentum)}.")
        if not isinstance(self.optimizer, str) or self.optimizer not in INVERSIONS:
            raise UserError(
                f"optimizer: expected {' or '.join(INVERSIONS)}, got {said(self.optimizer)}."
                f"{did_you_mean(shown(self.optimizer, 60).lower(), INVERSIONS)} No attack "
                "here reads the weight difference of another one, which is no evidence of safety. "
                "Adam without weight decay moves weights as optimizer='adamw' does."
            )


def is_number(value: object) -> bool:
    """Whether it is a plain number, and neither a truth value nor a text."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether it is a whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def said(value: object) -> str:
    """A value that a user gave, as a message shows it: one short line."""
    return shown(repr(value), 100)
