"""Entries that name a file or a class wrongly, and defences that are not whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from mjp_privacy.client.defenses.registry import DEFENSES, defense_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError) as caught:
        Entry("attacks.nowhere:Yours").load()
    assert str(caught.value) == (
        "attacks.nowhere:Yours is registered, but there is no file attacks/nowhere.py. Write it, "
        "or mend the line that registers it."
    )


def test_a_missing_class_is_named_with_those_there_are() -> None:
    with pytest.raises(UserError) as caught:
        Entry("attacks.patch_gradient:PatchGradent").load()
    assert str(caught.value) == (
        "attacks.patch_gradient:PatchGradent is registered, but attacks/patch_gradient.py has no "
        "PatchGradent; its classes: PatchGradient. Did you mean PatchGradient? Mend the line that "
        "registers it."
    )


def test_what_a_file_lacks_itself_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_what_is_not_there.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        Entry("imports_what_is_not_there:Yours").load()


@dataclass(frozen=True)
class Idle:
    """Does nothing, and has no `apply`."""

    name: ClassVar[str] = "idle"
    main: ClassVar[str | None] = None


class Loose:
    """No dataclass."""

    name = "loose"
    main = None

    def apply(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "cls", "said"),
    [
        ("idle", "Idle", "Defense idle: tests.core.test_registry:Idle lacks apply. Expected a"),
        ("loose", "Loose", "Defense loose: tests.core.test_registry:Loose is not a dataclass."),
        ("busy", "Loose", "tests.core.test_registry:Loose is not a dataclass. Expected a frozen"),
    ],
)
def test_a_defense_that_is_not_whole_is_told_what_it_lacks(name: str, cls: str, said: str) -> None:
    entry = Entry(f"tests.core.test_registry:{cls}")
    with DEFENSES.registered(name, entry), pytest.raises(UserError) as caught:
        defense_of(name)
    assert said in str(caught.value)


def test_a_defense_under_another_name_than_its_own_is_an_error() -> None:
    entry = Entry("mjp_privacy.client.defenses.pruning:Prune")
    with DEFENSES.registered("yours", entry), pytest.raises(UserError) as caught:
        defense_of("yours 0.1")
    assert "Defense yours: mjp_privacy.client.defenses.pruning:Prune calls itself 'prune'." in str(
        caught.value
    )
