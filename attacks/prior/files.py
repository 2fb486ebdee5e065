"""Priors as files: safetensors, only aggregate numbers in them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attacks.prior.gaussian import GaussianPrior
from attacks.prior.stationary import stationary_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically

SHIPPED = Path(__file__).parent / "assets"
NAMES = ("fitted", "stationary")
TENSORS = ("mean", "frequencies", "spectrum", "patch_mean", "patch_covariance")


@lru_cache(maxsize=8)
def find_prior(name: str, *, patch: int, size: int) -> GaussianPrior:
    """`fitted` (shipped for this patch size), `stationary`, or the path of a fitted file."""
    if name == "stationary":
        return stationary_prior(size)
    path = SHIPPED / f"patch{patch}.safetensors" if name == "fitted" else Path(name)
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem.removeprefix("patch") for file in _shipped()))
        raise UserError(
            f"prior {name!r}: expected 'fitted' (shipped for patch sizes {shipped}), 'stationary' "
            f"or the path of a fitted file; there is none for patches of {patch}×{patch}. Fit one: "
            f"mjp fit-prior --images DIR --patch {patch} --out mine.safetensors"
        )
    return load_prior(path)


def _shipped() -> list[Path]:
    return list(SHIPPED.glob("patch*.safetensors"))


def save_prior(prior: GaussianPrior, path: Path) -> None:
    """float32; of the symmetric patch covariance the lower triangle."""
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
    write_atomically(path, lambda temporary: save_file(stored, temporary, metadata))


def load_prior(path: Path) -> GaussianPrior:
    """The prior as it was saved; its covariance symmetric, float64."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).double() for name in TENSORS}
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} is no prior: expected a file of `mjp fit-prior` with "
            f"{', '.join(TENSORS)}, got: {error}."
        ) from error
    covariance = _symmetric(tensors["patch_covariance"], len(tensors["patch_mean"]))
    return GaussianPrior(
        metadata.get("description", path.name),
        tensors["mean"],
        tensors["frequencies"],
        tensors["spectrum"],
        int(metadata["patch"]),
        tensors["patch_mean"],
        covariance,
    )


def _symmetric(lower: Tensor, side: int) -> Tensor:
    full = torch.zeros(side, side, dtype=lower.dtype)
    full[torch.tril_indices(side, side).unbind()] = lower
    return full + full.tril(-1).mT
