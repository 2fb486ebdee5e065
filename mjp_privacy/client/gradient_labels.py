"""The class of a single image, read off the gradient of the classifier that its loss went through.

With cross entropy, dL/dlogits = softmax - onehot: negative for the image's class alone. It is the
gradient of the classifier's bias, and the rows of its weight's gradient are multiples of it
(iDLG, Zhao et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping

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
    return _from_weight(grads[HEAD].double()) if HEAD in grads else None


def _from_weight(rows: Tensor) -> Tensor | None:
    """The class whose row of (n, K, D) is as long as all others together, which point the other
    way; None where no row does, as with two classes or with a loss over something else."""
    if rows.shape[1] <= 2:
        return None
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
