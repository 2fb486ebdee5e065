"""A folder with a config and images, and `mjp` commands in it as a user gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mjp_privacy.cli import main
from tests.helpers.runs import one_cell, photographs


class Workplace:
    """A folder with a config and images; commands in it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys
        self.images = photographs(root / "images", 3)
        self.run = root / "run"
        self.config = self.write("one.yaml", one_cell())

    def write(self, name: str, content: dict[str, Any]) -> Path:
        path = self.root / name
        path.write_text(yaml.safe_dump(content))
        return path

    def attack(self, *more: object, **replaced: object) -> tuple[int, str]:
        """Exit code and what was printed; a keyword replaces an argument, None leaves it out."""
        given = {"config": self.config, "images": self.images, "out": self.run, "device": "cpu"}
        given |= replaced
        argv = [given.pop("config")]
        for name, value in given.items():
            argv += [] if value is None else [f"--{name}", value]
        return self.command("attack", *argv, *more)

    def report(self, *argv: object) -> tuple[int, str]:
        return self.command("report", *argv)

    def command(self, *argv: object) -> tuple[int, str]:
        """`mjp` with these arguments: exit code and what was printed."""
        self.capsys.readouterr()
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as stop:  # tyro's own: a wrong flag, or --help
            code = int(stop.code or 0)
        printed = self.capsys.readouterr()
        text = printed.out + printed.err
        assert "Traceback" not in text
        return code, text
