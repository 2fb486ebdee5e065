"""Attacks and defences of a test's own, in modules whose files the test edits between two runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from attacks import ATTACKS
from mjp_privacy.client.defenses.registry import DEFENSES, defense_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from tests.helpers.runs import attack, one_cell

PACKAGE = "workbench"

TONE = '''"""Pictures of one tone."""
from dataclasses import dataclass
from typing import ClassVar

import torch

from workbench.shade import shade
from mjp_privacy.interfaces import Reconstruction, Usual


@dataclass(frozen=True)
class Tone(Usual):
    name: ClassVar[str] = "tone"

    def needs(self, model):
        return ["patch_embed.proj.weight"]

    def unsupported(self, view):
        return None

    def run(self, view, *, generator):
        update = view.updates[0]
        count = update.batch * len(update.grads["patch_embed.proj.weight"])
        size = view.pixels.size
        return Reconstruction(torch.full((count, 3, size, size), shade()))
'''
SHADE = '''"""Between the attack and what it needs."""
from .levels import LEVEL


def shade():
    return LEVEL
'''
LEVELS = "LEVEL = 0.5\n"

DIMMED = '''"""Sends half of the upload."""
from dataclasses import dataclass
from typing import ClassVar

from mjp_privacy.client.defenses.disturbance import Disturbed


@dataclass(frozen=True)
class Dimmed:
    """Sends half."""

    name: ClassVar[str] = "dimmed"
    main: ClassVar[str | None] = None

    def apply(self, sent, draws):
        return Disturbed({name: g * 0.5 for name, g in sent.items()}, {}, {})
'''


class Workbench:
    """A package of source files; `edit` writes one and makes Python import it anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / PACKAGE
        self.folder.mkdir()
        for name, text in {
            "__init__": "",
            "tone": TONE,
            "shade": SHADE,
            "levels": LEVELS,
            "dimmed": DIMMED,
        }.items():
            (self.folder / f"{name}.py").write_text(text)

    def edit(self, module: str, old: str, new: str) -> None:
        """Replace a text in a module, or make a new module of `new` where `old` is empty."""
        path = self.folder / f"{module}.py"
        text = path.read_text() if old else ""
        assert old in text
        path.write_text(text.replace(old, new) if old else new)
        forget()


def forget() -> None:
    """Take the package for never imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    importlib.invalidate_caches()
    defense_of.cache_clear()


@contextmanager
def workbench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    """The package, with its attack `tone` and its defence `dimmed` registered."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two edits can share a second
    with ExitStack() as registered:
        registered.callback(forget)
        registered.enter_context(ATTACKS.registered("tone", Entry("workbench.tone:Tone", "")))
        registered.enter_context(DEFENSES.registered("dimmed", Entry("workbench.dimmed:Dimmed")))
        yield Workbench(folder)


# runs of it ---------------------------------------------------------------------------------------

TWO = one_cell(attacks=[{"name": "tone"}, {"name": "grey"}], block=3)


def refusal(images: Path, out: Path, config: Mapping[str, Any] = TWO, **arguments: Any) -> str:
    """What the same command says of the results there; it must not have written a file."""
    before = everything(out)
    with pytest.raises(UserError) as raised:
        attack(images, out, config, **arguments)
    assert everything(out) == before
    return str(raised.value)


def everything(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
