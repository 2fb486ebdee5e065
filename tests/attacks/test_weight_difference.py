"""Gradients from differences of weights, against torch's own optimizers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.equations import TABLE
from attacks.equations.sent_gradients import pseudo_gradient, weight_rounding
from attacks.patch_gradient import PatchGradient
from attacks.patch_variants import PlainStep
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientUpdate
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_view

LR, DECAY = 1e-3, 0.05


def sent_by(optimizer: str, gradient: Tensor, weight: Tensor) -> Tensor:
    """The difference that one step of torch's optimizer makes."""
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    kind([parameter], lr=LR, weight_decay=DECAY).step()
    return parameter.detach() - weight


def update_of(optimizer: str) -> ClientUpdate:
    view, _ = planted_view(planted_model(), PatchGradient(), "a")
    facts = {"kind": "weight_difference", "lr": LR, "weight_decay": DECAY, "optimizer": optimizer}
    return replace(view.updates[0], **facts)


@pytest.mark.parametrize(("optimizer", "scale"), [("sgd", 1.0), ("adamw", 1e-8)])
def test_a_step_of_torchs_optimizer_gives_the_gradient_back(optimizer: str, scale: float) -> None:
    """AdamW's step tells a gradient of its own eps's size: g / (|g| + eps)."""
    draws = torch.Generator().manual_seed(0)
    gradient, weight = (torch.randn(2, 3, 4, generator=draws).double() for _ in range(2))
    gradient = scale * gradient
    update = update_of(optimizer)
    sent = sent_by(optimizer, gradient, weight)
    found = pseudo_gradient(update, sent, {TABLE: weight}, TABLE)
    assert torch.allclose(found, gradient, rtol=1e-6, atol=1e-9 * scale)
    assert weight_rounding(update, 1e-6) == pytest.approx(
        {"sgd": 1e-3, "adamw": 1e-11}[optimizer], rel=1e-9
    )


def test_what_adamw_rounded_away_is_bounded() -> None:
    """g / (|g| + eps) of a large gradient is 1: the answer is as large as can be resolved."""
    weight = torch.full((1, 2), 0.5).double()
    update = replace(update_of("adamw"), dtype=torch.float32)
    sent = sent_by("adamw", torch.tensor([[1.0, -1.0]]).double(), weight)
    found = pseudo_gradient(update, sent, {TABLE: weight}, TABLE)
    resolved = torch.finfo(update.dtype).eps * 0.5 / LR
    assert found[0].tolist() == pytest.approx([1e-8 / resolved, -1e-8 / resolved])


def test_plain_step_looks_at_four_uploads_and_at_least_one() -> None:
    assert PlainStep().uploads == 4
    assert PlainStep(1).uploads == 1
    with pytest.raises(UserError, match="plain_step, uploads: expected at least 1, got 0"):
        PlainStep(0)
