"""`--data embedded`: a federation on the photographs that every installation has."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.federation.config import load_federation
from mjp_privacy.federation.task import data_path, federation_images
from tests.helpers.federations import config, images

MINUTE = "configs/federated/minute.yaml"


def test_each_photograph_is_a_class() -> None:
    train, test = federation_images(load_federation(MINUTE), "embedded", None)
    assert (len(train), test) == (20, None)
    photographs = {record.image_id.split("/")[0] for record in train.records}
    pairs = {(record.image_id.split("/")[0], record.label) for record in train.records}
    assert len(pairs) == len(photographs) == len(set(train.labels)) == 6
    same, tested = federation_images(load_federation(MINUTE), "embedded", "embedded")
    assert same == tested


def test_a_model_with_fewer_classes_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        federation_images(config(model={"num_classes": 5}), "embedded", None)
    assert str(caught.value) == (
        "--data embedded holds 6 photographs, each a class: expected model.num_classes of 6 or "
        "more, got 5. Set it in the config."
    )


def test_test_images_of_other_classes_are_refused(tmp_path: Path) -> None:
    folder = images(tmp_path / "data")
    with pytest.raises(UserError, match="--val: expected none or embedded beside --data embedded"):
        federation_images(load_federation(MINUTE), "embedded", folder)


def test_other_processes_find_the_same_images(tmp_path: Path) -> None:
    assert data_path("embedded") == data_path(Path("embedded")) == "embedded"
    assert data_path("images") == str(Path("images").resolve())


@pytest.mark.nightly
def test_the_one_minute_config_needs_nothing_from_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its shortest form: one recorded round, so that the test takes seconds."""
    argv = [MINUTE, "--data", "embedded", "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["federate", *argv, "--rounds", "6"]) == 0
    assert "records round 0 instead of 0, 9, 18;" in capsys.readouterr().out
    leakage = pd.read_csv(tmp_path / "out" / "rounds.csv").set_index("scope")
    assert set(leakage["n"]) == {6}
    one, several = leakage.loc["1 upload"], leakage.loc["any number of uploads"]
    assert 0 < one["unshuffled"] < several["unshuffled"] == 6
    assert one["psnr"] < several["psnr"]
    assert (tmp_path / "out" / "rounds.png").stat().st_size > 0
    assert main(["compare", str(tmp_path / "out"), "--out", str(tmp_path / "compared")]) == 0
    assert "| 0 | – | 0 |" in (tmp_path / "compared" / "table.md").read_text()  # no test images
