r"""Finds the pictures that batches share, and solves for each exactly: no partner hides it.

One upload of B pictures leaves every patch open along the N (B - 1) directions of their differences
(`equations.batches`). A picture that meets other partners in another upload is where both open
spaces meet (`equations.agreement`), so a client that reshuffles its batches gives each picture away
once it stood in two of them. A search finds out which uploads share pictures.

    attack = find_attack("shared_picture", {"uploads": 6})   # reads six rounds
    attack.run(view, generator=...).diagnostics["certain"]   # 1 where a picture is verified

Pictures that no two uploads share are guessed from one upload, those that always stood together
from the few directions that their differences leave. `certain` are those of which all equations
agree within the uploads' own errors at every position, leave no direction open, and give values of
pixels. What is found is the one point that the batches' affine hulls have in common: of a client
that mixes pictures (mixup) it may be a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from attacks.budget import image
from attacks.equations import CERTAIN, PATCH_SYSTEM, TABLE, UNKNOWN
from attacks.equations.agreement import TOLERANCE, Search, SharedPicture
from attacks.equations.batches import BatchSpan, batch_span, pictures_by_rank, superposed
from attacks.equations.filling import Filling, wanted
from attacks.equations.patch_system import (
    PatchSystem,
    lacks_patch_system,
    located,
    normalised,
    patch_system,
    pictures_of,
)
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal, Usual
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_patches

SHARING = "uploads_sharing"  # a diagnostic
Places = Sequence[SharedPicture | None]

OUTSIDE = 0.01
"""By how much, in the model's normalised units and beyond ten times its expected error, a value of
a certain picture may lie outside the pixels' range."""


@dataclass(frozen=True)
class SharedPictures(Usual):
    """The pictures that batches of several uploads have in common.

    uploads     how many rounds it reads; every picture must have stood in two of them at least.
                Its pixels must be the same: random crops or mixup on the client break it. Flips do
                not for long: a picture has two states, so one recurs within three rounds. The
                weights may differ, and so may masks
    prior       as of `masked_span`, for what nothing determines
    """

    uploads: Annotated[int, Field(ge=1, le=10_000)] = 2
    prior: str = "fitted"
    name: ClassVar[str] = "shared_picture"
    traits = ("batches", "masks", "shared pictures", "public photographs", "patches")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table, the patch embedding and MJP's unknown embedding."""
        return (*PATCH_SYSTEM, UNKNOWN)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the view's uploads cannot tell the pictures that they share, or None.

        A batch of 12 on a ViT-Ti/16 at 64 px: "N B = 16 * 12 = 192 patches >= D = 192: ...".
        """
        refusal, first = lacks_patch_system(view), view.updates[0]
        if refusal is not None or first.batch == 1:
            return refusal
        if first.partners == "fixed":
            return Refusal(
                "batch",
                f"every upload of a step holds the same batch of {first.batch} pictures, which "
                "leaves the differences between them open however many are seen; it needs batches "
                "that are drawn anew (client.partners: fresh)",
            )
        uploads = len(view.updates) if len(view.updates) > 1 else first.steps_in_all
        if uploads < 2:
            text = "it looks for pictures that uploads share, and one was given"
            return Refusal("uploads", text)
        return _too_large(view, uploads)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The pictures that uploads share and, in the places that are left, guesses.

        Places s B to s B + B - 1 are for the pictures of the first round's upload s.
        """
        uploads = BatchUploads.of(view)
        search = Search(uploads.spans, uploads.rounds)
        places = _places([*search.pictures(), *search.groups], uploads)
        patches = torch.stack(self._patches(view, uploads, places))
        unit, size = pictures_of(view, patches), view.model.patch_size
        within = normalised(to_patches(unit, size), view.pixels, size)
        beyond = (patches - within).abs().flatten(1).amax(1)
        # Of a guess only what was masked in all pictures of its upload is known.
        masks = [uploads.spans[place // uploads.batch].hidden for place in range(len(places))]
        for place, picture in enumerate(places):
            step = place // uploads.batch
            if picture is not None and step in picture.uploads:
                masks[place] = ~picture.visible[picture.uploads.index(step)]
        shown = [wanted(view, mask, one) for mask, one in zip(masks, patches, strict=True)]
        return Reconstruction(
            pictures_of(view, torch.stack(shown)),
            mask=torch.stack(masks),
            diagnostics=_facts(view, uploads, search, places, beyond),
        )

    def _patches(self, view: AttackerView, uploads: BatchUploads, places: Places) -> list[Tensor]:
        """Normalised patches (N, p) for each place; open directions are filled by the prior."""
        filling = Filling(self.prior)
        patches: list[Tensor] = []
        for step in range(uploads.steps):
            own = places[step * uploads.batch : (step + 1) * uploads.batch]
            known = list[Tensor]()
            for place, picture in enumerate(own, step * uploads.batch):
                if picture is not None:
                    with image(place):
                        known.append(filling.likeliest(view, picture.knowledge))
            guesses = iter(_guesses(view, uploads, step, self.prior, known))
            filled = iter(known)
            patches += [next(guesses if picture is None else filled) for picture in own]
        return patches


def _guesses(
    view: AttackerView, uploads: BatchUploads, step: int, prior: str, known: Sequence[Tensor]
) -> list[Tensor]:
    """Patches (N, p) for the pictures of an upload of which it alone tells anything: the mean of
    those that are not `known`, which one upload tells best (`equations.batches`)."""
    left = uploads.batch - len(known)
    if not left:
        return []
    guess = superposed(view, view.updates[0], uploads.first, step, prior)
    if not known:
        return list(guess.pictures(uploads.batch))
    rest = (uploads.batch * guess.mean - torch.stack(list(known)).sum(0)) / left
    return [rest] * left


def _places(found: Sequence[SharedPicture], uploads: BatchUploads) -> Places:
    """What stands at each of the m places: a picture that was found, or None for a guess.

    The places of an upload hold the pictures found in it. A picture that stands in no upload of
    the first round gets a place that is left.
    """
    batch = uploads.batch
    places: list[SharedPicture | None] = []
    for step in range(uploads.steps):
        own = [picture for picture in found if step in picture.uploads][:batch]
        places += [*own, *[None] * (batch - len(own))]
    left = [place for place, picture in enumerate(places) if picture is None]
    others = [picture for picture in found if min(picture.uploads) >= uploads.steps]
    for place, picture in zip(left, others, strict=False):
        places[place] = picture
    return places


def _facts(
    view: AttackerView, uploads: BatchUploads, search: Search, places: Places, beyond: Tensor
) -> dict[str, Tensor]:
    """What is certain, and from what; one value a place.

    certain           1: the picture is verified to stand in uploads, and every patch is determined
    uploads_sharing   how many uploads hold the picture; 0 for a guess
    expected_psnr     what the errors of these uploads leave, a lower estimate; NaN for a guess
    pairs_sharing     how many pairs of all uploads share a picture
    pictures_by_rank  the batch that the upload's rank shows; NaN where it shows none
    """
    scale = sum(view.pixels.std) / len(view.pixels.std)
    facts = torch.full((4, len(places)), torch.nan, dtype=torch.float64)
    for place, picture in enumerate(places):
        facts[0, place] = facts[1, place] = 0
        if picture is not None:
            within = float(beyond[place]) <= OUTSIDE + TOLERANCE * float(picture.error.max())
            facts[0, place] = float(picture.determined and within)
            facts[1, place] = len(picture.uploads)
            error = scale**2 * picture.error.square().sum() / picture.patches.numel()
            facts[2, place] = -10 * torch.log10(error) if picture.determined else torch.nan
        by_rank = uploads.by_rank[place // uploads.batch]
        facts[3, place] = torch.nan if by_rank is None else by_rank
    names = (CERTAIN, SHARING, "expected_psnr", "pictures_by_rank")
    pairs = torch.full((len(places),), float(len(search.agreeing)), dtype=torch.float64)
    return {**dict(zip(names, facts, strict=True)), "pairs_sharing": pairs}


# when uploads tell shared pictures ----------------------------------------------------------------


def _too_large(view: AttackerView, uploads: int) -> Refusal | None:
    """The refusal of a batch that is too large for so many uploads, or None."""
    model, batch = view.model, view.updates[0].batch
    patches, width = model.grid.patches, model.embed_dim
    length = model.patch_embed.proj.weight[0].numel()
    masked = 0  # the most positions that are masked in all pictures of an upload
    if not any(update.grads[TABLE].is_meta for update in view.updates):  # no outline
        masked = max(int(located(view, update).sum(-1).max()) for update in view.updates)
    open_directions = patches * (batch - 1) + masked
    # A patch's gradient is orthogonal to ones, whose part LayerNorm takes out: D - 1 are free.
    largest = min(
        (width - 1) // patches,
        1 + (length * (uploads - 1) - 1 - masked * uploads) // (uploads * patches),
    )
    way_out = f"up to a batch of {largest} they do" if largest > 1 else "no batch is small enough"
    if patches * batch >= width:
        return Refusal(
            "underdetermined",
            f"N B = {patches} * {batch} = {patches * batch} patches >= D = {width}: the gradients "
            f"of a batch's patches are told apart only below the width; {way_out}",
        )
    if uploads * (length - open_directions) > length:
        return None
    hidden = f" - {masked} masked" if masked else ""
    return Refusal(
        "underdetermined",
        f"{uploads} uploads leave {uploads} * (p - N (B - 1){' - k' if masked else ''}) = "
        f"{uploads} * ({length} - {patches} * {batch - 1}{hidden}) = "
        f"{uploads * (length - open_directions)} equations <= p = {length} unknowns of a patch: "
        f"they fit any picture; {way_out}, or give more uploads",
    )


@dataclass(frozen=True)
class BatchUploads:
    """R rounds of n steps: upload r n + s is that of step s in round r.

    In one of several rounds every picture stands in one upload. Of a single round this is not
    known: uploads that a user gives from anywhere come as one.
    """

    spans: Sequence[BatchSpan]
    steps: int  # n
    batch: int  # B, as the client declares it
    by_rank: Sequence[int | None]  # B of each upload of the first round, as its rank shows it
    first: PatchSystem  # of the first round
    rounds: Sequence[int] | None  # of each upload; None: uploads of a round may share pictures

    @classmethod
    def of(cls, view: AttackerView) -> BatchUploads:
        """Read all uploads of the view. An upload that shows more pictures than are declared is
        taken for one of that many."""
        spans: list[BatchSpan] = []
        by_rank: list[int | None] = []
        systems = [patch_system(view, update) for update in view.updates]
        for update, system in zip(view.updates, systems, strict=True):
            precision = torch.finfo(update.dtype).eps
            can_mask = view.model.unk_embed is not None
            for step, total in enumerate(system.total):
                shown = pictures_by_rank(total, len(system.rows[step]), precision)
                batch = max(update.batch, shown or 1)
                spans.append(batch_span(system, step, batch, precision, can_mask=can_mask))
                by_rank.append(shown)
        first = view.updates[0]
        steps = first.steps_in_all
        several = len(view.updates) > 1
        rounds = [number // steps for number in range(len(spans))] if several else None
        return cls(spans, steps, first.batch, by_rank[:steps], systems[0], rounds)
