"""tools/crash-test: a short round of it, and that it sees what is wrong."""

from __future__ import annotations

import random
import shutil
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mjp_privacy.experiment.store import RunStore

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "crash-test"
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The script as a module."""
    loader = SourceFileLoader("crash_test_tool", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A place whose undisturbed run is there."""
    made = tool.Bench(tmp_path_factory.mktemp("bench"), random.Random(1))
    made.prepare()
    return made


@pytest.mark.parametrize("trial", ["kills", "flips", "lost"])
def test_a_disturbed_run_ends_as_an_undisturbed_one(
    tool: ModuleType, bench: Any, trial: str
) -> None:
    line = tool.Line(trial)
    getattr(tool, trial)(bench, 2, line)
    assert (line.tried, line.wrong) == (2, [])


def test_what_differs_is_seen(tool: ModuleType, bench: Any) -> None:
    """Rows as a forger writes them: whole, with a digest, and wrong."""
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
