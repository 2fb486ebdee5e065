"""Words of strangers in messages: one line, drawn and never obeyed."""

import pytest

from mjp_privacy.core.text import cut, first_of, plain, shown
from mjp_privacy.report.page.render import undirected


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("photo 1.png", "photo 1.png"),
        ("grün 猫 é", "grün 猫 é"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("a\x07\x9bb", r"a\x07\x9bb"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("a\u2028b\u200bc\ufeff", r"a\u2028b\u200bc\ufeff"),
        ("a\udcffb", r"a\udcffb"),
        ("a\0b", r"a\x00b"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_invisible_characters_are_escaped(text: str, drawn: str) -> None:
    assert shown(text) == drawn
    shown(text).encode()  # a lone surrogate would not be printable


def test_a_long_text_keeps_its_ends() -> None:
    text = shown("a" * 5000 + "z")
    assert len(text) <= 300
    assert text.startswith("aaa")
    assert text.endswith("z")
    assert "..." in text
    assert shown("x" * 300) == "x" * 300
    assert cut("abcdefghij", 7) == "ab...ij"


def test_a_long_text_of_escapes_stays_short() -> None:
    assert len(shown("\x1b" * 5000)) <= 300


def test_lines_may_be_kept() -> None:
    assert plain("a\nb\x1b", keep="\n") == "a\nb\\x1b"
    assert shown(5) == "5"


def test_characters_that_turn_words_are_written_out_and_others_stay() -> None:
    turned = "a\u202egpj\u2066x\u2069\u200f\u061cz"
    assert undirected(turned) == "a⟨U+202E⟩gpj⟨U+2066⟩x⟨U+2069⟩⟨U+200F⟩⟨U+061C⟩z"
    assert undirected("שלום 👩\u200d🔬 é\n") == "שלום 👩\u200d🔬 é\n"


def test_the_first_of_many_names() -> None:
    assert first_of(["a"], 1) == "a"
    assert first_of([1, 2, 3], 2) == "1, 2, …"
    assert first_of([], 2) == ""
