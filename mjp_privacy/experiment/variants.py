"""Copies of a model that its cells need: other precisions, an altered block 0, a server's step."""

from __future__ import annotations

import copy
from typing import Literal

import torch

from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.positions import with_sinusoidal_positions
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.adapters import with_adapters
from mjp_privacy.models.low_rank import LowRank
from mjp_privacy.models.mjp_vit import with_closed_form_block

Block0 = Literal["intact", "april_block"]


class ModelVariants:
    """A loaded model, which is never changed, and altered copies of it.

    seed  of the numbers that low-rank adapters start with
    """

    def __init__(self, model: LoadedModel, device: torch.device, seed: int = 0) -> None:
        self.model, self.seed = model.to(device), seed
        self._copies: dict[tuple[str, str, str, LowRank | None], LoadedModel] = {}

    def of(
        self,
        block0: Block0,
        dtype: str,
        positions: str = "own",
        adapters: LowRank | None = None,
    ) -> LoadedModel:
        """The model with block 0 intact or altered for APRIL, in a precision, with its own
        position table or the sine table, and with low-rank adapters where these are given:
        variants.of("april_block", "float64").

        The intact float32 model with its own table and no adapters is the loaded model itself.
        """
        key = (block0, dtype, positions, adapters)
        if key == ("intact", "float32", "own", None):
            return self.model
        if key not in self._copies:
            base = self.model if positions == "own" else with_sinusoidal_positions(self.model)
            alter = with_closed_form_block if block0 == "april_block" else copy.deepcopy
            altered: LoadedModel = alter(base)  # type: ignore[assignment]
            if adapters is not None:
                altered = with_adapters(altered, adapters, self.seed)
            self._copies[key] = altered.to(getattr(torch, dtype))
        return self._copies[key]


def moved(client: FedSGDClient, inputs: ClientInput) -> LoadedModel:
    """A copy of the client's model after the server's step at the end of this round.

    All clients of a round have the same weights w. The server takes one step along the mean of
    their gradients over every image of the block, w - server_lr * mean gradient; parameters whose
    gradient is withheld stay as they are.
    """
    mean = client.mean_gradient(inputs)
    model = copy.deepcopy(client.model)
    with torch.no_grad():
        for name, gradient in mean.items():
            model.get_parameter(name).sub_(gradient, alpha=client.config.server_lr)
    return model
