"""Sentences of the notes, each printed once with the lines it holds for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mjp_privacy.report.loading import Line


def which(lines: Iterable[Line], among: Sequence[Line]) -> str:
    """The numbers of `lines`: `lines 1–3, 5`, or `all lines` if they are all of `among`."""
    numbers = sorted(line.number for line in lines)
    if len(numbers) == len(among):
        return "all lines" if len(numbers) > 1 else "line 1"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)
    return f"line{'s' if len(numbers) > 1 else ''} {text}"


def grouped(lines: Sequence[Line], sentences_of: Callable[[Line], Iterable[str]]) -> list[str]:
    """The sentences of all lines; equal ones become one, which names the lines it holds for.

    For example `Input size 64; the paper's is 224. (lines 1–3)`.
    """
    lines_by_sentence: dict[str, list[Line]] = {}
    for line in lines:
        for sentence in dict.fromkeys(sentences_of(line)):
            lines_by_sentence.setdefault(sentence, []).append(line)
    return [
        f"{sentence} ({which(its_lines, lines)})"
        for sentence, its_lines in lines_by_sentence.items()
    ]
