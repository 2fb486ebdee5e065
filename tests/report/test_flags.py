"""When a figure is flagged, on both sides of each flag's border."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.flags import FLAGS
from tests.helpers.card_run import card_of_lines, keys
from tests.helpers.report_rows import intact

MASKED: dict[str, Any] = {"setting": "c", "gamma": 0.27}
Attack = tuple[dict[str, Any], list[float | str], dict[str, float]]
"""Its cell, PSNR by image, diagnostics."""


def attack(
    name: str, *psnr: float | str, of: dict[str, float] | None = None, **facts: Any
) -> Attack:
    return intact(name, **facts), [*psnr], of or {}


def test_every_flag_has_a_name_and_a_sentence_of_its_own() -> None:
    assert len({flag.name for flag in FLAGS.values()}) == len(FLAGS)
    assert all(flag.key == key and flag.text.endswith(".") for key, flag in FLAGS.items())


GREY, CLOSED = {"grey_psnr": 12.0}, {"first_block": "closed_form"}
ALTERED = {"victim": "april_block"}
FAR, NEAR = {"gradient_residual": 0.11}, {"gradient_residual": 0.1}
ILL, WELL = {"cond_a": 2.0**25}, {"cond_a": 2.0**24}
INT8 = MASKED | {"defenses": "int8"}
SHARED: dict[str, Any] = {"planned_images": 2}
PLAIN, MATCHING, SPAN, PIXELS = (
    *("patch_gradient", "inverting_gradients", "masked_span", "pixel_lattice"),
)

BORDERS: list[tuple[list[Attack], str]] = [
    ([attack(PLAIN, 12.0, of=GREY)], ""),
    ([attack(PLAIN, 11.9, of=GREY)], "below_floor"),
    ([attack(MATCHING, 30.0, of=FAR)], "not_converged"),
    ([attack(MATCHING, 30.0, of=NEAR)], ""),
    ([attack(PLAIN, 30.0, of={"gradient_residual": 0.9})], ""),  # does not optimise
    ([attack(PLAIN, 30.0, defenses="int8")], "noise_ignored"),
    ([attack(PLAIN, 30.0, position_noise=0.1)], "noise_ignored"),
    ([attack("patch_prior", 30.0, defenses="int8")], ""),
    ([attack("april", 30.0, of=ILL, **CLOSED, **ALTERED)], "ill_conditioned"),
    ([attack("april", 30.0, of=WELL, **CLOSED)], ""),
    ([attack("april", 30.0, of=ILL, dtype="float64", **CLOSED)], ""),
    ([attack(PLAIN, 30.0, of={"cond_a": math.inf})], ""),  # not bounded by the rank
    ([attack(PIXELS, 30.0)], "assumes_8_bit"),
    ([attack(PLAIN, 30.0, "failed")], "partly_inapplicable"),
    ([attack(PLAIN, 30.0, "unsupported")], "partly_inapplicable"),
    ([attack(PLAIN, 30.0, "unscored")], "partly_unscored"),
    ([attack(PLAIN, 30.0, "unscored", "failed")], "partly_inapplicable partly_unscored"),
    ([attack("april", 30.0, **ALTERED)], "altered_client"),
    ([attack(PLAIN, 30.0, **SHARED)], "unfinished"),
    ([attack(PLAIN, 30.0, "failed", **SHARED)], "partly_inapplicable"),  # it was run
    ([attack(PLAIN, 30.0, 31.0, **SHARED)], ""),
    # a best of two: of those that it took some picture from
    ([attack(SPAN, 30.0, 30.0, **MASKED), attack(PIXELS, 9.0, 31.0, **MASKED)], "assumes_8_bit"),
    ([attack(SPAN, 30.0, 30.0, **MASKED), attack(PIXELS, 9.0, 29.0, **MASKED)], ""),
    (
        [attack(SPAN, 30.0, 9.0, **INT8), attack(PIXELS, 20.0, 20.0, **INT8)],
        "assumes_8_bit noise_ignored",
    ),
    (
        [attack("april", 40.0, 10.0, of=ILL, **CLOSED), attack(PLAIN, 20.0, 20.0, **CLOSED)],
        "ill_conditioned",
    ),
    ([attack("april", 10.0, 10.0, of=ILL, **CLOSED), attack(PLAIN, 20.0, 20.0, **CLOSED)], ""),
    # attacks that compete and have not the same images
    ([attack(SPAN, 30.0, 20.0, **MASKED), attack("token_span", 25.0, **MASKED)], "unfinished"),
    ([attack(SPAN, 30.0, **MASKED), attack("token_span", 25.0, 20.0, **MASKED)], "unfinished"),
    ([attack(SPAN, 30.0, 20.0, **MASKED), attack("token_span", 25.0, 30.0, **MASKED)], ""),
    (
        [attack(SPAN, 30.0, 20.0, **MASKED), attack("token_span", 25.0, "failed", **MASKED)],
        "cut_short",
    ),
    ([attack(SPAN, 30.0, 20.0, **MASKED), attack("token_span", 25.0, "unsupported", **MASKED)], ""),
    ([attack(SPAN, 30.0, 20.0, **MASKED), attack("token_span", **MASKED)], ""),  # not begun
    ([attack(SPAN, math.inf, **MASKED), attack("token_span", "failed", **MASKED)], ""),  # all exact
]


@pytest.mark.parametrize(("attacks", "expected"), BORDERS)
def test_each_flag_has_its_border(tmp_path: Path, attacks: list[Attack], expected: str) -> None:
    (row,) = card_of_lines(tmp_path, *attacks).rows
    figure = row.one_upload or row.published
    assert figure is not None
    assert figure.of == max(len(psnr) - psnr.count("unscored") for _, psnr, _ in attacks)
    assert keys(figure) == expected


@pytest.mark.parametrize(
    ("name", "facts", "diagnostics", "expected"),
    [
        (SPAN, {"plain_share": 0.5, **MASKED}, {}, "some_unshuffled"),
        (SPAN, {"plain_share": 0.5, "gamma": 0.0}, {}, ""),
        (SPAN, MASKED, {"empty_mask": 1.0}, "some_unshuffled"),
        (SPAN, MASKED, {"empty_mask": 0.0}, ""),
        ("patch_prior", {"defenses": "mine"}, {"undeclared_error": 1.0}, "undeclared_error"),
        ("patch_prior", {"defenses": "mine"}, {"undeclared_error": 0.0}, ""),
    ],
)
def test_each_flag_of_a_client_has_its_border(
    tmp_path: Path,
    name: str,
    facts: dict[str, Any],
    diagnostics: dict[str, float],
    expected: str,
) -> None:
    (row,) = card_of_lines(tmp_path, (intact(name, **facts), [30.0], diagnostics)).rows
    assert keys(row) == expected


# attacks that were not run ------------------------------------------------------------------------

ONE: list[tuple[dict[str, Any], list[float | str]]] = [({"attack": "masked_span"}, [20.0])]
LATTICE: dict[str, Any] = {"attack": "pixel_lattice"}
ROUNDS: dict[str, Any] = {"attack": "R=6", "attack_name": "multi_round", "uploads": 6}


@pytest.mark.parametrize(
    ("first", "facts", "further", "expected"),
    [
        ((LATTICE, [30.0]), {}, [], "fewer_attacks"),
        ((LATTICE, [30.0]), {}, [(LATTICE, [10.0])], ""),
        ((LATTICE, [30.0]), {}, [(LATTICE, ["failed"])], ""),  # tried, and marked
        ((LATTICE, [30.0]), {"gamma": 0.3}, [], "fewer_attacks"),
        ((LATTICE, [30.0]), {"dtype": "float64"}, [], "fewer_attacks"),
        ((LATTICE, [30.0]), {"model": "ViT-S"}, [], "fewer_attacks"),
        # not alike
        ((LATTICE, [30.0]), {"setting": "b"}, [], ""),
        ((LATTICE, [30.0]), {"batch": 4}, [], ""),
        ((LATTICE, [30.0]), {"withhold": "pos_embed"}, [], ""),
        # failed on the first client too, or needs more uploads
        ((LATTICE, ["failed"]), {}, [], ""),
        ((ROUNDS, [30.0]), {}, [], ""),
    ],
)
def test_a_client_on_which_an_attack_was_not_tried_is_flagged(
    tmp_path: Path,
    first: tuple[dict[str, Any], list[float | str]],
    facts: dict[str, Any],
    further: list[tuple[dict[str, Any], list[float | str]]],
    expected: str,
) -> None:
    """The other one, on which it scored, never is."""
    other = MASKED | {"defenses": "int8"} | facts
    lines = [
        (intact(f"{name} {k}", **of | own), psnr)
        for name, of, attacks in (("first", MASKED, [*ONE, first]), ("other", other, ONE + further))
        for k, (own, psnr) in enumerate(attacks)
    ]
    by_noise = {"int8" in row.client: row for row in card_of_lines(tmp_path, *lines).rows}
    assert (keys(by_noise[False]), keys(by_noise[True])) == ("", expected)


def test_an_attack_that_a_client_of_another_run_met_is_missed_and_named(tmp_path: Path) -> None:
    """Also where the runs name their models differently; nothing is missed where all is exact."""
    card_of_lines(tmp_path / "one", (intact("span", attack="masked_span", **MASKED), [21.0, 22.0]))
    lattice = intact("lattice", attack="pixel_lattice", model="B", defenses="int8", **MASKED)
    exact = intact("exact", attack="masked_span", model="C", **MASKED)
    card_of_lines(tmp_path / "two", (lattice, [20.0]), (exact, [math.inf]))
    card = read_contents([tmp_path / "one", tmp_path / "two"]).card
    without = [row.one_upload.without for row in card.rows if row.one_upload]
    assert without == [("pixel_lattice",), ("masked_span",), ()]
    assert [keys(row) for row in card.rows] == ["fewer_attacks", "fewer_attacks", ""]
