"""What is said of attacks that do not apply, before a run and after it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml

from attacks import ATTACKS as REGISTRY
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment.run import run_experiment
from mjp_privacy.interfaces import Refusal
from tests.helpers.federations import run as federation
from tests.helpers.runs import TINY, cells, one_cell, photographs

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


def said(run: Path) -> list[str]:
    """The messages of a run's log, in order."""
    return [json.loads(line)["message"] for line in (run / "log.jsonl").read_text().splitlines()]


def test_refusals_are_said_before_and_counted_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "refusals.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    assert main(["attack", str(config), "--out", str(tmp_path / "run"), "--limit", "2"]) == 0
    printed = capsys.readouterr()
    before = printed.err.index(
        "not applicable: 1 of 3 cells: multi_round: each upload was shuffled"
    )
    assert before < printed.err.index("cifar_vit")  # before any model is opened
    assert "not applicable: 1 of 3 cells: april: " in printed.err[: printed.err.index("cifar_vit")]
    assert "Not applicable, each a row with its reason:" in printed.out
    assert "2 rows in 1 cell: each upload was shuffled differently" in printed.out
    assert "2 rows in 1 cell: APRIL is for batch 1" in printed.out


CLIENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": 2},
    "withholds": {"withhold": ["pos_embed", "blocks.0.attn.qkv.weight"]},
    "sine": {"positions": "sinusoidal"},
    "difference": {"upload": "weight_difference"},
    "adamw": {"upload": "weight_difference", "optimizer": "adamw", "steps": 2},
    "dal": {"dal": True},
}
ATTACKS = [
    {"name": "april"},
    {"name": "april_prior", "options": {"prior": "stationary"}},
    {"name": "april_unk_aware"},
    {"name": "patch_gradient"},
    {"name": "mask_locator"},
    {"name": "masked_span", "options": {"completion": "none"}},
    {"name": "multi_round", "options": {"uploads": 2, "completion": "none"}},
    {"name": "token_span", "options": {"completion": "none"}},
    {"name": "grey"},
]


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_foreseen_is_what_happens(client: str, tmp_path: Path) -> None:
    """For a narrow, a plain, and an MJP model in every setting."""
    models = {
        "narrow": TINY | {"embed_dim": 12},
        "ViT": TINY,
        "MJP": {**TINY, "unknown_embedding": True, "dal": "linear"},
        "no table": TINY | {"position_embedding": "strict"},
    }
    if client == "sine":
        models.pop("no table")  # fails: it has no learned table to replace
    grid = [
        {"models": [*models], "settings": ["a"]},
        {"models": ["MJP"], "settings": ["b", "c"], "gammas": [0.5]},
    ]
    config = one_cell(models=models, grid=grid, attacks=ATTACKS, block=2, client=CLIENTS[client])
    run = tmp_path / "run"
    summary = run_experiment(
        config, images=photographs(tmp_path / "images", 2), out=run, device="cpu"
    )
    assert not summary.failures
    foreseen = {
        line.split(": ", 3)[3]: int(line.split()[2])
        for line in said(run)
        if line.startswith("not applicable: ")
    }
    counted = {line.split(": ", 1)[1]: int(line.split()[3]) for line in summary.inapplicable}
    assert foreseen == counted
    assert foreseen


def test_recorded_uploads_are_foreseen_by_their_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uploads = federation(tmp_path / "federation") / "uploads"
    config = tmp_path / "attacks.yaml"
    attacks = [{"name": "april"}, {"name": "patch_gradient"}, {"name": "multi_round"}]
    config.write_text(yaml.safe_dump({"name": "again", "attacks": attacks}))
    capsys.readouterr()
    out = tmp_path / "out"
    main(["attack", str(config), "--uploads", str(uploads), "--out", str(out)])
    printed = capsys.readouterr()
    before = [line for line in said(out) if line.startswith("not applicable: ")]
    assert len(before) == 2
    for name, text in (
        ("april", "it needs a client whose block 0 has neither norm1 nor residuals"),
        ("multi_round", "it needs 6 uploads of the same images; "),
    ):
        assert any(f"cells: {name}: {text}" in line for line in before), before
        assert f" cells: {text}" in printed.out or f" cell: {text}" in printed.out


def test_an_unknown_model_stops_a_run_before_anything_is_written(tmp_path: Path) -> None:
    models = {"ViT": TINY, "mine": {"model": "deit_smal"}}
    grid = [{"models": ["ViT", "mine"], "settings": ["a"]}]
    images = photographs(tmp_path / "images", 1)
    with pytest.raises(UserError, match=r"models.mine: Unknown model 'deit_smal'. Did you mean "):
        run_experiment(one_cell(models=models, grid=grid), images=images, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_weights_are_said_once_and_at_the_start(tmp_path: Path) -> None:
    models = {"ViT": TINY, "mine": {**TINY, "checkpoint": "nowhere.pth"}}
    grid = [{"models": ["ViT", "mine"], "settings": ["a"]}]
    images = photographs(tmp_path / "images", 1)
    run = tmp_path / "run"
    summary = run_experiment(one_cell(models=models, grid=grid), images=images, out=run)
    assert summary.exit_code == 3
    about = [line for line in said(run) if "nowhere.pth" in line]
    assert len(about) == 1
    assert about[0].startswith("mine: FAILED. No checkpoint at nowhere.pth")
    opened = next(place for place, line in enumerate(said(run)) if line.startswith("ViT: "))
    assert said(run).index(about[0]) < opened
    assert {entry["status"] for entry in cells(run)} == {"ok", "failed"}


def test_an_attack_that_looks_at_values_is_asked_in_the_run_alone(tmp_path: Path) -> None:
    entry = Entry(f"{__name__}:Looking", "looks at values")
    run = tmp_path / "run"
    with REGISTRY.registered("looking", entry):
        summary = run_experiment(
            one_cell(attacks=[{"name": "looking"}]),
            images=photographs(tmp_path / "images", 1),
            out=run,
            device="cpu",
        )
    assert not any(line.startswith("not applicable") for line in said(run))
    assert summary.inapplicable == ("1 row in 1 cell: the gradient is finite",)


@dataclass(frozen=True)
class Looking:
    """An attack whose answer depends on the values of the upload."""

    name: ClassVar[str] = "looking"
    victim: ClassVar[str] = "intact"
    uploads: ClassVar[int] = 1
    published: ClassVar[bool] = False

    def needs(self, model: Any) -> tuple[str, ...]:
        return ("pos_embed",)

    def unsupported(self, view: Any) -> Refusal | None:
        finite = bool(np.isfinite(view.updates[0].grads["pos_embed"].numpy()).all())
        return Refusal("target", "the gradient is finite") if finite else None

    def run(self, view: Any, *, generator: Any) -> Any:
        raise AssertionError("it is refused")
