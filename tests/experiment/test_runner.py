"""What a run leaves: rows, tensors, cells; and that every number can be made again from them."""

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from mjp_privacy.experiment.gradient_residual import RESIDUAL_OVER

from mjp_privacy import load_model, score
from mjp_privacy.client.gradients import FedSGDClient, predict
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment import shared_truth
from mjp_privacy.experiment.store import CELL_COLUMNS, ROW_COLUMNS, RunStore
from mjp_privacy.metrics import METRICS
from mjp_privacy.models.jigsaw import draw_masks, shuffle_patches
from mjp_privacy.report.write import write_report
from tests.helpers.runs import (
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
    values,
    written,
)

SCORES = {(METRICS[key].name, METRICS[key].variant) for key in METRICS}
TOP1 = {("top1", "intact"), ("top1", "altered")}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The five cells of `tiny` in both precisions."""
    out = tmp_path_factory.mktemp("run")
    summary = attack(images, out, tiny(dtypes=["float32", "float64"]))
    assert (summary.exit_code, summary.cells, summary.images) == (0, 10, 6)
    return out


# rows ---------------------------------------------------------------------------------------------


def test_every_image_has_every_score_in_every_cell(run: Path) -> None:
    found = rows(run)
    assert list(found.columns) == [*ROW_COLUMNS, *CELL_COLUMNS, "group"]
    assert set(found["status"]) == {"ok"}
    assert set(found["reason"]) == {""}
    assert not found.duplicated(["run_id", "image_id", "metric", "variant"]).any()
    for entry in cells(run):
        own = found[found["run_id"] == entry["run_id"]]
        for image_id, part in own.groupby("image_id"):
            kinds = set(zip(part["metric"], part["variant"], strict=True))
            assert kinds >= SCORES | TOP1 | {("ceiling_psnr", "diagnostic")}, image_id
        assert sorted(own["image_id"].unique()) == names(6)


def test_the_constant_columns_of_a_row_are_those_of_its_cell(run: Path) -> None:
    found = rows(run)
    for entry in cells(run):
        own = found[found["run_id"] == entry["run_id"]]
        for column in {*ROW_COLUMNS, *CELL_COLUMNS} & entry.keys() - {"status", "reason"}:
            stored = set(own[column].map(lambda v: None if pd.isna(v) else v))
            assert stored == {entry[column]}, column
        assert set(own["label_source"]) == {"csv"}


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
    found = rows(run).set_index(["run_id", "image_id", "metric", "variant"])["value"]
    files = sorted(run.glob("reconstructions/*/*.safetensors"))
    assert len(files) == 10 * 2
    for path in files:
        stored, image_ids = RunStore(run).pictures.read(path)
        for (metric, variant), again in score(stored["images"], stored["target"]).items():
            for image_id, value in zip(image_ids, again, strict=True):
                assert found[path.parent.name, image_id, metric, variant] == value


def test_accuracy_is_that_of_the_models_on_the_rows_own_input(run: Path) -> None:
    model = load_model(**{**MJP, "seed": 0})
    entry = cell(run, model="MJP", setting="b", dtype="float32")
    found = values(run, run_id=entry["run_id"])
    for image_id, stored in tensors(run, entry["run_id"]).items():
        label = int(image_id.removesuffix(".png")) % 10
        right = predict(model, stored["input"][None], stored["mask"][None]).item() == label
        assert found[image_id, "top1", "intact"] == right


def test_accuracy_is_taken_with_the_mask_that_the_client_used(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def noted(model: Any, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        asked.append((x, mask))
        return predict(model, x, mask)

    monkeypatch.setattr(shared_truth, "predict", noted)
    grid = [{"models": ["MJP"], "settings": ["a", "b"], "gammas": [0.5]}]
    attack(images, tmp_path, tiny(grid=grid), limit=3)
    stored = tensors(tmp_path, cell(tmp_path, setting="b")["run_id"]).values()
    plain, mask = (torch.stack([own[name] for own in stored]) for name in ("plain", "mask"))
    kinds = [("a" if x.equal(plain) else "b", used) for x, used in asked]
    assert [kind for kind, _ in kinds] == ["a", "a", "b", "b"]  # the intact and the altered model
    assert all(used is None if kind == "a" else mask.equal(used) for kind, used in kinds)


def test_diagnostics_say_what_the_mask_was(run: Path) -> None:
    entry = cell(run, model="MJP", setting="c", dtype="float64")
    found = values(run, run_id=entry["run_id"])
    for image_id, stored in tensors(run, entry["run_id"]).items():
        assert found[image_id, "shuffled_patches", "diagnostic"] == stored["mask"].sum()
        moved = (stored["permutation"] != torch.arange(16)).sum()
        assert found[image_id, "moved_patches", "diagnostic"] == moved
        assert found[image_id, "empty_mask", "diagnostic"] == (not stored["mask"].any())
        assert found[image_id, "zero_rows", "diagnostic"] == stored["mask"].sum()


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


def test_setting_c_is_setting_b_scored_against_the_plain_image(run: Path) -> None:
    b, c = (
        tensors(run, cell(run, model="MJP", setting=setting, dtype="float64")["run_id"])
        for setting in "bc"
    )
    for image_id in names(6):
        for name in ("images", "input", "mask", "permutation"):
            assert b[image_id][name].equal(c[image_id][name]), name


def test_masks_are_those_of_seed_and_image_alone(images: Path, tmp_path: Path) -> None:
    config = tiny(
        dtypes=["float32", "float64"],
        attacks=[{"name": "april"}, {"name": "april_unk_aware"}],
        grid=[{"models": ["ViT", "MJP"], "settings": ["b", "c"], "gammas": [0.5]}],
        seed=3,
    )
    attack(images, tmp_path, config, limit=3)
    puzzles = []
    for entry in cells(tmp_path):
        if entry["model"] == "ViT" and entry["attack"] == "april_unk_aware":
            continue  # not applicable: nothing is stored
        stored = tensors(tmp_path, entry["run_id"])
        puzzles.append(
            {i: (t["mask"].tolist(), t["permutation"].tolist()) for i, t in stored.items()}
        )
    assert len(puzzles) == 12
    assert all(puzzle == puzzles[0] for puzzle in puzzles)
    ids = list(puzzles[0])
    drawn = draw_masks(ids, grid=4, gamma=0.5, round=0, seed=3)
    assert [puzzles[0][i][0] for i in ids] == drawn[0].tolist()
    assert [puzzles[0][i][1] for i in ids] == drawn[1].tolist()


# runs ---------------------------------------------------------------------------------------------


def test_the_same_command_again_does_nothing(
    run: Path, images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, files, table = rows(run), written(run), (run / "cells.json").read_text()
    monkeypatch.setattr(FedSGDClient, "update", lambda *_, **__: pytest.fail("computed again"))
    summary = attack(images, run, tiny(dtypes=["float32", "float64"]))
    assert summary.exit_code == 0
    assert written(run) == files
    assert (run / "cells.json").read_text() == table
    pd.testing.assert_frame_equal(rows(run), before, check_exact=True)
    assert "finished already" in capsys.readouterr().err


def test_a_run_has_the_same_rows_in_another_folder(run: Path, images: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(images, tmp_path / "elsewhere")
    attack(moved, tmp_path / "out", tiny(dtypes=["float32", "float64"]))
    same_rows(run, tmp_path / "out")


def run_id(images: Path, out: Path, config: dict[str, Any], **arguments: Any) -> str:
    attack(images, out, config, **arguments)
    return str(cells(out)[0]["run_id"])


def test_run_id_is_of_the_cell_and_not_of_the_limit(images: Path, tmp_path: Path) -> None:
    known = {run_id(images, tmp_path / "0", one_cell(), limit=1)}
    assert {run_id(images, tmp_path / "0", one_cell(), limit=2)} == known
    changed = [
        {"seed": 1},
        {"dtypes": ["float64"]},
        {"client": {"dal": True}},
        {"block": 2},
        {"attacks": [{"name": "april", "options": {"engine": "breaching"}}]},
        {"grid": [{"models": ["ViT"], "settings": ["b"]}]},
        {"models": {"ViT": {**TINY, "seed": 1}}},
        {"models": {"ViT": {**TINY, "num_classes": 11}}},
        {"models": {"ViT": {**TINY, "std": 0.4}}},
    ]
    for place, change in enumerate(changed, 1):
        known.add(run_id(images, tmp_path / str(place), one_cell(**change), limit=1))
    assert len(known) == 1 + len(changed)


def test_gradients_are_made_once_for_cells_that_share_them(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    update = FedSGDClient.update

    def counted(self: FedSGDClient, inputs: Any, *, names: Any = None) -> Any:
        calls.append(list(names))
        return update(self, inputs, names=names)

    monkeypatch.setattr(FedSGDClient, "update", counted)
    attacks = [{"name": "april"}, {"name": "april_unk_aware"}]
    grid = [{"models": ["MJP"], "settings": ["b"]}]
    attack(images, tmp_path, tiny(attacks=attacks, grid=grid), limit=3)
    assert len(calls) == 1
    needed = {"pos_embed", "blocks.0.attn.qkv.weight", "unk_embed"}
    assert set(calls[0]) == needed | {RESIDUAL_OVER}


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
    attack(images, tmp_path, tiny(), limit=1, gamma=0.9)
    gammas = [entry["gamma"] for entry in cells(tmp_path)]
    assert gammas == [0, 0.9, 0, 0.9, 0.9, 0.5, 0.5, 0.5]
    assert rows(tmp_path)["status"].eq("ok").all()


def test_a_cell_given_twice_is_refused(images: Path, tmp_path: Path) -> None:
    entry = {"models": ["ViT"], "settings": ["a"]}
    for again in (entry, entry | {"note": "again"}, entry | {"paper_setting": "b"}):
        with pytest.raises(UserError, match="twice"):
            attack(images, tmp_path, tiny(grid=[entry, again]))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_two_labels_of_one_checkpoint_keep_rows_and_lines_of_their_own(
    images: Path, tmp_path: Path
) -> None:
    config = one_cell(
        models={"first": TINY, "second": TINY},
        grid=[{"models": ["first", "second"], "settings": ["a"]}],
    )
    attack(images, tmp_path / "run", config)
    assert len({entry["run_id"] for entry in cells(tmp_path / "run")}) == 2
    for label in ("first", "second"):
        entry = cell(tmp_path / "run", model=label)
        assert set(rows(tmp_path / "run", [entry["run_id"]])["model"]) == {label}
    first, second = (values(tmp_path / "run", model=label) for label in ("first", "second"))
    pd.testing.assert_series_equal(first, second, check_exact=True)
    write_report([tmp_path / "run"], tmp_path / "report")
    table = pd.read_csv(tmp_path / "report" / "table.csv")
    assert list(table["model"]) == ["first", "second"] * 2
    samples = pd.read_csv(tmp_path / "report" / "samples.csv")
    assert list(samples["model"].unique()) == ["first", "second"]


def test_images_csv_says_what_each_image_was(run: Path) -> None:
    known = pd.read_csv(run / "images.csv", keep_default_na=False).set_index("image_id")
    assert sorted(known.index) == names(6)
    assert list(known.loc[names(6), "label"]) == [0, 1, 2, 3, 4, 5]
    assert set(known["status"]) == {"ok"}
    assert known["sha256"].str.fullmatch("[0-9a-f]{64}").all()
    assert known["pixel_sha256"].str.fullmatch("[0-9a-f]{64}").all()


def test_the_device_that_is_not_there(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mjp_privacy.core.machine import pick_device
    from mjp_privacy.experiment.run import run_experiment

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"no CUDA device here\. Use --device cpu or auto"):
        run_experiment(tiny(), images=images, out=tmp_path, device="cuda")
    with pytest.raises(UserError, match="expected auto, cpu or cuda, got 'gpu'"):
        pick_device("gpu")
    assert pick_device("auto").type == "cpu"


# labels and the client ----------------------------------------------------------------------------


def test_without_labels_the_label_is_the_models_own_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = photographs(tmp_path / "images", 3, labelled=False)
    used: dict[str, int] = {}
    update = FedSGDClient.update

    def noted(self: FedSGDClient, inputs: Any, **arguments: Any) -> Any:
        used.update(zip(inputs.image_ids, inputs.labels.tolist(), strict=True))
        return update(self, inputs, **arguments)

    monkeypatch.setattr(FedSGDClient, "update", noted)
    config = tiny(grid=[{"models": ["MJP"], "settings": ["b"], "gammas": [0.5]}])
    assert attack(folder, tmp_path / "run", config).exit_code == 0
    model = load_model(**{**MJP, "seed": 0})
    for image_id, stored in tensors(tmp_path / "run", cells(tmp_path / "run")[0]["run_id"]).items():
        assert used[image_id] == predict(model, stored["plain"][None], None).item()
    found = rows(tmp_path / "run")
    assert set(found["label_source"]) == {"prediction"}
    top1 = found[found["metric"] == "top1"]
    assert set(top1["status"]) == {"unscored"}
    assert set(top1["reason"]) == {"the images carry no true labels"}
    assert top1["value"].isna().all()
    assert set(found.loc[found["metric"] != "top1", "status"]) == {"ok"}
    assert not cells(tmp_path / "run")[0]["true_labels"]
    notes = write_report([tmp_path / "run"], tmp_path / "report", everything=True)
    assert "No true labels" in (tmp_path / "report" / "table.md").read_text(), notes


def test_labels_that_come_later_are_cells_of_their_own(images: Path, tmp_path: Path) -> None:
    bare = photographs(tmp_path / "bare", labelled=False)
    attack(bare, tmp_path / "run", one_cell())
    unlabelled = cells(tmp_path / "run")[0]["run_id"]
    attack(bare, tmp_path / "run", one_cell(), labels=images / "labels.csv")
    labelled = cells(tmp_path / "run")
    assert [entry["true_labels"] for entry in labelled] == [True]  # the line is replaced
    assert labelled[0]["run_id"] != unlabelled
    assert len(rows(tmp_path / "run", [unlabelled])) > 0  # its rows are not lost


def test_dal_is_in_the_loss_only_where_there_is_a_regressor(images: Path, tmp_path: Path) -> None:
    grid = [{"models": ["ViT", "MJP"], "settings": ["a"]}]
    attack(images, tmp_path / "without", tiny(grid=grid), limit=3)
    attack(images, tmp_path / "with", tiny(grid=grid, client={"dal": True}), limit=3)
    found = rows(tmp_path / "with")
    assert set(found.loc[found["model"] == "ViT", "dal"]) == {False}
    assert set(found.loc[found["model"] == "MJP", "dal"]) == {True}
    same = {
        label: values(tmp_path / "with", model=label).equals(
            values(tmp_path / "without", model=label)
        )
        for label in ("ViT", "MJP")
    }
    assert same == {"ViT": True, "MJP": False}


def test_april_is_not_applicable_to_steps_of_two_images(images: Path, tmp_path: Path) -> None:
    config = one_cell(client={"batch": 2}, block=4)
    assert attack(images, tmp_path, config).exit_code == 0
    found = rows(tmp_path)
    assert set(found["status"]) == {"unsupported"}
    assert set(found["reason"]) == {"APRIL is for batch 1; the client's batch is 2"}
    assert set(found["batch"]) == {2}
    assert set(zip(found["metric"], found["variant"], strict=True)) == SCORES | TOP1
    assert sorted(found["image_id"].unique()) == names(6)


def test_images_that_do_not_fill_the_clients_steps_are_refused(
    images: Path, tmp_path: Path
) -> None:
    config = one_cell(client={"batch": 2}, block=4)
    with pytest.raises(
        UserError, match=r"do not fill the client steps of .*multiple of 2.*--limit 2"
    ):
        attack(images, tmp_path, config, limit=3)


def test_strict_models_are_not_applicable_and_no_failure(images: Path, tmp_path: Path) -> None:
    config = one_cell(models={"ViT": {**TINY, "position_embedding": "strict"}})
    summary = attack(images, tmp_path, config)
    assert (summary.exit_code, summary.failures) == (0, ())
    found = rows(tmp_path)
    assert set(found["status"]) == {"unsupported"}
    assert found["reason"].str.contains("no position embeddings").all()
    files = written(tmp_path)
    attack(images, tmp_path, config)
    assert written(tmp_path) == files
