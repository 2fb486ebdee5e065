"""Words that the glossary explains, linked to it wherever the page says them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markupsafe import Markup


class Terms:
    """The glossary as links: `Terms([("γ", "share of …")]).term("γ")` is an anchor to `#term-γ`."""

    def __init__(self, glossary: Sequence[tuple[str, str]]) -> None:
        self.entries = tuple(
            (identifier, name, text)
            for identifier, (name, text) in zip(_identifiers(glossary), glossary, strict=True)
        )
        self._by_name = {name.casefold(): (key, text) for key, name, text in self.entries}
        names = sorted((name for _, name, _ in self.entries if _findable(name)), key=len)
        choices = "|".join(re.escape(name) for name in reversed(names))
        self._pattern = re.compile(rf"(?<![\w-])(?:{choices})(?![\w-])", re.I) if names else None

    def term(self, label: str, *names: str) -> Markup:
        """`label`, linked to the first of `names` (or itself) that the glossary has."""
        for name in names or (label,):
            found = self._by_name.get(name.casefold())
            if found:
                return _anchor(label, *found)
        return Markup.escape(label)

    def definition(self, *names: str) -> str:
        """What the glossary says of the first of `names` that it has; empty without any."""
        found = (self._by_name.get(name.casefold()) for name in names)
        return next((entry[1] for entry in found if entry), "")

    def linked(self, text: str) -> Markup:
        """A text, escaped, with each term linked where it is said first."""
        if self._pattern is None:
            return Markup.escape(text)
        parts, end, seen = [], 0, set()
        for match in self._pattern.finditer(text):
            name = match[0].casefold()
            if name in seen or name not in self._by_name:
                continue
            seen.add(name)
            parts += [Markup.escape(text[end : match.start()]), self.term(match[0])]
            end = match.end()
        return Markup("").join([*parts, Markup.escape(text[end:])])


def _anchor(label: str, identifier: str, text: str) -> Markup:
    anchor = Markup('<a class="term" href="#{}" title="{}">{}</a>')
    return anchor.format(identifier, text, label)


def _identifiers(glossary: Sequence[tuple[str, str]]) -> list[str]:
    """An anchor for each entry; equal ones are numbered."""
    found: list[str] = []
    for name, _ in glossary:
        plain = "term-" + (re.sub(r"[^\w]+", "-", name.casefold()).strip("-") or "entry")
        twins = sum(key == plain or key.startswith(f"{plain}--") for key in found)
        found.append(f"{plain}--{twins + 1}" if twins else plain)
    return found


def _findable(name: str) -> bool:
    """Whether a running text can be searched for it: `a` and `b` are words of English."""
    return len(name) > 1 or not name.isascii()
