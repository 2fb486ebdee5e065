"""A damaged upload of anybody's folder leaves its series out, and never becomes another line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.uploads.faults import examine, known_uploads
from mjp_privacy.uploads.folder import REFUSED, Group, UploadFolder, group_uploads
from tests.helpers import federations
from tests.helpers.uploads import ONE, copied, edit, flip

SERIES = [f"b1s1_r00001_{number:03d}" for number in range(3)]
FIRST, SECOND = f"{SERIES[0]}_at00001", f"{SERIES[0]}_at00002"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images, each in rounds 1 and 2."""
    record = {"rounds": [1], "images": 3, "probes": [{"uploads": 2}]}
    return federations.run(tmp_path_factory.mktemp("federation"), record=record) / "uploads"


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    return copied(recorded, tmp_path / "uploads")


def groups_of(folder: Path) -> list[Group]:
    examined = examine(UploadFolder(folder))
    groups = group_uploads(examined.known, refused=examined.refused)
    of_worker = group_uploads(
        known_uploads(UploadFolder(folder), examined.reasons), refused=examined.reasons
    )
    assert [group.name for group in groups] == [group.name for group in of_worker]
    assert [group.digest() for group in groups] == [group.digest() for group in of_worker]
    return groups


def attack(folder: Path, limit: int | None = None) -> Any:
    experiment = load_experiment({"name": "attacks"} | ONE)
    return attack_uploads(experiment, folder, folder.parent / "run", device="cpu", limit=limit)


def units(run: Path) -> Counter[tuple[str, str]]:
    """How often the cells that the run lists hold each picture, by the model's name."""
    store = RunStore(run)
    return Counter(
        (str(cell["model"]), image_id)
        for cell in store.read_cells()
        for image_id in store.read(str(cell["run_id"]), ["image_id"])["image_id"]
    )


def in_header(folder: Path, name: str, old: bytes, new: bytes) -> None:
    """Change bytes of a header in which one bit is another one."""
    path = folder / f"{name}.json"
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "first": lambda u: flip(u / f"{FIRST}.safetensors", 80_003),
    "second": lambda u: flip(u / f"{SECOND}.safetensors", 80_003),
    "truth": lambda u: flip(u / "truth" / f"{SECOND}.safetensors", 70_000),
    "other series": lambda u: in_header(u, SECOND, b'_000"', b'_010"'),
    "other round": lambda u: in_header(u, SECOND, b'"round": 2', b'"round": 3'),
    "other label": lambda u: in_header(u, FIRST, b'"small"', b'"smaml"'),
    "other field": lambda u: in_header(u, FIRST, b'"series"', b'"serier"'),
    "no JSON": lambda u: in_header(u, SECOND, b'"series":', b'"series"z'),
    "seal": lambda u: in_header(u, FIRST, b"mjp-seal", b"mjp-sdal"),
    "half a header": lambda u: (u / f"{FIRST}.json").write_bytes(b'{\n "seal": "mjp'),
    "no weights named": lambda u: edit(u, SECOND, weights="none.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_upload_leaves_its_series_out(
    folder: Path, damage: Callable[[Path], Any]
) -> None:
    damage(folder)
    assert set(examine(UploadFolder(folder)).refused) == {FIRST, SECOND}
    (group,) = groups_of(folder)
    assert group.name == "small"
    assert [series.first.header.series for series in group.series] == SERIES[1:]
    assert [len(series.uploads) for series in group.series] == [2, 2]


def test_lines_keep_their_names_beside_a_line_that_is_lost(tmp_path: Path) -> None:
    record = {"rounds": [1, 2], "images": 1}
    folder = federations.run(tmp_path, record=record) / "uploads"
    names = [group.name for group in groups_of(folder)]
    assert names == ["small, round 1", "small, round 2"]
    for spoil in (f"{FIRST}.safetensors", f"{FIRST}.json"):
        flip(folder / spoil, 3001)
        assert [group.name for group in groups_of(folder)] == names[1:]
        flip(folder / spoil, 3001)
    assert [group.name for group in groups_of(folder)] == names


def test_a_header_that_a_person_changed_is_read(folder: Path) -> None:
    for name in (FIRST, SECOND):
        edit(folder, name, series="mine")
    examined = examine(UploadFolder(folder))
    assert not examined.refused
    assert list(examined.changed) == [FIRST, SECOND]
    assert "mine" in {upload.header.series for upload in examined.sound}


def test_a_restored_upload_leaves_nothing_behind(folder: Path) -> None:
    run = folder.parent / "run"
    assert attack(folder).exit_code == 0
    before = units(run)
    assert len(before) == 3
    rows = {path: path.read_bytes() for path in (run / "rows").rglob("*.parquet")}
    flip(folder / f"{SECOND}.safetensors", 80_003)
    summary = attack(folder)
    assert summary.exit_code == 3
    assert any(SECOND in failure for failure in summary.failures)
    damaged = units(run)
    assert {name for model, name in damaged if model == REFUSED} == {FIRST, SECOND}
    assert sum(model == "small" for model, _ in damaged) == 2
    flip(folder / f"{SECOND}.safetensors", 80_003)
    assert attack(folder).exit_code == 0
    assert units(run) == before
    assert max(before.values()) == 1
    assert all(path.read_bytes() == content for path, content in rows.items())


def test_another_damaged_upload_forgets_the_first(folder: Path) -> None:
    flip(folder / f"{FIRST}.safetensors", 80_003)
    attack(folder)
    flip(folder / f"{FIRST}.safetensors", 80_003)
    other = f"{SERIES[2]}_at00001"
    flip(folder / f"{other}.safetensors", 80_003)
    attack(folder)
    refused = {name for model, name in units(folder.parent / "run") if model == REFUSED}
    assert refused == {other, other.replace("at00001", "at00002")}
