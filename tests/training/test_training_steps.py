"""One step of a training: its rate, loss, masks and batches, against timm's, torch's,
Pillow's and the authors' own."""

import math
import random
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.scheduler import CosineLRScheduler
from torch import Tensor
from torch.nn import functional as F

from mjp_privacy.data import Preprocessing, open_images
from mjp_privacy.models.jigsaw import Grid, blockwise_mask, shuffle_patches, to_images, to_patches
from mjp_privacy.training.batches import (
    Batches,
    Examples,
    MemoryBatches,
    World,
    decode_all,
    epoch_order,
    find_examples,
    make_batches,
)
from mjp_privacy.training.learner import (
    CHUNK,
    Objective,
    Puzzles,
    apply,
    blockwise_masks,
    build_network,
    build_optimizer,
    learning_rate,
    shuffled_orders,
)
from tests.helpers.training import class_folders, small

CPU = torch.device("cpu")
ONE = World(CPU)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# the optimiser and the loss -----------------------------------------------------------------------


def test_the_learning_rate_is_timms() -> None:
    config = small(recipe={"epochs": 10, "warmup_epochs": 2, "lr": 0.01, "min_lr": 1e-4})
    theirs = CosineLRScheduler(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01),
        t_initial=10 * 7,
        lr_min=1e-4,
        warmup_t=2 * 7,
        warmup_lr_init=1e-6,
        t_in_epochs=False,
    )
    for step in range(70):
        assert learning_rate(config, step, 7) == pytest.approx(theirs._get_lr(step)[0], rel=1e-12)
    for batch, rate in ((1024, 1e-3), (256, 2.5e-4)):  # the paper's follows the batch
        assert small(recipe={"lr": None, "batch": batch}).lr == pytest.approx(rate)


def test_only_the_papers_positions_start_at_one_and_decay() -> None:
    baseline = build_network(small(model={"unknown_embedding": False, "dal": "none"}))
    shared = dict(baseline.named_parameters())
    for init, spread, decay in (("paper", 1, 0.05), ("controlled", 0.02, 0)):
        config = small(jigsaw={"position_init": init})
        model = build_network(config)
        assert model.table.std().item() == pytest.approx(spread, rel=0.2)
        assert torch.equal(model.table, baseline.table) == (init == "controlled")
        for name, parameter in model.named_parameters():
            if name in shared and name != "pos_embed":
                assert torch.equal(parameter, shared[name]), name
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {
            names[id(parameter)]: group["weight_decay"]
            for group in build_optimizer(model, config).param_groups
            for parameter in group["params"]
        }
        assert set(found) == set(names.values())
        assert found["cls_token"] == found["head.bias"] == found["blocks.0.norm1.weight"] == 0
        assert found["head.weight"] == found["blocks.0.attn.qkv.weight"] == 0.05
        assert found["pos_embed"] == found["unk_embed"] == decay


def test_the_loss_is_cross_entropy_plus_lambda_dal_and_smooths_no_soft_targets() -> None:
    model, weight = build_network(small(model={"drop_path": 0})), torch.tensor(0.5)
    images, labels = torch.randn(4, 3, 28, 28), torch.tensor([0, 1, 2, 0])
    soft, mask = torch.rand(4, 3).softmax(-1), torch.arange(16)[None] < 5
    logits = model(images, mask)
    entropies = (
        (labels, F.cross_entropy(logits, labels, label_smoothing=0.1).item()),
        (soft, -(soft * logits.log_softmax(-1)).sum(-1).mean().item()),
    )
    for normalize, target in ((False, "raw"), (True, "normalized")):
        goal, prediction, visible = model.localize(mask[0], normalize=normalize)
        dal = (goal - prediction)[visible].abs().mean().item()
        objective = Objective(model, small(jigsaw={"dal_target": target}))
        for targets, entropy in entropies:
            loss, numbers = objective(images, targets, mask, weight)
            assert loss.item() == pytest.approx(entropy + 0.5 * dal, rel=1e-6)
            assert numbers[1:3].tolist() == pytest.approx([entropy, dal], rel=1e-6)


# batches ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    return find_examples(small(), class_folders(tmp_path_factory.mktemp("data")), None)[0]


def batches(kind: str, examples: Examples, world: World = ONE) -> Batches:
    """Of images in memory, or of files by so many workers."""
    if kind == "memory":
        return MemoryBatches(small(), examples, world)
    config = small(
        augmentation={"rand_augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5, "repeats": 2},
        data={"store": "files"},
    )
    return make_batches(config, examples, world, workers=int(kind))


def assert_equal(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["memory", "0"])
def test_an_epoch_is_entered_in_its_middle_and_shared_out(examples: Examples, kind: str) -> None:
    whole = list(batches(kind, examples).epoch(1, 0, 6))
    assert_equal(whole[4:], list(batches(kind, examples).epoch(1, 4, 6)))
    shared = [batches(kind, examples, World(CPU, rank, 2)) for rank in (0, 1)]
    parts = zip(*(part.epoch(1, 0, 6) for part in shared), strict=True)
    joined = [
        (torch.stack((x, y), 1).flatten(0, 1), torch.stack((a, b), 1).flatten())
        for (x, a), (y, b) in parts
    ]
    assert_equal(whole, joined)
    seen = [sum(len(labels) for _, labels in part.in_order()) for part in shared]
    assert sum(seen) == len(examples)
    last = batches(kind, examples, World(CPU, 50, 51))  # more processes than images
    assert list(last.in_order()) == []
    if kind == "0":  # any number of workers
        assert_equal(whole, list(batches("2", examples).epoch(1, 0, 6)))
    repeated = epoch_order(0, 1, 20, 3).tolist()
    assert [len(list(copies)) for _, copies in groupby(repeated)] == [3] * 6 + [2]
    assert sorted(epoch_order(0, 1, 20, 1).tolist()) == list(range(20))


def test_crops_and_flips_are_windows_of_the_padded_image(examples: Examples) -> None:
    kept, config = decode_all(examples, 28), small()
    padded, flips = F.pad(kept, (2, 2, 2, 2)), 0
    for epoch in range(2):
        order = epoch_order(0, epoch, len(kept), 1)
        made = [images for images, _ in MemoryBatches(config, examples, ONE).epoch(epoch, 0, 4)]
        for place, image in zip(order.tolist(), torch.cat(made), strict=False):
            pixels = ((image * 0.25 + 0.5) * 255).round().to(torch.uint8)
            windows = padded[place].unfold(1, 28, 1).unfold(2, 28, 1)
            windows = windows.permute(1, 2, 0, 3, 4).flatten(0, 1)
            plain = (windows == pixels).flatten(1).all(1).any()
            assert plain or (windows.flip(-1) == pixels).flatten(1).all(1).any()
            flips += int(not plain)
    assert 10 < flips < 38


@pytest.mark.parametrize(("kept", "within"), [(28, 1e-6), (16, 1.5 / 255)])
def test_batches_from_memory_are_what_the_evaluation_feeds(
    tmp_path: Path, kept: int, within: float
) -> None:
    """Enlarged in the batch: Pillow's bicubic but for its rounding, in mid-tones, for Pillow also
    clips between its two passes."""
    folder, rng = tmp_path / "data" / "class_0", np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(4):
        pixels = rng.integers(90, 166, (kept, kept, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    source = open_images(tmp_path / "data")
    made = MemoryBatches(small(data={"native_size": kept}), Examples(source, source.records), ONE)
    images, _ = next(made.in_order(4))
    for record, image in zip(source.records, images * 0.25 + 0.5, strict=True):
        expected = Preprocessing(28, 28)(source.decode(record))
        assert (image - expected).abs().max() < within


# masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grid", "gamma"), [(14, 0.27), (8, 0.03), (8, 0.9), (4, 0.5)])
def test_the_masks_are_distributed_as_the_authors(grid: int, gamma: float) -> None:
    """Four standard errors of the difference, on the count and on every position: as with more
    attempts than a mask is given, since the authors' have no end."""
    many, few = 1200, 600
    fast = blockwise_masks(many, grid=grid, gamma=gamma, generator=generator()).double()
    rng = random.Random(1)
    slow = torch.stack([blockwise_mask(Grid(grid, grid), gamma, rng) for _ in range(few)]).double()
    empty = ((fast.sum(1) == 0).double(), (slow.sum(1) == 0).double())
    for one, other in ((fast.sum(1), slow.sum(1)), empty):
        error = math.sqrt(one.var() / len(one) + other.var() / len(other))
        assert abs(one.mean() - other.mean()) <= 4 * error + 1e-12
    share = slow.mean(0)
    error = torch.sqrt(share * (1 - share) * (1 / many + 1 / few)) + 2e-3
    assert bool(((fast.mean(0) - share).abs() < 4.5 * error).all())
    assert fast.sum(1).max() <= int(grid * grid * gamma)
    assert torch.equal(
        fast, blockwise_masks(many, grid=grid, gamma=gamma, generator=generator()).double()
    )
    assert not blockwise_masks(50, grid=grid, gamma=0.0, generator=generator()).any()


def test_permutations_shuffle_the_masked_patches_among_themselves() -> None:
    masks = blockwise_masks(400, grid=6, gamma=0.4, generator=generator())
    orders = shuffled_orders(masks, generator(5))
    places = torch.arange(36).expand_as(orders)
    assert torch.equal(orders.sort(-1).values, places)
    assert torch.equal(orders[~masks], places[~masks])
    assert bool(masks.gather(1, orders)[masks].all())
    mask = torch.tensor([[True, False, True, True]]).expand(6000, 4)
    _, counts = shuffled_orders(mask, generator(2)).unique(dim=0, return_counts=True)
    assert len(counts) == 6  # each is equally likely
    assert bool(((counts - 1000).abs() < 4.5 * math.sqrt(1000 * 5 / 6)).all())


def test_half_of_the_steps_after_the_first_epoch_are_shuffled() -> None:
    config = small(recipe={"epochs": 100}, jigsaw={"first_epoch": 10})
    puzzles = Puzzles(config, 40, CPU)
    assert not any(puzzles.shuffled(step) for step in range(400))
    later = sum(puzzles.shuffled(step) for step in range(400, 4000))
    assert abs(later - 1800) < 4 * math.sqrt(3600 / 4)
    always = Puzzles(replace(config, jigsaw=replace(config.jigsaw, share=1.0)), 40, CPU)
    never = Puzzles(replace(config, jigsaw=replace(config.jigsaw, shuffle="none")), 40, CPU)
    assert all(always.shuffled(step) for step in range(400, 900))
    assert not any(never.shuffled(step) for step in range(4000))


def test_a_steps_mask_follows_from_its_number() -> None:
    config = small(jigsaw={"share": 1.0, "first_epoch": 0})
    one, other = Puzzles(config, 10, CPU), Puzzles(config, 10, CPU)
    drawn = [other.at(step) for step in (5, CHUNK, CHUNK - 1, 7, 0)]
    for step, there in zip((0, 7, CHUNK - 1, CHUNK, 5), reversed(drawn), strict=True):
        here = one.at(step)
        assert here.mask.shape == (1, 16)
        torch.testing.assert_close((here.mask, here.permutation), (there.mask, there.permutation))
    assert not torch.equal(one.at(0).permutation, one.at(1).permutation)


@pytest.mark.parametrize("shuffle", ["patches", "patches_and_pixels"])
def test_images_are_fed_as_the_attacked_client_shuffles_them(shuffle: str) -> None:
    """SPP also gives all patches one order of their pixels, of the seed."""
    plain = {"unknown_embedding": False, "dal": "none"}
    jigsaw = {"shuffle": shuffle, "share": 1.0, "first_epoch": 0}
    one, same, other = (
        Puzzles(replace(small(model=plain, jigsaw=jigsaw), seed=seed), 10, CPU).at(0)
        for seed in (0, 0, 1)
    )
    images = torch.rand(6, 3, 28, 28)
    assert one.permutation is not None
    expected = shuffle_patches(images, one.permutation.expand(6, -1), 7)
    assert (one.pixels is not None) == (shuffle == "patches_and_pixels")
    if one.pixels is not None:
        assert sorted(one.pixels.tolist()) == list(range(49)) != one.pixels.tolist()
        assert sorted(one.permutation[0].tolist()) == list(range(16))
        values = to_patches(expected, 7).unflatten(-1, (3, 49))[..., one.pixels]
        expected = to_images(values.flatten(-2), Grid(4, 4), 7)
    assert torch.equal(apply(one, images, 7), expected)
    assert torch.equal(apply(same, images, 7), expected)
    assert not torch.equal(apply(other, images, 7), expected)
