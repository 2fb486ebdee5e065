"""Uploads as files: what is written, what is read back, and what a run makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from mjp_privacy.cli import main
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import load_model
from mjp_privacy.uploads.folder import group_uploads
from tests.helpers.federations import MJP, run
from tests.helpers.runs import cell, cells, tensors, written
from tests.helpers.uploads import (
    ATTACKS,
    NAME,
    ONE,
    as_float64,
    attacked,
    change_truth,
    change_upload,
    check_uploads,
    copied,
    edit,
    edit_all,
    load_uploads,
)

SPAN = {"name": "masked_span", "options": {"prior": "stationary"}}
OTHER = NAME.replace("_000_", "_001_")


def test_what_is_written_is_the_clients_gradient(recorded: Path) -> None:
    upload = next(u for u in load_uploads(recorded) if u.name == NAME)
    truth = upload.truth()
    assert truth is not None
    model = load_model(checkpoint=upload.weights_path)
    labels = torch.tensor(upload.header.labels)
    given = FedSGDClient(model).gradients(ClientInput(truth.images, labels, truth.image_ids))
    held = upload.tensors()
    assert set(held) == {"pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"}
    for name, tensor in held.items():
        assert torch.allclose(tensor, given[name][0], atol=1e-6), name
    assert (upload.header.round, upload.header.partial) == (1, True)
    assert upload.header.series == "b1s1_r00001_000"
    assert upload.header.mean == pytest.approx((0.4, 0.5, 0.6))


def test_recorded_uploads_give_the_images_back(folder: Path) -> None:
    summary, scores, found = attacked(folder)
    assert summary.failures == ()
    by_title = scores.groupby("title")
    for name in ("patch_gradient", "multi_round"):
        assert (by_title.get_group(name).value > 60).all()
    for name, named in (("three", "2 are recorded"), ("april", "norm1")):
        assert set(by_title.get_group(name).status) == {"unsupported"}
        assert by_title.get_group(name).reason.str.contains(named).all()
    assert {entry["round"] for entry in cells(folder.parent / "run")} == {1}
    residual = found[(found.metric == "gradient_residual") & (found.title == "patch_gradient")]
    assert (residual.value < 1e-3).all()  # two attacks compete
    before = written(folder.parent / "run")
    _, again, _ = attacked(folder)  # finds nothing to do
    assert scores.equals(again)
    assert written(folder.parent / "run") == before


def test_without_private_images_rows_are_unscored_and_pictures_are_kept(folder: Path) -> None:
    shutil.rmtree(folder / "truth")
    run = folder.parent / "run"
    attacks = [*ATTACKS["attacks"], {"name": "inverting_gradients"}]
    _, _, found = attacked(folder, **ONE)
    assert (found[found.metric == "gradient_residual"].value < 1e-3).all()  # labels are in headers
    assert "gradient_residual" in set(found.metric)
    edit_all(folder, labels=None)
    summary, scores, found = attacked(folder, attacks=attacks)
    assert summary.failures == ()
    assert "gradient_residual" not in set(found.metric)  # labels are not made up
    by_title = scores.groupby("title")
    assert set(by_title.get_group("patch_gradient").status) == {"unscored"}
    for name, named in (("grey", ""), ("inverting_gradients", "labels")):
        assert set(by_title.get_group(name).status) == {"unsupported"}
        assert by_title.get_group(name).reason.str.contains(named).all()
    for stored in tensors(run, cell(run, attack="patch_gradient")["run_id"]).values():
        assert {"images"} <= set(stored) <= {"images", "named_mask"}
    assert not found.value[found.status == "unscored"].notna().any()


def test_mjp_uploads_keep_mask_order_and_localization(tmp_path: Path) -> None:
    changes = {"model": {**MJP, "dal": "pca"}, "gamma": 0.5, "client": {"batch": 3, "dal": True}}
    uploads = run(tmp_path, **changes) / "uploads"
    assert load_uploads(uploads)[0].model().dal_kind == "pca"
    _, scores, found = attacked(uploads, attacks=[SPAN, {"name": "mask_locator"}])
    assert set(found[found.metric == "mask_recall"].value) == {1.0}
    assert set(found.setting) == {"c"}
    assert scores[scores.title == "masked_span"].value.notna().all()


def test_groups_are_rounds_and_series(folder: Path) -> None:
    (group,) = group_uploads(load_uploads(folder))
    assert group.name == "small"
    assert [len(series.uploads) for series in group.series] == [2, 2]
    assert [u.header.round for u in group.series[0].uploads] == [1, 2]
    assert len(group_uploads(load_uploads(folder), limit=1)[0].records) == 1
    # A series with a gap is a line of its own: its second upload has other weights.
    (folder / f"{OTHER.replace('at00001', 'at00002')}.json").unlink()
    groups = group_uploads(load_uploads(folder))
    assert sorted(len(group.series[0].uploads) for group in groups) == [1, 2]


def test_probes_are_set_aside_and_have_the_clients_own_steps_unless_they_say(
    tmp_path: Path,
) -> None:
    """What the server averages does not depend on what is recorded."""
    client = {"batch": 3, "steps": 2, "upload": "weight_difference", "lr": 0.05}
    record = {"rounds": [1], "images": 2, "probes": [{}, {"steps": 1}]}
    outs = [run(tmp_path, str(i), client=client, record=r) for i, r in enumerate((record, {}))]
    one, other = (load_file(out / "model.safetensors") for out in outs)
    assert all(one[name].equal(other[name]) for name in one)
    uploads = load_uploads(outs[0] / "uploads")
    assert sorted({(u.header.steps, u.name[:4]) for u in uploads}) == [(1, "b1s1"), (2, "b1s2")]


def test_the_command_line_attacks_recorded_uploads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config of attacks alone needs them, and a run does not stand among them."""
    config, out = tmp_path / "attacks.yaml", tmp_path / "run"
    config.write_text(json.dumps(ATTACKS))
    words = ["attack", str(config), "--out", str(out), "--device", "cpu", "--limit", "1"]
    assert main(words) == 2
    assert "--uploads" in capsys.readouterr().err
    assert main([*words, "--uploads", str(folder), "--engine", "here"]) == 0
    assert "1 image in 5 cells" in capsys.readouterr().out
    for among in (folder, folder / "run"):
        with pytest.raises(UserError, match="--uploads"):
            attack_uploads(load_experiment(ATTACKS | ONE), folder, among, into=True)
        assert not (folder / "experiment.yaml").exists()


def test_a_header_written_by_hand_is_enough(folder: Path) -> None:
    """The one that the documentation shows, on another model's upload."""
    text = Path("mjp_privacy/federation/README.md").read_text()
    shown = json.loads(text.split("```json\n")[1].split("```")[0])
    held = json.loads((folder / f"{NAME}.json").read_text())
    others = [path for path in folder.glob("*.safetensors") if path.stem != NAME]
    for path in [*folder.glob("*.json"), *folder.glob("truth/*"), *others]:
        path.unlink()
    own = {"weights": held["weights"], "mean": held["mean"], "std": held["std"], "model": {}}
    (folder / f"{NAME}.json").write_text(json.dumps(shown | own))
    assert "no private images" in check_uploads(folder)[0]
    _, scores, _ = attacked(folder, **ONE)
    assert list(scores.status) == ["unscored"]
    assert load_uploads(folder)[0].header.client == "3"


def test_a_mended_truth_or_header_is_attacked_anew(folder: Path) -> None:
    path = folder / "truth" / f"{NAME}.safetensors"
    right = path.read_bytes()
    change_truth(folder, lambda held: held | {"images": held["images"].flip(-1).contiguous()})
    assert attacked(folder, **ONE)[1].value.min() < 40
    path.write_bytes(right)
    assert attacked(folder, **ONE)[1].value.min() > 60
    before = cells(folder.parent / "run")
    edit_all(folder, lr=0.5)
    attacked(folder, **ONE)
    assert cells(folder.parent / "run") != before


def test_an_optimiser_that_nobody_knows_here_is_a_row_as_check_says(folder: Path) -> None:
    edit_all(folder, kind="weight_difference", lr=0.1, optimizer="lion")
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 0
    assert set(scores.status) == {"unsupported"}
    assert scores.reason.str.contains("lion").all()
    assert scores.reason.iloc[0] in check_uploads(folder)[0]


# uploads that differ or contradict each other -----------------------------------------------------


def contradicted(folder: Path) -> None:
    edit(folder, mean=[0.1, 0.1, 0.1])


def same_image(folder: Path) -> None:
    edit_all(folder, series=None)
    held = folder / "truth" / f"{OTHER}.safetensors"
    (folder / "truth" / f"{NAME}.safetensors").write_bytes(held.read_bytes())


def impossible(folder: Path) -> None:
    """The model takes pictures of 32 pixels, so they cannot be cropped from 10."""
    edit_all(folder, series=None)
    edit(folder, model={"resize": 10}, label="impossible")


def without_truth(folder: Path) -> None:
    edit_all(folder, series=None)
    (folder / "truth" / f"{NAME}.safetensors").unlink()


LATER = NAME.replace("at00001", "at00002")


@pytest.mark.parametrize(
    ("spoil", "failed", "named"),
    [
        (contradicted, {NAME, LATER}, "series b1s1_r00001_000: mean"),
        (same_image, {NAME, OTHER}, "same name"),
        (impossible, None, "resize"),  # rows of its images, whose line cannot be opened
        (without_truth, set(), ""),
    ],
)
def test_what_does_not_fit_fails_alone(
    folder: Path, spoil: Callable[[Path], None], failed: set[str] | None, named: str
) -> None:
    spoil(folder)
    text, usable = check_uploads(folder)
    summary, scores, _ = attacked(folder, **ONE)
    assert named in text
    assert usable == (summary.exit_code == 0) == (failed == set())
    rows: pd.DataFrame = scores[scores.status == "failed"]
    assert len(rows) == 1 if failed is None else set(rows.image_id) == failed
    assert rows.reason.str.contains(named.split(": ")[-1]).all()
    left = {contradicted: ["ok"], same_image: ["ok"] * 2, without_truth: ["ok"] * 3 + ["unscored"]}
    others = sorted(scores[scores.status != "failed"].status)
    assert others == left.get(spoil, ["ok"] * 3)


def test_two_precisions_in_one_folder_are_two_lines(folder: Path) -> None:
    edit_all(folder, series=None)
    edit(folder, dtype="float64")
    change_upload(folder, as_float64)
    summary, scores, rows = attacked(folder, **ONE)
    assert summary.exit_code == 0
    assert sorted(scores.dtype) == ["float32", "float32", "float32", "float64"]
    assert {"small, round 1, float32", "small, round 1, float64"} <= set(rows.model)


def test_another_folder_of_the_same_name_replaces_nothing(folder: Path, tmp_path: Path) -> None:
    """Whether its lines have the same names or others; one that was moved is the same folder."""
    out, experiment = tmp_path / "run", load_experiment(ATTACKS | ONE)
    attacked(folder, **ONE)
    before = written(out)
    for name, changes in (("b", {"label": "other"}), ("c", {"labels": None}), ("moved", {})):
        other = copied(folder, tmp_path / name / folder.name)
        if changes:
            edit_all(other, **changes)
            with pytest.raises(UserError, match="small"):
                attack_uploads(experiment, other, out)
        else:
            assert attack_uploads(experiment, other, out).failures == ()
        assert written(out) == before
