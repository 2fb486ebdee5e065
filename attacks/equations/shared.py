r"""Finds the pictures that uploads of batches share, without being told which upload holds which.

Two uploads share a picture if their equations (`equations.agreement`) do not contradict each other.
Clients that shuffle their pictures often have several in common between two uploads, whose
differences then stay open. So sets of uploads grow depth first, as long as they agree, until one
picture is left; then every further upload that agrees joins, since it holds this picture too, and
makes it more exact. A set whose pictures are all found already is not looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.agreement import Agreement, SharedPicture, agreement
from attacks.equations.batch_span import BatchSpan
from attacks.equations.meeting import Meeting, equations_left

MOST_MEETINGS = 50_000
"""Sets of uploads that are solved before the search ends with what it has."""

Group = tuple[int, SharedPicture]
"""How many pictures some uploads share, and what is known of each of them."""


@dataclass
class Search:
    """One search: Search(spans).pictures().

    rounds  the round of each upload, if a picture stands in one upload of a round at most: then no
            two uploads of a round are asked for a picture that they share
    """

    spans: Sequence[BatchSpan]
    rounds: Sequence[int] | None = None
    found: list[SharedPicture] = field(default_factory=list)
    several: list[Group] = field(default_factory=list)  # sets that share more than one picture
    meetings: int = 0

    def pictures(self) -> list[SharedPicture]:
        """Every picture that at least two uploads share and that they tell from others."""
        for first in range(len(self.spans)):
            self._extend((first,), self._partners[first])
        return self.found

    @property
    def groups(self) -> list[SharedPicture]:
        """What is left, once for each picture: those that nothing tells from others with which
        they stood together. Groups with the fewest open directions come first."""
        groups: list[SharedPicture] = []
        for count, each in sorted(self.several, key=lambda g: (g[0], -len(g[1].uploads))):
            others = sum(set(each.uploads) <= set(group.uploads) for group in groups)
            groups += [each] * (count - self._known(each.uploads) - others)
        return groups

    @cached_property
    def agreeing(self) -> set[tuple[int, int]]:
        """The pairs of uploads that agree; all where two have too few equations to contradict."""
        rounds = range(len(self.spans)) if self.rounds is None else self.rounds
        pairs = [
            (a, b) for a, b in combinations(range(len(self.spans)), 2) if rounds[a] != rounds[b]
        ]
        return {pair for pair in pairs if not self._testable(pair) or self._set(pair)}

    @cached_property
    def _partners(self) -> list[list[int]]:
        """For every upload those after it with which it agrees."""
        return [
            [b for b in range(a + 1, len(self.spans)) if (a, b) in self.agreeing]
            for a in range(len(self.spans))
        ]

    def _testable(self, uploads: Sequence[int]) -> bool:
        return equations_left([self.spans[number] for number in uploads]) > 0

    def _extend(self, uploads: tuple[int, ...], further: Sequence[int]) -> None:
        """Look for pictures in these uploads and at least one of `further`."""
        for place, number in enumerate(further):
            grown = (*uploads, number)
            later = [n for n in further[place + 1 :] if self._agree(number, n)]
            if not self._testable(grown):
                self._extend(grown, later)
                continue
            agreed = self._set(grown)
            if agreed is None or self._known(grown) >= agreed.pictures:
                continue
            if agreed.pictures == 1:
                self._record(self._completed(agreed))
            else:
                self.several.append((agreed.pictures, agreed.picture))
                self._extend(grown, later)

    def _agree(self, one: int, other: int) -> bool:
        return (min(one, other), max(one, other)) in self.agreeing

    def _known(self, uploads: Sequence[int]) -> int:
        """How many of the pictures found so far stand in all of these uploads."""
        return sum(set(uploads) <= set(picture.uploads) for picture in self.found)

    def _record(self, picture: SharedPicture) -> None:
        """Keep a picture. One that other uploads gave before is the same picture in them too."""
        same = [number for number, old in enumerate(self.found) if picture.equals(old)]
        if not same:
            self.found.append(picture)
            return
        better, other = sorted((self.found[same[0]], picture), key=lambda p: float(p.error.norm()))
        more = [at for at, number in enumerate(other.uploads) if number not in better.uploads]
        self.found[same[0]] = replace(
            better,
            uploads=(*better.uploads, *(other.uploads[at] for at in more)),
            visible=torch.cat((better.visible, other.visible[more])),
        )

    def _completed(self, agreed: Agreement) -> SharedPicture:
        """The one picture of these uploads, with all others that hold it."""
        for number in range(len(self.spans)):
            if number in agreed.uploads:
                continue
            if all(self._agree(number, member) for member in agreed.uploads):
                agreed = self._set((*agreed.uploads, number), agreed.visible) or agreed
        return agreed.picture

    def _set(self, uploads: tuple[int, ...], visible: Tensor | None = None) -> Agreement | None:
        """`agreement` of these uploads, as long as the search may go on."""
        if self.meetings >= MOST_MEETINGS or spent():
            return None
        self.meetings += 1
        meeting = Meeting.of([self.spans[number] for number in uploads])
        return agreement(uploads, meeting, visible)
