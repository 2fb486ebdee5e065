"""Batches of several images: who stands with whom, and whose reconstruction is whose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.client.config import ClientConfig, check_client
from mjp_privacy.core.errors import UserError
from tests.helpers.batch_attack import BATCHES, ORDER, knowing
from tests.helpers.runs import attack, cell, one_cell, outcome, photographs, rows, same_rows, values

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


def test_reconstructions_are_scored_against_the_picture_they_fit(
    eight: Path, tmp_path: Path
) -> None:
    attack(eight, tmp_path / "out", config("fixed"))
    found = values(tmp_path / "out", attack="backwards")
    for place, label in enumerate(ORDER):
        assert found[f"{label}.png", "mse", "standard"] < 1e-14
        assert found[f"{label}.png", "matched_place", "diagnostic"] == 1 - place % 2
        assert found[f"{label}.png", "named_class", "diagnostic"] == label


def test_several_rounds_of_a_client_that_shuffles_are_one_pool(eight: Path, tmp_path: Path) -> None:
    attack(eight, tmp_path / "out", config("fresh", uploads=2))
    found = values(tmp_path / "out", attack="backwards")
    places = [found[f"{label}.png", "matched_place", "diagnostic"] for label in ORDER]
    assert places == [7, 6, 5, 4, 3, 2, 1, 0]
    assert all(found[name, "mse", "standard"] < 1e-14 for name in NAMES)
    assert cell(tmp_path / "out")["partners"] == "fresh"


def test_an_attack_on_one_upload_is_matched_within_it(eight: Path, tmp_path: Path) -> None:
    """Whatever the client does before later rounds, one upload's pictures are known to be its."""
    attack(eight, tmp_path / "out", config("fresh"))
    found = values(tmp_path / "out", attack="backwards")
    places = [found[f"{label}.png", "matched_place", "diagnostic"] for label in ORDER]
    assert places == [1, 0] * 4


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


def test_fixed_partners_stay_together(eight: Path, tmp_path: Path) -> None:
    attack(eight, tmp_path / "out", config("fixed", uploads=3))
    (rounds,) = BATCHES
    assert rounds == [[frozenset(ORDER[at : at + 2]) for at in (0, 2, 4, 6)]] * 3


def test_the_same_command_draws_the_same_partners(eight: Path, tmp_path: Path) -> None:
    attack(eight, tmp_path / "one", config("fresh", uploads=3))
    attack(eight, tmp_path / "two", config("fresh", uploads=3), limit=4)
    attack(eight, tmp_path / "two", config("fresh", uploads=3))
    assert BATCHES[0] == BATCHES[-1]
    same_rows(tmp_path / "one", tmp_path / "two")


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

    def fail(self: Any, cell: Any, attack: Any, names: Any, records: Any) -> Any:
        made.append(len(records))
        raise RuntimeError("the client broke")

    monkeypatch.setattr("mjp_privacy.experiment.simulated.SimulatedBlock.observe", fail)
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


def test_what_leaves_no_two_batches_is_refused(eight: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"grid\.0\.block"):
        attack(eight, tmp_path / "out", config("fresh", block=2))
    with pytest.raises(UserError, match=r"--limit 4"):
        attack(eight, tmp_path / "out", config("fresh", block=4), limit=7)
    content = config("fresh")
    content["grid"][0]["client"]["batch"] = 1
    with pytest.raises(UserError, match="partners"):
        attack(eight, tmp_path / "out", content)
    check_client(ClientConfig(batch=2, partners="fresh"), 4, "client")
    check_client(ClientConfig(batch=2, partners="fresh"), None, "client")  # of one upload
