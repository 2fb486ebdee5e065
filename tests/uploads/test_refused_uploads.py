"""Uploads that cannot be attacked: each is a row with its reason, and its neighbours are done."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.uploads.folder import REFUSED, examine
from tests.helpers.families import checkpoint
from tests.helpers.uploads import (
    NAME,
    ONE,
    as_float64,
    attacked,
    change_truth,
    change_upload,
    check_uploads,
    edit,
    edit_all,
    flip,
)

Spoil = Callable[[Path], Any]
OTHER = NAME.replace("_000_", "_001_")
FILE, HEADER, TRUTH = f"{NAME}.safetensors", f"{NAME}.json", f"truth/{NAME}.safetensors"


def sent(altered: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Spoil:
    """The upload's tensors, altered."""
    return lambda folder: change_upload(folder, altered)


def table(made: Callable[[Tensor], Tensor]) -> Spoil:
    """The gradient of its position table, altered."""
    return sent(lambda held: held | {"pos_embed": made(held["pos_embed"])})


def truth(**tensors: Tensor) -> Spoil:
    return lambda folder: change_truth(folder, lambda held: held | tensors)


def header(**changes: Any) -> Spoil:
    return lambda folder: edit(folder, **changes)


def replaced(name: str, make: Callable[[Path], object]) -> Spoil:
    """Another thing in the place of one of its files."""

    def replace(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return replace


def cut_off(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100])


def without_ids(folder: Path) -> None:
    content = (folder / TRUTH).read_bytes()
    (folder / TRUTH).write_bytes(content.replace(b"image_ids", b"image_idx"))


def link_out_of_the_folder(folder: Path) -> None:
    own = next((folder / "weights").iterdir())
    (folder.parent / "secret.safetensors").write_bytes(own.read_bytes())
    (folder / "weights" / "link.safetensors").symlink_to(folder.parent / "secret.safetensors")
    edit(folder, weights="weights/link.safetensors", weights_sha256=None)


def weights_of_another_round(folder: Path) -> None:
    held = json.loads((folder / HEADER).read_text())
    names = {f"weights/{path.name}" for path in (folder / "weights").iterdir()}
    edit(folder, weights=(names - {held["weights"]}).pop())


def weights_of_a_swin(folder: Path) -> None:
    """Uploads of other networks than plain ViTs are only simulated."""
    made = checkpoint(folder.parent / "swin", "swin")
    (folder / "weights" / made.name).write_bytes(made.read_bytes())
    edit(folder, weights=f"weights/{made.name}", weights_sha256=None)


ORDER, NONE = torch.arange(16).unsqueeze(0), torch.zeros(1, 16, dtype=torch.bool)
DEVICE = replaced(TRUTH, lambda path: path.symlink_to("/dev/zero"))
# single fields of a header: SCHEMAS in tests/experiment/test_config.py
FAULTS: list[tuple[Spoil, str]] = [
    (cut_off, "safetensors"),
    (header(weights_sha256="0" * 64), "weights"),
    (replaced(HEADER, lambda path: path.symlink_to("/dev/zero")), HEADER),
    (DEVICE, "device"),
    (table(lambda held: held * torch.nan), "NaN"),
    (sent(lambda held: {name: torch.zeros_like(t) for name, t in held.items()}), "zero"),
    (table(lambda held: torch.ones(1, 5, 40)), "pos_embed"),
    (sent(lambda held: held | {"fc.weight": torch.ones(2)}), "fc.weight"),
    (weights_of_another_round, "weights/"),
    (table(torch.Tensor.half), "F16, F32"),
    (table(torch.Tensor.char), "I8"),
    (sent(as_float64), "F64"),
    (sent(lambda held: {}), "no tensors"),
    (replaced(FILE, os.mkfifo), "pipe"),
    (replaced(HEADER, lambda path: path.write_text('{"label": "x", ')), HEADER),
    (link_out_of_the_folder, "link"),
    (weights_of_a_swin, "swin"),
    (header(weights="weights/none.safetensors"), "none.safetensors"),
    (header(labels=[99]), "labels"),
    (header(noise={"no.such": 0.1}), "no.such"),
    (header(rounding={"no.such": 0.1}), "no.such"),
    (header(model={"img_size": 64}), "pos_embed"),
    (header(model={"embed_dim": 16_384, "depth": 500}), "parameters"),
    (header(model={"checkpoint": "x"}), "model.checkpoint"),
    (header(recipe={"defenses": ["{a: &a [*a]}"]}), "mistake(s): defenses"),
    (header(steps=3), "recipe.upload"),
    (header(weights="/etc/passwd"), "inside the uploads' folder"),
    (header(weights="../weights.safetensors"), "inside the uploads' folder"),
    (header(weights="C:\\weights.safetensors"), "inside the uploads' folder"),
    (header(kind="weight_difference"), "learning rate"),
    (header(labels=[1, 2]), "one for each of 1"),
    (header(rond=3), "mean round"),
    (truth(images=torch.rand(1, 3, 64, 64)), "images"),
    (truth(images=torch.full((1, 3, 32, 32), torch.nan)), "NaN"),
    (truth(images=2 * torch.ones(1, 3, 32, 32)), "2"),
    (truth(images=torch.ones(1, 3, 32, 32, dtype=torch.uint8)), "U8"),
    (truth(mask=NONE), "permutation"),
    (truth(mask=NONE[:, :9], permutation=ORDER), "(1, 9)"),
    (truth(mask=7 * NONE.int() + 2, permutation=ORDER), "mask"),
    (truth(mask=NONE, permutation=ORDER + 1), "15"),
    (truth(mask=NONE, permutation=ORDER.flip(-1).contiguous()), "mask"),
    (without_ids, "ids"),
]


@pytest.mark.parametrize(("spoil", "named"), FAULTS)
def test_a_fault_is_named(folder: Path, spoil: Spoil, named: str) -> None:
    edit_all(folder, series=None)
    spoil(folder)
    examined = examine(folder)
    assert named in examined.reasons[NAME]
    assert (len(examined.sound), len(examined.refused)) == (3, 1)


def a_name_of_no_text(folder: Path) -> None:
    odd = os.fsencode(folder) + b"/a\xff\x1b.json"
    Path(os.fsdecode(odd)).write_bytes((folder / HEADER).read_bytes())


def flipped(name: str) -> Spoil:
    """The lowest bit of a number's mantissa, or of its exponent: the file stays readable."""

    def spoil(folder: Path) -> None:
        path = folder / (name or json.loads((folder / HEADER).read_text())["weights"])
        flip(path, 8 * (path.stat().st_size - 3))

    return spoil


def of_the_same_image(folder: Path) -> None:
    (folder / TRUTH).write_bytes((folder / TRUTH.replace("_000_", "_001_")).read_bytes())


@pytest.mark.parametrize(
    ("spoil", "named", "failed", "in_series"),
    [
        (cut_off, "safetensors", [NAME], False),
        (flipped(""), "changed", [NAME, OTHER], False),  # two uploads have these weights
        (a_name_of_no_text, "name", ["a\\udcff\\x1b"], False),
        (lambda folder: (folder / HEADER).unlink(), "header", [NAME], False),
        (header(mean=[0.1] * 3), "mean", [NAME, NAME.replace("at00001", "at00002")], True),
        (of_the_same_image, "same name", [NAME, OTHER], False),
        # the model takes pictures of 32 pixels, so they cannot be cropped from 10
        (header(model={"resize": 10}, label="impossible"), "resize", ["class_2/002.png"], False),
    ],
)
def test_what_does_not_fit_fails_alone(
    folder: Path, spoil: Spoil, named: str, failed: list[str], in_series: bool
) -> None:
    """`check` and a run say the same; neither is it scored against something else."""
    edit_all(folder, **({} if in_series else {"series": None}))  # else each round is another line
    spoil(folder)
    text, usable = check_uploads(folder)
    assert not usable
    assert named in text
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 3
    rows = scores[scores.status == "failed"]
    assert sorted(rows.image_id) == failed
    assert rows.reason.str.contains(named, regex=False).all()
    assert not rows.reason.str.contains(str(folder), regex=False).any()
    assert any(named in failure for failure in summary.failures)
    if named != "resize":  # which shows when the model is opened
        assert set(rows.model) == {REFUSED}
        for row in rows.itertuples():
            assert f"FAULT  {row.image_id}: {row.reason.split('; ')[0]}" in text
    lost = 1 if in_series else sum(name != "a\\udcff\\x1b" for name in failed)
    assert (scores.status == "ok").sum() == (2 if in_series else 4) - lost  # of series, or of lines


def test_what_differs_is_attacked_beside_the_others(folder: Path) -> None:
    """In another precision, or without private images."""
    edit_all(folder, series=None)
    edit(folder, dtype="float64")
    change_upload(folder, as_float64)
    (folder / "truth" / f"{OTHER}.safetensors").unlink()
    assert check_uploads(folder)[1]
    summary, scores, rows = attacked(folder, **ONE)
    assert summary.exit_code == 0
    assert dict(scores.status.value_counts()) == {"ok": 3, "unscored": 1}
    assert {"small, round 1, float32", "small, round 1, float64"} <= set(rows.model)


def test_every_fault_of_an_upload_is_listed(folder: Path) -> None:
    edit(folder, labels=[99], noise={"no.such": 0.1})
    for spoil in (table(lambda held: held * torch.nan), DEVICE):
        spoil(folder)
    lines = [line for line in check_uploads(folder)[0].splitlines() if f"FAULT  {NAME}" in line]
    for named in ("labels: ", "noise: ", "NaN", "device"):
        assert sum(named in line for line in lines) == 1, named


def test_without_a_sound_upload_nothing_is_run(folder: Path) -> None:
    edit_all(folder, gamma=2)
    with pytest.raises(UserError, match=rf"(?s){NAME}.*gamma"):
        attacked(folder)
    assert not (folder.parent / "run").exists()


def test_a_folder_without_uploads_is_an_error(recorded: Path, tmp_path: Path) -> None:
    """A federation's is known."""
    (tmp_path / "empty").mkdir()
    for place, named in (("empty", "empty"), ("none", "none"), (recorded.parent, "uploads")):
        with pytest.raises(UserError, match=named):
            check_uploads(tmp_path / place)
