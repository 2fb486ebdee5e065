"""Long lists of few different words, by a number for each entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Coded:
    """A list of words: Coded.of(["ok", "failed", "ok"]) holds the codes 1, 0, 1 of sorted words."""

    codes: NDArray[np.int32]
    words: tuple[str, ...]  # sorted, each once; some may not occur

    @classmethod
    def of(cls, words: Sequence[str] | Coded) -> Coded:
        """The list as it is, if it is coded already."""
        if isinstance(words, Coded):
            return words
        different = sorted(set(words))
        code_of = {word: code for code, word in enumerate(different)}
        codes = np.fromiter((code_of[word] for word in words), np.int32, len(words))
        return cls(codes, tuple(different))

    @classmethod
    def equal_words(cls, word: str, times: int) -> Coded:
        """The same word so many times; it takes no memory."""
        return cls(np.broadcast_to(np.int32(0), (times,)), (word,))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, chosen: NDArray[np.bool_] | NDArray[np.integer]) -> Coded:
        if not self.size and self.words:
            count = np.count_nonzero(chosen) if chosen.dtype == bool else len(chosen)
            return Coded.equal_words(self.words[0], int(count))
        return Coded(self.codes[chosen], self.words)

    @property
    def size(self) -> int:
        """Its bytes in memory."""
        return self.codes.nbytes if self.codes.strides != (0,) else 0

    def equal(self, word: str) -> NDArray[np.bool_]:
        """Which entries are this word."""
        if not self.size:
            return np.full(len(self.codes), self.words == (word,))
        if word not in self.words:
            return np.zeros(len(self.codes), dtype=bool)
        same: NDArray[np.bool_] = self.codes == self.words.index(word)
        return same

    def counts(self) -> dict[str, int]:
        """How often each word occurs, without those that do not."""
        times = np.bincount(self.codes, minlength=len(self.words))
        return {word: int(n) for word, n in zip(self.words, times, strict=True) if n}

    def present(self) -> Coded:
        """The same list, whose words all occur."""
        times = np.bincount(self.codes, minlength=len(self.words))
        if times.all():
            return self
        kept = np.flatnonzero(times)
        place = np.zeros(len(self.words), dtype=np.int32)
        place[kept] = np.arange(len(kept), dtype=np.int32)
        return Coded(place[self.codes], tuple(self.words[at] for at in kept))

    def tolist(self) -> list[str]:
        """The words, one for each entry."""
        return [self.words[code] for code in self.codes.tolist()]
