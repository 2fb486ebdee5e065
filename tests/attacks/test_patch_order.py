"""The order of patches that attention tells where no table of positions does."""

from __future__ import annotations

import pytest
import timm
import torch
from skimage import data
from torch import Tensor

from attacks import find_attack
from attacks.equations.patch_order import PatchOrder
from attacks.equations.token_peeling import PROJ
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.modules import load_module
from tests.helpers.planted import keeping, planted_images, planted_view

SIDE, PATCH, WIDTH = 32, 8, 96
SHAPE = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": 2, "num_heads": 3}
KINDS = {
    "rotary": lambda: timm.models.Eva(
        **SHAPE, use_abs_pos_emb=False, use_rot_pos_emb=True, num_classes=10
    ),
    "relative bias": lambda: timm.models.VisionTransformerRelPos(**SHAPE, num_classes=10),
}


def network(kind: str, scale: float = 0.1) -> LoadedModel:
    """A float64 network without a table of positions; the larger its weights, the more its
    attention differs from the mean."""
    torch.manual_seed(5)
    net = KINDS[kind]()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, scale)
    return load_module(net.double(), mean=0.5, std=0.5)


def seen(model: LoadedModel, images: Tensor, attack: str) -> AttackerView:
    return planted_view(model, find_attack(attack), "a", images=images)[0]


def order_and_patches(model: LoadedModel) -> tuple[PatchOrder, Tensor]:
    images = planted_images(1, side=SIDE)
    view = seen(model, images, "patch_lattice")
    attention = PatchOrder.of(view, view.updates[0], 0)
    assert attention is not None
    return attention, to_patches(model.normalize(images)[0], PATCH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_displaced_patches_are_put_where_attention_had_them(kind: str, seed: int) -> None:
    attention, patches = order_and_patches(network(kind))
    moved = torch.randperm(len(patches), generator=torch.Generator().manual_seed(seed))[:8]
    drawn = torch.arange(len(patches))
    drawn[moved] = moved.roll(1)
    order, is_right = attention.found(patches[drawn])
    assert is_right
    torch.testing.assert_close(patches[drawn][order], patches)


def test_a_network_that_does_not_see_an_order_leaves_it() -> None:
    """A relative bias of zero, as it is before training."""
    torch.manual_seed(5)
    net = KINDS["relative bias"]().double()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "rel_pos" in name:
                parameter.zero_()
    attention, patches = order_and_patches(load_module(net, mean=0.5, std=0.5))
    order, is_right = attention.found(patches.flip(0))
    assert not is_right
    assert order.tolist() == list(range(len(patches)))


def test_no_order_of_wrong_patches_is_right() -> None:
    attention, patches = order_and_patches(network("rotary"))
    wrong = patches.clone()
    wrong[3] = wrong[3] + 0.02
    assert not attention.found(wrong)[1]


def displaced() -> Tensor:
    """A photograph (1, 3, S, S) whose borders mislead: its halves are exchanged, so that what
    continues best stands at opposite sides."""
    rows = torch.from_numpy(data.astronaut()[40:232:6, 150:342:6]).permute(2, 0, 1)
    return (rows.double() / 255).roll(SIDE // 2, -1).unsqueeze(0)


@pytest.mark.parametrize("name", ["patch_lattice", "token_peeling"])
def test_the_picture_is_exact_where_borders_mislead(name: str) -> None:
    model, images = network("rotary"), displaced()
    view = seen(model, images, name)
    attack = find_attack(name, {"prior": "stationary"})
    found = attack.run(view, generator=torch.Generator().manual_seed(0))
    assert found.images is not None
    assert float(psnr(found.images.double(), images)) > 60
    if name == "patch_lattice":
        assert found.diagnostics["order_found"].tolist() == [1.0]
        by_borders = attack.run(
            keeping(view, lambda one: not one.startswith(PROJ)), generator=torch.Generator()
        )
        assert by_borders.diagnostics["order_found"].tolist() == [0.0]
        assert float(psnr(by_borders.images.double(), images)) < 30
    else:
        assert found.diagnostics["certain"].tolist() == [1.0]
