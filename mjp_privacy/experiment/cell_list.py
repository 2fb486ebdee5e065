"""cells.json of a run folder: the cells that its tables have, and how the folder is written.

    {"seal": "mjp-seal:9f31…", "format": 2, "cells": [{"run_id": "0b3a…", "model": "ViT", …}, …]}

In format 2 every file of rows and of pictures has a seal, every line of images.csv and of
timings.jsonl a checksum. Folders of format 1 have none; they are read, and a run makes them of
format 2 (`mending`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import FileKind, is_there, read_json_value
from mjp_privacy.core.schema import listed_mistakes
from mjp_privacy.core.sealed import read_sealed_json, write_sealed_json
from mjp_privacy.core.text import shown
from mjp_privacy.experiment.cell_facts import OWN, PARTS, CellFacts, columns_of

UNSEALED, SEALED = 1, 2
"""The formats of run folders."""

REQUIRED = ("run_id", "model", "setting", "gamma", "attack", "dtype", "seed", "status")
"""What every entry has, whichever version wrote it."""
CELLS = FileKind("the list of a run's cells", "Run the attack again, which mends it.", 1 << 30)


def cells_path(root: Path) -> Path:
    """The file of this run folder."""
    return root / "cells.json"


def write_cells(root: Path, cells: Sequence[Mapping[str, Any]]) -> None:
    """Write the whole list, in the newest format."""
    entries = [dict(cell) for cell in cells]
    write_sealed_json(cells_path(root), {"format": SEALED, "cells": entries})


def read_cells(root: Path) -> list[dict[str, Any]]:
    """The entries of the list; `CellFacts.read` makes facts of one."""
    path = cells_path(root)
    if not is_there(path):
        raise UserError(
            f"{root} is not a run folder: expected {path.name} in it, as mjp attack writes it. "
            "Give the folder that was the --out of a run."
        )
    content = read_json_value(path, CELLS)
    written_in = _format(content)
    if isinstance(content, dict) and written_in not in (UNSEALED, SEALED):
        raise CELLS.refusal(path, f"format {shown(written_in, 40)}, not {SEALED}", "format")
    if written_in == SEALED:
        content = read_sealed_json(path, CELLS, needed=True)
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise CELLS.refusal(path, "what is no list of cells", "cells")
    for number, cell in enumerate(cells):
        if fault := _fault(cell):
            raise CELLS.refusal(path, fault, f"cell {number}")
    keys = [str(cell["cell_key"]) for cell in cells if "cell_key" in cell]
    if len({*keys}) < len(keys):
        raise CELLS.refusal(path, "a cell that is listed twice", "cells")
    return cells


def _fault(cell: Mapping[str, Any]) -> str:
    """What is wrong with the fields of an entry that `CellFacts` reads; empty if nothing is."""
    if missing := [name for name in REQUIRED if name not in cell]:
        return f"one without {', '.join(missing)}, as another version may have written it"
    try:
        for kind in PARTS.values():
            names = (field.name for field in dataclasses.fields(kind))
            columns = zip(names, columns_of(kind), strict=True)
            values = {n: _as_now(n, cell[column]) for n, column in columns if column in cell}
            _adapter(kind).validate_python(values)  # type: ignore[arg-type]
        _adapter(OwnFields).validate_python({n: cell[n] for n in OWN if n in cell})
    except ValidationError as error:
        return listed_mistakes(error, CellFacts, {})
    run_id = cell.get("run_id", "")
    return "" if run_id == Path(run_id).name else f"the run_id {shown(run_id, 60)!r}"


def _as_now(name: str, value: Any) -> Any:
    """A field as this version writes it: earlier ones had a list of what is withheld."""
    is_list = isinstance(value, list) and all(isinstance(word, str) for word in value)
    return ", ".join(value) if name == "withhold" and is_list else value


@dataclasses.dataclass(frozen=True)
class OwnFields:
    """The fields of `CellFacts` that belong to none of its parts."""

    setting: str = ""
    gamma: float = 0.0
    dtype: str = ""
    seed: int = 0


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def folder_format(root: Path) -> int | None:
    """How the folder says that it is written; None where its list cannot be read."""
    try:
        content = read_json_value(cells_path(root), CELLS)
        read_cells(root)
    except BadFile:
        return None
    return UNSEALED if _format(content) == UNSEALED else SEALED


def _format(content: Any) -> Any:
    """The format that a list says it has; earlier versions of the first said nothing."""
    return content.get("format", UNSEALED) if isinstance(content, dict) else None
