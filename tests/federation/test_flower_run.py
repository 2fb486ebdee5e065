"""What can be said of Flower without Flower: refusals, and the app that is written."""

import importlib
import sys
from pathlib import Path

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.federation.flower import run as flower_run
from mjp_privacy.federation.flower.run import run_flower
from tests.helpers.flower import small_federation


def test_an_engine_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected flower or flower-deployment, got 'ray'"):
        run_flower(small_federation(), tmp_path / "data", tmp_path / "out", "ray")


@pytest.mark.parametrize(
    ("engine", "without", "missing"),
    [("flower", "ray", "ray"), ("flower-deployment", "flwr", "flwr")],
)
def test_without_the_packages(
    engine: str, without: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = lambda name: None if name == without else object()  # noqa: E731
    monkeypatch.setattr(flower_run, "find_spec", present)
    says = rf"expected the package {missing}, .* pip install '.\[federated\]' on Python 3.11"
    with pytest.raises(UserError, match=says):
        run_flower(small_federation(), tmp_path / "data", tmp_path / "out", engine)


@pytest.mark.parametrize("module", ["app", "records", "strategy"])
def test_a_module_that_needs_flower_says_so(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        n for n in sys.modules if n.startswith(("flwr", "mjp_privacy.federation.flower."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(UserError, match=r"Flower: .*pip install '.\[federated\]'"):
        importlib.import_module(f"mjp_privacy.federation.flower.{module}")


def test_an_option_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_run, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=r"expected config, row, .*round-timeout, got round-limit"):
        run_flower(small_federation(), tmp_path / "data", tmp_path / "out", round_limit=3)


def test_a_deployment_needs_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_run, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=r"nodes: expected 1 to 3 SuperNodes .*, got 4"):
        run_flower(
            small_federation(), tmp_path / "data", tmp_path / "out", "flower-deployment", nodes=4
        )
