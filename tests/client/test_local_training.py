"""Local steps against torch's optimisers, and low-rank adapters against the whole gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.equations.patch_system import gradient, lacks_gradients, located
from mjp_privacy.client.config import ClientConfig, local_round
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.gradients import FedSGDClient, Objective
from mjp_privacy.client.upload import make_upload
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate, Pixels
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.adapters import with_adapters
from tests.helpers.models import PATCH, some_images, some_labels
from tests.helpers.models import tiny as tiny_model

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
    ("optimizer", "facts"),
    [("sgd", {"lr": 0.1}), ("sgd", {"lr": 0.1, "momentum": 0.9}), ("adamw", {"lr": 0.01})],
)
def test_local_steps_are_those_of_torch(batch: int, optimizer: str, facts: Any) -> None:
    facts = {**facts, "weight_decay": 0.05}
    torchs = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    update = uploaded(3, batch=batch, optimizer=optimizer, **facts)
    for index in range(4 // batch):
        for name, expected in by_torch(index, batch, 3, partial(torchs, **facts)).items():
            torch.testing.assert_close(update.grads[name][index], expected, rtol=1e-6, atol=1e-9)
    assert (update.steps, update.kind, update.batch) == (3, "weight_difference", batch)


def test_local_steps_have_puzzles_that_no_round_has() -> None:
    assert len({local_round(r, e) for r in range(30) for e in range(20)}) == 600
    masks = [step.mask for step in (*steps_of(2), *steps_of(1))]
    assert not masks[0].equal(masks[1])  # type: ignore[union-attr, arg-type]
    assert masks[2].equal(masks[0])  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("client", [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_the_pseudo_gradient_of_one_step_is_the_gradient(client: dict[str, Any]) -> None:
    planted = make_upload(MODEL, steps_of(1), ClientConfig())
    update = uploaded(**client)
    alone = FedSGDClient(MODEL, ClientConfig(upload="weight_difference", **client))
    for name in NAMES:  # one step is made in another way than several
        expected = alone.update(steps_of(1)[0], names=NAMES).grads[name]
        torch.testing.assert_close(update.grads[name], expected)
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
    assert "AdamW" in str(lacks_gradients(view_of(several), "pos_embed"))


def test_the_noise_of_local_steps_adds_up_as_told() -> None:
    known: dict[str, Any] = {"batch": 2, "momentum": 0.5}
    clean = uploaded(3, defenses=({"dp_sgd": 0},), lr=1e-6, **known)
    loud = uploaded(3, defenses=({"dp_sgd": 0.1},), lr=1e-6, **known)
    weight = "blocks.0.attn.qkv.weight"
    added = (loud.grads[weight] - clean.grads[weight]).flatten(1).std(1)
    assert (added / loud.noise[weight]).tolist() == pytest.approx([1.0] * 2, rel=0.05)


# low-rank adapters --------------------------------------------------------------------------------

LORA = "{rank: 3, targets: [qkv, proj], alpha: 6, spread: 0.2}"
LAYERS = [f"blocks.{block}.attn.{layer}" for block in range(2) for layer in ("qkv", "proj")]
TWO = ClientInput(some_images(2), some_labels(2), ("one", "two"))


def adapted(line: str = LORA, **changes: Any) -> tuple[LoadedModel, ClientConfig]:
    client = ClientConfig(lora=line, **changes)
    assert client.adapters is not None
    return with_adapters(tiny_model(), client.adapters, seed=0), client


def adapters_upload(line: str = LORA, **changes: Any) -> dict[str, Tensor]:
    model, client = adapted(line, **changes)
    return dict(make_upload(model, [TWO] * client.steps, client).grads)


def test_what_is_sent_is_what_the_whole_gradient_shows_through_the_adapter() -> None:
    """dL/dA = s B^T G and dL/dB = s G A^T, G the gradient of the weight as a plain client has
    it."""
    model, client = adapted()
    sent, merged = FedSGDClient(model, client).update(TWO).grads, tiny_model()
    parameters = dict(model.named_parameters())
    with torch.no_grad():  # the same network with W + 2 B A as its weights
        for layer in LAYERS:
            product = parameters[f"{layer}.lora_B.weight"] @ parameters[f"{layer}.lora_A.weight"]
            merged.get_parameter(f"{layer}.weight").add_(2 * product)
    whole = FedSGDClient(merged).update(TWO).grads
    for layer in LAYERS:
        first = model.get_parameter(f"{layer}.lora_A.weight")
        second = model.get_parameter(f"{layer}.lora_B.weight")
        g = whole[f"{layer}.weight"]
        torch.testing.assert_close(sent[f"{layer}.lora_A.weight"], 2 * second.mT @ g)
        torch.testing.assert_close(sent[f"{layer}.lora_B.weight"], 2 * g @ first.mT)
    for name in ("head.weight", "head.bias"):
        torch.testing.assert_close(sent[name], whole[name])


def test_the_adapters_and_the_head_are_sent_and_nothing_else() -> None:
    names = {f"{layer}.lora_{side}.weight" for layer in LAYERS for side in "AB"}
    assert set(adapters_upload()) == names | {"head.weight", "head.bias"}
    assert set(adapters_upload(LORA.replace("spread", "head: false, spread"))) == names
    assert set(adapters_upload(withhold=("head.bias",))) == names | {"head.weight"}
    line = "{rank: 3, targets: [qkv, proj]}"  # B begins at zero: a step moves it, the next one A
    one, two = (adapters_upload(line, upload="weight_difference", steps=n) for n in (1, 2))
    for layer in LAYERS:
        assert not one[f"{layer}.lora_A.weight"].any()
        assert two[f"{layer}.lora_A.weight"].any()
