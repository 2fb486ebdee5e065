"""What is said of attacks that do not apply, before a run and after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mjp_privacy.cli import main

CONFIG = """
name: refusals
images: embedded
dtypes: [float32]
attacks: [{name: april}, {name: multi_round}]
models: {ViT: {model: cifar_vit}}
grid:
  - {models: [ViT], settings: [a], attacks: [april], client: {batch: 2}}
  - {models: [ViT], settings: [b], attacks: [april, multi_round]}
"""


def test_refusals_are_said_before_and_counted_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "refusals.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    assert main(["attack", str(config), "--out", str(tmp_path / "run"), "--limit", "2"]) == 0
    printed = capsys.readouterr()
    before = printed.err.index("not applicable: multi_round in setting b")
    assert before < printed.err.index("cifar_vit")  # before any model is opened
    assert "Not applicable, each a row with its reason:" in printed.out
    assert "2 images in 1 cell: each upload was shuffled differently" in printed.out
    assert "2 images in 1 cell: APRIL is for batch 1" in printed.out
