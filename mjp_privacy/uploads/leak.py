"""What `attack_gradients` returns: pictures, checks without truth, scores, and reasons.

Words: a picture is *certain* where it alone solves the equations of the patch embedding, or an
attack on batches verified it, as far as mean, std and the order of channels are as declared. It is
*exact* where it equals the private one in every 8-bit value, which only the truth tells.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from attacks import traits_of
from attacks.shared_picture import SHARING
from mjp_privacy.core.drawing import house_style
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import reason
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.text import shown
from mjp_privacy.metrics import METRICS, score
from mjp_privacy.metrics.matching import assigned
from mjp_privacy.metrics.pictures import quantise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# one attack ---------------------------------------------------------------------------------------

CAP = 100.0  # dB, to which a PSNR counts in means, as in the reports
COLUMNS_SAID = ("attack", "residual", "misfit", "PSNR", "exact", "seconds")


@dataclass(frozen=True, repr=False)
class Reconstructed:
    """What one attack gives, for the m images of the step."""

    attack: str
    images: Tensor | None  # (m, 3, S, S) in [0, 1]; None: the attack names masked positions only
    residuals: Tensor | None = None
    """(m,) || g(image) - g || / || g || of the patch embedding's gradient; None: the labels are not
    known, or not which picture of a batch has which."""
    factors: Tensor | None = None
    """(m,) f, with which f g(image) is nearest to g: a client that clips sends less than g."""
    scaled: Tensor | None = None  # (m,) the residuals of f g(image)
    misfits: Tensor | None = None  # (m,) the same without the loss: see `uploads/checks.py`
    certain: Tensor | None = None
    """(m,) bool: whatever the loss, only the client's picture fits, or one that uploads share."""
    seconds: float = 0.0  # with its checks and scores
    mask: Tensor | None = None  # (m, N) the positions that MJP masked, as the attack names them
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)  # of images without a reconstruction
    scores: pd.DataFrame | None = None  # a row for each image, where private images were given
    places: Sequence[int] = ()  # where the picture of each private image stands, where scored

    @property
    def image(self) -> Tensor:
        """The first image (3, S, S) in [0, 1] that there is."""
        if self.images is None:
            raise UserError(f"{self.attack} names the masked positions (.mask) and no picture.")
        return self.images[next(at for at in range(len(self.images)) if at not in self.reasons)]

    @property
    def residual(self) -> float:
        """The mean of `residuals`: near 0, the pictures have the gradient that was sent. NaN where
        the labels are not known."""
        return _mean(self.residuals)

    @property
    def factor(self) -> float:
        """The mean of `factors`: 0.017 means that the upload is the picture's gradient times
        that."""
        return _mean(self.factors)

    @property
    def scaled_residual(self) -> float:
        """The residual once the gradient was multiplied by `factor`."""
        return _mean(self.scaled)

    @property
    def misfit(self) -> float:
        """The mean of `misfits`; NaN where the upload does not tell it."""
        return _mean(self.misfits)

    @property
    def is_certain(self) -> bool:
        """Whether every image has a picture and each is certain."""
        return self.certain is not None and not self.reasons and bool(self.certain.all())

    @property
    def verified(self) -> int:
        """How many pictures are certain, whatever the loss."""
        return 0 if self.certain is None else int(self.certain.sum())

    @property
    def exact(self) -> int:
        """How many pictures equal the private ones in every 8-bit value, where these were given."""
        return 0 if self.scores is None else int(self.scores["exact"].sum())

    @property
    def psnr(self) -> float:
        """The mean PSNR in dB, each capped at 100; NaN where no private images were given."""
        scored = self.scores
        return math.nan if scored is None else float(scored["psnr"].clip(upper=CAP).mean())

    def scored(self, private: Tensor | None, batch: int = 1) -> Reconstructed:
        """The same with scores against the private images (m, 3, S, S). The order of pictures of
        a batch means nothing: each private image gets the one that fits it."""
        if private is None or self.images is None or len(self.images) < len(private):
            return self
        places = list(range(len(private)))
        if len(self.images) > len(private):  # uploads that need not hold the same pictures
            places = assigned(self.images, private).tolist()
        elif batch > 1:
            steps = [slice(at, at + batch) for at in range(0, len(private), batch)]
            own = [assigned(self.images[step], private[step]) + step.start for step in steps]
            places = torch.cat(own).tolist()
        usable = [at for at, place in enumerate(places) if place not in self.reasons]
        images, originals = self.images[[places[at] for at in usable]], private[usable]
        names = dict.fromkeys(METRICS[key].name for key in METRICS)
        values = score(images, originals, [f"{name}/standard" for name in names])
        table = pd.DataFrame({name: numbers for (name, _), numbers in values.items()})
        same = quantise(images.double()) == quantise(originals.double())
        table["exact"] = same.flatten(1).all(1).numpy()
        table.insert(0, "image", usable)
        table.insert(0, "attack", self.attack)
        return replace(self, scores=table, places=places)

    def without(self, doubts: Collection[int]) -> Reconstructed:
        """The same with none of these pictures certain: their normalisation is not as declared."""
        if self.certain is None or not doubts:
            return self
        kept = self.certain.clone()
        kept[list(doubts)] = False
        return replace(self, certain=kept)

    def facts(self) -> dict[str, str]:
        """Its line of a table, with what is known of COLUMNS_SAID."""
        checks = {"residual": self.residual, "misfit": self.misfit}
        told = {name: f"{check:.1e}" for name, check in checks.items() if not math.isnan(check)}
        if self.scores is not None:
            told["PSNR"] = f"{self.psnr:.1f}"
            told["exact"] = f"{self.exact} of {len(self.scores) + len(self.reasons)}"
        return {"attack": self.attack, **told, "seconds": f"{self.seconds:.2f}"}

    def __str__(self) -> str:
        told = [f"{name} {value}" for name, value in list(self.facts().items())[1:]]
        made = "no picture" if self.images is None else f"images {tuple(self.images.shape)}"
        return f"{self.attack}: {', '.join([made, *told])}"

    __repr__ = __str__


def _mean(values: Tensor | None) -> float:
    return math.nan if values is None else float(values.nanmean())


# all of them --------------------------------------------------------------------------------------

EXPLAINED = 1e-2
"""A residual below it is that of rounding and clipping: the picture has the uploaded gradient."""
ROUNDING = 1e-5  # of float32: residuals below it do not tell two attacks from each other
ALL = 1e-3
LEAST_SMOOTHED = 0.5
"""Label smoothing scales the gradient of a classifier that knows nothing yet, and nearly that of
others, by factors down to this one. It leaves a residual above ALL; clipping leaves none, unless
noise was added or the gradient is of half precision."""
DIGITS = 2  # of a residual that count when attacks are ranked
NEAR_ONE = 0.1  # a factor this near to 1 is not worth naming where the gradient is another anyway
TELLING = 0.5  # a residual above it says that the factor means nothing
NOISY = 1.5  # times the declared noise: a residual below it is that of the noise

AS_DECLARED = "as far as mean, std and the order of channels are as declared"
NO_PROOF = "no proof of a good picture (25 to 35 dB were seen at residuals of exact ones)"
UNLIKE = (
    "the loss (plain cross entropy; dropout, label smoothing and mixup change it), labels, sign, "
    "scale (lr, loss scale), weights, batch, mean and std, a defence's error"
)
DECLARE = "`kind=`, `noise=`, `rounding=`, `defenses=` and the like declare them"


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
    doubt: str = ""  # what speaks against the declared mean and std, seen from the pictures
    declared: float = 0.0  # the residual that declared noise and rounding give a perfect picture
    skipped: Mapping[str, str] = field(default_factory=dict)  # {attack: why it was not run}
    seconds: float = 0.0  # that the call took, with reading, checks and scores
    moved: int = 0
    """Patches that stand elsewhere in patch_jigsaw's picture than in the one that was fed, where
    their borders say that the client shuffled; else 0."""

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
        then those that are certain whatever the loss, then by residual, then by misfit; of a batch,
        which has neither, one that is made for batches. Where the client shuffled patches and
        masked none, the one that put them back. The private images are not looked at."""
        ranked = self.ranked
        if not ranked:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            raise UserError(f"No attack made a picture. {reasons}.")
        return ranked[0]

    @property
    def ranked(self) -> list[Reconstructed]:
        """The attacks that made pictures, the best first; of equals, the simplest."""
        return sorted((made for made in self if made.images is not None), key=self._rank)

    def _rank(self, made: Reconstructed) -> tuple[float, ...]:
        in_order = self.moved and "shuffled alone" in traits_of(made.attack)
        mixes = self.batch > 1 and not {"batches", "steps"} & traits_of(made.attack)
        checks = (_coarse(made.scaled_residual), _coarse(made.misfit))
        return (not in_order, len(made.reasons), -made.verified, *checks, mixes)

    @property
    def scores(self) -> pd.DataFrame | None:
        """A row for each attack and image (standard variants), or None if no images were given."""
        tables = [made.scores for made in self if made.scores is not None]
        return pd.concat(tables, ignore_index=True) if tables else None

    @property
    def verdict(self) -> str:
        """What came of it: the score where images were given, then what the checks say."""
        if not self.ranked:
            return "No attack made a picture."
        best = self.best
        if self.batch > 1 or SHARING in best.diagnostics:
            said = _of_batch(best)
        elif self.moved:
            fed = self.ranked[1]
            said = (
                f"{_of_one(fed, self.declared)} That is the picture as it was fed: {self.moved} of "
                "its patches stand where their borders do not fit, as of a client that shuffles "
                f"and masks none. {best.attack}'s, taken for the best, is the same patches put "
                "back by their borders; that order is a guess, which no gradient of one upload "
                "tells from another."
            )
        else:
            said = _of_one(best, self.declared)
        return f"{self._score(best)}{said}{f' But {self.doubt}.' if self.doubt else ''}"

    def _score(self, best: Reconstructed) -> str:
        if best.scores is None or self.private is None:
            return ""
        floor = "" if self.floor is None else f" (floor {self.floor:.1f})"
        lost = f", {len(best.reasons)} without a picture" if best.reasons else ""
        exact = f"{best.exact} of {len(self.private)} exact{lost}"
        return f"{best.attack}: {exact}, {best.psnr:.1f} dB{floor}. "

    def __str__(self) -> str:
        rows = [made.facts() for made in self.ranked]
        if self.floor is not None:
            rows.append({"attack": "floor: mean colour", "PSNR": f"{self.floor:.1f}"})
        table = pd.DataFrame(rows, columns=COLUMNS_SAID).fillna("–").set_index("attack")
        lines = table.rename_axis(None).to_string().splitlines()
        lines += [
            f"{made.attack:22} names {int(made.mask.sum())} masked positions"
            for made in self
            if made.images is None and made.mask is not None
        ]
        attacks = sum(made.seconds for made in self)
        lines.append(
            f"{self.seconds:.1f} s: {attacks:.1f} s of attacks with their checks and scores, "
            f"{max(self.seconds - attacks, 0):.1f} s of reading and of what does not apply"
        )
        for reasons in (self.refused, self.skipped):
            by_reason: dict[str, list[str]] = {}
            for name, why in reasons.items():
                by_reason.setdefault(why, []).append(name)
            lines += [f"not {', '.join(names)}: {why}" for why, names in by_reason.items()]
        labels = "" if self.labels is None else f"{self.labels.tolist()}, "
        lines.append(f"labels: {labels}{self.label_source}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), self.verdict])

    __repr__ = __str__

    @house_style()
    def show(self, path: str | Path | None = None) -> Figure:
        """A picture of all attacks, the best first, beside the original where it was given.

        leak.show("leak.png") writes it; without a path a notebook shows what is returned.
        """
        if not self.ranked:
            raise UserError(f"There is no picture to show. {self.verdict} See .refused.")
        figure = leak_figure(self.ranked, self.private, self.verdict, self.batch)
        if path is None:
            return figure
        try:
            if Path(path).is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder")
            figure.savefig(path)
        except (ValueError, OSError) as error:  # a suffix that matplotlib knows not, no such folder
            raise UserError(
                f"{shown(path)}: expected a file that can be written, such as leak.png; got "
                f"{reason(error)}."
            ) from error
        return figure


# what the checks say ------------------------------------------------------------------------------


def _of_one(best: Reconstructed, declared: float) -> str:
    """What the checks without truth say of an attack's pictures of single images."""
    fits, known = _gradient(best, declared), not math.isnan(best.residual)
    solved = "" if math.isnan(best.misfit) else f" (misfit {best.misfit:.1e})"
    not_assumed = f"one of these is not as assumed: {UNLIKE}"
    if declared:
        not_assumed = (
            f"the declared noise makes {declared:.2g} of it for the client's own picture, and up "
            "to cond(A) times as much for one that was solved from noisy equations; more says that "
            f"{not_assumed}"
        )
    if best.is_certain:
        rest = f"Of the whole gradient it leaves a part ({_left(best)}): {not_assumed} ({DECLARE})."
        said = f"It {fits}." if fits else rest * known
        return (
            f"{best.attack}'s picture is certain: it alone solves the equations of the patch "
            f"embedding{solved}, {AS_DECLARED}. {said}".rstrip()
        )
    if fits:
        return f"{best.attack}'s picture {fits}. That is {NO_PROOF}."
    if not known and not best.misfit >= EXPLAINED:
        return (
            f"Without labels nothing here tells whether {best.attack}'s picture is the client's"
            f"{solved}: give labels=… if you know them."
        )
    check = _left(best) if known else f"misfit {best.misfit:.2g}"
    return (
        f"No picture has the whole uploaded gradient; {best.attack}'s comes nearest ({check}). "
        f"That is no evidence of safety: the attacks do not reach it, or {not_assumed} ({DECLARE})."
    )


def _gradient(best: Reconstructed, declared: float) -> str:
    """How the pictures explain the uploaded gradient; empty where they do not."""
    if best.residual < EXPLAINED:
        return f"has the uploaded gradient (residual {best.residual:.1e})"
    times = _times(best.factor)
    if best.scaled_residual < EXPLAINED:
        part, why = "", "was it clipped, averaged or scaled?"
        if best.factor < 0:
            why = "is the sign another?"
        elif LEAST_SMOOTHED < best.factor < 1 and best.scaled_residual > ALL and not declared:
            part = "most of "
            why = (
                "another loss (label smoothing, mixup) leaves such a rest, or a clipped gradient "
                "that was rounded to half precision"
            )
        check = f"(residual {best.scaled_residual:.1e})"
        return f"explains {part}the uploaded gradient {times} {check}; {why}"
    if best.scaled_residual < NOISY * declared:
        scaled = "" if abs(best.factor - 1) < EXPLAINED else f" {times}"
        return (
            f"explains the uploaded gradient{scaled} as far as the declared noise lets it be seen "
            f"(residual {best.scaled_residual:.2g}, of which the noise makes {declared:.2g}); many "
            "pictures may do so"
        )
    return ""


def _left(best: Reconstructed) -> str:
    """What the nearest multiple of the picture's gradient leaves of the uploaded one."""
    if abs(best.factor - 1) < NEAR_ONE:
        return f"residual {best.residual:.2g}"
    times = f", {_times(best.factor)}" if best.scaled_residual < TELLING else ""
    return f"residual {best.scaled_residual:.2g} at the nearest multiple{times}"


def _times(factor: float) -> str:
    """A factor in words: `times 1/57.9` below 1, `times 2.5` above."""
    sign, size = "−" if factor < 0 else "", abs(factor)
    return f"times {sign}1/{1 / size:.3g}" if 0 < size < 1 else f"times {sign}{size:.3g}"


def _of_batch(best: Reconstructed) -> str:
    """What is certain of pictures of batches, or of the places for those that uploads share."""
    assert best.images is not None
    of = "places for pictures that uploads share" if SHARING in best.diagnostics else "pictures"
    if best.verified:
        return (
            f"{best.attack}: {best.verified} of {len(best.images)} {of} are certain, as `.certain` "
            f"marks them, {AS_DECLARED}; all others are guesses."
        )
    return (
        f"Without the originals nothing here tells whether {best.attack}'s {of} are the client's. "
        "That is no evidence of safety."
    )


def _coarse(check: float) -> float:
    """The number as far as it tells attacks from each other."""
    return math.inf if math.isnan(check) else float(f"{max(check, ROUNDING):.{DIGITS}g}")


# the picture --------------------------------------------------------------------------------------

ROWS, COLUMNS = 4, 7  # images and attacks that are shown
SIDE = 2.1  # inches


@house_style()
def leak_figure(
    ranked: Sequence[Reconstructed], private: Tensor | None, title: str, batch: int = 1
) -> Figure:
    """A row for each image of the step: the original where it was given, then every attack.

    Attacks may return different numbers of pictures: a place that one does not have stays empty.
    Of batches without originals, whose order means nothing, pictures that are certain come first.
    """
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """One that a notebook shows, also where nothing imported pyplot."""

        def _repr_png_(self) -> bytes:
            image = BytesIO()
            self.savefig(image, format="png")
            return image.getvalue()

    drawn = ranked[:COLUMNS]
    orders = [_order(result, private is not None, batch) for result in drawn]
    rows = min(max(map(len, orders)) if private is None else len(private), ROWS)
    columns = len(drawn) + (private is not None)
    figure = NotebookFigure(figsize=(SIDE * columns, (SIDE + 0.5) * rows + 0.4), dpi=150)
    for row, places in enumerate(figure.subplots(rows, columns, squeeze=False)):
        for axes in places:
            axes.set_axis_off()
        if private is not None:
            _panel(places[0], private[row], "original")
        for axes, result, order in zip(places[columns - len(drawn) :], drawn, orders, strict=True):
            if row < len(order) and result.images is not None:
                _panel(axes, result.images[order[row]], _title(result, row, order[row]))
    parts = [
        f"{min(rows, len(order))} of {len(result.images)} pictures of {result.attack}"
        for result, order in zip(drawn, orders, strict=True)
        if result.images is not None and min(rows, len(order)) < len(result.images)
    ]
    parts += [f"{len(drawn)} of {len(ranked)} attacks"] if len(drawn) < len(ranked) else []
    left_out = [f"Drawn: {', '.join(parts)}."] if parts else []
    figure.suptitle("\n".join([title, *left_out]), fontsize=8, wrap=True)
    figure.tight_layout()
    return figure


def _order(result: Reconstructed, originals: bool, batch: int) -> Sequence[int]:
    """Which of an attack's pictures stands in each row."""
    assert result.images is not None
    if originals and result.places:
        return result.places
    places = range(len(result.images))
    if batch == 1 or result.certain is None:
        return places
    certain = result.certain.tolist()
    return sorted(places, key=lambda place: not certain[place])


def _panel(axes: Axes, image: Tensor, title: str) -> None:
    pixels = image.nan_to_num(0.5).permute(1, 2, 0).clamp(0, 1).numpy()
    axes.imshow(pixels, interpolation="nearest")
    axes.set_title(title, fontsize=7)


def _title(result: Reconstructed, row: int, place: int) -> str:
    """The attack, its residual or misfit, whether the picture at this place is certain and, where
    known, its score for the image of a row."""
    if place in result.reasons:
        return f"{result.attack}\n{result.reasons[place][:40]}"
    checks = {"residual": result.residuals, "misfit": result.misfits}
    told = {name: float(of[place]) for name, of in checks.items() if of is not None}
    parts = [f"{name} {value:.0e}" for name, value in told.items() if not math.isnan(value)][:1]
    if result.certain is not None and bool(result.certain[place]):
        parts.append("certain")
    if result.scores is not None:
        of_image = result.scores.loc[result.scores["image"] == row].iloc[0]
        parts.append("exact" if of_image["exact"] else f"{of_image['psnr']:.1f} dB")
    return "\n".join([result.attack, ", ".join(parts)])
