"""tools/ablations.py: which models it takes, what it does again, what it hands to mjp."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tools import ablations

CONFIG = {
    "name": "x",
    "models": {"A_0": {"model": "cifar_vit"}, "A_1": {}, "G_0": {}},
    "grid": [
        {"models": ["A_0", "A_1"], "settings": ["a"]},
        {"models": ["A_1"], "settings": ["c"]},
    ],
}


def test_only_what_is_trained_is_attacked_and_only_what_is_new_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is trained where its file is, or where it is packaged."""
    asked: list[tuple[str, ...]] = []

    def mjp(*arguments: str) -> None:
        """Note the command; an evaluation writes its summary."""
        asked.append(arguments)
        if arguments[0] == "evaluate":
            folder = Path(arguments[arguments.index("--out") + 1])
            folder.mkdir(parents=True)
            label = arguments[2].partition("=")[0]
            pd.DataFrame({"model": [label]}).to_csv(folder / "summary.csv", index=False)

    monkeypatch.setattr(ablations, "_mjp", mjp)
    runs, data = tmp_path / "runs", tmp_path / "test.zip"
    data.write_bytes(b"images")
    file = runs / "G_0" / "model.safetensors"
    packaged = ablations.trained(CONFIG, runs)
    assert packaged == {"A_0": "cifar_vit"}
    ablations.evaluated(packaged, data, tmp_path)
    file.parent.mkdir(parents=True)
    file.touch()
    (runs / "A_1").mkdir()  # a training that has not ended
    both = ablations.trained(CONFIG, runs)
    assert both == {"A_0": "cifar_vit", "G_0": str(file)}
    assert list(ablations.evaluated(both, data, tmp_path)["model"]) == ["A_0", "G_0"]
    file.write_bytes(b"trained anew")
    ablations.evaluated(both, data, tmp_path)
    new = f"G_0={file}"
    assert [command[2] for command in asked] == ["A_0=cifar_vit", new, new]
    ablations.attacked(CONFIG, both, data, tmp_path)
    assert asked[-1][0] == "attack"
    assert asked[-1][-2:] == ("--weights", new)
    assert "A_1" not in Path(asked[-1][1]).read_text()
