"""Accuracy, Diff. Norm. and consistency: by hand, at the limits, and through the command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision.transforms import v2

from mjp_privacy.cli import main
from mjp_privacy.data import ImageSource, Preprocessing, open_images
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import Grid, draw_masks, shuffle_patches
from mjp_privacy.models.live.modules import load_module
from mjp_privacy.models.zoo import NamedCheckpoint
from mjp_privacy.training.commands import EvaluationArguments
from mjp_privacy.training.config import plain
from mjp_privacy.training.evaluation import (
    Protocol,
    load_checkpoint,
    measure,
    protocols,
)
from mjp_privacy.uploads.record import save_weights
from tests.helpers.families import checkpoint
from tests.helpers.models import tiny
from tests.helpers.refusals import refused
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
        mask, order = draw_masks([record.image_id], grid=Grid(4, 4), gamma=0.5, round=0, seed=0)
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


# whose way of measuring ---------------------------------------------------------------------------


def test_the_authors_normalise_every_model_with_imagenets_figures(tmp_path: Path) -> None:
    """Whatever the file states; what the command line gives goes first."""
    path = str(saved(tmp_path / "one.safetensors", tiny(torch.float32)))
    own, authors = ((0.5,) * 3, (0.25,) * 3), (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, own),
        ({"preset": "authors_code", "mean": (0.4,)}, ((0.4,) * 3, authors[1])),
        ({"preset": "authors_code", "std": (0.3,)}, (authors[0], (0.3,) * 3)),
    ]
    for given, (mean, std) in cases:
        arguments = EvaluationArguments((path,), **given)
        card = load_checkpoint(NamedCheckpoint("one", path), arguments).card
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
    mask, _ = draw_masks(ids, grid=Grid(4, 4), gamma=0.9, round=0, seed=0)
    assert ours["masked_patches"].tolist() == mask.sum(-1).tolist()
    assert set(shared["masked_patches"]) == {int(mask[0].sum())}
    assert shared["diff_norm"].iloc[0] == pytest.approx(ours["diff_norm"].iloc[0])


# the command --------------------------------------------------------------------------------------


def evaluate(images: ImageSource, *words: object) -> int:
    return main(["evaluate", "--data", str(images.path), *map(str, words), "--device", "cpu"])


def test_the_command_writes_a_table_and_a_sweep_with_the_papers_figures_beside(
    images: ImageSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that shuffling does not change, and one that stands beside Table 3's."""
    without = {"position_embedding": "none", "unknown_embedding": False, "dal": "none"}
    exposed = {"position_embedding": "exposed"}
    mjp = saved(
        tmp_path / "mjp.safetensors",
        tiny(torch.float32),
        recipe=plain(small(jigsaw={"gamma": 0.03})),
    )
    other = saved(
        *(tmp_path / "other.safetensors", tiny(torch.float32, **exposed)),
        **{**exposed, "recipe": plain(small(model=without, jigsaw={"shuffle": "none"}))},
    )
    (images.path / "class_0" / "001.png").write_bytes(b"no image")
    out = tmp_path / "out"
    words = ["--checkpoint", mjp, f"no PEs={other}", "--gamma", 0.27, 0.5, "--out", out]
    assert evaluate(images, *words) == 3
    printed = capsys.readouterr().out
    names = ("per_image.csv", "summary.csv", "sweep.png", "table.md")
    assert sorted(path.name for path in out.iterdir()) == list(names)
    rows = pd.read_csv(out / "per_image.csv")
    assert len(rows) == 2 * 2 * 15
    assert set(rows.loc[rows["status"] == "failed", "image_id"]) == {"class_0/001.png"}
    table = pd.read_csv(out / "summary.csv")
    assert (set(table["n"]), set(table["failed"])) == ({14}, {1})
    table = table.set_index(["model", "gamma"])
    own = rows[(rows["model"] == "mjp") & (rows["gamma"] == 0.5)]
    assert table.loc[("mjp", 0.5), "consistency"] == pytest.approx(100 * own["consistency"].mean())
    assert table.loc[("no PEs", 0.5), ["consistency", "paper_consistency"]].tolist() == [100, 100]
    assert "Table 4, B: A − PEs" in printed
    assert "14 (1 failed)" in printed
    line = table.loc[("mjp", 0.27)]
    for name, figure, form in (("consistency", 82.9, ".1f"), ("diff_norm", 8.96, ".2f")):
        assert f"{figure} ({line[name] - figure:+{form}})" in printed
    files = [f"{f}={checkpoint(tmp_path / f, f, num_classes=5)}" for f in ("swin", "resnet")]
    assert evaluate(images, "--json", "--checkpoint", *files) == 3
    swin, resnet = json.loads(capsys.readouterr().out)["lines"]
    assert (swin["model"], swin["n"], resnet["model"], resnet["n"]) == ("swin", 14, "resnet", 14)
    assert swin["cond_w"] >= 1
    assert resnet["cond_w"] is None  # no patch embedding


def test_the_authors_groups_have_a_gamma_each_and_an_image_counts_once(
    images: ImageSource, tmp_path: Path
) -> None:
    """Accuracy and consistency are measured on different pictures of each image."""
    (images.path / "class_0" / "001.png").write_bytes(b"no image")
    file, out = saved(tmp_path / "model.safetensors", undecided()), tmp_path / "out"
    words = ["--checkpoint", file, "--preset", "authors_code"]
    assert evaluate(images, *words, "--out", out) == 3
    table = pd.read_csv(out / "summary.csv").set_index("gamma")
    assert set(table["preset"]) == {"authors_code"}
    assert table.index.tolist() == [0.5, 0.9]
    assert table["top1_shuffled"].notna().tolist() == [False, True]
    assert table["consistency"].notna().tolist() == [True, False]
    out = tmp_path / "two"
    assert evaluate(images, *words, "--gamma", 0.1, 0.5, "--out", out) == 3
    assert len(pd.read_csv(out / "per_image.csv")) == 2 * 2 * 15
    table = pd.read_csv(out / "summary.csv")
    assert (table["n"].tolist(), table["failed"].tolist()) == ([14, 14], [1, 1])


def test_a_network_of_timms_is_measured_by_its_own_forward(
    images: ImageSource, tmp_path: Path
) -> None:
    """One that pools by attention and has no class token: what its classifier reads moves."""
    torch.manual_seed(0)
    net = timm.create_model("test_vit3", img_size=64, num_classes=5).eval()
    for weight in (parameter for parameter in net.parameters() if parameter.ndim > 1):
        torch.nn.init.normal_(weight, std=0.1)
    save_weights(tmp_path / "timm.safetensors", load_module(net, mean=0.5, std=0.5))
    words = "--checkpoint", tmp_path / "timm.safetensors", "--gamma", 0.9
    assert evaluate(images, *words, "--out", tmp_path / "out") == 0
    rows = pd.read_csv(tmp_path / "out" / "per_image.csv").set_index("image_id")
    prepare = Preprocessing(64)
    for record in images.records:
        x = (prepare(images.decode(record)) - 0.5) / 0.5
        with torch.no_grad():
            predicted = int(net(x[None]).argmax())
        assert rows.loc[record.image_id, "top1"] == (predicted == record.label)
    assert (rows["diff_norm"] > 0).all()


def test_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "one.safetensors", tiny(torch.float32))
    mine = tmp_path / "mine" / "summary.csv"
    mine.parent.mkdir()
    mine.touch()
    part = class_folders(tmp_path / "part", images=2, side=32)
    good = {"--checkpoint": "one.safetensors", "--data": "part", "--device": "cpu"}
    for changes, named in (
        ({"--gamma": "1.2"}, "1.2"),
        ({"--checkpoint": "nowhere.pth"}, "nowhere.pth"),
        ({"--checkpoint": "packaged:nothing"}, "nothing"),
        ({"--out": "mine"}, "mine"),
        ({"--data": "part"}, "--data"),  # it would be numbered anew, as other classes
    ):
        command = ["evaluate", *(word for option in (good | changes).items() for word in option)]
        refused(capsys, named, *command)
    assert [*mine.parent.iterdir()] == [mine]
    for label in range(3):  # called by its index, a class is where it belongs
        (part / f"class_{label}").rename(part / str(label))
    assert main(command) == 0
