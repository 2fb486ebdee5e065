"""Damage: a changed bit is named, leaves its series out, and never becomes another line."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mjp_privacy.core.read import FileKind
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models import load_model
from mjp_privacy.models.checkpoint_files import file_sha256
from mjp_privacy.models.tensor_files import BLANK_DIGEST, DIGEST_KEY, check_digest
from mjp_privacy.uploads.faults import examine
from mjp_privacy.uploads.folder import REFUSED, Group, group_uploads, known_uploads
from mjp_privacy.uploads.record import record_weights
from tests.helpers import federations
from tests.helpers.runs import TINY
from tests.helpers.uploads import NAME, ONE, attacked, check_uploads, copied, edit, edit_all, flip

SERIES = [f"b1s1_r00001_{number:03d}" for number in range(3)]
FIRST, SECOND = f"{SERIES[0]}_at00001", f"{SERIES[0]}_at00002"


@pytest.fixture(scope="module")
def three_recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images, each in rounds 1 and 2."""
    record = {"rounds": [1], "images": 3, "probes": [{"uploads": 2}]}
    return federations.run(tmp_path_factory.mktemp("federation"), record=record) / "uploads"


@pytest.fixture
def three(three_recorded: Path, tmp_path: Path) -> Path:
    return copied(three_recorded, tmp_path / "uploads")


def groups_of(folder: Path) -> list[Group]:
    """The lines of a folder, which are those that a worker sees."""
    examined = examine(folder)
    groups = group_uploads(examined.known, refused=examined.refused)
    known, _ = known_uploads(folder)
    of_worker = group_uploads(known, refused=examined.reasons)
    facts = [[(group.name, group.digest()) for group in of] for of in (groups, of_worker)]
    assert facts[0] == facts[1]
    return groups


def attack(folder: Path) -> Any:
    experiment = load_experiment({"name": "attacks"} | ONE)
    return attack_uploads(experiment, folder, folder.parent / "run", device="cpu")


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
    "other field": lambda u: in_header(u, FIRST, b'"series"', b'"serier"'),
    "no JSON": lambda u: in_header(u, SECOND, b'"series":', b'"series"z'),
    "seal": lambda u: in_header(u, FIRST, b"mjp-seal", b"mjp-sdal"),
    "a person's change": lambda u: in_header(u, SECOND, b'"round": 2', b'"round": 14'),
    "half a header": lambda u: (u / f"{FIRST}.json").write_bytes(b'{\n "seal": "mjp'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_upload_leaves_its_series_out(three: Path, damage: Callable[[Path], Any]) -> None:
    damage(three)
    assert set(examine(three).refused) == {FIRST, SECOND}
    (group,) = groups_of(three)
    assert group.name == "small"
    assert [series.first.header.series for series in group.series] == SERIES[1:]
    assert [len(series.uploads) for series in group.series] == [2, 2]


def test_lines_keep_their_names_beside_a_line_that_is_lost(tmp_path: Path) -> None:
    folder = federations.run(tmp_path, record={"rounds": [1, 2], "images": 1}) / "uploads"
    names = [group.name for group in groups_of(folder)]
    assert names == ["small, round 1", "small, round 2"]
    for spoil in (f"{FIRST}.safetensors", f"{FIRST}.json"):
        flip(folder / spoil, 3001)
        assert [group.name for group in groups_of(folder)] == names[1:]
        flip(folder / spoil, 3001)
    assert [group.name for group in groups_of(folder)] == names


def test_a_restored_upload_leaves_nothing_behind(three: Path) -> None:
    """Nor does one that was damaged before another."""
    run, other = three.parent / "run", f"{SERIES[2]}_at00001"
    assert attack(three).exit_code == 0
    before = units(run)
    assert len(before) == 3
    rows = {path: path.read_bytes() for path in (run / "rows").rglob("*.parquet")}
    for name in (SECOND, other):
        flip(three / f"{name}.safetensors", 80_003)
        summary = attack(three)
        assert summary.exit_code == 3
        assert any(name in failure for failure in summary.failures)
        pair = {name[:-1] + "1", name[:-1] + "2"}
        assert {image for model, image in units(run) if model == REFUSED} == pair
        assert sum(model == "small" for model, _ in units(run)) == 2
        flip(three / f"{name}.safetensors", 80_003)
    assert attack(three).exit_code == 0
    assert units(run) == before
    assert max(before.values()) == 1
    assert all(path.read_bytes() == content for path, content in rows.items())


# seals --------------------------------------------------------------------------------------------


def flip_last(path: Path) -> None:
    """The lowest bit of a number's mantissa, or of its exponent: the file stays readable."""
    flip(path, 8 * (path.stat().st_size - 3))


def unsealed(path: Path) -> dict[str, str]:
    """The metadata of a file without its seal."""
    with safe_open(path, "pt") as file:
        return {k: v for k, v in file.metadata().items() if k != DIGEST_KEY}


def test_every_file_is_sealed_and_headers_name_their_weights(folder: Path) -> None:
    recorded = [path for path in folder.rglob("*") if path.is_file()]
    assert len(recorded) == 14  # four uploads of three files, two files of weights
    for path in recorded:
        check_digest(path, FileKind("an upload", "", 1 << 30), needed=True)
    for path in folder.glob("*.json"):
        header = json.loads(path.read_text())
        assert header["weights_sha256"] == file_sha256(folder / header["weights"])


@pytest.mark.parametrize("which", ["tensors", "truth", "weights"])
def test_a_flipped_bit_is_a_row_with_its_reason(folder: Path, which: str) -> None:
    edit_all(folder, series=None)
    places = {
        "tensors": folder / f"{NAME}.safetensors",
        "truth": folder / "truth" / f"{NAME}.safetensors",
        "weights": folder / json.loads((folder / f"{NAME}.json").read_text())["weights"],
    }
    flip_last(places[which])
    text, usable = check_uploads(folder)
    assert not usable
    assert any(f"FAULT  {NAME}: " in line and "changed" in line for line in text.splitlines())
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 3
    failed = scores[scores.status == "failed"].set_index("image_id").reason
    assert "changed" in failed[NAME]
    assert len(failed) == (2 if which == "weights" else 1)  # two uploads have these weights
    assert (scores.status == "ok").sum() == 4 - len(failed)


@pytest.mark.parametrize("ending", ["safetensors", "json"])
def test_no_flipped_bit_goes_unnoticed(folder: Path, ending: str) -> None:
    draw, path = random.Random(16), folder / f"{NAME}.{ending}"
    whole = path.read_bytes()
    bits = [draw.randrange(8 * len(whole)) for _ in range(15)]
    if ending == "safetensors":
        length = 8 * (8 + int.from_bytes(whole[:8], "little"))
        seal = 8 * whole.index(DIGEST_KEY.encode())  # its name, and how the digest begins
        bits += [*(draw.randrange(length) for _ in range(15)), *range(seal, seal + 8 * 24, 23)]
    for bit in bits:
        flip(path, bit)
        assert NAME in examine(folder).refused, bit
        path.write_bytes(whole)
    assert not examine(folder).refused


def test_files_of_strangers_without_seals_are_read(folder: Path) -> None:
    before = attacked(folder, **ONE)[1]
    for path in folder.rglob("*.safetensors"):
        if path.parent.name != "weights":
            save_file(load_file(path), path, unsealed(path) or None)
    for path in folder.glob("*.json"):
        header = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in header.items() if k != "seal"}))
    assert "note: " not in check_uploads(folder)[0]
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 0
    assert sorted(scores.value) == sorted(before.value)


def test_a_header_that_a_person_changed_is_read_without_its_seal(folder: Path) -> None:
    edit_all(folder, series=None)
    path = folder / f"{NAME}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seal": BLANK_DIGEST}))
    assert "seal" in examine(folder).reasons[NAME]
    edit(folder, noise={"pos_embed": 0.25})
    (changed,) = (upload for upload in examine(folder).sound if upload.name == NAME)
    assert changed.header.noise == {"pos_embed": 0.25}


# weights beside uploads ---------------------------------------------------------------------------


def test_damaged_weights_are_stored_again(tmp_path: Path) -> None:
    model = load_model(**TINY)
    path = tmp_path / record_weights(tmp_path, model)
    whole = path.read_bytes()
    flip_last(path)
    record_weights(tmp_path, model)
    assert path.read_bytes() == whole
    path.unlink()
    record_weights(tmp_path, model)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("changes", [{"num_heads": 6}, {"activation": "quick_gelu"}], ids=str)
def test_equal_tensors_of_another_model_are_another_file(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model, other = load_model(**TINY), load_model(**{**TINY, **changes})
    other.load_state_dict(model.state_dict())
    places = [record_weights(tmp_path, each) for each in (model, other, model, other)]
    assert places[:2] == places[2:]
    assert len(set(places)) == 2 == len(list((tmp_path / "weights").iterdir()))
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for each, place in zip((model, other), places, strict=False):
        again = load_model(checkpoint=tmp_path / place)
        assert again(again.normalize(image)).equal(each(each.normalize(image)))
