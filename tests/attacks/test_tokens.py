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
from attacks.equations.attention import PatchOrder, groups, refined_groups
from attacks.equations.block import FC1, PROJ, equations_hold
from attacks.equations.token_peeling import Peeling
from attacks.head_features import features_of
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.interfaces import AttackerView, Reconstruction
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.live.modules import load_module
from mjp_privacy.models.vit import input_of
from tests.helpers.models import planted_model
from tests.helpers.planted import (
    best,
    changed,
    gradient_of,
    keeping,
    planted_images,
    planted_view,
    solved,
)

SIDE, PATCH = 32, 8
SHAPE: dict[str, Any] = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": 96}
SHAPE |= {"depth": 2, "num_heads": 3, "num_classes": 10}


def drawn(net: Callable[..., nn.Module], scale: float, **more: Any) -> LoadedModel:
    """A float64 network of timm's, with weights so large that attention differs."""
    torch.manual_seed(5)
    network = net(**SHAPE | more)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, scale)
            parameter.add_(0.05 * torch.randn_like(parameter))
    return load_module(network.double(), mean=0.5, std=0.5)


def other_vit(**more: Any) -> LoadedModel:
    """A ViT with layer scale."""
    settings = {"init_values": 0.5, "class_token": False, "global_pool": "avg", **more}
    return drawn(timm.models.VisionTransformer, 0.15, **settings)


def rotary() -> LoadedModel:
    """A network without a table of positions."""
    return drawn(timm.models.Eva, 0.1, use_abs_pos_emb=False, use_rot_pos_emb=True)


def relative() -> LoadedModel:
    return drawn(timm.models.VisionTransformerRelPos, 0.1)


def seen(
    model: LoadedModel, images: Tensor, attack: str = "token_peeling", **client: Any
) -> AttackerView:
    of = ClientConfig(**client)
    return planted_view(model, find_attack(attack), "a", images=images, client=of)[0]


def run(view: AttackerView, attack: str = "token_peeling", **options: Any) -> Reconstruction:
    return solved(view, attack, seed=3, **options)


# one upload, token by token -----------------------------------------------------------------------


def test_masked_patches_are_exact_and_the_mask_is_found() -> None:
    """Without the position table's gradient; the patches of a picture, in whatever order."""
    model, images = planted_model(unknown_embedding=True), planted_images(2)
    attack = find_attack("token_peeling")
    view, fed = planted_view(model, attack, "c", images=images, gamma=0.9)
    assert "pos_embed" not in view.updates[0].grads
    found = run(view)
    assert torch.equal(found.mask, fed.mask)
    for one, true in zip(found.images, images, strict=True):
        away = torch.cdist(*(to_patches(x.double(), model.patch_size) for x in (one, true)))
        assert sorted(away.argmin(1).tolist()) == list(range(len(away)))
        assert float(away.amin(1).max()) < 1e-5
    assert found.diagnostics["certain"].tolist() == [0.0, 0.0]  # borders told the order


MLPS: dict[str, Any] = {
    "mlp": {},
    "gated": {"mlp_layer": timm.layers.GluMlp},
    "gated by a layer of its own": {"mlp_layer": timm.layers.SwiGLU},
    "behind an RMSNorm": {"norm_layer": timm.layers.RmsNorm},
    "normed": {"scale_mlp_norm": True},
}


@pytest.mark.parametrize("more", MLPS.values(), ids=MLPS)
def test_whatever_stands_between_the_two_layers(more: dict[str, Any]) -> None:
    images = planted_images(1, size=SIDE)
    found = run(seen(other_vit(**more), images))
    assert float(psnr(found.images, images)[0]) > 80
    assert found.diagnostics["certain"].tolist() == [1.0]


@pytest.mark.parametrize("fed", [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1]])
def test_pictures_of_a_batch_are_told_apart_and_verified(fed: list[int]) -> None:
    """Also where two are equal, and where the batch of 4 that is told holds fewer."""
    model, images = planted_model(embed_dim=160, img_size=16), planted_images(4, size=16)[fed]
    view = seen(model, images, batch=len(fed))
    found = run(replace(view, updates=[replace(view.updates[0], batch=4)]))
    certain = found.diagnostics["certain"] == 1
    assert int(certain.sum()) == len({*fed})
    assert float(best(found.images[certain], images).min()) > 80


def test_pictures_of_a_batch_are_told_apart_under_mjp() -> None:
    """Their patches, in whatever order; what is masked in one picture stands in another. A second
    time they are the same to the bit."""
    model, images = planted_model(unknown_embedding=True, img_size=16), planted_images(4, size=16)
    attack, client = find_attack("token_peeling"), ClientConfig(batch=4)
    view, fed = planted_view(model, attack, "c", images=images, gamma=0.5, client=client)
    assert fed.mask is not None
    assert bool(fed.mask.any(1).all())
    found = run(view)
    sent, solved = (to_patches(x.double(), model.patch_size) for x in (images, found.images))
    away = torch.stack([torch.cdist(one, sent).amin(2).amax(1) for one in solved])
    assert sorted(away.argmin(1).tolist()) == [0, 1, 2, 3]
    assert float(away.amin(1).max()) < 1e-5
    assert torch.equal(found.mask, fed.mask[away.argmin(1)])
    assert found.diagnostics["certain"].tolist() == [0.0] * 4
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


@pytest.mark.parametrize(
    "more", [{"pre_norm": True}, {"embed_norm_layer": timm.layers.RmsNorm}], ids=["sums", "patches"]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_norm_before_block_0_hides_no_patch(more: dict[str, Any], batch: int) -> None:
    """Of sums with positions, as CLIP's, or of embedded patches, as AIMv2's."""
    images = planted_images(batch, size=SIDE)
    found = run(seen(other_vit(**more), images, batch=batch))
    assert float(best(found.images, images).min()) > 60
    assert found.diagnostics["certain"].tolist() == [1.0] * batch


def test_a_norm_of_sums_hides_no_masked_patch() -> None:
    model, images = planted_model(unknown_embedding=True, pre_norm=True), planted_images(1)
    view, fed = planted_view(model, find_attack("token_peeling"), "c", images=images, gamma=0.5)
    found = run(view)
    assert torch.equal(found.mask, fed.mask)
    away = torch.cdist(
        *(to_patches(x[0].double(), model.patch_size) for x in (found.images, images))
    )
    assert float(away.amin(1).max()) < 1e-4


@pytest.mark.parametrize("network", [rotary, relative])
def test_pictures_of_a_batch_are_told_apart_without_a_table(
    network: Callable[[], LoadedModel],
) -> None:
    """No token says where it stands: attention says whose it is, and then where."""
    images = planted_images(2, size=SIDE)
    found = run(seen(network(), images, batch=2))
    assert float(best(found.images, images).min()) > 80
    assert found.diagnostics["certain"].tolist() == [1.0, 1.0]


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


@pytest.mark.parametrize("blank", [2, 3])
def test_blank_pictures_leave_fewer_tokens_than_pictures_have_patches(blank: int) -> None:
    """In a network without positions all patches of a blank picture are one token."""
    more = {"use_abs_pos_emb": False, "use_rot_pos_emb": True, "class_token": False}
    model = drawn(timm.models.Eva, 0.1, img_size=16, global_pool="avg", **more)
    images = planted_images(4, size=16)
    images[-blank:] = 0.75
    found = run(seen(model, images, batch=4))
    assert found.images.shape == images.shape
    assert found.diagnostics["certain"].tolist() == [0.0] * 4


FROZEN = ("pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")


def test_frozen_embeddings_hide_no_patch_smaller_than_their_width() -> None:
    model, images = planted_model(img_size=16), planted_images(2, size=16)
    found = run(seen(model, images, batch=2, withhold=FROZEN))
    assert float(best(found.images, images).min()) > 100
    assert found.diagnostics["certain"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("loses", [False, True])
def test_no_patch_is_certain_that_the_embedding_does_not_tell(loses: bool) -> None:
    """With a narrower embedding, or with one that does not see three values of a patch."""
    width = 96 if loses else 48
    model, images = planted_model(img_size=16, embed_dim=width), planted_images(1, size=16)
    if loses:
        with torch.no_grad():
            model.patch_embed.proj.weight[..., 0, 0] = 0
    found = run(seen(model, images, withhold=FROZEN))
    assert float(psnr(found.images, images)[0]) > 25  # a uniform grey: 12
    assert found.diagnostics["certain"].tolist() == [0.0]


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


def order_and_patches(model: LoadedModel) -> tuple[PatchOrder, Tensor]:
    images = planted_images(1, size=SIDE)
    view = seen(model, images, "patch_lattice")
    attention = PatchOrder.of(view, view.updates[0], 0)
    assert attention is not None
    return attention, to_patches(model.normalize(images)[0], PATCH)


@pytest.mark.parametrize("network", [rotary, relative])
def test_displaced_patches_are_put_where_attention_had_them(
    network: Callable[[], LoadedModel],
) -> None:
    attention, patches = order_and_patches(network())
    moved = torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))[:8]
    order = torch.arange(len(patches))
    order[moved] = moved.roll(1)
    found, is_right = attention.found(patches[order])
    assert is_right
    torch.testing.assert_close(patches[order][found], patches)
    wrong = patches.clone()
    wrong[3] += 0.02
    assert not attention.found(wrong)[1]


def test_a_network_that_does_not_see_an_order_leaves_it() -> None:
    """A relative bias of zero, as it is before training."""
    model = relative()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "rel_pos" in name:
                parameter.zero_()
    attention, patches = order_and_patches(model)
    order, is_right = attention.found(patches.flip(0))
    assert not is_right
    assert order.tolist() == list(range(len(patches)))


def test_a_gradient_that_no_order_explains_leaves_the_order_that_borders_gave() -> None:
    """As of attention with dropout."""
    attention, patches = order_and_patches(relative())
    like = torch.randn(attention.rows.shape, generator=torch.Generator().manual_seed(0))
    spread = 0.1 * attention.rows.square().mean().sqrt()
    other = replace(attention, rows=attention.rows + spread * like.to(spread))
    order, is_right = other.found(patches)
    assert not is_right
    assert order.tolist() == list(range(len(patches)))


@pytest.mark.parametrize("turns", [False, True])
def test_an_order_is_not_right_where_another_is_as_good(turns: bool) -> None:
    """A relative bias that is the same for both directions does not tell a picture from itself
    upside down."""
    model = drawn(timm.models.VisionTransformerRelPos, 0.1, rel_pos_type="bias")
    with torch.no_grad():
        for name, table in model.named_parameters():
            if "relative_position_bias_table" in name and turns:
                table.add_(table.flip(0).clone())
    attention, patches = order_and_patches(model)
    shares = attention.outside(torch.stack((patches, patches.flip(0))))
    assert (shares <= attention.enough).tolist() == [True, turns]
    assert attention.found(patches)[1] != turns


@pytest.mark.parametrize("positions", ["strict", "exposed"])
def test_no_order_is_certain_that_the_network_does_not_see(positions: str) -> None:
    model = planted_model(position_embedding=positions, img_size=16)
    found = run(seen(model, planted_images(1, size=16)))
    assert found.diagnostics["patches_found"].tolist() == [1.0]
    assert found.diagnostics["certain"].tolist() == [0.0]


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


# other attacks on such ViTs -----------------------------------------------------------------------

KINDS = {
    "layer scale": {},
    "registers": {"class_token": True, "reg_tokens": 2, "global_pool": "token"},
    "attention pooling": {"global_pool": "map"},
    "no layer scale, queries normed": {"init_values": None, "qk_norm": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_layer_span_tells_a_batch_apart(kind: str) -> None:
    images = planted_images(2, size=SIDE)
    made = run(seen(other_vit(**KINDS[kind]), images, "layer_span", batch=2), "layer_span")
    assert bool(made.diagnostics["certain"].all())
    assert float(best(made.images, images).min()) > 60


def test_token_span_tells_the_patches_of_a_vit_with_layer_scale() -> None:
    """Without any gradient of the position table."""
    images = planted_images(size=SIDE)
    view = seen(other_vit(class_token=True, global_pool="token"), images, "token_span")
    assert "pos_embed" not in view.updates[0].grads
    assert float(psnr(run(view, "token_span").images, images).min()) > 60


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
