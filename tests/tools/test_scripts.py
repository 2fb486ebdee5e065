"""The crash test sees what is wrong, environments are compared by rows, models have their cards."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mjp_privacy.experiment.store import RunStore
from tests.helpers.runs import attack, one_cell, photographs
from tests.helpers.scripts import script
from tools.publish import CARD, ROOT, ZOO, card


@pytest.mark.nightly
def test_what_differs_is_seen(tmp_path: Path) -> None:
    """Rows as a forger writes them: whole, with a digest, and wrong."""
    tool = script("crash-test")
    bench = tool.Bench(tmp_path, random.Random(1))
    bench.prepare()
    out = bench.folder()
    shutil.copytree(bench.root / "undisturbed", out)
    store = RunStore(out)
    run_id = store.stored_cells()[0]
    rows = store.read(run_id)
    store.write(run_id, 0, rows[rows["block"] == 0].assign(**{"psnr.standard": 1.0}))
    line = tool.Line("forged")
    bench.finish(out, line)
    assert len(line.wrong) == 1
    assert run_id in line.wrong[0]


def test_a_line_says_how_far_a_run_is_from_the_standard(tmp_path: Path) -> None:
    """Distances are relative above one, and infinite where a value is lost."""
    tool = script("test-environments")
    config = one_cell(attacks=[{"name": "grey"}], dtypes=["float32", "float64"])
    attack(photographs(tmp_path / "images", 3), tmp_path / "run", config)
    standard, rows = tmp_path / f"{tool.STOCK[0].replace('=', '_torch')}.parquet", tmp_path / "rows"
    program = [sys.executable, "-c", tool.STORED_ROWS, str(tmp_path / "run"), str(rows)]
    subprocess.run(program, check=True)
    rows = pd.read_parquet(rows)
    rows = rows[rows["metric"] == "psnr"]
    rows.assign(value=20.0).to_parquet(standard)
    first = rows["image_id"] == "0.png"
    double = rows["dtype"] == "float64"
    near = rows.assign(value=20.0)
    near.loc[first & double, "value"] = 20.5
    near.loc[first & ~double, "value"] = np.nan
    near.sample(frac=1, random_state=0).to_parquet(tmp_path / "near.parquet")
    near.iloc[1:].to_parquet(tmp_path / "short.parquet")
    other = rows.assign(value=20.0, status=rows["status"].where(~first, "failed"))
    other.to_parquet(tmp_path / "other.parquet")
    lines = {line.split(" | ")[0][2:]: line for line in tool.comparison(tmp_path).splitlines()}
    assert lines["near"].endswith(" | 2.5e-02 | 5.0e-01 | 0.0e+00 | inf | inf | 0.0e+00 |")
    assert lines["near"].split(" | ")[1:4] == ["12", "0", "66.7 %"]
    assert lines["other"].split(" | ")[1:4] == ["12", "4", "100.0 %"]
    assert lines["short"].startswith("| short | 11 | has other rows |")


def test_the_card_is_what_metadata_and_results_say() -> None:
    """And weights of other sources are named in the README of their folder."""
    names = [file.stem for file in ZOO.glob("*.safetensors")]
    assert names
    assert all(f"| `{name}` |" in card() for name in names)
    assert CARD.read_text(encoding="utf-8") == card(), "python -m tools.publish card"
    weights = [*ROOT.glob("mjp_privacy/**/*.safetensors"), *ROOT.glob("attacks/**/*.safetensors")]
    others = [file for file in weights if file.parent != ZOO]
    assert len(others) == 3
    for file in others:
        assert file.name in (file.parent / "README.md").read_text(encoding="utf-8")
