"""`mjp attack` on a Swin and a ResNet: closed forms do not apply, gradient matching runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.recorded.loading import load_recorded, outline_recorded
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import load_model
from tests.helpers.families import SIDE, checkpoint
from tests.helpers.runs import attack, cell, photographs, rows, values

REASONS = {
    "swin": "a Swin normalises its embedded patches before any position is added",
    "resnet": "a ResNet has no patch embedding and no position embeddings",
}
CLOSED = ("april", "patch_gradient", "masked_span", "april_optimization", "oracle_inverse")


def grid(family: str, path: Path, **client: Any) -> dict[str, Any]:
    """A config of one network in settings a and c."""
    names = [*CLOSED, "grey"]
    matching = {"name": "inverting_gradients", "options": {"steps": 3}}
    return {
        "name": "others",
        "models": {family: {"checkpoint": str(path)}},
        "attacks": [*({"name": name} for name in names), matching],
        "client": client,
        "grid": [
            {"models": [family], "settings": ["a"]},
            {"models": [family], "settings": ["c"], "gammas": [0.5]},
        ],
    }


@pytest.fixture(params=["swin", "resnet"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_closed_forms_are_unsupported_and_matching_runs(tmp_path: Path, family: str) -> None:
    path = checkpoint(tmp_path / "model", family)
    out = tmp_path / "run"
    attack(photographs(tmp_path / "images", 2), out, grid(family, path))
    table = rows(out)
    refused = table[table["attack"].isin(CLOSED)]
    assert set(refused["status"]) == {"unsupported"}
    assert all(REASONS[family] in reason for reason in refused["reason"])
    assert set(table.loc[~table["attack"].isin(CLOSED), "status"]) == {"ok"}
    for setting in ("a", "c"):
        scores = values(out, attack="inverting_gradients", setting=setting)
        assert (scores.xs("steps", level="metric") == 3).all()
        assert (scores.xs("cosine_distance", level="metric") < 2).all()
        assert "ceiling_psnr" not in scores.index.get_level_values("metric")
    if family == "swin":  # the attacker reads the mask off the table's gradient
        found = values(out, attack="inverting_gradients", setting="c")
        assert (found.xs("mask_recall", level="metric") == 1).all()
        assert (found.xs("mask_precision", level="metric") == 1).all()


def test_a_true_picture_has_no_distance(tmp_path: Path) -> None:
    """The gradient that the attacker computes of the true picture is the uploaded one."""
    from attacks.breaching.matching import UploadedParameters

    model = load_model(checkpoint=checkpoint(tmp_path, "swin"))
    x, labels = torch.rand(1, 3, SIDE, SIDE), torch.tensor([3])
    mask = torch.rand(1, 64) < 0.3
    inputs = ClientInput(x, labels, ["x"], mask)
    sent = FedSGDClient(model).update(inputs).grads
    names = [name for name in sent if not name.startswith("dal_regressor")]
    victim = UploadedParameters(model, names, mask)
    loss = F.cross_entropy(victim(model.normalize(x)), labels)
    for name, mine in zip(names, torch.autograd.grad(loss, list(victim.parameters())), strict=True):
        assert torch.allclose(mine, sent[name][0], atol=1e-6), name
    hidden = (sent["absolute_pos_embed"][0, 0] == 0).all(-1)
    assert torch.equal(hidden, mask[0])


def test_the_pixels_gradient_is_found_beside_localization(tmp_path: Path) -> None:
    from attacks.gradient_matching import _gradients_of_pixels

    model = load_model(checkpoint=checkpoint(tmp_path, "swin"))
    mask = torch.rand(1, 64) < 0.3
    inputs = ClientInput(torch.rand(1, 3, SIDE, SIDE), torch.tensor([3]), ["x"], mask)
    both = FedSGDClient(model, ClientConfig(dal=True, dal_lambda=100.0)).update(inputs)
    alone = FedSGDClient(model).update(inputs).grads["absolute_pos_embed"][0]
    grads = {name: gradient[0] for name, gradient in both.grads.items()}
    assert not torch.allclose(grads["absolute_pos_embed"], alone, atol=1e-4)
    found = _gradients_of_pixels(model, grads, both, mask)["absolute_pos_embed"]
    assert torch.allclose(found, alone, atol=1e-6)


def test_gradients_of_several_images_are_each_its_own(tmp_path: Path, family: str) -> None:
    model = load_model(checkpoint=checkpoint(tmp_path, family))
    x, labels = torch.rand(4, 3, SIDE, SIDE), torch.tensor([0, 1, 2, 3])
    client = FedSGDClient(model, ClientConfig(batch=2))
    sent = client.update(ClientInput(x, labels, list("abcd"))).grads
    parameters = [p for n, p in model.named_parameters() if not n.startswith(("dal", "unk"))]
    names = [n for n, _ in model.named_parameters() if not n.startswith(("dal", "unk"))]
    for step in range(2):
        part = slice(2 * step, 2 * step + 2)
        loss = F.cross_entropy(model(model.normalize(x[part])), labels[part])
        for name, mine in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            assert torch.allclose(mine, sent[name][step], atol=1e-5), name


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ({"positions": "sinusoidal"}, "positions: own and no low-rank adapters"),
        ({"lora": "{rank: 2, targets: [qkv]}"}, "positions: own and no low-rank adapters"),
        ({"mode": "train"}, "batch norm mixes images: clients need client.mode: eval"),
    ],
)
def test_clients_of_plain_vits_are_refused(
    tmp_path: Path, client: dict[str, Any], said: str
) -> None:
    path = checkpoint(tmp_path / "model", "resnet")
    out = tmp_path / "run"
    attack(photographs(tmp_path / "images", 1), out, grid("resnet", path, **client))
    told = cell(out, attack="inverting_gradients", setting="a")["run_id"]
    found = rows(out, [told])
    assert set(found["status"]) == {"unsupported"}
    assert all(said in reason for reason in found["reason"])


def test_recorded_uploads_are_of_plain_vits(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "swin")
    upload: Any = SimpleNamespace(
        check_weights=lambda: None,
        header=SimpleNamespace(mean=None, std=None, model={}),
        weights_path=path,
    )
    for load in (load_recorded, outline_recorded):
        with pytest.raises(UserError, match="expected the weights of a plain ViT, got a swin"):
            load(upload)
