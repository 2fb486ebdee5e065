"""Prepared references: the same scores as from images, and nothing computed twice."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics import References, prepare, score
from mjp_privacy.metrics.pictures import Metric, Prepared

GENERATOR = torch.Generator().manual_seed(0)


def pictures(side: int, *, on_levels: bool, count: int = 5) -> Tensor:
    values = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(side))
    return (values * 255).round() / 255 if on_levels else values


@pytest.mark.parametrize("side", [32, 33, 57])
@pytest.mark.parametrize("on_levels", [True, False])
def test_prepared_references_give_the_scores_of_images(side: int, on_levels: bool) -> None:
    originals = pictures(side, on_levels=on_levels)
    noisy = (originals + 0.1 * torch.randn(originals.shape, generator=GENERATOR)).clamp(0, 1)
    half = torch.cat([originals[:2], noisy[2:]])  # on levels, the first two are alike
    known = prepare(originals)
    for attempt in (noisy, half, torch.full_like(originals, 0.5), originals * 0):
        plain, prepared = score(attempt, originals), score(attempt, known)
        assert list(plain) == list(prepared)
        assert all(np.array_equal(plain[key], prepared[key]) for key in plain)


@dataclass(frozen=True)
class Counted:
    """A network that counts what it was asked: the mean of the difference."""

    precision: ClassVar[torch.dtype] = torch.float32
    prepared: ClassVar[list[int]] = []
    compared: ClassVar[list[int]] = []

    def prepare(self, references: Tensor) -> Prepared:
        self.prepared.append(len(references))
        return (references.flatten(1).mean(1),)

    def compare(self, reconstructions: Tensor, references: Tensor, prepared: Prepared) -> Tensor:
        self.compared.append(len(reconstructions))
        return reconstructions.flatten(1).mean(1) - prepared[0]


@pytest.mark.parametrize(
    ("on_levels", "prepared", "compared"), [(True, [5], [5, 3]), (False, [5, 5], [5, 5])]
)
def test_a_network_sees_equal_images_once(on_levels: bool, prepared, compared) -> None:
    originals = pictures(32, on_levels=on_levels)
    attempts = originals.clone()
    attempts[2:] *= 0.9
    Counted.prepared.clear()
    Counted.compared.clear()
    kinds = ("paper", "standard")
    metrics = {("counted", kind): Metric("counted", kind, True, Counted()) for kind in kinds}
    known = References.of(originals, metrics)
    found = known.score(attempts)
    assert (Counted.prepared, Counted.compared) == (prepared, compared)
    wanted = (attempts - originals).double().flatten(1).mean(1)
    torch.testing.assert_close(found["counted", "standard"], wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(found["counted", "paper"], wanted, atol=2e-3, rtol=0)


def test_prepared_references_decide_metrics_and_device() -> None:
    originals = pictures(32, on_levels=False)
    known = prepare(originals, ["psnr/paper"], device="cpu")
    assert list(score(originals, known)) == [("psnr", "paper")]
    for more in ({"metrics": ["mse"]}, {"device": "cpu"}):
        with pytest.raises(UserError, match=r"beside prepared references.*Give them to `prepare`"):
            score(originals, known, **more)
    with pytest.raises(UserError, match="as many references as reconstructions"):
        score(originals[:2], known)
    with pytest.raises(UserError, match="SSIM expected images of at least 11×11"):
        prepare(originals[..., :10])


def test_pixels_beyond_the_range_count_as_its_ends() -> None:
    """Rounding may carry a pixel past 0 or 1: see SLACK."""
    originals = pictures(40, on_levels=False).round()
    past = (originals.double() + 9e-7 * (2 * originals.double() - 1)).double()
    attempts = pictures(41, on_levels=False)[..., :40, :40].double()
    known = score(attempts, originals.double())
    for key, values in score(attempts, past).items():
        assert np.array_equal(values, known[key])
    assert np.isinf(score(past, originals.double(), ["psnr/standard"])["psnr", "standard"]).all()


# SSIM by strips -----------------------------------------------------------------------------------


def test_references_at_some_places_are_those_images() -> None:
    originals, places = pictures(40, on_levels=True), [3, 0]
    attempts = originals.flip(0)
    known = prepare(originals).at(places)
    assert len(known) == 2
    for key, values in score(attempts[places], known).items():
        wanted = score(attempts[places], originals[places])[key]
        np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-6)
