"""What `attack_gradients` returns: pictures, checks without truth in words, scores, and reasons.

Words: a picture is *certain* where it alone solves the equations of the patch embedding, or an
attack on batches verified it, as far as mean, std and the order of channels are as declared. It is
*exact* where it equals the private one in every 8-bit value, which only the truth tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from torch import Tensor

from attacks import traits_of
from attacks.equations import CERTAIN
from attacks.shared_picture import SHARING
from mjp_privacy.core.drawing import house_style
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.schema import size_text
from mjp_privacy.core.text import by_reason

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAP = 100.0  # dB, to which a PSNR counts in means, as in the reports


def _mean(values: Tensor | None) -> float:
    return math.nan if values is None else float(values.nanmean())


def decibels(value: float) -> str:
    return f"≥ {CAP:g}" if value >= CAP else f"{value:.1f}"


@dataclass(frozen=True, repr=False)
class Reconstructed:
    """What one attack gives, for the m images of the step."""

    attack: str
    images: Tensor | None  # (m, C, H, W) in [0, 1]; None: the attack names masked positions only
    residuals: Tensor | None = None
    """(m,) || g(image) - g || / || g || of the patch embedding's gradient, of a batch that of all
    its pictures together; None: the labels are not known."""
    factor: float = math.nan
    """f, with which f g(image) is nearest to g, in the mean: 0.017 means that the upload is the
    gradient times that, as of a client that clips."""
    scaled_residual: float = math.nan  # of f g(image), in the mean
    rolled: float = math.nan  # the same with all patches of these moved by one
    ordered: int = 0  # patches, masked or without positions, that borders alone put in order
    labels: Tensor | None = None
    """(m,) of a batch whose pictures explain the gradient: the class of each."""
    misfits: Tensor | None = None
    """(m,) the same without the loss, before pixels were clipped to [0, 1]: `uploads/checks.py`."""
    certain: Tensor | None = None
    """(m,) bool: whatever the loss, only the client's picture fits, or one that uploads share."""
    together: bool = False
    """Whether the patch embeddings of several uploads determine it, whatever the weights."""
    doubts: Mapping[int, str] = field(default_factory=dict)
    """{place of a picture: what its pixels say against the declared mean and std}."""
    replaced: str = ""  # what says that a token may have taken the place of patches
    seconds: float = 0.0  # with its checks and scores
    mask: Tensor | None = None  # (m, N) the positions that MJP masked, as the attack names them
    uncompared: str = ""  # why no residual can be computed, beside missing labels and gradients
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)  # of images without a reconstruction
    scores: pd.DataFrame | None = None  # a row for each image, where private images were given
    places: Sequence[int] = ()  # where the picture of each private image stands, where scored

    @property
    def image(self) -> Tensor:
        """The first image (C, H, W) in [0, 1] that there is."""
        if self.images is None:
            raise UserError(f"{self.attack} names the masked positions (.mask) and no picture.")
        return self.images[next(at for at in range(len(self.images)) if at not in self.reasons)]

    @property
    def residual(self) -> float:
        """The mean of `residuals`: near 0, the pictures have the gradient that was sent. NaN where
        the labels are not known."""
        return _mean(self.residuals)

    @property
    def misfit(self) -> float:
        """The mean of `misfits`; NaN where the upload does not tell it."""
        return _mean(self.misfits)

    @property
    def is_sorted(self) -> bool:
        """Whether patches that nothing masked were moved to where their borders fit."""
        return "shuffled alone" in traits_of(self.attack)

    @property
    def verified(self) -> int:
        """How many pictures are certain, whatever the loss."""
        return 0 if self.certain is None else int(self.certain.sum())

    @property
    def solved(self) -> int:
        """How many pictures' patches were all found, each within what its token's equations leave;
        which of them make one picture, and in which order, that does not tell."""
        if not {"patches_found", "token_misfit"} <= self.diagnostics.keys():
            return 0
        all_found = self.diagnostics["patches_found"] == 1
        return int((all_found & (self.diagnostics["token_misfit"] < EXPLAINED)).sum())

    @property
    def is_certain(self) -> bool:
        """Whether every image has a picture and each is certain."""
        return self.certain is not None and not self.reasons and bool(self.certain.all())

    @property
    def exact(self) -> int:
        """How many pictures equal the private ones in every 8-bit value, where these were given."""
        return 0 if self.scores is None else int(self.scores["exact"].sum())

    @property
    def psnr(self) -> float:
        """The mean PSNR in dB, each capped at 100; NaN where no private images were given."""
        return (
            math.nan if self.scores is None else float(self.scores["psnr"].clip(upper=CAP).mean())
        )

    def facts(self) -> dict[str, str]:
        """Its line of a table, as far as it is known."""
        checks = {"residual": self.residual, "misfit": self.misfit}
        told = {name: f"{check:.1e}" for name, check in checks.items() if not math.isnan(check)}
        if self.scores is not None:
            told["PSNR"] = decibels(self.psnr)
            told["exact"] = f"{self.exact} of {len(self.scores) + len(self.reasons)}"
        return {"attack": self.attack, **told, "seconds": f"{self.seconds:.2f}"}

    def __repr__(self) -> str:
        told = [f"{name} {value}" for name, value in list(self.facts().items())[1:]]
        made = "no picture" if self.images is None else f"images {tuple(self.images.shape)}"
        return f"{self.attack}: {', '.join([made, *told])}"


# what the checks say, in words -----------------------------------------------------------------

EXPLAINED, TELLS, EQUAL = 1e-2, 0.1, 1e-4
"""A residual below the first is that of rounding and clipping, and the picture has the uploaded
gradient, where it is below this share of what moving all patches by one leaves, or below the last.
In new networks other pictures leave little: patches moved by one .0005 to .01 (DeiT-III, CaiT,
DINOv2, ViT-Ti), the client's own 2e-5 at most, in float32."""

PART = "the uploaded gradient of the patch embedding"
AS_DECLARED = (
    "as far as mean, std and the order of channels are as declared, and no tensor's "
    "gradient was altered by itself"
)
NOT_ASSUMED = (
    "one of these is not as assumed: the loss (plain cross entropy; dropout, label smoothing and "
    "mixup change it), labels, sign, scale (lr, loss scale), optimizer, weights (several steps "
    "move them), batch, one picture in all uploads, mean and std, the pictures' size "
    "(`img_size=`), a defence's error (`kind=`, `noise=`, `rounding=`, `defenses=` and the like "
    "declare them; noise leaves a part, too, and more of a picture that was solved from noisy "
    "equations)"
)


def what_checks_say(best: Reconstructed, leak: Leak) -> str:
    """Which of an attack's pictures are certain, and whether they explain the uploaded gradient,
    those of a batch together."""
    assert best.images is not None
    known, shared = not math.isnan(best.residual), SHARING in best.diagnostics
    several, count = leak.batch > 1 or shared, len(best.images)
    of = "places for pictures that uploads share" if shared else "pictures"
    mine = f"{best.attack}'s {of if several else 'picture'}"
    left = f"residual {best.residual:.2g}"
    if best.scaled_residual < 0.9 * best.residual:  # else the factor tells next to nothing
        left += f", {best.scaled_residual:.2g} if the upload is {_plain(best.factor)} times its own"
    solved = "" if math.isnan(best.misfit) else f" (misfit {best.misfit:.2g})"
    shape = f" ({leak.another_shape})" if leak.another_shape else ""
    fits = explanation(best)
    if fits:
        fits = f"As a whole {best.attack}'s batch {fits}" if several else f"{mine} {fits}"
        if several and best.labels is not None:
            fits += f" Its classes: {', '.join(map(str, best.labels.tolist()))}."
    if best.verified if several else best.is_certain:
        condition = f"{AS_DECLARED}, and pictures are square{shape}" if shape else AS_DECLARED
        why = f"it alone solves the equations of the patch embedding{solved}"
        if several:
            others = "; all others are guesses" if best.verified < count else ""
            said = (
                f"{best.attack}: {best.verified} of {count} {of} are certain, as `.certain` marks "
                f"them, {condition}{others}."
            )
        else:
            if "8 bit" in traits_of(best.attack):
                why = f"as it was fed, of pictures in 8 bits {why}"
            elif CERTAIN in best.diagnostics:
                why = "the inputs of its layers are those that the upload shows"
            said = f"{mine} is certain: {why}, {condition}."
        if not fits and known and best.verified == count:
            fits = f"A part of the uploaded gradient is left ({left}): {NOT_ASSUMED}."
        return f"{said} {fits}".strip()
    come, told, why = "come" if several else "comes", "no evidence of safety", ""
    if fits:
        said, told = fits, "no proof of good pictures"
    elif not known and not best.misfit >= EXPLAINED:
        lacks = best.uncompared or "that takes labels (labels=…) and the gradients of all layers"
        are = "are" if several else "is"
        said = f"Nothing in the upload tells whether {mine} {are} the client's{solved}: {lacks}."
    elif best.together and known:
        said = f"{mine} alone solves the equations of all uploads' patch embeddings{solved}."
        why = f" A part of the uploaded gradient is left ({left}): {NOT_ASSUMED}."
    elif known and not math.isnan(best.rolled):
        said = (
            f"{mine} {come} near the uploaded gradient ({left}), but with all patches moved by one "
            f"the residual is {best.rolled:.2g}: it hardly tells pictures apart."
        )
        why = f" If it is another picture, {NOT_ASSUMED}."
    else:
        nearest = left if known else solved.strip(" ()")
        said = f"Nothing has the whole uploaded gradient; {mine} {come} nearest ({nearest})."
        why = f" The attacks do not reach the whole, or {NOT_ASSUMED}."
    said += f" Borders alone put {best.ordered} patches in order." if best.ordered else ""
    said += f" Pictures count as square{shape}." if shape else ""
    said += f" {best.replaced}." if best.replaced else ""
    return f"{said} That is {told}: look (.show()).{why}"


def explanation(best: Reconstructed) -> str:
    """How the pictures explain the uploaded gradient, to the sentence's end; empty where they do
    not."""
    residual = best.scaled_residual
    enough = EXPLAINED
    if not math.isnan(best.rolled):
        enough = min(EXPLAINED, max(EQUAL, TELLS * best.rolled))
    if best.residual < enough:
        return f"has {PART} (residual {best.residual:.1e})."
    if residual < enough:
        why = "is the sign another"
        if best.factor > 0:
            why = "was it clipped, averaged or scaled, or is the loss another (label smoothing)"
        own = f"which is {_plain(best.factor)} times its own (residual {residual:.1e})"
        return f"explains {PART}, {own}; {why}?"
    return ""


def _plain(factor: float) -> str:
    """A factor without powers of ten: 0.0173, −1300."""
    digits = np.format_float_positional(abs(factor), 3, fractional=False, trim="-")
    return "−" * (factor < 0) + digits


# all attacks -------------------------------------------------------------------------------------

ROWS, COLUMNS = 4, 7  # images and attacks that are shown
SIDE = 2.1  # inches of a picture
NEARER = 0.5  # dB by which an attack is said to be nearer to the originals than the one chosen
ROUNDING = 1e-5  # of float32: residuals below it do not tell two attacks from each other
DIGITS = 2  # of a residual that count when attacks are ranked
FAR = 0.9
"""From this residual on a picture explains next to nothing of the gradient, be it the client's
patches in another order or a mixture: residuals do not tell them apart."""
GUESS = 1.01
"""Times its residual that a picture counts whose patches were put in order, where nothing says that
the client shuffled: nearer than this to the one that was sent, it is behind it."""


@dataclass(frozen=True, repr=False)
class Leak:
    """What the gradients gave away, by attack: leak.best, leak["patch_gradient"], leak.refused."""

    results: Mapping[str, Reconstructed]
    refused: Mapping[str, str]  # {attack: why it does not apply}
    labels: Tensor | None  # (m,) of the images
    label_source: str  # given, read off the gradient, or unknown
    private: Tensor | None = None
    floor: float | None = None  # mean PSNR of the mean colour of photographs, without any gradient
    notes: tuple[str, ...] = ()  # what weakens these results or may be mistaken in the call
    batch: int = 1  # images in a step; the order of those of a batch means nothing
    skipped: Mapping[str, str] = field(default_factory=dict)  # {attack: why it was not run}
    seconds: float = 0.0  # that the call took, with reading, checks and scores
    moved: int = 0
    """How many patches of the certain picture putting it in order would move, where their borders
    say that the client shuffled; else 0."""
    other_size: tuple[int, int] | None = None
    """Of pictures that the network takes as well as squares, where no img_size was given."""

    def __getitem__(self, attack: str) -> Reconstructed:
        if attack in self.results:
            return self.results[attack]
        if why := {**self.refused, **self.skipped}.get(attack):
            raise UserError(f"{attack} has no result: {why}.")
        raise unknown_name("attack", attack, [*self.results, *self.refused, *self.skipped])

    def __iter__(self) -> Iterator[Reconstructed]:
        return iter(self.results.values())

    def __len__(self) -> int:
        return len(self.results)

    @property
    def best(self) -> Reconstructed:
        """The attack whose pictures explain the gradient best: one with a picture of every image,
        then those that are certain whatever the loss, first without 8-bit pixels, then by residual,
        then by misfit. In a batch that nothing explains those made for batches are first, of these
        the one that found most pictures' tokens. Where the client shuffled patches and masked none,
        the one that put them back. The private images are not looked at."""
        if not self.ranked:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            raise UserError(f"No attack made a picture. {reasons}.")
        return self.ranked[0]

    @property
    def ranked(self) -> list[Reconstructed]:
        """The attacks that made pictures, the best first; of equals, the simplest."""

        def coarse(check: float, most: float) -> float:
            """The number as far as it tells attacks from each other: from `most` on none does."""
            if math.isnan(check) or check >= most:
                return math.inf
            return float(f"{max(check, ROUNDING):.{DIGITS}g}")

        def rank(made: Reconstructed) -> tuple[float, ...]:
            in_order = self.moved and made.is_sorted
            guess = made.is_sorted and not self.moved
            traits, several = traits_of(made.attack), self.batch > 1
            of_batches = 1 if "batches" in traits else 2 if "steps" in traits else 3
            behind = of_batches if several and not made.scaled_residual < EXPLAINED else 0
            residual = coarse(made.scaled_residual * (GUESS if guess else 1.0), FAR)
            misfit = coarse(made.misfit, EXPLAINED if several else math.inf)
            nearest = float(f"{min(1.0, made.scaled_residual):.1g}")  # 1 where none is known
            assumes = made.verified > 0 and "8 bit" in traits and not several
            sure = -made.verified, -made.together
            first = not in_order, len(made.reasons), *sure, assumes, behind
            solved = -made.solved if behind else 0
            return *first, solved, residual, guess, misfit, nearest

        return sorted((made for made in self if made.images is not None), key=rank)

    @property
    def doubt(self) -> str:
        """What speaks against the declared mean and std, seen from the best pictures or, where
        these do not explain the gradient, from any; else nothing."""
        told = self.ranked[:1] if self.ranked and explanation(self.best) else self
        return "; ".join(dict.fromkeys(why for made in told for why in made.doubts.values()))

    @property
    def another_shape(self) -> str:
        """Which shape pictures may have as well, where they count as square; else nothing."""
        if not self.other_size:
            return ""
        return f"the network takes {size_text(self.other_size)} px as well: img_size=… says which"

    @property
    def scores(self) -> pd.DataFrame | None:
        """A row for each attack and image (standard variants), or None if no images were given."""
        tables = [made.scores for made in self if made.scores is not None]
        return pd.concat(tables, ignore_index=True) if tables else None

    @property
    def verdict(self) -> str:
        """What came of it: the score where images were given, then what the checks say."""
        if not self.ranked:
            why = "`.refused` says what each would need"
            why += ", `.skipped` which were not run" * bool(self.skipped)
            return f"No attack made a picture. That is no evidence of safety: {why}."
        best, said = self.best, ""
        if best.scores is not None and self.private is not None:
            floor = "" if self.floor is None else f" (floor {self.floor:.1f})"
            said = f"{self._score(best)}{floor}. "
            scored = [made for made in self.ranked if made.scores is not None]
            nearest = max(scored, key=lambda made: made.psnr)
            if nearest.psnr > best.psnr + NEARER:
                said += f"Another attack came nearer to the originals: {self._score(nearest)}. "
        put_back = self.moved > 0 and best.is_sorted
        said += what_checks_say(self.ranked[1] if put_back else best, self)
        if self.moved:
            shape = self.another_shape
            another = f", or of pictures of another shape ({shape})" if shape else ""
            said += (
                f" That is the picture as it was fed: {self.moved} of its patches stand where "
                "their borders do not fit, as of a client that shuffles and masks none"
                f"{another}. Where they belong no gradient of one upload tells."
            )
            said += f" {best.attack} guesses it by their borders." if put_back else ""
        if not self.doubt:
            return said
        which = "; until it is known which, its picture is known up to colours and contrast alone"
        return f"{said} But {self.doubt}{'' if best.is_sorted else which}."

    def _score(self, made: Reconstructed) -> str:
        lost = f", {len(made.reasons)} without a picture" if made.reasons else ""
        of = 0 if self.private is None else len(self.private)
        return f"{made.attack}: {made.exact} of {of} exact{lost}, {decibels(made.psnr)} dB"

    def __repr__(self) -> str:
        rows = [made.facts() for made in self.ranked]
        if self.floor is not None:
            rows.append({"attack": "floor: mean colour", "PSNR": f"{self.floor:.1f}"})
        columns = ["attack", "residual", "misfit", "PSNR", "exact", "seconds"]
        table = pd.DataFrame(rows, columns=columns).fillna("–").set_index("attack")
        lines = table.rename_axis(None).to_string().splitlines() if rows else []
        for made in self:
            if made.images is None and made.mask is not None:
                lines.append(f"{made.attack:22} names {int(made.mask.sum())} masked positions")
        of_attacks = sum(made.seconds for made in self)
        lines.append(f"{self.seconds:.1f} s, of which attacks took {of_attacks:.1f}")
        lines += by_reason({**self.refused, **self.skipped})
        labels, source = self.labels, self.label_source
        if labels is None and self.ranked and self.best.labels is not None:
            labels, source = self.best.labels, f"of {self.best.attack}'s pictures (.best.labels)"
        lines.append(f"labels: {'' if labels is None else f'{labels.tolist()}, '}{source}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), self.verdict])

    @house_style()
    def show(self, path: str | Path | None = None) -> Figure:
        """A picture of the attacks, the best first, with a row for each image and its original
        where it was given, of seven attacks and four images at most: leak.show("leak.png").
        Without a path a notebook shows what is returned."""
        from matplotlib.figure import Figure

        if not self.ranked:
            raise UserError(f"There is no picture to show. {self.verdict} See .refused.")

        class NotebookFigure(Figure):
            """One that a notebook shows, also where nothing imported pyplot."""

            def _repr_png_(self) -> bytes:
                image = BytesIO()
                self.savefig(image, format="png")
                return image.getvalue()

        originals = [] if self.private is None else list(self.private)
        orders = [_order(made, self) for made in self.ranked[:COLUMNS]]
        rows = min(len(originals) or max(map(len, orders)), ROWS)
        columns = [[(image, "original") for image in originals[:rows]]] if originals else []
        for made, order in zip(self.ranked, orders, strict=False):
            assert made.images is not None
            shown = enumerate(order[:rows])
            columns.append([(made.images[at], _title(made, row, at)) for row, at in shown])
        size = SIDE * len(columns), (SIDE + 0.5) * rows + 0.4
        figure = NotebookFigure(figsize=size, dpi=150)
        panels = figure.subplots(rows, len(columns), squeeze=False)
        for panel in panels.flat:
            panel.set_axis_off()
        for column, drawn in enumerate(columns):
            for panel, (image, title) in zip(panels[:, column], drawn, strict=False):
                pixels = image.nan_to_num(0.5).permute(1, 2, 0).clamp(0, 1).numpy()
                panel.imshow(pixels, interpolation="nearest", cmap="gray", vmin=0, vmax=1)
                panel.set_title(title, fontsize=7)
        figure.suptitle(self.verdict, fontsize=8, wrap=True)
        figure.tight_layout()
        if path is not None:
            try:
                figure.savefig(path)
            except (OSError, ValueError) as error:  # ValueError: a format that is none
                raise UserError(f"The picture cannot be written: {error}.") from None
        return figure


def _order(made: Reconstructed, leak: Leak) -> Sequence[int]:
    """Which of an attack's pictures stands in each row: the original's, or the certain first."""
    assert made.images is not None
    places = range(len(made.images))
    if leak.private is not None and made.places:
        return made.places
    return sorted(places, key=lambda at: made.certain is None or not bool(made.certain[at]))


def _title(made: Reconstructed, row: int, place: int) -> str:
    """The attack and, of the picture at this place, why there is none, or its residual, whether it
    is certain and, where known, its score for the image of a row."""
    if place in made.reasons:
        return f"{made.attack}\n{made.reasons[place][:40]}"
    residual = math.nan if made.residuals is None else float(made.residuals[place])
    parts = [] if math.isnan(residual) else [f"residual {residual:.0e}"]
    parts += ["certain"] * (made.certain is not None and bool(made.certain[place]))
    if made.scores is not None:
        of_image = made.scores.loc[made.scores["image"] == row].iloc[0]
        parts.append("exact" if of_image["exact"] else f"{of_image['psnr']:.1f} dB")
    return f"{made.attack}\n{', '.join(parts)}"
