"""What failed is said once for each reason, with the number of images and cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mjp_privacy.experiment.failures import Failure, failure_lines

from attacks.april import April
from mjp_privacy.cli import main
from mjp_privacy.core.files import write_json
from tests.helpers.runs import TINY, photographs, tiny


def in_cell(number: int, image: str, reason: str = "not finite") -> Failure:
    return Failure(reason, "ViT", "a", image, cell=f"run{number}")


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        ([Failure("empty", image="1.png")], "1.png: empty"),
        ([Failure("empty", image="1.png")] * 2, "1.png: empty"),
        ([Failure("empty", image=f"{n}.png") for n in range(2)], "2 images (0.png, 1.png): empty"),
        ([in_cell(0, "1.png")], "ViT, a, 1.png: not finite"),
        (
            [in_cell(cell, "1.png") for cell in range(3)],
            "1 image in 3 cells (1.png): not finite",
        ),
        (
            [in_cell(cell, f"{n}.png") for cell in range(2) for n in range(20)],
            "20 images in 2 cells (0.png, 1.png, 2.png, …): not finite",
        ),
        (
            [Failure("No checkpoint at x.pth", "MJP"), Failure("No checkpoint at y.pth", "JP")],
            "MJP, JP: not loaded, for the reason above; all of its rows failed",
        ),
    ],
)
def test_an_equal_reason_is_one_line(failures: list[Failure], said: str) -> None:
    assert failure_lines(failures) == (said,)


def test_each_reason_has_its_line_in_the_order_of_the_run() -> None:
    failures = [in_cell(0, "1.png", "b"), in_cell(0, "2.png", "a"), in_cell(1, "1.png", "b")]
    assert failure_lines(failures) == ("1 image in 2 cells (1.png): b", "ViT, a, 2.png: a")


def command(folder: Path, config: dict[str, Any]) -> list[str]:
    path = folder / "config.yaml"
    write_json(path, config)  # JSON is YAML
    data = photographs(folder / "images", 3)
    argv = ["attack", str(path), "--images", str(data), "--out", str(folder / "run")]
    return [*argv, "--device", "cpu"]


def test_a_failure_of_many_images_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: April, *_: Any, **__: Any) -> None:
        raise torch.linalg.LinAlgError("the SVD gave up")

    monkeypatch.setattr(April, "run", broken)
    assert main(command(tmp_path, tiny())) == 3
    said = capsys.readouterr().err
    assert said.count("the SVD gave up") == 1
    assert "  3 images in 5 cells (" in said


def test_a_missing_checkpoint_is_said_once_and_fails_its_rows_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(models={"ViT": TINY, "MJP": {**TINY, "unknown_embedding": True}})
    argv = [*command(tmp_path, config), "--weights", "MJP=nowhere.pth"]
    assert main(argv) == 3
    said = capsys.readouterr().err
    assert said.count("No checkpoint at nowhere.pth") == 1
    assert "  MJP: not loaded, for the reason above; all of its rows failed" in said
