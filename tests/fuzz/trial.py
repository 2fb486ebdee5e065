"""Feeds a reader with changed files and keeps what it did: only a UserError may come out of it."""

from __future__ import annotations

import gc
import io
import json
import random
import shutil
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from tests.fuzz.readers import READERS, Reader
from tests.inputs.case import CONTROL

SLOW = 2.0  # seconds of the processor for one input
LONG = 3000  # characters of a message


@dataclass
class Tally:
    """What came of a reader's inputs."""

    reader: str
    tried: int = 0
    refused: int = 0
    read: int = 0
    slowest: float = 0.0
    slow: int = 0
    memory: int = 0  # MiB, the most of a process, of which some 480 are its libraries
    faults: dict[str, str] = field(default_factory=dict)  # by what and where, an input's seed


def trial(name: str, base: Path, scratch: Path, seeds: Iterator[int], until: float = 0) -> Tally:
    """Read one changed file for each seed, until the clock of this process says `until`."""
    reader, tally = READERS[name], Tally(name)
    folder = workplace(reader, base, scratch)
    contents = contents_of(reader, base)
    place = reader.place(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            if until and time.process_time() > until:
                break
            chance = random.Random(f"{name} {seed}")
            content = reader.change(chance.choice(contents), chance, contents)
            _replace(place, content)
            _one(reader, folder, seed, tally)
            if tally.tried % 200 == 0:
                gc.collect()
    shutil.rmtree(folder)
    return tally


def _one(reader: Reader, folder: Path, seed: int, tally: Tally) -> None:
    began = time.process_time()
    tally.tried += 1
    try:
        reader.read(folder)
        tally.read += 1
    except UserError as error:
        tally.refused += 1
        said = str(error)
        if CONTROL.search(said) or len(said) > LONG:
            kind = "control characters" if len(said) <= LONG else f"{len(said)} characters"
            tally.faults.setdefault(f"a message of {kind}", f"{seed}: {said[:150]!r}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        tally.faults.setdefault(_where(error), f"{seed}: {shown(error, 150)}")
    seconds = time.process_time() - began
    tally.slowest = max(tally.slowest, seconds)
    if seconds > SLOW:
        tally.slow += 1
        tally.faults.setdefault(f"more than {SLOW} s", str(seed))


def _where(error: BaseException) -> str:
    """The kind of an error, and the last line of the project's code that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/mjp_privacy/" in f.filename or "/attacks/" in f.filename]
    last = own[-1] if own else frames[-1]
    place = "/".join(Path(last.filename).parts[-3:])
    return f"{type(error).__name__} at {place}:{last.lineno}"


def _replace(place: Path, content: bytes) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.write_bytes(content)


def workplace(reader: Reader, base: Path, scratch: Path) -> Path:
    """A folder with what the reader needs."""
    folder = scratch / reader.file.replace("/", "_").replace("*", "x")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in reader.copied:
        if (base / name).is_dir():
            shutil.copytree(base / name, folder / name)
    if "beside" in reader.copied:
        (folder / "beside").mkdir()
        shutil.copy(base / "official_mjp.safetensors", folder / "beside" / "model.safetensors")
    return folder


def contents_of(reader: Reader, base: Path) -> list[bytes]:
    """Valid contents of the reader's file."""
    extra = [content for name in reader.seeds for content in _extra(name)]
    place = reader.place(base)
    own = [place.read_bytes()] if place.is_file() else []
    if reader.file == "job.json":
        own = [json.dumps(_JOB).encode()]
    return [*own, *extra]


_JOB = {
    "root": "run",
    "experiment": {"name": "x", "attacks": [{"name": "grey"}]},
    "device": "cpu",
    "made_with": {"device": "cpu"},
    "again": False,
    "folder": ".",
    "images": "images",
    "chosen": ["0.png"],
}


def _extra(name: str) -> list[bytes]:
    if name == "pictures":
        return _pictures()
    if name == "label files":
        return [
            b"file,label\n0.png,1\n1.png,2\n",
            b"0.png 1\n1.png 2\n",
            b"ImageId,PredictionString\nILSVRC2012_val_00000001,n01440764 1 2 3 4\n",
            b"n01440764\nn01443537\n",
        ]
    if name == "tasks":
        return [
            b'{"units": 2, "where": "ViT a float32", "messages": [["slow", ""]], "ended": true}',
            b'{"error": "x", "storage": 28, "ended": true}',
        ]
    return [
        b'{"architecture": "vit_tiny_patch16_224", "num_classes": 5, "pretrained_cfg": '
        b'{"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "input_size": [3, 32, 32]}}',
        b'{"model_type": "vit", "hidden_size": 40, "num_attention_heads": 2, "image_size": 32, '
        b'"hidden_act": "gelu", "layer_norm_eps": 1e-12}',
        b'{"model_cfg": {"vision_cfg": {"width": 40, "layers": 1, "head_width": 20}}, '
        b'"preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}}',
    ]


def _pictures() -> list[bytes]:
    """A small picture in every format that is written here."""
    from PIL import Image

    picture = Image.linear_gradient("L").resize((40, 24)).convert("RGB")
    found = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF"):
        for mode in ("RGB", "L", "P", "RGBA", "I;16", "CMYK", "1"):
            buffer = io.BytesIO()
            try:
                picture.convert(mode).save(buffer, kind)
            except Exception:
                continue
            found.append(buffer.getvalue())
    return found
