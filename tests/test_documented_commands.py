"""Every `mjp` line in a block of the documentation has words that its command understands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.cli import main
from mjp_privacy.core.command import Usage
from mjp_privacy.core.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "attacks/*.md", "results/**/*.md", "mjp_privacy/**/*.md")
    for page in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^\s*```\w*\n(.*?)^\s*```", re.MULTILINE | re.DOTALL)


def command_lines() -> Iterator[tuple[str, str]]:
    """The page and the words behind `mjp` of every command in a block."""
    for page in PAGES:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            text = re.sub(r"\$\([^)]*\)", "NAME=model.safetensors", block.replace("\\\n", " "))
            text = re.sub(r"\$\{?\w+\}?", "J", text.replace("$preset", "paper"))
            for line in text.splitlines():
                found = re.match(r"\s*(?:.* -m mjp_privacy|mjp) +(.*)", line)
                if found:
                    yield str(page.relative_to(ROOT)), found[1]


COMMANDS = sorted(set(command_lines()))


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{p}: {x}"[:90] for p, x in COMMANDS])
def test_a_documented_command_is_understood(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Usage.parse

    def parse(self: Usage, *args: Any, **options: Any) -> Any:
        original(self, *args, **options)
        raise UserError("all words understood")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Usage, "parse", parse)
    words = shlex.split(line, comments=True)
    assert not any("…" in word for word in words), (
        f"{page}: a command that cannot be run as it stands"
    )
    for word in words:
        assert not word.endswith(".yaml") or (ROOT / word).is_file() or "/" not in word, word
    assert main(words) == 2
    assert "all words understood" in capsys.readouterr().err
