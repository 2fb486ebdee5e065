r"""What uploads of batches agree in: the equations of a picture that stands in all of them.

With a mask for each picture an upload does not say whether a visible position is
visible in the picture that is shared. So at each position the upload's known part or zero counts,
whichever agrees. Uploads share a picture if most positions show it and no other contradicts. A
position where it is masked in all of them shows nothing. Nor does one whose patch they mask
elsewhere too: where each of two batches masks a patch of one white border, this patch meets the
equations of masked positions everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from attacks.equations.batch_span import BatchSpan
from attacks.equations.meeting import TOLERANCE, Contradiction, Meeting
from attacks.equations.span import Knowledge

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


@dataclass(frozen=True)
class Agreement:
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


def agreement(
    uploads: tuple[int, ...], meeting: Meeting, visible: Tensor | None = None
) -> Agreement | None:
    """What uploads agree in, or None if they contradict each other.

    uploads  their numbers; `meeting` is theirs
    visible  (R - 1, N): where the picture is visible in all of them but the last, if known
    """
    shown = torch.stack([~span.hidden for span in meeting.spans])
    if any(span.mixed for span in meeting.spans):
        return _with_masks(uploads, meeting, _guesses(meeting.spans, shown, visible))
    patches = meeting.patches(shown)
    contradiction = meeting.contradiction(patches, shown)
    none = torch.zeros_like(shown[0])
    agreed = Agreement(uploads, meeting, shown, patches, contradiction, none, none)
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
) -> Agreement | None:
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
    return Agreement(uploads, meeting, visible, patches, contradiction, undecided, rivals)


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
