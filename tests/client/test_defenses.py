"""Every defence against a computation of its own, and how defences are named."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.defenses.compression import PercentilePrivacy
from mjp_privacy.client.defenses.disturbance import Draws
from mjp_privacy.client.defenses.registry import DEFENSES, canonical, defense_of
from mjp_privacy.client.gradients import Objective
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from tests.helpers.models import some_images, some_labels, some_masks
from tests.helpers.models import tiny as tiny_model

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
    return make_upload(MODEL, [inputs or inputs_of(4)] * config.steps, config, names=names)


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


def test_float16_and_sign_are_what_their_names_say() -> None:
    """Their errors are measured in tests/contract."""
    clean, halves, signs = sent(), sent("float16"), sent("sign")
    for name, g in clean.grads.items():
        assert halves.grads[name].equal(g.half().to(g))
        magnitude = g.abs().flatten(1).mean(1).view(-1, *[1] * (g.ndim - 1))
        torch.testing.assert_close(signs.grads[name], g.sign() * magnitude)


@pytest.mark.parametrize("defense", [{"gaussian_noise": 0.5}, {"dp_sgd": 0.5}])
def test_noise_does_not_move_with_the_block_nor_with_the_names(defense: Any) -> None:
    whole = sent(defense)
    alone = sent(defense, inputs=inputs_of(1, first=2), names=NAMES)
    assert list(alone.grads) == NAMES
    for name in NAMES:
        torch.testing.assert_close(alone.grads[name][0], whole.grads[name][2])
    for other in ({"round": 1}, {"seed": 1}):
        drawn = make_upload(MODEL, [inputs_of(4)], ClientConfig(defenses=(defense,)), **other)
        assert not torch.allclose(drawn.grads["head.bias"], whole.grads["head.bias"])


def test_defenses_are_applied_in_their_order() -> None:
    noisy_last = sent({"top_k": 0.1}, {"gaussian_noise": 0.5})
    sparse_last = sent({"gaussian_noise": 0.5}, {"top_k": 0.1})
    assert float((flat(noisy_last) == 0).double().mean()) == 0
    assert float((flat(sparse_last) == 0).double().mean()) == pytest.approx(0.9, abs=0.001)
    twice, once = (sent(*[{"gaussian_noise": 0.5}] * times) for times in (2, 1))
    steps = [flat(once) - flat(sent()), flat(twice) - flat(once)]  # each draws for itself
    assert abs(float(torch.corrcoef(torch.stack([s[0] for s in steps]))[0, 1])) < 0.05


def test_withheld_parameters_are_no_part_of_the_clip() -> None:
    """`clipped` says that whole examples were scaled; a cut of entries is another thing."""
    assert not sent({"percentile_privacy": 10}).clipped
    kept = sent({"dp_sgd": {"noise": 0, "clip": 0.1}}, withhold=("blocks.0.mlp.fc1.weight",))
    assert "blocks.0.mlp.fc1.weight" not in kept.grads
    assert flat(kept).norm(dim=1).tolist() == pytest.approx([0.1] * 4)
    assert kept.clipped


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_prune_keeps_the_largest_of_each_tensor(share: float) -> None:
    clean, update = sent(), sent({"prune": share})
    for name, g in clean.grads.items():
        for one, few in zip(g.flatten(1).numpy(), update.grads[name].flatten(1), strict=True):
            kept = max(1, round(share * one.size))
            least = np.sort(np.abs(one))[-kept]
            assert np.array_equal(few.numpy(), np.where(np.abs(one) >= least, one, 0.0))
    name = "blocks.0.attn.qkv.weight"
    least = update.grads[name].flatten(1).abs().masked_fill(update.grads[name].flatten(1) == 0, 9)
    dropped = (update.grads[name] == 0).flatten(1).double().mean(1)
    expected = least.amin(1) * (dropped / 3).sqrt()  # uniform below the smallest that was kept
    torch.testing.assert_close(update.rounding[name], expected)


def filtered(update: dict[str, Any], steps: int, percentile: float, gamma: float) -> dict[str, Any]:
    """NVFlare's PercentilePrivacy, written down in NumPy from its description."""
    per_step = {name: array / steps for name, array in update.items()}
    sizes = np.concatenate([np.abs(array).ravel() for array in per_step.values()])
    cutoff = np.percentile(sizes, percentile)
    kept = {name: np.where(np.abs(x) < cutoff, 0.0, x) for name, x in per_step.items()}
    return {name: steps * np.clip(x, -gamma, gamma) for name, x in kept.items()}


@pytest.mark.parametrize(
    ("percentile", "gamma"), [(10, 0.01), (0, 0.002), (50, 1e-4), (99.9, 1), (33.3, 0.05)]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_percentile_privacy_does_what_nvflares_filter_does(
    percentile: float, gamma: float, steps: int
) -> None:
    client: dict[str, Any] = {"upload": "weight_difference", "steps": steps} if steps > 1 else {}
    defense = {"percentile_privacy": {"percentile": percentile, "gamma": gamma}}
    clean, update = sent(**client), sent(defense, **client)
    for place in range(4):
        expected = filtered(
            {name: g[place].numpy() for name, g in clean.grads.items()}, steps, percentile, gamma
        )
        for name, array in expected.items():
            np.testing.assert_allclose(update.grads[name][place].numpy(), array, rtol=1e-12)


def test_percentile_privacy_leaves_single_numbers_alone_and_says_what_it_cannot_know() -> None:
    numbers = torch.linspace(-0.5001, 0.5001, 10_001, dtype=torch.float64).expand(2, 10_001)
    given = {
        "scale": torch.tensor([5.0, 6.0]),
        "weight": numbers,
        "half": 2 * numbers,
        "bias": numbers[:, -20:] + 1,
    }
    draws = Draws(0, ["a", "b"], 0)
    filter_ = PercentilePrivacy(percentile=10, gamma=0.5)
    altered = filter_.apply(given, draws)
    assert altered.sent["scale"].equal(given["scale"])
    assert {name: known.tolist() for name, known in altered.unknown.items()} == {
        "weight": [False, False],  # 4 of 10,001 entries were cut
        "half": [True, True],
        "bias": [True, True],  # all of it was cut
    }
    assert altered.undeclared(given)["bias"].tolist() == [True, True]
    assert not altered.undeclared(given)["weight"].any()
    loud = filter_.apply({"weight": 100 * given["weight"]}, draws)
    assert loud.unknown["weight"].tolist() == [True, True]  # nothing is left below gamma
    exponential = -torch.rand(1, 100_000, dtype=torch.float64).log() * 0.2
    altered = filter_.apply({"weight": exponential}, Draws(0, ["a"], 0))
    error = (altered.sent["weight"] - exponential).square().mean().sqrt()
    assert float(altered.rounding["weight"] / error) == pytest.approx(1, rel=0.05)


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


@dataclass(frozen=True)
class Idle:
    """Does nothing, and has no `apply`."""

    name: ClassVar[str] = "idle"
    main: ClassVar[str | None] = None


PRUNE = "mjp_privacy.client.defenses.compression:Prune"


class Loose:
    """No dataclass."""

    name = "idle"
    main = None

    def apply(self) -> None: ...


@pytest.mark.parametrize("where", [f"{__name__}:Idle", f"{__name__}:Loose", PRUNE])
def test_a_defense_that_is_not_whole_or_has_another_name_is_refused(where: str) -> None:
    with DEFENSES.registered("idle", Entry(where)), pytest.raises(UserError) as caught:
        defense_of("idle")
    assert where in str(caught.value)
