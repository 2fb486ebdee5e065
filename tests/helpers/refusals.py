"""Command lines that are refused."""

import pytest

from mjp_privacy.cli import main


def refused(capsys: pytest.CaptureFixture[str], named: str, *words: object) -> None:
    """The command ends with exit code 2 and says once what is wrong, with this name in it."""
    assert main([*map(str, words)]) == 2, words
    said = capsys.readouterr().err
    assert named in said
    assert said.count("error: ") == 1
