"""A client that watches the global model instead of a server that sees uploads."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from mjp_privacy import attack_gradients
from tests.helpers.models import tiny
from tests.helpers.planted import planted_images

LR, CLIENTS = 0.5, 2


def test_the_difference_of_two_global_models_is_an_upload_of_the_other_client() -> None:
    before = tiny()
    images = planted_images(CLIENTS, side=before.card.img_size)

    def trained(picture: Tensor, label: int) -> dict[str, Tensor]:
        """One client's weight difference after a step of SGD."""
        local = copy.deepcopy(before)
        loss = torch.nn.functional.cross_entropy(
            local(local.normalize(picture[None])), torch.tensor([label])
        )
        loss.backward()  # type: ignore[no-untyped-call]
        return {name: -LR * p.grad for name, p in local.named_parameters() if p.grad is not None}

    sent = [trained(picture, label) for label, picture in enumerate(images)]
    of_server = {name: sum(one[name] for one in sent) / CLIENTS for name in sent[0]}
    others = {n: (CLIENTS * of_server[n] - sent[0][n]) / (CLIENTS - 1) for n in of_server}
    leak = attack_gradients(
        before,
        others,
        kind="weight_difference",
        lr=LR,
        batch=CLIENTS - 1,
        images=images[1:],
        attacks=["patch_gradient"],
    )
    assert leak.best.psnr > 60
