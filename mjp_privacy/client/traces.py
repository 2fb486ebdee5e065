"""What an upload shows by itself: a single image's class, and its client's half precision.

The class is read off the gradient of the classifier that the loss went through. With cross
entropy, dL/dlogits = softmax - onehot: negative for the image's class alone. It is the
gradient of the classifier's bias, and the rows of its weight's gradient are multiples of it
(iDLG, Zhao et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

HEAD, HEAD_BIAS = "head.weight", "head.bias"
FITS = 1e-2  # how far a class's row may be from minus the sum of all others, relative to it


def label_in_gradient(grads: Mapping[str, Tensor]) -> Tensor | None:
    """(n,) classes of n single images from the gradients (n, *shape) of the classifier, or None.

    label_in_gradient({"head.bias": torch.tensor([[0.2, -0.9, 0.7]])}) is tensor([1]).
    """
    if HEAD_BIAS in grads:
        return grads[HEAD_BIAS].argmin(-1)
    # The class's row of (n, K, D) is as long as all others together, which point the other way; no
    # row is with two classes or with a loss over something else.
    if HEAD not in grads or grads[HEAD].shape[1] <= 2:
        return None
    rows = grads[HEAD].double()
    label = rows.norm(dim=-1).argmax(-1)
    own = rows.take_along_dim(label.view(-1, 1, 1), 1).squeeze(1)
    fits = rows.sum(1).norm(dim=-1) <= FITS * own.norm(dim=-1)
    return label if bool(fits.all()) else None


def labels_of_batch(bias: Tensor, batch: int) -> Tensor:
    """The classes (B,) of a batch, from the gradient (K,) of the classifier's bias: the mean of
    softmax - onehot over its images.

    Only classes of the batch are negative. What an image adds is -1 / B and its softmax, so further
    images of a class are where it is most negative yet.

    labels_of_batch(torch.tensor([0.1, -0.4, 0.3]), 1) is tensor([1]).
    """
    left, found = bias.double().clone(), list[int]()
    for certain in bias.argsort()[:batch].tolist():
        if bias[certain] < 0:
            found.append(certain)
            left[certain] += 1 / batch
    while len(found) < batch:
        most = int(left.argmin())
        found.append(most)
        left[most] += 1 / batch
    return torch.tensor(found)


Autocast = Literal["none", "fp16", "bf16"]

HALF: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The half precision of each kind of autocast."""

PATCH, TABLE = "patch_embed.proj.weight", "pos_embed"


def shown_autocast(grads: Mapping[str, Tensor]) -> Autocast:
    """Which autocast the gradients (n, *shape) of one upload show: none, fp16 or bf16.

    Under autocast the patch embedding's gradient has few enough bits for half precision, and the
    position table's has not. Where both have, the whole upload was rounded afterwards.
    """
    if not {PATCH, TABLE} <= grads.keys():
        return "none"
    for kind in ("bf16", "fp16"):
        if _fits(grads[PATCH], HALF[kind]) and not _fits(grads[TABLE], HALF[kind]):
            return kind
    return "none"


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether there are values besides zero and all have as few bits as this precision."""
    return bool(values.any()) and bool((rounded(values, dtype) == values).all())


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, float64, with as many bits as `dtype` has, whatever their exponents."""
    step = spacing(values, dtype)
    return torch.where(step > 0, (values.double() / step).round() * step, 0.0)


def spacing(values: Tensor, dtype: torch.dtype, least: float = 0.0) -> Tensor:
    """The distance from each value to the next number with as many bits as `dtype` has, float64; 0
    for zero. Numbers below `least` are as far apart as those from there; 0: exponents have no end,
    as those of scaled gradients."""
    size = values.double().abs()
    power = 2.0 ** (torch.frexp(size).exponent.double() - 1)
    return torch.where(size == 0, 0.0, torch.finfo(dtype).eps * power.clamp(min=least))
