"""How a client augments what it is fed, and what leaves it: withheld, noisy, differing by local
steps, of adapters, and with weights that move between rounds."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.equations.patch_system import gradient, lacks_gradients, located
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import Feeding, augmented
from mjp_privacy.client.gradients import STEPS_AT_ONCE, FedSGDClient, Objective
from mjp_privacy.client.upload import (
    make_upload,
    noisy,
    sinusoidal_table,
    with_sinusoidal_positions,
)
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.simulated import moved
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate, Pixels
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.mjp_vit import with_adapters
from tests.helpers.models import PATCH, some_images, some_labels, some_masks
from tests.helpers.models import tiny as tiny_model
from tests.helpers.own_attacks import mjp

DIFFERENCE: dict[str, Any] = {"upload": "weight_difference"}
QKV = "blocks.0.attn.qkv.weight"
NAMES = ["pos_embed", "patch_embed.proj.weight", "head.bias"]
MODEL = tiny_model(unknown_embedding=True)


def step_inputs(count: int, masks: bool = True) -> ClientInput:
    ids = tuple(f"image {i}" for i in range(count))
    masked = some_masks(count) if masks else None
    return ClientInput(some_images(count), some_labels(count), ids, masked)


# augmentations; how a client shuffles the frozen runs know ----------------------------------------

IDS = [f"image {i}" for i in range(40)]


def changed(kind: str, images: Tensor, first: int = 0, **named: int) -> Tensor:
    ids = IDS[first : first + len(images)]
    return augmented(images, ids, kind, **{"round": 0, "seed": 0} | named)


def test_what_the_augmentations_do() -> None:
    plain = some_images(40)
    flipped = changed("flip", plain)
    turned = (flipped == plain.flip(-1)).flatten(1).all(-1)
    assert (turned | (flipped == plain).flatten(1).all(-1)).all()
    assert 10 < turned.sum() < 30
    even = torch.full_like(plain, 0.2)
    assert changed("crop", even).allclose(even)
    assert changed("none", plain).equal(plain)
    shares = changed("mixup", torch.eye(40).view(40, 40, 1, 1))[:, :, 0, 0]
    assert shares.sum(-1).allclose(torch.ones(40))
    assert (shares.diagonal() >= 0.5).all()
    assert ((shares > 0).sum(-1) <= 2).all()
    for kind in ("flip", "crop", "mixup"):  # anew in each round, of each seed, and by each image
        made = changed(kind, plain)
        assert changed(kind, plain).equal(made)
        assert not any(
            changed(kind, plain, **other).equal(made) for other in ({"round": 1}, {"seed": 1})
        )
        assert kind == "mixup" or changed(kind, plain[5:], first=5).equal(made[5:])
    with pytest.raises(UserError, match="mixup"):
        changed("mixup", plain[:1])


# single steps -------------------------------------------------------------------------------------


def test_noise_on_the_position_gradient_is_dense_and_of_the_stated_size() -> None:
    inputs = step_inputs(4)
    clean = make_upload(MODEL, [inputs], ClientConfig(), names=NAMES)
    loud, again = (noisy(clean, 0.5, inputs.image_ids, seed=0).grads for _ in range(2))
    given = clean.grads["pos_embed"].flatten(1)
    rms = (given.square().sum(-1) / (given != 0).sum(-1)).sqrt()
    added = (loud["pos_embed"].flatten(1) - given) / rms[:, None]
    assert added.std(-1).tolist() == pytest.approx([0.5] * 4, rel=0.15)
    assert not added[0].equal(added[1])
    assert not (loud["pos_embed"] == 0).any()
    assert all(loud[n].equal(clean.grads[n]) == (n != "pos_embed") for n in NAMES)
    assert loud["pos_embed"].equal(again["pos_embed"])
    assert noisy(clean, 0.0, inputs.image_ids, seed=0) is clean


def test_sinusoidal_positions_replace_the_table() -> None:
    """What does without the gradient of a table is foreseen in tests/experiment."""
    altered = with_sinusoidal_positions(MODEL)
    assert not altered.table[0, 0].any()
    assert altered.get_parameter(QKV).equal(MODEL.get_parameter(QKV))
    table = sinusoidal_table(Grid(4, 4), 24)
    assert altered.table[0, 1:].equal(table)
    assert torch.cdist(table, table).fill_diagonal_(9).min() > 0.5
    assert (table[1] - table[0])[:12].eq(0).all()  # one column on: the row's half is the same
    with pytest.raises(UserError, match="positions"):
        with_sinusoidal_positions(tiny_model(position_embedding="exposed"))
    with pytest.raises(UserError, match="18"):
        sinusoidal_table(Grid(4, 4), 18)


# local steps against torch's optimisers -----------------------------------------------------------


def steps_of(count: int) -> list[ClientInput]:
    """What a client of four images feeds in each local step."""
    feeding = Feeding(ClientConfig(steps=count), "c", 0.5, PATCH, 0)
    images = some_images(4), some_labels(4), [f"image {i}" for i in range(4)]
    return [feeding.input(*images, number) for number in feeding.rounds_of_steps(0)]


def uploaded(steps: int = 1, **client: Any) -> ClientUpdate:
    return make_upload(MODEL, steps_of(steps), ClientConfig(**DIFFERENCE, steps=steps, **client))


def view_of(update: ClientUpdate) -> AttackerView:
    return AttackerView(MODEL, [update], Pixels(32, MODEL.card.mean, MODEL.card.std))


def by_torch(client: int, batch: int, steps: int, make: Any) -> dict[str, Tensor]:
    """w_E - w_0 of one client with an optimiser of torch."""
    model = tiny_model(unknown_embedding=True)
    objective, optimizer = Objective(model, ClientConfig()), make(model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = slice(client * batch, (client + 1) * batch)
    for inputs in steps_of(steps):
        optimizer.zero_grad()
        objective(inputs.images[own], inputs.labels[own], inputs.mask[own]).backward()
        for parameter in model.parameters():  # torch skips what has no gradient, decay included
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("batch", "optimizer", "facts"),
    [
        (1, "sgd", {"lr": 0.1}),
        (2, "sgd", {"lr": 0.1, "momentum": 0.9}),
        *((batch, "adamw", {"lr": 0.01}) for batch in (1, 2)),
    ],
)
def test_local_steps_are_those_of_torch(batch: int, optimizer: str, facts: Any) -> None:
    facts = {**facts, "weight_decay": 0.05}
    torchs = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    update = uploaded(3, batch=batch, optimizer=optimizer, **facts)
    for index in range(4 // batch):
        for name, expected in by_torch(index, batch, 3, partial(torchs, **facts)).items():
            torch.testing.assert_close(update.grads[name][index], expected, rtol=1e-6, atol=1e-9)
    assert (update.steps, update.kind, update.batch) == (3, "weight_difference", batch)


@pytest.mark.parametrize(
    ("client", "rtol", "atol"),
    [
        ({}, 1e-8, 1e-12),
        ({"momentum": 0.9}, 1e-8, 1e-12),
        ({"momentum": 0.9, "weight_decay": 0.1}, 1e-8, 1e-12),
        ({"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}, 1e-3, 1e-8),
    ],
)
def test_the_pseudo_gradient_of_one_step_is_the_gradient(
    client: dict[str, Any], rtol: float, atol: float
) -> None:
    (step,) = steps_of(1)
    planted, update = make_upload(MODEL, [step], ClientConfig()), uploaded(**client)
    view = view_of(update)
    assert lacks_gradients(view, *NAMES) is None
    assert located(view, update).equal(step.mask)
    for name in NAMES:
        found = gradient(view, update, name)
        torch.testing.assert_close(found, planted.grads[name], rtol=rtol, atol=atol)
    exact = ClientConfig(**DIFFERENCE, **client).pseudo_gradient == "exact"
    assert exact == ("optimizer" not in client)


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
    assert ClientConfig(**DIFFERENCE, steps=3).pseudo_gradient == "approximate"


# weights that move between rounds -----------------------------------------------------------------


def test_the_server_steps_along_the_mean_gradient_of_all_clients() -> None:
    model = tiny_model(unknown_embedding=True, dal="linear")
    inputs = step_inputs(STEPS_AT_ONCE + 4)
    config = ClientConfig(server_lr=0.5, dal=True, batch=2, withhold=("norm.bias",))
    client = FedSGDClient(model, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    each, after = client.gradients(inputs), moved(client, inputs)
    for name, parameter in after.named_parameters():
        step = 0 if name == "norm.bias" else 0.5 * each[name].mean(0)
        torch.testing.assert_close(parameter.detach(), before[name] - step, rtol=1e-9, atol=1e-12)
    assert all(p.equal(before[name]) for name, p in model.named_parameters())


# low-rank adapters against the whole gradient -----------------------------------------------------

LORA = "{rank: 3, targets: [qkv, proj], alpha: 6, spread: 0.2}"
LAYERS = [f"blocks.{block}.attn.{layer}" for block in range(2) for layer in ("qkv", "proj")]


def test_what_is_sent_is_what_the_whole_gradient_shows_through_the_adapter() -> None:
    """dL/dA = s B^T G and dL/dB = s G A^T, G the gradient of the weight as a plain client has
    it."""
    client, merged, inputs = ClientConfig(lora=LORA), tiny_model(), step_inputs(2, masks=False)
    model = with_adapters(tiny_model(), client.adapters, seed=0)
    sent, own = make_upload(model, [inputs], client).grads, dict(model.named_parameters())
    pairs = {layer: [own[f"{layer}.lora_{side}.weight"] for side in "AB"] for layer in LAYERS}
    with torch.no_grad():  # the same network with W + 2 B A as its weights
        for layer, (first, second) in pairs.items():
            merged.get_parameter(f"{layer}.weight").add_(2 * second @ first)
    whole = make_upload(merged, [inputs], ClientConfig()).grads
    for layer, (first, second) in pairs.items():
        g = whole[f"{layer}.weight"]
        torch.testing.assert_close(sent[f"{layer}.lora_A.weight"], 2 * second.mT @ g)
        torch.testing.assert_close(sent[f"{layer}.lora_B.weight"], 2 * g @ first.mT)
    for name in ("head.weight", "head.bias"):
        torch.testing.assert_close(sent[name], whole[name])


def test_the_adapters_and_the_head_are_sent_and_nothing_else() -> None:
    def sent(line: str = LORA, **changes: Any) -> dict[str, Tensor]:
        client = ClientConfig(lora=line, **changes)
        model = with_adapters(tiny_model(), client.adapters, seed=0)
        inputs = [step_inputs(2, masks=False)] * client.steps
        return dict(make_upload(model, inputs, client).grads)

    names = {f"{layer}.lora_{side}.weight" for layer in LAYERS for side in "AB"}
    assert set(sent()) == names | {"head.weight", "head.bias"}
    assert set(sent(LORA.replace("spread", "head: false, spread"))) == names
    assert set(sent(withhold=("head.bias",))) == names | {"head.weight"}
    line = "{rank: 3, targets: [qkv, proj]}"  # B begins at zero: a step moves it, the next one A
    one, two = (sent(line, **DIFFERENCE, steps=n) for n in (1, 2))
    for layer in LAYERS:
        assert not one[f"{layer}.lora_A.weight"].any()
        assert two[f"{layer}.lora_A.weight"].any()


# mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "named"),
    [
        ({"server_lr": 1, "position_noise": 1}, "client.position_noise"),
        ({"steps": 2}, "client.upload"),
        ({"momentum": 0.9}, "client.upload"),
        ({**DIFFERENCE, "optimizer": "adamw", "momentum": 0.9}, "client.momentum"),
        ({**DIFFERENCE, "steps": 2, "server_lr": 0.1}, "client.steps"),
        ({"lora": {"rank": 2}, "position_noise": 0.1}, "client.position_noise"),
        ({"defenses": [{"dp_sdg": 0.5}]}, "dp_sgd"),
        ({"defenses": [{"percentile_privacy": 101}]}, "101"),
        ({"defenses": [{"top_k": "many"}]}, "top_k.share"),
        ({"defenses": ["top_k"]}, "share"),
        ({"defenses": [{"dp_sgd": {"noise": -1, "clip": -3}}]}, "clip"),
        ({"defenses": [{"int8": 3, "float16": 1}]}, "client.defenses"),
        ({"defenses": ["int8", {"dp_sgd": 1}]}, "dp_sgd"),
        ({"defenses": ["int8"], "server_lr": 1}, "client.defenses"),
    ],
)
def test_a_mistake_is_named(client: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        load_experiment(mjp("c", {"name": "april"}, client=client))
    assert named in str(caught.value)
    assert "client" in str(caught.value)
    assert "\\n" not in str(caught.value)
