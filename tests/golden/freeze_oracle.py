"""Write oracle/*: the eight runs by the tree that `mjp_privacy` is imported from, which is trusted.

    PYTHONPATH=OLD:. OMP_NUM_THREADS=1 python -m tests.golden.freeze_oracle /tmp/oracle-old

Afterwards /tmp/oracle-old/NAME holds the inputs and the run of each case. Frozen once, by the last
tree whose run store was one of many small files (commit 2c88397); code that changes a number on
purpose freezes anew and says so in the changelog.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pandas as pd

from tests.golden import oracle

KEPT = 3
"""Reconstructions of a case of which more than a digest is frozen."""


def compute(place: Path) -> None:
    """Run all cases below `place`."""
    for name in (*oracle.CASES, "old_run"):
        oracle.run(name, oracle.inputs(name, place / name / "inputs"), place / name / "run")


def freeze(place: Path) -> None:
    """Write what these runs gave."""
    values, pictures = [], []
    for name in oracle.CASES:
        folder = oracle.run_folder(name, place / name / "run")
        values.append(oracle.long_frame(folder).assign(case=name))
        pictures.append(oracle.picture_frame(folder, KEPT).assign(case=name))
    for table, frames in (("values", values), ("pictures", pictures)):
        frame = pd.concat(frames, ignore_index=True)
        frame.to_parquet(oracle.HOME / f"{table}.parquet", compression="zstd", index=False)
    (oracle.HOME / "machine.json").write_text(json.dumps(oracle.machine(), indent=1) + "\n")
    pack(place / "old_run" / "run")


def pack(folder: Path) -> None:
    """Write oracle/old_run.zip, a run folder as that tree wrote it."""
    with zipfile.ZipFile(oracle.HOME / "old_run.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            archive.write(path, path.relative_to(folder))


if __name__ == "__main__":
    compute(Path(sys.argv[1]))
    freeze(Path(sys.argv[1]))
