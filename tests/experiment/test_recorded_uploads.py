"""Uploads as files: what is written, what is read back, and every way it can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import load_model
from tests.helpers.federations import MJP, config, images, run, task

NAME = "b1s1_r00001_000_at00001"
ATTACKS = {
    "name": "attacks",
    "attacks": [
        {"name": "grey"},
        {"name": "patch_gradient"},
        {"name": "april"},
        {"name": "multi_round", "options": {"uploads": 2, "prior": "stationary"}},
        {"name": "multi_round", "label": "three", "options": {"uploads": 3}},
    ],
}
SPAN = {"name": "masked_span", "options": {"prior": "stationary"}}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain federation's uploads: two images in rounds 1 and 2."""
    return run(tmp_path_factory.mktemp("federation")) / "uploads"


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    for path in recorded.rglob("*"):
        if path.is_file():
            place = tmp_path / "uploads" / path.relative_to(recorded)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    return tmp_path / "uploads"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / f"{NAME}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_all(folder: Path, **changes: Any) -> None:
    for path in folder.glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def attacked(folder: Path, **changes: Any) -> Any:
    """Rows of standard PSNR, and the residual."""
    out = folder.parent / "run"
    summary = attack_uploads(load_experiment(ATTACKS | changes), folder, out, device="cpu")
    store = RunStore(out)
    import pandas as pd

    cells = store.read_cells()
    rows = pd.concat([store.read_rows(cell["run_id"]) for cell in cells])
    titles = {cell["run_id"]: cell["attack"] for cell in cells}
    rows = rows.assign(title=rows["run_id"].map(titles))
    return summary, rows[(rows["metric"] == "psnr") & (rows["variant"] == "standard")], rows


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


# what can be wrong --------------------------------------------------------------------------------


def cut_off(folder: Path) -> None:
    path = folder / f"{NAME}.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def not_a_number(folder: Path) -> None:
    path = folder / f"{NAME}.safetensors"
    tensors = load_file(path)
    tensors["pos_embed"][0, 1, 0] = torch.nan
    save_file(tensors, path)


def all_zero(folder: Path) -> None:
    path = folder / f"{NAME}.safetensors"
    save_file({name: torch.zeros_like(t) for name, t in load_file(path).items()}, path)


def another_shape(folder: Path) -> None:
    path = folder / f"{NAME}.safetensors"
    save_file(load_file(path) | {"pos_embed": torch.ones(1, 5, 40)}, path)


def another_model(folder: Path) -> None:
    path = folder / f"{NAME}.safetensors"
    save_file(load_file(path) | {"fc.weight": torch.ones(2)}, path)


def other_weights(folder: Path) -> None:
    edit(folder, weights_sha256="0" * 64)


FAULTS = [
    (cut_off, "whole safetensors file"),
    (not_a_number, "NaN or infinity"),
    (all_zero, "every number in it is zero"),
    (another_shape, "expected an upload of that model"),
    (another_model, "fc.weight"),
    (other_weights, "is not the file whose weights"),
]


@pytest.mark.parametrize(("spoil", "said"), FAULTS)
def test_a_faulty_upload_fails_alone(
    folder: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(folder)
    text, usable = check_uploads(folder)
    assert said in text
    assert not usable
    edit_all(folder, series=None)  # so that the second round is another line
    summary, scores, _ = attacked(folder, attacks=[{"name": "patch_gradient"}])
    assert any(said in failure for failure in summary.failures)
    assert (scores.status == "failed").sum() == 1
    assert (scores.status == "ok").sum() == 3


HEADERS = [
    ({"mean": [0.5, 0.5]}, "mean"),
    ({"std": [0.0, 1, 1]}, "std above 0"),
    ({"weights": "/etc/passwd"}, "inside the uploads' folder"),
    ({"weights": "../weights.safetensors"}, "inside the uploads' folder"),
    ({"kind": "weight_difference"}, "learning rate"),
    ({"labels": [1, 2]}, "one for each of 1"),
    ({"rond": 3}, "Did you mean round"),
    ({"kind": "weights"}, "kind"),
]


@pytest.mark.parametrize(("changes", "said"), HEADERS)
def test_a_wrong_header_is_named(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit(folder, **changes)
    with pytest.raises(UserError, match=said) as error:
        UploadFolder(folder).entries()
    assert NAME in str(error.value)


def test_half_a_header_is_named(folder: Path) -> None:
    (folder / f"{NAME}.json").write_text('{"label": "x", ')
    with pytest.raises(UserError, match="cannot be read"):
        UploadFolder(folder).entries()


def test_tensors_without_a_header_are_left_out_and_said(folder: Path) -> None:
    (folder / f"{NAME}.json").unlink()
    text, _ = check_uploads(folder)
    assert f"{NAME}.safetensors: no header beside it" in text


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_uploads_is_an_error(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="mjp federate` records such folders"):
        UploadFolder(tmp_path / "none").entries()


def test_wrong_mean_and_std_are_caught(folder: Path) -> None:
    assert "normalised with others" not in check_uploads(folder)[0]
    edit_all(folder, mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])
    text, _ = check_uploads(folder)
    assert "normalised with others" in text
    assert "the weights file says mean" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"momentum": 0.9, "steps": 3}, "momentum 0.9: its pseudo-gradient is approximate"),
        ({"optimizer": "adamw"}, "1 adamw step(s) with momentum 0: its pseudo-gradient is approx"),
        ({"optimizer": "adamw", "steps": 2}, "which holds no gradient; train with plain SGD"),
    ],
)
def test_momentum_and_local_steps_are_said(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    edit_all(folder, kind="weight_difference", lr=0.1, **changes)
    assert said in check_uploads(folder)[0]


def test_one_plain_step_is_exact_and_an_unknown_optimiser_is_named(folder: Path) -> None:
    edit_all(folder, kind="weight_difference", lr=0.1, momentum=0.9)
    assert "approximate" not in check_uploads(folder)[0]
    edit_all(folder, optimizer="lion")
    assert "a weight difference of lion, which holds no gradient" in check_uploads(folder)[0]


def test_names_that_were_not_uploaded_are_said(folder: Path) -> None:
    edit_all(folder, partial=False)
    text, _ = check_uploads(folder)
    assert "parameters were not uploaded" in text


def test_check_names_the_attacks_that_apply(folder: Path) -> None:
    text, usable = check_uploads(folder)
    assert usable
    assert "applies: patch_gradient" in text
    assert "not april: it needs a client whose block 0 has neither norm1 nor residuals" in text


def test_two_uploads_of_one_image_in_one_line_are_an_error(folder: Path) -> None:
    truth = folder / "truth"
    (truth / f"{NAME}.safetensors").write_bytes(
        (truth / NAME.replace("_000_", "_001_")).with_suffix(".safetensors").read_bytes()
    )
    with pytest.raises(UserError, match="an image of the same name"):
        group_uploads(UploadFolder(folder).entries())


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
        metadata = file.metadata()
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


def test_two_precisions_in_one_folder_are_refused(folder: Path) -> None:
    edit(folder, dtype="float64")
    with pytest.raises(UserError, match="expected one precision in a folder"):
        attacked(folder)


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
