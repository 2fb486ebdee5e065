"""Uploads whose headers contradict each other: each is sound alone, and together they cannot be.

Uploads of one series hold the same images of the same client, so their headers differ in what
changes from round to round alone; a client that shuffles its images before every round has others
each time. Within a line of a table every image has one name.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from mjp_privacy.client.recorded.groups import Series, lines_of, series_of
from mjp_privacy.client.recorded.recorded_upload import RecordedUpload
from mjp_privacy.client.recorded.truth import TruthFile
from mjp_privacy.core.text import shown

CHANGES = (
    "weights",
    "weights_sha256",
    "round",
    "client",
    "lr",
    "partial",
    "noise",
    "rounding",
    "undeclared",
)
"""Header fields that may change from one upload of a series to the next."""


MOST_TOGETHER = 100_000
"""Images of a block, which holds whole steps of every client of a folder."""


def contradictions(uploads: Sequence[RecordedUpload]) -> dict[str, str]:
    """Why uploads cannot be attacked together, by name; what they contradict is named too."""
    too_many = _of_batches(uploads)
    uploads = [upload for upload in uploads if upload.name not in too_many]
    series = series_of(uploads)
    reasons = {each: _within(each) for each in series}
    agreeing = [each for each, reason in reasons.items() if not reason]
    for line in lines_of(agreeing):
        reasons |= _of_one_image(line)
    refused = {u.name: reason for each, reason in reasons.items() if reason for u in each.uploads}
    return too_many | refused


def _of_batches(uploads: Sequence[RecordedUpload]) -> dict[str, str]:
    """Uploads whose batch fits into no block beside the commoner ones."""
    block, reasons = 1, dict[str, str]()
    for batch, _ in Counter(upload.header.batch for upload in uploads).most_common():
        if (together := math.lcm(block, batch)) <= MOST_TOGETHER:
            block = together
            continue
        reasons |= {
            upload.name: (
                f"{upload.name}.json, batch: expected one of which a block of {MOST_TOGETHER} "
                f"images holds whole steps, as of this folder's other uploads; got {batch}. Put "
                "it into a folder of its own."
            )
            for upload in uploads
            if upload.header.batch == batch
        }
    return reasons


def _within(series: Series) -> str:
    """What the headers of a series disagree in; empty if they agree."""
    first = series.first
    for other in series.uploads[1:]:
        for field in dataclasses.fields(first.header):
            ours, theirs = (getattr(u.header, field.name) for u in (first, other))
            known = field.name != "labels" or (
                ours is not None and theirs is not None and not series.first.shuffles_images
            )
            if field.name not in CHANGES and known and ours != theirs:
                return _of_series(series, other, field.name, ours, theirs)
        if series.first.shuffles_images:
            continue
        ours, theirs = (None if f is None else f.image_ids for f in _truths(first, other))
        if ours is not None and theirs is not None and ours != theirs:
            return _of_series(series, other, "image_ids", ours, theirs)
    return ""


def _truths(*uploads: RecordedUpload) -> list[TruthFile | None]:
    return [upload.truth_file() for upload in uploads]


def _of_series(
    series: Series, other: RecordedUpload, field: str, ours: object, theirs: object
) -> str:
    return (
        f"series {series.first.header.series}: {field} is {shown(ours, 60)} in "
        f"{series.first.name} and {shown(theirs, 60)} in {other.name}. Expected the same in all "
        "uploads of a series: mend the headers, or give them series of their own."
    )


def _of_one_image(line: Sequence[Series]) -> dict[Series, str]:
    """Series of one line that hold an image of the same name."""
    holders: dict[str, list[Series]] = {}
    for series in line:
        for record in series.records:
            holders.setdefault(record.image_id, []).append(series)
    return {
        series: (
            f"two uploads of one round hold an image of the same name, {shown(image_id)} "
            f"({', '.join(each.first.name for each in together[:3])}). Give uploads of the same "
            "image one `series` in their headers, or the images different names in the truth "
            "folder."
        )
        for image_id, together in holders.items()
        if len(together) > 1
        for series in together
    }
