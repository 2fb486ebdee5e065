"""What a run leaves, from which every number can be made again; and that whoever works makes it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks import ATTACKS
from mjp_privacy import load_model, score
from mjp_privacy.client.gradients import predict
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment import cell as cells_of_blocks
from mjp_privacy.experiment.cell_facts import run_id
from mjp_privacy.experiment.config import expand, load_experiment
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics import METRICS
from mjp_privacy.models.jigsaw import shuffle_patches
from tests.helpers.own_attacks import FRAMES, ROUNDS, SEEN, mjp, rounds
from tests.helpers.runs import (
    KEYS,
    MJP,
    PATCH,
    SIDE,
    TINY,
    attack,
    cell,
    cells,
    names,
    one_cell,
    photographs,
    rows,
    same_rows,
    tensors,
    tiny,
)

BOTH = ["float32", "float64"]


@pytest.fixture(scope="module")
def run(images: Path, whole: Path) -> Path:
    """The five cells of `tiny` in both precisions; nobody changes it."""
    return whole


# rows ---------------------------------------------------------------------------------------------


SCORES = {(METRICS[key].name, METRICS[key].variant) for key in METRICS}


TOP1 = {("top1", "intact"), ("top1", "altered")}


def test_every_image_has_every_score_in_every_cell(run: Path) -> None:
    found = rows(run)
    assert set(found["status"]) == {"ok"}
    assert set(found["reason"]) == {""}
    assert set(found["label_source"]) == {"csv"}
    assert not found.duplicated(KEYS).any()
    for entry in cells(run):
        own = found[found["run_id"] == entry["run_id"]]
        for image_id, part in own.groupby("image_id"):
            kinds = set(zip(part["metric"], part["variant"], strict=True))
            assert kinds >= SCORES | TOP1 | {("ceiling_psnr", "diagnostic")}, image_id
        assert sorted(own["image_id"].unique()) == names(6)


def test_image_ids_are_paths_inside_the_folder_and_inside_the_zip(tmp_path: Path) -> None:
    for place in ("cats", "dogs/small"):
        photographs(tmp_path / "pets" / place, 2, labelled=False)
    expected = {"cats/0.png", "cats/1.png", "dogs/small/0.png", "dogs/small/1.png"}
    attack(tmp_path / "pets", tmp_path / "folder", one_cell())
    zipped = Path(shutil.make_archive(str(tmp_path / "pets"), "zip", tmp_path / "pets"))
    attack(zipped, tmp_path / "zip", one_cell())
    assert set(rows(tmp_path / "folder")["image_id"]) == expected
    same_rows(tmp_path / "folder", tmp_path / "zip")


def test_stored_tensors_give_the_stored_scores(run: Path) -> None:
    found = rows(run).set_index(KEYS)["value"]
    for key in (entry["run_id"] for entry in cells(run)):
        stored = tensors(run, key)
        assert sorted(stored) == names(6)
        for block in (list(stored)[:3], list(stored)[3:]):  # LPIPS moves with the batch
            images, targets = (
                torch.stack([stored[i][n] for i in block]) for n in ("images", "target")
            )
            for (metric, variant), again in score(images, targets).items():
                assert again.tolist() == [found[key, i, metric, variant] for i in block]


def test_accuracy_is_taken_with_the_mask_that_the_client_used(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def noted(model: Any, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        asked.append((x, mask))
        return predict(model, x, mask)

    monkeypatch.setattr(cells_of_blocks, "predict", noted)
    grid = [{"models": ["MJP"], "settings": ["a", "b"], "gammas": [0.5]}]
    attack(images, tmp_path, tiny(grid=grid, attacks=[{"name": "grey"}]), limit=3)
    stored = tensors(tmp_path, cell(tmp_path, setting="b")["run_id"]).values()
    plain, mask = (torch.stack([own[name] for own in stored]) for name in ("plain", "mask"))
    kinds = [("a" if x.equal(plain) else "b", used) for x, used in asked]
    assert [kind for kind, _ in kinds] == ["a", "a", "b", "b"]  # the intact and the altered model
    assert all(used is None if kind == "a" else mask.equal(used) for kind, used in kinds)


# settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "setting", "fed", "against"),
    [
        ("ViT", "a", "plain", "plain"),
        ("MJP", "a", "plain", "plain"),
        ("MJP", "b", "shuffled", "shuffled"),
        ("MJP", "c", "shuffled", "plain"),
    ],
)
def test_settings_feed_and_score_what_they_say(
    run: Path, images: Path, model: str, setting: str, fed: str, against: str
) -> None:
    from mjp_privacy import load_images

    plain = {i.image_id: i.image for i in load_images(images, size=SIDE)}
    entry = cell(run, model=model, setting=setting, dtype="float32")
    stored = tensors(run, entry["run_id"])
    assert set(stored) == set(names(6))
    for image_id, own in stored.items():
        kinds = {"plain": plain[image_id], "shuffled": plain[image_id]}
        assert own["plain"].equal(plain[image_id])
        assert ("mask" in own) == ("permutation" in own) == (fed == "shuffled")
        if "mask" in own:
            order = own["permutation"]
            kinds["shuffled"] = shuffle_patches(plain[image_id][None], order[None], PATCH)[0]
            assert order[~own["mask"]].equal(torch.arange(16)[~own["mask"]])
        assert own["input"].equal(kinds[fed])
        assert own["target"].equal(kinds[against])
    if fed == "shuffled":
        assert any(not own["input"].equal(own["plain"]) for own in stored.values())


# cells --------------------------------------------------------------------------------------------


def test_a_run_id_is_of_all_that_makes_rows_others() -> None:
    known = set()
    for change in (
        {},
        {"seed": 1},
        {"dtypes": ["float64"]},
        {"client": {"dal": True}},
        {"block": 2},
        {"attacks": [{"name": "april", "options": {"engine": "breaching"}}]},
        {"grid": [{"models": ["ViT"], "settings": ["b"]}]},
        {"models": {"ViT": {**TINY, "seed": 1}}},
        {"models": {"ViT": {**TINY, "num_classes": 11}}},
        {"models": {"ViT": {**TINY, "std": 0.4}}},
    ):
        experiment = load_experiment(one_cell(**change))
        model = load_model(**experiment.models["ViT"].loading())
        ids = {
            run_id(c, experiment, model, labels) for c in expand(experiment) for labels in (0, 1)
        }
        assert len(ids) == 2
        assert known.isdisjoint(ids)
        known |= ids


def test_cells_stand_in_table_order_and_those_of_other_commands_stay(
    images: Path, tmp_path: Path
) -> None:
    attack(images, tmp_path, tiny(), limit=1)
    first = [(entry["model"], entry["setting"], entry["gamma"]) for entry in cells(tmp_path)]
    assert first == [
        ("ViT", "a", 0),
        ("ViT", "b", 0.5),
        ("MJP", "a", 0),
        ("MJP", "b", 0.5),
        ("MJP", "c", 0.5),
    ]
    attack(images, tmp_path, tiny(), limit=1, gamma=0.9, add=True)
    gammas = [entry["gamma"] for entry in cells(tmp_path)]
    assert gammas == [0, 0.9, 0, 0.9, 0.9, 0.5, 0.5, 0.5]
    assert rows(tmp_path)["status"].eq("ok").all()


def test_a_cell_given_twice_is_refused(images: Path, tmp_path: Path) -> None:
    entry = {"models": ["ViT"], "settings": ["a"]}
    for again in (entry, entry | {"note": "again"}, entry | {"paper_setting": "b"}):
        with pytest.raises(UserError, match="ViT"):
            attack(images, tmp_path, tiny(grid=[entry, again]))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# labels and the client ----------------------------------------------------------------------------


def test_without_labels_the_label_is_the_models_own_prediction(tmp_path: Path) -> None:
    folder = photographs(tmp_path / "images", 3, labelled=False)
    config = mjp("b", rounds(rounds=1))
    with ATTACKS.registered("rounds", ROUNDS):
        assert attack(folder, tmp_path / "run", config).exit_code == 0
    model, entry = load_model(**{**MJP, "seed": 0}), cells(tmp_path / "run")[0]
    order = RunStore(tmp_path / "run").read(entry["run_id"])["image_id"]
    stored = tensors(tmp_path / "run", entry["run_id"])
    expected = [predict(model, stored[name]["plain"][None], None).item() for name in order]
    assert SEEN[-1].labels.tolist() == expected  # type: ignore[union-attr]
    found = rows(tmp_path / "run")
    assert set(found["label_source"]) == {"prediction"}
    top1 = found[found["metric"] == "top1"]
    assert set(top1["status"]) == {"unscored"}
    assert top1["value"].isna().all()
    assert set(found.loc[found["metric"] != "top1", "status"]) == {"ok"}
    assert not entry["true_labels"]


def test_a_config_attacks_the_classes_it_names(images: Path, tmp_path: Path) -> None:
    summary = attack(images, tmp_path, one_cell(classes={"modulo": 3, "remainders": [1]}))
    assert summary.images == 2
    assert set(rows(tmp_path)["image_id"]) == {"1.png", "4.png"}
    with pytest.raises(UserError, match="7"):
        attack(images, tmp_path, one_cell(classes={"modulo": 10, "remainders": [7]}))
    with pytest.raises(UserError, match="modulo"):
        attack(images, tmp_path, one_cell(classes={"modulo": 1, "remainders": [0]}))


MOST_FRAMES = 12


def test_few_functions_stand_between_the_way_in_and_an_attack(images: Path, tmp_path: Path) -> None:
    with ATTACKS.registered("frames", Entry("tests.helpers.own_attacks:Frames")):
        attack(images, tmp_path, one_cell(attacks=[{"name": "frames"}]), limit=1)
    print(*FRAMES, sep="\n")
    assert FRAMES[0] == "run_experiment"
    assert len(FRAMES) <= MOST_FRAMES
