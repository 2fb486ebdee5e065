"""The FedSGD client: one gradient per step, in a stated precision, of only the names asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from mjp_privacy.config import ClientConfig
from mjp_privacy.errors import UserError
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import Victim

STEPS_AT_ONCE = 20  # independent steps differentiated together; bounds the memory


class Objective(nn.Module):
    """The client's loss: cross-entropy on the hard label, plus lambda * L_DAL if asked.

    A model without a localization regressor has no such term, and its rows say `dal: false`.
    """

    def __init__(self, model: Victim, config: ClientConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, images: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        """Images (B, C, H, W) in [0, 1]; the mean loss of one step."""
        logits = self.model(self.model.normalize(images), mask)
        loss = nn.functional.cross_entropy(logits, labels)
        if self.config.dal and self.model.dal_regressor is not None:
            loss = loss + self.config.dal_lambda * self.model.dal_loss(mask)
        return loss


@dataclass(frozen=True)
class FedSGDClient:
    """Uploads the gradient of one step on `batch` images, for many independent steps at once.

    The model carries the precision and the device: gradients come in the model's own dtype.
    """

    model: Victim
    config: ClientConfig = field(default_factory=ClientConfig)

    def update(self, inputs: ClientInput, *, names: Sequence[str] | None = None) -> ClientUpdate:
        objective = Objective(self.model, self.config)
        parameters = dict(objective.named_parameters())
        wanted = self._wanted(parameters, names)
        fixed = {k: v.detach() for k, v in parameters.items() if k not in wanted}
        free = {k: parameters[k].detach() for k in wanted}

        def loss(free: dict[str, Tensor], *step: Tensor) -> Tensor:
            images, labels, mask = (*step, None) if len(step) == 2 else step
            return functional_call(objective, {**fixed, **free}, (images, labels, mask))

        steps = self._steps(inputs)
        in_dims = (None, *[0] * len(steps))
        per_step: Callable[..., dict[str, Tensor]] = vmap(
            grad(loss), in_dims, chunk_size=STEPS_AT_ONCE, randomness="different"
        )
        was_training = self.model.training
        self.model.train(self.config.mode == "train")
        with sdpa_kernel(SDPBackend.MATH):  # deterministic, and vmap can batch it everywhere
            grads = per_step(free, *steps)
        self.model.train(was_training)
        named = {name.removeprefix("model."): tensor.detach() for name, tensor in grads.items()}
        return ClientUpdate(named, dtype=self.model.cls_token.dtype, batch=self.config.batch)

    def _wanted(
        self, parameters: dict[str, nn.Parameter], names: Sequence[str] | None
    ) -> list[str]:
        if names is None:
            return list(parameters)
        for name in names:
            if f"model.{name}" not in parameters:
                raise UserError(
                    f"The model has no parameter {name!r}, so no gradient of it exists."
                )
        return [f"model.{name}" for name in names]

    def _steps(self, inputs: ClientInput) -> list[Tensor]:
        """Images (n, B, C, H, W), labels (n, B) and, where there is one, mask (n, B, N)."""
        like, batch = self.model.cls_token, self.config.batch
        if len(inputs.image_ids) % batch:
            raise UserError(
                f"{len(inputs.image_ids)} images do not fill steps of {batch}: expected a multiple."
            )
        tensors = [inputs.images.to(like.dtype), inputs.labels]
        if inputs.mask is not None:
            tensors.append(inputs.mask)
        return [tensor.to(like.device).unflatten(0, (-1, batch)) for tensor in tensors]


@torch.no_grad()
def predict(model: Victim, images: Tensor, mask: Tensor | None) -> Tensor:
    """Predicted class (m,) of images in [0, 1]."""
    like = model.cls_token
    x = model.normalize(images.to(like))
    return model(x, None if mask is None else mask.to(like.device)).argmax(-1).cpu()
