"""Clients that shuffle their images: a block is computed as a whole, and holds two batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.client.config import ClientConfig, check_client
from mjp_privacy.core.errors import UserError
from tests.helpers.batch_attack import BATCHES, knowing
from tests.helpers.runs import attack, one_cell, photographs, rows


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return photographs(tmp_path / "images", 8)


@pytest.fixture(autouse=True)
def _backwards(images: Path) -> Iterator[None]:
    with knowing(images, 8):
        yield


def config(partners: str, block: int = 8, **options: Any) -> dict[str, Any]:
    client = {"batch": 2, "partners": partners}
    grid = [{"models": ["ViT"], "settings": ["a"], "client": client}]
    one = {"name": "backwards", "options": {"uploads": 2, **options}}
    return one_cell(block=block, grid=grid, attacks=[one])


def test_a_block_that_raises_is_not_done_again_in_parts(images: Path, tmp_path: Path) -> None:
    """Its rows would be of clients that hold a single batch each, whose partners never change."""
    attack(images, tmp_path / "out", config("fresh", fails=4))
    found = rows(tmp_path / "out")
    assert set(found["status"]) == {"failed"}
    assert found["reason"].str.contains("4 steps are too many").all()
    assert [len(rounds[0]) for rounds in BATCHES] == [4]


def test_an_upload_that_raises_is_not_made_again_in_parts(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where what raises is no attack but the client itself."""
    made: list[int] = []

    def fail(self: Any, records: Any) -> Any:
        made.append(len(records))
        raise RuntimeError("the client broke")

    monkeypatch.setattr("mjp_privacy.experiment.cell.CellWork.run", fail)
    attack(images, tmp_path / "fresh", config("fresh"))
    assert made == [8]
    assert set(rows(tmp_path / "fresh")["status"]) == {"failed"}
    attack(images, tmp_path / "fixed", config("fixed"))
    assert made == [8, 8, 2, 2, 2, 2]


def test_a_block_of_one_batch_is_refused(images: Path, tmp_path: Path) -> None:
    words = (
        r"grid\.0\.block: expected two batches at least .*\(4 images or more\), got 2.*Set block"
    )
    with pytest.raises(UserError, match=words):
        attack(images, tmp_path / "out", config("fresh", block=2))
    check_client(ClientConfig(batch=2, partners="fresh"), 4, "client")
    check_client(ClientConfig(batch=2, partners="fresh"), None, "client")  # of one upload


@pytest.mark.parametrize(
    ("block", "limit", "advice"), [(8, 2, "--limit 4"), (6, 8, "--limit 6"), (4, 6, "--limit 4")]
)
def test_a_last_block_of_one_batch_is_refused_before_any_work(
    images: Path, tmp_path: Path, block: int, limit: int, advice: str
) -> None:
    words = rf"{limit} images leave 2 for the last block of ViT \(block {block}\).*{advice}\."
    with pytest.raises(UserError, match=words):
        attack(images, tmp_path / "out", config("fresh", block), limit=limit)
    assert not BATCHES
    attack(images, tmp_path / "out", config("fresh", block), limit=int(advice.split()[1]))
    attack(images, tmp_path / "fixed", config("fixed", block), limit=limit)


def test_images_that_fill_no_batch_are_told_a_number_that_does(
    images: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"7 images do not fill .* such as --limit 4\."):
        attack(images, tmp_path / "out", config("fresh", 4), limit=7)
