"""Priors as safetensors files, which hold statistics of many pictures and none of their pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from attacks.prior.gaussian import GaussianPrior, stationary_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, is_there, typed
from mjp_privacy.core.schema import Size, height_width
from mjp_privacy.core.text import shown
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.tensor_files import FLOATS, TensorFile, save_tensors

SHIPPED = Path(__file__).parent / "assets"
TENSORS = ("mean", "frequencies", "spectrum", "patch_mean", "patch_covariance")
CHANNELS = 3
MOST_PATCH = 48  # a covariance of 6,912 pixel values is 382 MB in float64
MOST_FREQUENCIES = 4096
ROUNDING = 1e-4
"""By how much of the largest eigenvalue one of a covariance in float32 may fall below zero."""
PRIOR = FileKind(
    f"a prior written by `mjp fit-prior`, with {', '.join(TENSORS)}",
    "Fit it again: mjp fit-prior --images DIR --patch P --out mine.safetensors.",
    1 << 30,
)


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class PriorMetadata:
    """What the file says in words; numbers in metadata are texts."""

    patch: Annotated[int, Field(ge=2, le=MOST_PATCH)]
    description: Annotated[str, Field(max_length=500)] = ""


@lru_cache(maxsize=8)
def find_prior(name: str, *, patch: int, size: Size, channels: int = 3) -> GaussianPrior:
    """The prior called `fitted` or `stationary`, or one in a file; of grey pictures for 1 channel.

    find_prior("fitted", patch=16, size=224); find_prior("mine.safetensors", patch=16, size=224)

    `fitted` is shipped for some patch sizes. For any other, the covariance of a patch is derived
    from the spectrum that was fitted on pictures of about this size (`derived_prior`).
    """
    if channels == 1:
        return find_prior(name, patch=patch, size=size).in_grey()
    if name == "stationary":
        return stationary_prior(_side(size))
    if name == "fitted":
        path = SHIPPED / f"patch{patch}.safetensors"
        return load_prior(path) if path.is_file() else derived_prior(_side(size))
    if not is_there(Path(name)):
        shipped = ", ".join(sorted(file.stem.removeprefix("patch") for file in _shipped()))
        raise UserError(
            f"prior {shown(name)!r}: expected 'fitted' (shipped for patch sizes {shipped}, derived "
            "for others), 'stationary' or the path of a fitted file, and there is no such file. To "
            f"fit one for patches of {patch}×{patch}: mjp fit-prior --images DIR --patch {patch} "
            "--out mine.safetensors"
        )
    return load_prior(Path(name))


def _side(size: Size) -> float:
    """Of the square of a picture's area."""
    return math.sqrt(math.prod(height_width(size)))


def patch_moments(name: str, patch: int, pixels: Pixels) -> tuple[Tensor, Tensor]:
    """A prior's mean (p,) and covariance (p, p) of a normalised patch of a picture."""
    found = find_prior(name, patch=patch, size=pixels.size, channels=len(pixels.mean))
    return found.patch(patch, pixels)


def derived_prior(size: float) -> GaussianPrior:
    """The shipped field whose pictures were nearest to `size` pixels, without its patches.

    Mean colour and radial spectrum do not depend on the patch size, and the covariance of a patch
    of any size follows from them. A prior fitted at that size gives up to 0.1 dB more.
    """
    fields = [load_prior(path) for path in sorted(_shipped())]
    nearest = min(fields, key=lambda field: abs(math.log(field.fitted_size / size)))
    return replace(
        nearest,
        description=f"{nearest.description}; the patch covariance is derived from its spectrum",
        patch_size=None,
        patch_mean=None,
        patch_covariance=None,
    )


def _shipped() -> list[Path]:
    return list(SHIPPED.glob("patch*.safetensors"))


def save_prior(prior: GaussianPrior, path: Path) -> None:
    """Write a fitted prior in float32, of its symmetric covariance the lower triangle only."""
    assert prior.patch_mean is not None
    assert prior.patch_covariance is not None
    lower = torch.tril_indices(*prior.patch_covariance.shape).unbind()
    tensors = {
        "mean": prior.mean,
        "frequencies": prior.frequencies,
        "spectrum": prior.spectrum,
        "patch_mean": prior.patch_mean,
        "patch_covariance": prior.patch_covariance[lower],
    }
    stored = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    metadata = {"patch": str(prior.patch_size), "description": prior.description}
    save_tensors(path, stored, metadata)


def load_prior(path: Path) -> GaussianPrior:
    """Read a prior that `save_prior` wrote, in float64 and with its whole covariance."""
    file = TensorFile(path, PRIOR, dtypes=FLOATS)
    facts = typed(file.metadata, path, PRIOR, PriorMetadata)
    _check_shapes(file, facts.patch)
    stored = file.tensors(TENSORS, finite=True)
    tensors = {name: tensor.double() for name, tensor in stored.items()}
    side = len(tensors["patch_mean"])
    lower = torch.zeros(side, side, dtype=torch.float64)
    lower[torch.tril_indices(side, side).unbind()] = tensors["patch_covariance"]
    covariance = lower + lower.tril(-1).mT
    _check_values({**tensors, "patch_covariance": covariance}, path)
    return GaussianPrior(
        facts.description or path.name,
        tensors["mean"],
        tensors["frequencies"],
        tensors["spectrum"],
        facts.patch,
        tensors["patch_mean"],
        covariance,
    )


def _check_shapes(file: TensorFile, patch: int) -> None:
    """Raise unless all tensors are there, in shapes that fit the patch and one another."""
    missing = [name for name in TENSORS if name not in file.shapes]
    if missing:
        raise PRIOR.refusal(file.path, f"no tensor {', '.join(missing)}")
    knots = file.shapes["frequencies"]
    if len(knots) != 1 or not 2 <= knots[0] <= MOST_FREQUENCIES:
        raise PRIOR.refusal(file.path, f"the shape {knots}", "frequencies")
    values = CHANNELS * patch * patch
    expected = {
        "mean": (CHANNELS,),
        "spectrum": (*knots, CHANNELS, CHANNELS),
        "patch_mean": (values,),
        "patch_covariance": (values * (values + 1) // 2,),
    }
    for name, shape in expected.items():
        if file.shapes[name] != shape:
            got = f"the shape {file.shapes[name]} where patches of {patch}×{patch} need {shape}"
            raise PRIOR.refusal(file.path, got, name)


def _check_values(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise unless frequencies ascend from above zero, and spectrum and covariance are those of
    colours: symmetric, and not negative in any direction beyond rounding."""
    frequencies = tensors["frequencies"]
    if not bool((frequencies > 0).all()) or not bool((frequencies.diff() > 0).all()):
        raise PRIOR.refusal(path, "numbers that do not ascend from above 0", "frequencies")
    spectrum = tensors["spectrum"]
    if not torch.allclose(spectrum, spectrum.mT, rtol=ROUNDING, atol=0):
        raise PRIOR.refusal(path, "matrices that are not symmetric", "spectrum")
    with PRIOR.reading(path):
        values = torch.linalg.eigvalsh(spectrum)
    least, most = values.amin(-1), values.amax(-1)
    if not bool(((least >= -ROUNDING * most) & (most > 0)).all()):
        got = f"the eigenvalue {float(least.min()):.2g}, as no covariance has"
        raise PRIOR.refusal(path, got, "spectrum")
    covariance = tensors["patch_covariance"]
    largest = covariance.abs().sum(1).amax()  # no eigenvalue is larger
    shifted = covariance.clone()
    shifted.diagonal().add_(ROUNDING * largest)
    # Cholesky's factorisation succeeds where no eigenvalue is below zero but for rounding.
    if not largest > 0 or int(torch.linalg.cholesky_ex(shifted).info):
        got = "a matrix with an eigenvalue below 0, as no covariance has"
        raise PRIOR.refusal(path, got, "patch_covariance")
