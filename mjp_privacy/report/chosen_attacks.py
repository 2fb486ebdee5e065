"""Which attack each derived line took for which image: as notes, and as rows of choices.csv."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mjp_privacy.report.grouping import grouped, which
from mjp_privacy.report.loading import Line
from mjp_privacy.report.notes import REASONS_SHOWN, Section
from mjp_privacy.report.worst_case import RULES, WORST_CASE, DerivedLine

COLUMNS = ("line", "run", "reduction", "image_id", "chosen_line", "chosen_run_id", "chosen_attack")
TITLE = "Worst case and attacker's choice"


def choices_section(lines: Sequence[Line], derived: Sequence[DerivedLine]) -> Section:
    """Notes on what each derived line is made of, and on which lines are controls."""
    items = [_sentence(line) for line in derived]
    items += grouped([*lines, *derived], _missing_images)
    controls = [line for line in lines if line.role in ("floor", "ceiling")]
    if controls:
        items.append(
            f"Controls ({which(controls, lines)}) are not attacks: a floor shows what a score is "
            "worth, a ceiling what an attack can reach. They may use the private images, so they "
            "are not compared with published figures, and no derived line chooses them."
        )
    return Section(TITLE, tuple(items))


def _sentence(line: DerivedLine) -> str:
    how = (
        "an oracle selection that takes, for each image, the attack with the highest PSNR "
        "(standard); an upper bound on what any selector can reach"
        if line.role == WORST_CASE.name
        else "for each image the attack with the smallest gradient residual; the private images "
        "are not used for the choice"
    )
    counts = ", ".join(f"{name} {count}" for name, count in line.counts.items())
    parts = [
        f"Line {line.number}, {line.attack}: {how}. A choice was made for {len(line.chosen)} "
        f"images: {counts}."
    ]
    if line.uploads > 1:
        parts.append(f"Its attacks may use up to {line.uploads} uploads of one image.")
    if incomplete := _incomplete_choices(line):
        lacking = "score" if line.role == WORST_CASE.name else "residual"
        parts.append(
            f"For {incomplete} of these images not every attack could be compared: at least one "
            f"has no {lacking}."
        )
    return " ".join(parts)


def _incomplete_choices(line: DerivedLine) -> int:
    """On how many images at least one member has no value to be chosen by."""
    (rule,) = (rule for rule in RULES if rule.name == line.role)
    images = line.chosen.images
    compared = np.zeros(len(images), dtype=int)
    for member in line.members:
        column = member.column(rule.metric, rule.variant)
        compared[images.places(member.images.ids)[column.at[column.scored]]] += 1
    return int(((line.chosen.member >= 0) & (compared < len(line.members))).sum())


def _missing_images(line: Line) -> list[str]:
    """Why images of a derived line have no reconstruction; other lines have their own section."""
    if not isinstance(line, DerivedLine):
        return []
    column = line.column("psnr", "standard")
    column = column.chosen(~column.statuses.equal("ok"))
    reasons = Counter(zip(column.statuses.tolist(), column.reasons.tolist(), strict=True))
    return [
        f"{'1 image' if count == 1 else f'{count} images'} {status}: {reason}"
        for (status, reason), count in reasons.most_common(REASONS_SHOWN)
    ]


def write_choices(derived: Sequence[DerivedLine], path: Path) -> None:
    """Write one row per derived line and image, ordered by line, then by image."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for line in derived:
            before = (line.number, line.run, line.cell.attack.title)
            after = [(m.number, m.run_id, m.cell.attack.title) for m in line.members]
            choice = line.chosen
            chosen = zip(choice.images.ids, choice.member.tolist(), strict=True)
            rows.writerows((*before, image, *after[at]) for image, at in chosen if at >= 0)
