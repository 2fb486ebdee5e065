"""Makes a run folder of this version of one that a version with reconstructions/ wrote.

    python -m tools.convert_run OLD OUT

Values, statuses, reasons, pictures, digests of code and of images are equal; what each stage took
is left behind. What changed after it was written, and blocks that were not finished, are left out
and named: the command that made OLD, given with --out OUT, attacks their images again. OLD is only
read. Exit code 0: all of it; 3: without what is named; 2: OLD is no such folder, or OUT is not
empty.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
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
from mjp_privacy.core.files import check_own
from mjp_privacy.experiment.block_file import by_image
from mjp_privacy.experiment.store import RunStore

SEAL = re.compile(rb"mjp-seal:([0-9a-f]{64})")
PICTURES = b"mjp_privacy.pictures"  # what rows say of their blocks' pictures: the digests
FACTS = ["status", "reason", "code", "group", "label_source"]


class OldRun:
    """A folder of the old format: OldRun(Path("results/demo")).convert(RunStore(Path("new")))."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.left_out: dict[str, None] = {}  # files, or lines of them, in order
        try:
            content = json.loads((root / "cells.json").read_bytes())
            written_in, self.cells = content.get("format"), [dict(c) for c in content["cells"]]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            written_in, self.cells = type(error).__name__, []
        if written_in != 2 or not self.whole(root / "cells.json"):
            raise UserError(f"{root}: expected a whole cells.json of format 2; got {written_in}")

    def whole(self, path: Path) -> bool:
        """Whether a file is there as it was written; if it is not, it is named."""
        if path.exists() and (not path.is_file() or len({*seal_of(path)}) == 2):
            self.left_out[path.relative_to(self.root).as_posix()] = None
            return False
        return path.exists()

    @cached_property
    def images(self) -> pd.DataFrame:
        """images.csv by image_id: label, sha256, pixel_sha256; of two lines the last counts. Each
        ends with a checksum of what stands before it."""
        path = self.root / "images.csv"
        lines = path.read_bytes().split(b"\n")[1:-1] if path.is_file() else []
        whole = [line[:-9] for line in lines if line[-9:] == b",%08x" % zlib.crc32(line[:-9])]
        if len(whole) < len(lines):
            self.left_out[f"images.csv: {len(lines) - len(whole)} line(s)"] = None
        names = ("image_id", "label", "label_source", "sha256", "pixel_sha256")
        cells = [row[: len(names)] for row in csv.reader(line.decode() for line in whole)]
        frame = pd.DataFrame(cells, columns=names).drop_duplicates("image_id", keep="last")
        label = pd.to_numeric(frame["label"], errors="coerce").astype("Int64")
        return frame.assign(label=label).set_index("image_id").drop(columns="label_source")

    def rows(self, run_id: str) -> pd.DataFrame:
        """The long rows of a cell that count, by `block`: of an image in several blocks those of
        the last one. Rows count only with the pictures that they name."""
        frames = [pd.DataFrame(columns=["image_id", "block"])]
        for path in sorted(self.root.glob(f"rows/{run_id}/*.parquet")):
            if not path.stem.isdigit():  # a part of a block that was not finished
                self.left_out[path.relative_to(self.root).as_posix()] = None
            elif self.whole(path):
                file = ParquetFile(path)
                named = json.loads((file.metadata.metadata or {}).get(PICTURES, b"{}"))
                if self._has_pictures(run_id, named):
                    frames.append(file.read().to_pandas().assign(block=int(path.stem)))
        rows = pd.concat(frames, ignore_index=True)
        return rows[rows["block"] == rows.groupby("image_id")["block"].transform("max")]

    def _has_pictures(self, run_id: str, named: dict[str, str]) -> bool:
        """Whether a block's pictures are those that its rows name, by the digest of each file."""
        for block, digest in named.items():
            path = self._pictures_at(run_id, int(block))
            if not self.whole(path) or seal_of(path)[0] != digest:
                self.left_out[path.relative_to(self.root).as_posix()] = None
                return False
        return True

    def _pictures_at(self, run_id: str, block: int) -> Path:
        return self.root / f"reconstructions/{run_id}/{block:05d}.safetensors"

    def pictures(self, run_id: str, block: int) -> tuple[list[str], dict[str, Any]]:
        """The images that have pictures in a block, and their tensors as they were handed over."""
        path = self._pictures_at(run_id, block)
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
            about["cell"] = cells.get(run_id)
            for block, rows in self.rows(run_id).groupby("block"):
                wide = self.wide(rows).assign(run_id=run_id)
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
    given = parser.parse_args(words)
    try:
        run = OldRun(given.old)
        if given.out.is_file():
            raise UserError(f"{given.out}: expected an empty folder, or a name that is not taken.")
        check_own(given.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run.convert(RunStore(given.out))
    for what in run.left_out:
        print(f"left out: {what}", file=sys.stderr)
    return 3 if run.left_out else 0


if __name__ == "__main__":
    raise SystemExit(main())
