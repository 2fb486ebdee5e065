"""How a client made what it sent, as its user says it in keyword arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from attacks.equations.weight_difference import INVERSIONS
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean, unknown_name

Kind = Literal["gradient", "weight_difference"]
KINDS = ("gradient", "weight_difference")


@dataclass(frozen=True)
class ClientStep:
    """The public facts of a client's step: ClientStep(kind="weight_difference", lr=0.1, steps=4).

    kind       gradient, or weight_difference: the weights after the step minus those before
    batch      images in each step
    lr, steps, optimizer, momentum, weight_decay
               of the client's training; they matter for weight differences alone
    dal_lambda weight of MJP's extra loss (DAL), where the client has it in its loss
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

    def __post_init__(self) -> None:
        for name in ("momentum", "weight_decay", "dal_lambda", "noise", "rounding"):
            if not _is_number(value := getattr(self, name)) or not 0 <= value < math.inf:
                raise UserError(f"{name}: expected 0 or a number above it, got {value!r}.")
        for name in ("batch", "steps"):
            if not isinstance(number := getattr(self, name), int) or number < 1:
                raise UserError(f"{name}: expected a whole number from 1, got {number!r}.")
        if self.kind not in KINDS:
            raise unknown_name("kind", str(self.kind), KINDS)
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
        return [f"{n}={value}" for n, value in values.items() if value != getattr(ClientStep, n)]

    def _check_difference(self) -> None:
        if not _is_number(self.lr) or not 0 < float(self.lr or 0) < math.inf:
            raise UserError(
                "kind='weight_difference': a weight difference is a gradient times the client's "
                f"learning rate; expected lr above 0, got {self.lr!r}. Give lr=… and steps=…."
            )
        if self.momentum > 1:
            raise UserError(f"momentum: expected a share from 0 to 1, got {self.momentum!r}.")
        if self.optimizer not in INVERSIONS:
            raise UserError(
                f"optimizer: expected {' or '.join(INVERSIONS)}, got {self.optimizer!r}."
                f"{did_you_mean(str(self.optimizer).lower(), INVERSIONS)} No attack "
                "here reads the weight difference of another one, which is no evidence of safety. "
                "Adam without weight decay moves weights as optimizer='adamw' does."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
