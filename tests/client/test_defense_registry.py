"""Defences that are registered and not whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from mjp_privacy.client.defenses.registry import DEFENSES, defense_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry


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


@pytest.mark.parametrize("cls", ["Idle", "Loose"])
def test_a_defense_that_is_not_whole_is_named(cls: str) -> None:
    where = f"tests.client.test_defense_registry:{cls}"
    with DEFENSES.registered("idle", Entry(where)), pytest.raises(UserError) as caught:
        defense_of("idle")
    assert where in str(caught.value)


def test_a_defense_under_another_name_than_its_own_is_an_error() -> None:
    entry = Entry("mjp_privacy.client.defenses.compression:Prune")
    with DEFENSES.registered("yours", entry), pytest.raises(UserError, match=r"yours.*'prune'"):
        defense_of("yours 0.1")
