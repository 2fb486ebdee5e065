"""Every defence against a computation of its own, how defences are named, and errors that nobody
declares, from the client to the rows. What they declare is measured in tests/contract."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.defenses.disturbance import Disturbed, Draws
from mjp_privacy.client.defenses.published import PercentilePrivacy, Prune
from mjp_privacy.client.defenses.registry import DEFENSES, canonical, defense_of
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.interfaces import ClientInput, ClientUpdate, Grads
from mjp_privacy.uploads.memory import stacked
from tests.helpers import federations, uploads
from tests.helpers.models import some_images, some_labels, some_masks, tiny
from tests.helpers.runs import attack, one_cell, photographs, rows

NAMES = ["pos_embed", "patch_embed.proj.weight", "head.bias"]
MODEL = tiny(unknown_embedding=True)


def inputs_of(count: int, first: int = 0) -> ClientInput:
    part = slice(first, first + count)
    ids = tuple(f"image {i}" for i in range(8))[part]
    return ClientInput(some_images(8)[part], some_labels(8)[part], ids, some_masks(8)[part])


def sent(
    *defenses: Any, inputs: ClientInput | None = None, names: Any = None, **client: Any
) -> ClientUpdate:
    config = ClientConfig(defenses=defenses, **client)
    return make_upload(MODEL, [inputs or inputs_of(4)] * config.steps, config, names=names)


def flat(update: ClientUpdate) -> Tensor:
    return torch.cat([g.flatten(1) for g in update.grads.values()], 1)


# noise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "clip"), [(1, 0.3), (2, 0.3), (4, 1e6)])
def test_each_example_is_clipped_before_the_mean(batch: int, clip: float) -> None:
    """Against means of clipped gradients."""
    update = sent({"dp_sgd": {"noise": 0, "clip": clip}}, batch=batch)
    each = sent()  # one example a step, whose gradients tests/client/test_gradients.py asks about
    norms = flat(each).norm(dim=1)
    for name, gradient in each.grads.items():
        factors = (clip / norms).clamp(max=1).view(-1, *[1] * (gradient.ndim - 1))
        expected = (factors * gradient).unflatten(0, (-1, batch)).mean(1)
        torch.testing.assert_close(update.grads[name], expected, rtol=1e-8, atol=1e-12)
    assert not update.noise


def test_gaussian_noise_is_relative_to_the_whole_upload_and_told_as_it_shows() -> None:
    clean, loud, twice = (sent(*[{"gaussian_noise": 0.5}] * times) for times in (0, 1, 2))
    g = flat(clean)
    rms = (g.square().sum(1) / (g != 0).sum(1)).sqrt()
    level = (flat(loud) - g).std(1)
    assert (level / rms).tolist() == pytest.approx([0.5] * 4, rel=0.03)
    told = loud.noise["pos_embed"] / level
    assert ((told > 0.85) & (told < 1.05)).all()
    assert not (loud.grads["pos_embed"] == 0).any()
    both = torch.stack(((flat(loud) - g)[0], (flat(twice) - flat(loud))[0]))
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.05


# fewer bits ---------------------------------------------------------------------------------------


def kept(array: Any, share: float) -> Any:
    """The largest magnitudes, in NumPy."""
    least = np.sort(np.abs(array))[-max(1, round(share * array.size))]
    return np.where(np.abs(array) >= least, array, 0.0)


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_the_largest_entries_are_kept_of_the_upload_or_of_each_tensor(share: float) -> None:
    clean = sent()
    for one, few in zip(flat(clean), flat(sent({"top_k": share})), strict=True):
        assert np.array_equal(few.numpy(), kept(one.numpy(), share))
    for name, g in sent({"prune": share}).grads.items():
        for one, few in zip(clean.grads[name].flatten(1), g.flatten(1), strict=True):
            assert np.array_equal(few.numpy(), kept(one.numpy(), share))


def test_fewer_levels_are_what_their_names_say() -> None:
    clean, levels, halves, signs = sent(), sent("int8"), sent("float16"), sent("sign")
    for name, g in clean.grads.items():
        step = g.flatten(1).abs().amax(1).view(-1, *[1] * (g.ndim - 1)) / 127
        assert ((levels.grads[name] - g).abs() <= step / 2 * (1 + 1e-9)).all()
        number = levels.grads[name] / step.clamp_min(1e-300)
        assert torch.allclose(number, number.round(), atol=1e-6)
        assert halves.grads[name].equal(g.half().to(g))
        magnitude = g.abs().flatten(1).mean(1).view_as(step)
        torch.testing.assert_close(signs.grads[name], g.sign() * magnitude)


@pytest.mark.parametrize(
    ("percentile", "gamma", "steps"),
    [(10, 0.01, 1), (0, 0.002, 3), (50, 1e-4, 1), (99.9, 1, 3), (33.3, 0.05, 3)],
)
def test_percentile_privacy_does_what_nvflares_filter_does(
    percentile: float, gamma: float, steps: int
) -> None:
    """Written down in NumPy from its description."""
    client: dict[str, Any] = {"upload": "weight_difference", "steps": steps} if steps > 1 else {}
    defense = {"percentile_privacy": {"percentile": percentile, "gamma": gamma}}
    clean, update = (flat(sent(*line, **client)).numpy() for line in ((), (defense,)))
    for entries, found in zip(clean / steps, update, strict=True):
        cutoff = np.percentile(np.abs(entries), percentile)
        kept = np.clip(np.where(np.abs(entries) < cutoff, 0, entries), -gamma, gamma)
        np.testing.assert_allclose(found, steps * kept, rtol=1e-12)


def test_percentile_privacy_leaves_single_numbers_alone_and_says_what_it_cannot_know() -> None:
    numbers = torch.linspace(-0.5001, 0.5001, 10_001, dtype=torch.float64).expand(2, 10_001)
    given = {"scale": torch.tensor([5.0, 6.0]), "weight": numbers, "half": 2 * numbers}
    given["bias"] = numbers[:, -20:] + 1
    filter_, draws = PercentilePrivacy(percentile=10, gamma=0.5), Draws(0, ["a", "b"], 0)
    altered = filter_.apply(given, draws)
    assert altered.sent["scale"].equal(given["scale"])
    # 4 of 10,001 entries of the weight were cut, and all of the bias
    expected = {"weight": [False] * 2, "half": [True] * 2, "bias": [True] * 2}
    assert {name: known.tolist() for name, known in altered.unknown.items()} == expected
    assert altered.undeclared(given)["bias"].tolist() == [True, True]
    assert not altered.undeclared(given)["weight"].any()
    loud = filter_.apply({"weight": 100 * given["weight"]}, draws)
    assert loud.unknown["weight"].tolist() == [True, True]  # nothing is left below gamma
    exponential = -torch.rand(1, 100_000, dtype=torch.float64).log() * 0.2
    altered = filter_.apply({"weight": exponential}, Draws(0, ["a"], 0))
    error = (altered.sent["weight"] - exponential).square().mean().sqrt()
    assert float(altered.rounding["weight"] / error) == pytest.approx(1, rel=0.05)


# together, and by name ----------------------------------------------------------------------------


def test_defenses_are_applied_in_their_order_to_what_is_not_withheld() -> None:
    """`clipped` says that whole examples were scaled; a cut of entries is another thing."""
    few, loud = {"top_k": 0.1}, {"gaussian_noise": 0.5}
    for order, zeros in (((few, loud), 0.0), ((loud, few), 0.9)):
        share = float((flat(sent(*order)) == 0).double().mean())
        assert share == pytest.approx(zeros, abs=0.001)
    assert not sent({"percentile_privacy": 10}).clipped
    clipped = sent({"dp_sgd": {"noise": 0, "clip": 0.1}}, withhold=("blocks.0.mlp.fc1.weight",))
    assert "blocks.0.mlp.fc1.weight" not in clipped.grads
    assert flat(clipped).norm(dim=1).tolist() == pytest.approx([0.1] * 4)
    assert clipped.clipped


def test_a_defense_is_one_line_of_text_and_comes_back_from_it() -> None:
    lines = ["dp_sgd 0.5 clip 2", "top_k 0.1", "int8", "float16"]
    given = [{"dp_sgd": {"noise": 0.5, "clip": 2}}, {"top_k": 0.1}, "int8", {"float16": None}]
    assert [canonical(item) for item in given] == [canonical(line) for line in lines] == lines
    defaults = ("percentile_privacy", {"percentile_privacy": None}, {"percentile_privacy": 10})
    assert {canonical(item) for item in defaults} == {"percentile_privacy 10"}


def test_what_came_of_a_defense_is_told_once() -> None:
    with pytest.raises(UserError) as caught:
        ClientConfig(defenses=["prune 2"])
    assert str(caught.value).count("got") == 1


PRUNE = "mjp_privacy.client.defenses.published:Prune"


@pytest.mark.parametrize("where", [f"{__name__}:Draws", PRUNE])
def test_a_defense_that_is_not_whole_or_has_another_name_is_refused(where: str) -> None:
    with patch.dict(DEFENSES, {"idle": Entry(where)}), pytest.raises(UserError) as caught:
        defense_of("idle")
    assert where in str(caught.value)


# errors that nobody declares ----------------------------------------------------------------------


@dataclass(frozen=True)
class Forgetful:
    """Prunes as `prune` does, and forgets to declare the error."""

    share: float
    name: ClassVar[str] = "forgetful"
    main: ClassVar[str | None] = "share"

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        return Disturbed(Prune(self.share).apply(sent, draws).sent)


@pytest.fixture
def forgetful() -> Iterator[None]:
    with patch.dict(DEFENSES, {"forgetful": Entry(f"{__name__}:Forgetful")}):
        yield
    defense_of.cache_clear()


ADAMW = {"optimizer": "adamw", "upload": "weight_difference"}


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("defenses", "client", "hidden"),
    [
        ([], {}, None),
        (["int8"], {}, False),
        ([{"gaussian_noise": 0}], {}, False),
        ([{"dp_sgd": 0}], {}, False),  # only scales, which `clipped` says
        ([{"dp_sgd": 1}], {}, False),
        ([{"dp_sgd": 1}], ADAMW, True),  # it divides the noise by numbers that stay with the client
        ([{"forgetful": 1}], {}, False),  # nothing was changed
        (["int8", {"forgetful": 0.5}, {"gaussian_noise": 0.1}], {}, True),
    ],
)
def test_the_client_notices(defenses: Any, client: dict[str, Any], hidden: bool | None) -> None:
    found = sent(*defenses, inputs=inputs_of(2), names=NAMES, **client).undeclared
    assert (found is None) == (hidden is None)
    assert found is None or found.tolist() == [hidden] * 2


def diagnostic(found: Any) -> list[float]:
    return sorted(set(found[found["metric"] == "undeclared_error"]["value"]))


@pytest.mark.usefixtures("forgetful")
def test_a_run_marks_it_and_a_recorded_upload_keeps_the_fact(tmp_path: Path) -> None:
    """Also where another defence of the recipe declares its error."""
    pictures = photographs(tmp_path / "images", 3)
    for defense, expected in (("prune 0.5", 0.0), ("forgetful 0.5", 1.0)):
        config = one_cell(attacks=[{"name": "patch_gradient"}], client={"defenses": [defense]})
        assert attack(pictures, tmp_path / defense, config, limit=1).exit_code == 0
        assert diagnostic(rows(tmp_path / defense)) == [expected]
    client = {"batch": 3, "defenses": ["int8", {"forgetful": 0.5}]}
    folder = federations.run(tmp_path, client=client) / "uploads"
    assert all(json.loads(path.read_text())["undeclared"] for path in folder.glob("*.json"))
    assert diagnostic(uploads.attacked(folder, **uploads.ONE)[2]) == [1.0]


def test_a_header_that_names_defences_and_declares_nothing_is_flagged(tmp_path: Path) -> None:
    folder, error = federations.run(tmp_path) / "uploads", {"pos_embed": 1e-6}
    for recipe, noise, rounding, expected in (
        ([], {}, {}, None),
        (["int8"], {}, error, [False]),
        (["dp_sgd 0.5"], {}, {}, [True]),
        (["dp_sgd 0.5"], error, {}, [False]),
        (["dp_sgd 0"], {}, {}, [False]),  # clips alone
    ):
        fields = {"recipe": {"defenses": recipe} if recipe else {}, "noise": noise}
        uploads.edit_all(folder, **fields, rounding=rounding)
        update = stacked(uploads.load_uploads(folder)[:1], NAMES, torch.device("cpu"))
        assert (None if update.undeclared is None else update.undeclared.tolist()) == expected
