"""What does not apply is said before a run, is a row with its reason, and is no failure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment import cell
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from tests.helpers.families import checkpoint
from tests.helpers.runs import (
    TINY,
    attack,
    cells,
    one_cell,
    outcome,
    rows,
    said,
    values,
)

APART = {"name": "x", "images": "embedded", "dtypes": ["float32"]}
REFUSED = APART | {
    "attacks": [{"name": "april"}, {"name": "multi_round"}],
    "models": {"ViT": {"model": "cifar_vit"}},
    "grid": [
        {"models": ["ViT"], "settings": ["a"], "attacks": ["april"], "client": {"batch": 2}},
        {"models": ["ViT"], "settings": ["b"], "attacks": ["april", "multi_round"]},
    ],
}


def test_refusals_are_said_before_and_counted_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = tmp_path / "refusals.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(REFUSED))
    words = ["attack", str(config), "--out", str(run), "--limit", "2", "--engine", "here"]
    assert main(words) == 0
    lines = said(run).splitlines()
    opened = next(at for at, line in enumerate(lines) if line.startswith("ViT: "))
    for named in ("1 of 3 cells: multi_round: ", "1 of 3 cells: april: "):
        assert any(named in line for line in lines[:opened]), lines
    printed = capsys.readouterr().out
    assert printed.count("2 rows in 1 cell: ") == 2


CLIENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": 2},
    "withholds": {"withhold": ["pos_embed", "blocks.0.attn.qkv.weight"]},
    "sine": {"positions": "sinusoidal"},
    "difference": {"upload": "weight_difference", "dal": True},
    "adamw": {"upload": "weight_difference", "optimizer": "adamw", "steps": 2},
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
def test_what_is_foreseen_is_what_happens(
    client: str, tmp_path: Path, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a narrow, a plain, and an MJP model in every setting; nobody asks for the scores."""
    monkeypatch.setattr(cell, "score", lambda *_: {})
    monkeypatch.setattr(cell, "prepare", lambda *_, **__: SimpleNamespace(at=lambda places: None))
    models = {
        "narrow": TINY | {"embed_dim": 12},
        "ViT": TINY,
        "MJP": {**TINY, "unknown_embedding": True, "dal": "linear"},
        "no table": TINY | {"position_embedding": "strict"},
    }
    settings = ["b", "c"]
    if client != "plain":  # the sine client cannot do without a learned table to replace
        models, settings = {"MJP": models["MJP"]}, ["c"]
    grid = [
        {"models": [*models], "settings": ["a"]},
        {"models": ["MJP"], "settings": settings, "gammas": [0.5]},
    ]
    config = one_cell(models=models, grid=grid, attacks=ATTACKS, block=2, client=CLIENTS[client])
    summary = attack(three, tmp_path, config, limit=2)
    assert not summary.failures
    foreseen = {
        line.split(": ", 3)[3]: int(line.split()[2])
        for line in said(tmp_path).splitlines()
        if line.startswith("not applicable: ")
    }
    counted = {line.split(": ", 1)[1]: int(line.split()[3]) for line in summary.inapplicable}
    assert foreseen == counted
    assert foreseen
    refused = {e["run_id"]: outcome(tmp_path, run_id=e["run_id"]) for e in cells(tmp_path)}
    reasons = {r for of in refused.values() for s, r in of.values() if s == "unsupported"}
    assert reasons == set(counted)


def test_recorded_uploads_are_foreseen_by_their_headers(recorded: Path, tmp_path: Path) -> None:
    attacks = [{"name": "april"}, {"name": "patch_gradient"}, {"name": "multi_round"}]
    experiment = load_experiment({"name": "again", "attacks": attacks})
    summary = attack_uploads(experiment, recorded, tmp_path, device="cpu")
    before = [line for line in said(tmp_path).splitlines() if line.startswith("not applicable: ")]
    assert len(before) == len(summary.inapplicable) == 2
    for name in ("april", "multi_round"):
        (line,) = [line for line in before if f": {name}: " in line]
        assert [told for told in summary.inapplicable if told.endswith(line.split(": ", 3)[3])]


def test_an_unknown_model_stops_a_run_before_anything_is_written(
    three: Path, tmp_path: Path
) -> None:
    models = {"ViT": TINY, "mine": {"model": "deit_smal"}}
    grid = [{"models": ["ViT", "mine"], "settings": ["a"]}]
    with pytest.raises(UserError, match=r"models\.mine.*deit_smal.*deit_small"):
        attack(three, tmp_path / "run", one_cell(models=models, grid=grid))
    assert not (tmp_path / "run").exists()


# networks of another family -----------------------------------------------------------------------


WHY = {"swin": "a Swin", "resnet": "a ResNet"}


CLOSED = ("april", "patch_gradient", "masked_span", "april_optimization", "oracle_inverse")


def grid(family: str, path: Path, **client: Any) -> dict[str, Any]:
    """A config of one network in settings a and c."""
    names = [*CLOSED, "grey"]
    matching = {"name": "inverting_gradients", "options": {"steps": 3}}
    return {
        "name": "others",
        "models": {family: {"checkpoint": str(path)}},
        "attacks": [*({"name": name} for name in names), matching],
        "client": client,
        "grid": [
            {"models": [family], "settings": ["a"]},
            {"models": [family], "settings": ["c"], "gammas": [0.5]},
        ],
    }


@pytest.fixture(params=["swin", "resnet"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_closed_forms_are_unsupported_and_matching_runs(
    three: Path, tmp_path: Path, family: str
) -> None:
    path = checkpoint(tmp_path / "model", family)
    out = tmp_path / "run"
    assert attack(three, out, grid(family, path), limit=1).exit_code == 0
    table = rows(out)
    refused = table[table["attack"].isin(CLOSED)]
    assert set(refused["status"]) == {"unsupported"}
    assert all(WHY[family] in reason for reason in refused["reason"])
    assert set(table.loc[~table["attack"].isin(CLOSED), "status"]) == {"ok"}
    for setting in ("a", "c"):
        scores = values(out, attack="inverting_gradients", setting=setting)
        assert (scores.xs("steps", level="metric") == 3).all()
        assert (scores.xs("cosine_distance", level="metric") < 2).all()
        assert "ceiling_psnr" not in scores.index.get_level_values("metric")
    if family == "swin":  # the attacker reads the mask off the table's gradient
        found = values(out, attack="inverting_gradients", setting="c")
        assert (found.xs("mask_recall", level="metric") == 1).all()
        assert (found.xs("mask_precision", level="metric") == 1).all()


@pytest.mark.parametrize(
    ("client", "named"),
    [
        ({"positions": "sinusoidal"}, "positions: own"),
        ({"lora": "{rank: 2, targets: [qkv]}"}, "adapters"),
        ({"mode": "train"}, "client.mode: eval"),
    ],
)
def test_clients_of_plain_vits_are_refused(
    three: Path, tmp_path: Path, client: dict[str, Any], named: str
) -> None:
    path, out = checkpoint(tmp_path / "model", "resnet"), tmp_path / "run"
    attack(three, out, grid("resnet", path, **client), limit=1)
    ((status, reason),) = outcome(out, attack="inverting_gradients", setting="a").values()
    assert status == "unsupported"
    assert named in reason
