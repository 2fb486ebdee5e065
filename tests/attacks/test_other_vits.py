"""Block 0's and the layers' equations on ViTs that are no plain ones, and the classifier alone."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from attacks import find_attack
from attacks.head_features import features_of
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.modules import load_module
from mjp_privacy.models.vit import input_of
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view

CLASSES, SIDE, PATCH, WIDTH = 10, 32, 8, 96


def other_vit(**more: Any) -> LoadedModel:
    """A float64 ViT of timm's with layer scale and weights large enough that attention differs."""
    torch.manual_seed(5)
    settings = {"init_values": 0.5, "class_token": False, "global_pool": "avg", **more}
    net = timm.models.VisionTransformer(
        img_size=SIDE,
        patch_size=PATCH,
        embed_dim=WIDTH,
        depth=2,
        num_heads=3,
        num_classes=CLASSES,
        **settings,
    )
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            parameter.add_(0.05 * torch.randn_like(parameter))
    return load_module(net.double(), mean=0.5, std=0.5)


LAYER_SCALED = {
    "layer scale": {},
    "registers": {"class_token": True, "reg_tokens": 2, "global_pool": "token"},
    "attention pooling": {"global_pool": "map"},
    "no layer scale, queries normed": {"init_values": None, "qk_norm": True},
}


@pytest.mark.parametrize("kind", LAYER_SCALED)
def test_a_batch_is_told_apart_by_its_tokens(kind: str) -> None:
    """The layers' inputs of both pictures are found, exactly."""
    model, attack = other_vit(**LAYER_SCALED[kind]), find_attack("layer_span")
    images = planted_images(2, side=SIDE)
    view, _ = planted_view(model, attack, "a", images=images, client=ClientConfig(batch=2))
    assert attack.unsupported(view) is None
    made = attack.run(view, generator=torch.Generator().manual_seed(1))
    assert made.images is not None
    assert bool(made.diagnostics["certain"].all())
    scores = [max(float(psnr(one[None], true[None])) for one in made.images) for true in images]
    assert min(scores) > 60


def test_block_0_alone_tells_the_patches_of_a_vit_with_layer_scale() -> None:
    """Without any gradient of the position table."""
    model, attack = other_vit(class_token=True, global_pool="token"), find_attack("token_span")
    view, fed = planted_view(model, attack, "a")
    assert "pos_embed" not in view.updates[0].grads
    made = attack.run(view, generator=torch.Generator())
    assert made.images is not None
    assert float(psnr(made.images, fed.images).min()) > 60


# the classifier alone -----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("plain", [True, False])
def test_the_classifier_tells_every_feature(plain: bool, batch: int) -> None:
    model = planted_model() if plain else other_vit()
    images = planted_images(batch, side=model.card.img_size)
    labels = torch.arange(batch)
    inputs = ClientInput(images, labels, [str(number) for number in range(batch)])
    client = FedSGDClient(model, ClientConfig(batch=batch, train="head"))
    sent = client.update(inputs).grads
    assert sorted(sent) == ["head.bias", "head.weight"]
    found, misfit = features_of(model, sent["head.weight"][0], sent["head.bias"][0], labels)
    with torch.no_grad():
        expected = input_of(model, model.get_submodule("head"), model.normalize(images))
    assert misfit < 1e-9
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_a_picture_with_the_feature_is_found() -> None:
    model, attack = planted_model(), find_attack("head_features", {"steps": 60})
    images, client = planted_images(2, side=model.card.img_size), ClientConfig(train="head")
    view, _ = planted_view(model, attack, "a", images=images, client=client)
    made = attack.run(view, generator=torch.Generator().manual_seed(2))
    assert made.images is not None
    assert made.images.shape == images.shape
    assert float(made.diagnostics["feature_distance"].max()) < 0.1


def test_more_pictures_than_classes_are_refused() -> None:
    model, attack = other_vit(), find_attack("head_features")
    images, client = planted_images(12, side=SIDE), ClientConfig(batch=12, train="head")
    view, _ = planted_view(model, attack, "a", images=images, client=client)
    refusal = attack.unsupported(view)
    assert refusal is not None
    assert refusal.kind == "underdetermined"
