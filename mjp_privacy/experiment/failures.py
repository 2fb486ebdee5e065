"""What failed in a run: models, images, reconstructions; an equal reason is said once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mjp_privacy.core.text import counted, first_of
from mjp_privacy.experiment.messages import BlockRead, CellDone, Message, ModelOpened

NAMED = 3  # images of a line that are called by their names
SAID = "not loaded, for the reason above; all of its rows failed"


@dataclass(frozen=True)
class Failure:
    """One thing that failed: a model, an image that cannot be read, or an image in a cell."""

    reason: str
    model: str = ""
    setting: str = ""
    image: str = ""
    cell: str = ""  # its run_id

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"

    @property
    def where(self) -> str:
        """Model, setting and image, as far as they matter."""
        return ", ".join(part for part in (self.model, self.setting, self.image) if part)


def failures_of(message: Message) -> list[Failure]:
    """Every model, image or reconstruction that failed in this message."""
    if isinstance(message, ModelOpened) and message.reason:
        return [Failure(message.reason, message.model)]
    if isinstance(message, BlockRead):
        return [Failure(n.reason, image=n.record.image_id) for n in message.notes if n.reason]
    if isinstance(message, CellDone):
        where = {"model": message.model, "setting": message.setting, "cell": message.run_id}
        return [Failure(reason, image=name, **where) for name, reason in message.failed.items()]
    return []


def failure_lines(failures: Iterable[Failure]) -> tuple[str, ...]:
    """A line for each reason, in the order in which the reasons occurred.

    "1.png: the file is empty" or "ViT, a, 2.png: not finite" where it occurred once, "40 images in
    2 cells (0.png, 1.png, 2.png, …): not finite" where it did often. Why a model could not be
    loaded was said when that happened, so that its line names the model alone.
    """
    by_reason: dict[str, list[Failure]] = {}
    for failure in failures:
        by_reason.setdefault(failure.reason if failure.image else SAID, []).append(failure)
    return tuple(f"{_where(members)}: {reason}" for reason, members in by_reason.items())


def _where(failures: Sequence[Failure]) -> str:
    """What failed for one reason, in a few words."""
    images = list(dict.fromkeys(failure.image for failure in failures if failure.image))
    cells = {failure.cell for failure in failures if failure.cell}
    if not images:
        return ", ".join(dict.fromkeys(failure.model for failure in failures))
    if len(images) == 1 and len(cells) < 2:
        return failures[0].where
    within = f" in {counted(len(cells), 'cell')}" if cells else ""
    named = first_of(images, NAMED)
    return f"{counted(len(images), 'image')}{within} ({named})"
