"""A run's folder: reading and writing its files.

    RUN/experiment.yaml                  the resolved experiment of the last command
    RUN/experiments/NAME.yaml            that of every experiment that the folder was filled by
    RUN/cells.json                       the cells of the last command, then those of earlier ones
    RUN/images.csv                       one line per image: label, sha256, status, reason
    RUN/rows/<run_id>/<block>.parquet    one row per image, metric and variant
    RUN/rows/<run_id>/part-<n>.parquet   the rows of many blocks (`compaction`)
    RUN/reconstructions/<run_id>/<block>.safetensors
                                         pictures (`stored_pictures`)
    RUN/code.json                        {what rows hold as `code`: {file: digest of its source}}
    RUN/timings.jsonl                    seconds per stage and block (never part of the rows)
    RUN/adopted.json                     digests of files that versions without seals wrote
    RUN/damaged/                         what was set aside because it was damaged (`mending`)

Rows and pictures carry their own digests (`core/sealed`), and rows name those of their pictures, so
that whatever changes in them is noticed (`damage`). Files are written under a temporary name and
renamed into place, images.csv and timings.jsonl grow line by line: a run that is killed at any
moment leaves whole files, and at most one unfinished line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
from torch import Tensor

from mjp_privacy.core.files import fsync
from mjp_privacy.core.read import is_there
from mjp_privacy.core.sealed import had_seal, seal_now
from mjp_privacy.experiment import row_files
from mjp_privacy.experiment.block_file import ROWS, named_pictures, write_block
from mjp_privacy.experiment.part_file import PartTable
from mjp_privacy.experiment.row_columns import CELL_COLUMNS, NOT_DONE, ROW_COLUMNS
from mjp_privacy.experiment.row_files import NOTHING, LeftOut
from mjp_privacy.experiment.run_lists import RunLists
from mjp_privacy.experiment.score_table import ScoreTable
from mjp_privacy.experiment.stored_pictures import StoredPictures
from mjp_privacy.experiment.stored_units import read_units

__all__ = ["CELL_COLUMNS", "NOT_DONE", "ROW_COLUMNS", "RunStore"]

ASIDE = "damaged"
"""The folder into which damaged files are moved."""


@dataclass(frozen=True)
class RunStore(RunLists):
    """One run folder: RunStore(Path("results/demo")).read_cells()."""

    def place(self, path: Path) -> str:
        """Where a file stands in the folder: "rows/0b3a689adbb159cb/00003.parquet"."""
        return path.relative_to(self.root).as_posix()

    # rows -------------------------------------------------------------------------------------

    def rows_folder(self, run_id: str) -> Path:
        """The folder of one cell's rows."""
        return self.root / "rows" / run_id

    def rows_path(self, run_id: str, block: int) -> Path:
        """The file of one cell's rows of one block."""
        return self.rows_folder(run_id) / f"{block:05d}.parquet"

    def write_rows(self, run_id: str, block: int, rows: pd.DataFrame) -> None:
        """Write one cell's rows of one block, replacing those that are there. They name the
        pictures that are there now, so that these are written before."""
        pictures = self.pictures.digest(run_id, block)
        write_block(self.rows_path(run_id, block), rows, pictures)

    def read_rows(self, run_id: str, left_out: LeftOut = NOTHING) -> pd.DataFrame:
        """All rows of one cell that count (`row_files`), in the order of its blocks; empty if there
        are none."""
        return row_files.read_frame(self.rows_folder(run_id), left_out)

    def score_table(
        self, run_id: str, left_out: LeftOut = NOTHING
    ) -> tuple[ScoreTable, frozenset[str]]:
        """The same rows by metric, for any number of them, and the columns that the files have."""
        return row_files.score_table(self.rows_folder(run_id), left_out)

    def merge_rows(
        self, run_id: str, block: int, parts: Sequence[pd.DataFrame], order: Sequence[str]
    ) -> None:
        """Add rows to a block, replacing those of the same images; `order`: ids to sort them by."""
        self.leave_whole(run_id, block)
        new = pd.concat([part for part in parts if len(part)], ignore_index=True)
        if (old := self._rows_before(self.rows_path(run_id, block))) is not None:
            new = pd.concat([old[~old["image_id"].isin(set(new["image_id"]))], new])
        rank = {image_id: place for place, image_id in enumerate(order)}
        new = new.sort_values("image_id", key=lambda ids: ids.map(rank), kind="stable")
        self.write_rows(run_id, block, new.reset_index(drop=True))

    def drop_images(self, run_id: str, block: int, image_ids: Collection[str]) -> None:
        """Remove these images from a block's rows and pictures, and its files with the last one.

        What is in parts stays as it is: where the images are in a block's file, that one counts,
        and so do its pictures.
        """
        self.leave_whole(run_id, block)
        path = self.rows_path(run_id, block)
        if (rows := self._rows_before(path)) is None:
            return
        kept = rows[~rows["image_id"].isin(list(image_ids))]
        if kept.empty:
            path.unlink()
        self.pictures.put(run_id, block, {}, (), without=image_ids)
        if len(kept):
            self.write_rows(run_id, block, kept.reset_index(drop=True))

    def _rows_before(self, path: Path) -> pd.DataFrame | None:
        """The rows of a block's file, which was found whole; None where there is none."""
        with ROWS.reading(path):
            return pd.read_parquet(path) if path.is_file() else None

    def leave_whole(self, run_id: str, block: int) -> None:
        """Set a block's rows and pictures aside if one of the two files was damaged while the run
        went on: what is left of them must not get a new seal, and the next command does them
        again."""
        paths = self.rows_path(run_id, block), self.pictures.path(run_id, block)
        if any(self.changed(path) for path in paths):
            for path in filter(is_there, paths):
                self.set_aside(path)

    def changed(self, path: Path) -> bool:
        """Whether a file is there and is not as it was written, read anew."""
        if not is_there(path):
            return False
        with ROWS.reading(path):
            seal = seal_now(path)
        if seal.written is not None:
            return not seal.whole
        listed = not self.sealed or self.adopted.get(self.place(path)) == seal.digest
        return not (listed or (self.unlisted and not had_seal(path)))

    def set_aside(self, path: Path) -> None:
        """Move a file into the folder of damaged ones, in place of an earlier one of its name."""
        target = self.root / ASIDE / self.place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
        fsync(path.parent)

    def row_columns(self, run_id: str, left_out: LeftOut = NOTHING) -> list[str]:
        """The columns of a cell's rows, in the order of `read_rows`."""
        return row_files.row_columns(self.rows_folder(run_id), left_out)

    def stored_cells(self) -> list[str]:
        """The run_ids of all cells that have rows, also of those that no command plans any more."""
        return sorted(path.name for path in (self.root / "rows").glob("*") if path.is_dir())

    def row_files(self, run_id: str) -> list[Path]:
        """The files of one cell's rows: parts, then blocks."""
        parts, blocks = self.rows_of(run_id)
        return [*parts, *blocks]

    def rows_of(self, run_id: str) -> tuple[list[Path], list[Path]]:
        """The parts and the blocks' files of one cell, each in their order."""
        return row_files.rows_of(self.rows_folder(run_id))

    # pictures ---------------------------------------------------------------------------------

    @cached_property
    def pictures(self) -> StoredPictures:
        """The folder's pictures."""
        return StoredPictures(self.root, self._block_of)

    def _block_of(self, run_id: str) -> dict[str, int]:
        """The block of each image whose rows count."""
        blocks: dict[str, int] = {}
        units = row_files.settled(
            self.rows_folder(run_id),
            row_files.NOTHING,
            lambda parts, files: [*read_units(parts, files)],
        )
        for unit in units:
            if not unit.failed or unit.image_id not in blocks:
                blocks[unit.image_id] = unit.block
        return blocks

    def named_pictures(self, run_id: str, path: Path) -> dict[int, str]:
        """The digests of the pictures that a file of rows belongs to, by block."""
        named = named_pictures(path)
        if named is not None:
            return named
        blocks = self.blocks_of(path)
        places = {block: self.place(self.pictures.path(run_id, block)) for block in blocks}
        known = self.adopted
        return {block: known[place] for block, place in places.items() if place in known}

    def blocks_of(self, path: Path) -> set[int]:
        """The blocks whose rows a file of rows holds."""
        if path.stem.isdigit():
            return {int(path.stem)}
        return set(PartTable(path).image_rows(("block",))["block"])

    def reconstruction_path(self, run_id: str, block: int) -> Path:
        """The file of one cell's pictures of one block."""
        return self.pictures.path(run_id, block)

    def write_reconstructions(
        self, run_id: str, block: int, tensors: Mapping[str, Tensor], image_ids: Sequence[str]
    ) -> None:
        """Write one cell's pictures of one block (`StoredPictures.write`)."""
        self.pictures.write(run_id, block, tensors, image_ids)

    def reconstructed(self, run_id: str) -> list[str]:
        """The ids of the images whose pictures are stored for a cell, in stored order."""
        return self.pictures.images(run_id)

    def find_reconstruction(self, run_id: str, image_id: str) -> dict[str, Tensor] | None:
        """The stored tensors of one image in one cell, without the leading axis, or None."""
        return self.pictures.find(run_id, image_id)
