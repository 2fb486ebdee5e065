"""Learning rate, weight decay and batches against timm's, torch's and Pillow's own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.scheduler import CosineLRScheduler
from torch.nn import functional as F

from mjp_privacy.data import Preprocessing, open_images
from mjp_privacy.training.batches import (
    Examples,
    FileBatches,
    MemoryBatches,
    decode_all,
    epoch_order,
    find_examples,
)
from mjp_privacy.training.learner import (
    Objective,
    build_network,
    build_optimizer,
    clipped,
    learning_rate,
)
from mjp_privacy.training.processes import World
from tests.helpers.training import class_folders, small

ONE = World(torch.device("cpu"))


def test_the_learning_rate_is_timms() -> None:
    config = small(recipe={"epochs": 10, "warmup_epochs": 2, "lr": 0.01, "min_lr": 1e-4})
    parameter = torch.nn.Parameter(torch.zeros(1))
    theirs = CosineLRScheduler(
        torch.optim.SGD([parameter], lr=0.01),
        t_initial=10 * 7,
        lr_min=1e-4,
        warmup_t=2 * 7,
        warmup_lr_init=1e-6,
        t_in_epochs=False,
    )
    for step in range(70):
        assert learning_rate(config, step, 7) == pytest.approx(theirs._get_lr(step)[0], rel=1e-12)


def test_the_papers_rate_follows_the_batch() -> None:
    assert small(recipe={"lr": None, "batch": 1024}).lr == pytest.approx(1e-3)
    assert small(recipe={"lr": None, "batch": 256}).lr == pytest.approx(2.5e-4)


@pytest.mark.parametrize(("init", "decays"), [("paper", True), ("controlled", False)])
def test_only_the_papers_positions_decay(init: str, decays: bool) -> None:
    config = small(jigsaw={"position_init": init})
    model = build_network(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay = {
        names[id(parameter)]: group["weight_decay"]
        for group in build_optimizer(model, config).param_groups
        for parameter in group["params"]
    }
    assert set(decay) == set(names.values())
    assert decay["cls_token"] == decay["head.bias"] == decay["blocks.0.norm1.weight"] == 0
    assert decay["head.weight"] == decay["blocks.0.attn.qkv.weight"] == 0.05
    for name in ("pos_embed", "unk_embed"):
        assert decay[name] == (0.05 if decays else 0)


def test_positions_start_as_the_switch_says_and_the_rest_alike() -> None:
    kinds = ("paper", "controlled")
    paper, controlled = (build_network(small(jigsaw={"position_init": kind})) for kind in kinds)
    baseline = build_network(small(model={"unknown_embedding": False, "dal": "none"}))
    assert paper.table.std().item() == pytest.approx(1, abs=0.15)
    assert controlled.table.std().item() == pytest.approx(0.02, rel=0.2)
    assert torch.equal(controlled.table, baseline.table)
    shared = dict(baseline.named_parameters())
    for model in (paper, controlled):
        for name, parameter in model.named_parameters():
            if name in shared and name != "pos_embed":
                assert torch.equal(parameter, shared[name]), name


def test_the_gradient_is_clipped_to_its_norm() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0, 0]), torch.tensor([0, 4.0])
    assert clipped(parameters, None).item() == pytest.approx(5)
    assert torch.equal(parameters[0].grad, torch.tensor([3.0, 0, 0]))
    assert clipped(parameters, 1.0).item() == pytest.approx(5)
    after = torch.cat([p.grad for p in parameters if p.grad is not None])
    assert after.norm().item() == pytest.approx(1, abs=1e-4)


def test_the_loss_is_cross_entropy_plus_lambda_dal() -> None:
    config = small(model={"drop_path": 0})
    model = build_network(config)
    images, labels = torch.randn(4, 3, 28, 28), torch.tensor([0, 1, 2, 0])
    mask = torch.arange(16)[None] < 5
    loss, numbers = Objective(model, config)(images, labels, mask, torch.tensor(0.5))
    target, prediction = model.dal(mask[0])
    dal = (target - prediction).abs().mean()
    entropy = F.cross_entropy(model(images, mask), labels, label_smoothing=0.1)
    assert loss.item() == pytest.approx((entropy + 0.5 * dal).item(), rel=1e-6)
    assert numbers[1:3].tolist() == pytest.approx([entropy.item(), dal.item()], rel=1e-6)
    normalized = Objective(model, small(jigsaw={"dal_target": "normalized"}))
    target, prediction = model.dal(mask[0], normalize=True)
    expected = (target - prediction).abs().mean().item()
    _, numbers = normalized(images, labels, mask, torch.tensor(0.5))
    assert numbers[2].item() == pytest.approx(expected, rel=1e-6)


def test_soft_targets_are_not_smoothed_again() -> None:
    config = small(model={"dal": "none", "drop_path": 0})
    model = build_network(config)
    images, soft = torch.randn(2, 3, 28, 28), torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    mask = torch.zeros(1, 16, dtype=torch.bool)
    expected = -(soft * model(images, mask).log_softmax(-1)).sum(-1).mean()
    loss, _ = Objective(model, config)(images, soft, mask, torch.tensor(0.01))
    assert loss.item() == pytest.approx(expected.item())


# batches ------------------------------------------------------------------------------------------


@pytest.fixture
def examples(tmp_path: Path) -> Examples:
    return find_examples(small(), class_folders(tmp_path / "data"), None)[0]


def test_an_epoch_is_a_permutation_and_repeats_stand_together() -> None:
    assert sorted(epoch_order(0, 1, 20, 1).tolist()) == list(range(20))
    assert epoch_order(0, 1, 20, 1).tolist() != epoch_order(0, 2, 20, 1).tolist()
    repeated = epoch_order(0, 1, 20, 3).tolist()
    assert len(repeated) == 20
    assert len(set(repeated)) == 7
    assert repeated[:3] == [repeated[0]] * 3


def test_memory_holds_the_pixels_of_the_files(examples: Examples) -> None:
    images = decode_all(examples, 28)
    for place in (0, 17, 35):
        record = examples.records[place]
        with Image.open(examples.source.path / record.image_id) as picture:
            expected = Preprocessing(28, 28)(picture)
        assert torch.equal(images[place].float() / 255, expected)


def test_crops_and_flips_are_windows_of_the_padded_image(examples: Examples) -> None:
    config = small()
    batches = MemoryBatches(config, examples, ONE)
    images = batches.images[:6]
    padded = F.pad(images, (2, 2, 2, 2))
    flips = 0
    for step in range(8):
        for image, made in zip(padded, batches._augmented(images, step, slice(0, 6)), strict=True):
            windows = image.unfold(1, 28, 1).unfold(2, 28, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
            plain = (windows == made).flatten(1).all(1).any()
            mirrored = (windows.flip(-1) == made).flatten(1).all(1).any()
            assert plain or mirrored
            flips += int(not plain)
    assert 10 < flips < 38


def test_resized_batches_are_what_the_evaluation_feeds(tmp_path: Path) -> None:
    """Stored at 16 and enlarged to 28 in the batch: Pillow's bicubic but for its rounding.

    In mid-tones: Pillow also clips between its two passes.
    """
    folder = tmp_path / "data" / "class_0"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(4):
        pixels = rng.integers(90, 166, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    source = open_images(tmp_path / "data")
    config = small(data={"native_size": 16})
    batches = MemoryBatches(config, Examples(source, source.records), ONE)
    images, _ = next(batches.in_order(4))
    pixels = images * 0.25 + 0.5
    for record, image in zip(source.records, pixels, strict=True):
        expected = Preprocessing(28, 28)(source.decode(record))
        assert (image - expected).abs().max() < 1.5 / 255


def test_an_epoch_can_be_entered_in_its_middle(examples: Examples) -> None:
    for batches in (
        MemoryBatches(small(), examples, ONE),
        FileBatches(small(), examples, ONE, workers=0),
    ):
        whole = list(batches.epoch(1, 0, 6))
        rest = list(batches.epoch(1, 4, 6))
        assert len(whole) == 6
        for (images, labels), (again, same) in zip(whole[4:], rest, strict=True):
            assert torch.equal(images, again)
            assert torch.equal(labels, same)


def test_an_epoch_is_the_same_with_any_number_of_workers(examples: Examples) -> None:
    config = small(
        augmentation={"rand_augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5, "repeats": 2},
        data={"store": "files"},
    )
    here = list(FileBatches(config, examples, ONE, workers=0).epoch(0, 0, 3))
    there = list(FileBatches(config, examples, ONE, workers=2).epoch(0, 0, 3))
    for (images, labels), (again, same) in zip(here, there, strict=True):
        assert torch.equal(images, again)
        assert torch.equal(labels, same)
        assert images.shape == (6, 3, 28, 28)


@pytest.mark.parametrize("kind", [MemoryBatches, FileBatches])
def test_processes_share_out_a_global_batch(examples: Examples, kind: type) -> None:
    more = {"workers": 0} if kind is FileBatches else {}
    whole = list(kind(small(), examples, ONE, **more).epoch(0, 0, 2))
    worlds = [World(torch.device("cpu"), rank, 2) for rank in (0, 1)]
    parts = [list(kind(small(), examples, world, **more).epoch(0, 0, 2)) for world in worlds]
    for (images, labels), first, second in zip(whole, *parts, strict=True):
        assert torch.equal(torch.stack((first[0], second[0]), 1).flatten(0, 1), images)
        assert torch.equal(torch.stack((first[1], second[1]), 1).flatten(), labels)
    seen = [
        torch.cat([y for _, y in kind(small(), examples, w, **more).in_order()]) for w in worlds
    ]
    assert len(seen[0]) + len(seen[1]) == len(examples)
