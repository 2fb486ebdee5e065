"""Uploads that cannot be attacked: each is a row with its reason, and its neighbours are done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.uploads.faults import examine
from mjp_privacy.uploads.folder import REFUSED, UploadFolder
from tests.helpers.uploads import (
    ATTACKS,
    NAME,
    ONE,
    as_float64,
    attacked,
    change_truth,
    change_upload,
    check_uploads,
    edit,
    edit_all,
)

Spoil = Callable[[Path], None]


OTHER = NAME.replace("_000_", "_001_")


def sent(altered: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Spoil:
    """The upload's tensors, altered."""
    return lambda folder: change_upload(folder, altered)


def table(made: Callable[[Tensor], Tensor]) -> Spoil:
    """The gradient of its position table, altered."""
    return sent(lambda held: held | {"pos_embed": made(held["pos_embed"])})


def cut_off(folder: Path) -> None:
    path = folder / f"{NAME}.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pipe(folder: Path) -> None:
    (folder / f"{NAME}.safetensors").unlink()
    os.mkfifo(folder / f"{NAME}.safetensors")


def header(**changes: Any) -> Spoil:
    return lambda folder: edit(folder, **changes)


def other_weights(folder: Path) -> None:
    edit(folder, weights_sha256="0" * 64)


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


def same_weights_of_another_round(folder: Path) -> None:
    held = json.loads((folder / f"{NAME}.json").read_text())
    names = sorted(f"weights/{path.name}" for path in (folder / "weights").iterdir())
    (other,) = [name for name in names if name != held["weights"]]
    edit(folder, weights=other)


def truth_file(path: str) -> Spoil:
    """The file of private images in place of something else."""

    def spoil(folder: Path) -> None:
        place = folder / "truth" / f"{NAME}.safetensors"
        place.unlink()
        place.symlink_to(path)

    return spoil


def truth(**tensors: Tensor) -> Spoil:
    return lambda folder: change_truth(folder, lambda held: held | tensors)


def no_ids(folder: Path) -> None:
    path = folder / "truth" / f"{NAME}.safetensors"
    path.write_bytes(path.read_bytes().replace(b"image_ids", b"image_idx"))


ORDER, NONE = torch.arange(16).unsqueeze(0), torch.zeros(1, 16, dtype=torch.bool)


FAULTS: list[tuple[Spoil, str]] = [
    (cut_off, "safetensors"),
    (table(lambda held: held * torch.nan), "NaN"),
    (sent(lambda held: {name: torch.zeros_like(t) for name, t in held.items()}), "zero"),
    (table(lambda held: torch.ones(1, 5, 40)), "pos_embed"),
    (sent(lambda held: held | {"fc.weight": torch.ones(2)}), "fc.weight"),
    (other_weights, "weights"),
    (same_weights_of_another_round, "weights/"),
    (table(torch.Tensor.half), "F16, F32"),
    (table(torch.Tensor.char), "I8"),
    (table(lambda held: held.to(torch.float8_e4m3fn)), "F8_E4M3"),
    (sent(as_float64), "F64"),
    (sent(lambda held: {}), "no tensors"),
    (pipe, "pipe"),
    (endless_header, f"{NAME}.json"),
    (half_a_header, f"{NAME}.json"),
    (link_out_of_the_folder, "link"),
    (header(weights="weights"), "weights"),
    (header(weights="weights/none.safetensors"), "none.safetensors"),
    (header(labels=[99]), "labels"),
    (header(noise={"no.such": 0.1}), "no.such"),
    (header(noise={"pos_embed": -1.0}), "noise.pos_embed"),
    (header(rounding={"no.such": 0.1}), "no.such"),
    (header(model={"img_size": 64}), "pos_embed"),
    (header(model={"embed_dim": 16_384, "depth": 500}), "parameters"),
    (header(model={"mlp_ratio": -1}), "model.mlp_ratio"),
    (header(model={"checkpoint": "x"}), "model.checkpoint"),
    (header(recipe={"batchh": 1}), "batchh"),
    (header(recipe={"defenses": ["int9"]}), "int9"),
    (header(steps=3), "recipe.steps"),
    (header(batch=9973, labels=None), "images"),
    (truth(images=torch.rand(1, 3, 64, 64)), "images"),
    (truth(images=torch.rand(2, 3, 32, 32)), "(2, 3, 32, 32)"),
    (truth(images=torch.full((1, 3, 32, 32), torch.nan)), "NaN"),
    (truth(images=2 * torch.ones(1, 3, 32, 32)), "2"),
    (truth(images=torch.ones(1, 3, 32, 32, dtype=torch.uint8)), "U8"),
    (truth(masks=NONE), "masks"),
    (truth(mask=NONE), "permutation"),
    (truth(mask=NONE.float(), permutation=ORDER), "mask"),
    (truth(mask=NONE[:, :9], permutation=ORDER), "(1, 9)"),
    (truth(mask=7 * NONE.int() + 2, permutation=ORDER), "mask"),
    (truth(mask=NONE, permutation=ORDER + 1), "15"),
    (truth(mask=NONE, permutation=ORDER.flip(-1).contiguous()), "mask"),
    (no_ids, "ids"),
    (truth_file("/dev/zero"), "device"),
    (truth_file("/"), "folder"),
]


@pytest.mark.parametrize(("spoil", "named"), FAULTS)
def test_a_fault_is_named(folder: Path, spoil: Spoil, named: str) -> None:
    edit_all(folder, series=None)
    spoil(folder)
    examined = examine(UploadFolder(folder))
    assert named in examined.reasons[NAME]
    assert len(examined.sound) == 3
    assert len(examined.refused) == 1


IN_FULL = [f for f in FAULTS if f[0] in (cut_off, other_weights, endless_header)]


@pytest.mark.parametrize(("spoil", "named"), [*IN_FULL, FAULTS[-1]])
def test_a_faulty_upload_fails_alone(folder: Path, spoil: Spoil, named: str) -> None:
    """`check` and a run say the same; neither is it scored against something else."""
    edit_all(folder, series=None)  # so that the second round is another line
    spoil(folder)
    text, usable = check_uploads(folder)
    assert not usable
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 3
    assert any(named in failure for failure in summary.failures)
    (failed,) = scores[scores.status == "failed"].itertuples()
    assert (failed.image_id, failed.model) == (NAME, REFUSED)
    assert named in failed.reason
    assert str(folder) not in failed.reason
    assert f"FAULT  {NAME}: {failed.reason.split('; ')[0]}" in text
    assert (scores.status == "ok").sum() == 3


def test_every_fault_of_an_upload_is_listed(folder: Path) -> None:
    edit(folder, labels=[99], noise={"no.such": 0.1})
    table(lambda held: held * torch.nan)(folder)
    truth_file("/dev/zero")(folder)
    lines = [line for line in check_uploads(folder)[0].splitlines() if f"FAULT  {NAME}" in line]
    for named in ("labels: ", "noise: ", "NaN", "device"):
        assert sum(named in line for line in lines) == 1, named


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


@pytest.mark.parametrize(("changes", "named"), HEADERS)
def test_a_wrong_header_is_named(folder: Path, changes: dict[str, Any], named: str) -> None:
    edit(folder, **changes)
    with pytest.raises(UserError, match=named) as error:
        UploadFolder(folder).entries()
    assert NAME in str(error.value)


def test_without_a_sound_upload_nothing_is_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_all(folder, gamma=2)
    config = tmp_path / "attacks.yaml"
    config.write_text(json.dumps(ATTACKS | ONE))
    words = ["attack", str(config), "--uploads", str(folder), "--out", str(tmp_path / "run")]
    assert main([*words, "--device", "cpu"]) == 2
    printed = capsys.readouterr().err
    assert NAME in printed
    assert "gamma" in printed
    assert not (tmp_path / "run").exists()


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
    assert "FAULT  a\\udcff\\x1b: " in text
    _, scores, _ = attacked(folder, **ONE)
    assert list(scores[scores.status == "failed"].image_id) == ["a\\udcff\\x1b"]


def test_tensors_without_a_header_are_a_refused_upload(folder: Path) -> None:
    edit_all(folder, series=None)
    attacked(folder, **ONE)
    (folder / f"{NAME}.json").unlink()
    text, usable = check_uploads(folder)
    assert not usable
    assert f"FAULT  {NAME}: " in text
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 3
    assert list(scores[scores.status == "failed"].image_id) == [NAME]


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_uploads_is_an_error(recorded: Path, tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="none"):
        UploadFolder(tmp_path / "none").entries()
    with pytest.raises(UserError, match="uploads"):  # a federation's folder is known
        check_uploads(recorded.parent)
