"""Per-image gradients from one batched backward pass, for parameters of two simple kinds.

A table added to the tokens (`pos_embed`, `unk_embed`, ...) gets a leading image axis. A linear
layer's gradient is, for each image, the product of what went in with the gradient of what came
out. Every other weight gradient is left out of the backward pass; most of the speed comes from
that, not from the batch. Images do not interact in a ViT, so the sum of their losses may be
differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches

TABLES = ("pos_embed", "unk_embed", "cls_token", "index_embed")


def is_simple(model: LoadedModel, name: str) -> bool:
    """Whether `per_image_gradients` can compute this parameter's gradient."""
    if name in TABLES:
        return True
    if name.startswith("dal_regressor."):  # the logits do not depend on it
        return False
    owner = model.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, nn.Linear) or owner is model.patch_embed.proj


def per_image_gradients(
    model: LoadedModel, x: Tensor, labels: Tensor, mask: Tensor | None, names: Sequence[str]
) -> dict[str, Tensor]:
    """Cross-entropy gradients by name, (m, *parameter.shape), of parameters that are `is_simple`.

    x (m, C, H, W) normalised, labels (m,), mask (m, N) or None.
    """
    if not names:
        return {}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    leaves = {
        name: parameters[name].expand(len(x), *parameters[name].shape[1:]).clone().requires_grad_()
        for name in names
        if name in TABLES
    }
    owners = {name: name.rpartition(".")[0] for name in names if name not in TABLES}
    taps = {owner: _Tap(model.get_submodule(owner)) for owner in dict.fromkeys(owners.values())}
    try:
        logits = functional_call(model, {**parameters, **leaves}, (x, mask))
    finally:
        for tap in taps.values():
            tap.handle.remove()
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    wanted = [*leaves.values(), *(tap.output for tap in taps.values())]
    raw = torch.autograd.grad(loss, wanted, allow_unused=True)
    filled = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, raw, strict=True)]
    # A leaf has the image axis where its parameter has a first axis of length 1.
    grads = {name: grad.unsqueeze(1) for name, grad in zip(leaves, filled, strict=False)}
    of_outputs = dict(zip(taps, filled[len(leaves) :], strict=True))
    for name, owner in owners.items():
        grads[name] = taps[owner].gradient(of_outputs[owner], name.endswith(".bias"))
    return {name: grads[name] for name in names}


class _Tap:
    """Keeps what went into a linear layer or the patch convolution, and what came out."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.handle = layer.register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        self.input = inputs[0].detach()
        self.output = output if output.requires_grad else output.requires_grad_()
        return self.output

    def gradient(self, of_output: Tensor, bias: bool) -> Tensor:
        """Per-image gradient of the weight or the bias, from the gradient of the output."""
        entered = self.input
        if isinstance(self.layer, nn.Conv2d):  # the patch embedding: one output for each patch
            entered = to_patches(entered, self.layer.kernel_size[0])
            of_output = of_output.flatten(2).mT
        if entered.ndim == 2:  # the head sees one vector for each image
            entered, of_output = entered.unsqueeze(1), of_output.unsqueeze(1)
        if bias:
            return of_output.sum(1)
        return (of_output.mT @ entered).unflatten(2, self.layer.get_parameter("weight").shape[1:])
