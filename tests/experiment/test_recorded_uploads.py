"""Uploads as files: what is written, what is read back, and what a run makes of it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mjp_privacy.cli import main
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.groups import group_uploads
from mjp_privacy.client.recorded.loading import load_recorded
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.check_uploads import check_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import load_model
from mjp_privacy.models.tensor_files import DIGEST_KEY
from tests.helpers.federations import MJP, config, images, run, task
from tests.helpers.uploads import ATTACKS, NAME, attacked, edit, edit_all

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


def test_recorded_uploads_give_the_images_back(folder: Path) -> None:
    summary, scores, rows = attacked(folder)
    assert summary.failures == ()
    assert (scores[scores.title == "patch_gradient"].value > 60).all()
    assert (scores[scores.title == "multi_round"].value > 60).all()
    assert set(scores[scores.title == "three"].status) == {"unsupported"}
    assert "2 are recorded" in scores[scores.title == "three"].reason.iloc[0]
    assert set(scores[scores.title == "april"].status) == {"unsupported"}
    assert set(rows["round"]) == {1}
    residual = rows[(rows.metric == "gradient_residual") & (rows.title == "patch_gradient")]
    assert (residual.value < 1e-3).all()


def test_the_same_command_again_finds_nothing_to_do(folder: Path) -> None:
    _, first, _ = attacked(folder)
    written = {p: p.stat().st_mtime_ns for p in (folder.parent / "run").rglob("*.parquet")}
    _, again, _ = attacked(folder)
    assert first.equals(again)
    assert written == {p: p.stat().st_mtime_ns for p in (folder.parent / "run").rglob("*.parquet")}


def test_without_private_images_rows_are_unscored_and_pictures_are_kept(folder: Path) -> None:
    for path in (folder / "truth").iterdir():
        path.unlink()
    edit_all(folder, labels=None)
    _, scores, rows = attacked(folder)
    assert set(scores[scores.title == "patch_gradient"].status) == {"unscored"}
    assert set(scores[scores.title == "grey"].status) == {"unsupported"}
    made = list((folder.parent / "run" / "reconstructions").rglob("*.safetensors"))
    assert made
    assert not rows.value[rows.status == "unscored"].notna().any()


def test_mjp_uploads_keep_mask_and_order_for_the_scorer(tmp_path: Path) -> None:
    uploads = run(tmp_path, model=MJP, gamma=0.5) / "uploads"
    _, scores, rows = attacked(uploads, attacks=[SPAN, {"name": "mask_locator"}])
    assert set(rows[rows.metric == "mask_recall"].value) == {1.0}
    assert set(rows.setting) == {"c"}
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


def test_probes_are_the_federations_private_images(tmp_path: Path) -> None:
    federation = task(tmp_path)
    uploads = UploadFolder(run(tmp_path) / "uploads").entries()
    ids = {record.image_id for record in federation.train.records}
    for upload in uploads:
        truth = upload.truth()
        assert truth is not None
        assert set(truth.image_ids) <= ids
    assert images(tmp_path / "data").is_dir()
    assert config().record.images == 2


def test_the_command_line_attacks_recorded_uploads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped config; its default prior is not for patches of 8x8, which is a failed line."""
    config = tmp_path / "attacks.yaml"
    config.write_text(json.dumps(ATTACKS))
    argv = [str(config), "--uploads", str(folder), "--out", str(tmp_path / "run")]
    assert main(["attack", *argv, "--device", "cpu"]) == 0
    assert "2 images in 5 cells" in capsys.readouterr().out
    assert main(["attack", *argv, "--gamma", "0.5"]) == 2
    assert "--gamma says nothing of recorded uploads" in capsys.readouterr().err
    assert main(["attack", *argv, "--client.defenses", "int8"]) == 2
    assert "--client says nothing of recorded uploads" in capsys.readouterr().err


def test_a_config_of_attacks_alone_needs_uploads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attack", "configs/uploads.yaml", "--out", str(tmp_path)]) == 2
    assert "--uploads DIR to attack recorded uploads" in capsys.readouterr().err


def test_a_header_written_by_hand_is_enough(folder: Path) -> None:
    """The one that the documentation shows, on another model's upload."""
    text = (
        Path("mjp_privacy/federation/README.md").read_text().split("```json\n")[1].split("```")[0]
    )
    shown = json.loads(text)
    held = json.loads((folder / f"{NAME}.json").read_text())
    for path in [*folder.glob("*.json"), *folder.glob("truth/*")]:
        path.unlink()
    own = {"weights": held["weights"], "mean": held["mean"], "std": held["std"], "model": {}}
    (folder / f"{NAME}.json").write_text(json.dumps(shown | own))
    assert "no private images" in check_uploads(folder)[0]
    _, scores, _ = attacked(folder, attacks=[{"name": "patch_gradient"}])
    assert list(scores.status) == ["unscored"]
    assert UploadFolder(folder).entries()[0].header.client == "3"
    (folder / held["weights"]).unlink()
    upload = UploadFolder(folder).entries()[0]
    with pytest.raises(UserError, match="weights: expected a file beside the uploads"):
        load_recorded(upload)


def psnr_of_gradient(folder: Path) -> list[float]:
    _, scores, _ = attacked(folder, attacks=[{"name": "patch_gradient"}])
    return list(scores.value)


def test_a_mended_truth_or_header_is_attacked_anew(folder: Path) -> None:
    path = folder / "truth" / f"{NAME}.safetensors"
    right = path.read_bytes()
    with safe_open(path, "pt") as file:
        metadata = {k: v for k, v in file.metadata().items() if k != DIGEST_KEY}
    tensors = load_file(path)
    save_file({**tensors, "images": tensors["images"].flip(-1).contiguous()}, path, metadata)
    assert min(psnr_of_gradient(folder)) < 40
    path.write_bytes(right)
    assert min(psnr_of_gradient(folder)) > 60
    cells = RunStore(folder.parent / "run").read_cells()
    edit_all(folder, lr=0.5)
    psnr_of_gradient(folder)
    assert RunStore(folder.parent / "run").read_cells() != cells


def test_truth_that_comes_later_is_scored(folder: Path) -> None:
    truth = folder / "truth"
    truth.rename(folder.parent / "kept")
    edit_all(folder, labels=None)
    attacked(folder, attacks=[{"name": "patch_gradient"}])
    (folder.parent / "kept").rename(truth)
    assert min(psnr_of_gradient(folder)) > 60


def test_labels_that_nobody_knows_are_not_made_up(folder: Path) -> None:
    edit_all(folder, labels=None)
    summary, scores, rows = attacked(
        folder, attacks=[{"name": "patch_gradient"}, {"name": "inverting_gradients"}]
    )
    assert summary.failures == ()
    assert "gradient_residual" not in set(rows.metric)
    matched = scores[scores.title == "inverting_gradients"]
    assert set(matched.status) == {"unsupported"}
    assert matched.reason.str.contains("needs the labels").all()


def test_images_that_cannot_be_prepared_fail_their_line_alone(folder: Path) -> None:
    """The model takes pictures of 16 pixels, so they cannot be cropped from 10."""
    edit_all(folder, series=None)
    edit(folder, model={"resize": 10}, label="impossible")
    summary, scores, _ = attacked(folder, attacks=[{"name": "patch_gradient"}])
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
    assert load_recorded(upload).dal_kind == "pca"


def test_a_probe_has_the_clients_own_steps_unless_it_says(tmp_path: Path) -> None:
    client = {"batch": 3, "steps": 2, "upload": "weight_difference", "lr": 0.05}
    record = {"rounds": [1], "images": 2, "probes": [{}, {"steps": 1}]}
    uploads = UploadFolder(run(tmp_path, client=client, record=record) / "uploads").entries()
    assert sorted({(u.header.steps, u.name[:4]) for u in uploads}) == [(1, "b1s1"), (2, "b1s2")]


def test_an_optimiser_that_nobody_knows_here_is_a_row_as_check_says(folder: Path) -> None:
    edit_all(folder, kind="weight_difference", lr=0.1, optimizer="lion")
    summary, scores, _ = attacked(folder, attacks=[{"name": "patch_gradient"}])
    assert summary.exit_code == 0
    assert set(scores.status) == {"unsupported"}
    assert scores.reason.str.contains("a weight difference of lion, which holds no gradient").all()
