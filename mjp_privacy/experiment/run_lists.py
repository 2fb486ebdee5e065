"""The files of a run folder that are about the whole run, and how the folder is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import is_there
from mjp_privacy.core.sealed import written_seal
from mjp_privacy.experiment import cell_list
from mjp_privacy.experiment.adopted_files import adopted_path, read_adopted
from mjp_privacy.experiment.image_list import ImageList, append_images, write_images
from mjp_privacy.experiment.timings import Timings, append_timing


@dataclass(frozen=True)
class RunLists:
    """cells.json, images.csv, timings.jsonl and adopted.json of a folder; `RunStore` is one."""

    root: Path

    def __post_init__(self) -> None:
        if ":" in "".join(self.root.parts[:1]):  # run:1/rows would be an address to pyarrow
            object.__setattr__(self, "root", self.root.absolute())

    @property
    def format(self) -> int:
        """How the folder is written (`cell_list`). Where that cannot be read, a seal tells it."""
        known = cell_list.folder_format(self.root)
        if known is not None:
            return known
        return cell_list.SEALED if self._has_seals() else cell_list.UNSEALED

    def _has_seals(self) -> bool:
        paths = self.root.glob("rows/*/*.parquet")
        return any(written_seal(path) is not None for path in paths if path.is_file())

    @cached_property
    def _adopted(self) -> Mapping[str, str] | None:
        return read_adopted(self.root)

    @property
    def adopted(self) -> Mapping[str, str]:
        """The digests of files that versions without seals wrote, by their place in the folder."""
        return self._adopted or {}

    @property
    def sealed(self) -> bool:
        """Whether a file without a seal is damaged: not in a folder of an earlier version, nor
        where it is not known any more which files such a version wrote."""
        return self.format != cell_list.UNSEALED and self._adopted is not None

    @property
    def unlisted(self) -> bool:
        """Whether files without a seal may be an earlier version's, because adopted.json, which
        lists them, is not there. A folder that no earlier version wrote into never has one."""
        return self.sealed and not is_there(adopted_path(self.root))

    @property
    def _checked(self) -> bool:
        """Whether lines of images.csv and timings.jsonl have checksums."""
        return self.format != cell_list.UNSEALED

    def write_cells(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """Write cells.json: the columns of every cell's facts."""
        cell_list.write_cells(self.root, cells)

    def merge_cells(
        self, cells: Sequence[Mapping[str, Any]], planned: Sequence[Mapping[str, Any]]
    ) -> None:
        """Update cells.json with `cells`: planned ones first, then those of other commands.

        A planned cell that is not among `cells` stays as the file holds it.
        """
        try:
            stored = {str(cell["cell_key"]): cell for cell in self.read_cells()}
        except (UserError, KeyError):
            stored = {}
        merged = {
            **{cell["cell_key"]: dict(cell) for cell in planned},
            **stored,
            **{cell["cell_key"]: dict(cell) for cell in cells},
        }
        self.write_cells(list(merged.values()))

    def read_cells(self) -> list[dict[str, Any]]:
        """The entries of cells.json; `CellFacts.read` makes facts of one."""
        return cell_list.read_cells(self.root)

    @property
    def images_path(self) -> Path:
        """The list of images."""
        return self.root / "images.csv"

    def write_images(self, images: pd.DataFrame) -> None:
        """Write images.csv anew."""
        records: list[dict[str, Any]] = images.to_dict("records")  # type: ignore[assignment]
        write_images(self.images_path, records)

    def append_images(self, images: Sequence[Mapping[str, Any]]) -> None:
        """Add lines to images.csv; the last one of an image counts."""
        append_images(self.images_path, images)

    def image_list(self) -> ImageList:
        """What images.csv holds."""
        return ImageList.read(self.images_path, checked=self._checked)

    def read_images(self) -> pd.DataFrame:
        """images.csv as a table; empty if there is none yet."""
        return self.image_list().table

    @property
    def timings_path(self) -> Path:
        """How long stages took."""
        return self.root / "timings.jsonl"

    def append_timing(self, record: Mapping[str, Any]) -> None:
        """Append a line to timings.jsonl."""
        append_timing(self.timings_path, record)

    def timings(self) -> Timings:
        """What timings.jsonl holds."""
        return Timings.read(self.timings_path, checked=self._checked)

    def read_timings(self) -> pd.DataFrame:
        """timings.jsonl as a table; lines that are cut off are left out."""
        return self.timings().table
