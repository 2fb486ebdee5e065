r"""A stationary Gaussian field of natural pictures, the patches cut from it, and their posterior.

The field is known by its mean colour and its radial spectrum S(f): the covariance of the colour
channels at each spatial frequency f (cycles per pixel), which is that of an orthonormal DCT's
coefficients. A prior fitted from pictures also holds the exact covariance of its patches. The one
that needs no data is grey on average, and the covariance of two pixels at distance d in channels c
and c' is

    SPREAD^2 * exp(-d / length) * (1 if c == c' else CHANNELS),   length = size / 8,

whose spectrum in two dimensions is 2 pi l^2 / (1 + (2 pi l f)^2)^(3/2).

Posterior mean of patches (`posterior_patches`) from a linear system with noise:

    Y = A^T X W^T + noise,   rows of X independent, each N(mu, Sigma)

With A = U diag(s) V^T and W Sigma W^T = R diag(l) R^T, the entries of V^T Y R are independent:
entry (k, c) observes the k-th mixture of patches with gain s_k and noise of variance t_c^2, so that

    X^ = 1 mu^T + U [ s_k / (s_k^2 l_c + t_c^2) (V^T (Y - A^T 1 mu^T W^T) R)_kc ] R^T W Sigma.

Mixtures below the noise fall back to the prior instead of being amplified. Noise is rarely white:
an error of A is multiplied with patches, and neighbouring pixels round alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import height_width
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.jigsaw import to_patches

JITTER = 1e-8  # relative; keeps inverses finite where a fitted covariance is nearly singular


@dataclass(frozen=True)
class GaussianPrior:
    """A prior over pictures with colours in [0, 1]; float64.

    C channels, F frequencies, p = C * patch * patch. Without `patch_mean` and `patch_covariance`
    those of a patch follow from the field.
    """

    description: str
    mean: Tensor  # (C,)
    frequencies: Tensor  # (F,) ascending, cycles per pixel
    spectrum: Tensor  # (F, C, C)
    patch_size: int | None = None
    patch_mean: Tensor | None = None  # (p,), channel first
    patch_covariance: Tensor | None = None  # (p, p)

    @property
    def fitted_size(self) -> float:
        """Side in pixels of the pictures that the spectrum was fitted on: its first knot, the
        constant, stands at a quarter of their lowest frequency's step."""
        return 0.25 / float(self.frequencies[0])

    def in_grey(self) -> GaussianPrior:
        """The same of pictures whose channels' mean is taken."""
        mixing = torch.full((1, len(self.mean)), 1 / len(self.mean)).double()
        patch_mean = patch_covariance = None
        if self.patch_mean is not None and self.patch_covariance is not None:
            of_patch = torch.kron(mixing, torch.eye((self.patch_size or 0) ** 2).double())
            patch_mean = of_patch @ self.patch_mean
            patch_covariance = of_patch @ self.patch_covariance @ of_patch.mT
        return replace(
            self,
            description=f"{self.description}; in grey",
            mean=mixing @ self.mean,
            spectrum=mixing @ self.spectrum @ mixing.mT,
            patch_mean=patch_mean,
            patch_covariance=patch_covariance,
        )

    def field_spectrum(self, pixels: Pixels) -> Tensor:
        """(H, W, C, C): covariance of every DCT coefficient of a normalised image."""
        down, across = (
            torch.arange(side, dtype=torch.float64) / (2 * side)
            for side in height_width(pixels.size)
        )
        radius = (across.square().unsqueeze(0) + down.square().unsqueeze(1)).sqrt()
        std = _moments(pixels)[1]
        return self._at(radius) / std.outer(std)

    def mean_colour(self, pixels: Pixels) -> Tensor:
        """The mean colour (C,) in the model's normalised space."""
        mean, std = _moments(pixels)
        return (self.mean - mean) / std

    def patch(self, patch_size: int, pixels: Pixels) -> tuple[Tensor, Tensor]:
        """Mean (p,) and covariance (p, p) of a normalised patch, channel first."""
        mean, std = _moments(pixels)
        area = patch_size * patch_size
        if self.patch_mean is not None and self.patch_size == patch_size:
            assert self.patch_covariance is not None
            centre, covariance = self.patch_mean, self.patch_covariance
        else:
            centre, covariance = self.mean.repeat_interleave(area), self._stationary(patch_size)
        scale = std.repeat_interleave(area)
        return (centre - mean.repeat_interleave(area)) / scale, covariance / scale.outer(scale)

    def _at(self, radius: Tensor) -> Tensor:
        """S (..., C, C) at frequencies (...), by interpolating its matrix logarithm in log f."""
        log_radius = radius.clamp(float(self.frequencies[0]), float(self.frequencies[-1])).log()
        knots = self.frequencies.log()
        right = torch.searchsorted(knots, log_radius).clamp(1, len(knots) - 1)
        share = (log_radius - knots[right - 1]) / (knots[right] - knots[right - 1])
        values, vectors = torch.linalg.eigh(self.spectrum)
        logs = vectors @ torch.diag_embed(values.clamp_min(1e-300).log()) @ vectors.mT
        share = share[..., None, None]
        return torch.linalg.matrix_exp((1 - share) * logs[right - 1] + share * logs[right])

    def _stationary(self, patch_size: int) -> Tensor:
        """(p, p) covariance of a patch of the field, from the spectrum on a large torus."""
        side = 16 * patch_size
        index = torch.fft.fftfreq(side, dtype=torch.float64)
        radius = (index.square().unsqueeze(0) + index.square().unsqueeze(1)).sqrt()
        correlation = torch.fft.ifft2(self._at(radius), dim=(0, 1)).real  # (side, side, C, C)
        place = torch.arange(patch_size)
        shift = place.unsqueeze(1) - place.unsqueeze(0)  # (P, P), between two pixels of one axis
        rows = shift[:, None, :, None].expand(-1, patch_size, -1, patch_size)
        columns = shift[None, :, None, :].expand(patch_size, -1, patch_size, -1)
        area = patch_size * patch_size
        blocks = correlation[rows.reshape(area, area), columns.reshape(area, area)]
        channels = len(self.mean)
        return blocks.permute(2, 0, 3, 1).reshape(channels * area, channels * area)


def _moments(pixels: Pixels) -> tuple[Tensor, Tensor]:
    """The model's mean and std of each channel (C,), float64."""
    return torch.tensor(pixels.mean).double(), torch.tensor(pixels.std).double()


def cosine_basis(size: int) -> Tensor:
    """(size, size) orthonormal DCT-II: row k is the k-th basis function."""
    index = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi * (index + 0.5) * index.unsqueeze(1) / size) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis


# a prior without data -----------------------------------------------------------------------------


GREY, SPREAD, CHANNELS = 0.5, 0.25, 0.9
LENGTHS = 8  # correlation lengths that fit in a picture's side
KNOTS = 64


def stationary_prior(size: float) -> GaussianPrior:
    """The stationary prior for pictures of `size` pixels a side."""
    length = size / LENGTHS
    frequencies = torch.logspace(math.log10(0.25 / size), math.log10(0.75), KNOTS).double()
    power = 2 * math.pi * length**2 / (1 + (2 * math.pi * length * frequencies) ** 2) ** 1.5
    colours = torch.full((3, 3), CHANNELS).double()
    colours.fill_diagonal_(1.0)
    return GaussianPrior(
        description=f"stationary, no data (length {length:g} pixels, channels {CHANNELS:g})",
        mean=torch.full((3,), GREY).double(),
        frequencies=frequencies,
        spectrum=SPREAD**2 * power[:, None, None] * colours,
    )


def regular(covariance: Tensor) -> Tensor:
    """A covariance (p, p) with so much more on its diagonal that its inverse stays finite."""
    ridge = JITTER * float(covariance.diagonal().mean())
    return covariance + ridge * torch.eye(len(covariance)).to(covariance)


# the posterior mean of patches --------------------------------------------------------------------


UNSEEN = 1e-13  # share of the largest prior variance: below it W drops the direction
TINY = 1e-300


@dataclass(frozen=True)
class PatchPrior:
    """N(mean, covariance) of a normalised patch, observed through W (K, p), None meaning W = I."""

    mean: Tensor  # (p,)
    covariance: Tensor  # (p, p)
    weight: Tensor | None = None  # W

    @cached_property
    def spread(self) -> tuple[Tensor, Tensor, Tensor]:
        """l (k,), R (K, k) and the gain R^T W Sigma (k, p) of the k directions that W keeps."""
        through = self.covariance if self.weight is None else self.weight @ self.covariance
        system = through if self.weight is None else through @ self.weight.mT
        values, vectors = torch.linalg.eigh((system + system.mT) / 2)
        seen = values > UNSEEN * values[-1]
        return values[seen], vectors[:, seen], vectors[:, seen].mT @ through


def posterior_patches(
    rows: Tensor, total: Tensor, prior: PatchPrior, noise: Tensor, *, own_mean: bool = False
) -> tuple[Tensor, Tensor]:
    """The posterior mean X^ (n, R, p), and the singular values of A (n, min(R, D)), descending.

    rows A (n, R, D), total Y (n, D, K), noise t^2 (n,) or (n, k).
    own_mean: the patches of a picture spread around a mean of its own, which is found as well; from
    mu it is as far as one patch
    """
    centre = prior.mean if prior.weight is None else prior.weight @ prior.mean
    u, s, vh = torch.linalg.svd(rows, full_matrices=False)
    values, vectors, gain = prior.spread
    expected = rows.sum(1).unsqueeze(-1) * centre
    seen = vh @ (total - expected) @ vectors
    scale = s.unsqueeze(-1)
    strength = scale.square() * values + noise.clamp_min(TINY).view(len(rows), 1, -1)
    mean = prior.mean
    if own_mean:
        share = scale * u.sum(1).unsqueeze(-1)  # of the mean in each mixture
        weight = (share.square() / strength).sum(1, keepdim=True) + 1 / values
        apart = (share * seen / strength).sum(1, keepdim=True) / weight
        seen, mean = seen - share * apart, mean + apart / values @ gain
    return mean + u @ (seen * scale / strength @ gain), s


DOUBT = 3.0  # equations that what is known beforehand of the noise counts as


def noise_by_direction(
    rows: Tensor,
    total: Tensor,
    prior: PatchPrior,
    dtype: torch.dtype,
    row_error: Tensor,
    total_error: Tensor,
) -> Tensor:
    """t^2 (n, k) for each direction of the prior, of clients that computed in precision `dtype`.

    It is measured in the part of Y that A cannot reach, as far as there is one. Known beforehand
    are the errors' standard deviations (n,) on entries of A and of Y, of which the former count as
    E_A^T X (errors in variables), and rounding, half of which is as patches are, half white.
    """
    values, vectors, _ = prior.spread
    patch = values + (prior.mean @ vectors).square()
    row_variance, total_variance = (e.square().unsqueeze(-1) for e in (row_error, total_error))
    known = total_variance + row_variance * rows.shape[1] * patch
    likely = known + _rounding(total, dtype).unsqueeze(-1) * (1 + patch / patch.mean()) / 2
    rest, free = _unexplained(rows, total, rows.dtype)
    measured = (rest @ vectors).square().sum(1)
    return torch.maximum((measured + DOUBT * likely) / (free.unsqueeze(-1) + DOUBT), known)


def noise_variance(rows: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """t^2 (n,) from what A cannot explain: the part of Y outside A's row space is noise alone.

    It is at least the rounding of the client's precision, and just that where A's rows span all.
    """
    rest, free = _unexplained(rows, total, dtype)
    energy, rounding = rest.square().sum((1, 2)) / total.shape[2], _rounding(total, dtype)
    return torch.where(free > 0, torch.maximum(energy / free.clamp_min(1), rounding), rounding)


def _unexplained(rows: Tensor, total: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What of Y lies outside A's row space (n, D, K), and how many dimensions (n,) that are, for
    rows of this precision."""
    s, vh = torch.linalg.svd(rows, full_matrices=False)[1:]
    within = s > torch.finfo(dtype).eps * max(rows.shape[-2:]) * s[:, :1]
    rest = total - vh.mT @ (within.unsqueeze(-1) * (vh @ total))
    return rest, rows.shape[2] - within.sum(1)


def _rounding(total: Tensor, dtype: torch.dtype) -> Tensor:
    """The variance (n,) of the rounding of an entry of Y."""
    return (torch.finfo(dtype).eps * total.flatten(1).norm(dim=1)) ** 2 / total[0].numel()


# a prior fitted to pictures -----------------------------------------------------------------------


BINS = 40
FEWEST_PATCHES = 4  # patches needed for each entry of a patch vector


def fit_prior(images: Iterable[Tensor], *, patch: int, size: int) -> GaussianPrior:
    """Mean colour, radial spectrum and patch covariance of images (3, size, size) in [0, 1].

    Patches are the tiles of each image and of its mirror image, as if left and right were alike.
    """
    power, length = _Power(size), 3 * patch * patch
    seen, total, products = 0, torch.zeros(length).double(), torch.zeros(length, length).double()
    for image in images:
        patches = to_patches(image.double(), patch)
        mirrored = to_patches(image.double().flip(-1), patch)
        rows = torch.cat((patches, mirrored))
        seen, total, products = seen + len(rows), total + rows.sum(0), products + rows.mT @ rows
        power.add(image.double())
    if seen < FEWEST_PATCHES * length:
        raise UserError(
            f"A prior of {patch}×{patch} patches needs at least {FEWEST_PATCHES * length} patches, "
            f"got {seen} from {power.count} image(s) of {size}×{size}: give more images."
        )
    mean = total / seen
    covariance = products / seen - mean.outer(mean)
    colour = mean.unflatten(0, (3, -1)).mean(1)
    frequencies, spectrum = power.result(colour)
    description = f"fitted from {power.count} pictures at {size}×{size}"
    return GaussianPrior(description, colour, frequencies, spectrum, patch, mean, covariance)


class _Power:
    """Products of DCT coefficients between channels, summed over images, then averaged in rings."""

    def __init__(self, size: int) -> None:
        self.basis = cosine_basis(size)
        index = torch.arange(size, dtype=torch.float64) / (2 * size)
        radius = (index.square().unsqueeze(0) + index.square().unsqueeze(1)).sqrt().flatten()
        self.radius = radius.clamp_min(0.25 / size)
        edges = torch.logspace(math.log10(0.3 / size), math.log10(0.75), BINS).double()
        self.ring = torch.bucketize(self.radius, edges).clamp_max(BINS - 1)
        self.total = torch.zeros(size * size, 3, 3, dtype=torch.float64)
        self.first = torch.zeros(3, dtype=torch.float64)
        self.size, self.count = size, 0

    def add(self, image: Tensor) -> None:
        """Take in an image (3, size, size)."""
        coefficients = (self.basis @ image @ self.basis.mT).flatten(1)  # (3, size^2)
        self.total += torch.einsum("cf,df->fcd", coefficients, coefficients)
        self.first += coefficients[:, 0]
        self.count += 1

    def result(self, colour: Tensor) -> tuple[Tensor, Tensor]:
        """Frequencies (F,) and spectrum (F, 3, 3); rings without a coefficient are left out."""
        power = self.total / self.count
        centre, first = colour * self.size, self.first / self.count
        power[0] -= first.outer(centre) + centre.outer(first) - centre.outer(centre)
        counts = torch.zeros(BINS, dtype=torch.float64).index_add_(
            0, self.ring, torch.ones_like(self.radius)
        )
        logs = torch.zeros(BINS, dtype=torch.float64).index_add_(0, self.ring, self.radius.log())
        sums = torch.zeros(BINS, 3, 3, dtype=torch.float64).index_add_(0, self.ring, power)
        filled = counts > 0
        frequencies = (logs[filled] / counts[filled]).exp()
        return frequencies, sums[filled] / counts[filled].view(-1, 1, 1)
