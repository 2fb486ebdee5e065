"""An attack by its name: options of the wrong type and half-written attacks have a clear word."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from attacks import ATTACKS, find_attack
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
        ("april_optimization", {"positions": None}, "expected a value"),
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
