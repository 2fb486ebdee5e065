"""Names of files and folders made of labels and image ids, whatever stands in those.

    UniqueNames().of("MJP γ .27 / ViT")     "MJP_gamma_.27_ViT"

A name holds letters, digits and `._+-` alone, is short, is none of Windows's devices, does not
hide, and is given once: texts that differ get names that differ, also on a disk for which upper and
lower case are the same.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field

LONGEST = 80
EDGES = "._-+ "
"""Not at either end of a name: a dot in front hides a file, a minus looks like an option."""

SPELT = str.maketrans({"γ": "gamma", "σ": "sigma", "ε": "epsilon", "×": "x", "≥": "ge", "≤": "le"})

DEVICES = {"con", "prn", "aux", "nul"} | {
    f"{port}{digit}" for port in ("com", "lpt") for digit in range(10)
}
"""Names that Windows takes for devices, with any ending behind a dot."""


def slug(text: str, length: int = LONGEST) -> str:
    """The text as a name: `slug("a/b: ü")` is `a_b_u`. Different texts may have the same slug."""
    plain = unicodedata.normalize("NFKD", text.translate(SPELT))
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    name = re.sub(r"[^A-Za-z0-9._+-]+", "_", plain)
    name = re.sub(r"\.{2,}", ".", name)[:length].strip(EDGES)
    if name.split(".")[0].lower() in DEVICES:
        name = f"x_{name}"[:length]
    return name or "unnamed"


@dataclass
class UniqueNames:
    """Gives every key a name of its own, and the same one when it is asked again.

    names = UniqueNames(taken=("original",)); names.of("a/b"), names.of("a:b")
    gives "a_b" and "a_b-" with eight digits of the text's hash
    """

    taken: Iterable[str] = ()
    length: int = LONGEST
    _given: dict[object, str] = field(default_factory=dict, init=False)
    _used: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._used = {name.casefold() for name in self.taken}

    def of(self, text: str, key: object = None, mark: str = "") -> str:
        """The name for a text.

        key   what the name belongs to, where two things may have the same text; None: the text
        mark  what tells it from others of the same text; empty: a hash of the text
        """
        key = text if key is None else key
        if key not in self._given:
            self._given[key] = self._new(text, mark or digest(text))
        return self._given[key]

    def _new(self, text: str, mark: str) -> str:
        first = slug(text, self.length)
        stem = first[: self.length - len(mark) - 1].strip(EDGES)
        name, tries = first, 1
        if len(text) > self.length:  # what was cut off may be what tells it from others
            name = f"{stem}-{mark}"
        while name.casefold() in self._used:
            name = f"{stem}-{mark}" if tries == 1 else f"{stem}-{mark}-{tries}"
            tries += 1
        self._used.add(name.casefold())
        return name


def digest(text: str) -> str:
    """Eight digits that follow from the text."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
