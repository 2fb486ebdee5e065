"""Every figure in README.md and results/ is computed again from the published rows.

    make results-check            # each claim: ok, or WRONG with what was expected
    make results-check WRITE=1    # writes tables and figures again; the words around them stay

`results/claims.yaml` says what is claimed where:

    lines:   a name for one line of a rows file, or one row of a CSV
    claims:  a sentence of a file with `{line.figure}` in place of each figure
    tables:  what stands between `<!-- table: NAME begin -->` and its end (`claim_tables.py`)
    unchecked:  sentences whose rows were not kept, with the reason
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, read_mapping
from mjp_privacy.report.results.figures import Figures, text_of
from mjp_privacy.report.results.lines import select
from mjp_privacy.report.results.tables import block_of, render, with_block

TEXT = FileKind("a text that claims figures", "Correct its name in results/claims.yaml.")
PLACE = re.compile(r"\{(\w+)\.(\w+)(?::([^}]*))?\}")
NUMBER = r"(?:-?\d+(?:\.\d+)?(?:e-?\d+)?|∞|–)"
FIGURE = (
    rf"(?<![\d.])({NUMBER}(?:–{NUMBER})?(?:,\s+the\s+cap|\s+\[{NUMBER},\s+{NUMBER}\]"
    rf"|\s+of\s+\d+\s+\({NUMBER}\s+%,\s+{NUMBER}–{NUMBER}\))?(?:\s+\(over\s+\d+\))?)(?!\.?\d)"
)
"""What may stand in the place of a figure: all that `LineFigures` prints, whatever its value."""


@dataclass(frozen=True)
class Verdict:
    """One claim: whether it holds, and if not, what was expected and what stands there."""

    file: str
    claim: str
    expected: str
    found: str | None
    unchecked: str | None = None  # why the figures are not computed again

    @property
    def holds(self) -> bool:
        """Whether the expected text stands in the file."""
        return self.found == self.expected

    def __str__(self) -> str:
        if self.holds and self.unchecked:
            return f"–      {self.file}: {_short(self.expected)} (not checked: {self.unchecked})"
        if self.holds:
            return f"ok     {self.file}: {_short(self.expected)}"
        found = "nothing like it" if self.found is None else f"“{self.found}”"
        expected = f"       expected “{self.expected}”\n       found {found}"
        return f"WRONG  {self.file}: {self.claim}\n{expected}"


@dataclass(frozen=True)
class Claims:
    """The claims of a repository: Claims(Path(".")).verdicts()."""

    root: Path

    @cached_property
    def content(self) -> Mapping[str, Any]:
        """results/claims.yaml."""
        return read_mapping(self.folder / "claims.yaml")

    @property
    def folder(self) -> Path:
        """results/, which the paths of rows start from."""
        return self.root / "results"

    @cached_property
    def figures(self) -> dict[str, Figures]:
        """The named lines."""
        return {name: select(one, self.folder) for name, one in self.content["lines"].items()}

    def verdicts(self) -> Iterator[Verdict]:
        """Sentences first, then tables, then the sentences that cannot be checked."""
        for claim in self.content.get("claims", ()):
            yield self._sentence(claim["file"], claim["text"])
        for table in self.content.get("tables", ()):
            found = block_of(self._read(table["file"]), table["name"])
            expected = render(table, self.figures, self.folder)
            yield _table_verdict(table["file"], table["name"], expected, found)
        for claim in self.content.get("unchecked", ()):
            yield replace(self._sentence(claim["file"], claim["text"]), unchecked=claim["why"])

    def write(self) -> None:
        """Write every table and every figure of a sentence again."""
        for claim in self.content.get("claims", ()):
            text, (pattern, values) = self._read(claim["file"]), self._pattern(claim["text"])
            match = pattern.search(text)
            if match is not None:
                self._path(claim["file"]).write_text(_filled(text, match, values), "utf-8")
        for table in self.content.get("tables", ()):
            path, block = self._path(table["file"]), render(table, self.figures, self.folder)
            path.write_text(with_block(self._read(table["file"]), table["name"], block), "utf-8")

    def _path(self, file: str) -> Path:
        return self.root / file

    def _read(self, file: str) -> str:
        return TEXT.text(self._path(file))

    def _sentence(self, file: str, template: str) -> Verdict:
        pattern, values = self._pattern(template)
        words = iter(values)
        expected = PLACE.sub(lambda _: next(words), template)
        found = [" ".join(match[0].split()) for match in pattern.finditer(self._read(file))]
        expected = " ".join(expected.split())
        shown = expected if expected in found else (found[0] if found else None)
        return Verdict(file, template, expected, shown)

    def _pattern(self, template: str) -> tuple[re.Pattern[str], list[str]]:
        """What finds the sentence whatever its figures, and the figures it should have."""
        parts, values, end = [], [], 0
        for match in PLACE.finditer(template):
            parts += [_words(template[end : match.start()]), FIGURE]
            values.append(self._figure(*match.groups()))
            end = match.end()
        pattern = "".join([*parts, _words(template[end:])])
        return re.compile(pattern, re.DOTALL), values

    def _figure(self, name: str, figure: str, spec: str | None) -> str:
        if name not in self.figures:
            raise UserError(f"claims.yaml names the line {name!r}, which stands not under lines:.")
        return text_of(self.figures[name].figure(figure), spec or "")


def _words(text: str) -> str:
    """A pattern for the text that allows any white space where it has some."""
    return r"\s+".join(map(re.escape, re.split(r"\s+", text)))


def _filled(text: str, match: re.Match[str], values: Sequence[str]) -> str:
    for group in range(len(values), 0, -1):
        text = text[: match.start(group)] + values[group - 1] + text[match.end(group) :]
    return text


def _short(text: str) -> str:
    return text if len(text) < 110 else f"{text[:107]}..."


def _table_verdict(file: str, name: str, expected: str, found: str | None) -> Verdict:
    """Of a table that differs, the first line that does."""
    title = f"table {name}"
    if found is None or found == expected:
        return Verdict(file, title, title, None if found is None else title)
    pairs = zip(expected.splitlines(), found.splitlines(), strict=False)
    differing = [(wanted, stands) for wanted, stands in pairs if wanted != stands]
    wanted, stands = differing[0] if differing else ("as many lines", "more or fewer lines")
    return Verdict(file, title, wanted, stands)


def main(argv: Sequence[str] | None = None) -> None:
    """Check, or write again; exit 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description="Check every published figure against its rows.")
    parser.add_argument("--root", type=Path, default=Path(), help="of the repository")
    parser.add_argument("--write", action="store_true", help="write tables and figures again")
    given = parser.parse_args(argv)
    claims = Claims(given.root)
    try:
        if given.write:
            claims.write()
        verdicts = list(claims.verdicts())
    except UserError as error:
        sys.exit(str(error))
    for verdict in verdicts:
        print(verdict)
    wrong = sum(not verdict.holds for verdict in verdicts)
    unchecked = sum(verdict.unchecked is not None for verdict in verdicts)
    print(f"{len(verdicts)} claims: {wrong} wrong, {unchecked} not checked")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
