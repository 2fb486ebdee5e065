r"""One upload of MJP with 8-bit pixels: the masked patches are integer vectors in their span.

`masked_span` determines every patch except for its part in the span S of the masked ones. A client
that feeds decoded pictures feeds multiples of 1/255, so the integer vectors of S form a lattice
that the masked patches generate (`lattice.unmixing`). LLL finds the lattice, and a model of what
photographs look like tells its patches from their combinations. An unmasked patch is then the
integer vector of c_i + S nearest to `masked_span`'s guess. The places of the masked patches are
still unknown; `jigsaw` puts them where their borders fit, which gives the plain picture.
Where the picture as the client fed it is wanted, each masked place gets the mean of the masked
patches, because their order there is not in the gradient.

The result is exact where the search finds the patches among their combinations, which is easier
with large patches and exact gradients. `lattice_found` says only that there was a lattice; whether
the picture is right shows in its own gradient (`gradient_residual`). Falls back to `masked_span`
where pixels are not multiples of 1/255 (interpolation in floating point or mixing after decoding),
the gradient is too noisy, or too many patches are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from attacks.budget import image, spent
from attacks.equations import PATCH, QKV, TABLE, UNKNOWN
from attacks.equations.completion import fewest_steps
from attacks.equations.filling import Completion, check_completion
from attacks.equations.least_squares import condition_and_rank
from attacks.equations.patch_system import PatchSystem, no_gradient, patch_system
from attacks.equations.pictures import normalisation, normalised, pictures
from attacks.equations.span import ABOVE_NOISE, Knowledge, hull_rows, off_the_visible, upload_span
from attacks.jigsaw import solve
from attacks.lattice.cost import Reals
from attacks.lattice.unmixing import FIXED, FREE, Unmixed, unmix
from attacks.masked_span import MaskedSpan
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_images, to_patches


@dataclass(frozen=True)
class PixelLattice:
    """`masked_span`, with the patches' integer values found by lattice reduction.

    most  with more masked patches than this no lattice is tried; the other options are those of
          `masked_span`
    """

    prior: str = "fitted"
    completion: Completion = "field"
    tokens: bool = True
    most: Annotated[int, Field(ge=0, le=1000)] = 80
    name: ClassVar[str] = "pixel_lattice"
    traits: ClassVar[tuple[str, ...]] = ("masks", "8 bit", "public photographs")
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"
    uploads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_completion(self.name, self.completion)

    @property
    def span(self) -> MaskedSpan:
        """The attack that gives the first guess, and the result where no lattice is found."""
        return MaskedSpan(self.prior, self.completion, self.tokens)

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table, patch embedding, block 0's qkv and unknown embedding."""
        return (TABLE, PATCH, QKV, UNKNOWN)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why no lattice can be looked for in the upload, or None."""
        batch = view.updates[0].batch
        if view.model.unk_embed is None:
            text = "the model has no unknown embedding, so no patch can be masked"
            return Refusal("unknown_embedding", text)
        if UNKNOWN not in view.updates[0].grads:
            return no_gradient(view.model, UNKNOWN)
        if batch != 1:
            text = f"the pixels of {batch} pictures are mixed; batch 1 is needed"
            return Refusal("batch", text)
        return self.span.unsupported(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Exact patches where a lattice is found, else `masked_span`'s guess."""
        update = view.updates[0]
        system = patch_system(view, update)
        images, orders, lattice_found = [], [], []
        for index, filled in enumerate(self.span.solve(view, [system]).patches):
            guess = pictures(view, filled.unsqueeze(0))[0]
            with image(index):
                picture, order, found = self._picture(view, system, index, guess)
            images.append(picture)
            orders.append(order)
            lattice_found.append(found)
        return Reconstruction(
            torch.stack(images),
            mask=system.hidden,
            permutation=torch.stack(orders) if view.against == "plain" else None,
            diagnostics={
                **condition_and_rank(system.rows, update.dtype),
                "lattice_found": torch.tensor(lattice_found).double(),
            },
        )

    def _picture(
        self, view: AttackerView, system: PatchSystem, index: int, guess: Tensor
    ) -> tuple[Tensor, Tensor, float]:
        """One picture (C, S, S), the permutation (N,), and whether there was a lattice."""
        exact = self._exact(view, system, index, guess)
        hidden = system.hidden[index]
        found = float(exact is not None) if hidden.any() else torch.nan
        patches, order = to_patches(guess, view.model.patch_size), torch.arange(len(hidden))
        if exact is not None:
            patches, order = exact.placed(hidden, view.model.grid, view.model.patch_size)
            patches = _levelled(patches, exact.unmixed.frame.colours, view)
        if view.against == "input" and hidden.any():
            patches[hidden] = patches[hidden].mean(0)
        picture = to_images(patches, view.model.patch_size, len(view.pixels.mean))
        return picture, order, found

    def _exact(
        self, view: AttackerView, system: PatchSystem, index: int, guess: Tensor
    ) -> _Exact | None:
        """The patches by the lattice, with the guess (C, S, S) where it gives none; None where
        there is no lattice."""
        patches = to_patches(guess, view.model.patch_size)
        hidden = system.hidden[index]
        count = int(hidden.sum())
        if not 0 < count <= self.most or system.hidden_sum is None:
            return None
        span = upload_span(system, index, above_noise=ABOVE_NOISE)
        rest = off_the_visible(system, index, system.total[index])
        sums = off_the_visible(system, index, system.hidden_sum[index].unsqueeze(1))
        wide = hull_rows(rest, sums, count)
        if not len(wide):
            return None
        pixels, size = view.pixels, view.model.patch_size
        unmixed = unmix(wide, mean=pixels.mean, std=pixels.std, patch_size=size)
        if unmixed is None or spent():  # a search that was ended has found no photographs yet
            return None
        restored, whole = unmixed.complete(span.complement[~hidden], patches[~hidden])
        whole = (whole & _possible(restored)).to(patches.device).unsqueeze(1)
        patches[~hidden] = torch.where(whole, restored.to(patches), patches[~hidden])
        members = torch.full((len(hidden),), FIXED)
        members[~hidden.cpu()] = torch.where(whole.flatten().cpu(), FREE, FIXED)
        pieces, members[hidden.cpu()] = _repeated(unmixed.patches, count)
        patches[hidden] = pieces.to(patches)
        return _Exact(unmixed, patches, members)


@dataclass(frozen=True)
class _Exact:
    """A picture's patches by the lattice."""

    unmixed: Unmixed
    patches: Tensor  # (N, p) in [0, 1], the masked ones in any order and perhaps outside
    members: Tensor  # (N,) see `lattice.unmixing.continued`

    def placed(self, hidden: Tensor, grid: int, patch_size: int) -> tuple[Tensor, Tensor]:
        """The patches (N, p) in their places, and the permutation (N,) that the masked ones had."""
        pieces = self.patches[hidden].clamp(0, 1)
        order = solve(self.patches, hidden, pieces, grid=grid, patch_size=patch_size)
        patches = torch.empty_like(self.patches)
        patches[order.to(patches.device)] = self.patches
        members = torch.empty_like(self.members)
        members[order] = self.members
        better = self.unmixed.continued(patches, members)
        patches = torch.where(_possible(better).unsqueeze(1), better, patches)
        return patches.clamp(0, 1), order


def _levelled(patches: Tensor, colours: Reals, view: AttackerView) -> Tensor:
    """Patches (N, p) in [0, 1], shifted by multiples of the flat vectors `colours` (f, p), along
    which the lattice leaves their level open: to the picture of fewest steps."""
    if not len(colours) or spent():
        return patches
    pixels, size = view.pixels, view.model.patch_size
    scale = normalisation(pixels, size, patches)[0]
    open_levels = torch.from_numpy(colours).to(patches) / scale
    known = normalised(patches, pixels, size)
    knowledge = Knowledge(known, open_levels, torch.zeros(len(patches), dtype=torch.bool))
    shifted = fewest_steps(knowledge, known, size, pixels).patches
    return ((255 * shifted).round() / 255).clamp(0, 1)


def _possible(patches: Tensor) -> Tensor:
    """Whether patches are within [0, 1], (n,): integers of the lattice outside are no patches."""
    return ((patches >= 0) & (patches <= 1)).all(-1)


def _repeated(pieces: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The pieces filled up to (count, p), and for each its number, or FIXED for the copies.

    The lattice gives equal patches once and leaves out those that are combinations of others,
    mostly flat ones: copies of the flattest stand for them.
    """
    numbers = torch.full((count,), FIXED)
    numbers[: len(pieces)] = torch.arange(len(pieces))
    if len(pieces) < count:
        flattest = int(pieces.std(-1).argmin())
        numbers[flattest] = FIXED
        pieces = torch.cat((pieces, pieces[flattest].expand(count - len(pieces), -1)))
    return pieces, numbers
