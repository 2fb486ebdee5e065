"""A folder with small inputs for every command, and the commands themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE = 56
CLASSES = ("ants", "bees", "cats")
ATTACK: dict[str, Any] = {
    "name": "crash",
    "block": 3,
    "models": {"plain": {"model": "cifar_vit"}, "MJP": {"model": "cifar_vit_mjp"}},
    "grid": [
        {"models": ["plain"], "settings": ["a"]},
        {"models": ["MJP"], "settings": ["b", "c"], "gammas": [0.27]},
    ],
    "attacks": [{"name": "april"}, {"name": "masked_span"}],
}
MODEL = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 40,
    "depth": 1,
    "num_heads": 2,
    "num_classes": len(CLASSES),
    "mean": [0.5, 0.5, 0.5],
    "std": [0.25, 0.25, 0.25],
}
RECIPE = {"epochs": 12, "batch": 6, "lr": 0.003, "warmup_epochs": 0.5, "precision": "float32"}
AUGMENTATION = {"rand_augment": None, "mixup": 0, "cutmix": 0, "erasing": 0, "repeats": 1}
TRAINING: dict[str, Any] = {
    "name": "crash",
    "log_every": 2,
    "checkpoint_minutes": 0,
    "model": {**MODEL, "unknown_embedding": True, "dal": "nonlinear"},
    "recipe": RECIPE,
    "augmentation": {**AUGMENTATION, "crop_padding": 2},
    "jigsaw": {"shuffle": "patches", "gamma": 0.5},
    "data": {"store": "memory"},
}
FEDERATION: dict[str, Any] = {
    "name": "crash",
    "rounds": 6,
    "model": MODEL,
    "clients": {"number": 4, "per_round": 2},
    "client": {"batch": 1},
    "server": {"optimizer": "sgd", "lr": 0.1},
    "record": {"rounds": [1, 3], "images": 3, "probes": [{"uploads": 1}]},
    "attacks": [{"name": "april"}, {"name": "patch_gradient"}],
    "evaluate_every": 2,
}


@dataclass(frozen=True)
class Workplace:
    """Workplace(folder, images=12).prepare() writes the inputs; `words` are the commands."""

    root: Path
    images: int = 12

    def prepare(self) -> Workplace:
        """Write configs and photographs."""
        for name, config in (("attack", ATTACK), ("train", TRAINING), ("federate", FEDERATION)):
            (self.root / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
        random = np.random.default_rng(7)
        for label in CLASSES:
            for number in range(8):
                self._picture(random, self.root / "classes" / label / f"{number}.png")
        for number in range(12):
            same = self._picture(random, self.root / "photos" / f"{number}.png")
            noise = random.normal(0, 9, same.shape)
            (self.root / "guesses").mkdir(exist_ok=True)
            guess = (same + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(guess).save(self.root / "guesses" / f"{number}.png")
        return self

    def _picture(self, random: np.random.Generator, path: Path) -> np.ndarray:
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(20, 236, (6, 6, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        Image.fromarray(pixels).save(path)
        return pixels

    def words(self, command: str, out: Path, *more: str) -> list[str]:
        """The command line of a command that writes to `out`."""
        here = self.root
        data, cpu = ["--data", str(here / "classes")], ["--device", "cpu"]
        done, attacked = here / "undisturbed", here / "undisturbed" / "attack"
        photos = ["--images", str(here / "photos")]
        lines: dict[str, list[str]] = {
            "attack": [
                str(here / "attack.yaml"),
                *("--images", "embedded", *cpu, "--limit", str(self.images)),
            ],
            "report": [str(attacked)],
            "score": [
                *("--reference", str(here / "photos")),
                *("--reconstruction", str(here / "guesses"), *cpu),
            ],
            "sample": ["--from", str(here / "classes"), "--per-class", "6"],
            "train": [str(here / "train.yaml"), *data, *cpu, "--threads", "1"],
            "evaluate": ["--checkpoint", str(done / "train" / "model.safetensors"), *data, *cpu],
            "curves": [str(done / "train")],
            "federate": [str(here / "federate.yaml"), *data, *cpu, "--threads", "1"],
            "compare": [str(done / "federate")],
            "check": [str(done / "federate" / "uploads")],
            "fit-prior": [*photos, "--patch", "8"],
            "list": [],
        }
        written = {"score": "scores.csv", "fit-prior": "prior.safetensors", "evaluate": "table.md"}
        to = [] if command in ("check", "list") else ["--out", str(out / written.get(command, ""))]
        return [command, *lines[command], *to, *more]


RESUMING = ("attack", "train", "federate")
"""Commands that go on from where they were stopped."""
WRITING = (*RESUMING, "report", "score", "sample", "fit-prior")
"""Commands whose disk is filled."""
EVERY = (*WRITING, "evaluate", "curves", "compare", "check", "list")
