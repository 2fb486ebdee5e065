r"""Attacks that know MJP: they solve for the span of the masked patches; a prior does the rest.

`masked_span`, `multi_round`. `equations.span` turns one upload, or several of one picture, into
x_i = known_i + a_i B for every patch, masked or not, at its true place: shuffling the masked
patches does not change their span, so their *order* is all that MJP hides. The LayerNorm of block 0
determines one more direction, and `equations.completion` fills what is left with the most probable
picture. One upload leaves about as many open directions as patches were masked, several as many as
were masked every time. With none left the picture is exact, and it is the *plain* one. Of more
patches than the width `multi_round` solves all uploads together (`equations.several_uploads`).

`token_span` reads no gradient of the position table. The row space of patch_embed.proj.weight.grad
is the span of all patches; with block 0's equations it determines every patch where

    D - N - 2 >= N + 1     (equations per patch against unknowns per patch)

and the rows beta + e_i are linearly independent: for ViT-B/16, not for ViT-S/16; for learned
tables, not for the fixed sine table. A patch is taken for masked where E_unk fits and its own
position embedding does not. Needs batch 1.

`pixel_lattice`, one upload of 8-bit pixels. `masked_span` determines every patch except for its
part in the span S of the masked ones, whose integer vectors are a lattice that the masked patches
generate (`lattice.unmixing`). An unmasked patch is then the integer vector of c_i + S nearest to
`masked_span`'s guess; `jigsaw` puts the masked ones where their borders fit. As the client fed it,
each masked place gets the mean of the masked patches, because their order is not in the gradient.
Exact where the search finds the patches among their combinations, which is easier with large ones
and exact gradients; `lattice_found` says only that there was a lattice. Falls back to `masked_span`
where pixels are not multiples of 1/255, the gradient is too noisy, or too many are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from attacks.budget import image, spent
from attacks.equations import PATCH, PATCH_BIAS, PATCH_SYSTEM, QKV, TABLE, UNKNOWN
from attacks.equations.attention import PatchOrder
from attacks.equations.block import PROJ
from attacks.equations.completion import fewest_steps, whole_levels
from attacks.equations.filling import Completion, Filling, Solution, wanted
from attacks.equations.patch_system import (
    PatchSystem,
    condition_and_rank,
    error_of,
    gradient,
    in_levels,
    lacks_gradients,
    lacks_patch_system,
    no_gradient,
    normalisation,
    normalised,
    patch_system,
    pictures,
    too_few_equations,
)
from attacks.equations.sent_gradients import shows_its_rows
from attacks.equations.several_uploads import SeveralUploads, several_uploads
from attacks.equations.span import (
    ABOVE_NOISE,
    TINY,
    Knowledge,
    combine,
    from_tokens_alone,
    hull_rows,
    lacks_token_equations,
    noise_edge,
    off_rows,
    refine,
    token_equations,
    upload_span,
)
from attacks.jigsaw import solve
from attacks.lattice.cost import Reals
from attacks.lattice.unmixing import FIXED, FREE, Unmixed, unmix
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal, Usual
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import Grid, to_images, to_patches

WEIGHED = 5e-4
"""Relative error of the gradient of the patch embedding or the table above which the errors of
several uploads are weighed. Below it the exact intersection of their spans is better: it knows
which are open."""
WEIGHED_TOTAL = 5e-3
"""The same for one upload and for several where the rows are known exactly and only the patch
embedding's gradient has an error, as under autocast: bf16 rounds by 1.7e-3."""


@dataclass(frozen=True)
class MaskedSpan(Usual):
    """The pictures of one upload: what its equations leave open is the span of the masked patches,
    which block 0's LayerNorm narrows and a prior fills.

    prior       `fitted`, `stationary`, or the path of a fitted prior
    completion  how open directions are filled: `field` joins patches across their borders, `patch`
                takes each patch alone, `none` leaves zeros
    tokens      use block 0's equations too, where the upload holds its gradient
    """

    prior: str = "fitted"
    completion: Completion = "field"
    tokens: bool = True
    name: ClassVar[str] = "masked_span"
    traits: ClassVar[tuple[str, ...]] = ("masks", "noise", "public photographs", "patches")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table, the patch embedding and block 0's qkv weights."""
        return (*PATCH_SYSTEM, QKV, UNKNOWN)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the uploads give no linear system for the patches, or None."""
        return lacks_patch_system(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The most probable picture given the uploads' equations."""
        systems = [patch_system(view, update) for update in view.updates]
        facts = condition_and_rank(systems[0].rows, view.updates[0].dtype)
        return self.solve(view, systems).reconstruction(view, facts)

    def solve(self, view: AttackerView, systems: Sequence[PatchSystem]) -> Solution:
        """What the uploads determine, and the most probable patches; one system per upload."""
        rounds = list[list[Knowledge]]()
        for update, system in zip(view.updates, systems, strict=True):
            # The known error of an entry of G - A^T X; a normalised pixel is about 1.
            of_rows = error_of(update, TABLE).square() * system.rows.shape[1]
            errors = (error_of(update, PATCH).square() + of_rows).sqrt().tolist()
            rounds.append([upload_span(system, at, error=error) for at, error in enumerate(errors)])
        knowledge = [
            self._with_tokens(view, index, combine(spans), spans)
            for index, spans in enumerate(zip(*rounds, strict=True))
        ]
        filling = Filling(self.prior, self.completion, exact=len(systems) > 1)
        patches = filling.patches(view, knowledge)
        noisy = self._weighs_errors(view)
        if any(noisy):
            patches = filling.weighed(view, systems, patches, noisy)
        return Solution(rounds, knowledge, patches, noisy)

    def _weighs_errors(self, view: AttackerView) -> list[bool]:
        """For each picture, whether the error of its uploads is known and large enough to weigh."""
        several = WEIGHED if len(view.updates) > 1 else 0.0
        weighs = torch.zeros(len(view.updates[0].grads[PATCH]), dtype=torch.bool)
        for update in view.updates:
            least = WEIGHED_TOTAL if shows_its_rows(update) else several
            for name in update.grads.keys() & {PATCH, TABLE}:
                size = gradient(view, update, name).flatten(1).square().mean(1).sqrt()
                weighs |= (error_of(update, name) / size.clamp_min(TINY) > least).cpu()
        return weighs.tolist()

    def _with_tokens(
        self, view: AttackerView, index: int, knowledge: Knowledge, spans: Sequence[Knowledge]
    ) -> Knowledge:
        """Add block 0's equations of every upload. They apply to directions that are still open
        only, because they are less exact than the spans."""
        if not self.tokens or not len(knowledge.basis):
            return knowledge
        refined = knowledge
        for update, span in zip(view.updates, spans, strict=True):
            if lacks_token_equations(view, update) is None:
                equations = token_equations(view, update, index)
                refined = refine(replace(refined, hidden=span.hidden), equations)
        return replace(refined, hidden=knowledge.hidden)


@dataclass(frozen=True)
class MultiRound(MaskedSpan):
    """The spans of several uploads of the same pixels with different masks: they intersect.

    uploads  how many; the plain picture is exact as soon as no patch was masked in all of them. The
             pixels must be the same every time: flips, crops or mixup on the client break it. The
             weights may differ.
    """

    uploads: Annotated[int, Field(ge=1, le=10_000)] = 6
    name: ClassVar[str] = "multi_round"

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the uploads give too few equations for the patches, or None."""
        refusal = super().unsupported(view)
        if refusal is None or refusal.kind != "underdetermined" or view.updates[0].batch != 1:
            return refusal
        patches, width = view.model.grid.patches, view.model.embed_dim
        least, given = math.ceil(patches / (width - 1)), len(view.updates)  # norms take one
        if given >= least:
            return None
        return Refusal(
            "uploads",
            f"N = {patches} patches > D = {width}: {least} uploads of the same picture are needed "
            f"at least; got {given}",
        )

    def solve(self, view: AttackerView, systems: Sequence[PatchSystem]) -> Solution:
        """The spans' intersection or, with more patches than the width, all uploads at once."""
        if too_few_equations(view.model) is None:
            return super().solve(view, systems)
        hidden, knowledge, patches = systems[0].hidden, list[Knowledge](), list[Tensor]()
        for index in range(len(hidden)):
            with image(index):
                known, likely = self._completed(view, several_uploads(systems, index))
            knowledge.append(known)
            patches.append(likely)
        spans = [replace(k, hidden=h) for k, h in zip(knowledge, hidden, strict=True)]
        return Solution([spans], knowledge, patches, [False] * len(knowledge))

    def _completed(self, view: AttackerView, found: SeveralUploads) -> tuple[Knowledge, Tensor]:
        """What uploads determine of one picture, and its most probable patches; those that come out
        in whole levels of 8 bits determine more."""
        filling = Filling(self.prior, self.completion, exact=True)
        known: Knowledge | None = found.knowledge
        while known is not None:
            knowledge, patches = known, filling.likeliest(view, known)
            levels = in_levels(patches, view.pixels, view.model.patch_size)
            known = found.narrowed(patches, whole_levels(levels), len(knowledge.basis))
        return knowledge, patches


# without the table's gradient ---------------------------------------------------------------------


@dataclass(frozen=True)
class TokenSpan(Usual):
    """The pictures without the position table's gradient: the patches lie in the row space of the
    patch embedding's gradient, and block 0's equations determine them there.

    prior, completion  as in `masked_span`
    uploads            of the same pixels; one is enough where its equations determine the patches
    """

    prior: str = "fitted"
    completion: Completion = "field"
    uploads: Annotated[int, Field(ge=1, le=10_000)] = 1
    name: ClassVar[str] = "token_span"
    traits: ClassVar[tuple[str, ...]] = ("masks", "public photographs", "patches")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the patch embedding and of block 0's qkv weights."""
        return (PATCH, QKV)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why an upload lacks a gradient or has no equations of block 0, or None."""
        refusals = (lacks_token_equations(view, update) for update in view.updates)
        return lacks_gradients(view, PATCH, QKV) or next(filter(None, refusals), None)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The most probable picture given block 0's equations of every upload."""
        rounds = list[list[Knowledge]]()
        for update in view.updates:
            errors, spans = error_of(update, PATCH), list[Knowledge]()
            for index, rows in enumerate(gradient(view, update, PATCH).flatten(2)):
                equations = token_equations(view, update, index)
                edge = noise_edge(float(errors[index]), *rows.shape)
                spans.append(from_tokens_alone(rows, equations, edge))
            rounds.append(spans)
        knowledge = [combine(spans) for spans in zip(*rounds, strict=True)]
        patches = Filling(self.prior, self.completion).patches(view, knowledge)
        # Errors are not weighed: equations that noise drowns are dropped, so directions stay open.
        noisy = [False] * len(knowledge)
        return Solution(rounds, knowledge, patches, noisy).reconstruction(view)


# 8-bit pixels, by a lattice -----------------------------------------------------------------------


@dataclass(frozen=True)
class PixelLattice(Usual):
    """`masked_span`, with the patches' integer values found by lattice reduction.

    prior  as in `masked_span`
    most   with more masked patches than this no lattice is tried
    """

    prior: str = "fitted"
    most: Annotated[int, Field(ge=0, le=1000)] = 80
    name: ClassVar[str] = "pixel_lattice"
    tokens: ClassVar[bool] = True  # whether block 0's equations tell which patches are whose
    seen: ClassVar[tuple[str, ...]] = ()  # what is said of a picture's order
    traits: ClassVar[tuple[str, ...]] = ("masks", "8 bit", "public photographs", "patches")

    @property
    def span(self) -> MaskedSpan:
        """The attack that gives the first guess, and the result where no lattice is found."""
        return MaskedSpan(self.prior, tokens=self.tokens)

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

    def system(self, view: AttackerView) -> PatchSystem:
        """The first upload's equations."""
        return patch_system(view, view.updates[0])

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Exact patches where a lattice is found, else `masked_span`'s guess."""
        update, system = view.updates[0], self.system(view)
        images, orders, facts = [], [], list[dict[str, float]]()
        grid, size = view.model.grid, view.model.patch_size
        for index, filled in enumerate(self.span.solve(view, [system]).patches):
            guess, hidden = pictures(view, filled.unsqueeze(0))[0], system.hidden[index]
            patches, order = to_patches(guess, size), torch.arange(len(hidden))
            seen = dict.fromkeys(self.seen, torch.nan)
            with image(index):
                exact = self._exact(view, system, index, guess)
                if exact is not None:
                    exact, order, seen = self._placed(view, index, exact, hidden)
                    patches = _levelled(exact.patches, exact.unmixed.frame.colours, view)
                images.append(to_images(wanted(view, hidden, patches), grid, size))
            is_found = float(exact is not None) if hidden.any() else torch.nan
            orders.append(order)
            facts.append({"lattice_found": is_found, **seen})
        return Reconstruction(
            torch.stack(images),
            mask=system.hidden,
            permutation=torch.stack(orders) if view.against == "plain" else None,
            diagnostics={
                **condition_and_rank(system.rows, update.dtype),
                **{name: torch.tensor([one[name] for one in facts]).double() for name in facts[0]},
            },
        )

    def _placed(
        self, view: AttackerView, index: int, exact: _Exact, hidden: Tensor
    ) -> tuple[_Exact, Tensor, dict[str, float]]:
        """The patches in their places, the permutation (N,) that they had, and what is `seen`."""
        return *exact.placed(hidden, view.model.grid, view.model.patch_size), {}

    def _exact(
        self, view: AttackerView, system: PatchSystem, index: int, guess: Tensor
    ) -> _Exact | None:
        """The patches by the lattice, with the guess (C, H, W) where it gives none; None where
        there is no lattice."""
        patches = to_patches(guess, view.model.patch_size)
        hidden = system.hidden[index]
        count = int(hidden.sum())
        if not 0 < count <= self.most or system.hidden_sum is None:
            return None
        span = upload_span(system, index, above_noise=ABOVE_NOISE)
        visible = system.rows[index][~hidden]
        rest = off_rows(system.total[index], visible)
        sums = off_rows(system.hidden_sum[index].unsqueeze(1), visible)
        wide = hull_rows(rest, sums, count)
        if not len(wide):
            return None
        unmixed = unmix(wide, view.pixels, view.model.patch_size)
        if unmixed is None or spent():  # a search that was ended has found no photographs yet
            return None
        restored, whole = unmixed.complete(span.known[~hidden], patches[~hidden])
        whole = (whole & _possible(restored)).to(patches.device).unsqueeze(1)
        patches[~hidden] = torch.where(whole, restored.to(patches), patches[~hidden])
        members = torch.full((len(hidden),), FIXED)
        members[~hidden.cpu()] = torch.where(whole.flatten().cpu(), FREE, FIXED)
        pieces, members[hidden.cpu()] = _repeated(unmixed.patches, count)
        patches[hidden] = pieces.to(patches)
        return _Exact(unmixed, patches, members)


@dataclass(frozen=True)
class PatchLattice(PixelLattice):
    """All patches as if MJP had masked every one, from the patch embedding's gradient alone.

    Networks without a table of positions (RoPE, relative bias), and clients that keep its gradient,
    send sum_i g_i x_i^T and, as the gradient of the bias, sum_i g_i: what dL/dE_unk is to masked
    patches. Their places are those where their borders fit, and then those that attention tells
    (`equations.attention`), which `order_found` confirms.
    """

    tokens: ClassVar[bool] = False
    name: ClassVar[str] = "patch_lattice"
    seen: ClassVar[tuple[str, ...]] = ("order_found",)
    traits: ClassVar[tuple[str, ...]] = ("8 bit", "public photographs", "patches")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """The gradient of the patch embedding, weight and bias; for the order, that of the layer
        behind block 0's attention."""
        return (PATCH, PATCH_BIAS, f"{PROJ}.weight", f"{PROJ}.bias")

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the patches are no lattice in the upload, or None."""
        if (refusal := lacks_gradients(view, PATCH, PATCH_BIAS)) is not None:
            return refusal
        if (batch := view.updates[0].batch) != 1:
            text = f"the patches of {batch} pictures are mixed; batch 1 is needed"
            return Refusal("batch", text)
        if view.model.patch_norms[0] is not None:
            return Refusal("block", "patches are normalised before they are embedded")
        if (patches := view.model.grid.patches) > self.most:
            text = f"N = {patches} patches, and a lattice of {self.most} at most"
            if view.model.grid.rows == view.model.grid.columns:
                text += f": up to {math.isqrt(self.most) * view.model.patch_size} px"
            return Refusal("underdetermined", text)
        return too_few_equations(view.model)

    def system(self, view: AttackerView) -> PatchSystem:
        """The first upload's equations, in which every patch is hidden."""
        update = view.updates[0]
        total = gradient(view, update, PATCH).flatten(2)
        hidden = torch.ones(
            len(total), view.model.grid.patches, dtype=torch.bool, device=total.device
        )
        rows = total.new_zeros(*hidden.shape, total.shape[1])
        return PatchSystem(rows, total, hidden, gradient(view, update, PATCH_BIAS))

    def _placed(
        self, view: AttackerView, index: int, exact: _Exact, hidden: Tensor
    ) -> tuple[_Exact, Tensor, dict[str, float]]:
        """The same, where attention tells: tried again with patches that their borders improve."""
        exact, order, _ = super()._placed(view, index, exact, hidden)
        attention = PatchOrder.of(view, view.updates[0], index)
        if attention is None:
            return exact, order, {"order_found": 0.0}
        for better in (exact, exact.continued(view.model.grid)):
            patches = normalised(better.patches, view.pixels, view.model.patch_size)
            there, is_right = attention.found(patches)
            if is_right:
                there = there.cpu()
                return better.standing(there), there.argsort()[order], {"order_found": 1.0}
        return exact, order, {"order_found": 0.0}


@dataclass(frozen=True)
class _Exact:
    """A picture's patches by the lattice."""

    unmixed: Unmixed
    patches: Tensor  # (N, p) in [0, 1], the masked ones in any order and perhaps outside
    members: Tensor  # (N,) see `lattice.unmixing.continued`

    def placed(self, hidden: Tensor, grid: Grid, patch_size: int) -> tuple[_Exact, Tensor]:
        """The patches in the places that borders tell, and the permutation (N,) that they had."""
        pieces = self.patches[hidden].clamp(0, 1)
        order = solve(self.patches, hidden, pieces, grid=grid, patch_size=patch_size)
        return self.standing(order.argsort()).continued(grid), order

    def standing(self, there: Tensor) -> _Exact:
        """At each place the patch `there` (N,)."""
        patches, members = self.patches[there.to(self.patches.device)], self.members[there]
        return replace(self, patches=patches, members=members)

    def continued(self, grid: Grid) -> _Exact:
        """The patches in [0, 1], improved by what lies beside them."""
        better = self.unmixed.continued(self.patches, self.members, grid)
        patches = torch.where(_possible(better).unsqueeze(1), better, self.patches)
        return replace(self, patches=patches.clamp(0, 1))


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
    shifted, _ = fewest_steps(knowledge, known, size, pixels)
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
