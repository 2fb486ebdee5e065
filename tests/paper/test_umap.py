"""The plane that UMAP lays position embeddings out in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from mjp_privacy.cli import main
from mjp_privacy.paper.positions import PositionTable
from mjp_privacy.paper.positions_picture import umap_plane

needs_umap = pytest.mark.skipif(
    importlib.util.find_spec("umap") is None, reason="needs umap-learn: pip install .[umap]"
)


def clusters() -> PositionTable:
    """Two far clusters of 18 patches each in 24 dimensions."""
    rows = np.random.default_rng(0).normal(size=(36, 24))
    rows[18:] += 100
    return PositionTable(6, rows)


@needs_umap
def test_what_is_near_stays_near() -> None:
    table = clusters()
    plane = umap_plane(table, 0)
    assert plane.shape == (36, 2)
    apart = np.linalg.norm(plane[:18].mean(axis=0) - plane[18:].mean(axis=0))
    assert apart > 2 * max(part.std() for part in (plane[:18], plane[18:]))
    assert np.array_equal(plane, umap_plane(table, 0))
    assert not np.array_equal(plane, umap_plane(table, 1))


@needs_umap
def test_the_command_draws_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["analyse", "patch14_vit", "--umap", "--limit", "1", "--out", str(out)]) == 0
    assert (out / "umap.png").stat().st_size > 5_000
    assert "(umap.png)" in (out / "analysis.md").read_text("utf-8")


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)
    out = tmp_path / "out"
    assert main(["analyse", "cifar_vit", "--umap", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "--umap: expected the package umap-learn" in said
    assert "pip install .[umap]" in said
    assert not out.exists()
