"""Whose fault an error is: its place and its text in a line."""

from __future__ import annotations

from mjp_privacy.core.errors import format_error


def error_of(source: str, name: str) -> BaseException:
    try:
        exec(compile(source, name, "exec"), {})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_place_is_the_innermost_line_that_is_no_librarys() -> None:
    inner = "import json\n\njson.loads('{')"
    assert format_error(error_of(inner, "/home/me/project/attacks/mine.py")).endswith(
        "(char 1) (attacks/mine.py:3)"
    )
    installed = "/x/lib/python3.11/site-packages/attacks/april.py"
    assert format_error(error_of("1 / 0", installed)).endswith("(attacks/april.py:1)")
    other = "/x/lib/python3.11/site-packages/numpy/core.py"
    assert "numpy" not in format_error(error_of("1 / 0", other))


def test_an_error_is_one_line_of_bounded_length() -> None:
    error = error_of("raise ValueError('\\x1b[2J' + 'a' * 5000 + '\\nmore')", "a/b.py")
    assert len(format_error(error)) < 300
    assert "\x1b" not in format_error(error)
    assert "more" not in format_error(error)


def test_an_error_whose_text_fails_is_named_by_its_class() -> None:
    source = "class E(Exception):\n  def __str__(self): return 1 / 0\nraise E"
    assert format_error(error_of(source, "a/b.py")) == "E (a/b.py:3)"
