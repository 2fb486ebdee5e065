"""Every option of every attack against wrong types and sizes; attacks of one's own that fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from attacks import ATTACKS, find_attack
from attacks.prior import check_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment.config import AttackConfig, check_attacks

WRONG: tuple[Any, ...] = (
    *("perhaps", "5", "", b"5", [], ["a"], {}, {"a": 1}, object()),
    *(-1, 10**30, float("nan"), float("inf"), -float("inf"), 1e300, True, 2.5),
)


def options() -> list[tuple[str, str, type[Any]]]:
    found = []
    for name in ATTACKS:
        attack: Any = find_attack(name)
        for field in dataclasses.fields(attack):
            kind = type(getattr(attack, field.name))
            if field.init and kind is not type(None):
                found.append((name, field.name, kind))
    return found


@pytest.mark.parametrize(("name", "option", "kind"), options())
def test_an_option_of_another_type_is_refused(name: str, option: str, kind: type[Any]) -> None:
    """A text where a number is expected, and the other way; a truth value where there is none."""
    refused = 0
    for value in WRONG:
        if _is_of(value, kind):
            continue
        with pytest.raises(UserError) as caught:
            find_attack(name, {option: value})
        assert option in str(caught.value)
        assert len(str(caught.value)) < 600
        refused += 1
    assert refused >= 8


def _is_of(value: Any, kind: type[Any]) -> bool:
    if kind is float:
        return type(value) in (int, float) and 0 < value <= 1e6
    if kind is str:
        return isinstance(value, str)  # a prior's name; which there are is asked by check_prior
    return type(value) is kind and (kind is bool or 0 <= value <= 1e6)


def own(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> Entry:
    """An attack of one's own in a file that holds this source."""
    name = f"own_{abs(hash((str(folder), source)))}"
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    return Entry(f"{name}:Mine")


HEAD = "from dataclasses import dataclass\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def broken(:\n", "to be imported; got SyntaxError: invalid syntax ("),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package' ("),
        ("1 / 0\n", "to be imported; got ZeroDivisionError: division by zero ("),
        ("Yours = 5\n", "has no Mine"),
        ("Mine = 5\n", "to be a dataclass, whose fields are its options; got another object"),
        ("class Mine: pass\n", "to be a dataclass, whose fields are its options"),
        (
            HEAD + "@dataclass\nclass Mine:\n    size: int = 3\n"
            "    def __post_init__(self): raise KeyError('no table')\n",
            "got KeyError: 'no table' (",
        ),
        (HEAD + "@dataclass\nclass Mine:\n    size: int\n", "got TypeError: "),
    ],
)
def test_an_attack_of_ones_own_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    entry = own(tmp_path, monkeypatch, source)
    with ATTACKS.registered("mine", entry), pytest.raises(UserError) as caught:
        check_attacks([AttackConfig("mine")], "c.yaml")
    message = str(caught.value)
    assert message.startswith("c.yaml, attacks.0: ")
    assert said in message
    assert str(tmp_path) not in message


WHOLE = (
    HEAD
    + """
from typing import ClassVar

@dataclass(frozen=True)
class Mine:
    sizes: tuple[int, ...] = (1,)
    weights: dict[str, float] | None = None
    name: ClassVar[str] = "mine"
    published: ClassVar[bool] = False
    victim: ClassVar[str] = "intact"
    uploads: ClassVar[int] = 1
    def needs(self, model): return ()
    def unsupported(self, view): return None
    def run(self, view, *, generator): return None
"""
)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sizes": [1, 2]}, ""),
        ({"weights": {"a": 1}}, ""),
        ({"weights": None}, ""),
        ({"sizes": [1, "2"]}, "option sizes: Input should be a valid integer; got [1, '2']"),
        ({"sizes": 5}, "option sizes: Input should be a valid array; got 5"),
        ({"sizes": [True]}, "option sizes: Input should be a valid integer; got [True]"),
        ({"weights": {"a": float("nan")}}, "option weights: Input should be a finite number"),
        ({"szes": [1]}, "Unknown option 'szes'. Did you mean sizes?"),
    ],
)
def test_its_options_are_checked_like_those_of_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    with ATTACKS.registered("mine", own(tmp_path, monkeypatch, WHOLE)):
        if not said:
            find_attack("mine", given)
            return
        with pytest.raises(UserError) as caught:
            find_attack("mine", given)
    assert said in str(caught.value)


def test_priors_are_asked_for_before_an_attack_runs(tmp_path: Path) -> None:
    for name in ("fitted", "stationary"):
        check_prior(name)
    (tmp_path / "p.safetensors").write_bytes(b"no prior")
    for prior in ("nowhere", str(tmp_path), str(tmp_path / "p.safetensors"), "a\0b", "x" * 5000):
        with pytest.raises(UserError, match=r"attacks\.0: "):
            check_attacks([AttackConfig("masked_span", {"prior": prior})], "c.yaml")
