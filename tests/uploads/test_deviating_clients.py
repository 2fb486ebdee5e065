"""What is certain and what is best where a client shuffles, or says which defences it has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mjp_privacy import attack_gradients
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.data import load_images
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import shuffle_patches
from mjp_privacy.uploads.memory import client_step, declared_errors
from tests.helpers.models import planted_model
from tests.uploads.test_attack_gradients import gradient_of

TOGETHER = ["patch_gradient", "patch_jigsaw"]
SIDE = 64


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return planted_model(img_size=SIDE, patch_size=8, embed_dim=96)


def photograph(place: int) -> Tensor:
    return list(load_images("embedded", size=SIDE, limit=place + 1))[place][0].double()[None]


@pytest.mark.parametrize("place", [0, 4])
def test_the_best_picture_of_a_client_that_shuffles_is_the_one_in_order(
    model: LoadedModel, place: int
) -> None:
    plain = photograph(place)
    order = torch.arange(64)
    chosen = torch.randperm(64, generator=torch.Generator().manual_seed(place))[:16]
    order[chosen] = chosen.roll(1)
    fed = shuffle_patches(plain, order[None], model.patch_size)
    sent = gradient_of(model, fed, torch.tensor([3]))
    leak = attack_gradients(model, sent, images=plain, attacks=TOGETHER)
    assert leak.best.attack == "patch_jigsaw"
    assert leak.moved >= 15
    assert leak["patch_gradient"].is_certain
    assert not leak.best.is_certain  # its order is a guess
    assert leak.best.psnr > leak["patch_gradient"].psnr + 10
    assert str(leak.moved) in leak.verdict


@pytest.mark.parametrize("place", range(3))
def test_a_plain_client_s_picture_is_not_taken_for_a_shuffled_one(
    model: LoadedModel, place: int
) -> None:
    plain = photograph(place)
    sent = gradient_of(model, plain, torch.tensor([3]))
    leak = attack_gradients(model, sent, attacks=TOGETHER)
    assert leak.moved == 0
    assert leak.best.attack == "patch_gradient"
    assert leak.best.is_certain


DEFENSES = (
    *("dp_sgd 0.1", "gaussian_noise 0.1", "int8", "float16", "sign", "top_k 0.3", "prune 0.3"),
    *("percentile_privacy", "dp_sgd 0.1 clip 0.5, int8"),
)


@pytest.mark.parametrize("defenses", [text.split(", ") for text in DEFENSES])
def test_what_defences_leave_is_read_off_recipe_and_upload_as_the_client_declares_it(
    model: LoadedModel, defenses: list[str]
) -> None:
    inputs = ClientInput(photograph(0), torch.tensor([3]), ["one"])
    sent = make_upload(model, [inputs], ClientConfig(defenses=tuple(defenses)))
    client = client_step({"defenses": defenses, "batch": 1})
    noise, rounding, _ = declared_errors(client, sent.grads)
    for told, known in ((noise, sent.noise), (rounding, sent.rounding)):
        assert told.keys() == {name for name, level in known.items() if level.any()}
        assert all(told[n].item() == pytest.approx(known[n].item(), rel=0.01) for n in told)


def test_defences_are_weighed_by_attacks(model: LoadedModel) -> None:
    inputs = ClientInput(photograph(0), torch.tensor([3]), ["one"])
    client = ClientConfig(defenses=("dp_sgd 0.0001",))
    sent = {name: g[0] for name, g in make_upload(model, [inputs], client).grads.items()}
    known = attack_gradients(model, sent, defenses=[{"dp_sgd": 1e-4}], attacks="patch_gradient")
    by_hand = attack_gradients(model, sent, noise=1e-4, attacks="patch_gradient")
    assert known.declared == pytest.approx(by_hand.declared) != 0
