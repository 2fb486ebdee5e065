"""Every defence against a computation of its own, and how defences are named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.defenses.registry import canonical
from mjp_privacy.client.gradients import FedSGDClient, Objective
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.cell_facts import cell_key
from mjp_privacy.experiment.config import expand, load_experiment
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from tests.helpers.models import some_images, some_labels, some_masks
from tests.helpers.models import tiny as tiny_model
from tests.helpers.rounds_attack import mjp
from tests.helpers.runs import attack as run_attack
from tests.helpers.runs import cells, photographs

NAMES = ["pos_embed", "patch_embed.proj.weight", "head.bias"]
MODEL = tiny_model(unknown_embedding=True)


def inputs_of(count: int, first: int = 0) -> ClientInput:
    ids = tuple(f"image {i}" for i in range(first, first + count))
    part = slice(first, first + count)
    images, labels = some_images(8)[part], some_labels(8)[part]
    return ClientInput(images, labels, ids, some_masks(8)[part])


def sent(
    *defenses: Any, inputs: ClientInput | None = None, names: Any = None, **client: Any
) -> ClientUpdate:
    config = ClientConfig(defenses=defenses, **client)
    return make_upload(MODEL, [inputs or inputs_of(4)], config, names=names)


def flat(update: ClientUpdate) -> Tensor:
    return torch.cat([g.flatten(1) for g in update.grads.values()], 1)


def by_a_loop(batch: int, clip: float) -> list[dict[str, Tensor]]:
    """Clipped means of four images, one example after the other."""
    objective = Objective(MODEL, ClientConfig())
    own = dict(MODEL.named_parameters())
    inputs = inputs_of(4)
    assert inputs.mask is not None
    means = []
    for start in range(0, 4, batch):
        total = {name: torch.zeros_like(p) for name, p in own.items()}
        for at in range(start, start + batch):
            one = slice(at, at + 1)
            loss = objective(inputs.images[one], inputs.labels[one], inputs.mask[one])
            found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
            given = {n: g for n, g in zip(own, found, strict=True) if g is not None}
            norm = math.sqrt(sum(float(g.square().sum()) for g in given.values()))
            for name, g in given.items():
                total[name] += g * min(1.0, clip / norm) / batch
        means.append(total)
    return means


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("clip", [0.3, 1e6])
def test_each_example_is_clipped_before_the_mean(batch: int, clip: float) -> None:
    update = sent({"dp_sgd": {"noise": 0, "clip": clip}}, batch=batch)
    for index, mean in enumerate(by_a_loop(batch, clip)):
        for name, expected in mean.items():
            torch.testing.assert_close(update.grads[name][index], expected, rtol=1e-8, atol=1e-12)
    assert not update.noise


def test_dp_noise_has_its_size_and_none_of_the_clean_gradient() -> None:
    clean = sent({"dp_sgd": {"noise": 0, "clip": 0.5}}, batch=2)
    loud = sent({"dp_sgd": {"noise": 0.8, "clip": 0.5}}, batch=2)
    added = flat(loud) - flat(clean)
    assert added.std(1).tolist() == pytest.approx([0.8 * 0.5 / 2] * 2, rel=0.03)
    assert abs(float(added.mean())) < 0.005
    assert {float(v) for n in NAMES for v in loud.noise[n]} == {0.8 * 0.5 / 2}
    assert abs(float(torch.corrcoef(added)[0, 1])) < 0.05
    first = added[0]
    half = len(first) // 2
    assert (
        abs(float(torch.corrcoef(torch.stack((first[:half], first[half : 2 * half])))[0, 1])) < 0.1
    )


@pytest.mark.parametrize("defense", [{"gaussian_noise": 0.5}, {"dp_sgd": 0.5}])
def test_noise_does_not_move_with_the_block_nor_with_the_names(defense: Any) -> None:
    whole = sent(defense)
    alone = sent(defense, inputs=inputs_of(1, first=2), names=NAMES)
    assert list(alone.grads) == NAMES
    for name in NAMES:
        torch.testing.assert_close(alone.grads[name][0], whole.grads[name][2])
    config = ClientConfig(defenses=(defense,))
    later = make_upload(MODEL, [inputs_of(4)], config, round=1)
    assert not torch.allclose(later.grads["head.bias"], whole.grads["head.bias"])
    other = make_upload(MODEL, [inputs_of(4)], config, seed=1)
    assert not torch.allclose(other.grads["head.bias"], whole.grads["head.bias"])


def test_gaussian_noise_is_relative_to_the_whole_upload_and_told_as_it_shows() -> None:
    clean, loud = sent(), sent({"gaussian_noise": 0.5})
    g = flat(clean)
    rms = (g.square().sum(1) / (g != 0).sum(1)).sqrt()
    level = (flat(loud) - g).std(1)
    assert (level / rms).tolist() == pytest.approx([0.5] * 4, rel=0.03)
    told = loud.noise["pos_embed"] / level
    assert ((told > 0.85) & (told < 1.05)).all()
    assert not (loud.grads["pos_embed"] == 0).any()


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_top_k_keeps_the_largest_of_the_whole_upload(share: float) -> None:
    clean, update = flat(sent()), sent({"top_k": share})
    sparse = flat(update)
    kept = round(share * clean.shape[1])
    assert (sparse != 0).sum(1).tolist() == [kept] * 4
    for one, few in zip(clean, sparse, strict=True):
        least = one.abs().sort(descending=True).values[kept - 1]
        assert few.equal(torch.where(one.abs() >= least, one, 0.0))
    error = (sparse - clean).square().mean(1).sqrt()
    told = torch.stack([update.rounding[n] for n in update.grads]).amax(1 - 1)
    assert (error < told * 1.5).all()


def test_int8_is_off_by_half_a_step() -> None:
    clean, update = sent(), sent("int8")
    for name, g in clean.grads.items():
        step = g.flatten(1).abs().amax(1) / 127
        error = (update.grads[name] - g).flatten(1).abs().amax(1)
        assert (error <= step / 2 * (1 + 1e-9)).all()
        assert torch.allclose(update.rounding[name], step / math.sqrt(12))
        levels = update.grads[name].flatten(1) / step.clamp_min(1e-300).unsqueeze(1)
        assert torch.allclose(levels, levels.round(), atol=1e-6)
    weight = "blocks.0.attn.qkv.weight"
    error = (update.grads[weight] - clean.grads[weight]).flatten(1).std(1)
    assert (error / update.rounding[weight]).tolist() == pytest.approx([1.0] * 4, rel=0.2)


def test_float16_is_rounded_once_and_its_error_is_known() -> None:
    clean, update = sent(), sent("float16")
    for name, g in clean.grads.items():
        assert update.grads[name].equal(g.half().to(g))
    weight = "blocks.0.attn.qkv.weight"
    error = (update.grads[weight] - clean.grads[weight]).flatten(1).square().mean(1).sqrt()
    assert (error / update.rounding[weight]).tolist() == pytest.approx([1.0] * 4, rel=0.1)


def test_sign_is_one_magnitude_a_tensor() -> None:
    clean, update = sent(), sent("sign")
    weight = "blocks.0.attn.qkv.weight"
    assert update.grads[weight].sign().equal(clean.grads[weight].sign())
    magnitude = clean.grads[weight].abs().flatten(1).mean(1)
    assert torch.allclose(update.grads[weight].abs().flatten(1).amax(1), magnitude)


@pytest.mark.parametrize(
    "defense",
    [{"top_k": 0.5}, {"prune": 0.5}, {"percentile_privacy": 10}, "int8", "float16", "sign"],
)
def test_compression_leaves_masked_rows_at_zero(defense: Any) -> None:
    rows = sent(defense).grads["pos_embed"][:, 0, 1:]
    assert (rows[some_masks(8)[:4]] == 0).all()


def test_defenses_are_applied_in_their_order() -> None:
    noisy_last = sent({"top_k": 0.1}, {"gaussian_noise": 0.5})
    sparse_last = sent({"gaussian_noise": 0.5}, {"top_k": 0.1})
    assert float((flat(noisy_last) == 0).double().mean()) == 0
    assert float((flat(sparse_last) == 0).double().mean()) == pytest.approx(0.9, abs=0.001)
    both = sent({"dp_sgd": 0.5}, {"gaussian_noise": 0.5})
    parts = [sent(d).noise["head.bias"] for d in ({"dp_sgd": 0.5},)]
    assert (both.noise["head.bias"] > parts[0]).all()
    twice = sent({"gaussian_noise": 0.5}, {"gaussian_noise": 0.5})
    once = sent({"gaussian_noise": 0.5})
    steps = [flat(once) - flat(sent()), flat(twice) - flat(once)]
    assert abs(float(torch.corrcoef(torch.stack([s[0] for s in steps]))[0, 1])) < 0.05


def test_withheld_parameters_are_no_part_of_the_clip() -> None:
    kept = sent({"dp_sgd": {"noise": 0, "clip": 0.1}}, withhold=("blocks.0.mlp.fc1.weight",))
    assert "blocks.0.mlp.fc1.weight" not in kept.grads
    assert flat(kept).norm(dim=1).tolist() == pytest.approx([0.1] * 4)


def test_a_client_without_defenses_uploads_what_it_always_did() -> None:
    inputs = inputs_of(4)
    expected = FedSGDClient(MODEL).update(inputs, names=NAMES)
    update = make_upload(MODEL, [inputs], ClientConfig(), names=NAMES)
    assert all(update.grads[n].equal(expected.grads[n]) for n in NAMES)
    assert not update.noise
    assert not update.rounding


# names and mistakes -------------------------------------------------------------------------------


def test_a_defense_is_one_line_of_text_and_comes_back_from_it() -> None:
    given = [{"dp_sgd": {"noise": 0.5, "clip": 2}}, {"top_k": 0.1}, "int8", {"float16": None}]
    lines = [canonical(item) for item in given]
    assert lines == ["dp_sgd 0.5 clip 2", "top_k 0.1", "int8", "float16"]
    defaults = ("percentile_privacy", {"percentile_privacy": None}, {"percentile_privacy": 10})
    assert {canonical(item) for item in defaults} == {"percentile_privacy 10"}
    assert [canonical(line) for line in lines] == lines
    braces = ClientConfig(defenses=("{dp_sgd: {noise: 0.5, clip: 2}}", "{int8:}"))
    assert braces.defenses == ("dp_sgd 0.5 clip 2", "int8")
    assert canonical({"dp_sgd": {"noise": 0.5, "clip": 1.0}}) == canonical({"dp_sgd": 0.5})


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ({"defenses": [{"dp_sdg": 0.5}]}, "Unknown defense 'dp_sdg'. Did you mean dp_sgd?"),
        ({"defenses": [{"dp_sgd": {"nois": 1}}]}, "Unknown option 'nois'. Did you mean noise?"),
        ({"defenses": [{"dp_sgd": {"clip": 1}}]}, "dp_sgd: expected its noise, got none"),
        ({"defenses": [{"dp_sgd": -1}]}, "dp_sgd: expected a noise of 0 or above"),
        ({"defenses": [{"gaussian_noise": -1}]}, "gaussian_noise.std: expected 0 or a number"),
        ({"defenses": [{"top_k": 0}]}, "top_k.share: expected a share above 0 and up to 1, got 0"),
        ({"defenses": [{"prune": 2}]}, "prune.share: expected a share above 0 and up to 1, got 2"),
        (
            {"defenses": [{"percentile_privacy": 101}]},
            "expected a percentile of 0 to 100 and a gamma above 0, got percentile 101 and gamma",
        ),
        (
            {"defenses": [{"percentile_privacy": {"gamma": 0}}]},
            "got percentile 10 and gamma 0. NVFlare's are 10 and 0.01.",
        ),
        ({"defenses": [{"top_k": "many"}]}, "top_k.share: expected a number, got 'many'"),
        ({"defenses": ["{top_k 1"]}, "A defense is written as {dp_sgd: 0.5} or as dp_sgd 0.5"),
        ({"defenses": ["top_k"]}, "expected its share, got none. Write {top_k: {share: 0.1}} or"),
        ({"defenses": [{"int8": 3}]}, "Defense int8: expected no value, got 3"),
        ({"defenses": [{"int8": 3, "float16": 1}]}, "A defense is a name or one name with"),
        (
            {"defenses": ["int8", {"dp_sgd": 1}]},
            "expected dp_sgd first and once, got it at place 2",
        ),
        ({"defenses": ["int8"], "server_lr": 1}, "client.defenses: expected one plain SGD step"),
        ({"defenses": ["int8"], "position_noise": 1}, "position_noise: expected 0 where there are"),
    ],
)
def test_a_mistake_is_named(client: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_experiment(mjp("c", {"name": "april"}, client=client))
    assert said in str(caught.value)
    assert "client" in str(caught.value)


def test_defenses_enter_the_identity_off_their_default_alone() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"defenses": ["int8"]},
        {"defenses": [{"top_k": 0.1}]},
        {"defenses": [{"top_k": 0.1}, "int8"]},
        {"upload": "weight_difference"},
        {"upload": "weight_difference", "steps": 2},
        {"upload": "weight_difference", "optimizer": "adamw"},
        {"upload": "weight_difference", "momentum": 0.9},
    ]
    keys = []
    for change in changes:
        experiment = load_experiment(mjp("c", {"name": "april"}, client=change))
        keys.append(cell_key(expand(experiment)[0], experiment))
    assert len(set(keys)) == len(changes)
    spelled = {"defenses": [], "steps": 1, "optimizer": "sgd", "momentum": 0}
    experiment = load_experiment(mjp("c", {"name": "april"}, client=spelled))
    assert cell_key(expand(experiment)[0], experiment) == keys[0]


def test_rows_say_what_was_done(tmp_path: Any) -> None:
    images = photographs(tmp_path / "images", 3)
    client = {"defenses": [{"gaussian_noise": 0.01}, "int8"]}
    config = mjp("c", {"name": "patch_gradient"}, client=client)
    assert run_attack(images, tmp_path / "run", config).exit_code == 0
    (entry,) = cells(tmp_path / "run")
    assert entry["defenses"] == "gaussian_noise 0.01 + int8"
    assert entry["pseudo_gradient"] == "exact"
