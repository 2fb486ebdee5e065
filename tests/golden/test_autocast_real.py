"""An MJP client under bf16 autocast on real weights and photographs: what uploads of it give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.upload import make_upload
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.metrics.pictures import psnr
from tests.golden.test_ladder_real import PIXELS, attacked_classes, real_model

COUNT = 5
NAMES = ["pos_embed", "unk_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"]


def recovered(folder: Path, rounds: list[int]) -> list[Tensor]:
    """PSNR (n,) against the plain pictures, for the first so many uploads each."""
    images, labels, ids = attacked_classes(folder, COUNT)
    model, client, updates = real_model(folder), ClientConfig(autocast="bf16"), []
    for round in range(max(rounds)):
        named = {"patch_size": 16, "gamma": 0.27, "round": round, "seed": 0}
        inputs = SETTINGS["c"].prepare(images, labels, ids, **named)  # type: ignore[arg-type]
        updates.append(make_upload(model, [inputs], client, names=NAMES, round=round))
    scores = []
    for uploads in rounds:
        attack = find_attack("multi_round", {"uploads": uploads})
        view = AttackerView(model, updates[:uploads], PIXELS, None, "plain")
        found = attack.run(view, generator=torch.Generator()).images  # type: ignore[union-attr]
        scores.append(psnr(found.float(), images))
    return scores


@pytest.mark.nightly
def test_more_uploads_give_more_and_six_nearly_everything(shared_data: Path) -> None:
    one, two, six = recovered(shared_data, [1, 2, 6])
    assert one.median() > 17
    assert two.median() > one.median() + 2
    assert six.median() > 45
