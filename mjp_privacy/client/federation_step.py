"""Weights that move between rounds: a federation of one block's clients and a server.

All clients of a round see the same weights w_r, and the server takes one step along the mean of
their gradients over every image of the block,

    w_{r+1} = w_r - server_lr * mean gradient,

but for parameters whose gradient is withheld, which stay.
"""

from __future__ import annotations

import copy

import torch

from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import Victim


def moved(client: FedSGDClient, inputs: ClientInput) -> Victim:
    """A copy of the client's model after the server's step on this round."""
    mean = client.mean_gradient(inputs)
    model = copy.deepcopy(client.model)
    with torch.no_grad():
        for name, gradient in mean.items():
            model.get_parameter(name).sub_(gradient, alpha=client.config.server_lr)
    return model
