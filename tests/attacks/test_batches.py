"""One upload of a batch: what it determines, and its pictures by guesses, by layers, by matching
and by the lattice of their differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations.lattice_pictures import NormTest
from attacks.equations.layers import FOUND, LayerSpans, smallest_cut
from attacks.lattice.cost import Frame
from attacks.lattice.search import sums_of
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import labels_of_batch, make_upload
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.metrics.pictures import quantise
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.live.modules import load_module
from tests.helpers.models import planted_model
from tests.helpers.planted import best, changed, lattice_model, planted_images, planted_view, solved

SIDE, BATCH = 8, 3
MATCHING = {"prior_weight": 1e-6, "steps": 40, "restarts": 1}


def seen(
    images: Tensor,
    batch: int,
    mask: Tensor | None = None,
    victim: LoadedModel | None = None,
    attack: str = "span_matching",
    **model: object,
) -> AttackerView:
    """What is seen of these images in steps of `batch`; mask (m, N): what MJP masks. The victim is
    a ViT of 4 patches of 48 pixels, width 96 and three blocks, of which two show all tokens."""
    shape = {"img_size": SIDE, "depth": 3, "unknown_embedding": mask is not None} | model
    victim, client = victim or planted_model(**shape), ClientConfig(batch=batch)
    view, inputs = planted_view(victim, find_attack(attack), "a", images=images, client=client)
    if mask is None:
        return view
    sent = make_upload(victim, [replace(inputs, mask=mask)], client)
    return replace(view, updates=[sent])


# layer_span and span_matching ---------------------------------------------------------------------


def test_where_nothing_is_found_the_guesses_of_batch_span_stand() -> None:
    view = seen(planted_images(2, SIDE), 2)
    sent = dict(view.updates[0].grads)
    for name in [name for name in sent if name.startswith("blocks.")]:
        noise = torch.randn(sent[name].shape, generator=torch.Generator().manual_seed(1))
        sent[name] = noise.to(sent[name])
    view = changed(view, grads=sent)
    found = solved(view, "layer_span", searches=2)
    assert torch.allclose(found.images, solved(view, "batch_span").images)
    assert found.diagnostics["certain"].tolist() == [0.0, 0.0]
    assert found.diagnostics["outside"].isnan().all()


def test_the_smallest_cut_is_that_of_all_parts() -> None:
    """Beside a search through all parts of seven things."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        weights = torch.rand(7, 7, generator=generator) ** 4
        weights = weights + weights.mT
        cuts = []
        for part in range(1, 2**6):
            here = torch.tensor([bool(part >> place & 1) for place in range(7)])
            cuts.append(float(weights[here][:, ~here].sum()))
        assert smallest_cut(weights) == pytest.approx(min(cuts))


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_no_mixture_passes_where_tokens_do_not_see_each_other(scale: float) -> None:
    """Layer scale of new networks multiplies all that attention adds by next to nothing, so that a
    picture of patches of both lies in the layers' spans as each of the two does."""
    torch.manual_seed(2)
    network: Any = timm.models.VisionTransformer(
        img_size=32, embed_dim=96, depth=3, num_heads=4, num_classes=10, init_values=scale
    )
    model, images = load_module(network, mean=0.5, std=0.5), planted_images(2, 32).float()
    view = seen(images, 2, victim=model, attack="layer_span")
    grads = {name: sent[0] for name, sent in view.updates[0].grads.items()}
    spans = LayerSpans.of(model, grads, 2)
    assert spans is not None
    one, other = model.normalize(images)
    enough, mixed = FOUND * torch.finfo(torch.float32).eps ** 2, one.clone()
    mixed[:, :16] = other[:, :16]
    with torch.no_grad():
        true, mixture = spans.off(torch.stack((one, mixed))).tolist()
    assert true <= enough
    assert (mixture <= enough) == (scale < 1)
    assert spans.passes(one[None], true, enough) == (scale == 1)
    assert not spans.passes(mixed[None], mixture, enough)


def test_gradients_come_closer_and_what_mjp_masked_in_all_pictures_stays_masked() -> None:
    mask = torch.tensor([[True, False, False, False]] * 2)
    view = seen(planted_images(2, SIDE), 2, mask, depth=2)
    start, found = (solved(view, "span_matching", **{**MATCHING, "steps": n}) for n in (1, 40))
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


def of_lattice(images: Tensor, model: LoadedModel | None = None, batch: int = 0) -> AttackerView:
    """What is seen of these pictures as one batch, or as several, without labels."""
    size = batch or len(images)
    view = seen(images, size, victim=model or lattice_model(), attack="batch_lattice")
    return replace(view, labels=None)


def test_a_patch_is_told_by_itself() -> None:
    images = eight_bit(2)
    view = of_lattice(images, lattice_model(1e-4))
    frame = Frame.of(torch.ones(1, 193), view.pixels, 8)
    test = NormTest.of(view, view.updates[0], 0, 2, frame)
    assert test is not None
    one, other = np.rint(255 * to_patches(images, 8).numpy())
    alone = test.along(other - one)
    passes = [len(alone.passed(x, 2, *sums_of(4, 0))) for x in (one[2], other[2], one[2] + 1)]
    assert passes == [1, 1, 0]


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
