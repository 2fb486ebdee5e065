"""What `score` takes and refuses, which weights LPIPS loads, and the command over two folders."""

import csv
import hashlib
import os
import re
from pathlib import Path

import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image
from safetensors.torch import load_file

import mjp_privacy
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics import METRICS, lpips_backbone, score
from mjp_privacy.metrics import lpips as alexnet

WEIGHTS = Path(mjp_privacy.__file__).parent / "assets" / "alexnet_features_fp16.safetensors"


@pytest.fixture
def photos() -> tuple[np.ndarray, np.ndarray]:
    """Reconstructions and references, (2, 3, 48, 57) float64, laid out channels last."""
    both = (skimage.data.chelsea(), skimage.data.astronaut(), skimage.data.coffee())
    a, b, c = (p[100:148, 150:207].transpose(2, 0, 1) / 255 for p in both)
    return np.stack([a, b]), np.stack([b, c])


# LPIPS weights ------------------------------------------------------------------------------------


@pytest.fixture
def fresh_lpips(tmp_path, monkeypatch):
    """No network made yet, and an empty torch.hub folder."""

    def clear() -> None:
        alexnet._backbone.cache_clear()
        alexnet._convolutions.cache_clear()

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    clear()
    yield tmp_path / "checkpoints"
    clear()


def test_lpips_uses_the_packaged_weights_and_is_silent(fresh_lpips, capfd, recwarn) -> None:
    before = torch.random.get_rng_state()
    score(*np.random.default_rng(4).random((2, 1, 3, 32, 32)), metrics=["lpips"])
    assert torch.equal(before, torch.random.get_rng_state())
    assert lpips_backbone() == f"{WEIGHTS.name} of this package, float16"
    assert capfd.readouterr() == ("", "")
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]


@pytest.mark.parametrize("kind", ["whole", "cut off", "a pipe", "a folder"])
def test_lpips_prefers_torchvisions_own_file_if_whole(
    kind: str, fresh_lpips, monkeypatch, capsys
) -> None:
    zeros = {name: torch.zeros_like(weight).float() for name, weight in load_file(WEIGHTS).items()}
    torch.save(zeros, fresh_lpips / "file")
    content = (fresh_lpips / "file").read_bytes()
    file = fresh_lpips / f"alexnet-owt-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    if kind in ("whole", "cut off"):
        file.write_bytes(content if kind == "whole" else content[:1000])
    else:
        os.mkfifo(file) if kind == "a pipe" else file.mkdir()
    monkeypatch.setattr(alexnet, "TORCHVISION", file.name)
    scores = score(*np.random.default_rng(5).random((2, 1, 3, 32, 32)), metrics=["lpips"])
    whole = kind == "whole"
    assert (scores["lpips", "standard"][0] == 0) == whole
    assert lpips_backbone().startswith(file.name) == whole
    assert (file.name in capsys.readouterr().err) != whole


# what goes in, what is refused --------------------------------------------------------------------


def test_tensors_arrays_and_devices_give_the_same(photos) -> None:
    u, v = (images.astype(np.float32) for images in photos)
    arrays = score(u, v)
    tensors = score(torch.from_numpy(u).requires_grad_(), torch.from_numpy(v), device="cpu")
    views = score(u[:, :, ::-1], v[:, :, ::-1], ["mse"])
    assert list(arrays) == [(METRICS[name].name, METRICS[name].variant) for name in METRICS]
    assert all(np.array_equal(arrays[key], tensors[key]) for key in arrays)
    np.testing.assert_allclose(views["mse", "paper"], arrays["mse", "paper"], rtol=1e-12)
    assert score is mjp_privacy.score


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        (["psnr"], [("psnr", "paper"), ("psnr", "standard")]),
        ("mse", [("mse", "paper"), ("mse", "standard")]),
        (
            [("ssim", "paper"), "mse/standard", "mse"],
            [("ssim", "paper"), ("mse", "standard"), ("mse", "paper")],
        ),
    ],
)
def test_metrics_by_name(asked, keys) -> None:
    images = np.full((1, 3, 16, 16), 0.5)
    assert list(score(images, images, asked)) == keys


OK = np.full((2, 3, 32, 32), 0.5)
REFUSED = {
    "shapes": ((OK, OK[:1]), {}, r"\(2, 3, 32, 32\).*\(1, 3, 32, 32\)"),
    "one image": ((OK[0], OK[0]), {}, r"got \(3, 32, 32\)"),
    "no image": ((OK[:0], OK[:0]), {}, r"got \(0, 3, 32, 32\)"),
    "8 bits": ((OK.astype(np.uint8), OK), {}, "reconstructions.*uint8"),
    "8-bit tensor": ((OK, torch.ones(2, 3, 32, 32).byte()), {}, "references.*torch.uint8"),
    "list": ((OK.tolist(), OK), {}, "list"),
    "above": ((OK * 2.5, OK), {}, "reconstructions.*1.25 to 1.25"),
    "below": ((OK, OK - 0.50001), {}, "references.*-1e-05 to -1e-05"),
    "nan": ((np.where(np.arange(32) == 3, np.nan, OK), OK), {}, "NaN"),
    "inf": ((OK, np.where(np.arange(32) == 3, np.inf, OK)), {}, "inf"),
    "name": ((OK, OK), {"metrics": ["psn"]}, "'psn'.*psnr"),
    "variant": ((OK, OK), {"metrics": [("ssim", "papr")]}, "'ssim/papr'.*ssim/paper"),
    "no metric": ((OK, OK), {"metrics": []}, "none"),
    "device": ((OK, OK), {"device": "gpu0"}, "'gpu0'"),
    "no GPU": ((OK, OK), {"device": "cuda"}, "cuda"),
    "small for ssim": ((OK[..., :10], OK[..., :10]), {"metrics": ["ssim"]}, "SSIM.*32×10"),
    "small for lpips": ((OK[:, :, :30],) * 2, {"metrics": ["lpips"]}, "LPIPS.*30×32"),
    "channels": ((OK[:, :2],) * 2, {"metrics": ["lpips"]}, "LPIPS.*2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_came(case: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    images, arguments, message = REFUSED[case]
    with pytest.raises(UserError, match=f"(?s){message}"):
        score(*images, **arguments)


# the command --------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Three pairs, the second one exact, the third of another size, beside a text file."""
    rng = np.random.default_rng(6)
    for folder in ("reference", "reconstruction"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "notes.txt").write_text(folder)
    for name, shape in {"a.png": (32, 40), "b.png": (32, 40), "sub/c.PNG": (36, 33)}.items():
        left, right = rng.integers(0, 256, (2, *shape, 3), dtype=np.uint8)
        Image.fromarray(left).save(tmp_path / "reconstruction" / name)
        Image.fromarray(left if name == "b.png" else right).save(tmp_path / "reference" / name)
    return tmp_path / "reconstruction", tmp_path / "reference"


def command(folders: tuple[Path, Path], *more: str) -> list[str]:
    reconstruction, reference = map(str, folders)
    given = ["--reconstruction", reconstruction, "--reference", reference, "--device", "cpu"]
    if "--out" not in more:
        given += ["--out", str(folders[0].parent / "out" / "scores.csv")]
    return ["score", *given, *more]


def read_rows(folders: tuple[Path, Path]) -> list[dict[str, str]]:
    with (folders[0].parent / "out" / "scores.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_command_writes_a_row_per_image_and_metric(folders, capsys) -> None:
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
    assert {r["value"] for r in rows if (r["image"], r["metric"]) == ("b.png", "psnr")} == {"inf"}
    assert [path.name for path in (folders[0].parent / "out").iterdir()] == ["scores.csv"]
    printed = capsys.readouterr().out
    values = [float(r["value"]) for r in rows if (r["metric"], r["variant"]) == ("psnr", "paper")]
    line = next(line for line in printed.splitlines() if line.split()[:2] == ["psnr", "paper"])
    assert float(line.split()[2]) == pytest.approx(np.minimum(values, 100).mean(), rel=1e-4)
    assert line.split()[-2:] == ["3", "↓"]
    assert "Exact images: 1 (paper), 1 (standard)" in printed
    assert lpips_backbone() in printed


def test_command_counts_missing_images_where_allowed(folders, capsys) -> None:
    (folders[0] / "a.png").unlink()
    (folders[1] / "sub" / "c.PNG").unlink()
    assert main(command(folders, "--allow-missing", "--metrics", "mse")) == 0
    assert {row["image"] for row in read_rows(folders)} == {"b.png"}
    assert "without a partner, not scored: 2" in capsys.readouterr().out


def test_command_prints_an_interval_around_the_mean(folders, capsys) -> None:
    printed = []
    for _ in range(2):
        assert main(command(folders, "--metrics", "mse/paper")) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    numbers = re.findall(r"[0-9.]+", printed[0].splitlines()[1])
    mean, low, high, n = map(float, numbers)
    assert low == 0 < mean < high  # one resample in 27 draws the exact image three times
    assert n == 3


def save(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(path)


GREY = np.zeros((32, 40), dtype=np.uint8)
SPOILT = {
    "size": (lambda file: save(file, GREY.T), "a.png: expected 32×40.*got 40×32"),
    "text": (lambda file: file.write_text("text"), "a.png: not an image"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:600]), "a.png: .*truncated"),
    "empty": (lambda file: file.write_bytes(b""), "a.png: the file is empty"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_pair_that_cannot_be_scored_is_rows_with_the_reason(case: str, folders, capsys) -> None:
    spoil, message = SPOILT[case]
    spoil(folders[0] / "a.png")
    assert main(command(folders, "--metrics", "mse", "psnr")) == 3
    rows = read_rows(folders)
    failed = [row for row in rows if row["status"] == "failed"]
    assert {row["image"] for row in failed} == {"a.png"}
    assert len(rows) == 3 * len(failed) == 12
    assert {row["value"] for row in failed} == {""}
    assert all(re.search(message, row["reason"]) for row in failed)
    printed = capsys.readouterr()
    assert re.search(f"(?s)1 images not scored; rows say why:.*{message}", printed.err)
    assert re.search(r"mse +paper .* 2 ", printed.out)  # of the two others


def test_a_picture_too_small_for_lpips_has_its_other_scores(folders) -> None:
    for folder in folders:
        save(folder / "a.png", GREY[:20, :20])
    assert main(command(folders, "--metrics", "mse/paper", "lpips/paper")) == 3
    rows = {(r["image"], r["metric"]): r for r in read_rows(folders)}
    assert rows["a.png", "mse"]["value"] == "0.0"
    assert "at least 31×31" in rows["a.png", "lpips"]["reason"]
    assert rows["b.png", "lpips"]["status"] == "ok"


def test_a_missing_partner_is_an_error(folders, capsys) -> None:
    (folders[0] / "a.png").unlink()
    assert main(command(folders)) == 2
    error = capsys.readouterr().err
    assert re.search("(?s)^error: .*same name, extension.*reconstruction/a.png.*--allow-", error)
    assert not (folders[0].parent / "out").exists()


@pytest.mark.parametrize("place", ["reference", "reconstruction/sub"])
def test_scores_do_not_lie_among_the_images(place: str, folders, tmp_path, capsys) -> None:
    assert main(command(folders, "--out", str(tmp_path / place / "scores.csv"))) == 2
    assert f"lies inside --{place.split('/')[0]}" in capsys.readouterr().err
    assert not list(tmp_path.rglob("scores.csv"))


def test_a_name_like_a_formula_is_a_text_in_the_csv(folders) -> None:
    name = '=HYPERLINK("x").png'
    for folder in folders:
        save(folder / name, GREY)
    assert main(command(folders, "--metrics", "mse/paper")) == 0
    assert "'" + name in {row["image"] for row in read_rows(folders)}


def test_command_takes_images_that_are_not_rgb(folders) -> None:
    save(folders[0] / "a.png", np.full((32, 40, 4), 255, dtype=np.uint8))
    save(folders[1] / "a.png", GREY)
    assert main(command(folders, "--metrics", "mse/paper")) == 0
    assert float(read_rows(folders)[0]["value"]) == 1.0


def test_command_refuses_wrong_folders_and_metrics(folders, tmp_path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    tiny = (tmp_path / "tiny", tmp_path / "tiny")
    tiny[0].mkdir()
    save(tiny[0] / "t.png", GREY[:20, :20])
    cases = [
        (command((tmp_path / "nowhere", folders[1])), "nowhere"),
        (command((tmp_path / "empty", folders[1]), "--allow-missing"), "empty"),
        (command((tiny[0], folders[1]), "--allow-missing"), "1 and 3 images"),
        (command(folders, "--metrics", "lpps"), "'lpps'"),
        (command(folders, "--out", str(tmp_path)), "--out"),
        (command(folders, "--out", f"{tmp_path}/file/x.csv"), "file"),
        (command(tiny, "--metrics", "lpips"), "t.png"),
    ]
    for arguments, message in cases:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
