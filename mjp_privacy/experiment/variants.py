"""Copies of a model in the precisions and alterations that its cells need, each made once."""

from __future__ import annotations

import copy
from typing import Literal

import torch

from mjp_privacy.client.positions import with_sinusoidal_positions
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
