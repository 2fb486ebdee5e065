r"""One upload of MJP where pixels are 8-bit: the masked patches are integer vectors.

`masked_span` leaves every patch open in the span S of the masked ones. A client that feeds decoded
pictures feeds multiples of 1/255, and the integer vectors of S are a lattice which the masked
patches generate (`lattice.unmixing`): LLL finds it, and what photographs look like tells its
patches from their combinations. An unmasked patch is then the integer vector of c_i + S nearest to
`masked_span`'s guess. The masked patches have no places yet; `jigsaw.solver` puts them
where their borders fit, which gives the plain picture. As the client fed it, each masked place
gets the mean of the patches: their order there is not in the gradient.

Exact where the search finds the patches among their combinations, which large patches and exact
gradients help; `lattice_found` says only that there was a lattice. Whether a picture is right its
gradient tells (`gradient_residual`). Falls back to `masked_span` where pixels are no multiples of
1/255 (interpolation in floating point or mixing after decoding), the gradient is too noisy, or too
many patches are masked for the lattice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attacks.equations.filling import Completion, check_completion
from attacks.equations.least_squares import condition_and_rank
from attacks.equations.names import PATCH, QKV, TABLE, UNKNOWN
from attacks.equations.pictures import pictures
from attacks.equations.span import ABOVE_NOISE, off_the_visible, upload_span
from attacks.equations.system import PatchSystem, gradient, patch_system
from attacks.jigsaw.solver import solve
from attacks.lattice.unmixing import sum_coordinates, unmix
from attacks.masked_span import MaskedSpan
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_images, to_patches


@dataclass(frozen=True)
class PixelLattice:
    """`most`: masked patches beyond which no lattice is tried; the others as in `masked_span`."""

    prior: str = "fitted"
    completion: Completion = "field"
    tokens: bool = True
    most: int = 80
    name: ClassVar[str] = "pixel_lattice"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"
    uploads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_completion(self.name, self.completion)

    @property
    def span(self) -> MaskedSpan:
        """What it begins with and falls back to."""
        return MaskedSpan(self.prior, self.completion, self.tokens)

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        return (TABLE, PATCH, QKV, UNKNOWN)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        batch = view.updates[0].batch
        if view.model.unk_embed is None:
            text = "the model has no unknown embedding, so no patch is missing from the system"
            return Refusal("unknown_embedding", text)
        if UNKNOWN not in view.updates[0].grads:
            return Refusal("missing_gradient", f"the upload holds no gradient of {UNKNOWN}")
        if batch != 1:
            text = f"the pixels of {batch} pictures are mixed; batch 1 is needed"
            return Refusal("batch", text)
        return self.span.unsupported(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        update = view.updates[0]
        system = patch_system(view, update)
        unknown = gradient(view, update, UNKNOWN)[:, 0, 0]
        images, orders, found = [], [], []
        for index, filled in enumerate(self.span.solve(view, [system]).patches):
            guess = pictures(view, filled.unsqueeze(0))[0]
            exact = self._exact(view, system, index, unknown[index], guess)
            masked = bool(system.hidden[index].any())
            found.append(float(exact is not None) if masked else torch.nan)
            patches = to_patches(guess, view.model.patch_size) if exact is None else exact
            picture, order = self._placed(view, patches, system.hidden[index], exact is not None)
            images.append(picture)
            orders.append(order)
        return Reconstruction(
            torch.stack(images),
            mask=system.hidden,
            permutation=torch.stack(orders) if view.against == "plain" else None,
            diagnostics={
                **condition_and_rank(system.rows, update.dtype),
                "lattice_found": torch.tensor(found).double(),
            },
        )

    def _exact(
        self, view: AttackerView, system: PatchSystem, index: int, unknown: Tensor, guess: Tensor
    ) -> Tensor | None:
        """Patches (N, p) in [0, 1], the masked ones in any order; None where no lattice shows."""
        patches = to_patches(guess, view.model.patch_size)
        hidden = system.hidden[index]
        count = int(hidden.sum())
        span = upload_span(system, index, above_noise=ABOVE_NOISE)
        if count == 0:
            return patches
        if count > self.most or not len(span.basis):
            return None
        rest = off_the_visible(system, index, system.total[index])
        summed = off_the_visible(system, index, unknown.unsqueeze(1)).squeeze(1)
        t = sum_coordinates(rest, span.basis, summed)
        pixels, size = view.pixels, view.model.patch_size
        unmixed = unmix(span.basis, t, mean=pixels.mean, std=pixels.std, patch_size=size)
        if unmixed is None:
            return None
        restored, whole = unmixed.complete(span.complement[~hidden], patches[~hidden])
        # A vector that leaves the box is no patch, whatever its numbers: the guess stays.
        whole &= ((restored >= 0) & (restored <= 1)).all(-1)
        whole = whole.to(patches.device).unsqueeze(1)
        patches[~hidden] = torch.where(whole, restored.to(patches), patches[~hidden])
        patches[hidden] = _repeated(unmixed.patches.to(patches).clamp(0, 1), count)
        return patches

    def _placed(
        self, view: AttackerView, patches: Tensor, hidden: Tensor, exact: bool
    ) -> tuple[Tensor, Tensor]:
        """The wanted picture (C, S, S), and the order that was found for the masked patches."""
        order = torch.arange(len(hidden))
        if view.against == "input":
            mean = patches[hidden].mean(0) if hidden.any() else patches[0]
            patches = torch.where(hidden.unsqueeze(1), mean, patches)
        elif exact and hidden.any():
            size, grid = view.model.patch_size, view.model.grid
            order = solve(patches, hidden, patches[hidden], grid=grid, patch_size=size)
            patches = patches.clone().index_copy(0, order.to(patches.device), patches)
        return to_images(patches, view.model.patch_size, len(view.pixels.mean)), order


def _repeated(pieces: Tensor, count: int) -> Tensor:
    """`count` pieces (count, p): patches that are equal or combinations of others, such as flat
    ones, are found once, and the flattest stands for the missing ones."""
    flattest = pieces[pieces.std(-1).argmin()]
    return torch.cat((pieces, flattest.expand(count - len(pieces), -1)))
