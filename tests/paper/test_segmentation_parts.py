"""Maps of features, heads, the loss and sliding windows."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mjp_privacy.paper import segmentation_network as windows
from mjp_privacy.paper.segmentation_network import (
    POOLED,
    PixelObjective,
    PyramidHead,
    averages,
    block_ends,
    build_segmentation,
    features,
    logits_of,
    maps_of,
    predicted,
    resized,
    starts,
)
from tests.helpers.segmentation import CLASSES, SWIN, small


def network_of(head: str, **changes: Any) -> Any:
    return build_segmentation(small(segmentation={"head": head, "channels": 16}, **changes))


@pytest.mark.parametrize("head", ["linear", "upernet"])
@pytest.mark.parametrize("changes", [{}, SWIN])
def test_heads_give_every_pixel_logits_and_all_weights_gradients(head: str, changes: Any) -> None:
    network = network_of(head, **changes)
    images = torch.randn(2, 3, 16, 16)
    logits = network(images)
    assert logits.shape == (2, CLASSES, 16, 16)
    (logits * torch.randn_like(logits)).sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("channels", [8, 32, 40])
def test_the_pyramid_sees_the_whole_picture(channels: int) -> None:
    """Each of its averages, also the one over all places, reaches logits far away and differs
    from picture to picture."""
    maps = maps_of(small())
    head = PyramidHead(maps, CLASSES, channels).eval()
    for layer in head.pooled:
        answers = [layer(torch.randn(1, channels, 1, 1)) for _ in range(20)]
        assert len({tuple((answer > 0).flatten().tolist()) for answer in answers}) > 5
    pictures = [torch.randn(1, 16, 30, 30) for _ in maps.widths]
    changed = [picture.clone() for picture in pictures]
    changed[-1][..., 25:, 25:] += 3
    with torch.no_grad():
        moved = (head(changed) - head(pictures)).abs()[0, :, :8, :8]
    assert (moved > 1e-4).any()


def test_maps_have_the_sizes_that_are_declared() -> None:
    for changes in ({}, SWIN):
        config = small(**changes)
        network = build_segmentation(config)
        maps = features(network.backbone, torch.randn(2, 3, 16, 16))
        declared = maps_of(config)
        assert tuple(one.shape[1] for one in maps) == declared.widths
        assert len(maps) == len(declared.factors)
        sides = [one.shape[-1] for one in maps]
        assert sides == ([4, 4, 4, 4] if config.family == "vit" else [4, 2])


def test_a_vits_maps_are_its_blocks_and_the_last_one_is_normed() -> None:
    assert list(block_ends(12)) == [2, 5, 8, 11]
    assert list(block_ends(4)) == [0, 1, 2, 3]
    network = network_of("linear").backbone.eval()
    images = torch.randn(1, 3, 16, 16)
    tokens = network.forward_features(images)[0, 1:]
    last = features(network, images)[-1][0]
    assert torch.allclose(last.flatten(1).T, tokens, atol=1e-6)


def test_a_swins_last_map_is_what_its_classifier_pools() -> None:
    network = build_segmentation(small(**SWIN)).backbone.eval()
    images = torch.randn(1, 3, 16, 16)
    z = network.patch_embed(images) + network.positions().unflatten(1, (4, 4))
    expected = network.norm(network.layers(z)).permute(0, 3, 1, 2)
    assert torch.allclose(features(network, images)[-1], expected, atol=1e-6)


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (3, 11), (1, 1)])
def test_averages_are_adaptive_average_pooling(size: tuple[int, int]) -> None:
    picture = torch.randn(2, 3, *size)
    for side in POOLED:
        expected = F.adaptive_avg_pool2d(picture, side)
        assert torch.allclose(averages(picture, side), expected, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_of_labelled_pixels_alone(smoothing: float) -> None:
    config = small(recipe={"label_smoothing": smoothing})
    network = build_segmentation(config)
    images, nothing = torch.randn(2, 3, 16, 16), torch.zeros(1, 16, dtype=torch.bool)
    labels = torch.randint(0, CLASSES + 1, (2, 16, 16), dtype=torch.uint8)
    loss, numbers = PixelObjective(network, config)(images, labels, nothing, torch.tensor(0.01))
    logits = network(images).movedim(1, -1)
    kept = labels > 0
    truth = labels[kept].long() - 1
    expected = F.cross_entropy(logits[kept], truth, label_smoothing=smoothing)
    assert torch.allclose(loss, expected, atol=1e-6)
    assert numbers[3] == (logits[kept].argmax(-1) == truth).float().mean()
    empty, _ = PixelObjective(network, config)(
        images, torch.zeros_like(labels), nothing, torch.tensor(0.0)
    )
    assert empty == 0


def test_windows_cover_a_picture_and_end_with_it() -> None:
    assert starts(16, 16) == [0]
    assert starts(17, 16) == [0, 1]
    assert starts(40, 16) == [0, 10, 20, 24]
    for length in range(16, 60):
        covered = {place for start in starts(length, 16) for place in range(start, start + 16)}
        assert covered == set(range(length))


def test_windows_answer_as_the_network_does_and_average_where_they_overlap() -> None:
    picture = torch.randn(3, 16, 26)
    seen: list[int] = []

    def pixelwise(images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return images * 2 + 1

    assert torch.allclose(logits_of(pixelwise, picture, 16), picture * 2 + 1, atol=1e-6)
    assert sum(seen) == 2
    numbered = iter(range(2))

    def constant(images: torch.Tensor) -> torch.Tensor:
        values = torch.tensor([float(next(numbered)) for _ in images])
        return values[:, None, None, None].expand(-1, 1, 16, 16)

    row = logits_of(constant, picture, 16)[0, 0].tolist()
    assert row == [0.0] * 10 + [0.5] * 6 + [1.0] * 10
    network = network_of("linear").eval()
    square = torch.randn(3, 16, 16)
    with torch.no_grad():
        expected = network(square[None])[0].argmax(0)
        assert torch.equal(predicted(network, square, 16, (16, 16)), expected)
        assert predicted(network, picture, 16, (31, 50)).shape == (31, 50)


@pytest.mark.parametrize("numbers", [1, 31 * 50 * 3, 1 << 26])
def test_resizing_some_classes_at_a_time_changes_no_answer(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "RESIZED", numbers)
    logits = torch.randn(7, 16, 24, generator=torch.Generator().manual_seed(0))
    logits[5] = logits[2]  # where two are equal, either will do

    def network(crops: Tensor) -> Tensor:
        return logits[None, :, :, :16].expand(len(crops), -1, -1, -1)

    picture = torch.zeros(3, 16, 16)
    whole = resized(logits_of(network, picture, 16)[None], (31, 50))[0]
    answer = predicted(network, picture, 16, (31, 50))
    assert torch.equal(whole.gather(0, answer[None])[0], whole.amax(0))
