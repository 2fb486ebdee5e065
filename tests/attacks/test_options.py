"""An attack by its name: options of the wrong type and half-written attacks have a clear word."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from attacks import ATTACKS, CONTROLS, TRAITS, find_attack, traits_of
from attacks.april import QKV, TABLE, UNKNOWN, April, UnknownAwareApril
from attacks.patch_variants import MaskLocator
from attacks.prior import check_prior
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment.config import AttackConfig, check_attacks
from mjp_privacy.interfaces import AttackerView, Refusal
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_view


@dataclass(frozen=True)
class HalfWritten:
    """What README's steps gave a newcomer before they named all members."""

    name: ClassVar[str] = "half_written"
    victim: ClassVar[str] = "intact"

    def needs(self, model: Any) -> tuple[str, ...]:
        return ()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("multi_round", {"uploads": "six"}, "option uploads: Input should be a valid integer"),
        ("masked_span", {"tokens": "perhaps"}, "option tokens: Input should be a valid boolean"),
        ("masked_span", {"completion": "fields"}, "completion is one of field, patch, none"),
        ("multi_round", {"upload": 6}, "Did you mean uploads"),
        ("masked_span", {"uploads": 6}, "Unknown option 'uploads'"),
        ("inverting_gradients", {"positions": 1.0}, "Unknown option 'positions'"),
        ("april_optimization", {"positions": None}, "positions"),
    ],
)
def test_a_wrong_option_is_named_with_what_came(
    name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=name) as error:
        find_attack(name, options)
    assert said in str(error.value)


def test_options_keep_their_values() -> None:
    attack: Any = find_attack("multi_round", {"uploads": 3, "prior": "stationary"})
    assert (attack.uploads, attack.prior) == (3, "stationary")


def test_a_half_written_attack_is_told_what_it_lacks() -> None:
    entry = Entry(f"{__name__}:HalfWritten", "not finished")
    lacks = pytest.raises(UserError, match="lacks published, uploads, unsupported, run")
    with ATTACKS.registered("half_written", entry), lacks:
        find_attack("half_written")
    with pytest.raises(UserError, match="Unknown attack"):
        find_attack("half_written")


def test_an_attack_under_another_name_than_its_own_is_an_error() -> None:
    entry = Entry("attacks.patch_gradient:PatchGradient", "a copy whose name was forgotten")
    said = "Attack yours: attacks.patch_gradient:PatchGradient calls itself 'patch_gradient'. Give"
    with ATTACKS.registered("yours", entry), pytest.raises(UserError, match=said):
        find_attack("yours")


# traits -------------------------------------------------------------------------------------------


DECLARED = {
    "april": "rank",
    "april_unk_aware": "masks, rank",
    "april_prior": "masks, public photographs",
    "patch_gradient": "",
    "patch_prior": "noise, public photographs",
    "plain_step": "masks",
    "patch_jigsaw": "shuffled alone",
    "mask_locator": "masks",
    "masked_span": "masks, noise, public photographs",
    "pixel_lattice": "8 bit, masks, public photographs",
    "multi_round": "masks, noise, public photographs",
    "batch_span": "batches, masks, noise, public photographs",
    "shared_picture": "batches, masks, public photographs, shared pictures",
    "layer_span": "batches, masks, noise, public photographs",
    "batch_lattice": "8 bit, batches, masks, noise, public photographs",
    "span_matching": "batches, masks, noise, public photographs, steps",
    "token_span": "masks, public photographs",
    "inverting_gradients": "any network, masks, steps",
    "april_optimization": "masks, steps",
    "gradvit": "masks, public photographs, steps",
}
"""What reports flag figures by, a second time: a trait lost from a class is a flag lost."""


def test_every_trait_is_explained_and_used() -> None:
    used = {trait for name in ATTACKS for trait in traits_of(name)}
    assert used == set(TRAITS)
    assert all(TRAITS.values())


def test_traits_are_those_that_reports_go_by() -> None:
    assert {name: traits_of(name) for name in ATTACKS} == {
        name: frozenset(filter(None, traits.split(", "))) for name, traits in DECLARED.items()
    }


def test_traits_agree_with_the_code() -> None:
    """An attack that optimises has steps, and one with a prior needs photographs."""
    for name in ATTACKS:
        attack: Any = find_attack(name)
        if "steps" in traits_of(name):
            assert attack.steps > 1, name
        if hasattr(attack, "prior") or hasattr(attack, "image_prior"):
            assert "public photographs" in traits_of(name), name


def test_controls_and_unknown_names_have_no_traits() -> None:
    assert all(traits_of(name) == frozenset() for name in (*CONTROLS, "of tomorrow", ""))


@dataclass(frozen=True)
class ReadsMinds(MaskLocator):
    """An attack with a trait that no report knows."""

    name: ClassVar[str] = "reads_minds"
    traits: ClassVar[tuple[str, ...]] = ("masks", "telepathy")


def test_an_unknown_trait_is_refused() -> None:
    entry, said = Entry(f"{__name__}:ReadsMinds"), pytest.raises(UserError, match="telepathy")
    with ATTACKS.registered("reads_minds", entry), said:
        find_attack("reads_minds")


# every option of every attack against wrong types and sizes; attacks of one's own that fail -------

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


# aPRIL's options, what it refuses and in which words, and what it tells about a system ------------


def view_of(attack: April | UnknownAwareApril, setting: str = "a", **model: object) -> AttackerView:
    view, _ = planted_view(planted_model(**model), attack, setting)
    return view


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (April, "april: engine is 'batched' or 'breaching', got 'quick'"),
        (UnknownAwareApril, "batched engine only: expected engine 'batched', got 'quick'"),
    ],
)
def test_an_engine_that_nobody_knows(attack: type, said: str) -> None:
    with pytest.raises(UserError, match=said):
        attack(engine="quick")


def test_attacks_with_equal_options_are_equal_also_when_one_was_run() -> None:
    used = April()
    view = view_of(used)
    used.run(view, generator=torch.Generator())
    assert used == April()
    assert used != April(engine="breaching")
    assert repr(used) == "April(engine='batched')"
    assert used.attacker(view.model) is used.attacker(view.model)
    assert April().attacker(view.model) is not used.attacker(view.model)
    with pytest.raises(TypeError):
        April("batched", {})  # type: ignore[call-arg]


def test_breaching_needs_a_bias() -> None:
    view = view_of(April())
    view.model.patch_embed.proj.bias = None
    refusal = April(engine="breaching").unsupported(view)
    text = "breaching's own code needs a bias in the patch embedding; batched does not"
    assert refusal == Refusal("model", text)
    assert April().unsupported(view) is None


def test_what_is_not_in_the_upload_is_named() -> None:
    view = view_of(April())
    update = view.updates[0]
    bare = replace(view, updates=[replace(update, grads={TABLE: update.grads[TABLE]})])
    assert April().unsupported(bare) == Refusal(
        "missing_gradient", f"the upload holds no gradient of {QKV}"
    )
    for change, kind, said in (
        ({"batch": 3}, "batch", "APRIL is for batch 1; the client's batch is 3"),
        ({"kind": "weight_difference"}, "weight_difference", "the upload is a weight difference"),
    ):
        refusal = April().unsupported(replace(view, updates=[replace(update, **change)]))
        assert refusal is not None
        assert refusal.kind == kind
        assert said in refusal.text


@pytest.mark.parametrize(
    ("name", "said"), [("dist_token", "a distillation token"), ("index_embed", "an index table")]
)
def test_tables_that_the_equations_leave_out_are_refused(name: str, said: str) -> None:
    view = view_of(April())
    assert April().unsupported(view) is None
    setattr(view.model, name, torch.nn.Parameter(torch.zeros(1, 1, 96)))
    refusal = April().unsupported(view)
    assert refusal is not None
    assert refusal.kind == "model"
    assert said in refusal.text


def test_the_aware_one_needs_an_unknown_embedding() -> None:
    aware = UnknownAwareApril()
    plain, masks = (planted_model(unknown_embedding=has) for has in (False, True))
    assert aware.needs(plain) == (TABLE, QKV)
    assert aware.needs(masks) == (TABLE, QKV, UNKNOWN)
    view, _ = planted_view(plain, April(), "a")
    assert aware.unsupported(view) == Refusal(
        "unknown_embedding", "the model has no unknown embedding"
    )


def test_the_aware_one_counts_and_finds_the_masked_patches() -> None:
    aware = find_attack("april_unk_aware")
    view, inputs = planted_view(
        planted_model(unknown_embedding=True), aware, "b", client=ClientConfig()
    )
    found = aware.run(view, generator=torch.Generator())
    assert torch.equal(found.mask, inputs.mask)
    assert found.diagnostics["zero_rows"].tolist() == inputs.mask.sum(-1).tolist()
