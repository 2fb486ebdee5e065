"""`mjp score` over two folders: rows, means, and pairs that cannot be scored."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mjp_privacy.cli import main
from mjp_privacy.metrics.pictures import lpips_backbone
from mjp_privacy.metrics.scores import METRICS, score

Folders = tuple[Path, Path]
GREY = np.zeros((32, 40), dtype=np.uint8)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Three pairs, the second one exact, the third of another size, beside a text file."""
    rng = np.random.default_rng(6)
    for folder in ("reference", "reconstruction"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "notes.txt").write_text(folder)
    for name, shape in {"a.png": (32, 40), "b.png": (32, 40), "sub/c.PNG": (36, 33)}.items():
        left, right = rng.integers(0, 256, (2, *shape, 3), dtype=np.uint8)
        save(tmp_path / "reconstruction" / name, left)
        save(tmp_path / "reference" / name, left if name == "b.png" else right)
    return tmp_path / "reconstruction", tmp_path / "reference"


def save(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(path)


def command(folders: Folders, *more: str) -> list[str]:
    reconstruction, reference = map(str, folders)
    given = ["--reconstruction", reconstruction, "--reference", reference, "--device", "cpu"]
    if "--out" not in more:
        given += ["--out", str(folders[0].parent / "out" / "scores.csv")]
    return ["score", *given, *more]


def read_rows(folders: Folders) -> list[dict[str, str]]:
    with (folders[0].parent / "out" / "scores.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_command_writes_a_row_per_image_and_metric(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folders)) == 0
    rows = read_rows(folders)
    assert list(rows[0]) == ["image", "metric", "variant", "value", "status", "reason"]
    assert {(row["status"], row["reason"]) for row in rows} == {("ok", "")}
    assert len(rows) == 3 * len(list(METRICS))
    for name in ("a.png", "b.png", "sub/c.PNG"):
        files = (np.asarray(Image.open(folder / name)) for folder in folders)
        scores = score(*(file.transpose(2, 0, 1)[None] / 255 for file in files))
        for row in (row for row in rows if row["image"] == name):
            assert float(row["value"]) == scores[row["metric"], row["variant"]][0]
    assert [path.name for path in (folders[0].parent / "out").iterdir()] == ["scores.csv"]
    printed = capsys.readouterr().out
    lines = {tuple(line.split()[:2]): line.split() for line in printed.splitlines()}
    for metric, arrow in (("psnr", "↓"), ("mse", "↑")):
        own = [row for row in rows if (row["metric"], row["variant"]) == (metric, "paper")]
        values = np.minimum([float(row["value"]) for row in own], 100)
        line = lines[metric, "paper"]
        assert float(line[2]) == pytest.approx(values.mean(), rel=1e-4)
        assert line[-2:] == ["3", arrow]
    mean, low, high = map(float, re.findall(r"[0-9.]+", " ".join(lines["mse", "paper"]))[:3])
    assert low == 0 < mean < high  # one resample in 27 draws the exact image three times
    assert "1 (paper), 1 (standard)" in printed  # exact ones
    assert lpips_backbone() in printed


def test_missing_partners_are_counted_where_allowed(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    (folders[0] / "a.png").unlink()
    assert main(command(folders)) == 2
    assert "reconstruction/a.png" in capsys.readouterr().err
    assert not (folders[0].parent / "out").exists()
    (folders[1] / "sub" / "c.PNG").unlink()
    assert main(command(folders, "--allow-missing", "--metrics", "mse")) == 0
    assert {row["image"] for row in read_rows(folders)} == {"b.png"}
    assert "not scored: 2" in capsys.readouterr().out


def test_a_pair_that_cannot_be_scored_is_rows_with_the_reason(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folders[0] / "a.png", GREY.T)
    cut = folders[0] / "sub" / "c.PNG"
    cut.write_bytes(cut.read_bytes()[:600])
    assert main(command(folders, "--metrics", "mse", "psnr")) == 3
    rows, printed = read_rows(folders), capsys.readouterr()
    for name, message in (("a.png", "a.png: .*32×40.*40×32"), ("sub/c.PNG", "c.PNG")):
        failed = [row for row in rows if (row["status"], row["image"]) == ("failed", name)]
        assert len(rows) == 3 * len(failed) == 12
        assert all(re.search(message, row["reason"]) and not row["value"] for row in failed)
        assert re.search(f"(?s){message}", printed.err)
    assert re.search(r"mse +paper .* 1 ", printed.out)  # of the other


def test_pictures_that_are_small_or_not_rgb_and_names_like_formulas(folders: Folders) -> None:
    name = '=HYPERLINK("x").png'
    save(folders[0] / name, np.full((32, 40, 4), 255, dtype=np.uint8))
    save(folders[1] / name, GREY)
    for folder in folders:
        save(folder / "a.png", GREY[:20, :20])
    assert main(command(folders, "--metrics", "mse/paper", "lpips/paper")) == 3
    rows = {(r["image"], r["metric"]): r for r in read_rows(folders)}
    assert rows["a.png", "mse"]["value"] == "0.0"
    assert "31×31" in rows["a.png", "lpips"]["reason"]
    assert rows["b.png", "lpips"]["status"] == "ok"
    assert rows["'" + name, "mse"]["value"] == "1.0"


def test_wrong_folders_metrics_and_places_are_named(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "file").write_text("")
    tiny = (tmp_path / "tiny", tmp_path / "tiny")
    save(tiny[0] / "t.png", GREY[:20, :20])
    for arguments, message in (
        (command((tmp_path / "nowhere", folders[1])), "nowhere"),
        (command((tiny[0], folders[1]), "--allow-missing"), "1 and 3 images"),
        (command(folders, "--metrics", "lpps"), "'lpps'"),
        (command(folders, "--out", str(tmp_path)), "--out"),
        (command(folders, "--out", f"{tmp_path}/file/x.csv"), "file"),
        (command(folders, "--out", f"{folders[1]}/scores.csv"), "--reference"),
        (command(tiny, "--metrics", "lpips"), "t.png"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("scores.csv"))
