"""The server's step between two rounds of simulated clients (`server_lr` in a client's config)."""

from __future__ import annotations

import copy

import torch

from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import LoadedModel


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
