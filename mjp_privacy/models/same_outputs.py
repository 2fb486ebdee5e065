"""Whether a copy of a network computes what the network computes."""

from __future__ import annotations

import copy as copying
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.models.building import LoadedModel

TOLERANCE = 1e-4  # of the largest output
TINY = 1e-12
OUTPUTS = ("logits", "image_embeds", "pooler_output", "last_hidden_state")


def check_same_outputs(module: nn.Module, copy: LoadedModel, head: nn.Module | None) -> None:
    """Raise unless the copy's output on a random input is one that the module returns.

    head  the module's last layer, of which what goes in is compared too: a fresh one may be zero,
          and then every network has its outputs

    The module is left as it was: in its mode, on its device, without gradients. One of half
    precision is compared as float32, since its own rounding would hide another activation.
    """
    if next(module.parameters()).dtype.itemsize < 4:
        twins: dict[int, Any] = {}
        module = copying.deepcopy(module, twins).float()
        head = twins.get(id(head))
    like = next(module.parameters())
    side = copy.card.img_size
    x = torch.randn(1, 3, side, side, generator=torch_generator("comparison of a copied module"))
    with torch.no_grad(), _evaluated(module), _exact_products():
        with _inputs_of(head) as entered:
            answers = list(_answers(_called(module, x.to(like))))
        with _inputs_of(copy.head) as expected_to_enter:
            expected = copy(x.to(copy.cls_token))
    errors = [_nearest(module, answers, expected)]
    if entered:
        errors.append(_nearest(module, entered, expected_to_enter[0]))
    if not max(errors) <= TOLERANCE:
        raise UserError(
            f"{type(module).__name__}: the blocks compute something else than those of a plain ViT "
            f"with these weights: outputs differ by {max(errors):.1e} of the largest, expected at "
            f"most {TOLERANCE:.0e}. Layer scale, another activation, eps, pooling or attention "
            "would do that. Its gradients cannot be attacked as a plain ViT's."
        )


def _nearest(module: nn.Module, answers: Sequence[Tensor], expected: Tensor) -> float:
    """The relative error of the answer that comes nearest; there must be one of the same shape."""
    fitting = [a.cpu().to(expected) for a in answers if a.shape == expected.shape]
    if not fitting:
        shapes = ", ".join(str(tuple(a.shape)) for a in answers) or "no tensor"
        raise UserError(
            f"{type(module).__name__}: expected a tensor {tuple(expected.shape)} as the network's "
            f"weights would give, got {shapes}. Give the network itself, without parts that pool "
            "or classify otherwise."
        )
    return min(float((a - expected).abs().max() / a.abs().max().clamp_min(TINY)) for a in fitting)


@contextmanager
def _inputs_of(layer: nn.Module | None) -> Iterator[list[Tensor]]:
    """What goes into a linear layer while the block runs; nothing for any other."""
    entered: list[Tensor] = []
    if not isinstance(layer, nn.Linear):
        yield entered
        return
    hook = layer.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0].detach()))
    try:
        yield entered
    finally:
        hook.remove()


def _called(module: nn.Module, x: Tensor) -> Any:
    """What the module returns for a picture; of transformers' CLIP the picture's part."""
    run = getattr(module, "get_image_features", module)
    try:
        return run(x)
    except Exception as error:
        # Whatever the network's own code raises on a picture of the size that its table shows.
        raise UserError(
            f"{type(module).__name__}: expected a network that takes one picture "
            f"{tuple(x.shape)}; calling it raised {type(error).__name__}: {error}"
        ) from error


def _answers(returned: Any) -> Iterator[Tensor]:
    """The tensors (B, outputs) among what a network returned; of tokens the first."""
    if isinstance(returned, Tensor):
        returned = (returned,)
    named = [getattr(returned, name, None) for name in OUTPUTS]
    entries = [*named, *(returned if isinstance(returned, tuple | list) else ())]
    for entry in entries:
        if isinstance(entry, Tensor):
            yield entry[:, 0] if entry.ndim == 3 else entry


@contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    """The module in eval mode; every part gets its own mode back."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def _exact_products() -> Iterator[None]:
    """No TensorFloat-32: its products are off by more than the tolerance."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
