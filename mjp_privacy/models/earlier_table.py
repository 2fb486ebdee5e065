"""A table of other models in --out, which a command would replace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, read_csv
from mjp_privacy.core.text import shown
from mjp_privacy.models.named import NamedCheckpoint

TABLE = FileKind("a table of models", "Give another --out.", 1 << 30)
ESCAPE = "'"  # before a label that a spreadsheet would take for a formula


def keep_earlier(
    out: Path, name: str, checkpoints: Sequence[NamedCheckpoint], column: str = "model"
) -> None:
    """Raise where the CSV `name` in `out` has a model that is not among these: its figures would be
    lost. A command that is given again may replace its own.

    keep_earlier(Path("out"), "summary.csv", named_checkpoints(["cifar_vit"], "--checkpoint"))

    column: of the labels; lines of another `kind` than "model" do not count
    """
    path = out / name
    if not path.is_file():
        return
    rows = [row for row in read_csv(path, TABLE, [column]) if row.get("kind", "model") == "model"]
    there = list(dict.fromkeys(row[column].removeprefix(ESCAPE) for row in rows))
    labels = [checkpoint.label.removeprefix(ESCAPE) for checkpoint in checkpoints]
    if others := [shown(label, 100) for label in there if label not in labels]:
        raise UserError(
            f"--out {shown(out)} holds {name} with {', '.join(others)}, and this command is about "
            f"{', '.join(labels)}: what stands there would be lost. Give another --out, name "
            "those models too, or move the folder away."
        )
