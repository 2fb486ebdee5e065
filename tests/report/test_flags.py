"""When a figure is flagged, on both sides of each flag's border."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.report.card import flags
from mjp_privacy.report.card.flags import Flag
from tests.helpers.card_run import card_of_lines, marks
from tests.helpers.report_rows import cell, intact

MASKED: dict[str, Any] = {"setting": "c", "gamma": 0.27}


def test_every_flag_has_a_letter_of_its_own_and_says_why() -> None:
    known = [value for value in vars(flags).values() if isinstance(value, Flag)]
    assert len({flag.mark for flag in known}) == len({flag.name for flag in known}) == len(known)
    assert {flag.mark for flag in known} == set("fncwipurxza")
    assert all(len(flag.mark) == 1 and flag.text.endswith(".") for flag in known)


@pytest.mark.parametrize(
    ("facts", "psnr", "diagnostics", "expected"),
    [
        ({}, [12.0], {"grey_psnr": 12.0}, ""),
        ({}, [11.9], {"grey_psnr": 12.0}, "f"),
        ({"attack": "inverting_gradients"}, [30.0], {"gradient_residual": 0.11}, "c"),
        ({"attack": "inverting_gradients"}, [30.0], {"gradient_residual": 0.1}, ""),
        ({}, [30.0], {"gradient_residual": 0.9}, ""),  # does not optimise
        ({"defenses": "int8"}, [30.0], {}, "w"),
        ({"position_noise": 0.1}, [30.0], {}, "w"),
        ({"defenses": "int8", "attack": "patch_prior"}, [30.0], {}, ""),
        ({"attack": "april", "first_block": "closed_form"}, [30.0], {"cond_a": 2.0**25}, "i"),
        ({"attack": "april", "first_block": "closed_form"}, [30.0], {"cond_a": 2.0**24}, ""),
        (
            {"attack": "april", "first_block": "closed_form", "dtype": "float64"},
            *([30.0], {"cond_a": 2.0**25}, ""),
        ),
        ({}, [30.0], {"cond_a": math.inf}, ""),  # not bounded by the rank
        ({"attack": "pixel_lattice"}, [30.0], {}, "p"),
        ({}, [30.0, "failed"], {}, "r"),
        ({}, [30.0, "unsupported"], {}, "r"),
        ({"attack": "april", "victim": "april_block"}, [30.0], {}, "x"),
        (
            {"attack": "april", "victim": "april_block", "first_block": "closed_form"},
            [30.0],
            {},
            "",
        ),
    ],
)
def test_each_flag_has_its_border(
    tmp_path: Path,
    facts: dict[str, Any],
    psnr: list[float | str],
    diagnostics: dict[str, float],
    expected: str,
) -> None:
    name = facts.get("attack", "patch_gradient")
    made = card_of_lines(tmp_path, (intact("x", **{"attack": name} | facts), psnr, diagnostics))
    (row,) = made.rows
    assert marks(row.one_upload or row.published) == expected


@pytest.mark.parametrize(
    ("facts", "diagnostics", "expected"),
    [
        ({"plain_share": 0.5, **MASKED}, {}, "u"),
        ({"plain_share": 0.5, "gamma": 0.0}, {}, ""),
        (MASKED, {"empty_mask": 1.0}, "u"),
        (MASKED, {"empty_mask": 0.0}, ""),
    ],
)
def test_uploads_that_are_not_shuffled_are_flagged(
    tmp_path: Path, facts: dict[str, Any], diagnostics: dict[str, float], expected: str
) -> None:
    (row,) = card_of_lines(tmp_path, (intact("masked_span", **facts), [30.0], diagnostics)).rows
    assert marks(row) == expected


def test_eight_bits_are_assumed_as_soon_as_one_picture_is_taken_from_such_an_attack(
    tmp_path: Path,
) -> None:
    for name, lattice, expected in (("one", [9.0, 31.0], "p"), ("none", [9.0, 29.0], "")):
        made = card_of_lines(
            tmp_path / name,
            (intact("masked_span", **MASKED), [30.0, 30.0], {}),
            (intact("pixel_lattice", **MASKED), list(lattice), {}),
        )
        assert marks(made.rows[0].one_upload) == expected


def test_noise_counts_as_modelled_where_a_chosen_attack_weighs_it(tmp_path: Path) -> None:
    """Of a best of two attacks one weighs it, and is the best on some picture or on none."""
    for name, span, expected in (("some", [30.0, 9.0], "p"), ("none", [8.0, 9.0], "pw")):
        made = card_of_lines(
            tmp_path / name,
            (intact("masked_span", defenses="int8", **MASKED), list(span), {}),
            (intact("pixel_lattice", defenses="int8", **MASKED), [20.0, 20.0], {}),
        )
        assert marks(made.rows[0].one_upload) == expected


def test_controls_are_never_flagged(tmp_path: Path) -> None:
    """Not for noise that they could not weigh, nor for a picture they did not get."""
    made = card_of_lines(
        tmp_path,
        (intact("patch_prior", defenses="int8"), [20.0, 30.0], {}),
        (intact("grey", role="floor", defenses="int8"), [11.0, "failed"], {}),
    )
    assert marks(made.rows[0].floor) == ""


def test_what_was_not_scored_is_not_flagged(tmp_path: Path) -> None:
    """A refused april is no figure: it is neither altered nor below a floor."""
    made = card_of_lines(
        tmp_path,
        (cell("april"), ["unsupported"], {}),
        (intact("patch_gradient"), [30.0], {}),
    )
    assert made.rows[0].published is None
    assert made.flags == ()


def test_a_client_without_a_matching_attack_is_flagged(tmp_path: Path) -> None:
    (row,) = card_of_lines(tmp_path, (cell("april", **MASKED), [8.96], {"zero_rows": 50.0})).rows
    assert marks(row) == "n"
    assert marks(row.published) == "x"
    assert (row.one_upload, row.any_uploads) == (None, None)


def test_a_card_lists_each_flag_once(tmp_path: Path) -> None:
    made = card_of_lines(
        tmp_path,
        *((cell(f"april {g}", gamma=g), [5.0], {"grey_psnr": 9.0}) for g in (0.0, 0.1, 0.2)),
    )
    assert sorted(flag.mark for flag in made.flags) == ["f", "n", "x"]
