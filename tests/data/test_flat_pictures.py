"""Pictures with flat regions, made from scikit-image's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import load_images, open_images
from mjp_privacy.experiment.run import run_experiment
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.runs import cells, rows

CONFIG = Path(__file__).parents[2] / "configs" / "flat_pictures.yaml"


def test_there_are_six_of_each_kind() -> None:
    kinds = [record.image_id.partition("/")[0] for record in open_images("flat").records]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("drawing", "half_blurred", "letterboxed", "saturated"), 6
    )


def test_pictures_of_one_photograph_are_one_group() -> None:
    groups = {record.image_id: record.group for record in open_images("flat").records}
    assert groups["letterboxed/coffee_wide"] == groups["saturated/coffee_shadows"] == "coffee"


def test_they_have_what_their_kind_says() -> None:
    pictures = {image.image_id: image.image for image in load_images("flat", size=192)}
    for name, picture in pictures.items():
        patches = to_patches(picture, 16)
        flat = int((patches.reshape(144, 3, 256).std(-1).amax(-1) == 0).sum())
        if name.startswith("letterboxed"):
            assert flat >= 40, name
            assert patches[0].unique().tolist() in ([0.0], [1.0])
        if name.startswith("saturated"):
            assert (picture == (0 if "shadows" in name else 1)).float().mean() > 0.1, name
        if name.startswith("half_blurred"):
            steps = picture.diff(dim=-1).abs()
            pairs = (steps.chunk(2, 1), steps.chunk(2, 2))
            halves = sorted(float(half.mean()) for pair in pairs for half in pair)
            assert halves[0] < 0.5 * halves[-1], name
    horse = pictures["drawing/horse"]
    assert torch.equal(horse, horse[:1].expand(3, -1, -1))


def test_they_have_no_labels(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="The flat pictures have no labels; expected no label file"):
        open_images("flat", tmp_path / "labels.txt")


@pytest.mark.nightly
def test_the_config_runs_with_nothing_from_outside(tmp_path: Path) -> None:
    """Three pictures, six uploads: exact, and far above what one upload gives."""
    run_experiment(CONFIG, out=tmp_path / "run", limit=3)
    psnr = mean_psnr(tmp_path / "run")
    assert psnr["multi_round (6)"] > 60
    assert psnr["multi_round (6)"] > psnr["masked_span"] + 20
    assert psnr["masked_span"] > psnr["grey"] + 3
    assert yaml.safe_load(CONFIG.read_text())["images"] == "flat"


def mean_psnr(out: Path) -> dict[str, float]:
    """Mean PSNR, at most 100 dB, of each attack."""
    means = {}
    for entry in cells(out):
        found = rows(out, [entry["run_id"]])
        values = found[(found["metric"] == "psnr") & (found["variant"] == "standard")]["value"]
        means[entry["attack"]] = float(values.clip(upper=100).mean())
    return means
