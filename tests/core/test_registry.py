"""Entries that name a file or a class wrongly, and fields of a checked dataclass."""

from __future__ import annotations

from typing import Annotated

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.core.schema import (
    Count,
    Label,
    Name,
    NotNegative,
    PathText,
    Positive,
    Seed,
    Share,
    Switch,
    parse,
    schema,
)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("attacks.nowhere:Yours", "attacks/nowhere.py"),
        ("attacks.patch_gradient:PatchGradent", "Did you mean PatchGradient?"),
    ],
)
def test_what_is_registered_and_not_there_is_named(where: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        Entry(where).load()
    assert named in str(caught.value)


@schema
class Inner:
    """What an outer one holds."""

    rate: Positive = 0.1


@schema
class Outer:
    """Fields of every kind."""

    seed: Seed = 0
    count: Count = 1
    share: Share = 0.5
    loss: NotNegative = 0.0
    on: Switch = False
    label: Label = "a"
    name: Name = "a"
    path: PathText = "a"
    inner: Annotated[Inner | None, "nested"] = None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seed", value) for value in (True, "5", -1, 2**63, 1.0)),
        *(("count", value) for value in (0, 10**10, None)),
        *(("share", value) for value in (True, "0.5", 1.1, float("nan"))),
        *(("loss", value) for value in (-1e-9, 1e300, float("inf"))),
        *(("on", value) for value in (1, "yes")),
        *(("label", value) for value in ("", "  ", "a\x1b[2J", "x" * 101, 5)),
        *(("name", value) for value in ("../a", ".a", "a/b", "a\\b")),
        *(("path", value) for value in ("", "a\0b", "x" * 5000)),
        ("inner", {"rate": 0}),
        ("inner", 5),
        ("sed", 1),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        parse(Outer, {field: value}, "the config", {"inner": Inner})
    assert field in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_misspelt_field_gets_the_nearest_of_its_owner() -> None:
    with pytest.raises(UserError, match=r"inner\.rat: .*Did you mean rate\?"):
        parse(Outer, {"inner": {"rat": 1.0}}, "the config", {"inner": Inner})
    with pytest.raises(UserError, match=r"(?s)Inner has .*rate"):
        Inner(rate=0.0)
