"""What leaves the client: withheld, noisy, differing, and with weights that move between rounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks import ATTACKS
from mjp_privacy import load_model
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import augmented
from mjp_privacy.client.gradients import STEPS_AT_ONCE, FedSGDClient
from mjp_privacy.client.upload import noisy, sinusoidal_table, with_sinusoidal_positions
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.simulated import moved
from mjp_privacy.interfaces import ClientInput
from tests.helpers.models import some_images, some_labels, some_masks
from tests.helpers.models import tiny as tiny_model
from tests.helpers.own_attacks import ROUNDS, SEEN, mjp, rounds
from tests.helpers.runs import MJP, TINY, attack, cells, photographs, rows, tensors, values

DIFFERENCE: dict[str, Any] = {"upload": "weight_difference"}
NAMES = ["pos_embed", "blocks.0.attn.qkv.weight", "unk_embed", "patch_embed.proj.weight"]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    SEEN.clear()
    with ATTACKS.registered("rounds", ROUNDS):
        yield


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("images"), 4)


def step_inputs(count: int) -> ClientInput:
    ids = tuple(f"image {i}" for i in range(count))
    return ClientInput(some_images(count), some_labels(count), ids, some_masks(count))


def test_an_augmented_image_is_what_is_scored_and_the_photograph_stands_beside(
    images: Path, tmp_path: Path
) -> None:
    attack(images, tmp_path / "own", mjp("c", {"name": "grey"}))
    attack(images, tmp_path / "crop", mjp("c", {"name": "grey"}, client={"augment": "crop"}))
    own, crop = (tensors(tmp_path / n, cells(tmp_path / n)[0]["run_id"]) for n in ("own", "crop"))
    ids = list(own)
    photos = torch.stack([own[i]["plain"] for i in ids])
    expected = augmented(photos, ids, "crop", round=0, seed=0)
    assert torch.stack([crop[i]["target"] for i in ids]).equal(expected)
    found = values(tmp_path / "crop")
    wanted = values(tmp_path / "own").xs(("psnr", "standard"), level=("metric", "variant"))
    beside = found.xs(("original_psnr", "diagnostic"), level=("metric", "variant"))
    assert beside.to_dict() == pytest.approx(wanted.to_dict(), abs=1e-6)
    assert "original_psnr" not in set(rows(tmp_path / "own")["metric"])


@pytest.mark.parametrize("names", [None, NAMES])
def test_withheld_names_are_absent_and_the_others_as_they_were(names: list[str] | None) -> None:
    model = tiny_model(unknown_embedding=True)
    config = ClientConfig(withhold=("pos_embed", "unk_embed", "index_embed"))
    whole, less = (
        FedSGDClient(model, client).update(step_inputs(2), names=names).grads
        for client in (ClientConfig(), config)
    )
    assert set(whole) - set(less) == {"pos_embed", "unk_embed"}
    for name, gradient in less.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-9, atol=1e-14)


def test_noise_on_the_position_gradient_is_dense_and_of_the_stated_size() -> None:
    model, inputs = tiny_model(unknown_embedding=True), step_inputs(4)
    clean = FedSGDClient(model).update(inputs, names=NAMES)
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


def test_sinusoidal_positions_replace_the_table_and_are_not_uploaded(
    images: Path, tmp_path: Path
) -> None:
    attack(images, tmp_path, mjp("c", {"name": "april"}, client={"positions": "sinusoidal"}))
    assert set(rows(tmp_path)["status"]) == {"unsupported"}
    model = load_model(**{**MJP, "seed": 0})
    altered = with_sinusoidal_positions(model)
    assert not altered.table[0, 1:].equal(model.table[0, 1:])
    assert not altered.table[0, 0].any()
    assert altered.blocks[0].attn.qkv.weight.equal(model.blocks[0].attn.qkv.weight)
    table = sinusoidal_table(4, 192)
    assert table.shape == (16, 192)
    assert torch.cdist(table, table).fill_diagonal_(9).min() > 0.5
    assert (table[1] - table[0])[:96].eq(0).all()  # one column on: the row's half is the same
    with pytest.raises(UserError, match="positions"):
        with_sinusoidal_positions(load_model(**{**TINY, "position_embedding": "exposed"}))
    with pytest.raises(UserError, match="18"):
        sinusoidal_table(4, 18)


@pytest.mark.parametrize("dal", [False, True])
def test_the_server_steps_along_the_mean_gradient_of_all_clients(dal: bool) -> None:
    model = tiny_model(unknown_embedding=True, dal="linear")
    inputs = step_inputs(STEPS_AT_ONCE + 4)
    config = ClientConfig(server_lr=0.5, dal=dal, batch=2, withhold=("norm.bias",))
    client = FedSGDClient(model, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    after = moved(client, inputs)
    each = client.gradients(inputs)
    for name, parameter in after.named_parameters():
        if name == "norm.bias":
            assert parameter.equal(before[name])
            continue
        expected = before[name] - 0.5 * each[name].mean(0)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-9, atol=1e-12)
    assert all(p.equal(before[name]) for name, p in model.named_parameters())


def test_uploads_are_made_and_attacked_with_each_rounds_own_weights(
    images: Path, tmp_path: Path
) -> None:
    config = mjp("c", rounds(), client={"server_lr": 0.1}, dtypes=["float64"], block=4)
    attack(images, tmp_path, {**config, "diagnostics": ["residual"]})
    (view,) = SEEN
    names = {name for name, _ in view.model.named_parameters()}
    states = [update.weights_before for update in view.updates]
    assert all(state is not None and set(state) == names for state in states)
    key = "blocks.0.attn.qkv.weight"
    assert states[0][key].equal(view.model.get_parameter(key))  # type: ignore[index]
    assert not states[0][key].equal(states[1][key])  # type: ignore[index]
    assert not states[1][key].equal(states[2][key])  # type: ignore[index]
    assert set(rows(tmp_path)["status"]) == {"ok"}
    residual = values(tmp_path).xs("gradient_residual", level="metric")
    assert residual.between(0, 10).all()
    attack(images, tmp_path / "still", config | {"client": {}})
    tables = [[update.grads["pos_embed"] for update in each.updates[:2]] for each in SEEN]
    assert tables[0][0].equal(tables[1][0])
    assert not tables[0][1].allclose(tables[1][1], rtol=1e-3)
    assert tables[0][1].eq(0).all(-1).equal(tables[1][1].eq(0).all(-1))  # the same puzzle
    assert SEEN[1].updates[1].weights_before is None


@pytest.mark.parametrize(
    ("client", "named"),
    [
        ({"server_lr": 1, "position_noise": 1}, "client.position_noise"),
        ({"steps": 2}, "client.steps"),
        ({"momentum": 0.9}, "client.momentum"),
        ({**DIFFERENCE, "optimizer": "adamw", "momentum": 0.9}, "client.momentum"),
        ({**DIFFERENCE, "steps": 2, "server_lr": 0.1}, "client.steps"),
        ({"lora": {"rank": 2}, "position_noise": 0.1}, "client.position_noise"),
        ({"defenses": [{"dp_sdg": 0.5}]}, "dp_sgd"),
        ({"defenses": [{"dp_sgd": {"clip": 1}}]}, "dp_sgd"),
        ({"defenses": [{"dp_sgd": -1}]}, "dp_sgd"),
        ({"defenses": [{"top_k": 0}]}, "top_k"),
        ({"defenses": [{"percentile_privacy": 101}]}, "101"),
        ({"defenses": [{"top_k": "many"}]}, "top_k.share"),
        ({"defenses": ["top_k"]}, "share"),
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
