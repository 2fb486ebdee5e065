"""Tokens of all kinds of ViTs: peeled out of one upload and put in order; pictures of one batch by
layers, by matching and by the lattice of their differences; the classifier's gradient alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from skimage import data
from torch import Tensor

from attacks import find_attack
from attacks.equations.attention import PatchOrder
from attacks.equations.block import PROJ
from attacks.equations.layers import LayerSpans
from attacks.equations.token_peeling import Peeling
from attacks.head_features import features_of
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import labels_of_batch, make_upload
from mjp_privacy.interfaces import AttackerView, Reconstruction
from mjp_privacy.metrics.pictures import psnr, quantise
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.live.modules import load_module
from mjp_privacy.models.vit import input_of
from tests.helpers.models import planted_model
from tests.helpers.planted import (
    SHAPE,
    best,
    changed,
    drawn,
    gradient_of,
    keeping,
    lattice_model,
    other_vit,
    planted_images,
    planted_view,
    relative,
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
    borders tell it. What is masked in one picture of a batch stands in another, and a second time
    a batch's are the same to the bit."""
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
    assert batch == 1 or torch.equal(run(view).images, found.images)


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


def test_noise_leaves_a_guess_that_is_not_certain() -> None:
    view = seen(planted_model(), planted_images(1))
    torch.manual_seed(2)
    sent = view.updates[0].grads.items()
    noisy = {name: g + 0.1 * g.std() * torch.randn_like(g) for name, g in sent}
    found = run(changed(view, grads=noisy))
    assert bool(found.images.isfinite().all())
    assert found.diagnostics["certain"].tolist() == [0.0]


@pytest.mark.parametrize("told", [1.0, 0.01])
@pytest.mark.parametrize("norm", [{"pre_norm": True}, {"embed_norm_layer": torch.nn.LayerNorm}])
def test_a_norm_hides_no_patch_where_the_patch_embedding_is_frozen(
    norm: dict[str, Any], told: float
) -> None:
    """What is added before the norm tells contrast: where that is little, layers do not see it, and
    no picture is certain."""
    model, images = other_vit(patch_size=4, img_size=16, **norm).float(), planted_images(1, 16)
    with torch.no_grad():
        (model.pos_embed if "pre_norm" in norm else model.patch_embed.proj.bias).mul_(told)
    view = seen(model, images.float())
    found = run(keeping(view, lambda name: not name.startswith("patch_embed")))
    assert float(psnr(found.images.double(), images)[0]) > 60
    assert found.diagnostics["certain"].tolist() == [float(told == 1)]


# their order, where no table of positions tells it ------------------------------------------------


def order_and_patches(model: LoadedModel) -> tuple[PatchOrder, Tensor]:
    images = planted_images(1, size=SIDE)
    view = seen(model, images, "patch_lattice")
    attention = PatchOrder.of(view, view.updates[0], 0)
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


def test_a_gradient_that_no_order_explains_leaves_the_order_that_borders_gave() -> None:
    """As of attention with dropout."""
    attention, patches = order_and_patches(relative())
    like = torch.randn(attention.rows.shape, generator=torch.Generator().manual_seed(0))
    spread = 0.1 * attention.rows.square().mean().sqrt()
    other = replace(attention, rows=attention.rows + spread * like.to(spread))
    order, is_right = other.found(patches)
    assert not is_right
    assert order.tolist() == list(range(len(patches)))


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


# batches: layer_span and span_matching ------------------------------------------------------------


@pytest.mark.parametrize("fed", [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1]])
def test_pictures_of_a_batch_are_told_apart_and_verified(fed: list[int]) -> None:
    """Also where two are equal, and where the batch of 4 that is told holds fewer."""
    model, images = planted_model(embed_dim=160, img_size=16), planted_images(4, size=16)[fed]
    view = seen(model, images, batch=len(fed))
    found = run(changed(view, batch=4))
    certain = found.diagnostics["certain"] == 1
    assert int(certain.sum()) == len({*fed})
    assert float(best(found.images[certain], images).min()) > 80


@pytest.mark.parametrize("frozen", ["blocks.0.", "mlp"])
def test_every_picture_of_a_batch_comes_back_from_the_layers_that_are_trained(frozen: str) -> None:
    images = planted_images(3, 8)
    view = seen(planted_model(img_size=8, depth=3), images, "layer_span", batch=3)
    view = keeping(replace(view, labels=None), lambda name: frozen not in name)
    found = solved(view, "layer_span")
    assert best(found.images, images).min() > 80
    assert found.diagnostics["certain"].tolist() == [1.0] * 3


def test_where_nothing_is_found_the_guesses_of_batch_span_stand() -> None:
    model = planted_model(img_size=8, depth=3)
    view = seen(model, planted_images(2, 8), "span_matching", batch=2)
    sent = dict(view.updates[0].grads)
    for name in [name for name in sent if name.startswith("blocks.")]:
        noise = torch.randn(sent[name].shape, generator=torch.Generator().manual_seed(1))
        sent[name] = noise.to(sent[name])
    view = changed(view, grads=sent)
    found = solved(view, "layer_span", searches=2)
    assert torch.allclose(found.images, solved(view, "batch_span").images)
    assert found.diagnostics["certain"].tolist() == [0.0, 0.0]
    assert found.diagnostics["outside"].isnan().all()


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_no_mixture_passes_where_tokens_do_not_see_each_other(scale: float) -> None:
    """Layer scale of new networks multiplies all that attention adds by next to nothing, so that a
    picture of patches of both lies in the layers' spans as each of the two does."""
    torch.manual_seed(2)
    network: Any = timm.models.VisionTransformer(
        img_size=32, embed_dim=96, depth=3, num_heads=4, num_classes=10, init_values=scale
    )
    model, images = load_module(network, mean=0.5, std=0.5), planted_images(2, 32).float()
    view = seen(model, images, "layer_span", batch=2)
    grads = {name: sent[0] for name, sent in view.updates[0].grads.items()}
    spans = LayerSpans.of(model, grads, 2, torch.float32)
    one, other = to_patches(model.normalize(images), model.patch_size)
    enough, mixed = spans.enough, one.clone()
    mixed[:2] = other[:2]
    with torch.no_grad():
        true, mixture = spans.off(torch.stack((one, mixed))).tolist()
    assert true <= enough
    assert (mixture <= enough) == (scale < 1)
    assert spans.passes(one, true) == (scale == 1)
    assert not spans.passes(mixed, mixture)


def test_gradients_come_closer_and_what_mjp_masked_in_all_pictures_stays_masked() -> None:
    mask = torch.tensor([[True, False, False, False]] * 2)
    model, client = (
        planted_model(img_size=8, depth=2, unknown_embedding=True),
        ClientConfig(batch=2),
    )
    given = {"images": planted_images(2, 8), "client": client}
    view, inputs = planted_view(model, find_attack("span_matching"), "a", **given)
    view = replace(view, updates=[make_upload(model, [replace(inputs, mask=mask)], client)])
    options = {"prior_weight": 1e-6, "restarts": 1}
    start, found = (solved(view, "span_matching", steps=n, **options) for n in (1, 40))
    assert torch.equal(found.mask, mask)
    assert found.images.isfinite().all()
    assert float(found.diagnostics["distance"][0]) < 0.1 * float(start.diagnostics["distance"][0])


def test_the_classes_of_a_batch_with_a_class_that_comes_twice() -> None:
    likely = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.3, 0.1, 0.2, 0.4], [0.25] * 4])
    classes = torch.tensor([1, 1, 3])
    bias = (likely - torch.nn.functional.one_hot(classes, 4)).mean(0)
    assert labels_of_batch(bias, 3).sort().values.tolist() == [1, 1, 3]


# batch_lattice ------------------------------------------------------------------------------------


def eight_bit(batch: int, side: int = 16) -> Tensor:
    return quantise(planted_images(batch, side))


def of_lattice(images: Tensor, model: LoadedModel) -> AttackerView:
    """What is seen of these pictures as one batch, without labels."""
    return replace(seen(model, images, "batch_lattice", batch=len(images)), labels=None)


def test_two_uploads_show_the_span_that_one_does_not() -> None:
    """N = 16, D = 32: one upload leaves 15 rows of 16 differences; the weights differ."""
    shape: dict[str, Any] = {"img_size": 32, "embed_dim": 32}
    images, model, moved = eight_bit(2, 32), lattice_model(**shape), lattice_model(**shape)
    with torch.no_grad():
        for parameter in moved.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter += 0.1 * parameter.abs().mean() * noise
    first, second = of_lattice(images, model), of_lattice(images, moved)
    before = {name: value.detach() for name, value in moved.named_parameters()}
    late = replace(second.updates[0], weights_before=before)
    view = replace(first, updates=[first.updates[0], late])
    assert find_attack("batch_lattice").unsupported(first) is not None
    found = solved(view, "batch_lattice", uploads=2)
    assert best(found.images, images).min() > 100
    assert found.diagnostics["lattice_found"].tolist() == [1.0, 1.0]


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
