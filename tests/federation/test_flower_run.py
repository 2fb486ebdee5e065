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


@pytest.mark.parametrize(("engine", "absent"), [("flower", "ray"), ("flower-deployment", "flwr")])
def test_an_engine_without_its_package_is_refused(
    engine: Any, absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_run, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(UserError, match=f"{engine}.*package {absent}"):
        run_flower(small_federation(), tmp_path / "data", tmp_path / "out", engine)


def test_the_app_without_flower_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    flower = ("flwr", "mjp_privacy.federation.flower.")
    for name in [name for name in sys.modules if name.startswith(flower)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(UserError, match="pip install"):
        importlib.import_module("mjp_privacy.federation.flower.app")
