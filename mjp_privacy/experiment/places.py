"""Where the folders of a run folder have to be folders: check_places(Path("results/demo")).

A file in place of one cannot be set aside as a damaged file: whoever put it there has the rows that
stood there, or knows where they went.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import is_there
from mjp_privacy.core.text import shown

FOLDERS = {
    "rows": "the rows of each cell",
    "reconstructions": "the pictures of each cell",
    "experiments": "the experiments that filled it",
    "damaged": "files that were set aside",
}
"""The folders in a run folder, and what is in them."""

OF_CELLS = ("rows", "reconstructions")
"""Those with a folder for each cell."""


def check_places(root: Path) -> None:
    """Raise UserError where a file stands in place of a folder of a run."""
    for path, held in _folders(root):
        if (is_there(path) or path.is_symlink()) and not path.is_dir():
            raise UserError(
                f"{shown(path)}: expected a folder, with {held}; got a file or a link to nowhere. "
                "Put the folder back if you have it; else take this file away, and the same attack "
                "makes again what was in it."
            )


def _folders(root: Path) -> Iterator[tuple[Path, str]]:
    for name, held in FOLDERS.items():
        yield root / name, held
    for name in OF_CELLS:
        kind = FOLDERS[name].replace("each", "a")
        if (root / name).is_dir():
            yield from ((path, kind) for path in sorted((root / name).iterdir()) if _is_id(path))


def _is_id(path: Path) -> bool:
    """Whether this is named as a cell's folder is: 16 hexadecimal digits."""
    return len(path.name) == 16 and not path.name.strip("0123456789abcdef")
