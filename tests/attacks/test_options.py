"""An attack by its name: options of the wrong type and half-written attacks have a clear word."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks import ATTACKS, CONTROLS, TRAITS, find_attack, traits_of
from attacks.april import April
from attacks.prior import check_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment.config import AttackConfig, check_attacks
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_view

OF_BATCHES = ("layer_span", "token_peeling", "span_matching", "shared_picture", "head_features")
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
OPTIONS = [
    pytest.param(name, field.name, type(getattr(attack, field.name)), id=f"{name}-{field.name}")
    for name, attack in [(name, find_attack(name)) for name in ATTACKS]
    for field in dataclasses.fields(attack)
    if field.init
]


@pytest.mark.parametrize(("name", "option", "kind"), OPTIONS)
def test_an_option_of_another_type_or_size_is_refused(name: str, option: str, kind: type) -> None:
    """A text where a number is expected, and the other way; a truth value where there is none."""
    for value in WRONG:
        if IS_OF[kind](value):
            continue
        with pytest.raises(UserError) as caught:
            find_attack(name, {option: value})
        assert option in str(caught.value)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("multi_round", {"uploads": 0}, "uploads"),
        ("multi_round", {"upload": 6}, "uploads"),
        ("masked_span", {"uploads": 6}, "uploads"),
        ("april_unk_aware", {"engine": "breaching"}, "batched"),
        ("april_optimization", {"positions": 0}, "positions"),
        ("gradvit", {"step_size": 0}, "step_size"),
        ("gradvit", {"image_prior": "resnet.pth"}, "resnet.pth"),
        ("mean_imag", {}, "mean_image"),
    ],
)
def test_a_wrong_option_or_name_is_named(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        find_attack(name, options)
    assert said in str(error.value)


def test_priors_are_asked_for_before_an_attack_runs(tmp_path: Path) -> None:
    for name in ("fitted", "stationary"):
        check_prior(name)
    (tmp_path / "p.safetensors").write_bytes(b"no prior")
    for prior in ("nowhere", str(tmp_path), str(tmp_path / "p.safetensors"), "a\0b", "x" * 5000):
        with pytest.raises(UserError, match=r"attacks\.0: "):
            check_attacks([AttackConfig("masked_span", {"prior": prior})], "c.yaml")


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


def test_attacks_with_equal_options_are_equal_also_when_one_was_run() -> None:
    used = April()
    view, _ = planted_view(planted_model(), used, "a")
    used.run(view, generator=torch.Generator())
    assert used == April() != April(engine="breaching")
    assert repr(used) == "April(engine='batched')"
    assert used.attacker(view.model) is used.attacker(view.model)
    assert April().attacker(view.model) is not used.attacker(view.model)


# attacks of one's own -----------------------------------------------------------------------------

CLASS = "@dataclass\nclass Mine:\n"
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
    ("source", "options", "said"),
    [
        ("def broken(:\n", {}, "SyntaxError"),
        ("import no_such_package\n", {}, "no_such_package"),
        ("Yours = 5\n", {}, "Mine"),
        ("class Mine: pass\n", {}, "dataclass"),
        (CLASS + "    size: int\n", {}, "TypeError"),
        (CLASS + "    def __post_init__(self): raise KeyError('no table')\n", {}, "no table"),
        (CLASS + "    name = 'mine'\n", {}, "published, victim, uploads, needs, unsupported, run"),
        (WHOLE.replace('"mine"', '"yours"'), {}, "yours"),
        (WHOLE + "    traits = ('masks', 'telepathy')\n", {}, "telepathy"),
        (WHOLE, {"szes": [1]}, "sizes"),
        (WHOLE, {"sizes": [1, "2"]}, "[1, '2']"),
        (WHOLE, {"sizes": [True]}, "[True]"),
        (WHOLE, {"weights": {"a": float("nan")}}, "weights"),
        (WHOLE, {"sizes": [1, 2], "weights": {"a": 1}}, None),
        (WHOLE, {"weights": None}, None),
    ],
)
def test_what_is_wrong_with_it_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    options: dict[str, Any],
    said: str | None,
) -> None:
    module = f"own_{abs(hash((str(tmp_path), source)))}"
    (tmp_path / f"{module}.py").write_text("from dataclasses import dataclass\n" + source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with ATTACKS.registered("mine", Entry(f"{module}:Mine")):
        if said is None:
            attack: Any = find_attack("mine", options)
            assert {key: getattr(attack, key) for key in options} == options
            return
        with pytest.raises(UserError) as caught:
            check_attacks([AttackConfig("mine", options)], "c.yaml")
    message = str(caught.value)
    assert message.startswith("c.yaml, attacks.0: ")
    assert said in message
    assert str(tmp_path) not in message
