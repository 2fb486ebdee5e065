"""What the reductions chose: sentences for the notes, and every choice as a row of choices.csv."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from mjp_privacy.report.loading import Line
from mjp_privacy.report.notes import REASONS_SHOWN, Section, grouped, which
from mjp_privacy.report.reductions import RULES, WORST_CASE, DerivedLine

COLUMNS = ("line", "run", "reduction", "image_id", "chosen_line", "chosen_run_id", "chosen_attack")
TITLE = "Worst case and attacker's choice"


def choices_section(lines: Sequence[Line], derived: Sequence[DerivedLine]) -> Section:
    """What each derived line is made of, and which lines are controls."""
    items = [_sentence(line) for line in derived]
    items += grouped([*lines, *derived], _without)
    controls = [line for line in lines if line.role in ("floor", "ceiling")]
    if controls:
        items.append(
            f"Controls ({which(controls, lines)}) are no attacks: floors say what a score is "
            "worth, ceilings what an attack can reach. They may look at the truth, stand beside no "
            "published figure and are no candidates."
        )
    return Section(TITLE, tuple(items))


def _sentence(line: DerivedLine) -> str:
    how = (
        "an oracle selection, per image the attack of the highest PSNR (standard); an upper bound "
        "of what any selector gets"
        if line.role == WORST_CASE.name
        else "per image the attack of the least gradient residual; no truth enters the choice"
    )
    counts = ", ".join(f"{name} {count}" for name, count in line.counts.items())
    parts = [
        f"Line {line.number}, {line.attack}: {how}. Chosen on {len(line.chosen)} images: {counts}."
    ]
    if line.uploads > 1:
        parts.append(f"Its attacks may use up to {line.uploads} uploads of one image.")
    if fewer := _fewer(line):
        lacking = "score" if line.role == WORST_CASE.name else "residual"
        parts.append(f"On {fewer} of these images not every attack has a {lacking}.")
    return " ".join(parts)


def _fewer(line: DerivedLine) -> int:
    """Images on which a member has nothing to be chosen by, so that there were fewer of them."""
    (rule,) = (rule for rule in RULES if rule.name == line.role)
    scored = [set(member.scored(rule.metric, rule.variant).index) for member in line.members]
    return sum(any(image not in known for known in scored) for image in line.chosen)


def _without(line: Line) -> list[str]:
    """Images that no attack of the group gave; ordinary lines have their own section."""
    if not isinstance(line, DerivedLine):
        return []
    rows = line.scores("psnr", "standard")
    rows = rows[rows["status"] != "ok"]
    reasons = Counter(zip(rows["status"].astype(str), rows["reason"].astype(str), strict=True))
    return [
        f"{'1 image' if count == 1 else f'{count} images'} {status}: {reason}"
        for (status, reason), count in reasons.most_common(REASONS_SHOWN)
    ]


def write_choices(derived: Sequence[DerivedLine], path: Path) -> None:
    """One row an image and derived line, in the order of the line, then of the images."""
    rows = [
        (
            *(line.number, line.run, line.cell.attack.title, image_id, chosen.number),
            *(chosen.run_id, chosen.cell.attack.title),
        )
        for line in derived
        for image_id, chosen in sorted(line.chosen.items())
    ]
    pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(path, index=False, lineterminator="\n")
