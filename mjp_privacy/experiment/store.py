"""A run's folder: reading and writing its files.

    RUN/experiment.yaml                  the resolved experiment of the last command
    RUN/experiments/NAME.yaml            that of every experiment that the folder was filled by
    RUN/cells.json                       the cells of the last command, then those of earlier ones
    RUN/images.csv                       one line per image: label, sha256, status, reason
    RUN/rows/<run_id>/<block>.parquet    one row per image, metric and variant
    RUN/rows/<run_id>/part-<n>.parquet   the rows of many blocks (`compaction`)
    RUN/reconstructions/<run_id>/<block>.safetensors
                                         pictures; their metadata name images and scales
    RUN/code.json                        {what rows hold as `code`: {file: digest of its source}}
    RUN/timings.jsonl                    seconds per stage and block (never part of the rows)

All files but the last are written under a temporary name and renamed into place, so a run that is
killed at any moment leaves only complete ones.

In a file of reconstructions `images` is what the attack made, always float32 in [0, 1]. The other
pictures may be bytes: the metadata's "scale:NAME", "1/255" or "1", says by what to multiply, and
"image_ids" lists the images in the order of the tensors' first axis (`packing.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically, write_json
from mjp_privacy.core.tensor_files import save_tensors
from mjp_privacy.experiment.packing import appended, pack, unpack
from mjp_privacy.experiment.reconstruction_index import ReconstructionIndex
from mjp_privacy.experiment.row_columns import CELL_COLUMNS, NOT_DONE, ROW_COLUMNS
from mjp_privacy.experiment.row_files import (
    read_frame,
    row_columns,
    rows_of,
    score_table,
)
from mjp_privacy.experiment.score_table import ScoreTable
from mjp_privacy.experiment.timings import read_timings

__all__ = ["CELL_COLUMNS", "NOT_DONE", "ROW_COLUMNS", "RunStore"]


@dataclass(frozen=True)
class RunStore:
    """One run folder: RunStore(Path("results/demo")).read_cells()."""

    root: Path
    _indexes: dict[str, ReconstructionIndex] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The places of stored images that were asked for so far, by run_id."""

    # rows -------------------------------------------------------------------------------------

    def rows_folder(self, run_id: str) -> Path:
        """The folder of one cell's rows."""
        return self.root / "rows" / run_id

    def rows_path(self, run_id: str, block: int) -> Path:
        """The file of one cell's rows of one block."""
        return self.rows_folder(run_id) / f"{block:05d}.parquet"

    def write_rows(self, run_id: str, block: int, rows: pd.DataFrame) -> None:
        """Write one cell's rows of one block, replacing those that are there."""
        path = self.rows_path(run_id, block)
        write_atomically(path, lambda temporary: rows.to_parquet(temporary, index=False))

    def read_rows(self, run_id: str) -> pd.DataFrame:
        """All rows of one cell that count (`row_files`), in the order of its blocks; empty if there
        are none."""
        return read_frame(self.rows_folder(run_id))

    def score_table(self, run_id: str) -> tuple[ScoreTable, frozenset[str]]:
        """The same rows by metric, for any number of them, and the columns that the files have."""
        return score_table(self.rows_folder(run_id))

    def merge_rows(
        self, run_id: str, block: int, parts: Sequence[pd.DataFrame], order: Sequence[str]
    ) -> None:
        """Add rows to a block, replacing those of the same images; `order`: ids to sort them by."""
        new = pd.concat([part for part in parts if len(part)], ignore_index=True)
        path = self.rows_path(run_id, block)
        if path.is_file():
            old = pd.read_parquet(path)
            new = pd.concat([old[~old["image_id"].isin(set(new["image_id"]))], new])
        rank = {image_id: place for place, image_id in enumerate(order)}
        new = new.sort_values("image_id", key=lambda ids: ids.map(rank), kind="stable")
        self.write_rows(run_id, block, new.reset_index(drop=True))

    def drop_rows(self, run_id: str, block: int, image_ids: Collection[str]) -> None:
        """Remove these images from a block's rows, and the file with the last of them.

        In parts nothing is removed: where the images are in a block's file, that one counts.
        """
        path = self.rows_path(run_id, block)
        if not path.is_file():
            return
        rows = pd.read_parquet(path)
        kept = rows[~rows["image_id"].isin(list(image_ids))]
        if kept.empty:
            path.unlink()
        else:
            self.write_rows(run_id, block, kept.reset_index(drop=True))

    def row_columns(self, run_id: str) -> list[str]:
        """The columns of a cell's rows, in the order of `read_rows`."""
        return row_columns(self.rows_folder(run_id))

    def stored_cells(self) -> list[str]:
        """The run_ids of all cells that have rows, also of those that no command plans any more."""
        return sorted(path.name for path in (self.root / "rows").glob("*") if path.is_dir())

    def row_files(self, run_id: str) -> list[Path]:
        """The files of one cell's rows: parts, then blocks."""
        parts, blocks = self.rows_of(run_id)
        return [*parts, *blocks]

    def rows_of(self, run_id: str) -> tuple[list[Path], list[Path]]:
        """The parts and the blocks' files of one cell, each in their order."""
        return rows_of(self.rows_folder(run_id))

    # reconstructions --------------------------------------------------------------------------

    def reconstruction_path(self, run_id: str, block: int) -> Path:
        """The file of one cell's reconstructions of one block."""
        return self.root / "reconstructions" / run_id / f"{block:05d}.safetensors"

    def write_reconstructions(
        self, run_id: str, block: int, tensors: Mapping[str, Tensor], image_ids: list[str]
    ) -> None:
        """Write one cell's reconstructions of one block. `tensors`: images (m, C, H, W) float32;
        with truth target, plain and input too, mask and permutation (m, N) if there are any."""
        packed, metadata = pack(tensors)
        metadata["image_ids"] = json.dumps(image_ids)
        save_tensors(self.reconstruction_path(run_id, block), packed, metadata)

    def read_reconstructions(self, path: Path) -> tuple[dict[str, Tensor], list[str]]:
        """The tensors that were given to `write_reconstructions`, and the ids of their images."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return unpack(tensors, file.metadata()), json.loads(file.metadata()["image_ids"])

    def merge_reconstructions(
        self, run_id: str, block: int, tensors: Mapping[str, Tensor], image_ids: list[str]
    ) -> None:
        """Add images to a block, replacing those of the same ids.

        Images that lack a tensor which others of the block have get zeros.
        """
        path = self.reconstruction_path(run_id, block)
        if path.is_file():
            old, old_ids = self.read_reconstructions(path)
            kept = [at for at, image_id in enumerate(old_ids) if image_id not in image_ids]
            if kept:
                tensors = appended({name: t[kept] for name, t in old.items()}, tensors)
            image_ids = [*(old_ids[at] for at in kept), *image_ids]
        self.write_reconstructions(run_id, block, tensors, image_ids)

    def drop_reconstructions(self, run_id: str, block: int, image_ids: Collection[str]) -> None:
        """Remove these images from a block's reconstructions, and the file with the last of them;
        it may hold none of them."""
        path = self.reconstruction_path(run_id, block)
        if not path.is_file():
            return
        old, old_ids = self.read_reconstructions(path)
        kept = [at for at, image_id in enumerate(old_ids) if image_id not in image_ids]
        if not kept:
            path.unlink()
        elif len(kept) < len(old_ids):
            tensors = {name: t[kept] for name, t in old.items()}
            self.write_reconstructions(run_id, block, tensors, [old_ids[at] for at in kept])

    def find_reconstruction(self, run_id: str, image_id: str) -> dict[str, Tensor] | None:
        """The stored tensors of one image in one cell, without the leading axis, or None."""
        from safetensors import safe_open

        place = self._index(run_id).places.get(image_id)
        if place is None:
            return None
        with safe_open(place.path, framework="pt") as file:
            tensors = {name: file.get_slice(name)[place.position] for name in file.keys()}
            return unpack(tensors, file.metadata())

    def reconstructed(self, run_id: str) -> list[str]:
        """The ids of the images whose reconstructions are stored for a cell, in stored order."""
        return list(self._index(run_id).places)

    def _index(self, run_id: str) -> ReconstructionIndex:
        """Where the cell's images are; read again if a file was added or replaced."""
        folder = self.root / "reconstructions" / run_id
        index = self._indexes.get(run_id)
        if index is None or not index.holds(folder):
            index = self._indexes[run_id] = ReconstructionIndex.of(folder)
        return index

    # the run itself ---------------------------------------------------------------------------

    def write_cells(self, cells: list[dict[str, Any]]) -> None:
        """Write cells.json: the columns of every cell's facts."""
        write_json(self.root / "cells.json", {"format": 1, "cells": cells})

    def merge_cells(
        self, cells: Sequence[Mapping[str, Any]], planned: Sequence[Mapping[str, Any]]
    ) -> None:
        """Update cells.json with `cells`: planned ones first, then those of other commands.

        A planned cell that is not among `cells` stays as the file holds it.
        """
        try:
            stored = {cell["cell_key"]: cell for cell in self.read_cells()}
        except UserError:
            stored = {}
        merged = {
            **{cell["cell_key"]: dict(cell) for cell in planned},
            **stored,
            **{cell["cell_key"]: dict(cell) for cell in cells},
        }
        self.write_cells(list(merged.values()))

    def read_cells(self) -> list[dict[str, Any]]:
        """The entries of cells.json; `CellFacts.read` makes facts of one."""
        path = self.root / "cells.json"
        if not path.is_file():
            raise UserError(
                f"{self.root} is not a run folder: expected {path.name} in it, as mjp attack "
                "writes it. Give the folder that was the --out of a run."
            )
        try:
            cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read ({error}). Run the attack again.") from error
        return cells

    def write_images(self, images: pd.DataFrame) -> None:
        """Write images.csv."""
        path = self.root / "images.csv"
        write_atomically(path, lambda temporary: images.to_csv(temporary, index=False))

    def read_images(self) -> pd.DataFrame:
        """images.csv as a table; empty if there is none yet."""
        path = self.root / "images.csv"
        if not path.is_file():
            columns = ["image_id", "label", "label_source", "sha256", "status", "reason"]
            return pd.DataFrame(columns=columns)
        names = ("image_id", "label_source", "sha256", "pixel_sha256", "status", "reason")
        text: dict[Hashable, str] = dict.fromkeys(names, "str")
        return pd.read_csv(path, dtype=text, keep_default_na=False, na_values={"label": [""]})

    def append_timing(self, record: Mapping[str, Any]) -> None:
        """Append a line to timings.jsonl."""
        self.root.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record).encode() + b"\n"
        with (self.root / "timings.jsonl").open("ab+") as file:
            if file.tell():  # do not continue a line that a killed run left unfinished
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)

    def read_timings(self) -> pd.DataFrame:
        """timings.jsonl as a table; lines that are cut off are left out."""
        return read_timings(self.root / "timings.jsonl")
