"""Files among the images that are no images: named once, and counted in no figure."""

from __future__ import annotations

from collections.abc import Sequence

from mjp_privacy.core.text import first_of
from mjp_privacy.experiment.source import IN_STEP_OF
from mjp_privacy.report.lines import Line

NAMED = 3
"""Files that are called by their names."""


def unreadable_images(lines: Sequence[Line]) -> dict[str, str]:
    """Why images could not be read, by image_id."""
    reasons: dict[str, str] = {}
    for line in lines:
        reasons |= line.unreadable
    return reasons


def unreadable_notes(lines: Sequence[Line]) -> list[str]:
    """Which files are no images, and which images were lost with one of them."""
    reasons = unreadable_images(lines)
    lost = [name for name, reason in reasons.items() if reason.startswith(IN_STEP_OF)]
    files = [f"{name} ({reason})" for name, reason in reasons.items() if name not in lost]
    sentences = []
    if files:
        what = "file is no readable image" if len(files) == 1 else "files are no readable images"
        sentences.append(f"{len(files)} {what}: {first_of(files, NAMED)}; in no figure")
    if lost:
        images = "1 image is" if len(lost) == 1 else f"{len(lost)} images are"
        sentences.append(
            f"{images} in a client step with such a file: {first_of(lost, NAMED)}; in no figure"
        )
    return sentences
