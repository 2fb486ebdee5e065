"""Tokens that are taken out of block 0's gradients one after another, and the patches they give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations.token_peeling import (
    FC1,
    FC2,
    LAYERS,
    Peeling,
    SentGradient,
    TwoLayers,
    equations_hold,
    tokens_of,
)
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.interfaces import AttackerView, Reconstruction
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.modules import load_module
from mjp_privacy.models.vit import input_of
from tests.attacks.test_other_vits import other_vit
from tests.helpers.models import planted_model
from tests.helpers.planted import changed, planted_images, planted_view

NEW = {"prior": "stationary"}


def run(view: AttackerView) -> Reconstruction:
    attack = find_attack("token_peeling", NEW)
    assert attack.unsupported(view) is None
    return attack.run(view, generator=torch.Generator().manual_seed(3))


def seen(model: LoadedModel, images: Tensor, setting: str = "a", **client: Any) -> AttackerView:
    attack = find_attack("token_peeling", NEW)
    return planted_view(model, attack, setting, images=images, client=ClientConfig(**client))[0]


def grads_of(view: AttackerView) -> dict[str, Tensor]:
    return {name: sent[0] for name, sent in view.updates[0].grads.items()}


def true_inputs(model: LoadedModel, images: Tensor, layer: str) -> Tensor:
    """What a layer is given of each token (T, width)."""
    with torch.no_grad():
        return input_of(model, model.get_submodule(layer), model.normalize(images)).flatten(0, 1)


def test_every_token_is_found_and_what_attention_added_to_it() -> None:
    model, images = planted_model(img_size=16), planted_images(2, side=16)
    view = seen(model, images, batch=2)
    tokens = tokens_of(model, grads_of(view), 2 * model.tokens, torch.Generator().manual_seed(0))
    assert tokens is not None
    assert tokens.complete
    assert tokens.attended is not None
    norm = model.blocks[0].norm2
    expected = (true_inputs(model, images, FC1) - norm.bias) / norm.weight
    away = torch.cdist(tokens.directions, expected)
    assert sorted(away.argmin(1).tolist()) == list(range(2 * model.tokens))
    assert float(away.amin(1).max()) < 1e-6
    sums = true_inputs(model, images, "blocks.0.attn.proj")[away.argmin(1)]
    assert float((tokens.attended - sums).abs().max()) < 1e-6


def test_what_is_left_holds_the_other_tokens_alone() -> None:
    """Half of the true tokens are taken out: the rows that are left hold the others' inputs."""
    model, images = planted_model(), planted_images(1)
    grads, count = grads_of(seen(model, images)), model.tokens
    branch = TwoLayers.of(model)
    first, second = (SentGradient.of(grads, name, count) for name in (FC1, FC2))
    peeling = Peeling(branch, first, second, torch.Generator())
    u = true_inputs(model, images, FC1)
    upstream = peeling.upstream(u[: count // 2])
    left = second.rows_without(branch.scaled(upstream))
    assert len(left) == count - count // 2
    inputs = torch.cat((branch.hidden(u), torch.ones(count, 1).double()), 1)
    off = (inputs - inputs @ left.mT @ left).norm(dim=1) / inputs.norm(dim=1)
    assert float(off[count // 2 :].max()) < 1e-6
    assert float(off[: count // 2].min()) > 1e-3


@pytest.mark.parametrize("gamma", [0.27, 0.9])
def test_masked_patches_are_exact_and_the_mask_is_found(gamma: float) -> None:
    """Without the position table's gradient; the patches of a picture, in whatever order."""
    model = planted_model(unknown_embedding=True)
    attack = find_attack("token_peeling", NEW)
    images = planted_images(2)
    view, fed = planted_view(model, attack, "c", images=images, gamma=gamma)
    assert "pos_embed" not in view.updates[0].grads
    found = run(view)
    assert torch.equal(found.mask, fed.mask)
    for one, true in zip(found.images, images, strict=True):
        patches, expected = (to_patches(x.double(), model.patch_size) for x in (one, true))
        away = torch.cdist(patches, expected)
        assert sorted(away.argmin(1).tolist()) == list(range(len(expected)))
        assert float(away.amin(1).max()) < 1e-5
    assert found.diagnostics["certain"].tolist() == [0.0, 0.0]  # borders told the order


def rope_vit(**more: Any) -> LoadedModel:
    """A float64 network of timm's without a table of positions."""
    torch.manual_seed(4)
    net = timm.models.eva.Eva(
        img_size=32,
        patch_size=8,
        embed_dim=96,
        depth=2,
        num_heads=3,
        num_classes=10,
        use_abs_pos_emb=False,
        use_rot_pos_emb=True,
        global_pool="avg",
        **more,
    )
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            parameter.add_(0.05 * torch.randn_like(parameter))
    return load_module(net.double(), mean=0.5, std=0.5)


def test_a_network_without_positions_gives_all_its_patches() -> None:
    model, images = rope_vit(), planted_images(1, side=32)
    found = run(seen(model, images))
    patches, expected = (to_patches(x[0].double(), 8) for x in (found.images, images))
    away = torch.cdist(patches, expected)
    assert sorted(away.argmin(1).tolist()) == list(range(16))
    assert float(away.amin(1).max()) < 1e-5
    in_order = float(psnr(found.images, images)[0]) > 60
    assert bool(found.diagnostics["certain"][0]) == in_order  # a wrong order is no picture of it
    as_fed = run(replace(seen(model, images), against="input")).images
    torch.testing.assert_close(as_fed, found.images, rtol=0, atol=1e-9)


@pytest.mark.parametrize("positions", ["strict", "exposed"])
def test_no_order_is_certain_that_the_network_does_not_see(positions: str) -> None:
    model = planted_model(position_embedding=positions, img_size=16)
    found = run(seen(model, planted_images(1, side=16)))
    assert found.diagnostics["patches_found"].tolist() == [1.0]
    assert found.diagnostics["certain"].tolist() == [0.0]


def test_what_a_step_gives_does_not_depend_on_its_company() -> None:
    view = seen(planted_model(img_size=16), planted_images(3, side=16))
    together, alone = run(view).images, run(view.part(2)).images
    torch.testing.assert_close(together[2:], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("gated", [False, True])
def test_whatever_stands_between_the_two_layers(gated: bool) -> None:
    model = other_vit(mlp_layer=timm.layers.GluMlp) if gated else other_vit()
    images = planted_images(1, side=32)
    found = run(seen(model, images))
    assert float(psnr(found.images, images)[0]) > 80
    assert found.diagnostics["certain"].tolist() == [1.0]


def test_pictures_of_a_batch_are_told_apart_and_verified() -> None:
    model, images = planted_model(embed_dim=160, img_size=16), planted_images(4, side=16)
    found = run(seen(model, images, batch=4))
    scores = torch.stack([psnr(found.images, one.expand_as(found.images)) for one in images])
    assert sorted(scores.argmax(0).tolist()) == [0, 1, 2, 3]
    assert float(scores.amax(0).min()) > 80
    assert found.diagnostics["certain"].tolist() == [1.0] * 4


def test_noise_leaves_a_guess_that_is_not_certain() -> None:
    model, images = planted_model(), planted_images(1)
    view = seen(model, images)
    update = view.updates[0]
    torch.manual_seed(2)
    noisy = {
        name: sent + 0.1 * sent.std() * torch.randn_like(sent)
        for name, sent in update.grads.items()
    }
    found = run(changed(view, grads=noisy))
    assert found.images is not None
    assert bool(found.images.isfinite().all())
    assert found.diagnostics["certain"].tolist() == [0.0]


@pytest.mark.parametrize(
    "more",
    [
        {"mlp_layer": timm.layers.SwiGLU},
        {"norm_layer": timm.layers.RmsNorm},
        {"pre_norm": True},
    ],
)
def test_another_block_is_refused(more: dict[str, Any]) -> None:
    refusal = find_attack("token_peeling").unsupported(
        seen(other_vit(**more), planted_images(1, side=32))
    )
    assert refusal is not None
    assert refusal.kind == "block"


@pytest.mark.parametrize("scaled", [False, True])
def test_a_block_that_computes_something_else_is_noticed(scaled: bool) -> None:
    model = other_vit()
    assert equations_hold(model)
    place = model.blocks[0].mlp if scaled else model.patch_embed
    place.register_forward_hook(lambda module, inputs, output: 1.1 * output)
    assert not equations_hold(model)
    images = planted_images(1, side=32)
    assert run(seen(model, images)).diagnostics["patches_found"].tolist() == [0.0]


def test_uploads_that_do_not_show_tokens_are_refused() -> None:
    attack, model = find_attack("token_peeling"), planted_model()
    view = seen(model, planted_images(1))
    kept = {name: sent for name, sent in view.updates[0].grads.items() if LAYERS[1] not in name}
    kinds = [
        attack.unsupported(changed(view, grads=kept)).kind,
        attack.unsupported(changed(view, batch=100)).kind,
        attack.unsupported(replace(changed(view, batch=2), model=rope_vit())).kind,
    ]
    assert kinds == ["missing_gradient", "underdetermined", "batch"]


FROZEN = ("pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")


@pytest.mark.parametrize("batch", [1, 2])
def test_frozen_embeddings_hide_no_patch_smaller_than_their_width(batch: int) -> None:
    model, images = planted_model(img_size=16), planted_images(2, side=16)
    found = run(seen(model, images, batch=batch, withhold=FROZEN))
    scores = torch.stack([psnr(found.images, one.expand_as(found.images)) for one in images])
    assert sorted(scores.argmax(0).tolist()) == [0, 1]
    assert float(scores.amax(0).min()) > 100
    assert found.diagnostics["certain"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("loses", [False, True])
def test_no_patch_is_certain_that_the_embedding_does_not_tell(loses: bool) -> None:
    """With a narrower embedding, or with one that does not see three values of a patch."""
    model, images = (
        planted_model(img_size=16, embed_dim=96 if loses else 48),
        planted_images(1, side=16),
    )
    if loses:
        with torch.no_grad():
            model.patch_embed.proj.weight[..., 0, 0] = 0
    found = run(seen(model, images, withhold=FROZEN))
    assert float(psnr(found.images, images)[0]) > 25  # a uniform grey: 12
    assert found.diagnostics["certain"].tolist() == [0.0]


def test_pictures_of_a_batch_are_told_apart_under_mjp() -> None:
    """Their patches, in whatever order; what is masked in one picture stands in another."""
    model, images = planted_model(unknown_embedding=True, img_size=16), planted_images(4, side=16)
    attack, client = find_attack("token_peeling", NEW), ClientConfig(batch=4)
    view, fed = planted_view(model, attack, "c", images=images, gamma=0.5, client=client)
    found = run(view)
    sent, solved = (to_patches(x.double(), model.patch_size) for x in (images, found.images))
    away = torch.stack([torch.cdist(one, sent).amin(2).amax(1) for one in solved])
    assert sorted(away.argmin(1).tolist()) == [0, 1, 2, 3]
    assert float(away.amin(1).max()) < 1e-5
    assert fed.mask is not None
    assert bool(fed.mask.any(1).all())
    assert found.mask is None
    assert found.diagnostics["certain"].tolist() == [0.0] * 4
