"""What a report calls a client, whether it is defended, which attacks match it, and when a figure
is flagged, on both sides of the border of each flag."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.clients import Client
from mjp_privacy.report.contents import read_contents
from tests.helpers.card_run import card_of_lines, keys
from tests.helpers.report_rows import add_pictures, cell, image_id, intact, run_of

MASKED: dict[str, Any] = {"setting": "c", "gamma": 0.27}


def clients(folder: Path, *cells: dict[str, Any], **diagnostics: float) -> list[Client]:
    """Those with an attack, of a run of these cells."""
    lines = ((entry, ["failed" if entry["run_id"] == "failed" else 20.0]) for entry in cells)
    run_of(folder, *((*line, diagnostics) for line in lines))
    return [client for client in read_contents([folder]).clients if client.attacks]


def matching(client: Client) -> list[str]:
    return [line.attack for line in client.matching]


PLAIN, MATCHING, SPAN, PIXELS = (
    *("patch_gradient", "inverting_gradients", "masked_span", "pixel_lattice"),
)
NAMES: list[tuple[list[str], dict[str, Any], float | None, str]] = [
    ([SPAN], {}, None, "plain"),
    ([SPAN], {"dal": True}, None, "plain, DAL in the loss"),
    ([SPAN], {"a fact of another version": ["a", {"b": 1}]}, None, "plain"),
    ([SPAN], {"steps": 3}, None, "plain, steps 3"),
    ([SPAN], {"gamma": 1.0}, None, "MJP γ 1"),
    ([SPAN], {"withhold": "pos_embed"}, None, "plain, withhold pos embed"),
    ([SPAN], {"position_noise": 0.01}, None, "plain, position noise 0.01"),
    ([SPAN], MASKED | {"defenses": "int8"}, None, "MJP γ .27, int8"),
    # whether it masks is what the upload or an attack says
    ([PLAIN], MASKED, 0.0, "shuffled γ .27"),
    ([PLAIN], MASKED, 50.0, "MJP γ .27"),
    ([PLAIN], {}, 50.0, "plain"),  # zero rows without shuffling are no mask
    ([SPAN], MASKED, 0.0, "MJP γ .27"),  # an attack that knows masks found them
    # gradient matching runs with and without masks, so that its success shows neither
    ([MATCHING], MASKED, None, "γ .27"),
    ([MATCHING, SPAN], MASKED, None, "MJP γ .27"),
]
"""Attacks on a client, its facts, zero rows of its system, and its name."""
DEFENCES = ("γ", "withhold", "positions", "noise")


@pytest.mark.parametrize(("attacks", "facts", "zero_rows", "name"), NAMES)
def test_a_name_says_what_a_client_does(
    tmp_path: Path, attacks: list[str], facts: dict[str, Any], zero_rows: float | None, name: str
) -> None:
    diagnostics = {} if zero_rows is None else {"zero_rows": zero_rows}
    (client,) = clients(tmp_path, *(intact(a, **facts) for a in attacks), **diagnostics)
    assert (client.name, client.masks) == (name, name.startswith("MJP"))
    assert client.defended == any(word in name for word in DEFENCES)


@pytest.mark.parametrize("psnr", [math.nan, "failed", "unscored"])
@pytest.mark.parametrize("stored", [True, False])
def test_a_stored_picture_is_a_reconstruction_and_no_number_is_none(
    tmp_path: Path, psnr: float | str, stored: bool
) -> None:
    run_of(tmp_path, (intact("masked_span", **MASKED), [psnr]))
    if stored:
        pictures = {"images": torch.rand(1, 3, 8, 8)}
        add_pictures(RunStore(tmp_path), "masked_span", pictures, [image_id(0)])
    (client,) = read_contents([tmp_path]).clients
    expected = ("MJP γ .27", ["masked_span"]) if stored else ("γ .27", [])
    assert (client.name, matching(client)) == expected


def test_a_match_met_the_trained_model_made_a_picture_and_knows_masks(tmp_path: Path) -> None:
    """Whatever its label; masks, where its client masks."""
    lost, floor = intact("failed", attack="patch_prior"), intact("grey", role="floor")
    plain = (cell("april"), lost, intact("patch_gradient"), intact("masked_span"), floor)
    (client,) = clients(tmp_path / "plain", *plain)
    assert matching(client) == ["patch_gradient", "masked_span"]
    names = ("april_unk_aware", "patch_gradient", "patch_prior", "masked_span", "unheard of")
    cells = [intact(name, **MASKED) for name in names]
    cells.append(intact("x", attack="masked", attack_name="patch_gradient", **MASKED))
    cells.append(intact("y", attack="plain", attack_name="masked_span", **MASKED))
    (client,) = clients(tmp_path / "masked", *cells, zero_rows=3.0)
    assert matching(client) == ["april_unk_aware", "masked_span", "plain"]


@pytest.mark.parametrize(
    ("cells", "titles"),
    [
        ([intact("one")], ["plain"]),
        (
            [
                intact("one"),
                intact("two", model="ViT-S", dtype="float64"),
                intact("three", seed=4),
                intact("four", round=3),
            ],
            [
                "DeiT-S, no defence used · seed 0",
                "ViT-S, no defence used · float64 · seed 0",
                "DeiT-S, no defence used · seed 4",
                "DeiT-S, no defence used · seed 0 · round 3",
            ],
        ),
        (  # equal ones, as of two checkpoints under one label, are told apart by their first line
            [
                intact("one"),
                intact("grey", role="floor"),
                intact("two", checkpoint_sha="cd" * 32),
                intact("three", **MASKED),
            ],
            ["plain · line 1", "plain · line 3", "γ .27"],
        ),
        (  # of recorded uploads the model is named after label and round: each is said once
            [
                intact("1", **MASKED, model="MJP, round 0", client_label="MJP", round=0),
                intact("2", **MASKED, model="MJP, round 9", client_label="MJP", round=9),
                intact("3", model="plain, round 9", client_label="plain", round=9),
                intact("4", model="ward A, round 9", client_label="ward A", round=9),
                intact("5", **MASKED, model="ward B, round 9", client_label="ward B", round=9),
            ],
            [
                "γ .27 · MJP · round 0",
                "γ .27 · MJP · round 9",
                "plain · round 9",
                "ward A, no defence used · round 9",
                "γ .27 · ward B · round 9",
            ],
        ),
    ],
)
def test_titles_say_what_differs_and_no_more(
    tmp_path: Path, cells: list[dict[str, Any]], titles: list[str]
) -> None:
    assert [client.title for client in clients(tmp_path, *cells)] == titles


@pytest.mark.parametrize(
    ("facts", "other", "found"),
    [
        ({"gamma": 0.5, "setting": "a"}, MASKED, ["grey"]),  # both ask for the plain picture
        ({"gamma": 0.27, "setting": "b"}, MASKED, []),  # what was fed is shuffled
        ({"gamma": 0.27, "setting": "b"}, {"gamma": 0.27, "setting": "b"}, ["grey"]),
        ({"seed": 1}, MASKED, []),
        ({"augment": "flip"}, MASKED, []),
    ],
)
def test_floors_of_another_client_count_where_they_are_of_the_same_images(
    tmp_path: Path, facts: dict[str, Any], other: dict[str, Any], found: list[str]
) -> None:
    other = {"defenses": "int8"} | other
    first, second = clients(
        tmp_path,
        intact("masked_span", **facts),
        intact("other", attack="masked_span", **other),
        intact("grey", role="floor", **other),
    )
    assert [line.attack for line in first.floors] == found
    assert [line.attack for line in second.floors] == ["grey"]


def test_a_control_that_failed_on_pictures_is_no_floor_of_the_others(tmp_path: Path) -> None:
    floors = {"mean_image": [30.0, "failed", "failed"], "grey": [12.0, 12.0, 12.0]}
    lines = [(intact(name, role="floor"), psnr) for name, psnr in floors.items()]
    card = card_of_lines(tmp_path, (intact("patch_gradient"), [20.5, 40.0, 40.0]), *lines)
    floor, best = card.rows[0].floor, card.rows[0].one_upload
    assert floor is not None
    assert best is not None
    assert (floor.attack, floor.n) == ("grey", 3)
    assert not best.flags


# flags --------------------------------------------------------------------------------------------

Attack = tuple[dict[str, Any], list[float | str], dict[str, float]]
"""Its cell, PSNR by image, diagnostics."""


def attack(
    name: str, *psnr: float | str, of: dict[str, float] | None = None, **facts: Any
) -> Attack:
    return intact(name, **facts), [*psnr], of or {}


GREY, CLOSED = {"grey_psnr": 12.0}, {"first_block": "closed_form"}
ALTERED = {"victim": "april_block"}
FAR, NEAR = {"gradient_residual": 0.11}, {"gradient_residual": 0.1}
ILL, WELL = {"cond_a": 2.0**25}, {"cond_a": 2.0**24}
BATCH = MASKED | {"dal": True, "batch": 4}
MINE = {"defenses": "mine"}
SHARED: dict[str, Any] = {"planned_images": 2}

BORDERS: list[tuple[list[Attack], str]] = [
    ([attack(PLAIN, 12.0, of=GREY)], ""),
    ([attack(PLAIN, 11.9, of=GREY)], "below_floor"),
    ([attack(MATCHING, 30.0, of=FAR)], "not_converged"),
    ([attack(MATCHING, 30.0, of=NEAR)], ""),
    ([attack(PLAIN, 30.0, of={"gradient_residual": 0.9})], ""),  # does not optimise
    ([attack(PLAIN, 30.0, defenses="int8")], "noise_ignored"),
    ([attack(PLAIN, 30.0, defenses="dp_sgd 0")], ""),  # clips alone
    ([attack(PLAIN, 30.0, position_noise=0.1)], "noise_ignored"),
    ([attack("patch_prior", 30.0, defenses="int8")], ""),
    ([attack("shared_picture", 30.0, **BATCH)], "dal_left_in"),
    ([attack("shared_picture", 30.0, **BATCH | {"mask": "batch"})], ""),
    ([attack("shared_picture", 30.0, **BATCH | {"regressor": "pca"})], "dal_left_in"),
    ([attack("shared_picture", 30.0, **BATCH | {"regressor": "nonlinear"})], ""),
    ([attack("token_peeling", 30.0, **BATCH)], ""),
    ([attack("april", 30.0, of=ILL, **CLOSED, **ALTERED)], "ill_conditioned"),
    ([attack("april", 30.0, of=WELL, **CLOSED)], ""),
    ([attack("april", 30.0, of=ILL, dtype="float64", **CLOSED)], ""),
    ([attack(PLAIN, 30.0, of={"cond_a": math.inf})], ""),  # not bounded by the rank
    ([attack(PIXELS, 30.0)], "assumes_8_bit"),
    ([attack(PLAIN, 30.0, "failed")], "partly_inapplicable"),
    ([attack(PLAIN, 30.0, "unscored")], "partly_unscored"),
    ([attack("april", 30.0, **ALTERED)], "altered_client; no_adaptive_attack"),
    ([attack(PLAIN, 30.0, **SHARED)], "unfinished"),
    ([attack(PLAIN, 30.0, "failed", **SHARED)], "partly_inapplicable"),  # it was run
    # a best of two: of those that it took some picture from
    ([attack(SPAN, 30.0, 30.0, **MASKED), attack(PIXELS, 9.0, 31.0, **MASKED)], "assumes_8_bit"),
    ([attack(SPAN, 30.0, 30.0, **MASKED), attack(PIXELS, 9.0, 29.0, **MASKED)], ""),
    ([attack("april", 10.0, 10.0, of=ILL, **CLOSED), attack(PLAIN, 20.0, 20.0, **CLOSED)], ""),
    # attacks that compete and have not the same images
    ([attack(SPAN, 30.0, 20.0, **MASKED), attack("token_span", 25.0, **MASKED)], "unfinished"),
    ([attack(SPAN, 30.0, 20.0, **MASKED), attack("token_span", 25.0, 30.0, **MASKED)], ""),
    (
        [attack(SPAN, 30.0, 20.0, **MASKED), attack("token_span", 25.0, "failed", **MASKED)],
        "cut_short",
    ),
    ([attack(SPAN, 30.0, 20.0, **MASKED), attack("token_span", 25.0, "unsupported", **MASKED)], ""),
    ([attack(SPAN, 30.0, 20.0, **MASKED), attack("token_span", **MASKED)], ""),  # not begun
    ([attack(SPAN, math.inf, **MASKED), attack("token_span", "failed", **MASKED)], ""),  # all exact
    # flags of the client
    ([attack(SPAN, 30.0, plain_share=0.5, **MASKED)], "; some_unshuffled"),
    ([attack(SPAN, 30.0, plain_share=0.5, **MASKED | {"gamma": 0.0})], ""),
    ([attack(SPAN, 30.0, of={"empty_mask": 1.0}, **MASKED)], "; some_unshuffled"),
    ([attack("patch_prior", 30.0, of={"undeclared_error": 1.0}, **MINE)], "; undeclared_error"),
]
"""Attacks on one client, and the flags of its figure; after a `;` those of the client itself."""


@pytest.mark.parametrize(("attacks", "expected"), BORDERS)
def test_each_flag_has_its_border(tmp_path: Path, attacks: list[Attack], expected: str) -> None:
    (row,) = card_of_lines(tmp_path, *attacks).rows
    figure = row.one_upload or row.published
    assert figure is not None
    assert figure.of == max(len(psnr) - psnr.count("unscored") for _, psnr, _ in attacks)
    of_figure, _, of_client = expected.partition("; ")
    assert (keys(figure), keys(row)) == (of_figure, of_client)


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
        ((LATTICE, [30.0]), {"model": "ViT-S"}, [], "fewer_attacks"),
        # not alike
        ((LATTICE, [30.0]), {"setting": "b"}, [], ""),
        ((LATTICE, [30.0]), {"batch": 4}, [], ""),
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
    by_noise = {"int8" in row.client.title: row for row in card_of_lines(tmp_path, *lines).rows}
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
