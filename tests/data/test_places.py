"""What is written lies apart from what is read, and no option is an empty text."""

from __future__ import annotations

from pathlib import Path

import pytest

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.data.opening import keep_apart
from tests.helpers.image_files import make_images


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_images(tmp_path / "photos", ["x/a.png", "y/b.png"])


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("photos", "is --images itself"),
        ("photos/run", "lies inside --images .*: what is written there would be read"),
        ("photos/x/../x", "lies inside --images"),
        ("link/run", "lies inside --images"),
        (".", "holds --images .*: what is written would stand around it"),
    ],
)
def test_refused(out: str, message: str, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(photos)
    with pytest.raises(UserError, match=f"{message}.*give another --out"):
        keep_apart(tmp_path / out, {"--images": photos})


def test_what_is_apart(photos: Path, tmp_path: Path) -> None:
    for out in ("run", "photos2", "photo", "deep/run"):
        keep_apart(tmp_path / out, {"--images": photos, "--labels": None})
    keep_apart(tmp_path, {"--images": photos}, around=True)
    (tmp_path / "photos.zip").touch()
    keep_apart(tmp_path, {"--images": tmp_path / "photos.zip"})  # nobody writes such a name
    keep_apart("run", {"--images": "embedded", "--labels": "no\0path"})


def commands(photos: Path, out: str) -> dict[str, list[str]]:
    folder = str(photos)
    score = ["score", "--reference", folder, "--reconstruction", folder]
    return {
        "attack": ["attack", "demo", "--images", folder, "--out", out],
        "sample": ["sample", "--from", folder, "--out", out],
        "score": [*score, "--out", f"{out}.csv"],
        "train": [
            "train",
            "configs/training/cifar10.yaml",
            "--row",
            "J",
            "--data",
            folder,
            "--out",
            out,
        ],
        "federate": ["federate", "configs/federated/minute.yaml", "--data", folder, "--out", out],
        "fit-prior": [
            *("fit-prior", "--images", folder, "--patch", "4", "--size", "8"),
            *("--out", f"{out}.safetensors"),
        ],
    }


@pytest.mark.parametrize("command", ["attack", "sample", "score", "train", "federate", "fit-prior"])
def test_no_command_writes_among_what_it_reads(
    command: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(photos.rglob("*"))
    assert main(commands(photos, str(photos / "out"))[command]) == 2
    error = capsys.readouterr().err
    assert "lies inside --" in error
    assert sorted(photos.rglob("*")) == before
