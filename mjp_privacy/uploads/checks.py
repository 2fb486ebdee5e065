"""Checks of an upload and of pictures made from it that need no truth.

Where an upload's equations determine every patch, they give what the client *fed*, its pixels after
normalisation, which tell whether that is as declared (`normalisation.py`).

Whether a picture meets the equations of the patch embedding, whose gradient is G = sum_i g_i x_i^T
over the patches (`attacks/equations/patch_system.py`). The rows g_i of visible patches are in the
upload; those of masked ones are not, so the best ones are taken:

    misfit = min over the masked g_i of || G - sum_i g_i x_i^T || / || G ||

Where no patch is masked and there are fewer patches than equations (N < D), G = A^T X has one
solution, and a relative error of G becomes at most cond(A) times that in X. The misfit shows of an
error only what no patches explain: of D equations D - N parts, the patches took up the other N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attacks.equations import (
    CERTAIN,
    OPEN_LEVELS,
    OUT_OF_RANGE,
    PATCH,
    PATCH_BIAS,
    PATCH_SYSTEM,
    TABLE,
)
from attacks.equations.patch_system import (
    condition_and_rank,
    error_of,
    gradient,
    lacks_gradients,
    patch_system,
    to_unit_range,
    weights,
)
from attacks.equations.sent_gradients import rounding_error, weight_rounding
from attacks.equations.several_uploads import several_uploads
from attacks.equations.span import combine, upload_span
from attacks.step import BREAKDOWN
from mjp_privacy.client.gradients import HALF
from mjp_privacy.interfaces import AttackerView, ClientUpdate
from mjp_privacy.models.jigsaw import to_images, to_patches
from mjp_privacy.uploads.normalisation import OTHERWISE, SCALED_APART, declared_wrongly

MISNORMALISED = "another_normalisation"
"""Diagnostic of unscored pictures, beside CERTAIN."""

# several uploads ----------------------------------------------------------------------------------

BEYOND = 1e-4
"""Of the largest singular value, from which one beyond the N-th is more than rounding. Of uploads
of five photographs (ViT-Ti/16, 224 px) it was 1e-7 at most in float32, 4e-5 in float16 where
weights stay, 9e-3 where a learned picture's gradient is too small for it; with one upload 2 %
lighter 5e-5 to 6e-4, and always above with one of another picture, mirrored or a pixel aside.
Rounding to 16 bits hides some of these: of three photographs 224 px large one in gradients in
bfloat16, and all in differences of such weights."""
MOST = 0.5
"""Share of entries that another format would change, from which numbers are not of that format."""


def different_pictures(view: AttackerView) -> str:
    """What shows that several uploads of single pictures do not hold the same one, and which upload
    does not fit if it is one; "" where nothing does. However the patches are shuffled, the patch
    embedding's gradients of one picture have the rank of its N patches together. What is little
    more than rounding, as a difference of weights of a picture that was learned, counts less.
    """
    declared = any(bool((error_of(u, PATCH) > 0).any()) for u in view.updates if PATCH in u.grads)
    single = all(
        u.batch == u.steps == u.steps_in_all == 1 and u.optimizer == "sgd" for u in view.updates
    )
    if len(view.updates) < 2 or not single or declared or lacks_gradients(view, PATCH):
        return ""
    sent = [gradient(view, update, PATCH)[0].flatten(1) for update in view.updates]
    for place, (update, of) in enumerate(zip(view.updates, sent, strict=True)):
        size = of.abs().max()  # squares of tiny numbers are none
        sent[place] = of / size / ((of / size).norm() + rounded_off(view, update) / size / BEYOND)
    squares = [of.mT @ of for of in sent]  # p × p, one for each upload
    patches, rows = view.model.grid.patches, [len(of) for of in sent]

    def fit(chosen: Sequence[int]) -> bool:
        if min(sum(rows[at] for at in chosen), len(squares[0])) <= patches:
            return True  # too few rows to tell
        together = torch.stack([squares[at] for at in chosen]).sum(0)
        strengths = torch.linalg.eigvalsh(together).clamp_min(0).sqrt()
        return bool(strengths[-patches - 1] <= BEYOND * strengths[-1].clamp_min(1))

    places = range(len(sent))
    if fit(places):
        return ""
    others = [at for at in places if fit([place for place in places if place != at])]
    which = f"without upload {others[0] + 1} of {len(sent)} they do" if len(others) == 1 else ""
    return (
        "the uploads do not hold the same picture (another one, mirrored or cropped otherwise), or "
        f"noise, rounding or weight decay that was not declared hides it{which and '; '}{which}"
    )


def rounded_off(view: AttackerView, update: ClientUpdate) -> float:
    """How long at most what rounding took off a picture's gradient of the patch embedding is: of
    more bits than 16 only where these do not hold the numbers, or the weights after the step."""
    sent, is_difference = update.grads[PATCH][0].double(), update.kind == "weight_difference"
    before = weights(view, update)[PATCH].double() if is_difference else torch.zeros_like(sent)
    longest = torch.finfo(update.dtype).eps * float((before + sent).norm())
    for half in HALF.values():
        for held in (sent, before.to(half) + sent):
            if float((held.to(half) != held)[sent != 0].double().mean()) < MOST:
                error = float(rounding_error(held[None], half, torch.finfo(half).tiny))
                longest = max(longest, error * held.numel() ** 0.5)
    return weight_rounding(update, longest) if is_difference else longest


# what the client fed ------------------------------------------------------------------------------

MEETS = 1e-4  # share of their G that patches leave of several uploads which they explain together
SAME_PIXELS = 0.02  # root mean square between two pictures' pixels that count as the same
APART = 0.01


def fed_pixels(view: AttackerView) -> Tensor | None:
    """The view's first picture (C, H, W) as the client fed it, normalised and not clipped, if its
    uploads determine every patch and do not contradict themselves; else None."""
    if lacks_gradients(view, TABLE, PATCH) or any(u.batch > 1 or u.steps > 1 for u in view.updates):
        return None
    for update in view.updates:  # noise, rounding and halves would move the pixels
        if any(bool((error_of(update, name) > 0).any()) for name in (TABLE, PATCH)):
            return None
    if view.model.patch_embed.num_patches >= view.model.embed_dim:
        return _fed_to_several(view) if len(view.updates) > 1 else None
    spans = [upload_span(patch_system(view, update), 0) for update in view.updates]
    combined = combine(spans)
    if len(combined.basis):
        return None
    _, are_met, _ = patch_check(view.part(0), combined.known.cpu()[None])
    if not bool(are_met.all()):
        return None  # an error that nobody declared moves the pixels, too
    return to_images(combined.known, view.model.grid, view.model.patch_size)


def _fed_to_several(view: AttackerView) -> Tensor | None:
    """The same where patches outnumber the width, of uploads that determine them together."""
    found = several_uploads([patch_system(view, update) for update in view.updates], 0)
    patches, uploads = found.knowledge.known, found.uploads
    whole = ~uploads.hidden.any(1)  # the uploads of which all rows are known
    if len(found.knowledge.basis) or not bool(whole.any()):
        return None
    total = uploads.total[whole]
    if float((total - uploads.rows[whole].mT @ patches).norm() / total.norm()) > MEETS:
        return None
    return to_images(patches, view.model.grid, view.model.patch_size)


class Solution(NamedTuple):
    """What solves the equations of the patch embedding, and what speaks against it, or ""."""

    fed: Tensor  # (C, H, W), as `fed_pixels`
    picture: Tensor  # (C, H, W), clipped to [0, 1] as attacks clip it
    doubt: str

    def concerns(self, image: Tensor) -> bool:
        """Whether an attack's picture has the same pixels, in whatever order."""
        own, others = (x.double().cpu().flatten(1).sort(1).values for x in (self.picture, image))
        return float((own - others).square().mean().sqrt()) < SAME_PIXELS


def solutions(view: AttackerView) -> dict[int, Solution]:
    """The pictures that solve the patch equations, by their place in the view."""
    found: dict[int, Solution] = {}
    for place in range(view.updates[0].steps_in_all):
        try:
            fed = fed_pixels(view.part(place))
        except BREAKDOWN:  # of numbers at the edge of their range: nothing is certain then
            continue
        if fed is not None:
            doubt = declared_wrongly(fed, view.pixels.mean, view.pixels.std)
            doubt = doubt or scaled_apart(view.part(place))
            found[place] = Solution(fed.cpu(), to_unit_range(view, fed.cpu()), doubt)
    return found


def scaled_apart(view: AttackerView) -> str:
    """What shows that the first upload's tensors were scaled by themselves; "" where nothing
    does."""
    beside = bias_beside_rows(view)
    if beside is None:
        return ""
    factor, rest = (float(fact[0]) for fact in beside)
    if not rest < LITTLE or abs(factor - 1) < APART + rest:
        return ""
    return (
        f"the gradient of the patch embedding's bias is {factor:.4g} times the sum of those of "
        f"positions, as where {SCALED_APART}"
    )


def bias_beside_rows(view: AttackerView) -> tuple[Tensor, Tensor] | None:
    """How many times the gradient of the patch embedding's bias is the sum of those that patches'
    positions have, which it equals, (n,), and what share of it is something else, (n,); None where
    the first upload does not tell."""
    update = view.updates[0]
    if PATCH_BIAS not in update.grads or not bool(update.grads[PATCH_BIAS].any()):
        return None
    system, sent = patch_system(view, update), gradient(view, update, PATCH_BIAS).cpu()
    rows = system.rows.sum(1) + (0 if system.hidden_sum is None else system.hidden_sum)
    rows = rows.to(sent)
    factors = (sent * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
    return factors[:, 0], (sent - factors * rows).norm(dim=1) / sent.norm(dim=1)


def doubts_of_certain(view: AttackerView, images: Tensor, certain: Tensor) -> dict[int, str]:
    """The same for pictures (m, C, H, W) that an attack itself calls certain, or verifies. The
    patch equations determine none of a batch, nor of a client that keeps embeddings' gradients to
    itself. Attacks clip pictures to [0, 1]: pixels at the ends of it may have been anything."""
    doubts = {}
    for place in certain.nonzero().flatten().tolist():
        pixels = images[place].double().cpu()
        inside = (pixels > 0) & (pixels < 1)
        fed = _normalised(view, pixels).where(inside, torch.nan)
        known = bool(inside.flatten(1).any(1).all())
        if known and (doubt := declared_wrongly(fed, view.pixels.mean, view.pixels.std)):
            doubts[place] = doubt
    return doubts


def _normalised(view: AttackerView, pixels: Tensor) -> Tensor:
    """Pixels (..., C, H, W) in [0, 1] as the client feeds them, as far as it is as declared."""
    both = view.pixels.mean, view.pixels.std
    mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in both)
    return (pixels.double() - mean) / std


# the equations of the patch embedding -------------------------------------------------------------

SHUFFLED = 0.7
"""Of the squared steps across borders: what is left at most of those of a shuffled picture. Put in
order, 60 plain photographs (20 of scikit-image, at 32, 64 and 224 pixels) keep .94 or more; of
120 with a quarter or half of the patches shuffled 119 keep .69 or less."""
ABOVE, FLAT = 2.0, (0.5 / 255) ** 2
"""Times the largest squared steps within patches that those across borders are at least where a
picture was shuffled, and the least steps within: of 200 plain photographs they are 1.9 times as
large at most, of mosaics 2.8, of nearly all of 600 with a quarter or more shuffled 2 or more."""
ZEROS = 1e-3
"""Normalised pixels that count as 0: half a level of pixels is .004 or more."""
LITTLE_SUM, ROUNDED_SUM = 5e-3, 1e-4
"""Relative errors of the sum of positions' rows, which noise may leave, and rounding alone: rows
are so alike that one of 25 was 5 % of it."""
CLIFF = 1e3
"""From one singular value of a gradient to the next, where no more directions were sent."""
LITTLE = 0.05
"""Relative error of the patches up to which the equations tell the client's picture from others."""


BY_A_TOKEN = (
    "a token (of SimMIM, BEiT) may have taken the place of some patches, which are not in it"
)
BIAS_APART = (
    "The gradient of the patch embedding's bias is not the sum of those of positions: " + BY_A_TOKEN
)
ZEROS_APART = (
    f"Patches of zeros solve the equations, and no bias's gradient tells more: {BY_A_TOKEN}"
)


def patch_check(view: AttackerView, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How well patches (m, N, p), as they are fed, meet the equations of the first upload's patch
    embedding: their misfits (m,); whether they are met, bool (m,), as far as cond(A) tells the
    errors of visible patches; and whether one picture alone solves them, bool (m,), unless a token
    took the place of patches."""
    update = view.updates[0]
    system = patch_system(view, update)
    rows, total, masked = system.rows.cpu(), system.total.cpu(), system.hidden.cpu()
    left = []
    for rest, hidden, own in zip(total - rows.mT @ patches, masked, patches, strict=True):
        if bool(hidden.any()) and bool(own.isfinite().all()):
            span = torch.linalg.svd(own[hidden], full_matrices=False).Vh
            rest = rest - (rest @ span.mT) @ span
        left.append(rest.norm())
    misfits = torch.stack(left) / total.flatten(1).norm(dim=1)
    facts = condition_and_rank(rows, update.dtype)
    patch_count, width = rows.shape[1:]
    centred = rows.sum(2).norm(dim=1) < LITTLE * rows.flatten(1).norm(dim=1)
    equations = width - centred.long()  # norms that take means away leave one fewer in G, too
    unique = (facts["rank_a"] == patch_count) & (patch_count < equations) & ~masked.any(1)
    unique &= ~_projected(update, total, patch_count)
    # Patches take up their share of an error; equations beyond their number show the rest.
    taken_up = (patch_count / (equations - patch_count).clamp_min(1)).clamp_min(1).sqrt()
    return misfits, misfits * taken_up * facts["cond_a"] < LITTLE, unique


def _replaced(view: AttackerView, patches: Tensor) -> Tensor:
    """Which of the pictures (m, N, p) may lack patches that have positions, bool (m,): a token in
    place of an embedded patch (SimMIM, BEiT) gets its position, too, and nothing of the patch is in
    G, so that zeros solve it. The bias's gradient is the sum of the other rows; without it zeros
    tell nothing."""
    beside = bias_beside_rows(view)
    if beside is None:
        return _has_zeros(patches)
    return ~(beside[1] < torch.where(_has_zeros(patches), ROUNDED_SUM, LITTLE_SUM))


def _has_zeros(patches: Tensor) -> Tensor:
    """Which of the pictures (m, N, p) have a patch of zeros, bool (m,)."""
    return (patches.abs().amax(-1) < ZEROS).any(1).cpu()


def _projected(update: ClientUpdate, total: Tensor, patch_count: int) -> Tensor:
    """Which gradients G (m, D, p) of the patch embedding tell, and are solved by, a part of the
    pixels alone, bool (m,): an optimizer took the mean out of each row (gradient centralisation),
    so that each patch sums up to 0; or the client sent few directions of each tensor (PowerSGD), of
    which no layer shows more than G."""
    projected = total.sum(2).norm(dim=1) < LITTLE * total.flatten(1).norm(dim=1)
    values = torch.linalg.svdvals(total)[:, : min(patch_count, total.shape[2])]
    for index, sizes in enumerate(values):
        steps = sizes[:-1] / sizes[1:].clamp_min(1e-300)
        if not len(steps) or float(steps.max()) < CLIFF:
            continue
        few = int(steps.argmax()) + 1
        least = (sizes[few - 1] * sizes[few]).sqrt() / sizes[0]
        layers = (g[index].double() for n, g in update.grads.items() if n not in PATCH_SYSTEM)
        of_layers = [torch.linalg.svdvals(g) for g in layers if g.ndim == 2]
        projected[index] |= all(int((own > least * own[0]).sum()) <= few for own in of_layers)
    return projected


class Judged(NamedTuple):
    """What is known of an attack's m pictures without their truth."""

    misfits: Tensor | None = None  # (m,)
    certain: Tensor | None = None  # (m,) bool; none that is doubted
    doubts: Mapping[int, str] = {}
    """{place: what its pixels say against the declared normalisation}."""
    replaced: str = ""
    """What says that a token may have taken the place of patches, but for which one is certain."""


def judged(
    view: AttackerView, images: Tensor, found: Mapping[str, Tensor], known: Mapping[int, Solution]
) -> Judged:
    """What is certain of a batch `found` alone says, the attack's own diagnostics; of single
    pictures the patch equations, where the attack does not say it. Clipping leaves a picture that
    solves them no farther from the client's, but it solves them less.

    known  `solutions` of single pictures; doubts of certain ones are looked for here
    """
    reasons = {at: one.doubt for at, one in known.items() if one.doubt and one.concerns(images[at])}
    update, misfits = view.updates[0], None
    has_table = view.model.pos_embed is not None and {TABLE, PATCH} <= update.grads.keys()
    if update.batch == 1 and has_table:
        try:
            fed = _normalised(view, images)
            for at, one in known.items():
                if float((fed[at] - one.fed).abs().max()) * max(view.pixels.std) < 0.5 / 255:
                    fed[at] = one.fed
            patches = to_patches(fed, view.model.patch_size)
            misfits, are_met, unique = patch_check(view, patches)
        except BREAKDOWN:
            return Judged()
    certain, solved = found.get(CERTAIN), torch.zeros(0, dtype=torch.bool)
    if certain is not None:
        sure = certain.cpu() == 1
        patches = to_patches(_normalised(view, images), view.model.patch_size)
        if update.batch == 1 and OPEN_LEVELS in found:
            solved, sure = sure, sure & ~_replaced(view, patches)
            for place in sure.nonzero().flatten().tolist():
                if apart := scaled_apart(view.part(place)):
                    reasons[place] = apart
        elif view.model.patch_embed.proj.bias is None:
            sure &= ~_has_zeros(patches)
        shares = found.get(OUT_OF_RANGE, torch.zeros(len(sure))).cpu()
        reasons = {**doubts_of_certain(view, images, sure | (shares > 0)), **reasons}
        for place in shares.nonzero().flatten().tolist():
            leave = f"{100 * float(shares[place]):.1f} % of its pixels leave [0, 1]: {OTHERWISE}"
            reasons.setdefault(place, leave)
    elif misfits is not None:
        solved = unique & are_met
        sure = solved & ~_replaced(view, patches)
    else:
        return Judged(None, None, reasons)
    replaced = ""
    if len(solved) and bool((solved & ~sure).any()):
        replaced = BIAS_APART if PATCH_BIAS in update.grads else ZEROS_APART
    sure[list(reasons)] = False
    return Judged(misfits, sure, reasons, replaced)


def of_recorded(
    view: AttackerView, images: Tensor, found: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Diagnostics (m,) of recorded uploads' pictures: 1 where one is certain, and where its pixels
    speak for another normalisation than the declared one."""
    single = view.updates[0].batch == 1
    seen = judged(view, images, found, solutions(view) if single else {})
    if seen.certain is None:
        return {}
    doubted = torch.zeros(len(images), dtype=torch.float64)
    doubted[list(seen.doubts)] = 1
    return {CERTAIN: seen.certain.double(), MISNORMALISED: doubted}


# the order of a picture's patches -----------------------------------------------------------------


def shuffled_patches(fed: Tensor, in_order: Tensor, patch_size: int) -> int:
    """How many patches of pictures (m, C, H, W) stand elsewhere in the same pictures put in order,
    where the borders between patches say that they were shuffled; 0 where they do not, as in
    mosaics, whose steps are as large within patches, or whose patches are flat."""
    *within, border = steps_by_line(fed, patch_size)
    if steps_by_line(in_order, patch_size)[-1] > SHUFFLED * border:
        return 0
    if border < ABOVE * max(within) or max(within) < FLAT:
        return 0
    apart = to_patches(fed.double(), patch_size) - to_patches(in_order.double(), patch_size)
    return int((apart.abs().amax(-1) > 1 / 255).sum())


def steps_by_line(images: Tensor, patch_size: int) -> list[float]:
    """The mean squared step from one pixel to the next behind each line of the patches, the last of
    which is their border."""
    across = [images.diff(dim=-2).movedim(-2, 0), images.diff(dim=-1).movedim(-1, 0)]
    lines = [[steps[line::patch_size] for steps in across] for line in range(patch_size)]
    return [
        float(torch.cat([part.double().flatten() for part in line]).square().mean())
        for line in lines
    ]
