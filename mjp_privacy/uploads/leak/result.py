"""What `attack_gradients` returns: pictures, checks without truth, scores, and reasons.

Words: a picture is *certain* where it alone solves the equations of the patch embedding, or an
attack on batches verified it, as far as mean, std and the order of channels are as declared. It is
*exact* where it equals the private one in every 8-bit value, which only the truth tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from torch import Tensor

from attacks import traits_of
from attacks.shared_picture import SHARING
from mjp_privacy.core.drawing import house_style
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import reason
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.text import shown
from mjp_privacy.uploads.leak.picture import leak_figure
from mjp_privacy.uploads.leak.reconstructed import Reconstructed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPLAINED = 1e-2
"""A residual below it is that of rounding and clipping: the picture has the uploaded gradient."""
ROUNDING = 1e-5  # of float32: residuals below it do not tell two attacks from each other
DIGITS = 2  # of a residual that count when attacks are ranked
NEAR_ONE = 0.1  # a factor this near to 1 is not worth naming where the gradient is another anyway
TELLING = 0.5  # a residual above it says that the factor means nothing
NOISY = 1.5  # times the declared noise: a residual below it is that of the noise

AS_DECLARED = "as far as mean, std and the order of channels are as declared"
NO_PROOF = "no proof of a good picture (25 to 35 dB were seen at residuals of exact ones)"
UNLIKE = (
    "the loss (plain cross entropy; dropout, label smoothing and mixup change it), labels, sign, "
    "scale (lr, loss scale)"
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
        if SHARING in best.diagnostics:
            said = _shared(best)
        elif self.batch > 1:
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
        if best.scores is None:
            return ""
        floor = "" if self.floor is None else f" (floor {self.floor:.1f})"
        assert self.private is not None
        lost = f", {len(best.reasons)} without a picture" if best.reasons else ""
        return (
            f"{best.attack}: {best.exact} of {len(self.private)} exact{lost}, {best.psnr:.1f} dB"
            f"{floor}. "
        )

    def __str__(self) -> str:
        lines = [_line("attack", "residual", "misfit", "PSNR", "exact", "seconds")]
        lines += [_described(made) for made in self.ranked]
        if self.floor is not None:
            lines.append(_line("floor: mean colour", "–", "–", f"{self.floor:.1f}", "–", "–"))
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
        place = Path(path)
        if not place.parent.is_dir() or place.is_dir():
            raise UserError(
                f"{place}: expected a file's name in a folder that exists. Give one such as "
                "leak.png."
            )
        try:
            figure.savefig(place)
        except (
            ValueError,
            OSError,
        ) as error:  # a suffix that matplotlib does not know, a full disk
            raise UserError(
                f"{shown(place.name)}: expected a file that can be written, such as leak.png; got "
                f"{reason(error)}."
            ) from error
        return figure


# what the checks say ------------------------------------------------------------------------------


def _of_one(best: Reconstructed, declared: float) -> str:
    """What the checks without truth say of an attack's pictures of single images."""
    fits, misfit = _gradient(best, declared), best.misfit
    known = not math.isnan(best.residual)
    if best.is_certain:
        solved = "" if math.isnan(misfit) else f" (misfit {misfit:.1e})"
        said = (
            f"{best.attack}'s picture is certain: it alone solves the equations of the patch "
            f"embedding{solved}, {AS_DECLARED}."
        )
        if fits:
            return f"{said} It {fits}."
        return said + known * (
            f" The whole gradient is another ({_left(best)}), on which that does not depend: "
            f"{UNLIKE}, weights or noise are not as assumed ({DECLARE})."
        )
    if fits:
        return f"{best.attack}'s picture {fits}. That is {NO_PROOF}."
    if not known and not misfit >= EXPLAINED:
        solved = "" if math.isnan(misfit) else f" (misfit {misfit:.1e})"
        return (
            f"Without labels nothing here tells whether {best.attack}'s picture is the client's"
            f"{solved}: give labels=… if you know them."
        )
    check = _left(best) if known else f"misfit {misfit:.2g}"
    return (
        f"None of these pictures explains the whole gradient: the nearest is {best.attack}'s "
        f"({check}). That is no evidence of safety: the attacks may not reach it, or {UNLIKE}, "
        f"batch, mean and std, or a defence's error are not as assumed ({DECLARE})."
    )


def _gradient(best: Reconstructed, declared: float) -> str:
    """How the pictures explain the uploaded gradient; empty where they do not."""
    if best.residual < EXPLAINED:
        return f"has the uploaded gradient (residual {best.residual:.1e})"
    times = _times(best.factor)
    if best.scaled_residual < EXPLAINED:
        why = "is the sign another" if best.factor < 0 else "was it clipped, averaged or scaled"
        return (
            f"explains the uploaded gradient {times} (residual {best.scaled_residual:.1e}; {why}?)"
        )
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
    """What is certain of an attack's pictures of batches."""
    assert best.images is not None
    if not best.verified:
        return (
            f"Without the originals nothing here tells whether {best.attack}'s pictures of a batch "
            "are the client's. That is no evidence of safety."
        )
    left = len(best.images) - best.verified
    guesses = f"; the other {left} are guesses" if left else ""
    return (
        f"{best.verified} of {len(best.images)} pictures of {best.attack} are certain, as "
        f"`.certain` marks them, {AS_DECLARED}{guesses}."
    )


def _shared(best: Reconstructed) -> str:
    """What an attack says that looks for pictures which uploads of batches share."""
    assert best.images is not None
    if not best.verified:
        return (
            f"{best.attack} found no picture that uploads certainly share: they hold different "
            "ones, the same ones each time, or other pixels of them. All its pictures are guesses."
        )
    left = len(best.images) - best.verified
    guesses = f"; the other {left} places hold guesses" if left else ""
    return (
        f"{best.verified} of {len(best.images)} places of {best.attack} are certain: pictures "
        f"that uploads share, as `.certain` marks them, {AS_DECLARED}{guesses}."
    )


def _coarse(check: float) -> float:
    """The number as far as it tells attacks from each other."""
    return math.inf if math.isnan(check) else float(f"{max(check, ROUNDING):.{DIGITS}g}")


def _described(made: Reconstructed) -> str:
    checks = [
        "–" if math.isnan(check) else f"{check:.1e}" for check in (made.residual, made.misfit)
    ]
    scores = ["–", "–"]
    if made.scores is not None:
        scores = [f"{made.psnr:.1f}", f"{made.exact} of {len(made.scores) + len(made.reasons)}"]
    return _line(made.attack, *checks, *scores, f"{made.seconds:.2f}")


def _line(*cells: str) -> str:
    name, *numbers = cells
    return f"{name:22}" + "".join(f"{number:>10}" for number in numbers)
