"""Makes a run folder of this version of one that a version with reconstructions/ wrote.

    python -m tools.convert_run OLD OUT      or, with this file alone: python convert_run.py OLD OUT

Values, statuses, reasons, pictures, digests of code and of images are equal, and so is the mean of
each stage's seconds. What changed after it was written is left out and named: its images are
attacked again by the command that made OLD, given with --out OUT. OLD is only read.

Exit code 0: all of it; 3: without what is damaged; 2: OLD is no such folder, or OUT is not empty.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import re
import shutil
import sys
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from pyarrow.parquet import ParquetFile
from safetensors import safe_open

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import NOT_DONE, RunStore

SEAL = re.compile(rb"mjp-seal:([0-9a-f]{64})")
IMAGES, TIMINGS = (b",", b"", b""), (b', "check": "', b'"}', b"}")
"""What stands before and after the checksum of a line, and in its place where there is none."""
FACTS = ["status", "reason", "code", "group", "label_source"]


class OldRun:
    """A folder of the old format: OldRun(Path("results/demo")).convert(RunStore(Path("new")))."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.damaged: dict[str, None] = {}  # what is left out: files, or lines of them, in order
        try:
            content = json.loads((root / "cells.json").read_bytes())
            written_in, self.cells = content.get("format", 1), [dict(c) for c in content["cells"]]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            written_in, self.cells = type(error).__name__, []
        self.sealed = written_in == 2  # format 1 has neither seals nor checksums
        if written_in not in (1, 2) or not self.whole(root / "cells.json"):
            got = f"format {written_in}" if written_in not in (1, 2) else "one that changed since"
            raise UserError(
                f"{root}: expected a run with a cells.json of format 1 or 2, got {got}."
            )

    @cached_property
    def adopted(self) -> Mapping[str, str]:
        """The digests of files that were there before there were seals."""
        path = self.root / "adopted.json"
        return json.loads(path.read_text())["files"] if self.whole(path) else {}

    def whole(self, path: Path) -> bool:
        """Whether a file is there as it was written; if it is not, it is named."""
        if not path.exists():
            return False
        place = path.relative_to(self.root).as_posix()
        digest, written = seal_of(path) if path.is_file() else ("", None)
        if written is None and path.name != "adopted.json" and is_readable(path):
            written = self.adopted.get(place) if self.sealed else digest
        if digest != written:
            self.damaged[place] = None
        return digest == written

    def lines(self, name: str, frame: tuple[bytes, bytes, bytes], first: int = 0) -> list[str]:
        """The lines of a file from the `first` on whose checksums fit, without these."""
        path, (before, after, end) = self.root / name, frame
        pieces = path.read_bytes().split(b"\n")[first:-1] if path.is_file() else []
        kept: list[str] = []
        damaged = 0
        while pieces:
            line = pieces.pop(0)
            while pieces and frame == IMAGES and line.count(b'"') % 2:  # a name of several lines
                line += b"\n" + pieces.pop(0)
            body = line[: -8 - len(before + after)]
            fits = line == body + before + b"%08x" % zlib.crc32(body) + after
            damaged += self.sealed and not fits
            if fits or not self.sealed:
                kept.append((body + end if fits else line).decode(errors="replace"))
        if damaged:
            self.damaged[f"{name}: {damaged} line(s)"] = None
        return kept

    # what is in the folder ----------------------------------------------------------------------

    @cached_property
    def images(self) -> pd.DataFrame:
        """images.csv by image_id: label, sha256, pixel_sha256; of two lines the last counts."""
        known: dict[str, dict[str, str]] = {}
        names = ("image_id", "label", "label_source", "sha256", "pixel_sha256")
        for line in self.lines("images.csv", IMAGES, first=1):
            cells = next(csv.reader(io.StringIO(line, newline="")), [])
            known[(cells or [""])[0]] = dict(zip(names, cells, strict=False))
        frame = pd.DataFrame.from_dict(known, orient="index")
        frame = frame.reindex(columns=["label", "sha256", "pixel_sha256"]).fillna("")
        label = pd.to_numeric(frame["label"], errors="coerce").astype("Int64")
        return frame.assign(label=label)

    @cached_property
    def seconds(self) -> Mapping[tuple[str, str], float]:
        """Seconds an image, by run_id and stage."""
        sums: dict[tuple[str, str], tuple[float, int]] = {}
        for text in self.lines("timings.jsonl", TIMINGS):
            line = json.loads(text)
            key = line.get("run_id", ""), line.get("stage", "")
            seconds, images = sums.get(key, (0.0, 0))
            sums[key] = seconds + line.get("seconds", 0.0), images + line.get("images", 0)
        return {key: seconds / images for key, (seconds, images) in sums.items() if images}

    def rows(self, run_id: str) -> pd.DataFrame:
        """The long rows of a cell that count, by `block` and by the place `row` in it.

        Of an image in several files that of a block counts in which it did not fail, or the last
        block, or the last part. Rows count only with the pictures that they name.
        """
        frames, lost = [], set[int]()
        for path in sorted(self.root.glob(f"rows/{run_id}/*.parquet")):
            is_block, number = path.stem.isdigit(), path.stem.removeprefix("part-")
            if not self.whole(path):
                lost |= {int(number)} if is_block else set()
                continue
            file = ParquetFile(path)
            frame = file.read().to_pandas()
            if is_block:
                frame = frame.assign(block=int(number), row=range(len(frame)))
            failed = frame["status"].isin(NOT_DONE).groupby(frame["image_id"]).transform("any")
            merit = [is_block, *([~failed] if is_block else [False]), int(number)]
            frames.append(frame.assign(file=str(path), **dict(zip("abc", merit, strict=True))))
            named = (file.metadata.metadata or {}).get(b"mjp_privacy.pictures", b"{}")
            for block, digest in json.loads(named).items():
                pictures = self._pictures(run_id, int(block))
                if int(block) in {*frame["block"]} and (
                    not self.whole(pictures) or seal_of(pictures)[0] != digest
                ):
                    self.damaged[pictures.relative_to(self.root).as_posix()] = None
                    lost.add(int(block))
        if not frames:
            return pd.DataFrame(columns=["image_id", "block"])
        rows = pd.concat(frames, ignore_index=True)
        best = rows.sort_values(["a", "b", "c"], kind="stable").groupby("image_id")["file"].last()
        rows = rows[(rows["file"] == rows["image_id"].map(best)) & ~rows["block"].isin(lost)]
        return rows.sort_values(["block", "row"], kind="stable")

    def _pictures(self, run_id: str, block: int) -> Path:
        return self.root / "reconstructions" / run_id / f"{block:05d}.safetensors"

    def pictures(self, run_id: str, block: int) -> tuple[list[str], dict[str, torch.Tensor]]:
        """The images that have pictures in a block, and their tensors as they were handed over."""
        if not self.whole(path := self._pictures(run_id, block)):
            return [], {}
        with safe_open(path, "pt") as file:
            known = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        for name, tensor in tensors.items():
            as_bytes = "1/255" if tensor.dtype == torch.uint8 else "1"
            if known.get(f"scale:{name}", as_bytes) == "1/255":
                tensors[name] = tensor.float() / 255
        if known.get("target") in tensors:
            tensors["target"] = tensors[known["target"]]
        return json.loads(known["image_ids"]), tensors

    # as the new format --------------------------------------------------------------------------

    def convert(self, store: RunStore) -> None:
        """Write everything that is whole into an empty folder."""
        for name in ("experiment.yaml", "experiments/*.yaml", "log.jsonl"):
            for path in self.root.glob(name):
                if path.suffix != ".yaml" or self.whole(path):
                    target = store.root / path.relative_to(self.root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
        for cell in self.cells:
            if isinstance(cell.get("withhold"), list):  # as the first versions wrote it
                cell["withhold"] = ", ".join(cell["withhold"])
        cells, about = {cell["run_id"]: cell for cell in self.cells}, dict[str, Any]()
        if (path := store.root / "experiment.yaml").is_file():
            about["made_with"] = yaml.safe_load(path.read_text()).get("made_with", {})
        ledger = self.root / "code.json"
        codes = json.loads(ledger.read_text()) if self.whole(ledger) else {}
        for folder in sorted((self.root / "rows").glob("*")):
            of_cell = {"cell": cells[folder.name]} if folder.name in cells else {}
            for block, rows in self.rows(folder.name).groupby("block"):
                wide = self.wide(rows).assign(run_id=folder.name)
                for (run_id, stage), seconds in self.seconds.items():
                    if run_id == folder.name:
                        wide[f"stage_seconds.{stage}"] = seconds
                code = {digest: codes[digest] for digest in {*wide["code"]} & codes.keys()}
                ids, tensors = self.pictures(folder.name, int(str(block)))
                kept = [at for at, name in enumerate(ids) if name in {*wide["image_id"]}]
                of_kept = {name: tensor[kept] for name, tensor in tensors.items()}
                pictures = [([ids[at] for at in kept], of_kept)] if kept else []
                facts = {**about, **of_cell, "code": code}
                store.write(folder.name, int(str(block)), wide, pictures, facts)
            store.compact(folder.name)
        store.write_cells(self.cells)

    def wide(self, rows: pd.DataFrame) -> pd.DataFrame:
        """A row for each image, of a row for each image, metric and variant.

        An image's status is that of its scores: `top1` may lack a label, and a diagnostic has a
        value where nothing is scored.
        """
        aside = (rows["metric"] == "top1") | (rows["variant"] == "diagnostic")
        own = rows.assign(aside=aside).sort_values("aside", kind="stable")
        own = own.drop_duplicates("image_id").set_index("image_id")
        wide = own.loc[rows["image_id"].drop_duplicates()].reindex(columns=FACTS)
        wide = wide.assign(code=wide["code"].fillna("")).join(self.images)
        status = rows["image_id"].map(wide["status"])
        scored = (rows["status"] == "ok") | ((rows["metric"] == "top1") & (status == "ok"))
        for (metric, variant), of_key in rows[scored].groupby(["metric", "variant"], sort=False):
            values = of_key.set_index("image_id")["value"].astype(np.float64)
            wide[f"{metric}.{variant}"] = values
        return wide.reset_index(names="image_id")


def seal_of(path: Path) -> tuple[str, str | None]:
    """The digest of a file with zeros in its seal's place, and the digest that stands there."""
    content = path.read_bytes()
    begin, end = 0, min(len(content), 1 << 12)
    if content[:4] == b"PAR1":  # in the footer, behind statistics that may hold any words
        end = len(content) - 8
        begin = max(4, end - int.from_bytes(content[-8:-4], "little"))
    elif path.suffix == ".safetensors":
        end = 8 + int.from_bytes(content[:8], "little")
    found = [*SEAL.finditer(content, begin, end)]
    if not found:
        return hashlib.sha256(content).hexdigest(), None
    at = found[-1 if begin else 0].start(1)
    zeros = content[:at] + b"0" * 64 + content[at + 64 :]
    return hashlib.sha256(zeros).hexdigest(), content[at : at + 64].decode()


def is_readable(path: Path) -> bool:
    """Whether a file without a seal can be read to its end."""
    try:
        if path.suffix == ".parquet":
            ParquetFile(path).read()
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                [file.get_tensor(name) for name in file.keys()]
        return path.is_file()
    except Exception:  # of whatever library
        return False


def main(words: list[str] | None = None) -> int:
    """Convert the folder that the command line names."""
    parser = argparse.ArgumentParser("convert_run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("out", type=Path, metavar="OUT")
    given = parser.parse_args(words)
    try:
        run = OldRun(given.old)
        if given.out.exists() and (not given.out.is_dir() or any(given.out.iterdir())):
            raise UserError(f"{given.out}: expected an empty folder, or a name that is not taken.")
        run.convert(RunStore(given.out))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for what in run.damaged:
        print(f"damaged, left out: {what}", file=sys.stderr)
    print(given.out)
    return 3 if run.damaged else 0


if __name__ == "__main__":
    raise SystemExit(main())
