"""What recorded uploads are good for, in words."""

from __future__ import annotations

from pathlib import Path

from mjp_privacy.client.recorded.faults import faults
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.groups import Group, group_uploads
from mjp_privacy.client.recorded.loading import load_recorded
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.remarks import applicability, remarks


def check_uploads(folder: Path) -> tuple[str, bool]:
    """A text for a person, and whether every upload can be attacked."""
    uploads = UploadFolder(folder)
    groups = group_uploads(uploads.entries())
    lines: list[str] = []
    faulty = False
    for group in groups:
        said, bad = _said(group)
        lines += said
        faulty |= bad
    for name in uploads.unfinished():
        lines.append(f"{name}: no header beside it; its recorder was stopped. It is left out.")
    return "\n".join(lines), not faulty


def _said(group: Group) -> tuple[list[str], bool]:
    header, uploads = group.header, sum(len(one.uploads) for one in group.series)
    lines = [
        f"{group.name}: {uploads} upload(s) of {len(group.records)} image(s), {header.kind}, "
        f"batch {header.batch}, {header.steps} local step(s), "
        f"{'private images known' if group.scored else 'no private images: rows will be unscored'}"
    ]
    try:
        model = load_recorded(group.series[0].first)
    except UserError as error:
        return [*lines, f"  FAULT  {error}"], True
    found = [
        f"  FAULT  {upload.name}: {fault}"
        for one in group.series
        for upload in one.uploads
        for fault in faults(upload, model)
    ]
    if found:
        return [*lines, *found], True
    lines += [f"  note   {remark}" for remark in remarks(group, model)]
    reasons = applicability(group, model)
    lines.append(f"  applies: {', '.join(n for n, reason in reasons.items() if not reason)}")
    lines += [f"  not {name}: {reason}" for name, reason in reasons.items() if reason]
    return lines, False
