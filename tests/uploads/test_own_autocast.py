"""A user's gradients under autocast: read off the gradient or named, attacked and saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mjp_privacy import attack_gradients, save_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel
from mjp_privacy.uploads.folder import UploadFolder
from mjp_privacy.uploads.memory import own_uploads
from mjp_privacy.uploads.record import stacked
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images
from tests.helpers.uploads import check_uploads
from tests.uploads.test_attack_gradients import gradient_of

LABEL = torch.tensor([3])
REMARK = "show the rounding of bf16 autocast"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return planted_model().float()


@pytest.fixture(scope="module")
def image() -> Tensor:
    return planted_images(1).float()


@pytest.fixture(scope="module")
def gradients(model: LoadedModel, image: Tensor) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return gradient_of(model, image, LABEL)


def test_it_is_read_off_the_gradient_and_makes_attacks_stronger(
    model: LoadedModel, gradients: dict[str, Tensor], image: Tensor
) -> None:
    (update,) = own_uploads(model, gradients, {}).view().updates
    assert update.autocast == "bf16"
    slightly_other = {**gradients, "pos_embed": gradients["pos_embed"] * 1.0017}
    known, unknown = (
        attack_gradients(model, sent, images=image, attacks="patch_gradient").scores
        for sent in (gradients, slightly_other)
    )
    assert known is not None
    assert unknown is not None
    assert known["psnr"].item() > unknown["psnr"].item() + 1


def test_a_user_may_name_it(model: LoadedModel, gradients: dict[str, Tensor]) -> None:
    sent = {name: g for name, g in gradients.items() if name != "pos_embed"}
    assert own_uploads(model, sent, {}).view().updates[0].autocast == "none"
    named = own_uploads(model, sent, {"autocast": "bf16"})
    assert named.view().updates[0].autocast == "bf16"
    with pytest.raises(UserError, match=r"autocast: .*bf16"):
        attack_gradients(model, gradients, autocast="half")  # type: ignore[arg-type]


def test_a_saved_upload_says_it(
    model: LoadedModel, gradients: dict[str, Tensor], tmp_path: Path
) -> None:
    save_upload(tmp_path, model, gradients, name="one", labels=3)
    (upload,) = UploadFolder(tmp_path).entries()
    assert upload.header.autocast == "bf16"
    assert stacked([upload], list(gradients), torch.device("cpu")).autocast == "bf16"
    assert REMARK not in check_uploads(tmp_path)[0]


def test_check_says_what_a_header_leaves_out(
    model: LoadedModel, gradients: dict[str, Tensor], tmp_path: Path
) -> None:
    path = save_upload(tmp_path, model, gradients, name="one", labels=3).with_suffix(".json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in content.items() if k not in ("autocast", "seal")}))
    text, usable = check_uploads(tmp_path)
    assert usable, text
    assert REMARK in text
    assert '"autocast": "bf16"' in text
    assert "classifier's gradient" not in text
