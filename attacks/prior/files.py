"""Priors as safetensors files, which hold statistics of many pictures and none of their pixels."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attacks.prior.gaussian import GaussianPrior
from attacks.prior.stationary import stationary_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.tensor_files import save_tensors

SHIPPED = Path(__file__).parent / "assets"
TENSORS = ("mean", "frequencies", "spectrum", "patch_mean", "patch_covariance")


@lru_cache(maxsize=8)
def find_prior(name: str, *, patch: int, size: int) -> GaussianPrior:
    """The prior called `fitted` or `stationary`, or one in a file.

    find_prior("fitted", patch=16, size=224); find_prior("mine.safetensors", patch=16, size=224)

    `fitted` is shipped for some patch sizes. For any other, the covariance of a patch is derived
    from the spectrum that was fitted on pictures of about this size (`derived_prior`).
    """
    if name == "stationary":
        return stationary_prior(size)
    if name == "fitted":
        path = SHIPPED / f"patch{patch}.safetensors"
        return load_prior(path) if path.is_file() else derived_prior(size)
    if not Path(name).is_file():
        shipped = ", ".join(sorted(file.stem.removeprefix("patch") for file in _shipped()))
        raise UserError(
            f"prior {name!r}: expected 'fitted' (shipped for patch sizes {shipped}, derived for "
            f"others), 'stationary' or the path of a fitted file, and there is no file {name}. To "
            f"fit one for patches of {patch}×{patch}: mjp fit-prior --images DIR --patch {patch} "
            "--out mine.safetensors"
        )
    return load_prior(Path(name))


def derived_prior(size: int) -> GaussianPrior:
    """The shipped field whose pictures were nearest to `size` pixels, without its patches.

    Mean colour and radial spectrum do not depend on the patch size, and the covariance of a patch
    of any size follows from them.
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
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).double() for name in TENSORS}
        covariance = _symmetric(tensors["patch_covariance"], len(tensors["patch_mean"]))
        patch = int(metadata["patch"])
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} is not a prior: expected a file written by `mjp fit-prior` with "
            f"{', '.join(TENSORS)}, got: {error}."
        ) from error
    return GaussianPrior(
        metadata.get("description", path.name),
        tensors["mean"],
        tensors["frequencies"],
        tensors["spectrum"],
        patch,
        tensors["patch_mean"],
        covariance,
    )


def _symmetric(lower: Tensor, side: int) -> Tensor:
    """The symmetric matrix (side, side) with this lower triangle."""
    full = torch.zeros(side, side, dtype=lower.dtype)
    full[torch.tril_indices(side, side).unbind()] = lower
    return full + full.tril(-1).mT
