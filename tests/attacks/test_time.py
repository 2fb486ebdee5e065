"""The time of an attack: whose is spent, what looks at it and gives what it has, and what stops
the rest. The lattice is in test_lattices."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks import find_attack, jigsaw
from attacks.budget import OverBudget, image, limited, spent
from attacks.equations import filling
from attacks.equations.span import Knowledge
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.models.jigsaw import Grid
from tests.helpers.models import planted_model
from tests.helpers.night import nightly
from tests.helpers.planted import planted_images, planted_view


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("span_matching", {"restarts": 1000, "prior_weight": 1e-6, "prior": "stationary"}),
        nightly("inverting_gradients", {"restarts": 2}),
        nightly("april_optimization", {"restarts": 2}),
        nightly("gradvit", {"seeds": 2}),
    ],
)
def test_matching_gives_the_best_picture_so_far(name: str, again: dict[str, Any]) -> None:
    attack = find_attack(name, {"steps": 100_000, **again})
    images, client = planted_images(2, 8), ClientConfig(batch=2)
    model = planted_model(img_size=8, depth=2)
    view, _ = planted_view(model, attack, "a", images=images, client=client)
    began = time.thread_time()
    with limited(1.0, 2) as budget:
        made = attack.run(view, generator=torch.Generator().manual_seed(0))
    assert budget.cut == {0, 1}
    assert time.thread_time() - began < 4.0
    assert made.images.isfinite().all()
    if name != "span_matching":
        assert (made.diagnostics["steps"] > 1).all()
        short = find_attack(name, {"steps": 1}).run(view, generator=torch.Generator())
        closer = made.diagnostics["cosine_distance"] < short.diagnostics["cosine_distance"]
        assert closer.all()


def test_a_jigsaw_is_put_together_as_far_as_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jigsaw, "ROUNDS", 1_000_000)
    pieces = torch.rand(36, 3 * 16 * 16, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(36, dtype=torch.bool)
    began = time.thread_time()
    with limited(0.05) as budget:
        order = jigsaw.solve(pieces, mask, pieces, grid=Grid(6, 6), patch_size=16)
    assert budget.cut == {0}
    assert time.thread_time() - began < 1.0
    assert sorted(order.tolist()) == list(range(36))


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_each_image_has_its_own_time_over_all_pieces_of_work() -> None:
    """Without a budget nothing is spent, and a sleeping process spends none."""
    with image(0):
        busy(0.01)
        assert not spent()
    with limited(0.05, images=3) as budget:
        for place in (0, 1, 2):
            with image(place):
                busy(0.03)
                assert not spent()
        with image(1):
            busy(0.03)
            assert spent()
        with image(2):
            time.sleep(0.1)
            assert not spent()
    assert budget.cut == {1}


def test_a_shared_picture_is_filled_in_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    filled, now = list[float](), [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])

    def fill(knowledge: Knowledge, energy: object) -> Tensor:
        """The fourth picture takes longer than it may."""
        now[0] += 200.0 * (len(filled) == 3)
        filled.append(spent())
        return knowledge.known

    monkeypatch.setattr(filling, "complete", fill)
    attack = find_attack("shared_picture", {"prior": "stationary"})
    client = ClientConfig(batch=2, partners="fresh")
    images, model = planted_images(4, 8), planted_model(img_size=8, depth=1)
    view, _ = planted_view(model, attack, "a", images=images, client=client)
    with limited(100.0, 4) as budget:
        attack.run(view, generator=torch.Generator())
    assert filled == [False, False, False, True]
    assert budget.cut == {3}


def test_outside_of_its_images_a_call_has_the_time_of_all() -> None:
    with limited(0.02, images=2) as budget:
        busy(0.03)
        assert not spent()
        busy(0.02)
        assert spent()
    assert budget.cut == {0, 1}


def test_an_attack_that_is_stopped_as_it_leaves_no_grad_leaves_gradients_on() -> None:
    with pytest.raises(OverBudget), limited(0.01), torch.no_grad():
        busy(0.05)
    assert torch.is_grad_enabled()
