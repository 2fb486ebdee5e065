"""What the checks without truth say of an attack's pictures, in words: which are certain, and
whether they explain the uploaded gradient."""

from __future__ import annotations

import math

from attacks.shared_picture import CERTAIN, SHARING
from mjp_privacy.uploads.reconstructed import Reconstructed

EXPLAINED, TELLS, EQUAL = 1e-2, 0.1, 1e-4
"""A residual below the first is that of rounding and clipping, and the picture has the uploaded
gradient, where it is below this share of what moving all patches by one leaves, or below the last.
In new networks other pictures leave little: patches moved by one .0005 to .01 (DeiT-III, CaiT,
DINOv2, ViT-Ti), the client's own 2e-5 at most, in float32."""
ALL, LEAST_SMOOTHED = 1e-3, 0.5
"""Label smoothing scales the gradient of a classifier that knows nothing yet, and nearly that of
others, by factors down to the second. It leaves a residual above the first; clipping leaves none,
unless noise was added or the gradient is of half precision."""
NOISY = 1.5  # times the declared noise: a residual below it is that of the noise

AS_DECLARED = (
    "as far as mean, std and the order of channels are as declared, no tensor's gradient was "
    "scaled by itself"
)
NOT_ASSUMED = (
    "one of these is not as assumed: the loss (plain cross entropy; dropout, label smoothing and "
    "mixup change it), labels, sign, scale (lr, loss scale), optimizer, weights, batch, mean and "
    "std, the pictures' size (`img_size=`), a defence's error (`kind=`, `noise=`, `rounding=`, "
    "`defenses=` and the like declare them)"
)


def what_checks_say(best: Reconstructed, batch: int, declared: float, shape: str) -> str:
    """What the checks without truth say of an attack's pictures: which are certain, and whether
    they explain the uploaded gradient, those of a batch together.

    declared   the residual that declared noise gives a perfect picture
    shape      of which shape pictures may be, too, where they count as square
    """
    assert best.images is not None
    shared, known = SHARING in best.diagnostics, not math.isnan(best.residual)
    several = batch > 1 or shared
    count, certain = len(best.images), best.verified if several else best.is_certain
    of = "places for pictures that uploads share" if shared else "pictures"
    mine = f"{best.attack}'s {of if several else 'picture'}"
    left = (
        f"residual {best.scaled_residual:.2g} {_times(best.factor)}, {best.residual:.2g} as it is"
    )
    solved = "" if math.isnan(best.misfit) else f" (misfit {best.misfit:.2g})"
    noise = ""
    if declared and not several:
        noise = (
            f"the declared noise makes {declared:.2g} of it for the client's own picture, and up "
            "to cond(A) times as much for one that was solved from noisy equations; more says that "
        )
    condition = f"{AS_DECLARED}, and pictures are square ({shape})" if shape else AS_DECLARED
    fits = _explained(best, 0.0 if several else declared)
    if fits and several:
        fits = f"As a whole {best.attack}'s batch {fits}"
        if best.labels is not None:
            fits += f" Its classes: {', '.join(map(str, best.labels.tolist()))}."
    elif fits:
        fits = f"{mine} {fits}"
    if certain and several:
        others = "; all others are guesses" if best.verified < count else ""
        said = (
            f"{best.attack}: {best.verified} of {count} {of} are certain, as `.certain` marks them"
        )
        said += f", {condition}{others}."
    elif certain:
        why = f"it alone solves the equations of the patch embedding{solved}"
        if CERTAIN in best.diagnostics:
            why = "the inputs of its layers are those that the upload shows"
        said = f"{mine} is certain: {why}, {condition}."
    if certain and fits:
        return f"{said} {fits}"
    if certain and known and best.verified == count:
        return f"{said} A part of the uploaded gradient is left ({left}): {noise}{NOT_ASSUMED}."
    if certain:
        return said
    order = f" Borders alone put {best.ordered} patches in order." if best.ordered else ""
    counted = f" Pictures count as square ({shape})." if shape else ""
    if fits:
        return f"{fits}{order}{counted} That is no proof of good pictures: look (.show())."
    if not known and not best.misfit >= EXPLAINED:
        why = best.uncompared or "that takes labels (labels=…) and the gradients of all layers"
        return (
            f"Nothing in the upload tells whether {mine} {'are' if several else 'is'} the "
            f"client's{solved}: {why}.{order}{counted} That is no evidence of safety: look "
            "(.show())."
        )
    if known and not math.isnan(best.rolled):
        return (
            f"{mine} come{'' if several else 's'} near the uploaded gradient ({left}), but with "
            f"all patches moved by one the residual is {best.rolled:.2g}: it hardly tells pictures "
            f"apart.{order}{counted} That is no evidence of safety, so look (.show()); if it is "
            f"another picture, {noise}{NOT_ASSUMED}."
        )
    return (
        f"Nothing has the whole uploaded gradient; {mine} come{'' if several else 's'} nearest "
        f"({left if known else solved.strip(' ()')}).{counted} That is no evidence of safety, so "
        f"look (.show()): the attacks do not reach the whole, or {noise}{NOT_ASSUMED}."
    )


def _explained(best: Reconstructed, declared: float) -> str:
    """How the pictures explain the uploaded gradient, to the sentence's end; empty where they do
    not."""
    residual, times = best.scaled_residual, _times(best.factor)
    enough = EXPLAINED
    if not math.isnan(best.rolled):
        enough = min(EXPLAINED, max(EQUAL, TELLS * best.rolled))
    if best.residual < enough:
        return f"has the uploaded gradient (residual {best.residual:.1e})."
    if residual < enough and LEAST_SMOOTHED < best.factor < 1 and residual > ALL > declared:
        return (
            f"explains most of the uploaded gradient {times} (residual {residual:.1e}); another "
            "loss (label smoothing, mixup) leaves such a rest, or a clipped gradient that was "
            "rounded to half precision."
        )
    if residual < enough:
        why = "was it clipped, averaged or scaled" if best.factor > 0 else "is the sign another"
        return f"explains the uploaded gradient {times} (residual {residual:.1e}); {why}?"
    if residual < NOISY * declared:
        return (
            f"explains the uploaded gradient {times} as far as the declared noise lets it be seen "
            f"(residual {residual:.2g}, of which the noise makes {declared:.2g}); many pictures "
            "may do so."
        )
    return ""


def _times(factor: float) -> str:
    """A factor in words: `times 1/57.9` below 1, `times 2.5` above."""
    sign, size = "−" if factor < 0 else "", abs(factor)
    return f"times {sign}1/{1 / size:.3g}" if 0 < size < 1 else f"times {sign}{size:.3g}"
