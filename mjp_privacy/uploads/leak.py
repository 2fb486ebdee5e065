"""What `attack_gradients` returns: pictures, checks without truth, scores, and reasons.

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

import pandas as pd
from torch import Tensor

from attacks import traits_of
from mjp_privacy.core.drawing import house_style
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.schema import size_text
from mjp_privacy.uploads.reconstructed import COLUMNS_SAID, Reconstructed, decibels
from mjp_privacy.uploads.verdict import EXPLAINED, what_checks_say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEARER = 0.5  # dB by which an attack is said to be nearer to the originals than the one chosen
ROUNDING = 1e-5  # of float32: residuals below it do not tell two attacks from each other
DIGITS = 2  # of a residual that count when attacks are ranked
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
    declared: float = 0.0  # the residual that declared noise and rounding give a perfect picture
    skipped: Mapping[str, str] = field(default_factory=dict)  # {attack: why it was not run}
    seconds: float = 0.0  # that the call took, with reading, checks and scores
    moved: int = 0
    """Patches that stand elsewhere in patch_jigsaw's picture than in the one that was fed, where
    their borders say that the client shuffled; else 0."""
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
        then those that are certain whatever the loss, then by residual, then by misfit, then those
        made for batches if there is one. Where the client shuffled patches and masked none, the one
        that put them back. The private images are not looked at."""
        if not self.ranked:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            raise UserError(f"No attack made a picture. {reasons}.")
        return self.ranked[0]

    @property
    def ranked(self) -> list[Reconstructed]:
        """The attacks that made pictures, the best first; of equals, the simplest."""

        def coarse(check: float) -> float:
            """The number as far as it tells attacks from each other: of mixtures none does."""
            if math.isnan(check) or (self.batch > 1 and check >= EXPLAINED):
                return math.inf
            return float(f"{max(check, ROUNDING):.{DIGITS}g}")

        def rank(made: Reconstructed) -> tuple[float, ...]:
            in_order = self.moved and made.is_sorted
            guess = made.is_sorted and not self.moved
            mixes = self.batch > 1 and not {"batches", "steps"} & traits_of(made.attack)
            residual = coarse(made.scaled_residual * (GUESS if guess else 1.0))
            checks = residual, guess, coarse(made.misfit)
            return (not in_order, len(made.reasons), -made.verified, *checks, mixes)

        return sorted((made for made in self if made.images is not None), key=rank)

    @property
    def doubt(self) -> str:
        """What speaks against the declared mean and std, seen from the pictures; else nothing."""
        return "; ".join(dict.fromkeys(why for made in self for why in made.doubts.values()))

    @property
    def scores(self) -> pd.DataFrame | None:
        """A row for each attack and image (standard variants), or None if no images were given."""
        tables = [made.scores for made in self if made.scores is not None]
        return pd.concat(tables, ignore_index=True) if tables else None

    @property
    def verdict(self) -> str:
        """What came of it: the score where images were given, then what the checks say."""
        if not self.ranked:
            return (
                "No attack made a picture. That is no evidence of safety: `.refused` says what "
                "each would need."
            )
        best, said = self.best, ""
        if best.scores is not None and self.private is not None:
            floor = "" if self.floor is None else f" (floor {self.floor:.1f})"
            said = f"{self._score(best)}{floor}. "
            scored = [made for made in self.ranked if made.scores is not None]
            nearest = max(scored, key=lambda made: made.psnr)
            if nearest.psnr > best.psnr + NEARER:
                said += f"Another attack came nearer to the originals: {self._score(nearest)}. "
        shape, another = "", ""
        if self.other_size:
            size = size_text(self.other_size)
            shape = f"the network takes {size} px as well: img_size=… says which"
            another = f", or of pictures of another shape ({shape})"
        fed = self.ranked[1] if self.moved and self.batch == 1 else best
        said += what_checks_say(fed, self.batch, self.declared, shape)
        if fed is not best:
            said += (
                f" That is the picture as it was fed: {self.moved} of its patches stand where "
                "their borders do not fit, as of a client that shuffles and masks none"
                f"{another}. {best.attack} put the same patches back by their borders; that order "
                "is a guess, which no gradient of one upload tells."
            )
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
        table = pd.DataFrame(rows, columns=COLUMNS_SAID).fillna("–").set_index("attack")
        lines = table.rename_axis(None).to_string().splitlines() if rows else []
        for made in self:
            if made.images is None and made.mask is not None:
                lines.append(f"{made.attack:22} names {int(made.mask.sum())} masked positions")
        lines.append(
            f"{self.seconds:.1f} s, of which attacks took {sum(m.seconds for m in self):.1f}"
        )
        by_reason: dict[str, list[str]] = {}
        for name, why in {**self.refused, **self.skipped}.items():
            by_reason.setdefault(why, []).append(name)
        lines += [f"not {', '.join(names)}: {why}" for why, names in by_reason.items()]
        labels, source = self.labels, self.label_source
        if labels is None and self.ranked and self.best.labels is not None:
            labels, source = self.best.labels, f"of {self.best.attack}'s pictures (.best.labels)"
        lines.append(f"labels: {'' if labels is None else f'{labels.tolist()}, '}{source}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), self.verdict])

    @house_style()
    def show(self, path: str | Path | None = None) -> Figure:
        """A picture of all attacks, the best first, beside the original where it was given.

        leak.show("leak.png") writes it; without a path a notebook shows what is returned.
        """
        if not self.ranked:
            raise UserError(f"There is no picture to show. {self.verdict} See .refused.")
        figure = leak_figure(self)
        if path is not None:
            try:
                figure.savefig(path)
            except (OSError, ValueError) as error:  # ValueError: a format that is none
                raise UserError(f"The picture cannot be written: {error}.") from None
        return figure


# the picture --------------------------------------------------------------------------------------

ROWS, COLUMNS = 4, 7  # images and attacks that are shown
SIDE = 2.1  # inches


@house_style()
def leak_figure(leak: Leak) -> Figure:
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

    private, drawn = leak.private, leak.ranked[:COLUMNS]
    orders = [_order(made, leak) for made in drawn]
    rows = min(max(map(len, orders)) if private is None else len(private), ROWS)
    columns = len(drawn) + (private is not None)
    figure = NotebookFigure(figsize=(SIDE * columns, (SIDE + 0.5) * rows + 0.4), dpi=150)
    for row, places in enumerate(figure.subplots(rows, columns, squeeze=False)):
        panels: list[tuple[Tensor | None, str]] = []
        if private is not None:
            panels.append((private[row], "original"))
        for made, order in zip(drawn, orders, strict=True):
            images = made.images if row < len(order) else None
            panels.append(
                (None, "")
                if images is None
                else (images[order[row]], _title(made, row, order[row]))
            )
        for axes, (image, title) in zip(places, panels, strict=True):
            axes.set_axis_off()
            if image is not None:
                pixels = image.nan_to_num(0.5).permute(1, 2, 0).clamp(0, 1).numpy()
                axes.imshow(pixels, interpolation="nearest", cmap="gray", vmin=0, vmax=1)
                axes.set_title(title, fontsize=7)
    parts = [
        f"{min(rows, len(order))} of {len(made.images)} pictures of {made.attack}"
        for made, order in zip(drawn, orders, strict=True)
        if made.images is not None and min(rows, len(order)) < len(made.images)
    ]
    parts += [f"{len(drawn)} of {len(leak.ranked)} attacks"] * (len(drawn) < len(leak.ranked))
    left_out = f"\nDrawn: {', '.join(parts)}." if parts else ""
    figure.suptitle(f"{leak.verdict}{left_out}", fontsize=8, wrap=True)
    figure.tight_layout()
    return figure


def _order(made: Reconstructed, leak: Leak) -> Sequence[int]:
    """Which of an attack's pictures stands in each row."""
    assert made.images is not None
    if leak.private is not None and made.places:
        return made.places
    places = range(len(made.images))
    if leak.batch == 1 or made.certain is None:
        return places
    certain = made.certain.tolist()
    return sorted(places, key=lambda place: not certain[place])


def _title(made: Reconstructed, row: int, place: int) -> str:
    """The attack, its residual or misfit, whether the picture at this place is certain and, where
    known, its score for the image of a row."""
    if place in made.reasons:
        return f"{made.attack}\n{made.reasons[place][:40]}"
    checks = {"residual": made.residuals, "misfit": made.misfits}
    told = {name: float(of[place]) for name, of in checks.items() if of is not None}
    parts = [f"{name} {value:.0e}" for name, value in told.items() if not math.isnan(value)][:1]
    if made.certain is not None and bool(made.certain[place]):
        parts.append("certain")
    if made.scores is not None:
        of_image = made.scores.loc[made.scores["image"] == row].iloc[0]
        parts.append("exact" if of_image["exact"] else f"{of_image['psnr']:.1f} dB")
    return f"{made.attack}\n{', '.join(parts)}"
