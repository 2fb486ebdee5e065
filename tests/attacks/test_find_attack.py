"""An attack by its name: options of the wrong type and half-written attacks have a clear word."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from attacks import ATTACKS, CONTROLS, TRAITS, find_attack, traits_of
from attacks.patch_variants import MaskLocator
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry


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

KNOW_MASKS = {
    *("april_unk_aware", "april_prior", "plain_step", "mask_locator", "masked_span"),
    *("pixel_lattice", "multi_round", "token_span", "inverting_gradients", "april_optimization"),
    "gradvit",
    *("batch_span", "layer_span", "batch_lattice", "span_matching", "shared_picture"),
}
ONE_UPLOAD_OF_A_BATCH = {"batch_span", "layer_span", "batch_lattice", "span_matching"}
PHOTOGRAPHS = {
    *("april_prior", "patch_prior", "masked_span", "pixel_lattice", "multi_round", "token_span"),
    *("batch_span", "layer_span", "batch_lattice", "span_matching", "shared_picture"),
    "gradvit",
}


@pytest.mark.parametrize(
    ("trait", "names"),
    [
        ("masks", KNOW_MASKS),
        ("noise", {"patch_prior", "masked_span", "multi_round", *ONE_UPLOAD_OF_A_BATCH}),
        ("rank", {"april", "april_unk_aware"}),
        ("8 bit", {"pixel_lattice", "batch_lattice"}),
        ("any network", {"inverting_gradients"}),
        ("steps", {"inverting_gradients", "april_optimization", "gradvit", "span_matching"}),
        ("public photographs", PHOTOGRAPHS),
        ("batches", {*ONE_UPLOAD_OF_A_BATCH, "shared_picture"}),
        ("shared pictures", {"shared_picture"}),
    ],
)
def test_traits_are_those_that_reports_go_by(trait: str, names: set[str]) -> None:
    assert trait in TRAITS
    assert {name for name in ATTACKS if trait in traits_of(name)} == names


def test_every_trait_is_explained_and_used() -> None:
    used = {trait for name in ATTACKS for trait in traits_of(name)}
    assert used == set(TRAITS)
    assert all(TRAITS.values())


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
