"""Rows of the ladder's special cases: masks without pictures, chosen classes, a random E_unk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from tests.helpers.runs import MJP, TINY, attack, cell, one_cell, photographs, rows, values


def mjp_cell(*attacks: dict[str, object], **changes: object) -> dict[str, object]:
    entry = {"models": ["MJP"], "settings": ["c"], "gammas": [0.5]}
    content = {"models": {"MJP": MJP}, "grid": [entry], "attacks": list(attacks)}
    return one_cell(**content) | changes


def test_an_attack_that_names_masks_only_is_scored_by_them(tmp_path: Path) -> None:
    images = photographs(tmp_path / "images", 3)
    summary = attack(images, tmp_path / "run", mjp_cell({"name": "mask_locator"}))
    assert summary.exit_code == 0
    found = rows(tmp_path / "run")
    scores = found[found["variant"] == "standard"]
    assert set(scores["status"]) == {"unscored"}
    assert "makes no picture" in scores["reason"].iloc[0]
    told = values(tmp_path / "run", attack="mask_locator")
    for name in ("mask_precision", "mask_recall"):
        assert (told.xs(name, level="metric") == 1).all()


def test_it_is_finished_when_it_is_run_again(tmp_path: Path) -> None:
    images = photographs(tmp_path / "images", 3)
    for _ in range(2):
        attack(images, tmp_path / "run", mjp_cell({"name": "mask_locator"}))
    found = rows(tmp_path / "run")
    assert not found.duplicated(["image_id", "metric", "variant"]).any()


def test_a_config_attacks_the_classes_it_names(tmp_path: Path) -> None:
    images = photographs(tmp_path / "images", 6)
    config = one_cell(classes={"modulo": 3, "remainders": [1]})
    summary = attack(images, tmp_path / "run", config)
    assert summary.images == 2
    assert set(rows(tmp_path / "run")["image_id"]) == {"1.png", "4.png"}


def test_no_image_of_these_classes_is_told(tmp_path: Path) -> None:
    images = photographs(tmp_path / "images", 3)
    config = one_cell(classes={"modulo": 10, "remainders": [7]})
    with pytest.raises(UserError, match="class index that leaves 7 when divided by 10"):
        attack(images, tmp_path / "run", config)


def test_classes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="modulo"):
        attack(tmp_path, tmp_path / "run", one_cell(classes={"modulo": 1, "remainders": [0]}))


def test_an_unknown_embedding_can_be_drawn(tmp_path: Path) -> None:
    images = photographs(tmp_path / "images", 1)
    models = {"MJP": {**TINY, "unknown_embedding": True}}
    attack(images, tmp_path / "run", mjp_cell({"name": "april"}, models=models))
    plain = load_model(**TINY)
    path = tmp_path / "plain.safetensors"
    from safetensors.torch import save_file

    save_file({name: p.detach() for name, p in plain.named_parameters()}, path)
    options = {**TINY, "checkpoint": path, "unknown_embedding": True, "unknown_init": "random"}
    one, other = load_model(**options), load_model(**options)
    assert one.unk_embed is not None
    assert other.unk_embed is not None
    assert torch.equal(one.unk_embed, other.unk_embed)
    assert 0.7 < float(one.unk_embed.std()) < 1.3
    assert any("N(0, 1)" in note for note in one.card.checkpoint.notes)


def test_several_uploads_have_no_shuffled_picture(tmp_path: Path) -> None:
    images = photographs(tmp_path / "images", 2)
    entry = {"models": ["MJP"], "settings": ["b"], "gammas": [0.5]}
    config = mjp_cell({"name": "multi_round", "options": {"uploads": 2, "prior": "stationary"}})
    attack(images, tmp_path / "run", config | {"grid": [entry]})
    found = rows(tmp_path / "run", [cell(tmp_path / "run", attack="multi_round")["run_id"]])
    assert set(found["status"]) == {"unsupported"}
    assert "shuffled differently" in found["reason"].iloc[0]


@pytest.mark.parametrize("augment", ["crop", "mixup"])
def test_other_pixels_in_each_round_break_several_uploads(tmp_path: Path, augment: str) -> None:
    images = photographs(tmp_path / "images", 3)
    rung = {"name": "multi_round", "options": {"uploads": 6, "prior": "stationary"}}
    entry = {"models": ["MJP"], "settings": ["c"], "gammas": [0.2]}
    grid = [entry, {**entry, "client": {"augment": augment}}]
    attack(images, tmp_path / "run", mjp_cell(rung) | {"grid": grid})
    told = [
        values(tmp_path / "run", attack="multi_round", augment=kind).xs("psnr", level="metric")
        for kind in ("none", augment)
    ]
    same, other = (v.xs("standard", level="variant").clip(upper=100).mean() for v in told)
    assert same > 60 > 35 > other
