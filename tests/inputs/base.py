"""Small valid inputs of every command, from which bad ones are made, and a command called in a
folder of them, with bounds on what it takes; what no bad input may cause.

images/, images.zip, classes/, held_out/, reference/, reconstruction/   pictures
model.safetensors, model.pth, official_mjp.safetensors       checkpoints of random weights
experiment.yaml, uploads.yaml, training.yaml, federation.yaml, site.yaml
run/, federation/, uploads/, trained/, prior.safetensors     what the commands made of them
"""

import io
import json
import re
import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from mjp_privacy.cli import main
from mjp_privacy.models import load_model
from mjp_privacy.uploads.record import save_weights
from tests.helpers import federations, training
from tests.helpers.runs import photographs

SIDE, PATCH = 32, 8
UPLOAD = "b1s1_r00000_000_at00000"

MODEL = {**federations.MODEL, "num_classes": 5, "mean": [0.5] * 3, "std": [0.25] * 3}
MODELS = {"M": {**MODEL, "checkpoint": "random", "mean": 0.5, "std": 0.25}}
EXPERIMENT: dict[str, Any] = {
    "name": "small",
    "block": 2,
    "attacks": [{"name": "patch_gradient", "label": "leak", "options": {}}],
    "models": MODELS,
    "grid": [{"models": ["M"], "settings": ["a"], "gammas": [0.5], "attacks": ["leak"]}],
    "client": {"batch": 1},
    "dtypes": ["float32"],
    "seed": 0,
}
UPLOADS: dict[str, Any] = {
    "name": "uploads",
    "attacks": [
        {"name": "patch_gradient"},
        {"name": "masked_span", "options": {"prior": "stationary"}},
        {"name": "multi_round", "options": {"uploads": 2, "prior": "stationary"}},
    ],
}
TRAINING = training.content(model=MODEL, recipe={"epochs": 1, "batch": 4}, seed=0)
FEDERATION = federations.content(
    rounds=2,
    model={**MODEL, "unknown_embedding": True},
    gamma=0.5,
    data={"store": "memory"},
    clients={"number": 2, "per_round": 2, "split": "iid", "alpha": 0.5},
    client={"batch": 1, "plain_share": 0.0},
    record={"rounds": [0], "images": 2, "probes": [{"batch": 1, "uploads": 2}]},
    attacks=[{"name": "grey"}],
    seed=0,
)
SITE: dict[str, Any] = {"engine": {"kind": "here"}}

CONFIGS = {
    "experiment.yaml": EXPERIMENT,
    "uploads.yaml": UPLOADS,
    "training.yaml": TRAINING,
    "federation.yaml": FEDERATION,
    "site.yaml": SITE,
}

COMMANDS: dict[str, list[str]] = {
    "prior": ["fit-prior", "--images", "images", "--patch", "8", "--out", "prior.safetensors"],
    "run": ["attack", "experiment.yaml", "--images", "images", "--out", "run"],
    "federation": ["federate", "federation.yaml", "--data", "classes", "--out", "federation"],
    "trained": [
        *("train", "training.yaml", "--data", "classes"),
        *("--val", "held_out", "--out", "trained"),
    ],
}
"""How what is made by commands is made, each in the folder of all inputs."""


def write_base(folder: Path) -> None:
    """Make all of it in an empty folder; raises if a command does not end well."""
    photographs(folder / "images", 4)
    shutil.make_archive(str(folder / "images"), "zip", folder / "images")
    for name in ("classes", "held_out"):
        training.class_folders(folder / name, images=2, classes=5, side=SIDE)
    for name in ("reference", "reconstruction"):
        photographs(folder / name, 2, labelled=False)
    for name, content in CONFIGS.items():
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False))
    model, mjp = (
        load_model(checkpoint="random", **MODEL, unknown_embedding=unknown)
        for unknown in (False, True)
    )
    save_weights(folder / "model.safetensors", model)
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    torch.save(state, folder / "model.pth")
    official = dict(mjp.named_parameters())
    rows = [official.pop("pos_embed"), official.pop("unk_embed").reshape(1, 1, -1)]
    official["pos_embed.weight"] = torch.cat(rows, 1)[0]
    state = {name: tensor.detach().clone() for name, tensor in official.items()}
    save_file(state, folder / "official_mjp.safetensors", {"num_heads": json.dumps(2)})
    for argv in COMMANDS.values():
        outcome = called(argv, folder)
        if outcome.code:
            raise RuntimeError(f"{' '.join(argv)} ended with {outcome.code}: {outcome.said}")
    shutil.copytree(folder / "federation" / "uploads", folder / "uploads")


# a command ----------------------------------------------------------------------------------------

MOST_CPU = 20.0  # seconds
MOST_MEMORY = 4 << 30  # bytes of addresses, beside those that this process has
MOST_FILE = 256 << 20
MOST_LINES = 40
TYPES = re.compile(r"NoneType|FieldInfo|\w+(?:Arguments|Config) has ")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x9b\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    code: int
    said: str
    seconds: float = 0.0  # of the processor

    def faults(self, codes: Sequence[int], name: str) -> list[str]:
        """What no bad input may bring about; name: what a refusal holds."""
        said = self.said.replace("\r", "")
        found = {
            "it takes long": self.seconds > MOST_CPU,
            "a traceback": "Traceback (most recent call last)" in said,
            f"exit code {self.code}": self.code not in codes,
            "many lines": bool(self.code) and len(said.splitlines()) > MOST_LINES,
            "names of types": TYPES.search(said) is not None,
            "control characters": CONTROL.search(said) is not None,
            f"it does not name {name}": bool(self.code) and name not in said,
        }
        return [f"{fault}: {said[-600:]}" for fault, is_so in found.items() if is_so]


def called(argv: Sequence[str], folder: Path) -> Outcome:
    """`mjp ARGV` in this folder."""
    said, began = io.StringIO(), time.process_time()
    with pytest.MonkeyPatch.context() as patch, bounded():
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setenv("COLUMNS", "100")
        patch.delenv("MJP_PRIVACY_DATA", raising=False)
        with redirect_stdout(said), redirect_stderr(said):
            try:
                code = main(list(argv))
            except SystemExit as end:  # of --help, or of a wrong option
                code = int(end.code or 0)
    return Outcome(code, said.getvalue(), time.process_time() - began)


@contextmanager
def bounded() -> Iterator[None]:
    """Let this process take only so much memory meanwhile, and write no larger files; on Linux."""
    taken = Path("/proc/self/statm")
    if not taken.is_file():
        yield
        return
    addresses = int(taken.read_text().split()[0]) * resource.getpagesize()
    bounds = {resource.RLIMIT_AS: addresses + MOST_MEMORY, resource.RLIMIT_FSIZE: MOST_FILE}
    before = {kind: resource.getrlimit(kind) for kind in bounds}
    try:
        for kind, most in bounds.items():
            resource.setrlimit(kind, (most, before[kind][1]))
        yield
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)
