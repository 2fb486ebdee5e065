"""The contract of defences, tried on defences that break it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from mjp_privacy.client.defenses.disturbance import Disturbed, Draws
from mjp_privacy.client.defenses.registry import StepDefense, defense_of
from mjp_privacy.interfaces import Grads
from tests.contract import defense_errors
from tests.contract.defense_errors import complaints, copied, declared, step_complaints
from tests.contract.planted_uploads import planted_uploads
from tests.contract.test_defenses import each_line, each_whole

SILENT = "and declares no error."


@dataclass(frozen=True)
class Careless:
    """Another defence, of whose error it declares only a part."""

    defense: Any
    share: float  # of the declared error; 0: nothing
    main: ClassVar[str | None] = None

    @property
    def name(self) -> str:
        return f"careless {self.defense.name}"

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        altered = self.defense.apply(sent, draws)
        if not self.share:
            return Disturbed(altered.sent)
        noise, rounding = (
            {name: self.share * size for name, size in sizes.items()}
            for sizes in (altered.noise, altered.rounding)
        )
        return replace(altered, noise=noise, rounding=rounding)


@dataclass(frozen=True)
class CarelessStep:
    """Another defence of a step, of whose noise it declares only a part."""

    defense: Any
    share: float
    main: ClassVar[str | None] = None
    name: ClassVar[str] = "careless step"

    def step_gradient(self, examples: Grads, draws: Draws) -> dict[str, torch.Tensor]:
        return self.defense.step_gradient(examples, draws)

    def deviation(self, batch: int) -> float:
        return self.share * float(self.defense.deviation(batch))


def _all_complaints(defense: Any) -> Iterator[str]:
    for upload in planted_uploads():
        if isinstance(defense, StepDefense):
            yield from step_complaints(defense, upload, 1)
        else:
            yield from complaints(defense, upload)


@pytest.mark.nightly
@each_line
def test_half_of_the_error_is_too_little(line: str) -> None:
    """The bound is as tight as it can be: of no defence may half of what it declares pass."""
    defense = defense_of(line)
    careless: Any
    if isinstance(defense, StepDefense):
        if not defense.deviation(1):
            pytest.skip("it adds no noise")
        careless, expected = CarelessStep(defense, 0.5), "adds noise of"
    else:
        if any(text.endswith(SILENT) for text in _all_complaints(defense)):
            pytest.skip("it declares no error; another test says so")
        careless, expected = Careless(defense, 0.5), "makes an error of"
        nearly_silent = _all_complaints(Careless(defense, 1e-9))
        if not any(expected in text for text in nearly_silent):
            pytest.skip("it says of every tensor that its error is not known")
    sentences = list(_all_complaints(careless))
    assert any(expected in sentence for sentence in sentences), (
        f"{line} declares far more than the error that it makes, on every planted upload: half of "
        "it would do. Attacks that think an upload worse than it is make a client look safer too."
    )


@each_whole
def test_silence_is_found(line: str) -> None:
    sentences = list(_all_complaints(Careless(defense_of(line), 0.0)))
    assert any(text.endswith(SILENT) for text in sentences)


@dataclass(frozen=True)
class Peeking:
    """Declares the size of its noise as the private gradient tells it."""

    name: ClassVar[str] = "peeking"
    main: ClassVar[str | None] = None

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        altered = defense_of("gaussian_noise 0.3").apply(sent, draws)
        return replace(altered, noise={n: defense_errors.deviation(g) for n, g in sent.items()})


def test_a_size_from_the_private_gradient_is_found() -> None:
    upload = planted_uploads()[0]
    altered = Peeking().apply(copied(upload.sent), upload.draws())
    again = defense_errors.upload_with_the_same_result(Peeking(), upload, altered)
    one, other = declared(altered, "pos_embed"), declared(again, "pos_embed")
    assert not torch.allclose(one, other, rtol=0.05)


@dataclass(frozen=True)
class Trimming:
    """Takes the larger half of each example alone, and calls it a step."""

    name: ClassVar[str] = "trimming"
    main: ClassVar[str | None] = None

    def step_gradient(self, examples: Grads, draws: Draws) -> dict[str, torch.Tensor]:
        return {n: torch.where(g.abs() < 0.5, 0.0, g).mean(1) for n, g in examples.items()}

    def deviation(self, batch: int) -> float:
        return 0.0


def test_a_step_that_does_more_than_scale_its_examples_is_found() -> None:
    (sentence,) = step_complaints(Trimming(), planted_uploads()[0], 2)
    assert (
        "trimming with 2 example(s) a step on the normal gradient changes the gradient" in sentence
    )
    assert "what else changes an upload is an UploadDefense, which declares its error" in sentence
