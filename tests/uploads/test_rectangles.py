"""Pictures that are no squares: in networks of any library, in runs, in recorded uploads."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from mjp_privacy import attack_gradients, load_model, save_upload
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import size_of
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers import runs
from tests.helpers.planted import gradient_of
from tests.helpers.runs import attack, tiny, values
from tests.uploads.networks import FIRST, Own, Rectangle, leak_of, photographs

SIZE = (48, 32)


def test_batches_and_networks_without_a_table_are_read_as_squares_are() -> None:
    torch.manual_seed(0)
    given = {"attacks": "token_peeling", "batch": 2, "img_size": SIZE}
    assert leak_of(Rectangle(), photographs(2, SIZE), **given).best.exact == 2
    sizes: Any = {"img_size": SIZE, "num_classes": 10, "depth": 2}
    rope = timm.create_model("vit_small_patch16_dinov3", **sizes)
    found = leak_of(rope, photographs(1, SIZE), attacks="token_peeling")
    assert (found.best.exact, found.best.verified) == (1, 1)


def test_a_size_that_nothing_shows_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"img_size=.height, width"):
        leak_of(Rectangle(), photographs(1, SIZE))
    for wrong in ("48x32", (48, 32, 3), (48.0, 32), {}, -8, True, 0):
        with pytest.raises(UserError, match="img_size"):
            leak_of(Rectangle(), photographs(1, SIZE), img_size=wrong)


def test_a_certain_picture_names_the_shape_that_it_was_taken_to_have() -> None:
    """A table in one row, which a network adds to pictures of 32 × 32 and of 16 × 64 alike."""
    torch.manual_seed(0)
    network = Own(**FIRST)
    square, wide = photographs(1), photographs(1, (16, 64))
    assert "16×64" in leak_of(network, square).verdict
    assert "16×64" not in leak_of(network, square, img_size=32).verdict
    nn.functional.cross_entropy(network((wide - 0.5) / 0.5), torch.tensor([0])).backward()
    found = attack_gradients(network, mean=0.5, std=0.5)
    assert found["patch_gradient"].is_certain  # the patches are the client's, as a square
    assert "16×64" in found.verdict
    arranged = to_patches(found["patch_gradient"].images.double(), 8)
    torch.testing.assert_close(arranged, to_patches(wide, 8), rtol=0, atol=1e-4)


def test_what_lies_beyond_whole_patches_is_said() -> None:
    torch.manual_seed(0)
    network = timm.create_model(
        "eva02_tiny_patch14_224", img_size=32, num_classes=10, patch_size=8, depth=2
    )
    network.patch_embed.img_size = (36, 36)  # as timm has it of sizes that are no multiple
    network(photographs(1, 36).float()).sum().backward()
    found = attack_gradients(network, mean=0.5, std=0.5, attacks=["patch_gradient"])
    assert any("36×36" in note or "36 px" in note for note in found.notes)


# runs, recorded uploads, commands -----------------------------------------------------------------


def test_a_run_scores_and_reports_pictures_of_one_shape(tmp_path: Path) -> None:
    """Under MJP, by lattice and by matching: per image, as for squares."""
    model = {
        **{"checkpoint": "random", "img_size": [48, 32], "patch_size": 8, "embed_dim": 208},
        **{"depth": 1, "num_heads": 4, "num_classes": 10, "mean": 0.5, "std": 0.5},
        "unknown_embedding": True,
    }
    attacks = [
        {"name": "pixel_lattice"},
        {"name": "mean_image"},
        {"name": "inverting_gradients", "options": {"steps": 2}},
        {"name": "gradvit", "options": {"steps": 2, "seeds": 1}},
    ]
    grid = [{"models": ["wide"], "settings": ["a", "c"], "gammas": [0.27]}]
    config = tiny(models={"wide": model}, grid=grid, attacks=attacks, dtypes=["float32"])
    images = runs.photographs(tmp_path / "images", 2)
    summary = attack(images, tmp_path / "run", config)
    assert summary.exit_code == 0
    for setting in "ac":
        found = values(tmp_path / "run", attack_name="pixel_lattice", setting=setting)
        assert (found.xs("psnr", level="metric") > 60).all()
    report = tmp_path / "report"
    assert main(["report", str(tmp_path / "run"), "--out", str(report)]) == 0
    assert "48×32" in (report / "table.md").read_text()


def test_an_upload_is_recorded_checked_and_attacked(tmp_path: Path) -> None:
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 208, "depth": 1, "num_heads": 4}
    model = load_model(checkpoint="random", **sizes, num_classes=10, mean=0.5, std=0.5)
    images, labels = photographs(1, SIZE).float(), torch.tensor([3])
    gradients = gradient_of(model, images, labels)
    assert attack_gradients(model, gradients, labels=labels, images=images).best.exact == 1
    folder = tmp_path / "uploads"
    save_upload(folder, model, gradients, labels=labels, images=images)
    assert main(["check", str(folder)]) == 0
    one = load_experiment({"name": "one", "attacks": [{"name": "patch_gradient"}]})
    assert attack_uploads(one, folder, tmp_path / "run", device="cpu").exit_code == 0
    found = values(tmp_path / "run", attack_name="patch_gradient")
    assert (found.xs("psnr", level="metric") > 60).all()


def test_a_size_is_one_number_or_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert (size_of("224"), size_of("96x64"), size_of(None)) == (224, (96, 64), None)
    given = {"checkpoint": "random", "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    given |= {"num_classes": 5, "mean": 0.5, "std": 0.5}
    assert load_model(**given, img_size=[32, 32]).card.img_size == 32
    for wrong in ([48], [48, 32, 8], [48, True], [48, 0], "48", 1.5):
        with pytest.raises(UserError, match="img_size"):
            load_model(**given, img_size=wrong)
    with pytest.raises(UserError, match=r"48×30/8"):
        load_model(**given, img_size=(48, 30))
    assert main(["check", "--model", "vit_tiny_patch16_224", "--img-size", "96y"]) == 2
    assert "'96y'" in capsys.readouterr().err
    assert main(["check", "--model", "vit_tiny_patch16_224", "--img-size", "96x64"]) == 0
    assert {"24", "16×16", "96×64"} <= set(capsys.readouterr().out.split())
