"""Controls run as cells of their own: floors and a ceiling, and no client gradient for them."""

from pathlib import Path
from typing import Any

import pytest

from attacks import CONTROLS, find_attack
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core.errors import UserError
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

ALL = ["grey", "mean_image", "other_image", "oracle_inverse"]
NARROW = {**MJP, "embed_dim": 96}  # below the patch length: the inverse loses something
PSNR = ("psnr", "standard")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("images"))


def controls(**changes: Any) -> dict[str, Any]:
    grid = [{"models": ["MJP"], "settings": ["a", "b", "c"], "gammas": [0.5]}]
    attacks = [{"name": name} for name in ALL]
    return tiny(**({"models": {"MJP": NARROW}, "grid": grid, "attacks": attacks} | changes))


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        for made in ("update", "gradients"):
            patch.setattr(FedSGDClient, made, lambda *_, **__: pytest.fail("no gradient is needed"))
        assert attack(images, out, controls()).exit_code == 0
    return out


def test_every_control_is_found_by_its_name_and_says_its_role() -> None:
    assert list(CONTROLS) == ALL
    found = {name: find_attack(name) for name in ALL}
    assert all(isinstance(control, Control) for control in found.values())
    assert {name: control.role for name, control in found.items()} == {
        **dict.fromkeys(ALL[:3], "floor"),
        "oracle_inverse": "ceiling",
    }
    assert not isinstance(find_attack("april"), Control)
    with pytest.raises(UserError, match="Did you mean mean_image"):
        find_attack("mean_imag")


def test_cells_and_rows_say_the_role(run: Path, images: Path, tmp_path: Path) -> None:
    assert {entry["attack"]: entry["role"] for entry in cells(run)} == {
        **dict.fromkeys(ALL[:3], "floor"),
        "oracle_inverse": "ceiling",
    }
    assert all(entry["paper_row"] is None and entry["uploads"] == 0 for entry in cells(run))
    found = rows(run)
    assert set(found["status"]) == {"ok"}
    assert set(found.loc[found["attack"] == "grey", "role"]) == {"floor"}
    assert "gradient_residual" not in set(found["metric"])
    attack(images, tmp_path, controls(attacks=[{"name": "april"}]), limit=3)
    assert {entry["role"] for entry in cells(tmp_path)} == {"attack"}


@pytest.mark.parametrize("setting", ["a", "b", "c"])
def test_what_each_control_gives(run: Path, setting: str) -> None:
    stored = {name: tensors(run, cell(run, setting=setting, attack=name)["run_id"]) for name in ALL}
    score = {name: values(run, setting=setting, attack=name) for name in ALL}
    for image_id in names(6):
        own = {name: stored[name][image_id]["images"] for name in ALL}
        assert (own["grey"] == 0.5).all()
        assert own["mean_image"][:, 3, 4].tolist() == pytest.approx([0.485, 0.456, 0.406])
        others = [other["plain"] for i, other in stored["grey"].items() if i != image_id]
        assert any(own["other_image"].equal(other) for other in others)
        assert score["grey"][(image_id, *PSNR)] == pytest.approx(
            score["grey"][image_id, "grey_psnr", "diagnostic"]
        )
        reached = score["oracle_inverse"]
        ceiling = reached[image_id, "ceiling_psnr", "diagnostic"]
        assert reached[(image_id, *PSNR)] == pytest.approx(ceiling, abs=0.01)
        assert reached[(image_id, *PSNR)] < 60
        assert reached[(image_id, *PSNR)] > max(score[name][(image_id, *PSNR)] for name in ALL[:3])


def test_one_image_alone_has_no_other(images: Path, tmp_path: Path) -> None:
    assert attack(images, tmp_path, controls(), limit=1).exit_code == 0
    alone = rows(tmp_path)[lambda r: r["attack"] == "other_image"]
    assert set(alone["status"]) == {"unsupported"}
    assert set(alone["reason"]) == {"the block holds no other image"}
    files = written(tmp_path)
    attack(images, tmp_path, controls(), limit=1)
    assert written(tmp_path) == files


def test_controls_do_not_change_what_an_attack_is_given(images: Path, tmp_path: Path) -> None:
    both = controls(attacks=[{"name": "grey"}, {"name": "april"}, {"name": "oracle_inverse"}])
    attack(images, tmp_path / "both", both, limit=3)
    attack(images, tmp_path / "alone", controls(attacks=[{"name": "april"}]), limit=3)
    for setting in "abc":
        wanted = {"setting": setting, "attack": "april"}
        assert values(tmp_path / "both", **wanted).equals(values(tmp_path / "alone", **wanted))


def test_a_report_holds_them(run: Path, tmp_path: Path) -> None:
    assert len(write_report([run], tmp_path).contents.lines) == 12
    assert "oracle_inverse" in (tmp_path / "table.md").read_text()
