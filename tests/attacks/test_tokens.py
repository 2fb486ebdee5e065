"""Tokens of all kinds of ViTs: peeled out of one upload, put in order, told apart in a batch; and
the classifier's gradient alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from skimage import data
from torch import Tensor, nn

from attacks import find_attack
from attacks.equations.attention import groups, refined_groups
from attacks.equations.block import FC1, PROJ, equations_hold
from attacks.equations.token_peeling import Peeling
from attacks.head_features import features_of
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.interfaces import AttackerView, Reconstruction
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.vit import input_of
from tests.helpers.models import planted_model
from tests.helpers.planted import (
    SHAPE,
    changed,
    drawn,
    gradient_of,
    keeping,
    other_vit,
    planted_images,
    planted_view,
    rotary,
    solved,
)

SIDE, PATCH = SHAPE["img_size"], SHAPE["patch_size"]


def seen(
    model: LoadedModel, images: Tensor, attack: str = "token_peeling", **client: Any
) -> AttackerView:
    of = ClientConfig(**client)
    return planted_view(model, find_attack(attack), "a", images=images, client=of)[0]


def run(view: AttackerView, attack: str = "token_peeling", **options: Any) -> Reconstruction:
    return solved(view, attack, seed=3, **options)


# one upload, token by token -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "count", "batch", "gamma"),
    [({}, 2, 1, 0.9), ({"pre_norm": True}, 1, 1, 0.5), ({"img_size": 16}, 4, 4, 0.5)],
)
def test_masked_patches_are_exact_and_the_mask_is_found(
    network: dict[str, Any], count: int, batch: int, gamma: float
) -> None:
    """Without the position table's gradient; the patches of a picture, in whatever order, for
    borders tell it. What is masked in one picture of a batch stands in another. A second time they
    are the same to the bit."""
    model = planted_model(unknown_embedding=True, **network)
    images, client = planted_images(count, model.card.img_size), ClientConfig(batch=batch)
    attack = find_attack("token_peeling")
    view, fed = planted_view(model, attack, "c", images=images, gamma=gamma, client=client)
    assert "pos_embed" not in view.updates[0].grads
    assert bool(fed.mask.any(1).all())
    found = run(view)
    sent, solved = (to_patches(x.double(), model.patch_size) for x in (images, found.images))
    away = torch.stack([torch.cdist(one, sent).amin(2).amax(1) for one in solved])
    assert sorted(away.argmin(1).tolist()) == [*range(count)]
    assert float(away.amin(1).max()) < 1e-4
    back = torch.stack([torch.cdist(one, solved).amin(2).amax(1) for one in sent])
    assert float(back.amin(1).max()) < 1e-4  # no patch stands twice
    assert torch.equal(found.mask, fed.mask[away.argmin(1)])
    assert found.diagnostics["certain"].tolist() == [0.0] * count
    assert torch.equal(run(view).images, found.images)


def test_tokens_are_read_without_one_that_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention adds up is told nearly by the gradients of the others."""

    def all_but_one(peeling: Peeling) -> tuple[Tensor, Tensor]:
        found, upstream = every(peeling)
        return found[:-1], upstream[:-1]

    every = Peeling.all_tokens
    monkeypatch.setattr(Peeling, "all_tokens", all_but_one)
    images = planted_images(1, size=64)
    shape = {"img_size": 64, "embed_dim": 160, "num_heads": 4, "init_values": 0.5}
    shape |= {"class_token": False, "global_pool": "avg"}
    found = run(seen(drawn(timm.models.VisionTransformer, 0.03, **shape), images))
    assert float(psnr(found.images, images)[0]) > 20  # else 12
    assert found.diagnostics["certain"].tolist() == [0.0]


def unscaled() -> LoadedModel:
    """A network whose patches are embedded without a bias and normalised, and get no positions."""
    more = {"pos_embed": "none", "embed_norm_layer": timm.layers.RmsNorm}
    network = other_vit(**more)
    network.patch_embed.proj.bias = None
    return network


def test_tokens_that_attention_adds_up_are_one_group() -> None:
    """Of three pictures, in no order, with weights that also point elsewhere."""
    random = torch.Generator().manual_seed(0)
    owner = torch.tensor([0] * 5 + [1] * 4 + [2] * 4)[torch.randperm(13, generator=random)]
    same = (owner[:, None] == owner).double()
    affinity = 0.6 * same + 0.5 * torch.rand(13, 13, dtype=torch.float64, generator=random)
    found = sorted(sorted(owner[group].tolist()) for group in groups(affinity, 3))
    assert found == [[0] * 5, [1] * 4, [2] * 4]


def test_tokens_in_wrong_groups_are_moved_to_where_their_sums_lie() -> None:
    """However attention looks at the tokens of a picture."""
    model, random = planted_model(), torch.Generator().manual_seed(0)
    z = torch.randn(10, model.embed_dim, generator=random).to(model.like)
    owner = torch.randperm(10, generator=random) % 2
    with torch.no_grad():
        values = model.blocks[0].attn.qkv(model.blocks[0].norm1(z)).chunk(3, 1)[2]
    values = values.unflatten(1, (model.blocks[0].attn.num_heads, -1)).transpose(0, 1)
    looks = torch.randn(len(values), 10, 10, generator=random).to(z)
    looks = looks.masked_fill(owner[:, None] != owner, -torch.inf).softmax(-1)
    attended = (looks @ values).transpose(0, 1).flatten(1)
    wrong = [torch.arange(0, 10, 2), torch.arange(1, 10, 2)]
    found = refined_groups(model, z[:0], z, attended, wrong)
    assert sorted(sorted(owner[group].tolist()) for group in found) == [[0] * 5, [1] * 5]


def test_noise_leaves_a_guess_that_is_not_certain() -> None:
    view = seen(planted_model(), planted_images(1))
    torch.manual_seed(2)
    sent = view.updates[0].grads.items()
    noisy = {name: g + 0.1 * g.std() * torch.randn_like(g) for name, g in sent}
    found = run(changed(view, grads=noisy))
    assert bool(found.images.isfinite().all())
    assert found.diagnostics["certain"].tolist() == [0.0]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_block_that_computes_something_else_is_noticed(scaled: bool) -> None:
    model = other_vit()
    assert equations_hold(model)
    place = model.blocks[0].mlp if scaled else model.patch_embed
    place.register_forward_hook(lambda module, inputs, output: 1.1 * output)
    assert not equations_hold(model)
    found = run(seen(model, planted_images(1, size=SIDE)))
    assert (
        found.images is None
    )  # no mean of photographs either, which would look like a weak attack
    assert [*found.inapplicable] == [0]


class Doubled(nn.Identity):
    """In place of a norm, what is none."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class OneLayer(nn.Linear):
    """In place of two layers."""

    def __init__(self, in_features: int, **_: Any) -> None:
        super().__init__(in_features, in_features)


@pytest.mark.parametrize(
    ("model", "facts", "absent", "kind"),
    [
        (lambda: other_vit(norm_layer=Doubled), {}, "none", "block"),
        (lambda: other_vit(mlp_layer=OneLayer), {}, "none", "block"),
        (lambda: unscaled(), {}, "none", "model"),
        (other_vit, {"batch": 100}, "none", "underdetermined"),
        (other_vit, {}, FC1, "missing_gradient"),
        (lambda: planted_model(unknown_embedding=True, index_embedding=True), {}, "none", "model"),
    ],
)
def test_what_does_not_show_its_tokens_is_refused(
    model: Callable[[], LoadedModel], facts: dict[str, Any], absent: str, kind: str
) -> None:
    view = keeping(seen(model(), planted_images(1, size=SIDE)), lambda name: absent not in name)
    refusal = find_attack("token_peeling").unsupported(changed(view, **facts))
    assert refusal is not None
    assert refusal.kind == kind


# their order, where no table of positions tells it ------------------------------------------------


@pytest.mark.parametrize("name", ["patch_lattice", "token_peeling"])
def test_the_picture_is_exact_where_borders_mislead(name: str) -> None:
    """Its halves are exchanged, so that what continues best stands at opposite sides."""
    rows = torch.from_numpy(data.astronaut()[40:232:6, 150:342:6]).permute(2, 0, 1)
    images = (rows.double() / 255).roll(SIDE // 2, -1).unsqueeze(0)
    view = seen(rotary(), images, name)
    found = run(view, name)
    assert float(psnr(found.images.double(), images)) > 60
    if name == "token_peeling":
        assert found.diagnostics["certain"].tolist() == [1.0]
        as_fed = run(replace(view, against="input"), name).images
        torch.testing.assert_close(as_fed, found.images, rtol=0, atol=1e-9)
        return
    assert found.diagnostics["order_found"].tolist() == [1.0]
    by_borders = run(keeping(view, lambda one: not one.startswith(PROJ)), name)
    assert by_borders.diagnostics["order_found"].tolist() == [0.0]
    assert float(psnr(by_borders.images.double(), images)) < 30


# the classifier alone ----------------------------------------------------------------------------


def features_found(sent: dict[str, Tensor], model: LoadedModel, labels: Tensor) -> Any:
    generator = torch.Generator().manual_seed(0)
    return features_of(model, sent["head.weight"], sent["head.bias"], labels, generator)


@pytest.mark.parametrize(("network", "batch"), [(planted_model, 1), (other_vit, 3)])
def test_the_classifier_tells_every_feature(network: Callable[[], LoadedModel], batch: int) -> None:
    model, images = network(), planted_images(batch, size=SIDE)
    sent = seen(model, images, "head_features", batch=batch, train="head").updates[0].grads
    assert sorted(sent) == ["head.bias", "head.weight"]
    first = {name: each[0] for name, each in sent.items()}
    found, misfit = features_found(first, model, torch.arange(batch))
    with torch.no_grad():
        expected = input_of(model, model.get_submodule("head"), model.normalize(images))
    assert misfit < 1e-9
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_pictures_of_one_class_have_features_of_their_own() -> None:
    model, images, labels = planted_model(), planted_images(2), torch.tensor([3, 3])
    found, misfit = features_found(gradient_of(model, images, labels), model, labels)
    with torch.no_grad():
        expected = input_of(model, model.get_submodule("head"), model.normalize(images))
    apart = torch.cdist(found, expected).amin(0) / expected.norm(dim=1)
    assert misfit < 1e-4
    assert (apart < 1e-3).all()


def test_a_picture_with_the_feature_is_found() -> None:
    images = planted_images(2)
    view = seen(planted_model(), images, "head_features", train="head")
    made = run(view, "head_features", steps=60)
    assert made.images.shape == images.shape
    assert float(made.diagnostics["feature_distance"].max()) < 0.1
