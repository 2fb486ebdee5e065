"""tools/ablations.py: which models it takes, what it does again, what it hands to mjp."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

from mjp_privacy.core.files import lock
from tests.helpers.report_rows import intact
from tests.tools.test_publish import planted_run
from tools import ablations
from tools.published_rows import read

GREY = {"grey_psnr": 12.0}
CONFIG = {
    "name": "x",
    "models": {"A_0": {"model": "cifar_vit"}, "A_1": {}, "G_0": {}},
    "grid": [
        {"models": ["A_0", "A_1"], "settings": ["a"]},
        {"models": ["G_0"], "settings": ["c"]},
    ],
}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that were asked for; an evaluation writes its summary."""
    asked: list[tuple[str, ...]] = []

    def mjp(*arguments: str) -> None:
        asked.append(arguments)
        if arguments[0] == "evaluate":
            label = arguments[2].partition("=")[0]
            folder = Path(arguments[arguments.index("--out") + 1])
            folder.mkdir(parents=True, exist_ok=True)
            pd.DataFrame({"model": [label]}).to_csv(folder / "summary.csv", index=False)

    monkeypatch.setattr(ablations, "_mjp", mjp)
    return asked


def test_only_what_is_trained_and_new_is_evaluated(
    tmp_path: Path, commands: list[tuple[str, ...]]
) -> None:
    """A model is trained where its file is, or where it is packaged."""
    runs, data = tmp_path / "runs", tmp_path / "test.zip"
    data.write_bytes(b"images")
    packaged = ablations.trained(CONFIG, runs)
    assert packaged == {"A_0": "cifar_vit"}
    ablations.evaluated(packaged, data, tmp_path, [])
    file = runs / "G_0" / "model.safetensors"
    file.parent.mkdir(parents=True)
    file.touch()
    (runs / "A_1").mkdir()  # a training that has not ended
    both = ablations.trained(CONFIG, runs)
    assert both == {"A_0": "cifar_vit", "G_0": str(file)}
    assert ablations.trained(CONFIG, runs, ["A_1", "G_0"]) == {"G_0": str(file)}
    path = ablations.evaluated(both, data, tmp_path, [])
    assert [command[2] for command in commands] == ["A_0=cifar_vit", f"G_0={file}"]
    assert list(pd.read_csv(path)["model"]) == ["A_0", "G_0"]
    file.write_bytes(b"trained anew")
    ablations.evaluated(both, data, tmp_path, [])
    assert [command[2] for command in commands[2:]] == [f"G_0={file}"]
    ablations.evaluated(both, data, tmp_path, ["--limit", "100"])  # of other images, both
    assert len(commands) == 5


def test_fewer_images_labels_of_no_model_and_a_second_command_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    commands: list[tuple[str, ...]],
) -> None:
    given = ["ablations.py", "--runs", str(tmp_path), "--data", "d.zip", "--out", str(tmp_path)]
    for words, named in ((["--evaluate-limit", "9"], "--publish"), (["--only", "Z_0"], "Z_0")):
        monkeypatch.setattr(sys, "argv", [*given, *words])
        with pytest.raises(SystemExit):
            ablations.main()
        assert named in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*given, "--only", "A_0", "--publish", str(tmp_path / "p")])
    with lock(tmp_path), pytest.raises(SystemExit, match=r"error: Another process is working in"):
        ablations.main()
    assert commands == []


def test_what_is_published_of_other_models_stays(tmp_path: Path) -> None:
    """Two machines publish into one folder; the second has an older attack of the first's model."""
    folder, order = tmp_path / "published", ["A_0", "B_0", "G_0"]
    first = published_run(tmp_path / "1" / "attack", {"G_0": 20.0})
    second = published_run(tmp_path / "2" / "attack", {"G_0": 9.0, "A_0": 30.0})
    for label, run in (("G_0", first), ("A_0", second)):
        summary = run.parent / "summary.csv"
        pd.DataFrame([{"model": label, "top1": 60.0}]).to_csv(summary, index=False)
        ablations.publish(summary, run, folder, order)
    assert list(pd.read_csv(folder / "summary.csv")["model"]) == ["A_0", "G_0"]
    rows = read(folder / "rows.parquet").rows
    assert dict(zip(rows["model"], rows["psnr"], strict=True)) == {"A_0": 30.0, "G_0": 20.0}
    assert [*dict.fromkeys(rows["model"])] == ["A_0", "G_0"]


def published_run(folder: Path, psnr: dict[str, float]) -> Path:
    """A run of two attacks, equally good, on one image of each of these models."""
    pairs = [(label, a) for label in psnr for a in ("token_span", "patch_gradient")]
    lines = [(intact(attack, model=label), [psnr[label]], GREY) for label, attack in pairs]
    return planted_run(folder, *lines)
