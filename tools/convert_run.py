"""Makes a run folder of this version of one that a version with reconstructions/ wrote.

    python -m tools.convert_run OLD OUT      or, with this file alone: python convert_run.py OLD OUT

Values, statuses, reasons, pictures, digests of code and of images are equal, and so is the mean of
each stage's seconds. What changed after it was written is left out and named: the command that made
OLD, given with --out OUT, attacks its images again. OLD is only read. Exit code 0: all of it; 3:
without what is damaged; 2: OLD is no such folder, or OUT is not empty.
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
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from pyarrow.parquet import ParquetFile
from safetensors import safe_open

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.block_file import by_image
from mjp_privacy.experiment.store import NOT_DONE, RunStore

SEAL = re.compile(rb"mjp-seal:([0-9a-f]{64})")
IMAGES, TIMINGS = (b",", b"", b""), (b', "check": "', b'"}', b"}")
"""What stands before and after the checksum of a line, and in its place where there is none."""
PICTURES = b"mjp_privacy.pictures"  # what rows say of their blocks' pictures: the digests
FACTS = ["status", "reason", "code", "group", "label_source"]


class OldRun:
    """A folder of the old format: OldRun(Path("results/demo")).convert(RunStore(Path("new")))."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.damaged: dict[str, None] = {}  # what is left out: files, or lines of them, in order
        try:
            content = json.loads((root / "cells.json").read_bytes())
            written_in, self.cells = content.get("format"), [dict(c) for c in content["cells"]]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            written_in, self.cells = type(error).__name__, []
        if written_in != 2 or not self.whole(root / "cells.json"):
            raise UserError(f"{root}: expected a whole cells.json of format 2; got {written_in}")

    def whole(self, path: Path) -> bool:
        """Whether a file is there as it was written; if it is not, it is named."""
        if not path.exists():
            return False
        place = path.relative_to(self.root).as_posix()
        digest, written = seal_of(path) if path.is_file() else ("", None)
        self.damaged |= {} if digest == written else {place: None}
        return digest == written

    def lines(self, name: str, frame: tuple[bytes, bytes, bytes], first: int = 0) -> list[str]:
        """The lines of a file from the `first` on whose checksums fit, without these."""
        path, (before, after, end) = self.root / name, frame
        pieces = path.read_bytes().split(b"\n")[first:-1] if path.is_file() else []
        kept, damaged = list[str](), 0
        while pieces:
            line = pieces.pop(0)
            while pieces and frame == IMAGES and line.count(b'"') % 2:  # a name of several lines
                line += b"\n" + pieces.pop(0)
            body = line[: -8 - len(before + after)]
            fits = line == body + before + b"%08x" % zlib.crc32(body) + after
            damaged += not fits
            if fits:
                kept.append((body + end).decode(errors="replace"))
        self.damaged |= {f"{name}: {damaged} line(s)": None} if damaged else {}
        return kept

    @cached_property
    def images(self) -> pd.DataFrame:
        """images.csv by image_id: label, sha256, pixel_sha256; of two lines the last counts."""
        names = ("image_id", "label", "label_source", "sha256", "pixel_sha256")
        texts = self.lines("images.csv", IMAGES, first=1)
        cells = [next(csv.reader(io.StringIO(text, newline="")))[: len(names)] for text in texts]
        frame = pd.DataFrame(cells, columns=names).drop_duplicates("image_id", keep="last")
        label = pd.to_numeric(frame["label"], errors="coerce").astype("Int64")
        return frame.assign(label=label).set_index("image_id").drop(columns="label_source")

    @cached_property
    def seconds(self) -> pd.Series[float]:
        """Seconds an image, by run_id and stage."""
        told = pd.DataFrame([json.loads(text) for text in self.lines("timings.jsonl", TIMINGS)])
        told = told.reindex(columns=["run_id", "stage", "seconds", "images"])
        sums = told.groupby(["run_id", "stage"])[["seconds", "images"]].sum()
        return sums["seconds"] / sums["images"]

    def rows(self, run_id: str) -> pd.DataFrame:
        """The long rows of a cell that count, by `block` and by the place `row` in it. Of an image
        in several files that of a block counts in which it did not fail, or the last block, or the
        last part. Rows count only with the pictures that they name."""
        frames, lost, named = [], set[int](), dict[int, str]()
        files = sorted(self.root.glob(f"rows/{run_id}/*.parquet"))
        for path in sorted(files, key=lambda path: path.stem.isdigit()):  # parts first
            is_block, number = path.stem.isdigit(), int(path.stem.removeprefix("part-"))
            if is_block:
                named.pop(number, None)  # a part that holds it too is older
            if not self.whole(path):
                lost |= {number} if is_block else set()
                continue
            file = ParquetFile(path)
            frame = file.read().to_pandas()
            if is_block:
                frame = frame.assign(block=number, row=range(len(frame)))
            pictures = json.loads((file.metadata.metadata or {}).get(PICTURES, b"{}"))
            named |= {int(block): digest for block, digest in pictures.items()}
            failed = frame["status"].isin(NOT_DONE).groupby(frame["image_id"]).transform("any")
            merit = {"a": is_block, "b": ~failed & is_block, "c": number}
            frames.append(frame.assign(**merit, file=str(path)))
        for block, digest in named.items():
            path = self.root / f"reconstructions/{run_id}/{block:05d}.safetensors"
            if not self.whole(path) or seal_of(path)[0] != digest:
                self.damaged[path.relative_to(self.root).as_posix()] = None
                lost.add(block)
        names = ["image_id", "block", "row", "file", *"abc"]
        rows = pd.concat(frames or [pd.DataFrame(columns=names)])
        best = rows.sort_values([*"abc"], kind="stable").groupby("image_id")["file"].last()
        rows = rows[(rows["file"] == rows["image_id"].map(best)) & ~rows["block"].isin(lost)]
        return rows.sort_values(["block", "row"], kind="stable", ignore_index=True)

    def pictures(self, run_id: str, block: int) -> tuple[list[str], dict[str, Any]]:
        """The images that have pictures in a block, and their tensors as they were handed over."""
        path = self.root / f"reconstructions/{run_id}/{block:05d}.safetensors"
        if not self.whole(path):
            return [], {}
        with safe_open(path, "pt") as file:
            known = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        for name, tensor in tensors.items():
            plain = "1/255" if str(tensor.dtype) == "torch.uint8" else "1"  # before scales
            if known.get(f"scale:{name}", plain) == "1/255":
                tensors[name] = tensor.float() / 255
        if known.get("target") in tensors:
            tensors["target"] = tensors[known["target"]]
        return json.loads(known["image_ids"]), tensors

    def convert(self, store: RunStore) -> None:
        """Write everything that is whole into an empty folder."""
        (store.root / "experiments").mkdir(parents=True, exist_ok=True)
        for path in (*self.root.glob("*.yaml"), *self.root.glob("experiments/*.yaml")):
            if self.whole(path):
                shutil.copyfile(path, store.root / path.relative_to(self.root))
        cells, about = {cell["run_id"]: cell for cell in self.cells}, dict[str, Any]()
        if (path := store.root / "experiment.yaml").is_file():
            about["made_with"] = yaml.safe_load(path.read_text()).get("made_with", {})
        known = self.root / "code.json"
        codes = json.loads(known.read_text()) if self.whole(known) else {}
        for folder in sorted((self.root / "rows").glob("*")):
            run_id = folder.name
            about |= {"cell": cells.get(run_id)}
            for block, rows in self.rows(run_id).groupby("block"):
                wide = self.wide(rows).assign(run_id=run_id)
                for stage in (of for known, of in self.seconds.index if known == run_id):
                    wide[f"stage_seconds.{stage}"] = self.seconds[run_id, stage]
                about["code"] = {of: codes[of] for of in {*wide["code"]} & codes.keys()}
                ids, tensors = self.pictures(run_id, int(str(block)))
                kept = [at for at, name in enumerate(ids) if name in {*wide["image_id"]}]
                of_kept = {name: tensor[kept] for name, tensor in tensors.items()}
                pictures = by_image([ids[at] for at in kept], of_kept)
                store.write(run_id, int(str(block)), wide, pictures, about)
            store.compact(run_id)
        store.write_cells(self.cells)

    def wide(self, rows: pd.DataFrame) -> pd.DataFrame:
        """A row for each image. Its status is that of its scores: `top1` may lack a label, and a
        diagnostic has a value where nothing is scored."""
        aside = (rows["metric"] == "top1") | (rows["variant"] == "diagnostic")
        own = rows.assign(aside=aside).sort_values("aside", kind="stable")
        own = own.drop_duplicates("image_id").set_index("image_id")
        wide = own.loc[rows["image_id"].drop_duplicates()].reindex(columns=FACTS)
        wide = wide.fillna({"code": ""}).join(self.images)
        status = rows["image_id"].map(wide["status"])
        scored = (rows["status"] == "ok") | ((rows["metric"] == "top1") & (status == "ok"))
        for (metric, variant), of_key in rows[scored].groupby(["metric", "variant"], sort=False):
            wide[f"{metric}.{variant}"] = of_key.set_index("image_id")["value"].astype(float)
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
    if not (found := [*SEAL.finditer(content, begin, end)]):
        return hashlib.sha256(content).hexdigest(), None
    at = found[-1 if begin else 0].start(1)
    digest = hashlib.sha256(content[:at] + b"0" * 64 + content[at + 64 :])
    return digest.hexdigest(), content[at : at + 64].decode()


def main(words: list[str] | None = None) -> int:
    """Convert the folder that the command line names."""
    parser = argparse.ArgumentParser("convert_run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("out", type=Path, metavar="OUT")
    old, out = vars(parser.parse_args(words)).values()
    try:
        run = OldRun(old)
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise UserError(f"{out}: expected an empty folder, or a name that is not taken.")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run.convert(RunStore(out))
    print(
        *(f"damaged, left out: {what}\n" for what in run.damaged), sep="", end="", file=sys.stderr
    )
    return 3 if run.damaged else 0


if __name__ == "__main__":
    raise SystemExit(main())
