"""Attacks that know a defence's noise against the same attacks that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attacks import find_attack
from attacks.controls import psnr
from attacks.patch_system import located
from mjp_privacy.clients.upload import make_upload
from mjp_privacy.config import ClientConfig
from tests.contract.planted import planted_images, planted_model, planted_view


# At 0.03 some visible rows are weaker than the noise, and nobody can tell them from masked ones.
@pytest.mark.parametrize("defense", [{"gaussian_noise": 0.01}, {"dp_sgd": 0.00003}])
def test_knowing_the_noise_helps(defense: dict[str, float]) -> None:
    attack = find_attack("masked_span", {"prior": "stationary"})
    model = planted_model(unknown_embedding=True)
    view, inputs = planted_view(model, attack, "c")  # type: ignore[arg-type]
    names = [*view.updates[0].grads]
    client = ClientConfig(defenses=(defense,))  # type: ignore[arg-type]
    update = make_upload(model, [inputs], client, names=names)
    scores = {}
    for told in (True, False):
        sent = update if told else replace(update, noise={})
        known = replace(view, updates=[sent])
        found = attack.run(known, generator=torch.Generator())  # type: ignore[call-arg]
        scores[told] = psnr(found.images, planted_images()).mean()  # type: ignore[arg-type]
        assert located(known, sent).equal(inputs.mask) == told  # type: ignore[arg-type]
    assert scores[True] > scores[False] + 1
