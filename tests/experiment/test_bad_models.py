"""Models that cannot be loaded: rows with their reason beside models that can; alone, no work."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel, load_model
from tests.helpers.runs import TINY, attack, cells, one_cell, photographs, rows

State = dict[str, torch.Tensor]
Change = Callable[[State], object]
GRID = [{"models": ["ViT", "second", "third"], "settings": ["a"]}]
ATTACKS = [{"name": "patch_gradient"}]

BAD: dict[str, tuple[Change, str]] = {
    "NaN": (lambda s: s["norm.weight"].fill_(float("nan")), "norm.weight: expected the weights"),
    "types": (lambda s: s.update({"norm.bias": s["norm.bias"].to(torch.int8)}), "type int8"),
    "names": (lambda s: s.update({"blocks.foo.weight": torch.zeros(1)}), "blocks.foo.weight"),
    "rows": (lambda s: s.update({"pos_embed": torch.zeros(1, 0, 192)}), "which holds no number"),
    "part": (lambda s: s.pop("head.bias"), "holds no 'head.bias'"),
}
FACTS = {"num_heads": 3, "mean": 0.5, "std": 0.5, "img_size": 32}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return photographs(tmp_path / "images", 3)


def weights(path: Path, change: Change | None = None) -> str:
    model: LoadedModel = load_model(**TINY)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    if change is not None:
        change(state)
    save_file(state, path)
    return str(path)


@pytest.mark.parametrize("bad", ["NaN", "types", "names", "rows", "a pipe", "cut off"])
def test_a_bad_model_is_rows_and_the_others_go_on(images: Path, tmp_path: Path, bad: str) -> None:
    path = tmp_path / "bad.safetensors"
    if bad == "a pipe":
        os.mkfifo(path)
        said = "got a named pipe"
    else:
        change, said = BAD.get(bad, (None, "got what cannot be read (SafetensorError"))
        weights(path, change)
    if bad == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    models = {
        "ViT": TINY,
        "second": {**FACTS, "checkpoint": str(path)},
        "third": {**FACTS, "checkpoint": weights(tmp_path / "good.safetensors")},
    }
    config = one_cell(models=models, grid=GRID, attacks=ATTACKS)
    summary = attack(images, tmp_path / "run", config)
    assert summary.exit_code == 3
    assert [line for line in summary.failures if said in line], summary.failures
    assert {entry["model"]: entry["status"] for entry in cells(tmp_path / "run")} == {
        "ViT": "ok",
        "second": "failed",
        "third": "ok",
    }
    found = rows(tmp_path / "run")
    failed = found[found["model"] == "second"]
    assert set(failed["status"]) == {"failed"}
    assert all(said in reason for reason in failed["reason"])
    scored = found[(found["model"] != "second") & (found["metric"] == "psnr")]
    assert set(scored["status"]) == {"ok"}


@pytest.mark.parametrize("bad", ["NaN", "types", "rows"])
def test_where_every_model_is_bad_nothing_is_begun(images: Path, tmp_path: Path, bad: str) -> None:
    change, said = BAD[bad]
    path = weights(tmp_path / "bad.safetensors", change)
    model = {**FACTS, "checkpoint": path}
    config = one_cell(models={"ViT": model}, attacks=ATTACKS)
    with pytest.raises(UserError) as caught:
        attack(images, tmp_path / "run", config)
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    words = ["attack", str(file), "--images", str(images), "--out", str(tmp_path / "run")]
    assert main(words) == 2


def test_several_bad_models_are_each_named(images: Path, tmp_path: Path) -> None:
    models = {
        "ViT": {**FACTS, "checkpoint": weights(tmp_path / "a.safetensors", BAD["NaN"][0])},
        "second": {**FACTS, "checkpoint": str(tmp_path / "nowhere.pth")},
        "third": {"checkpoint": "random", "img_size": 32},
    }
    config = one_cell(models=models, grid=GRID, attacks=ATTACKS)
    with pytest.raises(UserError) as caught:
        attack(images, tmp_path / "run", config)
    said = str(caught.value)
    assert said.startswith("None of the 3 models can be loaded:")
    assert "ViT: " in said
    assert "second: No checkpoint at" in said
    assert "third: " in said
    assert not (tmp_path / "run").exists()


def test_half_precision_is_said(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def halved(state: State) -> None:
        state.update({name: tensor.half() for name, tensor in state.items()})

    model = {**FACTS, "checkpoint": weights(tmp_path / "half.safetensors", halved)}
    config = one_cell(models={"ViT": model}, attacks=ATTACKS)
    assert attack(images, tmp_path / "run", config).exit_code == 0
    assert "stored as float16, used as float32" in capsys.readouterr().err
