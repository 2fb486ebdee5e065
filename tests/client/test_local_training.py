"""Local steps against torch's optimisers, and the one gradient read from what they leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.equations.patch_system import gradient, lacks_gradients, located
from mjp_privacy.client.config import ClientConfig, local_round
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.gradients import FedSGDClient, Objective
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate, Pixels
from tests.helpers.models import PATCH, some_images, some_labels
from tests.helpers.models import tiny as tiny_model
from tests.helpers.rounds_attack import mjp
from tests.helpers.runs import attack as run_attack
from tests.helpers.runs import cells, photographs

NAMES = ["pos_embed", "patch_embed.proj.weight", "head.bias"]
MODEL = tiny_model(unknown_embedding=True)


def steps_of(count: int, images: int = 4, round: int = 0) -> list[ClientInput]:
    """What such a client feeds in each local step."""
    ids = [f"image {i}" for i in range(images)]
    named: dict[str, Any] = {"patch_size": PATCH, "gamma": 0.5, "seed": 0}
    plain, labels = some_images(images), some_labels(images)
    return [
        SETTINGS["c"].prepare(plain, labels, ids, round=local_round(round, e), **named)
        for e in range(count)
    ]


def uploaded(steps: int = 1, **client: Any) -> ClientUpdate:
    config = ClientConfig(upload="weight_difference", steps=steps, **client)
    return make_upload(MODEL, steps_of(steps), config)


def view_of(update: ClientUpdate) -> AttackerView:
    return AttackerView(MODEL, [update], Pixels(32, MODEL.card.mean, MODEL.card.std))


def by_torch(client: int, batch: int, steps: int, make: Any) -> dict[str, Tensor]:
    """w_E - w_0 of one client with an optimiser of torch."""
    model = tiny_model(unknown_embedding=True)
    objective = Objective(model, ClientConfig())
    optimizer = make(model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = slice(client * batch, (client + 1) * batch)
    for inputs in steps_of(steps):
        assert inputs.mask is not None
        optimizer.zero_grad()
        objective(inputs.images[own], inputs.labels[own], inputs.mask[own]).backward()
        for parameter in model.parameters():  # torch skips what has no gradient, decay included
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("client", "make"),
    [
        ({"weight_decay": 0.05}, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05)),
        (
            {"momentum": 0.9, "weight_decay": 0.05},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
        ),
        (
            {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.05},
            lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.05),
        ),
    ],
)
def test_local_steps_are_those_of_torch(batch: int, client: dict[str, Any], make: Any) -> None:
    update = uploaded(3, batch=batch, **client)
    for index in range(4 // batch):
        for name, expected in by_torch(index, batch, 3, make).items():
            torch.testing.assert_close(update.grads[name][index], expected, rtol=1e-6, atol=1e-9)
    assert (update.steps, update.kind, update.batch) == (3, "weight_difference", batch)


def test_local_steps_have_puzzles_that_no_round_has() -> None:
    numbers = {local_round(r, e) for r in range(30) for e in range(20)}
    assert len(numbers) == 600
    assert [local_round(r, 0) for r in range(3)] == [0, 1, 2]
    one, other = steps_of(2)
    assert one.mask is not None
    assert not one.mask.equal(other.mask)  # type: ignore[arg-type]
    assert steps_of(1)[0].mask.equal(one.mask)  # type: ignore[union-attr]


def test_one_step_of_sgd_is_what_it_always_was() -> None:
    config = ClientConfig(upload="weight_difference", weight_decay=0.1)
    expected = FedSGDClient(MODEL, config).update(steps_of(1)[0], names=NAMES)
    update = make_upload(MODEL, steps_of(1), config, names=NAMES)
    assert all(update.grads[name].equal(expected.grads[name]) for name in NAMES)
    noted = make_upload(MODEL, steps_of(1), replace(config, momentum=0.9), names=NAMES)
    for name in NAMES:  # the way of several steps
        torch.testing.assert_close(noted.grads[name], expected.grads[name])


@pytest.mark.parametrize("client", [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_the_pseudo_gradient_of_one_step_is_the_gradient(client: dict[str, Any]) -> None:
    planted = make_upload(MODEL, steps_of(1), ClientConfig())
    update = uploaded(**client)
    view = view_of(update)
    assert lacks_gradients(view, *NAMES) is None
    for name in NAMES:
        torch.testing.assert_close(
            gradient(view, update, name), planted.grads[name], rtol=1e-8, atol=1e-12
        )
    assert ClientConfig(upload="weight_difference", **client).pseudo_gradient == "exact"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_pseudo_gradient_of_small_steps_is_their_weighted_mean(momentum: float) -> None:
    update = uploaded(3, lr=1e-7, momentum=momentum, weight_decay=0.1)
    each = [make_upload(MODEL, [step], ClientConfig()) for step in steps_of(3)]
    weights = [sum(momentum**k for k in range(3 - e)) for e in range(3)]
    for name in NAMES:
        parts = [w * u.grads[name] for w, u in zip(weights, each, strict=True)]
        mean = torch.stack(parts).sum(0) / sum(weights)
        found = gradient(view_of(update), update, name)
        torch.testing.assert_close(found, mean, rtol=1e-4, atol=2e-5)
    assert ClientConfig(upload="weight_difference", steps=3).pseudo_gradient == "approximate"


def test_adamw_gives_its_first_gradient_away_in_double_precision() -> None:
    planted = make_upload(MODEL, steps_of(1), ClientConfig())
    update = uploaded(optimizer="adamw", lr=0.01, weight_decay=0.1)
    view = view_of(update)
    for name in NAMES:
        torch.testing.assert_close(
            gradient(view, update, name), planted.grads[name], rtol=1e-3, atol=1e-8
        )
    assert located(view, update).equal(steps_of(1)[0].mask)  # type: ignore[arg-type]
    several = uploaded(2, optimizer="adamw", lr=0.01)
    assert "2 AdamW steps" in str(lacks_gradients(view_of(several), "pos_embed"))


def test_the_noise_of_local_steps_adds_up_as_told() -> None:
    known: dict[str, Any] = {"batch": 2, "momentum": 0.5}
    clean = uploaded(3, defenses=({"dp_sgd": 0},), lr=1e-6, **known)
    loud = uploaded(3, defenses=({"dp_sgd": 0.1},), lr=1e-6, **known)
    weight = "blocks.0.attn.qkv.weight"
    added = (loud.grads[weight] - clean.grads[weight]).flatten(1).std(1)
    assert (added / loud.noise[weight]).tolist() == pytest.approx([1.0] * 2, rel=0.05)


def test_inputs_that_do_not_fit_are_named() -> None:
    client = ClientConfig(upload="weight_difference", steps=2)
    with pytest.raises(UserError, match=r"2 local steps .* needs an input for each, got 1"):
        make_upload(MODEL, steps_of(1), client)
    one, other = steps_of(2)
    wrong = replace(other, image_ids=tuple(reversed(other.image_ids)))
    with pytest.raises(UserError, match="hold different images"):
        make_upload(MODEL, [one, wrong], client)


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ({"steps": 2}, "client.steps: expected upload: weight_difference, got upload: gradient"),
        ({"optimizer": "adamw"}, "client.optimizer: expected upload: weight_difference"),
        ({"momentum": 0.9}, "client.momentum: expected upload: weight_difference"),
        ({"steps": 0}, "client.steps: Input should be greater than or equal to 1; got 0"),
        ({"momentum": 1.0}, "client.momentum: Input should be less than 1; got 1.0"),
        ({"optimizer": "adam"}, "client.optimizer: Input should be 'sgd' or 'adamw'"),
        (
            {"upload": "weight_difference", "optimizer": "adamw", "momentum": 0.9},
            "client.momentum: expected 0 with optimizer: adamw",
        ),
        (
            {"upload": "weight_difference", "steps": 2, "server_lr": 0.1},
            "client.steps: expected one plain SGD step and no defenses",
        ),
    ],
)
def test_a_mistake_is_named(client: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_experiment(mjp("c", {"name": "april"}, client=client))
    assert said in str(caught.value)


def test_a_run_of_local_steps_says_that_its_gradient_is_approximate(tmp_path: Any) -> None:
    images = photographs(tmp_path / "images", 3)
    client = {"upload": "weight_difference", "steps": 2, "lr": 0.01}
    config = mjp("c", {"name": "patch_gradient"}, client=client)
    assert run_attack(images, tmp_path / "run", config).exit_code == 0
    (entry,) = cells(tmp_path / "run")
    assert (entry["pseudo_gradient"], entry["steps"]) == ("approximate", 2)
