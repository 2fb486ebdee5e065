"""tools/crash-test, which `make nightly` calls, sees what is wrong."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from mjp_privacy.experiment.store import RunStore
from tests.helpers.scripts import script


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
