"""The work of `mjp check`: describes recorded uploads, their faults and which attacks apply."""

from __future__ import annotations

from pathlib import Path

from mjp_privacy.client.recorded.faults import faults
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.groups import Group, group_uploads
from mjp_privacy.client.recorded.loading import load_recorded
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.upload_remarks import applicability, remarks


def check_uploads(folder: Path) -> tuple[str, bool]:
    """A report on all uploads of a folder, and whether every one of them can be attacked."""
    uploads = UploadFolder(folder)
    groups = group_uploads(uploads.entries())
    lines: list[str] = []
    faulty = False
    for group in groups:
        group_lines, group_faulty = _described(group)
        lines += group_lines
        faulty |= group_faulty
    for name in uploads.unfinished():
        lines.append(f"{name}: no header beside it; its recorder was stopped. It is left out.")
    return "\n".join(lines), not faulty


def _described(group: Group) -> tuple[list[str], bool]:
    """The report's lines on one group, and whether it is faulty."""
    header, uploads = group.header, sum(len(series.uploads) for series in group.series)
    lines = [
        f"{group.name}: {uploads} upload(s) of {len(group.records)} image(s), {header.kind}, "
        f"batch {header.batch}, {header.steps} local step(s), "
        f"{'private images known' if group.scored else 'no private images: rows will be unscored'}"
    ]
    try:
        model = load_recorded(group.series[0].first)
    except UserError as error:
        return [*lines, f"  FAULT  {error}"], True
    fault_lines = [
        f"  FAULT  {upload.name}: {fault}"
        for series in group.series
        for upload in series.uploads
        for fault in faults(upload, model)
    ]
    if fault_lines:
        return [*lines, *fault_lines], True
    lines += [f"  note   {remark}" for remark in remarks(group, model)]
    reasons = applicability(group, model)
    lines.append(f"  applies: {', '.join(n for n, reason in reasons.items() if not reason)}")
    lines += [f"  not {name}: {reason}" for name, reason in reasons.items() if reason]
    return lines, False
