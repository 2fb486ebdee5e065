"""One client step's upload, from which pictures that are known are taken out."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.equations.names import TABLE
from attacks.equations.patch_system import gradient, patch_system, weights
from attacks.equations.peeling import class_of, without
from mjp_privacy.interfaces import AttackerView, ClientUpdate
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_images


@dataclass(frozen=True)
class StepUpload:
    """The gradients of one step of the pictures that are left, and the model that made them."""

    model: MJPVisionTransformer  # with the weights that the client used
    update: ClientUpdate  # of one step, as gradients; its batch counts the pictures that are left

    @classmethod
    def of(
        cls, view: AttackerView, update: ClientUpdate, step: int, model: MJPVisionTransformer
    ) -> StepUpload:
        """One step of an upload, without what no picture has part in, such as L_DAL's gradient.

        model  `client_model` of the upload
        """
        step_alone = update.part(slice(step, step + 1))
        grads = {name: gradient(view, step_alone, name) for name in step_alone.grads}
        rows = patch_system(view, step_alone).rows
        grads[TABLE] = torch.cat((grads[TABLE][:, :, :1], rows.unsqueeze(1)), 2)
        return cls(model, replace(step_alone, kind="gradient", grads=grads, dal_lambda=0.0))

    @property
    def grads(self) -> dict[str, Tensor]:
        """The gradients by name, each (*parameter.shape)."""
        return {name: sent[0] for name, sent in self.update.grads.items()}

    def without(self, patches: Tensor) -> StepUpload:
        """The upload of the other pictures, with a picture (N, p) and its gradient taken out."""
        batch, projection = self.update.batch, self.model.patch_embed.proj.weight
        picture = to_images(patches, self.model.patch_size, projection.shape[1])
        label = class_of(self.model, picture, self.grads, batch)
        rest = without(self.model, self.grads, picture, label, batch)
        grads = {name: sent.unsqueeze(0) for name, sent in rest.items()}
        return replace(self, update=replace(self.update, grads=grads, batch=batch - 1))


def client_model(view: AttackerView, update: ClientUpdate) -> MJPVisionTransformer:
    """A copy of the model with the weights that the client used; none is differentiated."""
    model = deepcopy(view.model).requires_grad_(False)
    with torch.no_grad():
        for name, value in weights(view, update).items():
            model.get_parameter(name).copy_(value)
    return model
