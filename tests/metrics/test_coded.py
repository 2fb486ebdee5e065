"""Coded words behave as the lists that they stand for."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mjp_privacy.metrics.coded import Coded

WORDS = st.lists(st.sampled_from(["ok", "failed", "a photograph", ""]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(WORDS, st.data())
def test_coded_words_are_their_list(words: list[str], data: st.DataObject) -> None:
    coded = Coded.of(words)
    assert Coded.of(coded) is coded
    assert len(coded) == len(words)
    assert coded.tolist() == words
    assert coded.counts() == {word: words.count(word) for word in sorted(set(words))}
    chosen = data.draw(st.lists(st.booleans(), min_size=len(words), max_size=len(words)))
    some = coded[np.array(chosen, dtype=bool)]
    left = [word for word, kept in zip(words, chosen, strict=True) if kept]
    assert some.tolist() == left
    assert some.present().tolist() == left
    assert some.present().words == tuple(sorted(set(left)))
    for word in ("ok", "never"):
        assert some.equal(word).tolist() == [kept == word for kept in left]
        assert some.equal(word).dtype == bool


def test_equal_words_take_no_memory() -> None:
    words = Coded.equal_words("ok", 5)
    assert (len(words), words.size, words.words) == (5, 0, ("ok",))
    assert words.tolist() == ["ok"] * 5
    assert words.counts() == {"ok": 5}
    assert words.equal("ok").tolist() == [True] * 5
    assert words.equal("failed").tolist() == [False] * 5
    by_mask = words[np.array([True, False, True, False, False])]
    by_place = words[np.array([4, 0, 1])]
    assert (len(by_mask), by_mask.size) == (2, 0)
    assert (len(by_place), by_place.size) == (3, 0)
    assert by_place.words == ("ok",)
