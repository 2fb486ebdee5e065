"""Uploads as files: what is written, what is read back, and what a run makes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
from mjp_privacy.uploads.folder import UploadFolder, group_uploads
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
)

SPAN = {"name": "masked_span", "options": {"prior": "stationary"}}


def test_what_is_written_is_the_clients_gradient(recorded: Path) -> None:
    upload = next(u for u in UploadFolder(recorded).entries() if u.name == NAME)
    truth = upload.truth()
    assert truth is not None
    model = load_model(checkpoint=upload.weights_path)
    labels = torch.tensor(upload.header.labels)
    given = FedSGDClient(model).gradients(ClientInput(truth.images, labels, truth.image_ids))
    held = upload.tensors()
    assert set(held) == {"pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"}
    for name, tensor in held.items():
        assert torch.allclose(tensor, given[name][0], atol=1e-6), name
    assert upload.header.round == 1
    assert upload.header.partial
    assert upload.header.series == "b1s1_r00001_000"
    assert upload.header.mean == pytest.approx((0.4, 0.5, 0.6))


GRADIENT = {"attacks": [{"name": "patch_gradient"}]}


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
    edit_all(folder, labels=None)
    run = folder.parent / "run"
    _, scores, found = attacked(folder)
    assert set(scores[scores.title == "patch_gradient"].status) == {"unscored"}
    assert set(scores[scores.title == "grey"].status) == {"unsupported"}
    for stored in tensors(run, cell(run, attack="patch_gradient")["run_id"]).values():
        assert {"images"} <= set(stored) <= {"images", "named_mask"}
    assert not found.value[found.status == "unscored"].notna().any()


def test_the_residual_is_computed_where_nothing_is_scored(folder: Path) -> None:
    _, _, found = attacked(folder, **GRADIENT)
    assert "gradient_residual" not in set(found.metric)
    shutil.rmtree(folder / "truth")  # the labels are in the headers
    _, _, found = attacked(folder, **GRADIENT)
    assert (found[found.metric == "gradient_residual"].value < 1e-3).all()
    assert "gradient_residual" in set(found.metric)


def test_mjp_uploads_keep_mask_and_order_for_the_scorer(tmp_path: Path) -> None:
    uploads = run(tmp_path, model=MJP, gamma=0.5) / "uploads"
    _, scores, found = attacked(uploads, attacks=[SPAN, {"name": "mask_locator"}])
    assert set(found[found.metric == "mask_recall"].value) == {1.0}
    assert set(found.setting) == {"c"}
    assert scores[scores.title == "masked_span"].value.notna().all()


def test_groups_are_rounds_and_series(recorded: Path) -> None:
    (group,) = group_uploads(UploadFolder(recorded).entries())
    assert group.name == "small"
    assert [len(series.uploads) for series in group.series] == [2, 2]
    assert [u.header.round for u in group.series[0].uploads] == [1, 2]
    assert len(group_uploads(UploadFolder(recorded).entries(), limit=1)[0].records) == 1


def test_probes_are_set_aside(tmp_path: Path) -> None:
    """What the server averages does not depend on what is recorded."""
    with_probes, without = run(tmp_path, "with"), run(tmp_path, "without", record={})
    one = load_file(with_probes / "model.safetensors")
    other = load_file(without / "model.safetensors")
    assert all(one[name].equal(other[name]) for name in one)


def test_the_command_line_attacks_recorded_uploads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "attacks.yaml", tmp_path / "run"
    config.write_text(json.dumps(ATTACKS))
    words = ["attack", str(config), "--uploads", str(folder), "--out", str(out)]
    assert main([*words, "--device", "cpu", "--engine", "here", "--limit", "1"]) == 0
    assert "1 image in 5 cells" in capsys.readouterr().out


def test_a_config_of_attacks_alone_needs_uploads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attack", "configs/uploads.yaml", "--out", str(tmp_path)]) == 2
    assert "--uploads" in capsys.readouterr().err


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
    _, scores, _ = attacked(folder, **GRADIENT)
    assert list(scores.status) == ["unscored"]
    assert UploadFolder(folder).entries()[0].header.client == "3"
    (folder / held["weights"]).unlink()
    with pytest.raises(UserError, match="weights"):
        UploadFolder(folder).entries()[0].model()


def psnr_of_gradient(folder: Path) -> list[float]:
    _, scores, _ = attacked(folder, attacks=[{"name": "patch_gradient"}])
    return list(scores.value)


def test_a_mended_truth_or_header_is_attacked_anew(folder: Path) -> None:
    path = folder / "truth" / f"{NAME}.safetensors"
    right = path.read_bytes()
    change_truth(folder, lambda held: held | {"images": held["images"].flip(-1).contiguous()})
    assert min(psnr_of_gradient(folder)) < 40
    path.write_bytes(right)
    assert min(psnr_of_gradient(folder)) > 60
    before = cells(folder.parent / "run")
    edit_all(folder, lr=0.5)
    psnr_of_gradient(folder)
    assert cells(folder.parent / "run") != before


def test_labels_that_nobody_knows_are_not_made_up(folder: Path) -> None:
    edit_all(folder, labels=None)
    attacks = [{"name": "patch_gradient"}, {"name": "inverting_gradients"}]
    summary, scores, found = attacked(folder, attacks=attacks)
    assert summary.failures == ()
    assert "gradient_residual" not in set(found.metric)
    matched = scores[scores.title == "inverting_gradients"]
    assert set(matched.status) == {"unsupported"}
    assert matched.reason.str.contains("labels").all()


def test_images_that_cannot_be_prepared_fail_their_line_alone(folder: Path) -> None:
    """The model takes pictures of 32 pixels, so they cannot be cropped from 10."""
    edit_all(folder, series=None)
    edit(folder, model={"resize": 10}, label="impossible")
    summary, scores, _ = attacked(folder, **GRADIENT)
    assert summary.exit_code == 3
    assert any("resize" in failure for failure in summary.failures)
    assert set(scores.status) == {"failed", "ok"}


def test_a_series_with_a_gap_is_a_line_of_its_own(folder: Path) -> None:
    """Its second upload has other weights than the other series' second one."""
    (folder / "b1s1_r00001_001_at00002.json").unlink()
    groups = group_uploads(UploadFolder(folder).entries())
    assert sorted(len(group.series[0].uploads) for group in groups) == [1, 2]


def test_localization_by_pca_is_known_from_the_recorded_weights(tmp_path: Path) -> None:
    changes = {"model": {**MJP, "dal": "pca"}, "gamma": 0.5, "client": {"batch": 3, "dal": True}}
    upload = UploadFolder(run(tmp_path, **changes) / "uploads").entries()[0]
    assert upload.model().dal_kind == "pca"


def test_a_probe_has_the_clients_own_steps_unless_it_says(tmp_path: Path) -> None:
    client = {"batch": 3, "steps": 2, "upload": "weight_difference", "lr": 0.05}
    record = {"rounds": [1], "images": 2, "probes": [{}, {"steps": 1}]}
    uploads = UploadFolder(run(tmp_path, client=client, record=record) / "uploads").entries()
    assert sorted({(u.header.steps, u.name[:4]) for u in uploads}) == [(1, "b1s1"), (2, "b1s2")]


def test_an_optimiser_that_nobody_knows_here_is_a_row_as_check_says(folder: Path) -> None:
    edit_all(folder, kind="weight_difference", lr=0.1, optimizer="lion")
    summary, scores, _ = attacked(folder, **GRADIENT)
    assert summary.exit_code == 0
    assert set(scores.status) == {"unsupported"}
    assert scores.reason.str.contains("lion").all()
    assert scores.reason.iloc[0] in check_uploads(folder)[0]


# uploads that differ or contradict each other -----------------------------------------------------


OTHER = NAME.replace("_000_", "_001_")


def test_headers_of_a_series_that_contradict_each_other_fail_that_series(folder: Path) -> None:
    edit(folder, mean=[0.1, 0.1, 0.1])
    text, usable = check_uploads(folder)
    assert not usable
    assert "series b1s1_r00001_000: mean" in text
    _, scores, _ = attacked(folder, **ONE)
    failed = scores[scores.status == "failed"]
    assert sorted(failed.image_id) == [NAME, NAME.replace("at00001", "at00002")]
    assert (scores.status == "ok").sum() == 1


def same_image(folder: Path) -> None:
    held = folder / "truth" / f"{OTHER}.safetensors"
    (folder / "truth" / f"{NAME}.safetensors").write_bytes(held.read_bytes())


def test_two_uploads_of_one_image_in_one_line_fail_alone(folder: Path) -> None:
    edit_all(folder, series=None)
    same_image(folder)
    _, scores, _ = attacked(folder, **ONE)
    failed = scores[scores.status == "failed"]
    assert sorted(failed.image_id) == [NAME, OTHER]
    assert failed.reason.str.contains("same name").all()
    assert (scores.status == "ok").sum() == 2


def test_a_batch_that_fits_into_no_block_fails_alone(folder: Path) -> None:
    shutil.rmtree(folder / "truth")
    edit_all(folder, series=None, labels=None, batch=9)
    edit(folder, batch=9973)
    edit(folder, OTHER, batch=9967)
    lines = check_uploads(folder)[0].splitlines()
    (line,) = [line for line in lines if "batch: expected" in line]
    assert "9967" in line or "9973" in line


def test_two_precisions_in_one_folder_are_two_lines(folder: Path) -> None:
    edit_all(folder, series=None)
    edit(folder, dtype="float64")
    change_upload(folder, as_float64)
    summary, scores, rows = attacked(folder, **ONE)
    assert summary.exit_code == 0
    assert sorted(scores.dtype) == ["float32", "float32", "float32", "float64"]
    assert {"small, round 1, float32", "small, round 1, float64"} <= set(rows.model)


def test_an_upload_without_truth_leaves_its_neighbours_their_scores(folder: Path) -> None:
    edit_all(folder, series=None)
    (folder / "truth" / f"{NAME}.safetensors").unlink()
    _, scores, _ = attacked(folder, **ONE)
    assert sorted(scores.status) == ["ok", "ok", "ok", "unscored"]


def test_another_folder_of_the_same_name_replaces_nothing(folder: Path, tmp_path: Path) -> None:
    """Whether its lines have the same names or others; one that was moved is the same folder."""
    out, experiment = tmp_path / "run", load_experiment(ATTACKS | GRADIENT)
    attacked(folder, **GRADIENT)
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


def test_a_run_does_not_stand_among_its_uploads(folder: Path) -> None:
    for out in (folder, folder / "run"):
        with pytest.raises(UserError, match="--uploads"):
            attack_uploads(load_experiment(ATTACKS | GRADIENT), folder, out, into=True)
        assert not (folder / "experiment.yaml").exists()
