"""Short names of lines in a chart: what they all share is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mjp_privacy.report.lines import Line
from mjp_privacy.report.pictures.pixels import shorten

WORDS = {"worst_case": "best", "attackers_choice": "attacker's choice"}
"""What reductions over all attacks on a client are called."""


def short_names(lines: Sequence[Line]) -> list[str]:
    """The attack of each line, and before it whatever differs between the lines.

    Lines that would have equal names get their numbers in the tables behind them.
    """
    facts = [_facts(line) for line in lines]
    varying = [i for i in range(len(facts[0])) if len({f[i] for f in facts}) > 1] if facts else []
    names = [
        " ".join(part for part in (*(fact[i] for i in varying), _attack(line)) if part)
        for line, fact in zip(lines, facts, strict=True)
    ]
    shared = Counter(names)
    return [
        name if shared[name] == 1 else f"{name} (line {line.number})"
        for line, name in zip(lines, names, strict=True)
    ]


def _facts(line: Line) -> tuple[str, ...]:
    cell = line.cell
    gamma = f"γ {cell.gamma:g}".replace(" 0.", " .") if cell.gamma else ""
    dtype = cell.dtype.replace("float", "f")
    return shorten(line.run, 16), shorten(cell.model.label, 14), f"({cell.setting})", gamma, dtype


def _attack(line: Line) -> str:
    """Its label in words a reader knows: reductions say what they choose by."""
    if line.role not in WORDS:
        return line.attack
    return f"{WORDS[line.role]}, {'1 upload' if line.uploads == 1 else 'any uploads'}"
