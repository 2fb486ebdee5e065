r"""Finds the pictures that uploads of batches share, without being told which upload holds which.

Two uploads share a picture if their equations (`equations.meeting`) do not contradict each other.
Clients that shuffle their pictures often have several in common between two uploads, whose
differences then stay open. So sets of uploads grow depth first, as long as they agree, until one
picture is left; then every further upload that agrees joins, since it holds this picture too, and
makes it more exact. A set whose pictures are all found already is not looked at again.

With a mask for each picture (`masks="image"`) an upload does not say whether a visible position is
visible in the picture that is shared. So at each position the upload's known part or zero counts,
whichever agrees. Uploads share a picture if most positions show it and no other contradicts. A
position where it is masked in all of them shows nothing. Nor does one whose patch they mask
elsewhere too: where each of two batches masks a patch of one white border, this patch meets the
equations of masked positions everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product

import torch
from torch import Tensor

from attacks.equations.batch_span import BatchSpan
from attacks.equations.meeting import (
    TOLERANCE,
    Contradiction,
    Meeting,
    equations_left,
)
from attacks.equations.span import Knowledge
from mjp_privacy.core.budget import spent

MOST_MEETINGS = 50_000
"""Sets of uploads that are solved before the search ends with what it has."""
EVIDENCE = 0.5
"""Share of the positions that must agree with the picture visible in at least one upload, where
each picture has its own mask; also of those that could show that uploads do not share it."""


@dataclass(frozen=True)
class SharedPicture:
    """A picture that stands in several uploads: patches_i + a_i basis, with a_i unknown."""

    patches: Tensor  # (N, p), orthogonal to the basis
    basis: Tensor  # (q, p) orthonormal rows; none: the picture is determined
    uploads: tuple[int, ...]  # those that hold it
    visible: Tensor  # (R, N) bool: where it is visible in each of them
    undecided: Tensor  # (N,) bool: nothing says whether it is masked, so that it is not known
    error: Tensor  # (N,) expected length of the error of each patch

    @property
    def knowledge(self) -> Knowledge:
        """The same without the uploads, as `equations.filling` takes it."""
        return Knowledge(self.patches, self.basis, ~self.visible.any(0))

    @property
    def determined(self) -> bool:
        """Whether every patch is known."""
        return not len(self.basis) and not bool(self.undecided.any())

    def equals(self, other: SharedPicture) -> bool:
        """Whether two determined pictures differ by their errors alone."""
        apart = float((self.patches - other.patches).norm())
        error = float(torch.stack((self.error, other.error)).norm())
        return self.determined and other.determined and apart <= TOLERANCE * error


Group = tuple[int, SharedPicture]
"""How many pictures some uploads share, and what is known of each of them."""


@dataclass(frozen=True)
class _Set:
    """Uploads that agree: at least one picture stands in all of them."""

    uploads: tuple[int, ...]
    meeting: Meeting
    visible: Tensor  # (R, N)
    patches: Tensor
    contradiction: Contradiction
    undecided: Tensor  # (N,)
    rivals: Tensor  # (N,) bool: a second patch agrees, as visible elsewhere: another shared picture

    @property
    def picture(self) -> SharedPicture:
        """What is known of each picture that these uploads share."""
        return SharedPicture(
            self.patches,
            self.meeting.basis,
            self.uploads,
            self.visible,
            self.undecided | self.rivals,
            self.meeting.error(self.contradiction.expected),
        )

    @property
    def pictures(self) -> int:
        """How many pictures these uploads share: each but the first adds N differences, fewer if
        patches are equal. A few directions more are flat patches', of other pictures too. Where one
        picture is masked while another is not their difference is not open, but they are rivals."""
        anchored = all(bool(span.masked.gain > 0) for span in self.meeting.spans)
        hidden = ~self.visible.any(0)
        of_masked = max(int(hidden.sum()) - anchored, 0)
        by_open = 1 + round(max(self.meeting.open - of_masked, 0) / len(hidden))
        return max(by_open, 2) if bool(self.rivals.any()) else by_open


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

    def _completed(self, agreed: _Set) -> SharedPicture:
        """The one picture of these uploads, with all others that hold it."""
        for number in range(len(self.spans)):
            if number in agreed.uploads:
                continue
            if all(self._agree(number, member) for member in agreed.uploads):
                agreed = self._set((*agreed.uploads, number), agreed.visible) or agreed
        return agreed.picture

    def _set(self, uploads: tuple[int, ...], visible: Tensor | None = None) -> _Set | None:
        """The set of these uploads, or None if they contradict each other.

        visible  (R - 1, N): where the picture is visible in all of them but the last, if known
        """
        if self.meetings >= MOST_MEETINGS or spent():
            return None
        self.meetings += 1
        meeting = Meeting.of([self.spans[number] for number in uploads])
        shown = torch.stack([~span.hidden for span in meeting.spans])
        if any(span.mixed for span in meeting.spans):
            return _with_masks(uploads, meeting, _guesses(meeting.spans, shown, visible))
        patches = meeting.patches(shown)
        contradiction = meeting.contradiction(patches, shown)
        none = torch.zeros_like(shown[0])
        agreed = _Set(uploads, meeting, shown, patches, contradiction, none, none)
        return agreed if contradiction.none else None


def _guesses(spans: Sequence[BatchSpan], shown: Tensor, visible: Tensor | None) -> Sequence[Tensor]:
    """Guesses (R, N) of where a picture is visible, those with most visible first.

    shown    (R, N): the positions that are visible in some picture of each upload
    visible  (R - 1, N): where this one is visible in all but the last, if that is known
    """
    free = len(shown) if visible is None else 1
    either = [(True, False) if span.mixed else (True,) for span in spans[-free:]]
    guesses = [torch.tensor(guess).to(shown.device) for guess in product(*either)]
    rows = [guess.unsqueeze(1) & shown[-free:] for guess in sorted(guesses, key=lambda g: -g.sum())]
    return rows if visible is None else [torch.cat((visible, row)) for row in rows]


def _with_masks(
    uploads: tuple[int, ...], meeting: Meeting, guesses: Sequence[Tensor]
) -> _Set | None:
    """The set with the first guess that agrees at each position, or None where too few do.

    A position that agrees with no guess may be masked in all uploads, if they have a direction in
    common for it and nothing that contradicts.
    """
    visible, rivals, agrees = _best(meeting, guesses)
    undecided = ~agrees
    masked = ~visible.any(0)
    free = masked & (meeting.known(visible) == 0)  # in every span, which nothing can contradict
    unexplained = bool((undecided & ~free).any()) or (bool(undecided.any()) and not meeting.open)
    if unexplained or not _evident(meeting, visible, agrees & ~masked):
        return None
    patches = meeting.patches(visible)
    contradiction = meeting.contradiction(patches, visible)
    return _Set(uploads, meeting, visible, patches, contradiction, undecided, rivals)


def _best(meeting: Meeting, guesses: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The first guess (R, N) that agrees at each position, the rivals (N,), and where one agrees.

    Two guesses may agree with one patch, as where it is of a border. One that is masked in all
    uploads is no rival: a patch of the border that they mask agrees as masked everywhere.
    """
    visible = guesses[-1]
    best = meeting.patches(visible)
    agrees = torch.zeros_like(visible[0])
    rivals, error = agrees.clone(), torch.zeros_like(best[:, 0])
    for guess in guesses:
        patches = meeting.patches(guess)
        contradiction = meeting.contradiction(patches, guess)
        own_error = meeting.error(contradiction.expected)
        differs = (patches - best).norm(dim=1) > TOLERANCE * torch.hypot(error, own_error)
        rivals |= contradiction.none_at & agrees & guess.any(0) & differs
        fits = contradiction.none_at & ~agrees
        visible = torch.where(fits, guess, visible)
        best = torch.where(fits.unsqueeze(1), patches, best)
        error = torch.where(fits, own_error, error)
        agrees |= fits
    return visible, rivals, agrees


def _evident(meeting: Meeting, visible: Tensor, shown: Tensor) -> bool:
    """Whether enough positions show the picture.

    visible  (R, N): where it is visible in each upload
    shown    (N,): the positions that agree and are visible in at least one

    A patch that equals what is masked in all of these uploads may stand in many pictures: it is
    left out, and most of the other positions must show the picture.
    """
    if float(shown.double().mean()) < EVIDENCE:
        return False
    patches, expected, none = [], [], shown
    for guess in (visible, torch.zeros_like(visible)):
        patches.append(meeting.patches(guess))
        contradiction = meeting.contradiction(patches[-1], guess)
        expected.append(meeting.error(contradiction.expected))
        none = none & contradiction.none_at
    apart = (patches[0] - patches[1]).norm(dim=1)
    common = none & (apart <= TOLERANCE * torch.stack(expected).norm(dim=0))
    return int((shown & ~common).sum()) >= EVIDENCE * int((~common).sum())
