"""What was tried and what came of it, as lines of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Figures:
    """One line of the table: Figures("kills", "attack"), then `count` and `complain`."""

    trial: str
    what: str
    tried: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a number of the line."""
        self.numbers[name] = self.numbers.get(name, 0) + number

    def complain(self, text: str) -> None:
        """Note something that must not be."""
        self.complaints.append(text)

    @property
    def cells(self) -> list[str]:
        """The line's columns."""
        outcome = ", ".join(f"{number} {name}" for name, number in self.numbers.items())
        wrong = str(len(self.complaints)) if self.complaints else "none"
        return [self.trial, self.what, str(self.tried), outcome or "-", wrong]


HEAD = ["trial", "of", "tried", "outcome", "wrong"]


def table(lines: Sequence[Figures]) -> str:
    """All lines as a Markdown table."""
    cells = [HEAD, *(line.cells for line in lines)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    padded = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    padded.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(padded)
