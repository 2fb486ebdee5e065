"""Uploads that cannot be attacked: each is a row with its reason, and its neighbours are done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.cli import main
from mjp_privacy.client.recorded.examined import examine
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.groups import REFUSED
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.check_uploads import check_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.loading import load_runs
from tests.helpers.uploads import (
    ATTACKS,
    NAME,
    ONE,
    as_float64,
    attacked,
    change_upload,
    edit,
    edit_all,
)

Spoil = Callable[[Path], None]
OTHER = NAME.replace("_000_", "_001_")


def cut_off(folder: Path) -> None:
    path = folder / f"{NAME}.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def not_a_number(folder: Path) -> None:
    change_upload(folder, lambda sent: sent | {"pos_embed": sent["pos_embed"] * torch.nan})


def all_zero(folder: Path) -> None:
    change_upload(folder, lambda sent: {name: torch.zeros_like(t) for name, t in sent.items()})


def another_shape(folder: Path) -> None:
    change_upload(folder, lambda sent: sent | {"pos_embed": torch.ones(1, 5, 40)})


def another_model(folder: Path) -> None:
    change_upload(folder, lambda sent: sent | {"fc.weight": torch.ones(2)})


def other_weights(folder: Path) -> None:
    edit(folder, weights_sha256="0" * 64)


def of_type(dtype: torch.dtype) -> Spoil:
    """The upload's table in another type."""

    def spoil(folder: Path) -> None:
        change_upload(folder, lambda sent: sent | {"pos_embed": sent["pos_embed"].to(dtype)})

    return spoil


def in_double(folder: Path) -> None:
    change_upload(folder, as_float64)


def no_tensors(folder: Path) -> None:
    change_upload(folder, lambda sent: {})


def pipe(folder: Path) -> None:
    (folder / f"{NAME}.safetensors").unlink()
    os.mkfifo(folder / f"{NAME}.safetensors")


def header(**changes: Any) -> Spoil:
    return lambda folder: edit(folder, **changes)


def endless_header(folder: Path) -> None:
    (folder / f"{NAME}.json").unlink()
    (folder / f"{NAME}.json").symlink_to("/dev/zero")


def half_a_header(folder: Path) -> None:
    (folder / f"{NAME}.json").write_text('{"label": "x", ')


def link_out_of_the_folder(folder: Path) -> None:
    own = next((folder / "weights").iterdir())
    (folder.parent / "secret.safetensors").write_bytes(own.read_bytes())
    (folder / "weights" / "link.safetensors").symlink_to(folder.parent / "secret.safetensors")
    edit(folder, weights="weights/link.safetensors", weights_sha256=None)


FAULTS: list[tuple[Spoil, str]] = [
    (cut_off, "whole safetensors file"),
    (not_a_number, "NaN or infinity"),
    (all_zero, "every number in it is zero"),
    (another_shape, "expected an upload of that model"),
    (another_model, "fc.weight"),
    (other_weights, "is not the file whose weights"),
    (of_type(torch.float16), "a mixture of F16, F32"),
    (of_type(torch.int8), "entries of type I8 where F64, F32, F16, BF16 are read"),
    (of_type(torch.float8_e4m3fn), "entries of type F8_E4M3 where"),
    (in_double, "F64, and the header's dtype is float32, which is sent as F32 or F16 or BF16"),
    (no_tensors, "no tensors"),
    (pipe, "a named pipe"),
    (endless_header, f"{NAME}.json: expected the JSON header of an upload"),
    (half_a_header, "cannot be read"),
    (link_out_of_the_folder, "a link that leads out of the uploads' folder"),
    (header(weights="weights"), "weights: expected a file beside the uploads"),
    (header(weights="weights/none.safetensors"), "no file of this name"),
    (header(labels=[99]), "labels: expected classes of the model, 0 to 2; got 99."),
    (
        header(noise={"no.such": 0.1}),
        "noise: expected names of the model's parameters; got 'no.such'",
    ),
    (header(noise={"pos_embed": -1.0}), "noise.pos_embed: Input should be greater than or equal"),
    (header(rounding={"no.such": 0.1}), "rounding: expected names"),
    (header(model={"img_size": 64}), "pos_embed"),
    (header(model={"embed_dim": 16_384, "depth": 500}), "parameters"),
    (header(model={"mlp_ratio": -1}), "model.mlp_ratio: Input should be greater than 0"),
    (header(model={"model": 5}), "model.model: Input should be a valid string"),
    (header(model={"checkpoint": "x"}), "model.checkpoint: unknown field"),
    (header(recipe={"batchh": 1}), "batchh: unknown field. Did you mean batch?"),
    (header(recipe={"defenses": ["int9"]}), "int9"),
    (header(steps=3), "recipe.steps: expected upload: weight_difference"),
    (header(batch=9973, labels=None), "images: expected an upload's private images"),
]


@pytest.mark.parametrize(("spoil", "said"), FAULTS)
def test_a_fault_is_named(folder: Path, spoil: Spoil, said: str) -> None:
    edit_all(folder, series=None)
    spoil(folder)
    examined = examine(UploadFolder(folder))
    assert said in examined.reasons[NAME]
    assert len(examined.sound) == 3
    assert len(examined.refused) == 1


IN_FULL = [FAULTS[place] for place in (0, 1, 2, 3, 4, 5, 12, 14, 15)]


@pytest.mark.parametrize(("spoil", "said"), IN_FULL)
def test_a_faulty_upload_fails_alone(folder: Path, spoil: Spoil, said: str) -> None:
    edit_all(folder, series=None)  # so that the second round is another line
    spoil(folder)
    text, usable = check_uploads(folder)
    assert said in text
    assert not usable
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 3
    assert any(said in failure for failure in summary.failures)
    (failed,) = scores[scores.status == "failed"].itertuples()
    assert (failed.image_id, failed.model) == (NAME, REFUSED)
    assert said in failed.reason
    assert str(folder) not in failed.reason
    assert f"FAULT  {NAME}: {failed.reason.split('; ')[0]}" in text
    assert (scores.status == "ok").sum() == 3


def test_every_fault_of_an_upload_is_listed(folder: Path) -> None:
    edit(folder, labels=[99], noise={"no.such": 0.1})
    not_a_number(folder)
    truth = folder / "truth" / f"{NAME}.safetensors"
    truth.unlink()
    truth.symlink_to("/dev/zero")
    lines = [line for line in check_uploads(folder)[0].splitlines() if f"FAULT  {NAME}" in line]
    for said in ("labels: expected", "noise: expected", "NaN or infinity", "a device"):
        assert sum(said in line for line in lines) == 1, said


HEADERS = [
    ({"mean": [0.5, 0.5]}, "mean"),
    ({"std": [0.0, 1, 1]}, "std.0: Input should be greater than 0"),
    ({"weights": "/etc/passwd"}, "inside the uploads' folder"),
    ({"weights": "../weights.safetensors"}, "inside the uploads' folder"),
    ({"weights": "C:\\weights.safetensors"}, "inside the uploads' folder"),
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
    half_a_header(folder)
    with pytest.raises(UserError, match="cannot be read"):
        UploadFolder(folder).entries()


def test_without_a_sound_upload_nothing_is_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_all(folder, gamma=2)
    config = tmp_path / "attacks.yaml"
    config.write_text(json.dumps(ATTACKS | ONE))
    run = [str(config), "--uploads", str(folder), "--out", str(tmp_path / "run")]
    assert main(["attack", *run, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "expected at least one sound upload, got 4 that cannot be attacked" in said
    assert f"  {NAME}: {NAME}.json: expected the JSON header" in said
    assert "gamma: Input should be less than or equal to 1; got 2." in said
    assert not (tmp_path / "run").exists()


def test_a_report_counts_refused_uploads_and_draws_no_line_of_them(folder: Path) -> None:
    edit_all(folder, series=None)
    edit(folder, gamma=2)
    attacked(folder, **ONE)
    loaded = load_runs([folder.parent / "run"])
    assert REFUSED not in {line.cell.model.label for line in loaded.lines}
    (remark,) = loaded.remarks
    assert "REFUSED: run: 1 upload(s) could not be attacked and are in no figure" in remark


def test_what_is_mended_leaves_no_row_behind(folder: Path) -> None:
    edit_all(folder, series=None)
    edit(folder, gamma=2)
    edit(folder, OTHER, gamma=2)
    _, scores, _ = attacked(folder, **ONE)
    assert sorted(scores[scores.status == "failed"].image_id) == [NAME, OTHER]
    edit(folder, gamma=0)
    _, scores, _ = attacked(folder, **ONE)
    assert list(scores[scores.status == "failed"].image_id) == [OTHER]
    edit(folder, OTHER, gamma=0)
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 0
    assert set(scores.status) == {"ok"}
    assert REFUSED not in {cell["model"] for cell in RunStore(folder.parent / "run").read_cells()}


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"x"), os.unlink])
def test_weights_that_cannot_be_read_fail_their_uploads_alone(folder: Path, spoil: Any) -> None:
    edit_all(folder, series=None)
    spoil(folder / json.loads((folder / f"{NAME}.json").read_text())["weights"])
    text, usable = check_uploads(folder)
    assert not usable
    _, scores, _ = attacked(folder, **ONE)
    assert sorted(scores[scores.status == "failed"].image_id) == [NAME, OTHER]
    assert (scores.status == "ok").sum() == 2
    for name in (NAME, OTHER):
        assert f"FAULT  {name}: " in text


def test_a_name_of_no_text_is_refused_and_shown(folder: Path) -> None:
    odd = os.fsencode(folder) + b"/a\xff\x1b.json"
    Path(os.fsdecode(odd)).write_bytes((folder / f"{NAME}.json").read_bytes())
    text, usable = check_uploads(folder)
    assert not usable
    assert "FAULT  a\\udcff\\x1b: a\\udcff\\x1b.json: expected the JSON header" in text
    _, scores, _ = attacked(folder, **ONE)
    assert list(scores[scores.status == "failed"].image_id) == ["a\\udcff\\x1b"]


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


def test_the_folder_of_a_federation_is_known(recorded: Path) -> None:
    with pytest.raises(UserError, match=r"got a federation's\. Its uploads are in .*uploads: give"):
        check_uploads(recorded.parent)
