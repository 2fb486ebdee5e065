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
from scipy.stats import binomtest
from torchvision.transforms import v2

from mjp_privacy.cli import main
from mjp_privacy.core import progress
from mjp_privacy.data import ImageSource, Preprocessing, open_images
from mjp_privacy.metrics.statistics import summarise
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
from mjp_privacy.training.published import TABLE1, TABLE3, TABLE4
from tests.helpers.models import tiny
from tests.helpers.training import class_folders, small

FACTS = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "num_heads": 3, "resize": 32}


@pytest.fixture
def images(tmp_path: Path) -> ImageSource:
    return open_images(class_folders(tmp_path / "data", images=3, classes=5, side=32))


def saved(path: Path, model: LoadedModel, **more: object) -> Path:
    metadata = {key: json.dumps(value) for key, value in {**FACTS, **more}.items()}
    tensors = {name: p.detach().float().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, path, metadata)
    return path


def undecided(model: LoadedModel) -> LoadedModel:
    """Without the biases that make all images alike, so that shuffling changes some answers."""
    with torch.no_grad():
        if model.position_embedding == "learned":
            model.table.mul_(3)
        if model.unk_embed is not None:
            model.unk_embed.mul_(3)
        model.patch_embed.proj.bias.zero_()
        model.head.bias.zero_()
    return model


def test_every_figure_by_hand(images: ImageSource) -> None:
    model = undecided(tiny(torch.float32, unknown_embedding=True, resize=32))
    rows = measure(model, images, images.records, Protocol(gammas=(0.5,))).set_index("image_id")
    assert 0 < rows["consistency"].mean() < 1
    assert 0 < rows["top1"].astype(float).mean() < 1
    for record in images.records:
        pixels = torch.from_numpy(np.array(images.decode(record)))
        image = (pixels.permute(2, 0, 1) / 255)[None]
        mask, order = draw_masks([record.image_id], grid=4, gamma=0.5, round=0, seed=0)
        shuffled = shuffle_patches(image, order, 8)
        features = [
            model.forward_features(model.normalize(x), m)[:, 0]
            for x, m in ((image, None), (shuffled, mask))
        ]
        logits = [model(model.normalize(image))[0], model(model.normalize(shuffled), mask)[0]]
        row = rows.loc[record.image_id]
        assert row["diff_norm"] == pytest.approx(
            (features[0] - features[1]).norm().item(), rel=1e-4
        )
        assert row["predicted"] == logits[0].argmax().item()
        assert row["consistency"] == float(logits[0].argmax() == logits[1].argmax())
        assert row["top1"] == float(logits[0].argmax().item() == record.label)
        assert row["top5"] == 1.0  # of five classes
        assert row["top1_shuffled"] == float(logits[1].argmax().item() == record.label)
        assert row["masked_patches"] == mask.sum().item()


@pytest.mark.parametrize("reading", ["exposed", "strict"])
def test_without_position_embeddings_all_stay_the_same(images: ImageSource, reading: str) -> None:
    model = undecided(tiny(torch.float32, position_embedding=reading))
    rows = measure(
        model,
        images,
        images.records,
        Protocol(gammas=(0.27, 0.9)),
    )
    assert rows["predicted"].nunique() > 1
    assert (rows["consistency"] == 1).all()
    assert rows["diff_norm"].max() < 1e-3
    assert rows["masked_patches"].max() > 4


def test_at_gamma_zero_nothing_changes(images: ImageSource) -> None:
    rows = measure(tiny(torch.float32), images, images.records, Protocol(gammas=(0.0,)))
    assert (rows["diff_norm"] == 0).all()
    assert (rows["consistency"] == 1).all()
    assert (rows["top1"] == rows["top1_shuffled"]).all()


def test_an_unreadable_image_is_a_failure_and_counted(images: ImageSource) -> None:
    (images.path / "class_0" / "001.png").write_bytes(b"no image")
    rows = measure(
        tiny(torch.float32),
        images,
        images.records,
        Protocol(gammas=(0.27, 0.5)),
    )
    failed = rows[rows["status"] == "failed"]
    assert len(rows) == 30
    assert list(failed["image_id"]) == ["class_0/001.png"] * 2
    table = summary_table([Evaluated("model", rows, None, None)])
    assert list(table["n"]) == [14, 14]
    assert list(table["failed"]) == [1, 1]
    ok = rows[(rows["status"] == "ok") & (rows["gamma"] == 0.5)]
    assert table["consistency"][1] == pytest.approx(100 * ok["consistency"].astype(float).mean())
    assert "14 (1 failed)" in markdown(table, [Evaluated("model", rows, None, None)])


def test_the_papers_figures_stand_beside_with_the_difference(images: ImageSource) -> None:
    rows = measure(tiny(torch.float32), images, images.records, Protocol(gammas=(0.27,)))
    models = [Evaluated("ours", rows, 0.03, TABLE3[0.03])]
    table = summary_table(models)
    text = markdown(table, models)
    assert f"82.9 ({table['consistency'][0] - 82.9:+.1f})" in text
    assert f"80.5 ({table['top1'][0] - 80.5:+.1f})" in text
    assert f"8.96 ({table['diff_norm'][0] - 8.96:+.2f})" in text
    assert "unadjusted" in text


@pytest.mark.parametrize(
    ("values", "groups", "hits"),
    [
        ([1.0, 1.0], None, (2, 2)),
        ([1.0, 0, 1], None, (2, 3)),
        ([1.0] * 4 + [0.0] * 4, "aaaabbbb", (1, 2)),
    ],
)
def test_a_share_has_wilsons_interval_over_photographs(
    values: list[float], groups: str | None, hits: tuple[int, int]
) -> None:
    """Crops of one photograph, which have one group, make a share no surer."""
    share = summarise(values, ["ok"] * len(values), groups=groups and list(groups)).as_share()
    expected = binomtest(*hits).proportion_ci(method="wilson")
    assert (share.low, share.high) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_the_printed_figures_agree_with_one_another() -> None:
    deit, mjp = TABLE1[2], TABLE1[3]
    assert (TABLE4["A"].top1, TABLE4["A"].consistency) == (deit.top1, deit.consistency)
    assert (TABLE4["J"].top1, TABLE4["J"].consistency) == (mjp.top1, mjp.consistency)
    assert TABLE3[0.03].diff_norm == mjp.diff_norm
    assert TABLE4["B"].consistency == 100


def test_the_command_writes_a_table_and_a_sweep(
    images: ImageSource,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL", 0.0)
    without = {"position_embedding": "none", "unknown_embedding": False, "dal": "none"}
    recipe = plain(small(model=without, jigsaw={"shuffle": "none"}))
    one = saved(tmp_path / "one.safetensors", tiny(torch.float32, unknown_embedding=True))
    two = saved(
        tmp_path / "two.safetensors",
        tiny(torch.float32, position_embedding="exposed"),
        position_embedding="exposed",
        recipe=recipe,
    )
    out = tmp_path / "out"
    command = ["--checkpoint", str(one), f"no PEs={two}", "--data", str(images.path)]
    assert (
        main(["evaluate", *command, "--gamma", "0.27", "0.5", "--out", str(out), "--device", "cpu"])
        == 0
    )
    summary = pd.read_csv(out / "summary.csv")
    assert "preset" not in summary
    theirs = [*command, "--out", str(tmp_path / "theirs"), "--device", "cpu"]
    printed, lines = capsys.readouterr()
    assert main(["evaluate", *theirs, "--preset", "authors_code"]) == 0
    assert "authors_code" in capsys.readouterr().out
    summary = pd.read_csv(tmp_path / "theirs" / "summary.csv")
    assert set(summary["preset"]) == {"authors_code"}
    count = len(images.records)
    assert f"no PEs: {count}/{count} · " in lines.splitlines()[-1]
    assert "| no PEs |" in printed
    assert "Table 4, B: A − PEs" in printed
    assert {path.name for path in out.iterdir()} == {
        *("per_image.csv", "summary.csv", "table.md", "sweep.png")
    }
    table = pd.read_csv(out / "summary.csv").set_index(["model", "gamma"])
    assert table.loc[("no PEs", 0.5), "consistency"] == 100
    assert table.loc[("no PEs", 0.5), "paper_consistency"] == 100
    assert len(pd.read_csv(out / "per_image.csv")) == 2 * 2 * 15


def test_a_part_of_the_class_folders_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would be numbered anew, and the accuracy be that of other classes."""
    path = saved(tmp_path / "one.safetensors", tiny(torch.float32))
    data = class_folders(tmp_path / "part", images=2, side=32)
    command = ["--checkpoint", str(path), "--data", str(data), "--device", "cpu"]
    assert main(["evaluate", *command]) == 2
    assert "--data" in capsys.readouterr().err
    for label in range(3):
        (data / f"class_{label}").rename(data / str(label))
    assert main(["evaluate", *command]) == 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--gamma", "1.2"], "1.2"),
        (["--checkpoint", "nowhere.pth"], "nowhere.pth"),
        (["--checkpoint", "packaged:nothing"], "nothing"),
    ],
)
def test_wrong_gammas_and_missing_checkpoints_are_refused(
    images: ImageSource,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    named: str,
) -> None:
    path = saved(tmp_path / "one.safetensors", tiny(torch.float32))
    checkpoint = [] if "--checkpoint" in more else ["--checkpoint", str(path)]
    command = [*checkpoint, "--data", str(images.path), "--device", "cpu", *more]
    assert main(["evaluate", *command]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("error: ") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("given", "mean", "std"),
    [
        ({}, (0.5,) * 3, (0.25,) * 3),
        ({"preset": "paper"}, (0.5,) * 3, (0.25,) * 3),
        ({"preset": "authors_code"}, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ({"preset": "authors_code", "mean": (0.4,)}, (0.4,) * 3, (0.229, 0.224, 0.225)),
        ({"preset": "authors_code", "std": (0.3,)}, (0.485, 0.456, 0.406), (0.3,) * 3),
    ],
)
def test_the_authors_normalise_every_model_with_imagenets_figures(
    tmp_path: Path, given: dict[str, Any], mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    """Whatever the file states; what the command line gives goes first."""
    path = saved(tmp_path / "one.safetensors", tiny(torch.float32))
    card = load_checkpoint(
        NamedCheckpoint("one", str(path)), EvaluationArguments((str(path),), **given)
    ).card
    assert (card.mean, card.std) == (pytest.approx(mean), pytest.approx(std))


def test_given_gammas_replace_the_presets() -> None:
    assert [one.gammas for one in protocols("authors_code", (0.3, 0.1))] == [(0.1, 0.3)] * 2
    assert protocols("paper") == protocols("ours") == (Protocol(),)


def test_pictures_are_cut_and_squashed_as_torchvision_does() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 90, 3), dtype=np.uint8)
    picture, model = Image.fromarray(pixels), tiny(torch.float32)
    accuracy, consistency = (one.preparation(model) for one in protocols("authors_code"))
    size = model.card.img_size
    cut = v2.Compose(
        [
            v2.Resize(size * 256 // 224, interpolation=v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(size),
            v2.PILToTensor(),
        ]
    )
    squash = v2.Compose(
        [v2.Resize((size, size), interpolation=v2.InterpolationMode.BICUBIC), v2.PILToTensor()]
    )
    assert torch.equal(accuracy(picture), cut(picture) / 255)
    assert torch.equal(consistency(picture), squash(picture) / 255)
    assert not torch.equal(Preprocessing(size)(picture), consistency(picture))


def test_one_mask_serves_a_batch_of_the_authors_and_each_image_its_own_here(tmp_path: Path) -> None:
    images = open_images(class_folders(tmp_path / "data", images=3, classes=4, side=32))
    model = undecided(tiny(torch.float32, unknown_embedding=True, resize=32))
    ours = measure(model, images, images.records, Protocol(gammas=(0.9,)))
    shared = measure(model, images, images.records, Protocol(gammas=(0.9,), mask_per="batch"))
    ids = [record.image_id for record in images.records]
    mask, _ = draw_masks(ids, grid=4, gamma=0.9, round=0, seed=0)
    assert ours["masked_patches"].tolist() == mask.sum(-1).tolist()
    assert set(shared["masked_patches"]) == {int(mask[0].sum())}
    assert shared["diff_norm"].iloc[0] == pytest.approx(ours["diff_norm"].iloc[0])


def test_the_authors_groups_have_a_gamma_each_and_an_image_counts_once(tmp_path: Path) -> None:
    """Accuracy and consistency are measured on different pictures of each image."""
    data = class_folders(tmp_path / "data", images=3, classes=5, side=40)
    (data / "class_0" / "001.png").write_bytes(b"no image")
    file = saved(tmp_path / "model.safetensors", undecided(tiny(torch.float32)))
    words = ["evaluate", "--checkpoint", str(file), "--data", str(data)]
    words += ["--preset", "authors_code", "--out", str(tmp_path / "out")]
    assert main(words) == 3
    table = pd.read_csv(tmp_path / "out" / "summary.csv").set_index("gamma")
    assert table.index.tolist() == [0.5, 0.9]
    assert table["top1_shuffled"].notna().tolist() == [False, True]
    assert table["consistency"].notna().tolist() == [True, False]
    assert main([*words, "--gamma", "0.1", "0.5"]) == 3
    assert len(pd.read_csv(tmp_path / "out" / "per_image.csv")) == 2 * 2 * 15
    table = pd.read_csv(tmp_path / "out" / "summary.csv")
    assert (table["n"].tolist(), table["failed"].tolist()) == ([14, 14], [1, 1])
