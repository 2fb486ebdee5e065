"""The work of `mjp check`: describes recorded uploads, their faults and which attacks apply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attacks.step import BREAKDOWN
from mjp_privacy.client.recorded.examined import Examined, examine
from mjp_privacy.client.recorded.faults import one_line
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.groups import Group, group_uploads
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.experiment.recorded import load_group
from mjp_privacy.experiment.upload_remarks import applicability, remarks


def check_uploads(folder: Path) -> tuple[str, bool]:
    """A report on all uploads of a folder, and whether every one of them can be attacked."""
    uploads = UploadFolder(folder)
    examined = examine(uploads)
    lines = list(_refused(examined))
    faulty = bool(lines)
    lines += [f"note: {remark}" for remark in examined.remarks]
    for group in group_uploads(examined.known, refused=examined.refused):
        group_lines, group_faulty = _described(group)
        lines += group_lines
        faulty |= group_faulty
    for name in uploads.unfinished():
        lines.append(
            f"{shown(name)}: no header beside it; its recorder was stopped. It is left out."
        )
    return "\n".join(lines), not faulty


def _refused(examined: Examined) -> Iterator[str]:
    """The uploads that cannot be attacked, with every reason."""
    if examined.refused:
        count = len(examined.refused)
        yield f"{count} upload(s) cannot be attacked; a run makes a failed row of each:"
    for name, reasons in examined.refused.items():
        yield from (f"  FAULT  {name}: {reason}" for reason in reasons)


def _described(group: Group) -> tuple[list[str], bool]:
    """The report's lines on one group, and whether it is faulty."""
    header, uploads = group.header, sum(len(series.uploads) for series in group.series)
    lines = [
        f"{group.name}: {uploads} upload(s) of {len(group.records)} image(s), {header.kind}, "
        f"batch {header.batch}, {header.steps} local step(s), "
        f"{'private images known' if group.scored else 'no private images: rows will be unscored'}"
    ]
    try:
        model = load_group(group)
    except UserError as error:
        return [*lines, f"  FAULT  {one_line(error, group.series[0].first.folder)}"], True
    try:
        lines += [f"  note   {remark}" for remark in remarks(group, model)]
        reasons = applicability(group, model)
    except BREAKDOWN as error:  # of numbers at the edge of their range; the run makes rows of it
        return [*lines, f"  FAULT  its linear algebra broke down: {shown(error)}"], True
    lines.append(f"  applies: {', '.join(n for n, reason in reasons.items() if not reason)}")
    lines += [f"  not {name}: {reason}" for name, reason in reasons.items() if reason]
    return lines, False
