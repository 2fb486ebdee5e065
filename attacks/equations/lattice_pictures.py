r"""The pictures of a batch from uploads of it: patches by the lattice, sorted, and verified.

`equations.differences` gives the patches but for the span of their differences, `lattice.unmixing`
the lattice in that span, `equations.batch_patches` the patches of each position, `jigsaw.sheets`
their pictures, and `equations.exchange` what is right of that by the layers after block 0's
attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.batch_patches import BatchPatches
from attacks.equations.completion import complete, field_energy
from attacks.equations.differences import differences
from attacks.equations.exchange import exchanged
from attacks.equations.layer_spans import FOUND, LayerSpans
from attacks.equations.levels import in_levels, normalised
from attacks.equations.norm_test import NormTest
from attacks.equations.patch_system import patch_system
from attacks.equations.span import Knowledge
from attacks.equations.step_upload import StepUpload
from attacks.equations.superposition import superposed
from attacks.jigsaw.sheets import sorted_into_pictures
from attacks.lattice.frame import Reals
from attacks.lattice.unmixing import COARSE, unmix_differences
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.models.jigsaw import to_images


@dataclass(frozen=True)
class BatchPicture:
    """One picture of a batch."""

    patches: Tensor  # (N, p) normalised
    outside: float = math.nan  # what share of its layers' inputs lies outside; NaN: not verified
    by_lattice: bool = False


@dataclass(frozen=True)
class LatticePictures:
    """The search: LatticePictures(view, "fitted", blocks=2).found([upload])."""

    view: AttackerView
    prior: str
    blocks: int

    def found(self, uploads: Sequence[StepUpload]) -> list[BatchPicture]:
        """The pictures of one step, as many as its batch has, those that were verified first.
        Verified ones are taken out of the uploads, and the smaller batch that is left is looked at
        again. What tests patches and pictures is the whole upload: taking out adds errors."""
        found, whole = list[BatchPicture](), uploads[0]
        spans = LayerSpans.of(whole.model, whole.grads, whole.update.batch, self.blocks)
        while batch := uploads[0].update.batch:
            left = self._looked_at(uploads, whole, spans)
            sure = [picture for picture in left if math.isfinite(picture.outside)]
            found += sure
            if len(sure) in (0, batch) or spent():
                return [*found, *(picture for picture in left if math.isnan(picture.outside))]
            for picture in sure:
                uploads = [upload.without(picture.patches) for upload in uploads]
        return found

    def _looked_at(
        self, uploads: Sequence[StepUpload], whole: StepUpload, spans: LayerSpans | None
    ) -> list[BatchPicture]:
        """The pictures that are left in the uploads, verified or not."""
        first, batch = uploads[0], uploads[0].update.batch
        systems = [patch_system(self.view, upload.update) for upload in uploads]
        known = differences(systems, batch, torch.finfo(first.update.dtype).eps)
        energy = field_energy(self.prior, self.view.model.patch_size, self.view.pixels)
        smoothest = complete(known, energy.on(known.known.device))
        mean = smoothest
        _, places, width = systems[0].rows.shape
        if places * batch <= width:
            mean = superposed(self.view, first.update, systems[0], 0, self.prior).mean
        rest = (batch * mean - smoothest) / max(batch - 1, 1)
        sorts = self._by_lattice(whole, batch, known, (smoothest, mean, rest))
        if sorts is None:
            guesses = torch.stack([smoothest, *[rest] * (batch - 1)])
            return self._verified(whole, spans, guesses, False)
        return self._verified(whole, spans, sorts, True)

    def _by_lattice(
        self, whole: StepUpload, batch: int, known: Knowledge, guesses: Sequence[Tensor]
    ) -> Tensor | None:
        """Pictures (B, N, p) of whole grey levels, sorted by their borders; None where there is no
        lattice. Where not all patches of a position are found, guesses stand for the others."""
        pixels, size = self.view.pixels, self.view.model.patch_size
        levels = [in_levels(guess, pixels, size) for guess in guesses]
        if not len(known.basis):
            patches = 255 * in_levels(known.known, pixels, size).cpu().double().numpy()
            sheets = np.rint(patches)[None].repeat(batch, axis=0)
        else:
            lattice = unmix_differences(
                known.basis, mean=pixels.mean, std=pixels.std, patch_size=size, error=COARSE
            )
            if lattice is None:
                return None
            test = NormTest.of(self.view, whole.update, 0, whole.update.batch, lattice.frame)
            found = BatchPatches.of(lattice, test).found(known.known, levels, batch)
            mean = 255 * levels[1].cpu().double().numpy()
            equal = len(known.basis) < len(mean) * (batch - 1)
            filled = [_filled(*pair, batch, equal) for pair in zip(found, mean, strict=True)]
            sheets = sorted_into_pictures(np.stack(filled), size)
        return normalised(torch.from_numpy(sheets / 255).to(known.known), pixels, size)

    def _verified(
        self, whole: StepUpload, spans: LayerSpans | None, pictures: Tensor, by_lattice: bool
    ) -> list[BatchPicture]:
        """The pictures (B, N, p) after exchanges of patches, verified where they pass."""
        model = whole.model
        if spans is None:
            return [BatchPicture(picture, math.nan, by_lattice) for picture in pictures]
        channels = len(self.view.pixels.mean)

        def shares(some: Tensor) -> Tensor:
            """What share of the layers' inputs of pictures (m, N, p) lies outside, (m,)."""
            with torch.no_grad():
                seen = to_images(some, model.patch_size, channels)
                return spans.off(seen.to(model.cls_token)).double()

        enough = FOUND * torch.finfo(whole.update.dtype).eps ** 2
        pictures, outside = exchanged(pictures, shares, enough)
        verified = list[Tensor]()  # a picture that comes twice says nothing of the second place
        judged = list[BatchPicture]()
        for picture, share in zip(pictures, outside.tolist(), strict=True):
            passes = share <= enough and not any(picture.equal(other) for other in verified)
            verified += [picture] if passes else []
            judged.append(BatchPicture(picture, share if passes else math.nan, by_lattice))
        return judged


def _filled(found: Reals, mean: Reals, batch: int, equal: bool) -> Reals:
    """Patches (B, p) of one position: those found, and for each other one what the mean patch (p,)
    of the batch leaves for it; or, where some patches of the batch are `equal`, a copy."""
    left = batch - len(found)
    if not left:
        return found
    if not len(found):
        return np.tile(mean.clip(0, 255), (batch, 1))
    rest = found[0] if equal else ((batch * mean - found.sum(0)) / left).clip(0, 255)
    return np.vstack((found, np.tile(rest, (left, 1))))
