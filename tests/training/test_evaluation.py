"""Accuracy, Diff. Norm. and consistency: by hand, at the limits, and through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.transforms import v2

from mjp_privacy.cli import main
from mjp_privacy.core import progress
from mjp_privacy.data import ImageSource, Preprocessing, open_images
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import draw_masks, shuffle_patches
from mjp_privacy.models.zoo import NamedCheckpoint
from mjp_privacy.training.config import plain
from mjp_privacy.training.evaluation import (
    Evaluated,
    Protocol,
    load_checkpoint,
    markdown,
    measure,
    protocols,
    summary_table,
)
from mjp_privacy.training.evaluation_arguments import EvaluationArguments
from mjp_privacy.training.published import TABLE3
from tests.helpers.families import checkpoint
from tests.helpers.models import tiny
from tests.helpers.training import class_folders, small

FACTS = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "num_heads": 3, "resize": 32}


@pytest.fixture
def images(tmp_path: Path) -> ImageSource:
    return open_images(class_folders(tmp_path / "data", images=3, classes=5, side=40))


def saved(path: Path, model: LoadedModel, **more: object) -> Path:
    metadata = {key: json.dumps(value) for key, value in {**FACTS, **more}.items()}
    tensors = {name: p.detach().float().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, path, metadata)
    return path


def undecided(**changes: Any) -> LoadedModel:
    """Without the biases that make all images alike, so that shuffling changes some answers."""
    model = tiny(torch.float32, **changes)
    with torch.no_grad():
        if model.position_embedding == "learned":
            model.table.mul_(3)
        if model.unk_embed is not None:
            model.unk_embed.mul_(3)
        model.patch_embed.proj.bias.zero_()
        model.head.bias.zero_()
    return model


def measured(model: LoadedModel, images: ImageSource, *gammas: float, **more: Any) -> pd.DataFrame:
    return measure(model, images, images.records, Protocol(gammas=gammas, **more))


# figures ------------------------------------------------------------------------------------------


def test_every_figure_by_hand(tmp_path: Path) -> None:
    images = open_images(class_folders(tmp_path / "data", images=3, classes=5, side=32))
    model = undecided(unknown_embedding=True, resize=32)
    rows = measured(model, images, 0.5).set_index("image_id")
    assert 0 < rows["consistency"].mean() < 1
    assert 0 < rows["top1"].astype(float).mean() < 1
    for record in images.records:
        pixels = torch.from_numpy(np.array(images.decode(record)))
        image = (pixels.permute(2, 0, 1) / 255)[None]
        mask, order = draw_masks([record.image_id], grid=4, gamma=0.5, round=0, seed=0)
        shuffled = shuffle_patches(image, order, 8)
        fed = [(model.normalize(image), None), (model.normalize(shuffled), mask)]
        features = [model.forward_features(x, m)[:, 0] for x, m in fed]
        logits = [model(x, m)[0] for x, m in fed]
        row = rows.loc[record.image_id]
        distance = (features[0] - features[1]).norm().item()
        assert row["diff_norm"] == pytest.approx(distance, rel=1e-4)
        assert row["predicted"] == logits[0].argmax().item()
        assert row["consistency"] == float(logits[0].argmax() == logits[1].argmax())
        assert row["top1"] == float(logits[0].argmax().item() == record.label)
        assert row["top5"] == 1.0  # of five classes
        assert row["top1_shuffled"] == float(logits[1].argmax().item() == record.label)
        assert row["masked_patches"] == mask.sum().item()


def test_where_shuffling_changes_nothing(images: ImageSource) -> None:
    """Without position embeddings, and at γ = 0."""
    for reading in ("exposed", "strict"):
        rows = measured(undecided(position_embedding=reading), images, 0.27, 0.9)
        assert rows["predicted"].nunique() > 1
        assert (rows["consistency"] == 1).all()
        assert rows["diff_norm"].max() < 1e-3
        assert rows["masked_patches"].max() > 4
    rows = measured(tiny(torch.float32), images, 0.0)
    assert (rows["diff_norm"] == 0).all()
    assert (rows["consistency"] == 1).all()
    assert (rows["top1"] == rows["top1_shuffled"]).all()


def test_an_unreadable_image_is_counted_and_the_papers_figures_stand_beside(
    images: ImageSource,
) -> None:
    (images.path / "class_0" / "001.png").write_bytes(b"no image")
    rows = measured(tiny(torch.float32), images, 0.27, 0.5)
    failed = rows[rows["status"] == "failed"]
    assert len(rows) == 30
    assert list(failed["image_id"]) == ["class_0/001.png"] * 2
    models = [Evaluated("ours", rows, 0.03, TABLE3[0.03])]
    table = summary_table(models)
    assert (list(table["n"]), list(table["failed"])) == ([14, 14], [1, 1])
    ok = rows[(rows["status"] == "ok") & (rows["gamma"] == 0.5)]
    assert table["consistency"][1] == pytest.approx(100 * ok["consistency"].astype(float).mean())
    text = markdown(table, models)
    assert "14 (1 failed)" in text
    for name, figure, form in (("consistency", 82.9, ".1f"), ("top1", 80.5, ".1f")):
        assert f"{figure} ({table[name][0] - figure:+{form}})" in text
    assert f"8.96 ({table['diff_norm'][0] - 8.96:+.2f})" in text


# whose way of measuring ---------------------------------------------------------------------------

OURS, IMAGENET = ((0.5,) * 3, (0.25,) * 3), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(
    ("given", "mean", "std"),
    [
        ({}, *OURS),
        ({"preset": "paper"}, *OURS),
        ({"preset": "authors_code"}, *IMAGENET),
        ({"preset": "authors_code", "mean": (0.4,)}, (0.4,) * 3, IMAGENET[1]),
        ({"preset": "authors_code", "std": (0.3,)}, IMAGENET[0], (0.3,) * 3),
    ],
)
def test_the_authors_normalise_every_model_with_imagenets_figures(
    tmp_path: Path, given: dict[str, Any], mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    """Whatever the file states; what the command line gives goes first."""
    path = str(saved(tmp_path / "one.safetensors", tiny(torch.float32)))
    card = load_checkpoint(NamedCheckpoint("one", path), EvaluationArguments((path,), **given)).card
    assert (card.mean, card.std) == (pytest.approx(mean), pytest.approx(std))


def test_pictures_are_cut_and_squashed_as_torchvision_does() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 90, 3), dtype=np.uint8)
    picture, model = Image.fromarray(pixels), tiny(torch.float32)
    accuracy, consistency = (one.preparation(model) for one in protocols("authors_code"))
    size, bicubic = model.card.img_size, {"interpolation": v2.InterpolationMode.BICUBIC}
    shorter, whole = v2.Resize(size * 256 // 224, **bicubic), v2.Resize((size, size), **bicubic)
    cut = v2.Compose([shorter, v2.CenterCrop(size), v2.PILToTensor()])
    squash = v2.Compose([whole, v2.PILToTensor()])
    assert torch.equal(accuracy(picture), cut(picture) / 255)
    assert torch.equal(consistency(picture), squash(picture) / 255)
    assert not torch.equal(Preprocessing(size)(picture), consistency(picture))
    assert [one.gammas for one in protocols("authors_code", (0.3, 0.1))] == [(0.1, 0.3)] * 2
    assert protocols("paper") == protocols("ours") == (Protocol(),)


def test_one_mask_serves_a_batch_of_the_authors_and_each_image_its_own_here(
    images: ImageSource,
) -> None:
    model = undecided(unknown_embedding=True, resize=32)
    ours = measured(model, images, 0.9)
    shared = measured(model, images, 0.9, mask_per="batch")
    ids = [record.image_id for record in images.records]
    mask, _ = draw_masks(ids, grid=4, gamma=0.9, round=0, seed=0)
    assert ours["masked_patches"].tolist() == mask.sum(-1).tolist()
    assert set(shared["masked_patches"]) == {int(mask[0].sum())}
    assert shared["diff_norm"].iloc[0] == pytest.approx(ours["diff_norm"].iloc[0])


# the command --------------------------------------------------------------------------------------


def test_the_command_writes_a_table_and_a_sweep(
    images: ImageSource,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL", 0.0)
    without = {"position_embedding": "none", "unknown_embedding": False, "dal": "none"}
    recipe = plain(small(model=without, jigsaw={"shuffle": "none"}))
    exposed = {"position_embedding": "exposed"}
    one = saved(tmp_path / "one.safetensors", tiny(torch.float32, unknown_embedding=True))
    two = saved(
        tmp_path / "two.safetensors", tiny(torch.float32, **exposed), **exposed, recipe=recipe
    )
    command = ["evaluate", "--checkpoint", str(one), f"no PEs={two}", "--data", str(images.path)]
    out = tmp_path / "out"
    assert main([*command, "--gamma", "0.27", "0.5", "--out", str(out), "--device", "cpu"]) == 0
    printed, lines = capsys.readouterr()
    count = len(images.records)
    assert f"no PEs: {count}/{count} · " in lines.splitlines()[-1]
    assert "| no PEs |" in printed
    assert "Table 4, B: A − PEs" in printed
    names = ("per_image.csv", "summary.csv", "table.md", "sweep.png")
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    table = pd.read_csv(out / "summary.csv").set_index(["model", "gamma"])
    assert "preset" not in table
    assert table.loc[("no PEs", 0.5), "consistency"] == 100
    assert table.loc[("no PEs", 0.5), "paper_consistency"] == 100
    assert len(pd.read_csv(out / "per_image.csv")) == 2 * 2 * 15


def test_the_authors_groups_have_a_gamma_each_and_an_image_counts_once(
    images: ImageSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accuracy and consistency are measured on different pictures of each image."""
    (images.path / "class_0" / "001.png").write_bytes(b"no image")
    file, out = saved(tmp_path / "model.safetensors", undecided()), tmp_path / "out"
    words = ["evaluate", "--checkpoint", str(file), "--data", str(images.path)]
    words += ["--preset", "authors_code", "--out", str(out)]
    assert main(words) == 3
    assert "authors_code" in capsys.readouterr().out
    table = pd.read_csv(out / "summary.csv").set_index("gamma")
    assert set(table["preset"]) == {"authors_code"}
    assert table.index.tolist() == [0.5, 0.9]
    assert table["top1_shuffled"].notna().tolist() == [False, True]
    assert table["consistency"].notna().tolist() == [True, False]
    assert main([*words, "--gamma", "0.1", "0.5"]) == 3
    assert len(pd.read_csv(out / "per_image.csv")) == 2 * 2 * 15
    table = pd.read_csv(out / "summary.csv")
    assert (table["n"].tolist(), table["failed"].tolist()) == ([14, 14], [1, 1])


def test_a_swin_and_a_resnet_have_a_line_each(
    images: ImageSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"{f}={checkpoint(tmp_path / f, f, num_classes=5)}" for f in ("swin", "resnet")]
    assert main(["evaluate", "--checkpoint", *files, "--data", str(images.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in lines[2:4]}
    assert set(cells) == {"swin", "resnet"}
    assert float(cells["swin"][2]) >= 1
    assert cells["resnet"][2] == "–"  # no patch embedding
    assert [row[4] for row in cells.values()] == ["15", "15"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--gamma", "1.2"], "1.2"),
        (["--seed", "-1"], "seed"),
        (["--checkpoint", "nowhere.pth"], "nowhere.pth"),
        (["--checkpoint", "packaged:nothing"], "nothing"),
        (["--data", "part"], "--data"),  # it would be numbered anew, as other classes
    ],
)
def test_mistakes_are_named(
    images: ImageSource,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"--checkpoint": str(saved(tmp_path / "one.safetensors", tiny(torch.float32)))}
    given |= {"--data": str(images.path)} | dict(zip(more[::2], more[1::2], strict=True))
    part = class_folders(tmp_path / "part", images=2, side=32)
    command = ["evaluate", "--device", "cpu", *(word for pair in given.items() for word in pair)]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    if named == "--data":
        for label in range(3):
            (part / f"class_{label}").rename(part / str(label))
        assert main(command) == 0
