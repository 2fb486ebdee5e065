"""When a figure is flagged, on both sides of each flag's border."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.report.card import flags
from mjp_privacy.report.card.flags import Flag
from mjp_privacy.report.card.text import build_card
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.worst_case import reduced_groups
from tests.helpers.card_run import card_of_lines, marks
from tests.helpers.report_rows import cell, intact

MASKED: dict[str, Any] = {"setting": "c", "gamma": 0.27}


def test_every_flag_has_a_letter_of_its_own_and_says_why() -> None:
    known = [value for value in vars(flags).values() if isinstance(value, Flag)]
    assert len({flag.mark for flag in known}) == len({flag.name for flag in known}) == len(known)
    assert {flag.mark for flag in known} == set("fncwipurxzae")
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
        ({"planned_images": 2}, [30.0], {}, "z"),
        ({"planned_images": 2}, [30.0, "failed"], {}, "r"),  # it was run
        ({"planned_images": 2}, [30.0, 31.0], {}, ""),
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


@pytest.mark.parametrize(("undeclared", "expected"), [(1.0, "e"), (0.0, "")])
def test_a_defence_that_declares_no_error_is_flagged(
    tmp_path: Path, undeclared: float, expected: str
) -> None:
    line = intact("patch_prior", defenses="mine"), [30.0], {"undeclared_error": undeclared}
    (row,) = card_of_lines(tmp_path, line).rows
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


def test_noise_counts_as_modelled_where_all_chosen_attacks_weigh_it(tmp_path: Path) -> None:
    """Of a best of two attacks one weighs it, and is the best on all pictures, some or none."""
    for name, span, expected in (
        ("all", [30.0, 21.0], ""),
        ("some", [30.0, 9.0], "pw"),
        ("none", [8.0, 9.0], "pw"),
    ):
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


# bests of several attacks -------------------------------------------------------------------------


def test_a_best_is_ill_conditioned_where_an_attack_it_took_is(tmp_path: Path) -> None:
    closed = {"first_block": "closed_form"}
    for name, april, condition, expected in (
        ("taken", [40.0, 10.0], 2.0**25, "i"),
        ("not taken", [10.0, 10.0], 2.0**25, ""),
        ("well", [40.0, 10.0], 2.0**24, ""),
    ):
        made = card_of_lines(
            tmp_path / name,
            (cell("april", **closed), list(april), {"cond_a": condition}),
            (intact("patch_gradient", **closed), [20.0, 20.0], {"cond_a": 2.0**30}),
        )
        assert marks(made.rows[0].one_upload) == expected


def test_a_figure_is_compared_with_the_floor_on_its_own_images(tmp_path: Path) -> None:
    """The mean of the floor over all of its images would say the opposite."""
    for name, floor, expected in (("easy", [30.0, 2.0], "fr"), ("hard", [10.0, 40.0], "r")):
        made = card_of_lines(
            tmp_path / name,
            (intact("patch_gradient"), [20.0, "failed"], {}),
            (intact("grey", role="floor"), list(floor), {}),
        )
        (row,) = made.rows
        assert row.floor is not None
        assert (row.floor.mean < 20) == (expected == "fr")
        assert marks(row.one_upload) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([30.0, 20.0], [25.0], "z"),  # the second one has not been run on all
        ([30.0], [25.0, 20.0], "z"),
        ([30.0, 20.0], [25.0, 30.0], ""),
        ([30.0, 20.0], [25.0, "failed"], ""),
        ([30.0, 20.0], [25.0, "unsupported"], ""),
        ([30.0, 20.0], [], ""),  # not begun: it is no member
    ],
)
def test_a_best_of_attacks_on_different_numbers_of_images_is_unfinished(
    tmp_path: Path, first: list[float | str], second: list[float | str], expected: str
) -> None:
    made = card_of_lines(
        tmp_path,
        (intact("masked_span", **MASKED), first, {}),
        (intact("token_span", **MASKED), second, {}),
    )
    assert marks(made.rows[0].one_upload) == expected


def test_planned_images_without_rows_make_a_best_unfinished(tmp_path: Path) -> None:
    for planned, expected in ((2, ""), (3, "z")):
        made = card_of_lines(
            tmp_path / str(planned),
            *(
                (intact(name, planned_images=planned, **MASKED), [30.0, 20.0], {})
                for name in ("masked_span", "token_span")
            ),
        )
        assert marks(made.rows[0].one_upload) == expected


# attacks that were not run ------------------------------------------------------------------------

SPAN: list[tuple[dict[str, Any], list[float | str]]] = [({"attack": "masked_span"}, [20.0])]
LATTICE: dict[str, Any] = {"attack": "pixel_lattice"}
ROUNDS: dict[str, Any] = {"attack": "R=6", "attack_name": "multi_round", "uploads": 6}
BOTH: list[tuple[dict[str, Any], list[float | str]]] = [*SPAN, (LATTICE, [30.0])]


@pytest.mark.parametrize(
    ("facts", "further", "expected"),
    [
        ({}, [], "a"),
        ({}, [(LATTICE, [10.0])], ""),
        ({}, [(LATTICE, ["failed"])], ""),  # tried
        # not alike
        ({"gamma": 0.3}, [], ""),
        ({"setting": "b"}, [], ""),
        ({"dtype": "float64"}, [], ""),
        ({"model": "ViT-S"}, [], ""),
        ({"batch": 4}, [], ""),
        ({"withhold": "pos_embed"}, [], ""),
    ],
)
def test_a_client_on_which_an_attack_was_not_tried_is_flagged(
    tmp_path: Path,
    facts: dict[str, Any],
    further: list[tuple[dict[str, Any], list[float | str]]],
    expected: str,
) -> None:
    """The other one, on which it scored, never is."""
    other = MASKED | {"defenses": "int8"} | facts
    lines = [
        *((intact(f"first {k}", **MASKED | own), psnr, {}) for k, (own, psnr) in enumerate(BOTH)),
        *(
            (intact(f"other {k}", **other | own), psnr, {})
            for k, (own, psnr) in enumerate([*SPAN, *further])
        ),
    ]
    rows = card_of_lines(tmp_path, *lines).rows
    by_noise = {"int8" in row.client: row for row in rows}
    assert len(rows) == len(by_noise) == 2
    assert marks(by_noise[False]) == ""
    assert marks(by_noise[True]) == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [((LATTICE, [30.0]), "a"), ((LATTICE, ["failed"]), ""), ((ROUNDS, [30.0]), "")],
)
def test_an_attack_that_failed_elsewhere_or_needs_more_uploads_is_not_missed(
    tmp_path: Path, more: tuple[dict[str, Any], list[float | str]], expected: str
) -> None:
    first = [*SPAN, more]
    rows = card_of_lines(
        tmp_path,
        *((intact(f"{k}", **MASKED | own), psnr, {}) for k, (own, psnr) in enumerate(first)),
        (intact("other", **MASKED, attack="masked_span", defenses="int8"), [20.0], {}),
    ).rows
    assert [marks(row) for row in rows] == ["", expected]


def test_clients_of_other_runs_or_without_masks_are_not_alike(tmp_path: Path) -> None:
    first = [(intact("span", attack="masked_span", **MASKED), [20.0], {})]
    shuffles = intact("other", attack="patch_gradient", defenses="int8", **MASKED)
    rows = card_of_lines(tmp_path / "one", *first, (shuffles, [20.0], {"zero_rows": 0.0})).rows
    assert [row.client for row in rows] == ["MJP γ .27 (c)", "shuffled γ .27, int8 (c)"]
    assert [marks(row) for row in rows] == ["", ""]
    lattice = intact("lattice", attack="pixel_lattice", defenses="int8", **MASKED)
    card_of_lines(tmp_path / "two", (lattice, [20.0], {}))
    lines = load_runs([tmp_path / "one", tmp_path / "two"]).lines
    assert not any("a" in marks(row) for row in build_card(reduced_groups(lines)).rows)
