"""Markers and fixtures of the engines' tests.

pytest tests/engines -m "not cluster and not nightly" takes half a minute of processor time;
`cluster` starts Ray or Slurm on this machine, `nightly` starts many processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engine_runs import CONFIG
from tests.helpers.runs import attack
from tests.helpers.trap import Trap


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: starts Ray or Slurm on this machine")
    config.addinivalue_line("markers", "nightly: takes long, or many processes")


@pytest.fixture(scope="module")
def here(
    nine_photographs: Path, planted_trap: Trap, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run of CONFIG in this process."""
    out = tmp_path_factory.mktemp("here")
    attack(nine_photographs, out, CONFIG)
    return out


@pytest.fixture
def trap(planted_trap: Trap, here: Path) -> Iterator[Trap]:
    planted_trap.reset()
    yield planted_trap
    planted_trap.reset()
