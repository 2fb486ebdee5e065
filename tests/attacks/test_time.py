"""The attacks that search look at their time: past it they give what they have."""

from __future__ import annotations

import math
import time

import pytest
import torch

from attacks import find_attack
from attacks.budget import Budget, OverBudget, image, limited, spent
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.data import load_images
from mjp_privacy.interfaces import Attack, AttackerView, Pixels, Reconstruction
from mjp_privacy.models import LoadedModel
from tests.helpers.models import tiny_model

SIDE, PATCH = 96, 16
HOUR = 3600.0


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    shape = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": 96, "num_heads": 4}
    return tiny_model(
        shape | {"depth": 1, "num_classes": 10, "mean": 0.5, "std": 0.5},
        weights="drawn",
        unknown_embedding=True,
    )


def built(name: str, **options: object) -> Attack:
    return find_attack(name, options)


def view_of(
    attack: Attack, model: LoadedModel, images: int = 1, gamma: float = 0.5
) -> AttackerView:
    pixels = torch.stack([i.image for i in load_images("embedded", size=SIDE, limit=images)])
    labels, ids = torch.zeros(images, dtype=torch.long), [str(index) for index in range(images)]
    inputs = SETTINGS["c"].prepare(
        pixels, labels, ids, patch_size=PATCH, gamma=gamma, round=0, seed=0
    )
    update = FedSGDClient(model, ClientConfig()).update(inputs, names=list(attack.needs(model)))
    size = Pixels(SIDE, model.card.mean, model.card.std)
    return AttackerView(model, [update], size, labels, "plain")


def timed(
    attack: Attack, view: AttackerView, seconds: float
) -> tuple[Reconstruction, set[int], float]:
    """What the attack gives in this time, the images that it ended, and the time that it took."""
    began = time.thread_time()
    with limited(seconds, len(view.updates[0].grads["patch_embed.proj.weight"])) as budget:
        made = attack.run(view, generator=torch.Generator().manual_seed(0))
    return made, budget.cut, time.thread_time() - began


class Questions:
    """Counts how often an attack asks for its time, and has it end at the last that it may ask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.last = math.inf
        answer = Budget.spent

        def spent(budget: Budget) -> bool:
            self.asked += 1
            if self.asked >= self.last:
                budget._until = -math.inf
            return answer(budget)

        monkeypatch.setattr(Budget, "spent", spent)

    def end_at(self, question: float) -> None:
        self.asked, self.last = 0, question


def test_the_lattice_gives_the_spans_picture_where_its_search_is_ended(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks some 780 times in all, and has the picture after 80 to 190 questions."""
    attack, span = built("pixel_lattice"), built("masked_span")
    view, questions = view_of(attack, model), Questions(monkeypatch)
    guess = timed(span, view, HOUR)[0].images
    guessing = questions.asked
    for question, found in ((1, 0), (guessing + 1, 0), (guessing + 40, 0), (math.inf, 1)):
        questions.end_at(question)
        made, cut, _ = timed(attack, view, HOUR)
        assert cut == (set() if found else {0})
        assert questions.asked < question + 20  # it ends soon after
        assert made.diagnostics["lattice_found"].item() == found
        assert made.images.isfinite().all()
        if guessing < question < math.inf:  # before, the guess itself is ended
            assert torch.allclose(made.images, guess, atol=1e-12)


def test_the_lattice_ends_soon_after_its_time(model: LoadedModel) -> None:
    attack, span = built("pixel_lattice"), built("masked_span")
    view = view_of(attack, model)
    guessing = timed(span, view, HOUR)[2]
    seconds = 2 * guessing + 0.05
    made, cut, took = timed(attack, view, seconds)
    assert took < 2 * seconds + guessing + 1.0  # one call of LLL is not interrupted
    assert made.diagnostics["lattice_found"].item() == (0 if cut else 1)


def test_a_search_that_ends_in_time_is_the_same_under_a_budget(model: LoadedModel) -> None:
    attack = built("pixel_lattice", prior="stationary")
    view = view_of(attack, model, gamma=0.1)
    made, cut, _ = timed(attack, view, HOUR)
    free = attack.run(view, generator=torch.Generator())
    assert not cut
    assert made.images.equal(free.images)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "again"),
    [("inverting_gradients", "restarts"), ("april_optimization", "restarts"), ("gradvit", "seeds")],
)
def test_matching_gives_the_best_picture_so_far(model: LoadedModel, name: str, again: str) -> None:
    attack = built(name, steps=1_000_000, **{again: 2})
    view = view_of(attack, model)
    short = built(name, steps=10).run(view, generator=torch.Generator().manual_seed(0))
    made, cut, took = timed(attack, view, 2.0)
    assert cut == {0}
    assert took < 4.0
    assert made.images.isfinite().all()
    assert 1 < made.diagnostics["steps"].item() < 100_000
    better = made.diagnostics["cosine_distance"] < short.diagnostics["cosine_distance"]
    assert better.all()


def test_a_jigsaw_is_put_together_as_far_as_time_allows(model: LoadedModel) -> None:
    from attacks.jigsaw import solve

    pieces = torch.rand(36, 3 * PATCH * PATCH, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(36, dtype=torch.bool)
    began = time.thread_time()
    with limited(0.05) as budget:
        order = solve(pieces, mask, pieces, grid=6, patch_size=PATCH, rounds=1_000_000)
    assert budget.cut == {0}
    assert time.thread_time() - began < 1.0
    assert sorted(order.tolist()) == list(range(36))


# the clock of an attack's budget: whose time is spent, and what stops what does not look ----------


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_without_a_budget_nothing_is_spent() -> None:
    with image(0):
        busy(0.01)
        assert not spent()


def test_each_image_has_its_own_time_over_all_pieces_of_work() -> None:
    with limited(0.05, images=3) as budget:
        for place in (0, 1, 2):
            with image(place):
                busy(0.03)
                assert not spent()
        with image(1):
            busy(0.03)
            assert spent()
        with image(2):
            assert not spent()
    assert budget.cut == {1}


def test_a_sleeping_process_uses_none_of_it() -> None:
    with limited(0.05), image(0):
        time.sleep(0.2)
        assert not spent()


def test_outside_of_its_images_a_call_has_the_time_of_all() -> None:
    with limited(0.02, images=2) as budget:
        busy(0.03)
        assert not spent()
        busy(0.02)
        assert spent()
    assert budget.cut == {0, 1}


def for_ever() -> None:
    while True:
        torch.ones(10).sum()


def test_torch_stops_what_does_not_look() -> None:
    began = time.thread_time()
    with pytest.raises(OverBudget, match=r"over budget: attack\.seconds = 0\.1"), limited(0.1):
        for_ever()
    assert time.thread_time() - began < 0.2


def test_gradients_are_the_same_under_a_budget() -> None:
    def gradient() -> torch.Tensor:
        x = torch.linspace(0, 1, 6).reshape(2, 3).requires_grad_()
        return torch.func.vmap(torch.func.grad(lambda row: (row.sin() ** 2).sum()))(x)

    with limited(10.0):
        assert gradient().equal(gradient())
        inside = gradient()
    assert inside.equal(gradient())
