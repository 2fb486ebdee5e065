"""When a figure is flagged, on both sides of each flag's border."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.report.answer import build_card
from mjp_privacy.report.card import card_table
from mjp_privacy.report.clients import clients_of
from mjp_privacy.report.flags import FLAGS
from mjp_privacy.report.runs import load_runs
from tests.helpers.card_run import card_of_lines, keys
from tests.helpers.report_rows import cell, intact

MASKED: dict[str, Any] = {"setting": "c", "gamma": 0.27}


def test_every_flag_has_a_name_and_a_sentence_of_its_own() -> None:
    assert len({flag.name for flag in FLAGS.values()}) == len(FLAGS)
    assert all(flag.key == key and flag.text.endswith(".") for key, flag in FLAGS.items())


@pytest.mark.parametrize(
    ("facts", "psnr", "diagnostics", "expected"),
    [
        ({}, [12.0], {"grey_psnr": 12.0}, ""),
        ({}, [11.9], {"grey_psnr": 12.0}, "below_floor"),
        ({"attack": "inverting_gradients"}, [30.0], {"gradient_residual": 0.11}, "not_converged"),
        ({"attack": "inverting_gradients"}, [30.0], {"gradient_residual": 0.1}, ""),
        ({}, [30.0], {"gradient_residual": 0.9}, ""),  # does not optimise
        ({"defenses": "int8"}, [30.0], {}, "noise_ignored"),
        ({"position_noise": 0.1}, [30.0], {}, "noise_ignored"),
        ({"defenses": "int8", "attack": "patch_prior"}, [30.0], {}, ""),
        (
            {"attack": "april", "first_block": "closed_form"},
            [30.0],
            {"cond_a": 2.0**25},
            "ill_conditioned",
        ),
        ({"attack": "april", "first_block": "closed_form"}, [30.0], {"cond_a": 2.0**24}, ""),
        (
            {"attack": "april", "first_block": "closed_form", "dtype": "float64"},
            *([30.0], {"cond_a": 2.0**25}, ""),
        ),
        ({}, [30.0], {"cond_a": math.inf}, ""),  # not bounded by the rank
        ({"attack": "pixel_lattice"}, [30.0], {}, "assumes_8_bit"),
        ({}, [30.0, "failed"], {}, "partly_inapplicable"),
        ({}, [30.0, "unsupported"], {}, "partly_inapplicable"),
        ({"attack": "april", "victim": "april_block"}, [30.0], {}, "altered_client"),
        (
            {"attack": "april", "victim": "april_block", "first_block": "closed_form"},
            [30.0],
            {},
            "",
        ),
        ({"planned_images": 2}, [30.0], {}, "unfinished"),
        ({"planned_images": 2}, [30.0, "failed"], {}, "partly_inapplicable"),  # it was run
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
    assert keys(row.one_upload or row.published) == expected


@pytest.mark.parametrize(
    ("facts", "diagnostics", "expected"),
    [
        ({"plain_share": 0.5, **MASKED}, {}, "some_unshuffled"),
        ({"plain_share": 0.5, "gamma": 0.0}, {}, ""),
        (MASKED, {"empty_mask": 1.0}, "some_unshuffled"),
        (MASKED, {"empty_mask": 0.0}, ""),
    ],
)
def test_uploads_that_are_not_shuffled_are_flagged(
    tmp_path: Path, facts: dict[str, Any], diagnostics: dict[str, float], expected: str
) -> None:
    (row,) = card_of_lines(tmp_path, (intact("masked_span", **facts), [30.0], diagnostics)).rows
    assert keys(row) == expected


@pytest.mark.parametrize(("undeclared", "expected"), [(1.0, "undeclared_error"), (0.0, "")])
def test_a_defence_that_declares_no_error_is_flagged(
    tmp_path: Path, undeclared: float, expected: str
) -> None:
    line = intact("patch_prior", defenses="mine"), [30.0], {"undeclared_error": undeclared}
    (row,) = card_of_lines(tmp_path, line).rows
    assert keys(row) == expected


def test_eight_bits_are_assumed_as_soon_as_one_picture_is_taken_from_such_an_attack(
    tmp_path: Path,
) -> None:
    for name, lattice, expected in (
        ("one", [9.0, 31.0], "assumes_8_bit"),
        ("none", [9.0, 29.0], ""),
    ):
        made = card_of_lines(
            tmp_path / name,
            (intact("masked_span", **MASKED), [30.0, 30.0], {}),
            (intact("pixel_lattice", **MASKED), list(lattice), {}),
        )
        assert keys(made.rows[0].one_upload) == expected


def test_noise_counts_as_modelled_where_all_chosen_attacks_weigh_it(tmp_path: Path) -> None:
    """Of a best of two attacks one weighs it, and is the best on all pictures, some or none."""
    for name, span, expected in (
        ("all", [30.0, 21.0], ""),
        ("some", [30.0, 9.0], "assumes_8_bit noise_ignored"),
        ("none", [8.0, 9.0], "assumes_8_bit noise_ignored"),
    ):
        made = card_of_lines(
            tmp_path / name,
            (intact("masked_span", defenses="int8", **MASKED), list(span), {}),
            (intact("pixel_lattice", defenses="int8", **MASKED), [20.0, 20.0], {}),
        )
        assert keys(made.rows[0].one_upload) == expected


def test_controls_are_never_flagged(tmp_path: Path) -> None:
    """Not for noise that they could not weigh, nor for a picture they did not get."""
    made = card_of_lines(
        tmp_path,
        (intact("patch_prior", defenses="int8"), [20.0, 30.0], {}),
        (intact("grey", role="floor", defenses="int8"), [11.0, "failed"], {}),
    )
    assert keys(made.rows[0].floor) == ""


# bests of several attacks -------------------------------------------------------------------------


def test_a_best_is_ill_conditioned_where_an_attack_it_took_is(tmp_path: Path) -> None:
    closed = {"first_block": "closed_form"}
    for name, april, condition, expected in (
        ("taken", [40.0, 10.0], 2.0**25, "ill_conditioned"),
        ("not taken", [10.0, 10.0], 2.0**25, ""),
        ("well", [40.0, 10.0], 2.0**24, ""),
    ):
        made = card_of_lines(
            tmp_path / name,
            (cell("april", **closed), list(april), {"cond_a": condition}),
            (intact("patch_gradient", **closed), [20.0, 20.0], {"cond_a": 2.0**30}),
        )
        assert keys(made.rows[0].one_upload) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([30.0, 20.0], [25.0], "unfinished"),  # the second one has not been run on all
        ([30.0], [25.0, 20.0], "unfinished"),
        ([30.0, 20.0], [25.0, 30.0], ""),
        ([30.0, 20.0], [25.0, "failed"], "cut_short"),
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
    assert keys(made.rows[0].one_upload) == expected


# attacks that were not run ------------------------------------------------------------------------

SPAN: list[tuple[dict[str, Any], list[float | str]]] = [({"attack": "masked_span"}, [20.0])]
LATTICE: dict[str, Any] = {"attack": "pixel_lattice"}
ROUNDS: dict[str, Any] = {"attack": "R=6", "attack_name": "multi_round", "uploads": 6}
BOTH: list[tuple[dict[str, Any], list[float | str]]] = [*SPAN, (LATTICE, [30.0])]


@pytest.mark.parametrize(
    ("facts", "further", "expected"),
    [
        ({}, [], "fewer_attacks"),
        ({}, [(LATTICE, [10.0])], ""),
        ({}, [(LATTICE, ["failed"])], ""),  # tried, and marked
        ({"gamma": 0.3}, [], "fewer_attacks"),
        ({"dtype": "float64"}, [], "fewer_attacks"),
        ({"model": "ViT-S"}, [], "fewer_attacks"),
        # not alike
        ({"setting": "b"}, [], ""),
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
    assert keys(by_noise[False]) == ""
    assert keys(by_noise[True]) == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [((LATTICE, [30.0]), "fewer_attacks"), ((LATTICE, ["failed"]), ""), ((ROUNDS, [30.0]), "")],
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
    assert [keys(row) for row in rows] == ["", expected]


def test_clients_without_masks_are_not_alike(tmp_path: Path) -> None:
    span = intact("span", attack="masked_span", **MASKED), [20.0], {}
    shuffles = intact("other", attack="patch_gradient", defenses="int8", **MASKED)
    rows = card_of_lines(tmp_path, span, (shuffles, [20.0], {"zero_rows": 0.0})).rows
    assert [row.client for row in rows] == ["MJP γ .27", "shuffled γ .27, int8"]
    assert [keys(row) for row in rows] == ["", ""]


def test_an_attack_that_a_client_of_another_run_met_is_missed_and_named(tmp_path: Path) -> None:
    """Also where the runs name their models differently; nothing is missed where all is exact."""
    card_of_lines(
        tmp_path / "one", (intact("span", attack="masked_span", **MASKED), [21.0, 22.0], {})
    )
    lattice = intact("lattice", attack="pixel_lattice", model="B", defenses="int8", **MASKED)
    exact = intact("exact", attack="masked_span", model="C", **MASKED)
    card_of_lines(tmp_path / "two", (lattice, [20.0], {}), (exact, [math.inf], {}))
    lines = load_runs([tmp_path / "one", tmp_path / "two"]).lines
    card = build_card(clients_of(lines))
    without = [row.one_upload.without for row in card.rows if row.one_upload]
    assert without == [("pixel_lattice",), ("masked_span",), ()]
    assert [keys(row) for row in card.rows] == ["fewer_attacks", "fewer_attacks", ""]
    assert "pixel_lattice not run" in card_table(card).rows[0][1]
