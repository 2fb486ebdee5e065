"""The command `mjp analyse`: what it prints and writes, what is the same again, what it refuses."""

import csv
import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mjp_privacy.cli import main
from mjp_privacy.paper.positions import PositionTable, noise_table
from mjp_privacy.paper.positions_picture import umap_plane
from mjp_privacy.paper.positions_report import CAVEATS
from mjp_privacy.training.config import plain as recipe_of
from mjp_privacy.training.learner import build_network
from tests.helpers.models import tiny
from tests.helpers.training import class_folders, small
from tests.training.test_evaluation import saved


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A model whose table is exactly linear in row and column."""
    model = tiny(torch.float32)
    places = torch.stack((torch.arange(16) // 4, torch.arange(16) % 4), dim=1).float()
    directions = torch.randn(2, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.table[0, 1:] = places @ directions
    return saved(tmp_path / "plain.safetensors", model)


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    model = tiny(torch.float32, unknown_embedding=True)
    with torch.no_grad():
        model.table.copy_(torch.randn(1, 17, 24, generator=torch.Generator().manual_seed(1)))
    return saved(tmp_path / "noisy.safetensors", model)


def read(out: Path) -> list[dict[str, str]]:
    with (out / "analysis.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.nightly
def test_a_grid_and_noise_are_told_apart(
    plain: Path, noisy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["analyse", str(plain), f"MJP={noisy}", "--out", str(out), "--limit", "3"]
    assert main(argv) == 0
    first, second, empty, *table = capsys.readouterr().out.splitlines()
    assert first.startswith("plain: the patches' places can be read from it.")
    assert second.startswith("MJP: a linear map reads little of the patches' places.")
    assert empty == ""
    assert len(table) == 9  # heads, rule, two models, noise, three of the paper, a path
    assert table[-1] == str(out / "analysis.md")
    by_kind = [(row["kind"], row["label"]) for row in read(out)]
    noise = [("noise", "N(0, 1), not trained")] * 10
    paper = [("paper", n) for n in ("DeiT-S", "DeiT-S+MJP", "DeiT-S+MJP (DAL-LN)")]
    assert by_kind == [("model", "plain"), ("model", "MJP"), *noise, *paper]
    linear, drawn = read(out)[:2]
    assert [float(linear[f"variance_{k}"]) for k in (3, 7)] == pytest.approx([100, 100])
    assert float(linear["mae_2d"]) == pytest.approx(0, abs=1e-5)
    assert linear["dimensions_for_90"] in ("1", "2")
    low, high = map(float, re.search(r"noise ([\d.]+) to ([\d.]+)", second).groups())  # type: ignore[union-attr]
    assert low - 3 < float(drawn["variance_3"]) < high + 3
    assert (linear["images"], linear["grid"], linear["width"]) == ("3", "4", "24")


def test_all_files_are_written_and_are_the_same_again(
    plain: Path, noisy: Path, tmp_path: Path
) -> None:
    images = class_folders(tmp_path / "images", images=2, side=40)
    outs = [tmp_path / "one", tmp_path / "two"]
    for out in outs:
        argv = ["analyse", str(plain), str(noisy), "--out", str(out), "--threads", "1"]
        assert main([*argv, "--images", str(images)]) == 0
    names = {path.name for path in outs[0].iterdir()}
    pictures = {"analysis.png", "attention_1.png", "attention_2.png"}
    assert names == {"analysis.md", "analysis.csv", "analysis.json", *pictures}
    for name in names - pictures:
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()
    for name in pictures:
        one, two = (np.array(Image.open(out / name)) for out in outs)
        assert (one == two).all()
        assert one.std() > 10  # there is something on it
    text = (outs[0] / "analysis.md").read_text(encoding="utf-8")
    assert all(caveat in text for caveat in CAVEATS)
    assert "attention_2.png" in text
    content = json.loads((outs[0] / "analysis.json").read_text(encoding="utf-8"))
    assert content["curves"]["plain"]["variance"][1] == pytest.approx(1)
    assert [row["label"] for row in content["rows"]] == [row["label"] for row in read(outs[0])]


@pytest.mark.nightly
def test_a_model_without_position_embeddings_or_of_another_grid_beside_others(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exposed = tiny(torch.float32, position_embedding="exposed")
    without = saved(tmp_path / "without.safetensors", exposed, position_embedding="exposed")
    out = tmp_path / "out"
    assert main(["analyse", str(plain), str(without), "--out", str(out), "--limit", "2"]) == 0
    assert "without: " in capsys.readouterr().out
    row = read(out)[1]
    assert row["mae_2d"] == row["grid"] == ""
    assert float(row["head_diversity"]) > 0
    larger = saved(tmp_path / "larger.safetensors", tiny(torch.float32, img_size=48), resize=48)
    for named, *words in (
        ("analysis.csv", without, "--out", out),
        ("without", without, "--out", tmp_path / "new"),
        ("--img-size", plain, larger, "--out", tmp_path / "new"),
    ):
        assert main(["analyse", *map(str, words), "--limit", "2"]) == 2
        assert named in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
    words = ["analyse", str(plain), str(larger), "--out", str(tmp_path / "new"), "--limit", "2"]
    assert main([*words, "--img-size", "32"]) == 0
    text = (tmp_path / "new" / "analysis.md").read_text(encoding="utf-8")
    assert "larger: pos_embed resampled from 6×6 to 4×4" in text


@pytest.mark.nightly
@pytest.mark.parametrize(("left", "share"), [(1.06, 50.9), (1.0, 48.0)])
def test_a_table_that_is_mostly_its_start_is_said_to_be(
    left: float, share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise beside the start from the recipe's seed: a little more than half, then less."""
    config = small(model={"unknown_embedding": True})
    model = build_network(config)
    other = noise_table(4, 16, seed=3).rows
    with torch.no_grad():
        model.table[0, 1:] = left * model.table[0, 1:] + torch.from_numpy(other).float()
    facts = {"num_heads": 2, "resize": 28, "recipe": recipe_of(config)}
    path = saved(tmp_path / "mine.safetensors", model, **facts)
    assert main(["analyse", str(path), "--out", str(tmp_path / "out"), "--limit", "1"]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    row = read(tmp_path / "out")[0]
    assert float(row["start_share"]) == pytest.approx(share, abs=0.5)
    words = (
        f"{float(row['start_share']):.1f} % of the variance is still that of its start, N(0, 1²)"
    )
    assert (words in said) == (share > 50)
    assert ("mine: mostly the noise it started from." in said) == (share > 50)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("nowhere.pth",), "nowhere.pth"),
        (("cifar_vitt",), "cifar_vit?"),
        (("a=cifar_vit", "a=cifar_vit_mjp"), "NAME=PATH"),
        (("cifar_vit", "--seed", "-1"), "--seed"),
        (("cifar_vit", "--threads", "0"), "--threads"),
        (("cifar_vit", "--img-size", "14"), "2×2"),
        (("words.txt",), "words.txt"),
        ((), "mjp analyse"),
    ],
)
def test_mistakes_are_said_without_a_traceback(
    words: tuple[str, ...],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("no weights")
    assert main(["analyse", *words, "--out", "out"]) == 2
    assert named in capsys.readouterr().err


def test_images_that_cannot_be_read(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = class_folders(tmp_path / "images", images=1, side=40)
    bad = images / "class_0" / "000.png"
    bad.write_bytes(b"no image")
    argv = ["analyse", str(plain), "--out", str(tmp_path / "out"), "--images", str(images)]
    assert main(argv) == 3
    assert "class_0/000.png" in capsys.readouterr().err
    assert read(tmp_path / "out")[0]["images"] == "2"
    for path in images.rglob("*.png"):
        path.write_bytes(b"no image")
    assert main(argv) == 2
    assert "--images" in capsys.readouterr().err
    assert main([*argv[:3], str(images), "--images", str(images)]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_label_is_no_formula_and_no_markdown_cell(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    label = "@a|$x^$<script>[b](c)"
    assert main(["analyse", f"{label}={plain}", "--out", str(out), "--limit", "1"]) == 0
    assert read(out)[0]["label"] == f"'{label}"
    text = (out / "analysis.md").read_text(encoding="utf-8")
    assert "| @a\\|$x^$&lt;script&gt;\\[b\\](c) " in text
    assert "<script>" not in text


# UMAP

needs_umap = pytest.mark.skipif(
    importlib.util.find_spec("umap") is None, reason="needs umap-learn: pip install .[umap]"
)


def clusters() -> PositionTable:
    """Two far clusters of 18 patches each in 24 dimensions."""
    rows = np.random.default_rng(0).normal(size=(36, 24))
    rows[18:] += 100
    return PositionTable(6, rows)


@needs_umap
def test_what_is_near_stays_near() -> None:
    table = clusters()
    plane = umap_plane(table, 0)
    assert plane.shape == (36, 2)
    apart = np.linalg.norm(plane[:18].mean(axis=0) - plane[18:].mean(axis=0))
    assert apart > 2 * max(part.std() for part in (plane[:18], plane[18:]))
    assert np.array_equal(plane, umap_plane(table, 0))
    assert not np.array_equal(plane, umap_plane(table, 1))


@needs_umap
def test_the_command_draws_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["analyse", "patch14_vit", "--umap", "--limit", "1", "--out", str(out)]) == 0
    assert (out / "umap.png").stat().st_size > 5_000
    assert "(umap.png)" in (out / "analysis.md").read_text("utf-8")


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)
    out = tmp_path / "out"
    assert main(["analyse", "cifar_vit", "--umap", "--out", str(out)]) == 2
    assert "pip install .[umap]" in capsys.readouterr().err
    assert not out.exists()
