"""The command `mjp analyse`: what it prints and writes, what is the same again, what it refuses."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mjp_privacy.cli import main
from mjp_privacy.paper.positions import PositionTable, noise_table
from mjp_privacy.paper.positions_report import umap_plane
from mjp_privacy.training.config import plain as recipe_of
from mjp_privacy.training.learner import build_network
from tests.helpers.models import tiny
from tests.helpers.refusals import refused
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


def analyse(*words: object, out: Path, code: int = 0) -> list[dict[str, str]]:
    """What the command writes into analysis.csv; it ends with this code."""
    assert main(["analyse", *map(str, words), "--out", str(out), "--threads", "1"]) == code
    with (out / "analysis.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


LABEL = "@a|$x^$<script>[b](c)"


def test_a_grid_and_noise_are_told_apart_and_all_files_are_the_same_again(
    plain: Path, noisy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A label is no formula, no element and no cell of Markdown; an image that cannot be read is
    left out and told."""
    images = class_folders(tmp_path / "images", images=2, side=40)
    (images / "class_0" / "000.png").write_bytes(b"no image")
    outs = [tmp_path / "one", tmp_path / "two"]
    for out in outs:
        rows = analyse(f"{LABEL}={plain}", f"MJP={noisy}", "--images", images, out=out, code=3)
        printed, said = capsys.readouterr()
        assert "class_0/000.png" in said
        first, second, empty, *table = printed.splitlines()
        assert f"{LABEL}: the patches' places can be read from it." in first
        assert second.startswith("MJP: a linear map reads little of the patches' places.")
        assert (empty, len(table)) == ("", 9)  # heads, rule, models, noise, the paper's, a path
    noise = [("noise", "N(0, 1), not trained")] * 10
    paper = [("paper", n) for n in ("DeiT-S", "DeiT-S+MJP", "DeiT-S+MJP (DAL-LN)")]
    by_kind = [(row["kind"], row["label"]) for row in rows]
    assert by_kind == [("model", f"'{LABEL}"), ("model", "MJP"), *noise, *paper]
    linear, drawn = rows[:2]
    assert [float(linear[f"variance_{k}"]) for k in (3, 7)] == pytest.approx([100, 100])
    assert float(linear["mae_2d"]) == pytest.approx(0, abs=1e-5)
    assert linear["dimensions_for_90"] in ("1", "2")
    shares = [float(row["variance_3"]) for row in rows if row["kind"] == "noise"]
    assert min(shares) - 3 < float(drawn["variance_3"]) < max(shares) + 3
    assert (linear["images"], linear["grid"], linear["width"]) == ("5", "4", "24")
    pictures = {"analysis.png", "attention_1.png", "attention_2.png"}
    texts = {"analysis.md", "analysis.csv", "analysis.json"}
    assert {path.name for path in outs[0].iterdir()} == texts | pictures
    for name in texts:
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()
    for name in pictures:
        one, two = (np.array(Image.open(out / name)) for out in outs)
        assert (one == two).all()
        assert one.std() > 10  # there is something on it
    text = (outs[0] / "analysis.md").read_text(encoding="utf-8")
    assert "| @a\\|$x^$&lt;script&gt;\\[b\\](c) " in text
    assert "<script>" not in text
    content = json.loads((outs[0] / "analysis.json").read_text(encoding="utf-8"))
    assert content["curves"]["MJP"]["variance"][-1] == pytest.approx(1)
    assert len(content["rows"]) == len(rows)


@pytest.mark.nightly
def test_a_model_without_position_embeddings_or_of_another_grid_beside_others(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exposed = tiny(torch.float32, position_embedding="exposed")
    without = saved(tmp_path / "without.safetensors", exposed, position_embedding="exposed")
    out, new = tmp_path / "out", tmp_path / "new"
    row = analyse(plain, without, "--limit", 2, out=out)[1]
    assert "without: " in capsys.readouterr().out
    assert row["mae_2d"] == row["grid"] == ""
    assert float(row["head_diversity"]) > 0
    larger = saved(tmp_path / "larger.safetensors", tiny(torch.float32, img_size=48), resize=48)
    for named, words, where in (
        ("analysis.csv", [without], out),
        ("without", [without], new),
        ("--img-size", [plain, larger], new),
    ):
        refused(capsys, named, "analyse", *words, "--out", where)
        assert not new.exists()
    analyse(plain, larger, "--limit", 2, "--img-size", 32, out=new)
    text = (new / "analysis.md").read_text(encoding="utf-8")
    assert "larger: pos_embed resampled from 6×6 to 4×4" in text


@pytest.mark.nightly
@pytest.mark.parametrize(("left", "share"), [(1.06, 50.9), (1.0, 48.0)])
def test_a_table_that_is_mostly_its_start_is_said_to_be(
    left: float, share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise beside the start from the recipe's seed: a little more than half, then less."""
    config = small(model={"unknown_embedding": True})
    model = build_network(config)
    with torch.no_grad():
        other = torch.from_numpy(noise_table(4, 16, seed=3).rows).float()
        model.table[0, 1:] = left * model.table[0, 1:] + other
    facts = {"num_heads": 2, "resize": 28, "recipe": recipe_of(config)}
    path = saved(tmp_path / "mine.safetensors", model, **facts)
    (row, *_) = analyse(path, "--limit", 1, out=tmp_path / "out")
    assert float(row["start_share"]) == pytest.approx(share, abs=0.5)
    said = "mine: mostly the noise it started from." in capsys.readouterr().out
    assert said == (share > 50)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("nowhere.pth",), "nowhere.pth"),
        (("cifar_vitt",), "cifar_vit?"),
        (("a=cifar_vit", "a=cifar_vit_mjp"), "NAME=PATH"),
        (("cifar_vit", "--seed", "-1"), "--seed"),
        (("cifar_vit", "--threads", "0"), "--threads"),
        (("cifar_vit", "--img-size", "14"), "2×2"),
        (("cifar_vit", "--images", "spoiled"), "--images"),
        (("cifar_vit", "--images", "."), "--out"),
        (("cifar_vit", "--umap"), "pip install .[umap]"),
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
    monkeypatch.setitem(sys.modules, "umap", None)
    class_folders(tmp_path / "spoiled", images=1, side=40)
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"no image")
    Path("words.txt").write_text("no weights")
    refused(capsys, named, "analyse", *words, "--out", "out")


@pytest.mark.skipif(importlib.util.find_spec("umap") is None, reason="needs umap-learn")
def test_umap_keeps_near_what_is_near_and_is_drawn(tmp_path: Path) -> None:
    """Two far clusters of 18 patches each in 24 dimensions."""
    rows = np.random.default_rng(0).normal(size=(36, 24))
    rows[18:] += 100
    table = PositionTable(6, rows)
    plane = umap_plane(table, 0)
    apart = np.linalg.norm(plane[:18].mean(axis=0) - plane[18:].mean(axis=0))
    assert apart > 2 * max(part.std() for part in (plane[:18], plane[18:]))
    assert np.array_equal(plane, umap_plane(table, 0))
    assert not np.array_equal(plane, umap_plane(table, 1))
    out = tmp_path / "out"
    analyse("patch14_vit", "--umap", "--limit", 1, out=out)
    assert (out / "umap.png").stat().st_size > 5_000
    assert "(umap.png)" in (out / "analysis.md").read_text("utf-8")
