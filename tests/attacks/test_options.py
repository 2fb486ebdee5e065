"""An attack by its name: options of the wrong type and half-written attacks have a clear word."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from attacks import ATTACKS, CONTROLS, TRAITS, find_attack, traits_of
from attacks.april import April
from attacks.patch_variants import MaskLocator
from attacks.prior import check_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment.config import AttackConfig, check_attacks
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_view


@dataclass(frozen=True)
class HalfWritten:
    """What README's steps gave a newcomer before they named all members."""

    name: ClassVar[str] = "half_written"
    victim: ClassVar[str] = "intact"

    def needs(self, model: Any) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class ReadsMinds(MaskLocator):
    """An attack with a trait that no report knows."""

    name: ClassVar[str] = "reads_minds"
    traits: ClassVar[tuple[str, ...]] = ("masks", "telepathy")


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        ("half_written", f"{__name__}:HalfWritten", "published, uploads, unsupported, run"),
        ("yours", "attacks.patch_gradient:PatchGradient", "'patch_gradient'"),
        ("reads_minds", f"{__name__}:ReadsMinds", "telepathy"),
    ],
)
def test_what_an_attack_lacks_is_told(name: str, where: str, said: str) -> None:
    with ATTACKS.registered(name, Entry(where)), pytest.raises(UserError, match=name) as error:
        find_attack(name)
    assert said in str(error.value)
    with pytest.raises(UserError, match="Unknown attack"):
        find_attack(name)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("multi_round", {"uploads": 0}, "uploads"),
        ("multi_round", {"upload": 6}, "Did you mean uploads"),
        ("masked_span", {"uploads": 6}, "'uploads'"),
        ("masked_span", {"completion": "fields"}, "'field', 'patch' or 'none'"),
        ("april", {"engine": "quick"}, "'batched' or 'breaching'"),
        ("april_unk_aware", {"engine": "breaching"}, "'batched'"),
        ("inverting_gradients", {"positions": 1.0}, "'positions'"),
        ("inverting_gradients", {"signed": True}, "signed"),
        ("april_optimization", {"positions": 0}, "positions"),
        ("gradvit", {"tv": -1}, "tv"),
        ("gradvit", {"step_size": 0}, "step_size"),
        ("gradvit", {"distance": "l2"}, "'cosine' or 'squared'"),
        ("gradvit", {"image_prior": "resnet.pth"}, "resnet.pth"),
    ],
)
def test_a_wrong_option_is_named(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        find_attack(name, options)
    assert said in str(error.value)


def test_traits_are_explained_used_and_agree_with_the_code() -> None:
    """An attack that optimises has steps, and one with a prior needs photographs."""
    assert {trait for name in ATTACKS for trait in traits_of(name)} == set(TRAITS)
    for name in ATTACKS:
        attack: Any = find_attack(name)
        assert ("steps" in traits_of(name)) == hasattr(attack, "steps"), name
        prior = hasattr(attack, "prior") or hasattr(attack, "image_prior")
        assert ("public photographs" in traits_of(name)) >= prior, name
        assert ("batches" in traits_of(name)) == ("batch" in name or name in OF_BATCHES), name
    assert all(traits_of(name) == frozenset() for name in (*CONTROLS, "of tomorrow", ""))


OF_BATCHES = ("layer_span", "token_peeling", "span_matching", "shared_picture", "head_features")

# every option of every attack against wrong types and sizes; attacks of one's own that fail -------

WRONG: tuple[Any, ...] = (
    *("perhaps", "5", "", b"5", [], ["a"], {}, {"a": 1}, object()),
    *(-1, 10**30, float("nan"), float("inf"), -float("inf"), 1e300, True, 2.5),
)
IS_OF: dict[type, Callable[[Any], bool]] = {
    float: lambda value: type(value) in (int, float) and 0 < value <= 1e6,
    str: lambda value: isinstance(value, str),  # a prior's name; check_prior asks which there are
    bool: lambda value: type(value) is bool,
    int: lambda value: type(value) is int and 0 <= value <= 1e6,
}


def options() -> list[tuple[str, str, type[Any]]]:
    made = [(name, find_attack(name)) for name in ATTACKS]
    return [
        (name, field.name, type(getattr(attack, field.name)))
        for name, attack in made
        for field in dataclasses.fields(attack)
        if field.init
    ]


@pytest.mark.parametrize(("name", "option", "kind"), options())
def test_an_option_of_another_type_is_refused(name: str, option: str, kind: type[Any]) -> None:
    """A text where a number is expected, and the other way; a truth value where there is none."""
    for value in WRONG:
        if IS_OF[kind](value):
            continue
        with pytest.raises(UserError) as caught:
            find_attack(name, {option: value})
        assert option in str(caught.value)
        assert len(str(caught.value)) < 600


def own(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> Entry:
    """An attack of one's own in a file that holds this source."""
    name = f"own_{abs(hash((str(folder), source)))}"
    (folder / f"{name}.py").write_text("from dataclasses import dataclass\n" + source)
    monkeypatch.syspath_prepend(str(folder))
    return Entry(f"{name}:Mine")


CLASS = "@dataclass\nclass Mine:\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import no_such_package\n", "no_such_package"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("Yours = 5\n", "has no Mine"),
        ("Mine = 5\n", "dataclass"),
        ("class Mine: pass\n", "dataclass"),
        (
            CLASS + "    def __post_init__(self): raise KeyError('no table')\n",
            "KeyError: 'no table'",
        ),
        (CLASS + "    size: int\n", "TypeError"),
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


WHOLE = """
from typing import ClassVar

from mjp_privacy.interfaces import Usual

@dataclass(frozen=True)
class Mine(Usual):
    sizes: tuple[int, ...] = (1,)
    weights: dict[str, float] | None = None
    name: ClassVar[str] = "mine"
    def needs(self, model): return ()
    def unsupported(self, view): return None
    def run(self, view, *, generator): return None
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sizes": [1, 2], "weights": {"a": 1}}, ""),
        ({"weights": None}, ""),
        ({"sizes": [1, "2"]}, "[1, '2']"),
        ({"sizes": 5}, "got 5"),
        ({"sizes": [True]}, "[True]"),
        ({"weights": {"a": float("nan")}}, "weights"),
        ({"szes": [1]}, "Did you mean sizes?"),
    ],
)
def test_its_options_are_checked_like_those_of_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    with ATTACKS.registered("mine", own(tmp_path, monkeypatch, WHOLE)):
        if not said:
            attack: Any = find_attack("mine", given)
            assert {key: getattr(attack, key) for key in given} == given
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


def test_attacks_with_equal_options_are_equal_also_when_one_was_run() -> None:
    used = April()
    view, _ = planted_view(planted_model(), used, "a")
    used.run(view, generator=torch.Generator())
    assert used == April()
    assert used != April(engine="breaching")
    assert repr(used) == "April(engine='batched')"
    assert used.attacker(view.model) is used.attacker(view.model)
    assert April().attacker(view.model) is not used.attacker(view.model)
