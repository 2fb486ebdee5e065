r"""Attacks on the system of `patch_gradient`: with a picture prior, in levels of 8 bits, of a step
that MJP's recipe left unshuffled, for the masked positions alone, for clients that shuffle patches
and mask none.

The gradient of a masked position's row of `pos_embed` is zero, or exactly what the client's recipe
adds independently of the picture, or, where noise was added to every row, nothing but noise.

Without E_unk every patch keeps its row, so `patch_gradient` gets the picture as fed, exactly. What
is left is a jigsaw puzzle most of whose pieces lie where they belong:

    one upload       a patch may be elsewhere if at half of its borders or more another patch would
                     fit better (RIVAL other patches, see `jigsaw`)
    several uploads  each shuffles anew. An upload votes twice, as it was fed and as its own borders
                     sort it; a patch with two votes or more for a place belongs there, if no other
                     patch or place has more

The others are sorted by `jigsaw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import scipy
import torch
from pydantic import Field
from torch import Tensor

from attacks.budget import image
from attacks.equations import OPEN_LEVELS, PATCH_SYSTEM, TABLE
from attacks.equations.filling import wanted
from attacks.equations.patch_system import (
    PatchSystem,
    certain_of,
    error_of,
    lacks_gradients,
    lacks_patch_system,
    lacks_positions,
    located,
    minimum_norm_solve,
    normalisation,
    patch_system,
    per_image,
    pictures,
    solution,
    unless_underdetermined,
    weights,
)
from attacks.equations.sent_gradients import rounding_error, weight_rounding
from attacks.jigsaw import border_costs, solve
from attacks.lattice.cost import Reals, lll, nearest_plane
from attacks.patch_gradient import PatchGradient
from attacks.prior.files import patch_moments
from attacks.prior.gaussian import PatchPrior, noise_by_direction, posterior_patches
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal, Usual
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import Grid, to_images, to_patches


@dataclass(frozen=True)
class PatchPriorAttack(PatchGradient):
    """The system of `patch_gradient`, solved with a Gaussian patch prior (`prior.gaussian`).

    For noisy gradients (float16, noise added, an ill-conditioned A): mixtures of patches below the
    noise fall back to the prior. Noise is measured on the upload by direction of the pixels
    (`noise_by_direction`), and each picture has a mean patch of its own.
    """

    prior: str = "fitted"
    name: ClassVar[str] = "patch_prior"
    traits: ClassVar[tuple[str, ...]] = ("noise", "public photographs", "patches")

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """As `patch_gradient`, but too few equations are no reason: the prior fills in."""
        return unless_underdetermined(lacks_patch_system(view))

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Posterior mean of every patch under the prior and the measured noise."""
        system = patch_system(view, view.updates[0])
        return solution(view, system, *self.posterior(view, system)[:2])

    def posterior(
        self, view: AttackerView, system: PatchSystem
    ) -> tuple[Tensor, Tensor, PatchPrior, Tensor]:
        """The mean patches (n, N, p), the singular values of the rows, the prior, and the noise
        (n, k) by its directions."""
        update = view.updates[0]
        mean, covariance = patch_moments(self.prior, view.model.patch_size, view.pixels)
        prior = PatchPrior(mean.to(system.rows), covariance.to(system.rows))
        errors = [error_of(update, name) for name in PATCH_SYSTEM]
        if update.kind == "weight_difference":
            stored = [weights(view, update)[name].unsqueeze(0) for name in PATCH_SYSTEM]
            steps = [weight_rounding(update, rounding_error(w, update.dtype)) for w in stored]
            errors = [torch.hypot(e, step) for e, step in zip(errors, steps, strict=True)]
        noise = noise_by_direction(system.rows, system.total, prior, update.dtype, *errors)
        solved = posterior_patches(system.rows, system.total, prior, noise, own_mean=True)
        return *solved, prior, noise


# more patches than the width, in 8 bits -----------------------------------------------------------

OPEN_AT_MOST = 36
"""Directions that gradients may leave open; of more the lattice's basis is not short enough."""
SURE = 0.25
"""On the way to another vector, up to which a pixel's levels are taken for the client's: numbers
that are not whole are that near in each of n places once in 2^n. A picture is certain where that
holds of all its pixels."""
EXACTLY = 1e-4  # of a level; gradients of double precision tell no more than that here
HIDDEN = "patches were masked: their pixels are not in these equations"
TOO_OPEN = f"errors of the gradient leave more than {OPEN_AT_MOST} directions of the patches open"
NOT_WHOLE = (
    "levels of 8 bits do not solve the patch equations: the client's pixels are no multiples of "
    "1/255 under the declared mean and std, or errors of its gradient hide them"
)


@dataclass(frozen=True)
class PatchIntegers(PatchPriorAttack):
    """The system of `patch_gradient` where patches outnumber the width, solved in levels of 8 bits.

    A^T X = G leaves N - D + 1 directions of X open, since behind LayerNorms the rows of A are
    orthogonal to ones. But each pixel's N values are whole (`whole_columns`), which also tells
    what errors of an upload leave open. Pixels that stay in doubt are as `patch_prior` has them.
    """

    name: ClassVar[str] = "patch_integers"
    traits: ClassVar[tuple[str, ...]] = ("8 bit", "noise", "public photographs", "patches")

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Too many patches, a batch, or what keeps `patch_prior` from it; None if nothing does."""
        refusal = super().unsupported(view)
        left = view.model.grid.patches + 1 - view.model.embed_dim
        if refusal is None and left > OPEN_AT_MOST:
            most = view.model.embed_dim - 1 + OPEN_AT_MOST
            text = (
                f"N - D + 1 = {left} > {OPEN_AT_MOST} directions of the patches are open: up to "
                f"{most} patches it applies"
            )
            return Refusal("underdetermined", text)
        if refusal is None and (batch := view.updates[0].batch) > 1:
            text = f"the pixels of {batch} pictures are mixed; batch 1 is needed"
            return Refusal("batch", text)
        return refusal

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Solve the first upload; a picture most of whose levels nothing tells has a reason."""
        system = patch_system(view, view.updates[0])
        patches, values, prior, noise = self.posterior(view, system)
        scale, zero = (255 * n for n in normalisation(view.pixels, view.model.patch_size, patches))
        levels = patches * scale + zero
        sure = torch.zeros_like(levels[:, 0], dtype=torch.bool)  # (n, p)
        free = torch.zeros(len(levels), dtype=torch.float64)
        unit, spread = scale.mean().square(), prior.covariance.diagonal().mean()
        for step in (~system.hidden.any(-1)).nonzero().flatten().tolist():
            with image(step):
                directions, sizes, _ = torch.linalg.svd(system.rows[step])
                known = torch.ones_like(directions[0]) / spread
                known[: len(sizes)] += sizes.square() / noise[step].mean()
                variance = unit / known + EXACTLY**2
                free[step] = int((variance > OPEN**2).sum())
                if free[step] > OPEN_AT_MOST:
                    continue
                covariance = (directions * variance) @ directions.mT
                found, doubt = whole_columns(levels[step].cpu().numpy(), covariance.cpu().numpy())
                sure[step] = torch.from_numpy(doubt <= SURE).to(sure)
                whole = torch.from_numpy(found).to(levels)
                levels[step] = torch.where(sure[step], whole, levels[step])
        solved = solution(view, system, (levels - zero) / scale, values)
        reasons = {
            at: TOO_OPEN if free[at] > OPEN_AT_MOST else NOT_WHOLE
            for at, share in enumerate(sure.double().mean(1))
            if share < 0.5
        }
        masked = system.hidden.any(-1).nonzero().flatten().tolist()
        certain = certain_of(view, (levels - zero) / scale, sure.all(1))
        return Reconstruction(
            solved.images,
            diagnostics={**solved.diagnostics, **certain, OPEN_LEVELS: free},
            inapplicable={**reasons, **dict.fromkeys(masked, HIDDEN)},
        )


# whole numbers of which a linear system knows too little ------------------------------------------


OPEN = 0.5  # standard deviation from which rounding does not tell a direction
LEAST, EACH = 24, 2.5  # numbers in the lattice, and further ones for each direction that is open
FEW, LEFT = 12, 0.03  # open directions with which more numbers cost little; spread of the others
FINE = 2.0**12  # precision of the lattice


def whole_columns(mean: Reals, covariance: Reals) -> tuple[Reals, Reals]:
    """The whole columns (N, p) nearest to means (N, p), whose covariance (N, N) is known up to a
    factor of each column; and (p,) how far each is on the way to another vector, at most: 0 at the
    nearest one, .5 halfway. Of numbers that are not whole, or of too large errors, some of N are
    nearly halfway.

    Z^N has few vectors near the directions that are known to a small fraction of 1: with R^T R the
    covariance's inverse, it is the vector of the lattice spanned by R's columns that is nearest to
    R mean. LLL shortens that basis once for all columns, and Babai's nearest plane finds each
    (Lenstra, Lenstra, Lovász 1982; Babai 1986; Teunissen 1995). Only some of the N numbers enter
    the lattice; where few are open there may be more, until what is left of the others' spread,
    once those are known, is far below 1.
    """
    count, free = len(mean), int((np.linalg.eigvalsh(covariance) > OPEN**2).sum())
    number = min(count, LEAST + round(EACH * free))
    order = np.random.default_rng(derive_seed("whole columns", count)).permutation(count)
    while True:
        some, rest = np.sort(order[:number]), np.sort(order[number:])
        inner, between = covariance[np.ix_(some, some)], covariance[np.ix_(some, rest)]
        gain = np.linalg.solve(inner, between)
        spread = covariance[rest, rest] - (gain * between).sum(0)
        if free > FEW or spread.max(initial=0) <= LEFT**2:
            break
        number = min(count, 2 * number)
    values = np.empty_like(mean)
    values[some], doubt = _nearest(mean[some], inner)
    if len(rest):
        left = mean[rest] + gain.T @ (values[some] - mean[some])
        values[rest] = np.rint(left)
        doubt = np.maximum(doubt, abs(left - values[rest]).max(0))
    return values, doubt


def _nearest(mean: Reals, covariance: Reals) -> tuple[Reals, Reals]:
    """The same with all numbers in the lattice."""
    sizes, directions = np.linalg.eigh(covariance)
    rows = directions / np.sqrt(sizes)  # row i is what 1 in place i adds
    transform = lll(rows, FINE)
    orthogonal, triangle = np.linalg.qr((transform @ rows).T)
    times, doubt = nearest_plane(triangle, orthogonal.T @ (rows.T @ mean))
    return transform.T @ times, doubt


# an unshuffled step -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainStep(PatchGradient):
    """The first upload in which nothing was masked, solved as `patch_gradient` does.

    MJP's own recipe leaves half of the training steps unshuffled. The upload of such a step has no
    zero row in pos_embed.grad, so anybody can recognise it. A picture that was masked in every
    upload seen has no reconstruction.
    """

    uploads: Annotated[int, Field(ge=1, le=10_000)] = 4
    name: ClassVar[str] = "plain_step"
    traits: ClassVar[tuple[str, ...]] = ("masks", "unshuffled uploads", "patches")

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Solve each picture's first unmasked upload; `plain_upload` is its number, 0 for none."""
        systems = [patch_system(view, update) for update in view.updates]
        plain = torch.stack([~system.hidden.any(-1) for system in systems])  # (R, n)
        first_plain = plain.int().argmax(0)
        steps = torch.arange(plain.shape[1])
        rows = torch.stack([s.rows for s in systems])[first_plain, steps]
        total = torch.stack([s.total for s in systems])[first_plain, steps]
        chosen = PatchSystem(rows, total, torch.zeros_like(systems[0].hidden))
        patches, values = minimum_norm_solve(rows, total)
        pairs = zip(systems[0].hidden, patches, strict=True)
        patches = torch.stack([wanted(view, hidden, one) for hidden, one in pairs])
        solved = solution(view, chosen, patches, values)
        reason = f"patches were masked in every one of the uploads seen ({len(systems)})"
        never_plain = per_image(view, ~plain.any(0)).nonzero().flatten().tolist()
        number = per_image(view, torch.where(plain.any(0), first_plain + 1, 0)).double()
        return Reconstruction(
            solved.images,
            diagnostics={**solved.diagnostics, "plain_upload": number},
            inapplicable=dict.fromkeys(never_plain, reason),
        )


# the masked positions alone -----------------------------------------------------------------------


@dataclass(frozen=True)
class MaskLocator(Usual):
    """Estimates the mask and makes no picture: its results are the mask's precision and recall."""

    name: ClassVar[str] = "mask_locator"
    traits: ClassVar[tuple[str, ...]] = ("masks", "no picture", "patches")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Only the gradient of the position table."""
        return (TABLE,)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the upload holds no gradient of a position table, or None."""
        return lacks_positions(view.model) or lacks_gradients(view, TABLE)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The estimated mask of every image; no images."""
        return Reconstruction(None, mask=per_image(view, located(view, view.updates[0])))


# patches shuffled and none masked -----------------------------------------------------------------


MASKED = "patches were masked: masked_span, pixel_lattice and multi_round solve such uploads"


@dataclass(frozen=True)
class PatchJigsaw(PatchGradient):
    """`patch_gradient`, and its patches put back where their borders, or other uploads, say."""

    uploads: Annotated[int, Field(ge=1, le=10_000)] = 1
    name: ClassVar[str] = "patch_jigsaw"
    traits: ClassVar[tuple[str, ...]] = ("shuffled alone", "patches")

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The pictures of the first upload as fed, sorted if the plain ones are asked for."""
        systems = [patch_system(view, update) for update in view.updates]
        solved = [minimum_norm_solve(system.rows, system.total) for system in systems]
        fed = solution(view, systems[0], *solved[0])
        masked = torch.stack([system.hidden.any(-1) for system in systems]).any(0)
        inapplicable = dict.fromkeys(per_image(view, masked).nonzero().flatten().tolist(), MASKED)
        images = fed.images
        assert images is not None
        if view.against == "plain":
            size = view.model.patch_size
            rounds = torch.stack([to_patches(pictures(view, found), size) for found, _ in solved])
            images = images.clone()
            for index in {*range(len(images))} - {*inapplicable}:
                with image(index):
                    images[index] = to_images(
                        sorted_patches(rounds[:, index], view.model.grid, size),
                        *(view.model.grid, size),
                    )
        return Reconstruction(images, diagnostics=fed.diagnostics, inapplicable=inapplicable)


def sorted_patches(rounds: Tensor, grid: Grid, patch_size: int) -> Tensor:
    """The patches (N, p) of a picture in their places; rounds (R, N, p): as each upload fed it."""
    by_borders = [
        _arranged(patches, misplaced(patches, grid, patch_size), grid, patch_size)
        for patches in rounds
    ]
    if len(rounds) == 1:
        return by_borders[0]
    return _arranged(*agreed(torch.cat((rounds, torch.stack(by_borders)))), grid, patch_size)


def _arranged(patches: Tensor, free: Tensor, grid: Grid, patch_size: int) -> Tensor:
    """The patches (N, p), of which the free ones are moved to where their borders fit best."""
    order = solve(patches, free, patches[free], grid=grid, patch_size=patch_size)
    in_place = torch.empty_like(patches)
    in_place[order.to(patches.device)] = patches
    return in_place


def misplaced(patches: Tensor, grid: Grid, patch_size: int) -> Tensor:
    """(N,) bool: at half of a patch's borders or more several other patches would fit better."""
    places = torch.arange(len(patches)).view(grid)
    sideways, downwards = border_costs(patches, patch_size)
    bad, borders = torch.zeros(2, len(patches))
    for first, second, costs in (
        (places[:, :-1], places[:, 1:], sideways),
        (places[:-1], places[1:], downwards),
    ):
        misfit = (costs[first.flatten(), second.flatten()] > 1).float().cpu()
        for side in (first.flatten(), second.flatten()):
            bad.index_add_(0, side, misfit)
            borders.index_add_(0, side, torch.ones_like(misfit))
    return bad >= borders / 2


def agreed(arrangements: Tensor) -> tuple[Tensor, Tensor]:
    """The patches (N, p) of several arrangements (R, N, p) of them, each where most have it, and
    (N,) bool where fewer than two do."""
    first = arrangements[0]
    votes = np.zeros((len(first), len(first)))
    for arranged in arrangements:
        apart = torch.cdist(arranged, first).square().cpu().numpy()
        votes[scipy.optimize.linear_sum_assignment(apart)] += (
            1  # at each place, for the patch that stands there
        )
    places, chosen = scipy.optimize.linear_sum_assignment(votes, maximize=True)
    return first[torch.from_numpy(chosen)], torch.from_numpy(votes[places, chosen] < 2)
