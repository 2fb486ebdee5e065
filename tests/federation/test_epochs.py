"""Clients that hold more images than a batch and shuffle them by epochs, trained and recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.uploads.record import TruthFile
from tests.helpers.federations import config, run, task
from tests.helpers.runs import cells, rows

FRESH: dict[str, Any] = {
    "rounds": [0],
    "images": 8,
    "probes": [{"batch": 4, "uploads": 3, "partners": "fresh"}],
}


def test_an_epoch_holds_every_image_once(tmp_path: Path) -> None:
    federation = task(tmp_path, client={"batch": 3, "partners": "fresh"})
    part = federation.parts[1]
    batches = len(part) // 3
    epochs = []
    for epoch in range(3):
        drawn = [federation._drawn(1, epoch * batches + place) for place in range(batches)]
        images = [image for batch in drawn for image in batch]
        assert len(set(images)) == len(images) == batches * 3
        assert set(images) <= set(part)
        epochs.append(images)
    assert epochs[0] != epochs[1] != epochs[2]
    assert federation._drawn(1, 0) == epochs[0][:3]  # a function of client and round alone


def test_a_client_with_fewer_images_than_a_batch_repeats_them(tmp_path: Path) -> None:
    federation = task(tmp_path, client={"batch": 3, "partners": "fresh"})
    federation.parts[1] = federation.parts[1][:2]
    assert set(federation._drawn(1, 0)) == set(federation.parts[1])
    assert len(federation._drawn(1, 5)) == 3


def recorded(out: Path) -> dict[int, list[tuple[str, ...]]]:
    """The images of every batch, by round."""
    found: dict[int, list[tuple[str, ...]]] = {}
    for path in sorted((out / "uploads").glob("*.json")):
        header = json.loads(path.read_text())
        truth = TruthFile(path.parent / "truth" / f"{path.stem}.safetensors")
        found.setdefault(header["round"], []).append(truth.image_ids)
    return found


def test_a_probe_with_fresh_partners_cuts_its_batches_anew(tmp_path: Path) -> None:
    found = recorded(run(tmp_path, record=FRESH))
    assert list(found) == [0, 1, 2]
    everything = {image for batch in found[0] for image in batch}
    assert len(everything) == 8
    for batches in found.values():
        assert [len(batch) for batch in batches] == [4, 4]
        assert {image for batch in batches for image in batch} == everything
    assert len({frozenset(map(frozenset, batches)) for batches in found.values()}) == 3


def test_its_uploads_are_attacked_together(tmp_path: Path) -> None:
    """What needs the same images in each does not apply."""
    out = run(tmp_path, record=FRESH)
    attacks = [
        {"name": "masked_span"},
        {"name": "multi_round", "options": {"uploads": 2}},
    ]
    experiment = load_experiment({"name": "recorded", "block": 4, "attacks": attacks})
    attack_uploads(experiment, out / "uploads", tmp_path / "attacked", device="cpu")
    by_attack = {entry["attack"]: entry for entry in cells(tmp_path / "attacked")}
    assert by_attack["masked_span"]["partners"] == "fresh"
    found = rows(tmp_path / "attacked", [by_attack["masked_span"]["run_id"]])
    places = found.loc[found["metric"] == "matched_place", "value"]
    assert sorted(places) == [0, 0, 1, 1, 2, 2, 3, 3]  # within each of the round's two batches
    refused = rows(tmp_path / "attacked", [by_attack["multi_round"]["run_id"]])
    assert refused["reason"].str.contains("shuffles its images before every round").all()


def test_a_probe_of_single_images_has_no_partners() -> None:
    words = r"probes\.0\.batch: expected 2 or more with partners: fresh, got 1: .*the probe's batch"
    with pytest.raises(UserError, match=words):
        config(record={**FRESH, "probes": [{"batch": 1, "partners": "fresh"}]})


def test_a_probe_of_one_batch_has_no_fresh_partners() -> None:
    words = r"probes\.0\.batch: expected at most half of record\.images \(8\).* to 16 or more"
    with pytest.raises(UserError, match=words):
        config(record={**FRESH, "probes": [{"batch": 8, "partners": "fresh"}]})
    config(record={**FRESH, "probes": [{"batch": 8}]})
