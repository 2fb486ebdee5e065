"""The run of one process, with which those of the engines are compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.runs import attack
from tests.helpers.trap import CONFIG, Trap


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
