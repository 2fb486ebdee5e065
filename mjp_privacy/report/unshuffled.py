"""Pictures of an MJP client that came back from uploads in which nothing was shuffled."""

from __future__ import annotations

from collections.abc import Iterable

from mjp_privacy.report.lines import Line, exact_images


def unshuffled_images(line: Line) -> frozenset[str]:
    """The images of which the attack read an upload in which nothing was shuffled.

    As the uploads show it themselves, or as the client's own mask of the first one says.
    """
    seen = (line.scored(name, "diagnostic") for name in ("unshuffled_uploads", "empty_mask"))
    return frozenset(str(image) for counts in seen for image in counts.index[counts > 0])


def unshuffled_note(line: Line) -> Iterable[str]:
    """How many pictures had such an upload, and how many of the exact ones they are."""
    unshuffled = unshuffled_images(line)
    if line.role != "attack" or not unshuffled:
        return
    exact = exact_images(line)
    among = f"; {len(exact & unshuffled)} of the {len(exact)} exact pictures are among them"
    yield (
        f"Unshuffled: {len(unshuffled)} of {len(line.images)} pictures have an "
        "upload in which no patch was masked, which is that of a plain client"
        f"{among if exact else ''}."
    )
