"""The accelerator gives the CPU's numbers, splits what its memory does not hold, and trains."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from attacks import find_attack
from mjp_privacy.core.machine import free_bytes
from mjp_privacy.experiment.cell import TOGETHER
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.run import run_experiment
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.training.batches import World, find_examples, make_batches
from mjp_privacy.training.learner import blockwise_masks, shuffled_orders
from mjp_privacy.training.run_files import whole_lines
from mjp_privacy.training.trainer import Trainer, train
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_view
from tests.helpers.runs import KEYS, MJP, cells, photographs, rows, same_rows, tiny
from tests.helpers.training import class_folders, small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
STATIONARY = {"prior": "stationary"}


@pytest.mark.parametrize(
    ("name", "options", "setting", "most"),
    [
        ("patch_gradient", {}, "c", 1),
        ("patch_prior", STATIONARY, "c", 1),
        ("masked_span", STATIONARY, "c", 1),
        ("masked_span", {"completion": "patch", **STATIONARY}, "c", 1),
        ("multi_round", {"uploads": 6, **STATIONARY}, "c", 1),
        ("token_span", STATIONARY, "c", 1),
        ("pixel_lattice", STATIONARY, "c", 1),
        *((name, {}, s, 1e-6) for name in ("april", "april_unk_aware") for s in ("a", "b")),
    ],
)
def test_the_device_does_not_matter(
    name: str, options: dict[str, object], setting: str, most: float
) -> None:
    attack, found = find_attack(name, options), []
    for device in ("cpu", "cuda"):
        width = 160 if setting == "c" else 96
        model = planted_model(unknown_embedding=True, embed_dim=width).to(device)
        view, _ = planted_view(model, attack, setting)
        assert attack.unsupported(view) is None
        found.append(attack.run(view, generator=torch.Generator()).images.cpu())
    assert psnr(found[1], found[0]).min() > 60
    assert (found[1] - found[0]).abs().max() <= most


def test_whole_run(tmp_path: Path) -> None:
    values = []
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        config = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"
        assert run_experiment(config, out=out, limit=4, device=device).exit_code == 0
        exact = [cell["run_id"] for cell in cells(out) if cell["dtype"] == "float64"]
        found = rows(out, exact)
        scores = found[found["variant"].isin(["paper", "standard"])]
        values.append(scores["value"].clip(upper=60).to_numpy())
    assert values[0].shape == values[1].shape
    assert pd.Series(abs(values[0] - values[1])).max() <= 0.05


def config() -> dict[str, Any]:
    grid = [{"models": ["MJP"], "settings": ["c"], "gammas": [0.5]}]
    wide = {**MJP, "img_size": 128, "embed_dim": 768, "num_heads": 12}
    attacks = [{"name": "patch_gradient"}]
    return tiny(dtypes=["float64"], block=6, models={"MJP": wide}, grid=grid, attacks=attacks)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A process that may take little more of the GPU than it has."""
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved()
    share = (taken + 200 * 2**20) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_real_lack_of_memory_splits_a_block(tmp_path: Path, little_memory: None) -> None:
    images = photographs(tmp_path / "images")
    summary = run_experiment(config(), images=images, out=tmp_path / "cramped", device="cuda")
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert summary.exit_code == 0, summary
    run_experiment(config(), images=images, out=tmp_path / "roomy", device="cuda")
    cramped, roomy = (rows(tmp_path / name) for name in ("cramped", "roomy"))
    split = cramped["metric"] == TOGETHER
    assert split.any(), "memory sufficed: the test shows nothing"
    left = cramped[~split].sort_values(KEYS)["value"].clip(upper=60).to_numpy()
    right = roomy.sort_values(KEYS)["value"].clip(upper=60).to_numpy()
    assert pd.Series(abs(left - right)).max() <= 1e-3


def test_free_memory_is_that_of_the_device() -> None:
    device = torch.device("cuda")
    before = free_bytes(device)
    held = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    after = free_bytes(device)
    assert before is not None
    assert after is not None
    assert before - after >= len(held) - 2**21


def test_one_worker_for_each_gpu_gives_the_rows_of_one_process(tmp_path: Path) -> None:
    images = photographs(tmp_path / "images")
    engine = EngineConfig(kind="local")
    run_experiment(tiny(), images=images, out=tmp_path / "here", device="cuda")
    run_experiment(tiny(), images=images, out=tmp_path / "local", device="cuda", engine=engine)
    same_rows(tmp_path / "here", tmp_path / "local")


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_run_learns_colours(tmp_path: Path, precision: str) -> None:
    data, val = (class_folders(tmp_path / name) for name in ("data", "val"))
    config = small(recipe={"epochs": 12, "precision": precision})
    train(config, data=data, val=val, out=tmp_path / "run", device="cuda")
    assert whole_lines(tmp_path / "run" / "metrics.jsonl")[0][-1]["val_top1"] == 100.0


def test_a_step_does_not_synchronise(tmp_path: Path) -> None:
    jigsaw = {"first_epoch": 0, "share": 1.0}
    config = small(jigsaw=jigsaw, recipe={"epochs": 9, "precision": "bfloat16"})
    examples, _ = find_examples(config, class_folders(tmp_path / "data"), None)
    world = World(torch.device("cuda"))
    batches = make_batches(config, examples, world, 0)
    trainer = Trainer(config, batches, None, tmp_path, world, len(examples))
    stream = batches.epoch(0, 0, 6)
    trainer.learner.train_step(0, *next(stream))  # allocates the optimiser's state
    torch.cuda.set_sync_debug_mode("error")
    try:
        for images, labels in stream:
            trainer.step += 1
            trainer.learner.train_step(trainer.step, images, labels)
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
