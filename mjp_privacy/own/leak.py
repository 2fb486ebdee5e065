"""What `attack_gradients` returns: pictures, checks without truth, scores, and reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from mjp_privacy.own.reconstructed import Reconstructed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPLAINED = 1e-2
"""A residual below it is that of rounding and clipping: the picture has the uploaded gradient."""
ROUNDING = 1e-5  # of float32: residuals below it do not tell two attacks from each other
DIGITS = 2  # of a residual that count when attacks are ranked
NOISY = 1.2  # times the declared noise: a residual below it is that of the noise

UNLIKE = (
    "the loss (plain cross entropy; dropout, label smoothing and mixup change it), labels, sign, "
    "scale (lr, loss scale)"
)
NOT_EXPLAINED = (
    "None of these pictures explains the whole gradient: the nearest is {attack}'s ({check}). "
    f"That is no evidence of safety: the attacks may not reach it, or {UNLIKE}, "
    "batch, mean and std, or a defence's error are not as assumed (`kind=`, `noise=`, "
    "`rounding=` and the like declare them)."
)


@dataclass(frozen=True, repr=False)
class Leak:
    """What the gradients gave away, by attack: leak.best, leak["patch_gradient"], leak.refused."""

    results: Mapping[str, Reconstructed]
    refused: Mapping[str, str]  # {attack: why it does not apply or was not run}
    labels: Tensor | None  # (m,) of the images
    label_source: str  # given, read off the gradient, or unknown
    private: Tensor | None = None
    floor: float | None = None  # mean PSNR of the mean colour of photographs, without any gradient
    notes: tuple[str, ...] = ()  # what weakens these results or may be mistaken in the call
    batch: int = 1  # images in a step; the order of those of a batch means nothing
    doubt: str = ""  # what speaks against the declared mean and std, seen from the pictures
    declared: float = 0.0  # the residual that declared noise and rounding give a perfect picture

    def __getitem__(self, attack: str) -> Reconstructed:
        if attack in self.results:
            return self.results[attack]
        if attack in self.refused:
            raise UserError(f"{attack} has no result: {self.refused[attack]}.")
        raise unknown_name("attack", attack, [*self.results, *self.refused])

    def __iter__(self) -> Iterator[Reconstructed]:
        return iter(self.results.values())

    def __len__(self) -> int:
        return len(self.results)

    @property
    def best(self) -> Reconstructed:
        """The attack whose pictures explain the gradient best: one with a picture of every image,
        then those that are certain whatever the loss, then by residual, then by misfit; of a batch,
        which has neither, one that is made for batches. The private images are not looked at."""
        ranked = self.ranked
        if not ranked:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            raise UserError(f"No attack made a picture. {reasons}.")
        return ranked[0]

    @property
    def ranked(self) -> list[Reconstructed]:
        """The attacks that made pictures, the best first; of equals, the simplest."""
        ranked = sorted((made for made in self if made.images is not None), key=_rank)
        if self.batch == 1:
            return ranked
        return sorted(ranked, key=lambda made: (*_rank(made), _mixes(made)))

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
        said = _explained(best, self.declared) if self.batch == 1 else _verified(best)
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
        lines += [f"not {', '.join(n)}: {why}" for why, n in _by_reason(self.refused).items()]
        labels = "" if self.labels is None else f"{self.labels.tolist()}, "
        lines.append(f"labels: {labels}{self.label_source}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), self.verdict])

    __repr__ = __str__

    def show(self, path: str | Path | None = None) -> Figure:
        """A picture of all attacks, the best first, beside the original where it was given.

        leak.show("leak.png") writes it; without a path a notebook shows what is returned.
        """
        from mjp_privacy.own.picture import leak_figure

        if not self.ranked:
            raise UserError(f"There is no picture to show. {self.verdict} See .refused.")
        figure = leak_figure(self.ranked, self.private, self.verdict, self.batch)
        if path is not None:
            _write(figure, Path(path))
        return figure


def _explained(best: Reconstructed, declared: float = 0.0) -> str:
    """What the checks without truth say of the best attack's pictures of single images."""
    if SHARING in best.diagnostics:
        return _shared(best)
    misfit = "" if math.isnan(best.misfit) else f" (misfit {best.misfit:.1e})"
    if best.residual < EXPLAINED:
        return (
            f"{best.attack}'s picture has the uploaded gradient (residual {best.residual:.1e}), "
            "mean, std and order of channels taken as given."
        )
    if best.scaled_residual < EXPLAINED:
        why = "is the sign another" if best.factor < 0 else "was it clipped, averaged or scaled"
        return (
            f"{best.attack}'s picture explains the uploaded gradient {_times(best.factor)} "
            f"(residual {best.scaled_residual:.1e}): {why}? mean, std and order of channels taken "
            "as given."
        )
    if best.scaled_residual < NOISY * declared:
        scaled = "" if abs(best.factor - 1) < EXPLAINED else f" {_times(best.factor)}"
        return (
            f"{best.attack}'s picture explains the uploaded gradient{scaled} as far as the "
            f"declared noise lets it be seen (residual {best.scaled_residual:.2g}, of which the "
            f"noise makes {declared:.2g}); many pictures may do so."
        )
    if best.is_certain:
        solved = (
            f"{best.attack}'s picture solves the equations of the patch embedding{misfit}, which "
            "only the client's picture does, mean, std and order of channels taken as given."
        )
        if math.isnan(best.residual):
            return solved
        return (
            f"{solved} The whole gradient is another (residual {best.residual:.2g}): {UNLIKE} or "
            "weights are not as assumed, on which this picture does not depend."
        )
    if math.isnan(best.residual) and not best.misfit >= EXPLAINED:
        return (
            f"Without labels nothing here tells whether {best.attack}'s picture is the client's"
            f"{misfit}: give labels=… if you know them."
        )
    unlabelled = math.isnan(best.residual)
    check = f"misfit {best.misfit:.2g}" if unlabelled else f"residual {best.residual:.2g}"
    return NOT_EXPLAINED.format(attack=best.attack, check=check)


def _times(factor: float) -> str:
    """A factor in words: `times 1/57.9` below 1, `times 2.5` above."""
    sign, size = "−" if factor < 0 else "", abs(factor)
    return f"times {sign}1/{1 / size:.3g}" if size < 1 else f"times {sign}{size:.3g}"


def _verified(best: Reconstructed) -> str:
    """What is certain of the best attack's pictures of batches."""
    if SHARING in best.diagnostics:
        return _shared(best)
    assert best.images is not None
    count = len(best.images)
    if not best.verified:
        return (
            f"Without the originals nothing here tells whether {best.attack}'s pictures of a batch "
            "are the client's. That is no evidence of safety."
        )
    left = count - best.verified
    guesses = f"; the other {left} are guesses" if left else ""
    return (
        f"{best.attack} verified {best.verified} of {count} pictures, as `.certain` marks "
        f"them{guesses}."
    )


def _shared(best: Reconstructed) -> str:
    """What an attack says that looks for pictures which uploads of batches share."""
    assert best.images is not None
    if not best.verified:
        return (
            f"{best.attack} verified no picture that uploads share: they hold different ones, the "
            "same ones each time, or other pixels of them. All its pictures are guesses."
        )
    left = len(best.images) - best.verified
    guesses = f"; the other {left} places hold guesses" if left else ""
    return (
        f"{best.attack} verified {best.verified} of {len(best.images)} places: pictures that "
        f"uploads share, as `.certain` marks them{guesses}."
    )


@house_style()
def _write(figure: Figure, path: Path) -> None:
    if not path.parent.is_dir() or path.is_dir():
        raise UserError(
            f"{path}: expected a file's name in a folder that exists. Give one such as leak.png."
        )
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:  # a suffix that matplotlib does not know, a full disk
        raise UserError(
            f"{shown(path.name)}: expected a file that can be written, such as leak.png; got "
            f"{reason(error)}."
        ) from error


def _rank(made: Reconstructed) -> tuple[int, int, float, float]:
    return len(made.reasons), -made.verified, _coarse(made.scaled_residual), _coarse(made.misfit)


def _mixes(made: Reconstructed) -> bool:
    """Whether the attack takes a batch for one picture."""
    return not {"batches", "steps"} & traits_of(made.attack)


def _coarse(check: float) -> float:
    """The number as far as it tells attacks from each other."""
    return math.inf if math.isnan(check) else float(f"{max(check, ROUNDING):.{DIGITS}g}")


def _by_reason(refused: Mapping[str, str]) -> dict[str, list[str]]:
    attacks: dict[str, list[str]] = {}
    for name, why in refused.items():
        attacks.setdefault(why, []).append(name)
    return attacks


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
