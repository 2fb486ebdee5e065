"""The scores of a derived line: every image's from the attack that was chosen for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.metrics.coded import Coded, Images
from mjp_privacy.report.line import Line
from mjp_privacy.report.scores import Column, JoinedTable, Key, joined

OF_IMAGE = frozenset(
    (
        *("ceiling_psnr", "grey_psnr", "oracle_in_place_psnr", "mean_visible_psnr"),
        *("shuffled_patches", "moved_patches", "empty_mask"),
    )
)
"""Diagnostics that are the same for every attack on an image."""

OF_RECONSTRUCTION = frozenset(("visible_psnr", "masked_psnr", "gradient_residual"))
"""Diagnostics that score a reconstruction; all others describe how the attack worked."""

NO_RESIDUAL = "no attack that reconstructed this image has a gradient residual to choose by"


class Choice(Mapping[str, Line]):
    """The line that was chosen for each image, by its id; images without one are left out."""

    def __init__(
        self, images: Images, members: Sequence[Line], member: NDArray[np.integer]
    ) -> None:
        self.images = images
        self.members = members
        self.member = member
        """(n,) the chosen member of each image by its place among the members; -1 for none."""

    def __getitem__(self, image_id: str) -> Line:
        member = int(self.member[self.images.place[image_id]])
        if member < 0:
            raise KeyError(image_id)
        return self.members[member]

    def __iter__(self) -> Iterator[str]:
        return (self.images.ids[at] for at in np.flatnonzero(self.member >= 0).tolist())

    def __len__(self) -> int:
        return int((self.member >= 0).sum())

    @property
    def counts(self) -> list[int]:
        """How many images each member was chosen for."""
        chosen = self.member[self.member >= 0]
        return [int(n) for n in np.bincount(chosen, minlength=len(self.members))]


class ChosenScores:
    """The rows of the chosen reconstructions, as a table of scores.

    Diagnostics of the image come from the chosen line too, or else from the first that has them.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._all = JoinedTable([line.table for line in choice.members])
        self.keys: Sequence[Key] = [key for key in self._all.keys if _kind(*key)]
        self.codes = None
        self.unreadable: Mapping[str, str] = {}

    @property
    def images(self) -> Images:
        """All images with rows."""
        return self.choice.images

    @property
    def photographs(self) -> Coded | None:
        """The photograph that each image was cut from."""
        return self._all.photographs

    def column(self, metric: str, variant: str) -> Column | None:
        """The rows of one metric; None where it was not computed."""
        kind = _kind(metric, variant)
        columns = []
        for line in self.choice.members if kind else ():
            column = line.column(metric, variant)
            columns.append(column._replace(at=self._places(line)[column.at]))
        if kind == "image":
            return self._first_known(columns)
        member = self.choice.member
        parts = [c.chosen(member[c.at] == number) for number, c in enumerate(columns)]
        if kind == "score" and len(self._unchosen):
            parts.append(self._without_choice(columns))
        return joined([part for part in parts if len(part.at)])

    def _places(self, line: Line) -> NDArray[np.int32]:
        return self.images.places(line.images.ids)

    def _first_known(self, columns: Sequence[Column]) -> Column | None:
        """Of each image the row with a value, rather of the chosen line, rather of an early one."""
        if all(len(c.at) == len(self.images) and c.statuses.equal("ok").all() for c in columns):
            member = np.maximum(self.choice.member, 0)
            parts = [c.chosen(member == number) for number, c in enumerate(columns)]
            return joined([part for part in parts if len(part.at)])
        every = joined([column for column in columns if len(column.at)])
        if every is None:
            return None
        number = np.concatenate([np.full(len(c.at), i) for i, c in enumerate(columns)])
        number = number[np.argsort(np.concatenate([c.at for c in columns]), kind="stable")]
        taken = self.choice.member[every.at] == number
        order = np.lexsort((number, ~taken, ~every.statuses.equal("ok"), every.at))
        at = every.at[order]
        first = order[np.append(True, at[1:] != at[:-1])]
        return Column(
            every.at[first], every.values[first], every.statuses[first], every.reasons[first]
        )

    # images without a choice ----------------------------------------------------------------------

    def _without_choice(self, columns: Sequence[Column]) -> Column:
        """Rows that say why no member was chosen for an image."""
        open_images = np.concatenate([c.at for c in columns])
        at = np.unique(open_images[self.choice.member[open_images] < 0]).astype(np.int32)
        nothing = np.full(len(at), np.nan)
        statuses, reasons = self._outcomes
        place = np.searchsorted(self._unchosen, at)
        return Column(at, nothing, statuses[place], reasons[place])

    @cached_property
    def _unchosen(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.choice.member < 0)

    @cached_property
    def _outcomes(self) -> tuple[Coded, Coded]:
        """(status, reason) of each image without a choice, as its members' PSNR say them."""
        known: list[list[tuple[str, str] | None]] = []
        codes = np.zeros((len(self.choice.members), len(self._unchosen)), dtype=np.int64)
        for number, line in enumerate(self.choice.members):
            said, code = self._said(line)
            known.append(said)
            codes[number] = code[self._unchosen]
        different, which = np.unique(codes, axis=1, return_inverse=True)
        told = [
            _reason(self.choice.members, [known[i][code] for i, code in enumerate(combination)])
            for combination in different.T.tolist()
        ]
        which = which.reshape(-1)
        states, texts = (Coded.of([pair[i] for pair in told]) for i in (0, 1))
        return states[which], texts[which]

    def _said(self, line: Line) -> tuple[list[tuple[str, str] | None], NDArray[np.int64]]:
        """The (status, reason) that occur in a line's PSNR, and the place of each image's among
        them; 0 is None, for images without a row. A NaN counts as failed."""
        column = line.column("psnr", "standard")
        width = len(column.reasons.words) + 1
        pair = column.statuses.codes.astype(np.int64) * width + column.reasons.codes
        pair[column.statuses.equal("ok") & np.isnan(column.values)] = -1
        different, which = np.unique(pair, return_inverse=True)
        said: list[tuple[str, str] | None] = [None]
        for both in different.tolist():
            status, reason = divmod(both, width)
            words = column.statuses.words, column.reasons.words
            broken = "failed", "its PSNR is not a number"
            said.append(broken if both < 0 else (words[0][status], words[1][reason]))
        code = np.zeros(len(self.images), dtype=np.int64)
        code[self._places(line)[column.at]] = which + 1
        return said, code


def _kind(metric: str, variant: str) -> str:
    """Whether a metric scores the picture, the reconstruction without truth, or the image; "" for
    what describes how an attack worked."""
    if variant in ("paper", "standard"):
        return "score"
    if variant == "diagnostic" and metric in OF_RECONSTRUCTION:
        return "reconstruction"
    of_image = variant == "diagnostic" and metric in OF_IMAGE
    return "image" if of_image or (metric, variant) == ("top1", "intact") else ""


def _reason(members: Sequence[Line], outcomes: Sequence[tuple[str, str] | None]) -> tuple[str, str]:
    """(status, reason) of an image for which no member was chosen."""
    by_member = zip(members, outcomes, strict=True)
    tried = [(line, *outcome) for line, outcome in by_member if outcome is not None]
    statuses = {status for _, status, _ in tried}
    if "ok" in statuses:
        return "unsupported", NO_RESIDUAL
    status = next((s for s in ("failed", "unscored") if s in statuses), "unsupported")
    texts = [f"{line.attack} {state}: {why or 'no reason given'}" for line, state, why in tried]
    return status, "; ".join(texts)
