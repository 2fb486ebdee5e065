"""A user's own gradients written as a recorded upload, checked and attacked from there; those of a
client under autocast, read off the gradient or named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mjp_privacy import attack_gradients, save_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models import LoadedModel
from mjp_privacy.uploads.memory import own_uploads
from mjp_privacy.uploads.record import stacked
from tests.helpers.models import planted_model
from tests.helpers.planted import gradient_of, planted_images
from tests.helpers.uploads import check_uploads, load_uploads

ATTACKS = {"name": "uploads", "attacks": [{"name": "patch_gradient"}]}
Gradients = dict[str, Tensor]


def test_what_is_saved_is_attacked_like_the_gradients(
    model: LoadedModel, gradients: Gradients, tmp_path: Path
) -> None:
    images, folder = planted_images(1).float(), tmp_path / "uploads"
    sent = gradient_of(model, images.double(), torch.tensor([3]))
    path = save_upload(folder, model, sent, name="round_3", images=images, round=3)
    assert path == folder / "round_3.safetensors"
    (upload,) = load_uploads(folder)
    assert upload.header.round == 3
    assert upload.header.labels is None  # nobody gave it: the attacker reads it off the gradient
    text, usable = check_uploads(folder)
    assert usable
    assert "private images known" in text
    assert attack_uploads(load_experiment(ATTACKS), folder, tmp_path / "run").exit_code == 0
    (cell,) = RunStore(tmp_path / "run").read_cells()
    psnr = RunStore(tmp_path / "run").read(cell["run_id"])["psnr.standard"].item()
    direct = attack_gradients(model, sent, images=images, attacks="patch_gradient").scores
    assert direct is not None
    assert min(psnr, 100) == pytest.approx(min(direct["psnr"].item(), 100), abs=0.5)


def test_what_is_given_is_kept_and_nothing_else(
    model: LoadedModel, gradients: Gradients, tmp_path: Path
) -> None:
    """A batch whose labels nobody knows keeps its images."""
    save_upload(tmp_path, model, gradients, name="a", series="cat", label="my client", labels=3)
    images = planted_images(2)
    both = gradient_of(model, images, torch.tensor([3, 4]))
    save_upload(tmp_path, model, both, name="b", images=images)
    one, two = load_uploads(tmp_path)
    assert (one.header.labels, one.header.series, one.header.label) == ((3,), "cat", "my client")
    assert one.truth() is None
    assert (two.header.labels, two.header.batch) == (None, 2)
    truth = two.truth()
    assert truth is not None
    assert truth.image_ids == ("b 0", "b 1")


def test_what_is_no_single_upload_is_refused(
    model: LoadedModel, gradients: Gradients, tmp_path: Path
) -> None:
    save_upload(tmp_path, model, gradients)
    two = {name: torch.stack([g, g]) for name, g in gradients.items()}
    mistakes: list[tuple[Path, Any, str, str]] = [
        (tmp_path, gradients, "upload", "upload.json"),  # nothing is overwritten
        (tmp_path, [gradients, gradients], "b", r"2 upload\(s\)"),
        (tmp_path, two, "b", r"2 independent step\(s\)"),
        (tmp_path / "upload.json", gradients, "b", "folder"),
    ]
    for folder, sent, name, named in mistakes:
        with pytest.raises(UserError, match=named):
            save_upload(folder, model, sent, name=name)


def test_a_model_without_a_classifier_is_attacked_but_not_saved(tmp_path: Path) -> None:
    import timm

    torch.manual_seed(0)
    shape: dict[str, Any] = {"img_size": 64, "patch_size": 8, "depth": 2, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", **shape)
    image = planted_images(1, 64).float()
    model((image - 0.5) / 0.5).square().sum().backward()
    leak = attack_gradients(model, mean=0.5, std=0.5, images=image, attacks="patch_gradient")
    assert leak.best.is_certain
    with pytest.raises(UserError, match="classifier"):
        save_upload(tmp_path, model, mean=0.5, std=0.5)


# under autocast -----------------------------------------------------------------------------------

REMARK = "show the rounding of bf16 autocast"


@pytest.fixture(scope="module")
def single() -> LoadedModel:
    """The model in float32."""
    return planted_model().float()


@pytest.fixture(scope="module")
def halved(single: LoadedModel) -> Gradients:
    """Its gradient under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return gradient_of(single, planted_images(1).float(), torch.tensor([3]))


def test_autocast_is_read_off_the_gradient_and_makes_attacks_stronger(
    single: LoadedModel, halved: Gradients
) -> None:
    """Or it is named, where the gradient does not tell."""
    slightly_other = {**halved, "pos_embed": halved["pos_embed"] * 1.0017}
    untold = {name: g for name, g in halved.items() if name != "pos_embed"}
    for sent, facts, kind in (
        (halved, {}, "bf16"),
        (untold, {}, "none"),
        (untold, {"autocast": "bf16"}, "bf16"),
    ):
        assert own_uploads(single, sent, facts).view().updates[0].autocast == kind
    known, unknown = (
        attack_gradients(
            single, sent, images=planted_images(1).float(), attacks="patch_gradient"
        ).best.psnr
        for sent in (halved, slightly_other)
    )
    assert known > unknown + 1


def test_a_saved_upload_says_it_and_check_what_a_header_leaves_out(
    single: LoadedModel, halved: Gradients, tmp_path: Path
) -> None:
    path = save_upload(tmp_path, single, halved, name="one", labels=3).with_suffix(".json")
    (upload,) = load_uploads(tmp_path)
    assert upload.header.autocast == "bf16"
    assert stacked([upload], list(halved), torch.device("cpu")).autocast == "bf16"
    assert REMARK not in check_uploads(tmp_path)[0]
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in content.items() if k not in ("autocast", "seal")}))
    text, usable = check_uploads(tmp_path)
    assert usable, text
    assert REMARK in text
    assert "classifier's gradient" not in text
