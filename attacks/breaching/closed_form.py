"""breaching's APRIL, and the inputs that breaching expects. Import it late: few runs need it.

`reconstruct_one_by_one` runs breaching's own AprilAttacker; `BatchedAprilAttacker` is a subclass
that solves many images at once. breaching reads gradients by their place in a list and casts them
to its own dtype, so named gradients are put where it looks and its `impl.dtype` is set to theirs.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from attacks.breaching.parts import breaching_folder, parts_of_breaching
from attacks.equations.least_squares import minimum_norm_solve, pseudo_inverse
from mjp_privacy.interfaces import Grads, Pixels
from mjp_privacy.models import MJPVisionTransformer

with parts_of_breaching():
    from breaching.attacks import prepare_attack
    from breaching.attacks.analytic_attack import AprilAttacker

POSITIONS = {"pos_embed": 1, "blocks.0.attn.qkv.weight": 4}
"""Places in the list of gradients where AprilAttacker looks for the two it reads."""

logging.getLogger("breaching").setLevel(logging.WARNING)


class _Wrapped(nn.Module):
    """The model as an attribute `.model`, where breaching expects the network."""

    def __init__(self, model: MJPVisionTransformer) -> None:
        super().__init__()
        self.model = model


def attack_configuration(dtype: torch.dtype) -> Any:
    """breaching's shipped april_analytic.yaml, read here because its own loader initialises hydra
    for the whole process."""
    text = (breaching_folder() / "config" / "attack" / "april_analytic.yaml").read_text()
    configuration: Any = OmegaConf.create(text)
    configuration.impl.dtype = str(dtype).removeprefix("torch.")
    return configuration


def server_payload(model: nn.Module, pixels: Pixels) -> list[dict[str, Any]]:
    """What breaching's server would have sent: weights, buffers and public facts of the data."""
    facts = {
        "modality": "vision",
        "shape": [len(pixels.mean), pixels.size, pixels.size],
        "mean": list(pixels.mean),
        "std": list(pixels.std),
    }
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [{"parameters": parameters, "buffers": [], "metadata": OmegaConf.create(facts)}]


def shared_data(grads: Grads) -> list[dict[str, Any]]:
    """What breaching's user would have shared; label 0 is a dummy, the closed form reads none."""
    listed = [torch.zeros(0) for _ in range(max(POSITIONS.values()) + 1)]
    for name, position in POSITIONS.items():
        listed[position] = grads[name]
    metadata = {"num_data_points": 1, "labels": torch.zeros(1, dtype=torch.long)}
    return [{"gradients": listed, "buffers": [], "metadata": metadata}]


def reconstruct_one_by_one(
    model: MJPVisionTransformer, grads: Grads, pixels: Pixels, dtype: torch.dtype
) -> Tensor:
    """Run breaching's own attack per image: normalised images (n, C, H, W), which it clamps."""
    wrapped = _Wrapped(model)
    setup = {"device": next(model.parameters()).device}
    attacker = prepare_attack(wrapped, nn.CrossEntropyLoss(), attack_configuration(dtype), setup)
    payload = server_payload(wrapped, pixels)
    images = []
    for index in range(len(grads["pos_embed"])):
        grads_of_image = {name: grads[name][index] for name in POSITIONS}
        data, _ = attacker.reconstruct(payload, shared_data(grads_of_image), server_secrets={})
        images.append(data["data"][0])
    return torch.stack(images)


class BatchedAprilAttacker(AprilAttacker):
    """breaching's attacker for n images at once: the same two solves, in float64.

    The inverse of the patch embedding depends on the model alone, so it is computed once.
    """

    def __init__(self, model: MJPVisionTransformer) -> None:
        # breaching copies what it is given, which takes longer than the attack
        super().__init__(nn.Module(), nn.CrossEntropyLoss(), attack_configuration(torch.double))
        self.network = model

    @cached_property
    def embedding_inverse(self) -> Tensor:
        """W^+ (p, D), the pseudo-inverse of the patch embedding."""
        return pseudo_inverse(self.network.patch_embed.proj.weight.detach().double().flatten(1))

    def embeddings(self, table_grads: Tensor, qkv_grads: Tensor) -> tuple[Tensor, Tensor]:
        """Z = lstsq(A^T, b) (n, R, D) and the singular values of A (n, R), descending.

        table_grads A (n, R, D), one row per token; b = Wq^T dWq + Wk^T dWk + Wv^T dWv.
        """
        weight = self.network.get_parameter("blocks.0.attn.qkv.weight").detach()
        return minimum_norm_solve(table_grads, qkv_grads, factor=weight)

    def patches(self, z: Tensor) -> Tensor:
        """W^+ (z - bias): z (n, N, D), positions subtracted -> (n, N, p)."""
        bias = self.network.patch_bias.detach().double()
        return (z - bias) @ self.embedding_inverse.mT
