"""Copies of a model in the precisions and alterations that its cells need, each made once."""

from __future__ import annotations

import copy
from typing import Literal

import torch

from mjp_privacy.client.positions import with_sinusoidal_positions
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.mjp_vit import with_closed_form_block

Block0 = Literal["intact", "april_block"]


class ModelVariants:
    """A loaded model, which is never changed, and altered copies of it."""

    def __init__(self, model: LoadedModel, device: torch.device) -> None:
        self.model = model.to(device)
        self._copies: dict[tuple[str, str, str], LoadedModel] = {}

    def of(self, block0: Block0, dtype: str, positions: str = "own") -> LoadedModel:
        """The model with block 0 intact or altered for APRIL, in a precision, and with its own
        position table or the sine table: variants.of("april_block", "float64").

        The intact float32 model with its own table is the loaded model itself.
        """
        key = (block0, dtype, positions)
        if key == ("intact", "float32", "own"):
            return self.model
        if key not in self._copies:
            base = self.model if positions == "own" else with_sinusoidal_positions(self.model)
            alter = with_closed_form_block if block0 == "april_block" else copy.deepcopy
            self._copies[key] = alter(base).to(getattr(torch, dtype))  # type: ignore[assignment]
        return self._copies[key]
