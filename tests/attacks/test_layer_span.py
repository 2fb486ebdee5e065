"""A search for the pictures of one upload's batch: planted answers, and where it says no."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations.layers import LayerSpans, class_of, rectangles, without
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view

ATTACK = find_attack("layer_span", {"prior": "stationary"})
SIDE = 8


def small_model(**changes: object) -> LoadedModel:
    """4 patches and a class token, width 96, three blocks: the first two show all tokens."""
    return planted_model(**{"img_size": SIDE, "depth": 3, **changes})


def seen(images: Tensor, batch: int, **changes: object) -> AttackerView:
    """What the attacker sees of these images in steps of `batch`, without their labels."""
    client = ClientConfig(batch=batch)
    view, _ = planted_view(small_model(**changes), ATTACK, "a", images=images, client=client)
    return replace(view, labels=None)


def grads_of(view: AttackerView, step: int = 0) -> dict[str, Tensor]:
    return {name: sent[step] for name, sent in view.updates[0].grads.items()}


def scores(found: Tensor, truth: Tensor) -> Tensor:
    """The PSNR of each true picture's best guess."""
    return torch.stack([psnr(guess.expand_as(truth), truth) for guess in found]).amax(0)


@pytest.mark.parametrize("batch", [2, 3])
def test_every_picture_of_a_batch_comes_back(batch: int) -> None:
    images = planted_images(batch, SIDE)
    found = ATTACK.run(seen(images, batch), generator=torch.Generator().manual_seed(0))
    assert found.images is not None
    assert scores(found.images, images).min() > 80
    assert found.diagnostics["certain"].tolist() == [1.0] * batch
    assert float(found.diagnostics["outside"].max()) < 1e-15


def test_the_pictures_of_a_batch_pass_and_their_mixtures_do_not() -> None:
    images = planted_images(2, SIDE)
    view = seen(images, 2)
    spans = LayerSpans.of(view.model, grads_of(view), 2, blocks=2)
    assert spans is not None
    mixed = images.clone()
    mixed[0, :, :, : SIDE // 2] = images[1, :, :, : SIDE // 2]
    mixed[1] = images.mean(0)
    pictures = view.model.normalize(torch.cat((images, mixed)))  # type: ignore[operator]
    passed, failed = spans.off(pictures).detach().split(2)
    assert float(passed.max()) < 1e-24
    assert float(failed.min()) > 1e-4


def test_a_last_block_shows_no_tokens_and_is_left_out() -> None:
    view = seen(planted_images(2, SIDE), 2)
    all_three = LayerSpans.of(view.model, grads_of(view), 2, blocks=3)
    assert all_three is not None
    layers = {name.removeprefix("blocks.") for name in all_three.bases}
    assert "1.mlp.fc2" in layers
    assert not any(name.startswith("2.mlp") for name in layers)
    one = seen(planted_images(2, SIDE), 2, depth=1)
    assert LayerSpans.of(one.model, {"blocks.0.mlp.fc1.weight": torch.ones(9, 96)}, 2, 1) is None


def test_a_picture_is_taken_out_of_its_batch() -> None:
    """What is left is the upload of the others alone."""
    images = planted_images(3, SIDE)
    view = seen(images, 3)
    normalised = view.model.normalize(images)  # type: ignore[operator]
    classes = [class_of(view.model, picture, grads_of(view), 3) for picture in normalised]
    assert classes == [0, 1, 2]
    left = without(view.model, grads_of(view), normalised[0], 0, 3)
    model, names = small_model(), tuple(left)
    others = torch.nn.functional.cross_entropy(
        model(normalised[1:]), torch.tensor([1, 2]), reduction="mean"
    )
    expected = torch.autograd.grad(others, [model.get_parameter(name) for name in names])
    for name, gradient in zip(names, expected, strict=True):
        assert torch.allclose(left[name], gradient, atol=1e-12), name


def test_where_nothing_is_found_the_guesses_of_batch_span_stand() -> None:
    images = planted_images(2, SIDE)
    view = seen(images, 2)
    update = view.updates[0]
    sent = dict(update.grads)
    for name in [name for name in sent if name.startswith("blocks.")]:
        sent[name] = torch.randn(sent[name].shape, generator=torch.Generator().manual_seed(1)).to(
            sent[name]
        )
    view = replace(view, updates=[replace(update, grads=sent)])
    attack = find_attack("layer_span", {"prior": "stationary", "searches": 2})
    found = attack.run(view, generator=torch.Generator())
    guessed = find_attack("batch_span", {"prior": "stationary"}).run(view, generator=None)
    assert torch.allclose(found.images, guessed.images)
    assert found.diagnostics["certain"].tolist() == [0.0, 0.0]
    assert found.diagnostics["outside"].isnan().all()


def test_too_many_tokens_are_refused_with_the_largest_batch() -> None:
    """T = 20 batches of 5 tokens > D = 96; batch_span's own condition allows twelve pictures."""
    model = planted_model(img_size=SIDE, depth=3, embed_dim=48)
    images = planted_images(10, SIDE)
    view, _ = planted_view(model, ATTACK, "a", images=images, client=ClientConfig(batch=10))
    reason = ATTACK.unsupported(view)
    assert reason is not None
    assert reason.kind == "underdetermined"
    assert str(reason).startswith("B (N + 1) = 50 tokens of a batch >= D = 48")
    assert str(reason).endswith("batches of at most 9 do")


def test_rectangles_are_all_of_a_small_grid_and_not_too_many_of_a_large_one() -> None:
    assert len(rectangles(4)) == 100
    assert len(rectangles(4).unique(dim=0)) == 100
    assert len(rectangles(14)) < 3000
