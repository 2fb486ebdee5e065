"""Controls run as cells of their own: floors and a ceiling, and no client gradient for them."""

from pathlib import Path
from typing import Any

import pytest

from attacks import CONTROLS, find_attack
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.interfaces import Control
from mjp_privacy.report.write import write_report
from tests.helpers.runs import (
    MJP,
    attack,
    cell,
    cells,
    names,
    photographs,
    rows,
    tensors,
    tiny,
    values,
    written,
)

ROLES = dict.fromkeys(["grey", "mean_image", "other_image"], "floor")
ROLES |= {"oracle_inverse": "ceiling"}
NARROW = {**MJP, "embed_dim": 96}  # below the patch length: the inverse loses something
PSNR = ("psnr", "standard")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("images"))


def controls(*names: str) -> dict[str, Any]:
    grid = [{"models": ["MJP"], "settings": ["a", "b", "c"], "gammas": [0.5]}]
    attacks = [{"name": name} for name in names or ROLES]
    return tiny(models={"MJP": NARROW}, grid=grid, attacks=attacks)


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedSGDClient, "gradients", lambda *_, **__: pytest.fail("none is needed"))
        assert attack(images, out, controls()).exit_code == 0
    return out


def test_cells_rows_and_the_report_say_the_role(run: Path, tmp_path: Path) -> None:
    assert list(CONTROLS) == list(ROLES)
    assert all(isinstance(find_attack(name), Control) for name in ROLES)
    assert not isinstance(find_attack("april"), Control)
    assert {entry["attack"]: entry["role"] for entry in cells(run)} == ROLES
    assert all(entry["paper_row"] is None and entry["uploads"] == 0 for entry in cells(run))
    found = rows(run)
    assert set(found["status"]) == {"ok"}
    assert set(found.loc[found["attack"] == "grey", "role"]) == {"floor"}
    assert "gradient_residual" not in set(found["metric"])
    assert len(write_report([run], tmp_path).contents.lines) == 12
    assert "oracle_inverse" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("setting", ["a", "b", "c"])
def test_what_each_control_gives(run: Path, setting: str) -> None:
    wanted = {name: {"setting": setting, "attack": name} for name in ROLES}
    stored = {name: tensors(run, cell(run, **wanted[name])["run_id"]) for name in ROLES}
    score = {name: values(run, **wanted[name]) for name in ROLES}
    for image_id in names(6):
        own = {name: stored[name][image_id]["images"] for name in ROLES}
        assert (own["grey"] == 0.5).all()
        assert own["mean_image"][:, 3, 4].tolist() == pytest.approx([0.485, 0.456, 0.406])
        others = [other["plain"] for i, other in stored["grey"].items() if i != image_id]
        assert any(own["other_image"].equal(other) for other in others)
        reached = {name: score[name][(image_id, *PSNR)] for name in ROLES}
        beside = score["oracle_inverse"][image_id]
        assert reached["grey"] == pytest.approx(beside["grey_psnr", "diagnostic"])
        best = reached.pop("oracle_inverse")
        assert best == pytest.approx(beside["ceiling_psnr", "diagnostic"], abs=0.01)
        assert max(reached.values()) < best < 60


def test_one_image_alone_has_no_other(images: Path, tmp_path: Path) -> None:
    assert attack(images, tmp_path, controls(), limit=1).exit_code == 0
    alone = rows(tmp_path)[lambda r: r["attack"] == "other_image"]
    assert set(alone["status"]) == {"unsupported"}
    assert alone["reason"].notna().all()
    files = written(tmp_path)
    attack(images, tmp_path, controls(), limit=1)
    assert written(tmp_path) == files
