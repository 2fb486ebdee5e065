"""Options that say nothing of recorded uploads are refused by their names, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from mjp_privacy.cli import main

CONFIG = "{name: attacks, attacks: [{name: grey}]}"


@pytest.mark.parametrize(
    "option",
    [
        ["--images", "photographs"],
        ["--images", "embedded"],
        ["--dtypes", "float64"],
        ["--weights", "vit.safetensors"],
        ["--labels", "labels.csv"],
        ["--gamma", "0.5"],
        ["--img-size", "32"],
        ["--client.batch", "2"],
    ],
)
def test_an_idle_option_is_refused(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "attacks.yaml"
    config.write_text(CONFIG)
    words = [str(config), "--uploads", str(tmp_path / "uploads"), "--out", str(tmp_path / "run")]
    assert main(["attack", *words, *option]) == 2
    assert option[0].partition(".")[0] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
