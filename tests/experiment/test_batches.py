"""Batches of several images and several uploads of the same ones: whose is whose, who with whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks import ATTACKS
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import expand, load_experiment
from mjp_privacy.experiment.overrides import with_gamma
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models.jigsaw import draw_masks
from tests.helpers.own_attacks import BATCHES, ORDER, ROUNDS, SEEN, knowing, mjp, rounds
from tests.helpers.runs import (
    attack,
    cell,
    cells,
    one_cell,
    outcome,
    photographs,
    rows,
    values,
    written,
)

NAMES = [f"{index}.png" for index in range(8)]


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight photographs of the classes 0 to 7, known to the attack."""
    return photographs(tmp_path_factory.mktemp("eight"), 8)


@pytest.fixture(autouse=True)
def _backwards(eight: Path) -> Iterator[None]:
    with knowing(eight, 8):
        yield


def config(partners: str, uploads: int = 1, block: int = 8, **options: Any) -> dict[str, Any]:
    client = {"batch": 2, "partners": partners}
    one = {"name": "backwards", "options": {"uploads": uploads, **options}}
    grid = [{"models": ["ViT"], "settings": ["a"], "client": client}]
    return one_cell(block=block, grid=grid, attacks=[one])


@pytest.mark.parametrize(("partners", "uploads", "pool"), [("fixed", 1, 2), ("fresh", 2, 8)])
def test_reconstructions_are_scored_against_the_picture_they_fit(
    eight: Path, tmp_path: Path, partners: str, uploads: int, pool: int
) -> None:
    """Several rounds of a client that shuffles are one pool."""
    attack(eight, tmp_path / "out", config(partners, uploads=uploads))
    found = values(tmp_path / "out", attack="backwards")
    for place, label in enumerate(ORDER):
        assert found[f"{label}.png", "mse", "standard"] < 1e-14
        assert found[f"{label}.png", "matched_place", "diagnostic"] == pool - 1 - place % pool
        assert found[f"{label}.png", "named_class", "diagnostic"] == label
    assert cell(tmp_path / "out")["partners"] == partners


def test_a_picture_that_is_not_finite_fails_the_image_that_nothing_else_fits(
    eight: Path, tmp_path: Path
) -> None:
    attack(eight, tmp_path / "out", config("fixed", broken=0))
    found = rows(tmp_path / "out")
    second = {f"{label}.png" for label in ORDER[1::2]}  # which the attack returns first
    assert set(found.loc[found["status"] == "failed", "image_id"]) == second
    alone = found[(found["status"] == "ok") & (found["metric"] == "mse")]
    assert set(alone["image_id"]) == set(NAMES) - second
    assert (alone["value"] < 1e-10).all()


def test_partners_change_from_round_to_round(eight: Path, tmp_path: Path) -> None:
    attack(eight, tmp_path / "out", config("fresh", uploads=6))
    (rounds,) = BATCHES
    assert rounds[0] == [frozenset(ORDER[at : at + 2]) for at in (0, 2, 4, 6)]
    assert all(frozenset.union(*steps) == set(range(8)) for steps in rounds)  # an epoch holds all
    assert len({pair for steps in rounds for pair in steps}) > 12  # of 28; fixed ones would be 4


def test_attacks_on_a_series_of_uploads_do_not_apply_to_a_client_that_shuffles(
    eight: Path, tmp_path: Path
) -> None:
    content = config("fresh")
    content["attacks"] = [{"name": "multi_round", "options": {"uploads": 2}}]
    attack(eight, tmp_path / "out", content)
    assert {status for status, _ in outcome(tmp_path / "out").values()} == {"unsupported"}
    assert all("partners: fresh" in reason for _, reason in outcome(tmp_path / "out").values())


# a block is a client ------------------------------------------------------------------------------


def test_a_block_that_raises_is_not_done_again_in_parts(
    eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would be of clients that hold a single batch each, whose partners never change."""
    attack(eight, tmp_path / "out", config("fresh", uploads=2, fails=4))
    for status, reason in outcome(tmp_path / "out").values():
        assert status == "failed"
        assert "4 steps are too many" in reason
    assert [len(rounds[0]) for rounds in BATCHES] == [4]
    made: list[int] = []  # nor where what raises is no attack but the client itself

    def fail(self: Any, cell: Any, names: Any, records: Any) -> Any:
        made.append(len(records))
        raise RuntimeError("the client broke")

    monkeypatch.setattr("mjp_privacy.experiment.simulated.SimulatedUploads.observe", fail)
    attack(eight, tmp_path / "fresh", config("fresh"))
    assert made == [8]
    assert {status for status, _ in outcome(tmp_path / "fresh").values()} == {"failed"}
    attack(eight, tmp_path / "fixed", config("fixed"))
    assert made == [8, 8, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("block", "limit", "advice"), [(8, 2, "--limit 4"), (6, 8, "--limit 6"), (4, 6, "--limit 4")]
)
def test_a_last_block_of_one_batch_is_refused_before_any_work(
    eight: Path, tmp_path: Path, block: int, limit: int, advice: str
) -> None:
    with pytest.raises(UserError, match=rf"ViT .*{advice}\."):
        attack(eight, tmp_path / "out", config("fresh", block=block), limit=limit)
    assert not BATCHES
    attack(eight, tmp_path / "out", config("fresh", block=block), limit=int(advice.split()[1]))
    attack(eight, tmp_path / "fixed", config("fixed", block=block), limit=limit)


# labels of attacks, clients of entries -----------------------------------------------------------


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    SEEN.clear()
    with ATTACKS.registered("rounds", ROUNDS):
        yield


def test_a_label_is_a_line_of_its_own_and_what_an_entry_names(three: Path, tmp_path: Path) -> None:
    config = mjp("c", rounds("two", rounds=2), rounds("three", rounds=3), {"name": "april"})
    first = config["grid"][0]
    config["grid"] = [first | {"attacks": ["three"]}, first | {"attacks": ["april", "two"]}]
    attack(three, tmp_path, config)
    found = [(entry["attack"], entry["attack_name"]) for entry in cells(tmp_path)]
    assert found == [("three", "rounds"), ("two", "rounds"), ("april", "april")]
    assert [len(view.updates) for view in SEEN] == [3, 2]
    assert set(rows(tmp_path)["attack"]) == {"two", "three", "april"}
    experiment = load_experiment(config)
    assert [c.attack.title for c in expand(with_gamma(experiment, 0.1))] == [
        "three",
        "two",
        "april",
    ]


# several uploads ----------------------------------------------------------------------------------


def test_uploads_are_rounds_with_fresh_masks(three: Path, tmp_path: Path) -> None:
    attack(three, tmp_path, mjp("c", rounds()))
    (view,) = SEEN
    assert [update.round for update in view.updates] == [0, 1, 2]
    assert view.against == "plain"
    assert all(update.weights_before is None for update in view.updates)
    first = RunStore(tmp_path).read(cells(tmp_path)[0]["run_id"])["image_id"].iloc[0]
    masks = []
    for round, update in enumerate(view.updates):
        mask, _ = draw_masks([first], grid=4, gamma=0.5, round=round, seed=0)
        assert torch.equal(update.grads["pos_embed"][0, 0, 1:].eq(0).all(-1), mask[0])
        masks.append(mask)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


# images that an attack does not apply to ----------------------------------------------------------


@pytest.mark.parametrize("breaks", [False, True])
def test_inapplicable_images_are_unsupported_and_no_failures(
    three: Path, tmp_path: Path, breaks: bool
) -> None:
    config = mjp("c", rounds(rounds=2, inapplicable=[0 if breaks else 1], breaks=breaks))
    summary = attack(three, tmp_path, config)
    assert (summary.exit_code, summary.failures) == (0, ())
    refused = [reason for status, reason in outcome(tmp_path).values() if status == "unsupported"]
    assert refused == ["too dark"] * (3 if breaks else 1)
    assert {status for status, _ in outcome(tmp_path).values()} <= {"ok", "unsupported"}
    files = written(tmp_path)
    attack(three, tmp_path, config)
    assert written(tmp_path) == files


def test_steps_taken_one_by_one_keep_masks_labels_and_rounds(three: Path, tmp_path: Path) -> None:
    attack(three, tmp_path / "whole", mjp("c", rounds(rounds=2)))
    attack(three, tmp_path / "steps", mjp("c", rounds(rounds=2, breaks=True)))
    whole, steps = values(tmp_path / "whole"), values(tmp_path / "steps")
    assert "mask_recall" in whole.index.get_level_values("metric")
    assert whole.equals(steps)
    assert [view.labels.tolist() for view in SEEN[-3:]] == [  # type: ignore[union-attr]
        [label]
        for label in SEEN[0].labels.tolist()  # type: ignore[union-attr]
    ]
    assert all([u.round for u in view.updates] == [0, 1] for view in SEEN)
