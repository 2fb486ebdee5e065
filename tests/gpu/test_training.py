"""Training on the accelerator: it learns, and a step never makes the host wait."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mjp_privacy.training.batches import find_examples
from mjp_privacy.training.journal import read_metrics
from mjp_privacy.training.processes import World
from mjp_privacy.training.puzzles import blockwise_masks, shuffled_orders
from mjp_privacy.training.trainer import Trainer, make_batches, train
from tests.helpers.training import class_folders, small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_run_learns_colours(tmp_path: Path, precision: str) -> None:
    data = class_folders(tmp_path / "data")
    config = small(recipe={"epochs": 12, "precision": precision})
    train(config, data=data, val=data, out=tmp_path / "run", device="cuda")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["val_top1"] == 100.0


@pytest.mark.parametrize("mask_per", ["batch", "image"])
def test_a_step_does_not_synchronise(tmp_path: Path, mask_per: str) -> None:
    jigsaw = {"mask_per": mask_per, "first_epoch": 0, "share": 1.0}
    config = small(jigsaw=jigsaw, recipe={"epochs": 9, "precision": "bfloat16"})
    examples, _ = find_examples(config, class_folders(tmp_path / "data"), None)
    world = World(torch.device("cuda"))
    batches = make_batches(config, examples, world, 0)
    trainer = Trainer(config, batches, None, tmp_path, world, len(examples))
    stream = batches.epoch(0, 0, 6)
    trainer._train_step(*next(stream))  # allocates the optimiser's state
    torch.cuda.set_sync_debug_mode("error")
    try:
        for images, labels in stream:
            trainer.step += 1
            trainer._train_step(images, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_masks_on_the_device_are_distributed_as_on_the_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator(device).manual_seed(0)
        masks = blockwise_masks(2000, grid=14, gamma=0.27, generator=generator)
        orders = shuffled_orders(masks, generator)
        places = torch.arange(196, device=device).expand_as(orders)
        assert torch.equal(orders[~masks], places[~masks])
        found.append(masks.sum(1).double().cpu())
    assert abs(found[0].mean() - found[1].mean()) < 0.1
