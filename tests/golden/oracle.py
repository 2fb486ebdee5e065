"""The oracle: eight small runs whose every number was frozen before the run store was rewritten.

    place = inputs("demo", tmp / "inputs")            # pictures, uploads, checkpoints of a case
    folder = run("demo", place, tmp / "run")          # by the public command line, one thread
    long_frame(folder)                                # a row per cell, image, metric and variant
    pictures(folder)                                  # {(cell, image_id): {name: array}}

Frozen in oracle/. Code that changes a number on purpose says so in the changelog and freezes anew:
`OMP_NUM_THREADS=1 python -m tests.golden.oracle /tmp/frozen`, by the tree it is called in.

    values.parquet    `case`, the columns of CELL and ROW, `run_id`; value is a float64
    pictures.parquet  `case`, CELL, image_id, `name` of the tensor, `stored_dtype`, shape, sha256 of
                      its bytes, and the bytes themselves in `data` for some reconstructions
    machine.json      what it was computed on

Timings, digests of code and of checkpoints are no part of the oracle.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from mjp_privacy import cli
from mjp_privacy.core.machine import one_thread
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.lines import read_frame
from tests.helpers.runs import long_rows

HOME = Path(__file__).parent / "oracle"

CELL = (
    *("model", "setting", "gamma", "dtype", "attack", "attack_name", "attack_options", "role"),
    *("uploads", "victim", "seed", "position_embedding", "trained_gamma", "mode", "loss", "batch"),
    *("partners", "dal", "dal_lambda", "plain_share", "mask", "augment", "withhold", "positions"),
    *("position_noise", "server_lr", "upload", "lr", "weight_decay", "defenses", "steps"),
    *("optimizer", "momentum", "lora", "autocast", "pseudo_gradient", "round", "client_label"),
)
"""The facts of a cell that tell the cells of a case apart and say what each is, as text."""
IMAGE = ("image_id", "label_source", "group")
ROW = (*IMAGE, "metric", "variant", "value", "status", "reason")
CLOCK = ("seconds",)
"""Metrics that a clock measured: that they are there is compared, and no value is frozen."""
KEYS = [*CELL, "image_id", "metric", "variant"]
Cell = tuple[str, ...]
"""The values of the columns of CELL."""


# the cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A case: its config is oracle/NAME.yaml."""

    options: tuple[str, ...] = ()
    """Further options of the command; {place} is the folder of its inputs."""
    pictures: int = 0
    """Pictures drawn to be attacked."""
    side: int = 56
    labelled: bool = True
    broken: int | None = None
    """The number of the picture whose file is cut off."""
    trained: tuple[str, ...] = ()
    """Rows of oracle/NAME_training.yaml to be trained first."""
    recorded: bool = False
    """Whether oracle/NAME_federation.yaml records uploads first."""
    federation: bool = False
    """Whether it is a federation, which attacks its own uploads."""
    exit_code: int = 0


DRAWN = ("--images", "{place}/pictures")
WEIGHTS = "{place}/trained/{row}/model.safetensors"
CASES: Mapping[str, Case] = {
    "demo": Case(("--limit", "2")),
    "uploads": Case(("--uploads", "{place}/federation/uploads"), recorded=True, exit_code=3),
    "batches": Case(DRAWN, pictures=8, broken=1, exit_code=3),
    "local_steps": Case(DRAWN, pictures=3, labelled=False),
    "dal": Case(DRAWN, pictures=2),
    "networks": Case(
        (*DRAWN, "--weights", *(f"{n}={WEIGHTS.replace('{row}', n)}" for n in ("swin", "resnet"))),
        pictures=2,
        side=32,
        trained=("swin", "resnet"),
    ),
    "minute": Case(federation=True),
    "trained": Case(
        (*DRAWN, "--weights", WEIGHTS.replace("{row}", "J")),
        pictures=3,
        side=32,
        trained=("J",),
    ),
}
UNKNOWN = "b1s1_r00001_002"
"""Of the recorded uploads, those of a picture whose labels and truth nobody knows."""
CHANGED: Mapping[str, Mapping[str, Any]] = {
    UNKNOWN: {"labels": None},
    "b1s1_r00001_003": {"label": "impossible", "series": None, "model": {"resize": 10}},
}
"""Changed headers of uploads; a model of 32 pixels crops none from 10, so the last ones fail."""


def inputs(name: str, place: Path) -> Path:
    """Make what a case reads in an empty folder, and return the folder."""
    case = CASES[name]
    draw(place / "pictures", case.pictures, case.side, case.labelled)
    if case.broken is not None:
        path = place / "pictures" / f"{case.broken}.png"
        path.write_bytes(path.read_bytes()[:100])
    if case.trained or case.recorded:
        for label in range(3):
            draw(place / "classes" / f"class_{label}", 6, 32, labelled=False, first=100 * label)
    for row in case.trained:
        words = ["train", str(HOME / f"{name}_training.yaml"), "--row", row, "--workers", "0"]
        call([*words, "--data", f"{place}/classes", "--out", f"{place}/trained/{row}"], thread=True)
    if case.recorded:
        out = place / "federation"
        words = ["federate", str(HOME / f"{name}_federation.yaml"), "--out", str(out)]
        call([*words, "--data", str(place / "classes")], thread=True)
        for path in (out / "uploads").glob("*.json"):
            for start, changes in CHANGED.items():
                if path.name.startswith(start):
                    header = json.loads(path.read_text()) | changes
                    del header["seal"]
                    path.write_text(json.dumps(header))
        for path in [*(out / "uploads" / "truth").glob(f"{UNKNOWN}*")]:
            path.unlink()
    return place


def draw(folder: Path, count: int, side: int, labelled: bool, first: int = 0) -> None:
    """Pictures of smooth colours and some noise, by whole numbers alone: the same everywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["file,label"]
    for number in range(first, first + count):
        random = np.random.default_rng(number)
        corners = random.integers(20, 236, (5, 5, 3))
        low, part = np.divmod(np.arange(side) * 4 * 256 // side, 256)
        rows = corners[low] * (256 - part)[:, None, None] + corners[low + 1] * part[:, None, None]
        columns = rows[:, low] * (256 - part)[:, None] + rows[:, low + 1] * part[:, None]
        pixels = columns // 65536 + random.integers(-9, 10, columns.shape)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{number % 3}")
    if labelled:
        (folder / "labels.csv").write_text("\n".join(lines) + "\n")


# the command line ---------------------------------------------------------------------------------


def command(name: str, place: Path, out: Path, workers: int = 0) -> list[str]:
    """The words after `mjp`; workers: how many processes attack, 0: the command's own."""
    case, config = CASES[name], str(HOME / f"{name}.yaml")
    by = {"engine": "local", "workers": str(workers)} if workers else {"engine": "here"}
    prefix = "attack." if case.federation else ""
    engine = [word for key, value in by.items() for word in (f"--{prefix}{key}", value)]
    common = [config, "--out", str(out), "--device", "cpu", *engine]
    if case.federation:
        return ["federate", *common, "--data", "embedded", "--threads", "1"]
    return ["attack", *common, *(word.replace("{place}", str(place)) for word in case.options)]


def run(name: str, place: Path, out: Path, workers: int = 0) -> Path:
    """Run a case to its end, in this process with one thread; return its run folder.

    place    the folder that `inputs` made
    workers  of the engine `local`, in place of this process
    """
    call(command(name, place, out, workers), CASES[name].exit_code)
    return run_folder(name, out)


def run_folder(name: str, out: Path) -> Path:
    """Where the attacked run is of a command with this --out."""
    return out / "attack" if CASES[name].federation else out


def call(words: Sequence[str], exit_code: int = 0, thread: bool = False) -> None:
    """Call the command line in this process with one thread; thread: the command has --threads."""
    with one_thread():
        code = cli.main([*words, *(("--device", "cpu", "--threads", "1") if thread else ())])
    if code != exit_code:
        raise AssertionError(f"mjp {' '.join(words)}: exit code {code}, expected {exit_code}")


# values -------------------------------------------------------------------------------------------


def identity(cell: Mapping[str, Any]) -> Cell:
    """A cell's columns of CELL as text; what it lacks is empty."""
    return tuple("" if cell.get(name) is None else str(cell[name]) for name in CELL)


def long_frame(folder: Path) -> pd.DataFrame:
    """The columns of CELL and ROW, and `run_id`, sorted by KEYS, which are unique."""
    store, parts = RunStore(folder), []
    for cell in store.read_cells():
        rows = long_rows(read_frame(store, cell["run_id"]), cell)
        facts = dict(zip(CELL, identity(cell), strict=True))
        parts.append(rows[list(ROW)].assign(**facts, run_id=cell["run_id"]))
    frame = pd.concat(parts, ignore_index=True)[[*CELL, *ROW, "run_id"]]
    frame["value"] = frame["value"].mask(frame["metric"].isin(CLOCK))
    if frame.duplicated(KEYS).any():
        raise AssertionError(f"{folder}: rows that only other columns tell apart")
    return frame.sort_values(KEYS, kind="stable", ignore_index=True)


def pictures(folder: Path) -> dict[tuple[Cell, str], dict[str, np.ndarray]]:
    """The stored tensors of every cell and image."""
    store, found = RunStore(folder), {}
    for cell in store.read_cells():
        for image_id in store.pictured(cell["run_id"]):
            tensors = store.pictures(cell["run_id"], image_id) or {}
            arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
            found[identity(cell), image_id] = arrays
    return found


def picture_frame(folder: Path, kept: int = 0) -> pd.DataFrame:
    """A row per stored tensor: CELL, image_id, name, stored_dtype, shape, sha256, data; `kept`
    reconstructions, spread over the cells, have their bytes in `data`."""
    rows: list[tuple[Any, ...]] = []
    for (cell, image_id), arrays in sorted(pictures(folder).items()):
        for name, array in sorted(arrays.items()):
            data = array.tobytes()
            shape = " ".join(map(str, array.shape))
            told = (image_id, name, str(array.dtype), shape, hashlib.sha256(data).hexdigest())
            rows.append((*cell, *told, data if name == "images" else None))
    columns = [*CELL, "image_id", "name", "stored_dtype", "shape", "sha256", "data"]
    frame = pd.DataFrame(rows, columns=columns)
    made = frame.index[frame["name"] == "images"]
    chosen = made[:: max(1, len(made) // kept)][:kept] if kept else made[:0]
    return frame.assign(data=frame["data"].where(frame.index.isin(chosen), None))


def machine() -> dict[str, str]:
    """What numbers depend on, besides the code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    fields = dict(reversed([line.replace("\t", "").split(":", 1) for line in lines if ":" in line]))
    told = ("model name", "cpu family", "model", "stepping")
    cpu = [fields[name].strip() for name in told if name in fields] or [platform.processor()]
    capability = torch.backends.cpu.get_cpu_capability()
    libraries = ("torch", "torchvision", "numpy", "scipy", "pillow", "scikit-image")
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return {
        "cpu": " ".join(cpu),
        "capability": capability,
        "caches": " ".join(path.read_text().strip() for path in caches),  # by which kernels block
        **{name: version(name) for name in libraries},
    }


# freezing -----------------------------------------------------------------------------------------

KEPT = 3
"""Reconstructions of a case of which more than a digest is frozen."""


def freeze(place: Path) -> None:
    """Run all cases below `place`, and write what they gave."""
    tables: dict[str, list[pd.DataFrame]] = {"values": [], "pictures": []}
    for name in CASES:
        folder = run(name, inputs(name, place / name / "inputs"), place / name / "run")
        tables["values"].append(long_frame(folder).assign(case=name))
        tables["pictures"].append(picture_frame(folder, KEPT).assign(case=name))
    for table, frames in tables.items():
        frame = pd.concat(frames, ignore_index=True)
        frame.to_parquet(HOME / f"{table}.parquet", compression="zstd", index=False)
    (HOME / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")


if __name__ == "__main__":
    freeze(Path(sys.argv[1]))
