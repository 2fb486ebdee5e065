"""What is uploaded where a client sends weights: one SGD step's difference."""

from __future__ import annotations

from dataclasses import replace

from mjp_privacy.interfaces import ClientUpdate
from mjp_privacy.models import Victim


def weight_difference(
    gradient: ClientUpdate, model: Victim, lr: float, weight_decay: float
) -> ClientUpdate:
    """w' - w with w' = w - lr (g + weight_decay w), each stored in the model's dtype.

    It is rounded to the precision of the weights, not of the step: of a small step little is left.
    """
    differences = {}
    for name, g in gradient.grads.items():
        before = model.get_parameter(name).detach()
        after = before - lr * (g + weight_decay * before)
        differences[name] = after - before
    return replace(
        gradient, grads=differences, kind="weight_difference", lr=lr, weight_decay=weight_decay
    )
