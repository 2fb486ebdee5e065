"""What can be said of Flower without Flower: refusals."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.federation.flower import run as flower_run
from mjp_privacy.federation.flower.run import run_flower
from tests.helpers.federations import small_federation


@pytest.mark.parametrize(
    ("options", "absent", "named"),
    [
        ({"engine": "ray"}, None, "ray"),
        ({"engine": "flower"}, "ray", "package ray"),
        ({"engine": "flower-deployment"}, "flwr", "package flwr"),
        ({"round_limit": 3}, None, "round-limit"),
        ({"engine": "flower-deployment", "nodes": 4}, None, "nodes"),
    ],
)
def test_what_cannot_be_run_is_refused(
    options: dict[str, Any],
    absent: str | None,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flower_run, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(UserError, match=named):
        run_flower(small_federation(), tmp_path / "data", tmp_path / "out", **options)


@pytest.mark.parametrize("module", ["app", "strategy"])
def test_a_module_that_needs_flower_says_so(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flower = ("flwr", "mjp_privacy.federation.flower.")
    for name in [name for name in sys.modules if name.startswith(flower)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(UserError, match="pip install"):
        importlib.import_module(f"mjp_privacy.federation.flower.{module}")
