"""What a report says of itself when it is written: what to print, and whether anything failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mjp_privacy.report.console import console_text
from mjp_privacy.report.contents import Contents
from mjp_privacy.report.measures import image_counts, not_run
from mjp_privacy.report.unreadable import unreadable_images


@dataclass(frozen=True)
class ReportSummary:
    """What was written, what to print, and whether anything failed."""

    console: str
    files: tuple[Path, ...]
    lines: int
    failed_lines: int  # cells that failed or have no rows; unsupported ones are not failures
    failed_images: int
    not_run: int  # images that a killed run still owes, over all lines
    damaged: int = 0  # files whose rows are in no figure

    @property
    def any_failed(self) -> bool:
        """Whether any line or image failed, or has not been run yet."""
        return self.failed_lines > 0 or self.failed_images > 0 or self.not_run > 0


def summary_of(contents: Contents, files: Sequence[Path], *, everything: bool) -> ReportSummary:
    """The summary of a report whose files were written."""
    lines = contents.lines
    table = contents.standard if everything else None
    return ReportSummary(
        console=console_text(contents.card, contents.reasons, table),
        files=tuple(files),
        lines=len(lines),
        failed_lines=sum(line.status == "failed" for line in lines),
        failed_images=sum(
            max(image_counts(line, variant).failed for variant in ("paper", "standard"))
            + len(unreadable_images([line]))
            for line in lines
        ),
        not_run=sum(not_run(line) for line in lines),
        damaged=sum(len(line.left_out) for line in lines),
    )
