"""Pictures that batches share, on a trained ViT-Ti at 64 px: what `shared_picture` promises."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.data import Preprocessing, open_images
from mjp_privacy.interfaces import (
    AttackerView,
    ClientInput,
    ClientUpdate,
    Control,
    Pixels,
    Reconstruction,
)
from mjp_privacy.metrics.pictures import psnr, quantise
from mjp_privacy.models import LoadedModel, load_model

SIZE = 64
NAMES = ("pos_embed", "patch_embed.proj.weight")


@cache
def real_model(folder: Path) -> LoadedModel:
    weights = folder / "weights" / "vit_tiny_patch16_224_timm.safetensors"
    return load_model("vit_tiny_patch16_224", checkpoint=weights, img_size=SIZE, mean=0.5, std=0.5)


@cache
def photographs(folder: Path) -> tuple[Tensor, Tensor]:
    source = open_images(folder / "data" / "imagenet-sample-600.zip")
    records = source.records[:160]
    images = torch.stack([Preprocessing(SIZE)(source.decode(record)) for record in records])
    return images, torch.tensor([record.label or 0 for record in records])


def upload(folder: Path, chosen: Tensor) -> ClientUpdate:
    images, labels = photographs(folder)
    batch = ClientInput(images[chosen], labels[chosen], [str(n) for n in chosen.tolist()])
    client = FedSGDClient(real_model(folder), ClientConfig(batch=len(chosen), partners="fresh"))
    return client.update(batch, names=NAMES)


def attacked(folder: Path, *batches: Tensor) -> Reconstruction:
    """What is made of uploads of these batches of pictures, one a round."""
    attack = find_attack("shared_picture", {"uploads": len(batches)})
    updates = [upload(folder, batch) for batch in batches]
    updates = [
        ClientUpdate(u.grads, dtype=u.dtype, batch=u.batch, partners="fresh", round=r)
        for r, u in enumerate(updates)
    ]
    view = AttackerView(real_model(folder), updates, Pixels(SIZE, (0.5,) * 3, (0.5,) * 3))
    assert not isinstance(attack, Control)
    return attack.run(view, generator=torch.Generator())


@pytest.mark.nightly
@pytest.mark.parametrize(("batch", "promised"), [(8, 110), (11, 100)])
def test_two_batches_give_the_picture_that_they_share(
    shared_data: Path, batch: int, promised: float
) -> None:
    images, quality = photographs(shared_data)[0], []
    for trial in range(5):
        order = torch.randperm(160, generator=torch.Generator().manual_seed(trial))
        other = torch.cat((order[:1], order[batch : 2 * batch - 1]))
        made = attacked(shared_data, order[:batch], other)
        certain = made.diagnostics["certain"].bool()
        assert made.images is not None
        assert certain.sum() == 1
        picture = made.images[certain]
        assert torch.equal(quantise(picture), quantise(images[order[:1]].double()))
        quality.append(psnr(picture, images[order[:1]]))
    assert torch.cat(quality).median() >= promised


@pytest.mark.nightly
def test_batches_of_other_pictures_share_nothing(shared_data: Path) -> None:
    for trial in range(5):
        order = torch.randperm(160, generator=torch.Generator().manual_seed(100 + trial))
        made = attacked(shared_data, order[:8], order[8:16])
        assert not made.diagnostics["pairs_sharing"].any()
        assert not made.diagnostics["certain"].any()
