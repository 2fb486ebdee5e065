r"""Takes a picture that is known out of the upload of its batch, which leaves that of the others.

The upload is the mean of the pictures' gradients. With the picture and its class the attacker
computes its gradient as the client did. The class is read off the classifier: dL/dhead.weight =
sum_b d_b h_b^T / B with d_b = softmax - onehot, so d_b lies in its column space, which holds for
one class only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.equations.names import HEAD
from mjp_privacy.interfaces import Grads
from mjp_privacy.models import MJPVisionTransformer


def class_of(model: MJPVisionTransformer, picture: Tensor, grads: Grads, batch: int) -> int:
    """The class of a normalised picture (C, H, W) of the batch, from one step's gradients."""
    with torch.no_grad():
        likely = model(picture.unsqueeze(0).to(model.cls_token))[0].double().softmax(-1)
    u = torch.linalg.svd(grads[HEAD].double(), full_matrices=False)[0][:, :batch]
    # |d - u u^T d|^2 for d = likely - onehot(c), for all classes c at once.
    coordinates = likely @ u
    lengths = likely.square().sum() - 2 * likely + 1
    inside = (coordinates - u).square().sum(-1)
    return int(((lengths - inside) / lengths).argmin())


def without(
    model: MJPVisionTransformer, grads: Grads, picture: Tensor, label: int, batch: int
) -> dict[str, Tensor]:
    """One step's gradients (*shape) of the mean loss over the other B - 1 pictures."""
    names = [name for name, _ in model.named_parameters() if name in grads]
    parameters = {name: model.get_parameter(name).detach().requires_grad_() for name in names}
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        logits = functional_call(model, parameters, (picture.unsqueeze(0).to(model.cls_token),))
        target = torch.tensor([label], device=logits.device)
        loss = torch.nn.functional.cross_entropy(logits, target)
        own = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    rest = {}
    for name, part in zip(names, own, strict=True):
        total = batch * grads[name].double()
        rest[name] = (total - (0 if part is None else part.double())) / (batch - 1)
    return rest
