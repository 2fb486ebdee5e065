r"""Where uploads of batches meet: what pictures that stand in several of them must be.

A picture x in uploads r = 1..R obeys (I - P_r) x_i = c_{r,i} for each (`equations.batches`), so

    M x_i = sum_r c_{r,i},    M = sum_r (I - P_r).

Directions in which M vanishes belong to the span of every upload. Where the uploads share m
pictures these are the differences between the shared ones, N (m - 1) directions, and the patches
that were masked in all uploads: with none the picture is one, and determined. Where they share no
picture, the equations contradict each other as soon as there are more of them than unknowns, sum_r
(p - q_r) > p. What counts as zero is decided by the errors that each upload shows of itself.

With a mask for each picture an upload does not say whether a visible position is visible in the
picture that is shared. So at each position the upload's known part or zero counts, whichever
agrees. Uploads share a picture if most positions show it and no other contradicts. A position where
it is masked in all of them shows nothing. Nor does one whose patch they mask elsewhere too: where
each of two batches masks a patch of one white border, this patch meets the equations of masked
positions everywhere.

The search: clients that shuffle often have several pictures in common between two uploads. So sets
of uploads grow depth first, as long as they agree, until one picture is left; then every further
upload that agrees joins and makes it more exact. A set whose pictures are all found already is not
looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product

import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.batches import BatchSpan
from attacks.equations.span import Knowledge

TOLERANCE = 10.0
"""Times the expected error up to which a direction or a contradiction counts as zero. Expected is
a bound for random errors: those of a trained ViT's float32 gradients are .3 to 1.1 of it, and
pictures that are not shared contradict each other by 10^4 of it."""
DECIDABLE = 0.1
"""Share of the known part of the patches below which the tolerance must stay: with larger errors
equations that do not contradict each other say nothing."""
ROUNDING = 1e-12  # of the eigenvalues of M, which are computed in float64


@dataclass(frozen=True)
class Meeting:
    """M's eigenvalues and eigenvectors, as far as they differ from R and any."""

    spans: Sequence[BatchSpan]
    values: Tensor  # (K,) ascending
    vectors: Tensor  # (K, p) rows of length sqrt(R - value)

    @classmethod
    def of(cls, spans: Sequence[BatchSpan]) -> Meeting:
        """The meeting of these uploads, of which there is at least one."""
        stacked = torch.cat([span.basis for span in spans])
        if len(stacked) <= stacked.shape[1]:
            shared, turn = torch.linalg.eigh(stacked @ stacked.mT)
            vectors = turn.mT @ stacked
        else:
            shared, turn = torch.linalg.eigh(stacked.mT @ stacked)
            vectors = shared.clamp_min(0).sqrt().unsqueeze(1) * turn.mT
        return cls(spans, (len(spans) - shared).flip(0), vectors.flip(0))

    @cached_property
    def open(self) -> int:
        """How many directions lie in every span, as far as the errors of the spans tell."""
        near = self.values < 0.5  # of the angles between spans of different pictures
        error = torch.stack([span.tilt(self._unit(near)).square() for span in self.spans]).sum(0)
        return int((self.values[near] < ROUNDING + TOLERANCE**2 * error).sum())

    @property
    def basis(self) -> Tensor:
        """Orthonormal rows (open, p) of these directions."""
        return self._unit(slice(self.open))

    def _unit(self, which: slice | Tensor) -> Tensor:
        length = (len(self.spans) - self.values[which]).sqrt()
        return self.vectors[which] / length.unsqueeze(1)

    def patches(self, visible: Tensor) -> Tensor:
        """The patches (N, p) that meet all equations best, with no part along open directions.

        visible  (R, N) bool: where the picture is visible in each upload
        """
        total = self.known(visible).sum(0)
        count = len(self.spans)
        scale = count * self.values
        scale[: self.open] = -count * (count - self.values[: self.open])
        return total / count + (total @ self.vectors.mT / scale) @ self.vectors

    def known(self, visible: Tensor) -> Tensor:
        """The right-hand sides (R, N, p) of the equations."""
        rows = zip(self.spans, visible, strict=True)
        return torch.stack([span.known(seen) for span, seen in rows])

    def contradiction(self, patches: Tensor, visible: Tensor) -> Contradiction:
        """How far these patches (N, p) are from meeting all equations."""
        known = self.known(visible)
        missed = torch.stack([span.off(patches) for span in self.spans]) - known
        pairs = zip(self.spans, visible, strict=True)
        expected = torch.stack([span.expected(patches, seen) for span, seen in pairs])
        return Contradiction(missed.norm(dim=(0, 2)), expected.norm(dim=0), known.norm(dim=(0, 2)))

    def error(self, expected: Tensor) -> Tensor:
        """The length (N,) of the error to expect of `patches`, from that of their equations.

        The errors of sum_r c_{r,i} have a covariance like M, so those of x_i one like its inverse.
        """
        width, rest = self.vectors.shape[1], self.values[self.open :].clamp_min(ROUNDING)
        outside = (width - len(self.values)) / len(self.spans)
        return expected * ((outside + float((1 / rest).sum())) / width) ** 0.5


@dataclass(frozen=True)
class Contradiction:
    """What is missing in the equations of each of N positions."""

    missed: Tensor  # (N,) length of what is left over
    expected: Tensor  # (N,) what errors leave over
    known: Tensor  # (N,) length of the right-hand sides

    @property
    def none(self) -> bool:
        """Whether the equations hold over all positions together, and could have failed to."""
        tolerance = TOLERANCE * float(self.expected.norm())
        decidable = tolerance <= DECIDABLE * float(self.known.norm())
        return decidable and float(self.missed.norm()) <= tolerance

    @property
    def none_at(self) -> Tensor:
        """The same (N,) of each position alone."""
        tolerance = TOLERANCE * self.expected
        decidable = (self.known > 0) & (tolerance <= DECIDABLE * self.known)
        return decidable & (self.missed <= tolerance)


# what uploads agree in ----------------------------------------------------------------------------


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
    count: int  # how many pictures these uploads share: this is known of each

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


def _shared(
    uploads: tuple[int, ...],
    meeting: Meeting,
    visible: Tensor,
    undecided: Tensor,
    rivals: Tensor | None = None,
) -> SharedPicture:
    """What is known of each picture that uploads share, visible (R, N) in them.

    rivals  (N,) bool: a second patch agrees, as visible elsewhere: another shared picture

    Each picture but the first adds N differences, fewer if patches are equal. A few directions more
    are flat patches', of other pictures too. Where one picture is masked while another is not their
    difference is not open, but they are rivals.
    """
    anchored = all(bool(span.gain[-1] > 0) for span in meeting.spans)
    hidden = ~visible.any(0)
    of_masked = max(int(hidden.sum()) - anchored, 0)
    count = 1 + round(max(meeting.open - of_masked, 0) / len(hidden))
    if rivals is not None and bool(rivals.any()):
        count, undecided = max(count, 2), undecided | rivals
    patches = meeting.patches(visible)
    error = meeting.error(meeting.contradiction(patches, visible).expected)
    return SharedPicture(patches, meeting.basis, uploads, visible, undecided, error, count)


def agreement(
    uploads: tuple[int, ...], meeting: Meeting, visible: Tensor | None = None
) -> SharedPicture | None:
    """What uploads agree in, or None if they contradict each other.

    uploads  their numbers; `meeting` is theirs
    visible  (R - 1, N): where the picture is visible in all of them but the last, if known

    Where pictures have masks of their own it is the first guess that agrees at each position,
    unless too few do. A position that agrees with no guess may be masked in all uploads, if they
    have a direction in common for it and nothing that contradicts.
    """
    shown = torch.stack([~span.hidden for span in meeting.spans])
    if not any(span.mixed for span in meeting.spans):
        if not meeting.contradiction(meeting.patches(shown), shown).none:
            return None
        return _shared(uploads, meeting, shown, torch.zeros_like(shown[0]))
    found, rivals, agrees = _best(meeting, _guesses(meeting.spans, shown, visible))
    undecided, masked = ~agrees, ~found.any(0)
    lengths = meeting.known(found).norm(dim=(0, 2))
    free = masked & (lengths == 0)  # in every span, which nothing can contradict
    unexplained = bool((undecided & ~free).any()) or (bool(undecided.any()) and not meeting.open)
    if unexplained or not _evident(meeting, found, agrees & ~masked):
        return None
    return _shared(uploads, meeting, found, undecided, rivals)


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


# the search ---------------------------------------------------------------------------------------


MOST_MEETINGS = 50_000
"""Sets of uploads that are solved before the search ends with what it has."""


@dataclass
class Search:
    """One search: Search(spans).pictures().

    rounds  the round of each upload, if a picture stands in one upload of a round at most: then no
            two uploads of a round are asked for a picture that they share
    """

    spans: Sequence[BatchSpan]
    rounds: Sequence[int] | None = None
    found: list[SharedPicture] = field(default_factory=list)
    several: list[SharedPicture] = field(default_factory=list)  # of sets that share more than one
    meetings: int = 0

    def pictures(self) -> list[SharedPicture]:
        """Every picture that at least two uploads share and that they tell from others."""
        for first in range(len(self.spans)):
            later = range(first + 1, len(self.spans))
            self._extend((first,), [number for number in later if self._agree(first, number)])
        return self.found

    @property
    def groups(self) -> list[SharedPicture]:
        """What is left, once for each picture: those that nothing tells from others with which
        they stood together. Groups with the fewest open directions come first."""
        groups: list[SharedPicture] = []
        for each in sorted(self.several, key=lambda group: (group.count, -len(group.uploads))):
            others = sum(set(each.uploads) <= set(group.uploads) for group in groups)
            groups += [each] * (each.count - self._known(each.uploads) - others)
        return groups

    @cached_property
    def agreeing(self) -> set[tuple[int, int]]:
        """The pairs of uploads that agree; all where two have too few equations to contradict."""
        rounds = range(len(self.spans)) if self.rounds is None else self.rounds
        pairs = [
            (a, b) for a, b in combinations(range(len(self.spans)), 2) if rounds[a] != rounds[b]
        ]
        return {pair for pair in pairs if not self._testable(pair) or self._set(pair)}

    def _testable(self, uploads: Sequence[int]) -> bool:
        """Whether these uploads have more equations than a patch has unknowns."""
        width = self.spans[0].basis.shape[1]
        return sum(width - len(self.spans[number].basis) for number in uploads) > width

    def _extend(self, uploads: tuple[int, ...], further: Sequence[int]) -> None:
        """Look for pictures in these uploads and at least one of `further`."""
        for place, number in enumerate(further):
            grown = (*uploads, number)
            later = [n for n in further[place + 1 :] if self._agree(number, n)]
            if not self._testable(grown):
                self._extend(grown, later)
                continue
            agreed = self._set(grown)
            if agreed is None or self._known(grown) >= agreed.count:
                continue
            if agreed.count > 1:
                self.several.append(agreed)
                self._extend(grown, later)
                continue
            for other in range(len(self.spans)):  # all others that hold the picture
                members = agreed.uploads
                if other not in members and all(self._agree(other, one) for one in members):
                    agreed = self._set((*members, other), agreed.visible) or agreed
            self._record(agreed)

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

    def _set(self, uploads: tuple[int, ...], visible: Tensor | None = None) -> SharedPicture | None:
        """`agreement` of these uploads, as long as the search may go on."""
        if self.meetings >= MOST_MEETINGS or spent():
            return None
        self.meetings += 1
        meeting = Meeting.of([self.spans[number] for number in uploads])
        return agreement(uploads, meeting, visible)
