"""A client that trains low-rank adapters (LoRA): what it sends, and which attacks that leaves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig, check_client
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.adapters import with_adapters
from tests.helpers.models import some_images, some_labels, tiny
from tests.helpers.runs import attack, cells, one_cell, photographs, rows

LORA = "{rank: 3, targets: [qkv, proj], alpha: 6, spread: 0.2}"
LAYERS = [f"blocks.{block}.attn.{layer}" for block in range(2) for layer in ("qkv", "proj")]
FROZEN = "the client sends low-rank adapters (LoRA), and its own weights are frozen"


def inputs(count: int = 2) -> ClientInput:
    ids = tuple(f"image {number}" for number in range(count))
    return ClientInput(some_images(count), some_labels(count), ids)


def adapted(line: str = LORA) -> tuple[LoadedModel, ClientConfig]:
    client = ClientConfig(lora=line)
    assert client.adapters is not None
    return with_adapters(tiny(), client.adapters, seed=0), client


def uploaded(line: str = LORA, **changes: Any) -> dict[str, Tensor]:
    model, client = adapted(line)
    client = ClientConfig(**{**vars(client), **changes})
    steps = [inputs()] * client.steps
    return dict(make_upload(model, steps, client).grads)


def merged(model: LoadedModel) -> LoadedModel:
    """The same network with W + 2 B A as its weights."""
    plain, parameters = tiny(), dict(model.named_parameters())
    with torch.no_grad():
        for layer in LAYERS:
            product = parameters[f"{layer}.lora_B.weight"] @ parameters[f"{layer}.lora_A.weight"]
            plain.get_parameter(f"{layer}.weight").add_(2 * product)
    return plain


def test_what_is_sent_is_what_the_whole_gradient_shows_through_the_adapter() -> None:
    """dL/dA = s B^T G and dL/dB = s G A^T, G the gradient of the weight as a plain client has
    it."""
    model, client = adapted()
    sent = FedSGDClient(model, client).update(inputs()).grads
    whole = FedSGDClient(merged(model)).update(inputs()).grads
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
    assert set(uploaded()) == names | {"head.weight", "head.bias"}
    assert set(uploaded(LORA.replace("spread", "head: false, spread"))) == names
    assert set(uploaded(withhold=("head.bias",))) == names | {"head.weight"}


def test_at_pefts_start_only_b_has_a_gradient() -> None:
    sent = uploaded("{rank: 3, targets: [qkv, proj]}")
    assert all(not sent[f"{layer}.lora_A.weight"].any() for layer in LAYERS)
    assert all(sent[f"{layer}.lora_B.weight"].any() for layer in LAYERS)


def test_a_local_step_moves_b_and_the_next_one_a() -> None:
    line = "{rank: 3, targets: [qkv, proj]}"
    one = uploaded(line, upload="weight_difference")
    two = uploaded(line, upload="weight_difference", steps=2)
    assert all(not one[f"{layer}.lora_A.weight"].any() for layer in LAYERS)
    assert all(two[f"{layer}.lora_A.weight"].any() for layer in LAYERS)


def test_defences_work_on_what_is_sent() -> None:
    plain, noisy = uploaded(), uploaded(defenses=("gaussian_noise 0.1",))
    assert set(noisy) == set(plain)
    assert all(not torch.equal(noisy[name], plain[name]) for name in plain)


def test_noise_on_positions_that_are_not_sent_is_refused() -> None:
    client = ClientConfig(lora=LORA, position_noise=0.1)
    with pytest.raises(UserError, match=r"position_noise: expected 0 with lora, got 0\.1"):
        check_client(client, 1, "client")


def test_closed_forms_say_what_is_missing_and_matching_runs(tmp_path: Path) -> None:
    attacks: list[dict[str, Any]] = [
        {"name": name}
        for name in ("patch_gradient", "masked_span", "token_span", "april", "mask_locator")
    ]
    attacks.append({"name": "inverting_gradients", "options": {"steps": 2}})
    config = one_cell(attacks=attacks, client={"lora": {"rank": 2, "spread": 0.1}})
    assert attack(photographs(tmp_path / "images", 2), tmp_path / "out", config).exit_code == 0
    found = rows(tmp_path / "out").groupby("attack_name")
    for name, own in found:
        if name == "inverting_gradients":
            assert set(own["status"]) == {"ok"}
            assert (own[own["metric"] == "cosine_distance"]["value"] < 1).all()
            continue
        assert set(own["status"]) == {"unsupported"}
        assert all(reason.startswith("the upload holds no gradient of") for reason in own["reason"])
        assert all(reason.endswith(FROZEN) for reason in own["reason"])
    assert {entry["lora"] for entry in cells(tmp_path / "out")} == {
        "{rank: 2, targets: [qkv], spread: 0.1}"
    }


def test_matching_descends_on_the_adapters_gradients(tmp_path: Path) -> None:
    """More steps come nearer to the uploaded gradients of a rank that is small."""
    images = photographs(tmp_path / "images", 1)
    distances = []
    for steps in (1, 60):
        options = {"steps": steps, "decay": "none", "signed": "none"}
        attacks = [{"name": "inverting_gradients", "options": options}]
        lora = {"rank": 4, "targets": ["qkv", "proj", "fc1"], "spread": 0.1}
        config = one_cell(attacks=attacks, client={"lora": lora})
        out = tmp_path / str(steps)
        attack(images, out, config)
        found = rows(out)
        distances.append(float(found[found["metric"] == "cosine_distance"]["value"].iloc[0]))
    assert distances[1] < 0.5 * distances[0]
