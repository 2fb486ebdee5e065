"""What does not apply is said before a run, is a row with its reason, and is no failure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mjp_privacy.experiment import cell
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.plan import NO_ONE_INPUT
from mjp_privacy.experiment.run import attack_uploads
from tests.helpers.families import checkpoint
from tests.helpers.runs import TINY, attack, cells, one_cell, outcome, said


def foreseen(out: Path) -> list[str]:
    """What a run said before it opened its models."""
    lines = said(out).splitlines()
    opened = next(at for at, line in enumerate(lines) if ", sha256 " in line)
    return [line for line in lines[:opened] if line.startswith("not applicable: ")]


CLIENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": 2},
    "withholds": {"withhold": ["pos_embed", "blocks.0.attn.qkv.weight"]},
    "sine": {"positions": "sinusoidal"},
    "adamw": {"upload": "weight_difference", "optimizer": "adamw", "steps": 2},
}
ATTACKS = [
    *({"name": name} for name in ("april", "april_unk_aware", "patch_gradient", "grey")),
    {"name": "april_prior", "options": {"prior": "stationary"}},
    {"name": "mask_locator"},
    {"name": "masked_span", "options": {"completion": "none"}},
    {"name": "multi_round", "options": {"uploads": 2, "completion": "none"}},
    {"name": "token_span", "options": {"completion": "none"}},
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
    before = {line.split(": ", 3)[3]: int(line.split()[2]) for line in foreseen(tmp_path)}
    refused: dict[str, set[str]] = {}
    for entry in cells(tmp_path):
        for status, reason in outcome(tmp_path, run_id=entry["run_id"]).values():
            if status == "unsupported":
                refused.setdefault(reason, set()).add(entry["run_id"])
    assert before == {reason: len(of) for reason, of in refused.items()}
    assert before
    lines = "\n".join(foreseen(tmp_path))
    assert (NO_ONE_INPUT.text in before) == (client == "plain")  # of two uploads in setting b
    assert client != "batch" or ": april, " in lines
    assert all(any(reason in line for line in summary.inapplicable) for reason in before)


def test_recorded_uploads_are_foreseen_by_their_headers(recorded: Path, tmp_path: Path) -> None:
    attacks = [{"name": "april"}, {"name": "patch_gradient"}, {"name": "multi_round"}]
    experiment = load_experiment({"name": "again", "attacks": attacks})
    summary = attack_uploads(experiment, recorded, tmp_path, device="cpu")
    assert len(foreseen(tmp_path)) == len(summary.inapplicable) == 2
    for name in ("april", "multi_round"):
        (line,) = [line for line in foreseen(tmp_path) if f": {name}: " in line]
        assert [told for told in summary.inapplicable if told.endswith(line.split(": ", 3)[3])]


# networks of another family: their attacks stand among the golden rows ----------------------------


def test_clients_of_plain_vits_are_refused(three: Path, tmp_path: Path) -> None:
    models = {"resnet": {"checkpoint": str(checkpoint(tmp_path / "model", "resnet"))}}
    clients: dict[str, dict[str, Any]] = {
        "positions: own": {"positions": "sinusoidal"},
        "adapters": {"lora": "{rank: 2, targets: [qkv]}"},
        "client.mode: eval": {"mode": "train"},
    }
    entry = {"models": ["resnet"], "settings": ["a"]}
    grid = [entry | {"client": client} for client in clients.values()]
    matching = [{"name": "inverting_gradients", "options": {"steps": 3}}]
    config = one_cell(models=models, attacks=matching, grid=grid)
    attack(three, tmp_path / "run", config, limit=1)
    for named, entry in zip(clients, cells(tmp_path / "run"), strict=True):
        ((status, reason),) = outcome(tmp_path / "run", run_id=entry["run_id"]).values()
        assert status == "unsupported"
        assert named in reason
