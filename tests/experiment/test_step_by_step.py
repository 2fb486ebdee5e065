"""Parts of inputs, uploads and views, and reconstructions of single steps put together again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from mjp_privacy.experiment.step_by_step import joined, reconstruct, without_reconstruction

from mjp_privacy.interfaces import (
    AttackerView,
    ClientInput,
    ClientUpdate,
    Pixels,
    Reconstruction,
)
from tests.helpers.models import tiny


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(int(torch.tensor(shape).prod())).reshape(shape).float()


def view_of(steps: int, batch: int = 2) -> AttackerView:
    update = ClientUpdate(
        {"w": numbers(steps, 3)},
        batch=batch,
        noise={"w": numbers(steps)},
        rounding={"w": numbers(steps) + 10},
    )
    pixels = Pixels(8, (0.5,) * 3, (0.5,) * 3)
    return AttackerView(tiny(), [update, update], pixels, labels=torch.arange(steps * batch))


def test_part_of_an_input_holds_some_images() -> None:
    mask = torch.tensor([[True, False], [False, True], [True, True]])
    inputs = ClientInput(numbers(3, 1, 2, 2), torch.arange(3), ("a", "b", "c"), mask, mask.long())
    part = inputs.part(slice(1, 3))
    assert part.images.equal(inputs.images[1:])
    assert (part.labels.tolist(), tuple(part.image_ids)) == ([1, 2], ("b", "c"))
    assert part.mask is not None
    assert part.mask.equal(mask[1:])
    assert part.permutation is not None
    plain = ClientInput(inputs.images, inputs.labels, inputs.image_ids).part(slice(0, 1))
    assert (plain.mask, plain.permutation) == (None, None)


def test_part_of_a_view_is_one_step_of_every_upload() -> None:
    view = view_of(3)
    part = view.part(1)
    assert len(part.updates) == 2
    for update in part.updates:
        assert update.grads["w"].tolist() == [[3.0, 4.0, 5.0]]
        assert (update.noise["w"].tolist(), update.rounding["w"].tolist()) == ([1.0], [11.0])
        assert update.batch == 2
    assert part.labels is not None
    assert part.labels.tolist() == [2, 3]
    assert view.updates[0].grads["w"].shape == (3, 3)  # the whole view is as it was


def test_parts_that_lack_something_are_filled() -> None:
    whole = Reconstruction(
        numbers(2, 3, 2, 2),
        mask=torch.tensor([[True], [False]]),
        permutation=torch.tensor([[0], [0]]),
        diagnostics={"cond_a": torch.tensor([1.0, 2.0])},
        inapplicable={1: "too dark"},
    )
    bare = Reconstruction(torch.full((1, 3, 2, 2), torch.nan))
    both = joined([bare, whole])
    assert both.images is not None
    assert both.images.shape == (3, 3, 2, 2)
    assert both.mask is not None
    assert both.mask.tolist() == [[False], [True], [False]]
    assert both.diagnostics["cond_a"].isnan().tolist() == [True, False, False]
    assert dict(both.inapplicable) == {2: "too dark"}
    assert joined([bare, bare]).mask is None


def test_what_has_no_reconstruction_and_should() -> None:
    images = torch.zeros(3, 3, 2, 2)
    images[1] = torch.nan
    images[2] = torch.inf
    made = Reconstruction(images, inapplicable={2: "not for it"})
    assert without_reconstruction(made, 3) == {1: "the reconstruction is not finite"}
    assert set(without_reconstruction(Reconstruction(None), 2)) == {0, 1}
    assert without_reconstruction(Reconstruction(None, mask=torch.ones(2, 4)), 2) == {}


@dataclass
class Breaking:
    """Its linear algebra breaks down where a view holds a step whose first number is in `bad`."""

    bad: tuple[float, ...]
    seen: list[float] = field(default_factory=list)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        first = view.updates[0].grads["w"][:, 0].tolist()
        if set(first) & set(self.bad):
            raise torch.linalg.LinAlgError("no convergence")
        self.seen.append(float(torch.rand((), generator=generator)))
        return Reconstruction(torch.zeros(len(first) * 2, 3, 8, 8))


def generator_of(asked: list[int]) -> Callable[[int], torch.Generator]:
    def make(step: int) -> torch.Generator:
        asked.append(step)
        return torch.Generator().manual_seed(step)

    return make


def test_a_block_without_a_breakdown_is_one_call() -> None:
    asked: list[int] = []
    made, reasons = reconstruct(Breaking(()), view_of(3), 3, generator_of(asked))  # type: ignore[arg-type]
    assert made.images is not None
    assert (len(made.images), reasons, asked) == (6, {}, [0])


@pytest.mark.parametrize("bad", [0.0, 3.0, 6.0])
def test_a_step_that_breaks_down_loses_its_own_images_alone(bad: float) -> None:
    asked: list[int] = []
    attack = Breaking((bad,))
    made, reasons = reconstruct(attack, view_of(3), 3, generator_of(asked))  # type: ignore[arg-type]
    lost = int(bad // 3)
    assert set(reasons) == {2 * lost, 2 * lost + 1}
    assert all("no convergence" in reason for reason in reasons.values())
    assert made.images is not None
    assert made.images.isnan().flatten(1).any(-1).nonzero().flatten().tolist() == sorted(reasons)
    assert asked == [0, 0, 1, 2]  # the block, then each step from its own beginning
    expected = [torch.rand((), generator=torch.Generator().manual_seed(s)) for s in range(3)]
    assert attack.seen == [float(e) for s, e in enumerate(expected) if s != lost]
