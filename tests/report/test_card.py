"""Every number on the card, recomputed from the stored rows, and its flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mjp_privacy.report.card import Card, CardFigure, CardRow
from tests.helpers.card_run import (
    CANDIDATES,
    CLIENTS,
    COUNT,
    PHOTOGRAPHS,
    PSNR,
    TITLES,
    ByHand,
    Expected,
    card_of,
    card_run,
    keys,
)

ON_CARD = [client for client in CLIENTS if CANDIDATES[client]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return card_run(tmp_path_factory.mktemp("card") / "run")


@pytest.fixture(scope="module")
def card(folder: Path) -> Card:
    return card_of(folder)


@pytest.fixture(scope="module")
def by_hand(folder: Path) -> ByHand:
    return ByHand(folder)


def row_of(card: Card, client: str) -> CardRow:
    (row,) = (row for row in card.rows if row.client == TITLES[client])
    return row


def same(figure: CardFigure | None, expected: Expected) -> None:
    assert figure is not None
    names = ("mean", "low", "high", "median")
    found = {name: getattr(figure, name) for name in names}
    assert found == pytest.approx({name: getattr(expected, name) for name in names})
    counts = ("n", "exact", "above_20", "of")
    assert [getattr(figure, name) for name in counts] == [getattr(expected, n) for n in counts]


def numbers(text: str) -> list[float]:
    """The numbers in a sentence; those in words such as float32 and in γ .27 are names."""
    return [float(found) for found in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", text)]


# every number -------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", ON_CARD)
def test_the_best_with_one_upload(card: Card, by_hand: ByHand, client: str) -> None:
    figure = row_of(card, client).one_upload
    expected = by_hand.best(client, CANDIDATES[client])
    same(figure, expected)
    assert figure is not None
    taken = list(expected.chosen.values())
    counts = [(attack, taken.count(attack)) for attack in CANDIDATES[client] if attack in taken]
    first, *others = sorted(counts, key=lambda pair: -pair[1])[:2]
    named = ", ".join(f"{attack} {count}" for attack, count in (first, *others))
    assert figure.attack == (named if others else first[0])


def test_the_run_has_something_to_tell_apart(by_hand: ByHand) -> None:
    """Else the tests above would pass with the wrong rule: all differ from one another."""
    best = by_hand.best("mjp", CANDIDATES["mjp"])
    assert set(best.chosen.values()) == set(CANDIDATES["mjp"])
    assert len({best.n, best.exact, best.above_20, best.of, COUNT}) == 5
    assert best.mean != pytest.approx(best.median, abs=1)


def test_the_best_with_any_number(card: Card, by_hand: ByHand) -> None:
    same(row_of(card, "mjp").any_uploads, by_hand.best("mjp", (*CANDIDATES["mjp"], "multi_round")))
    assert [row.any_uploads is None for row in card.rows] == [True, False, *[True] * 3]


@pytest.mark.parametrize("client", ["plain", "mjp", "noise"])
def test_april_as_published(card: Card, by_hand: ByHand, client: str) -> None:
    same(row_of(card, client).published, by_hand.best(client, ["april"]))


def test_the_floor_is_the_best_control(card: Card, by_hand: ByHand) -> None:
    """Its own, or else that of the first client whose pictures are those of the same images."""
    floors = {a: by_hand.best("mjp", [a]) for a in ("grey", "mean_image", "other_image")}
    assert max(floors, key=lambda name: floors[name].mean) == "mean_image"
    for client in ("plain", "mjp", "withheld", "unshuffled"):
        floor = row_of(card, client).floor
        same(floor, floors["mean_image"])
        assert floor is not None
        assert floor.attack == "mean_image"
    same(row_of(card, "noise").floor, by_hand.best("noise", ["grey"]))


def test_without_controls_the_floor_is_the_grey_that_every_run_stores(tmp_path: Path) -> None:
    folder = card_run(tmp_path, floors=False)
    by_hand, card = ByHand(folder), card_of(folder)
    for client in ON_CARD:
        floor = row_of(card, client).floor
        same(floor, by_hand.grey(client))
        assert floor is not None
        assert floor.attack == "uniform grey"
    assert len({by_hand.grey(client).mean for client in ON_CARD}) > 1  # of other images


def test_accuracy_is_of_the_pictures_as_fed(card: Card, by_hand: ByHand) -> None:
    for client in ON_CARD:
        lines = PSNR[client].values()
        scored = [any(not isinstance(of[i], str) for of in lines) for i in range(COUNT)]
        hits = [i % 5 > 0 for i in range(COUNT) if scored[i]]
        row = row_of(card, client)
        assert (row.accuracy, row.accuracy_n) == pytest.approx(by_hand.accuracy(client))
        expected = 100 * sum(hits) / len(hits), len(hits)
        assert (row.accuracy, row.accuracy_n) == pytest.approx(expected)
    first = row_of(card, "mjp")
    said = [round(first.accuracy, 1), 1, first.accuracy_n]
    assert numbers(dict(card.facts)["Accuracy"])[:3] == said


def test_every_number_of_the_answer(card: Card, by_hand: ByHand) -> None:
    """Counts of one upload in the verdict; of the undefended client, several uploads and april,
    which is below the floor, beside it."""
    best = by_hand.best("mjp", CANDIDATES["mjp"])
    assert numbers(card.verdict) == [best.exact, best.of, best.above_20, 20]
    plain = by_hand.best("plain", CANDIDATES["plain"])
    several = by_hand.best("mjp", (*CANDIDATES["mjp"], "multi_round"))
    april, floor = by_hand.best("mjp", ["april"]), by_hand.best("mjp", ["mean_image"])
    assert numbers(card.beside) == pytest.approx(
        [
            *(plain.exact, plain.of, plain.above_20, 20),
            *(6, several.exact, several.of, several.above_20, 20),
            *(round(value, 1) for value in (april.mean, april.low, april.high)),
            *(april.n, round(floor.mean, 1), len(set(PHOTOGRAPHS.values()))),
        ]
    )


def test_every_number_of_what_would_change_it(card: Card, by_hand: ByHand) -> None:
    span, matching = (by_hand.best("mjp", [a]) for a in ("masked_span", "inverting_gradients"))
    lattice, photographs, recipe = card.would_change
    assert "masked_span" in lattice
    assert (span.exact, span.median) > (matching.exact, matching.median)
    assert numbers(lattice.replace("1/255", "")) == [span.exact, span.of]
    assert "inverting_gradients" in photographs
    assert numbers(photographs) == [matching.exact, matching.of]
    assert "unshuffled" in recipe


def test_what_was_not_tried_was_not(card: Card) -> None:
    heading = "attacks on this client: "
    (attacks,) = (item for item in card.not_tried if item.startswith(heading))
    assert attacks.removeprefix(heading).split(", ") == [
        *("april_unk_aware", "april_prior", "patch_prior", "plain_step", "patch_lattice"),
        *("token_span", "april_optimization", "gradvit"),
    ]
    assert "batches of more than one picture" in card.not_tried
    assert "several local steps" in card.not_tried


# flags --------------------------------------------------------------------------------------------


def test_flags_of_the_made_up_run(card: Card) -> None:
    figures = {
        client: tuple(
            "-" if figure is None else keys(figure)
            for figure in (row.published, row.one_upload, row.any_uploads, row.floor)
        )
        for client in ON_CARD
        for row in [row_of(card, client)]
    }
    assert figures == {
        # one image failed
        "plain": ("altered_client ill_conditioned", "partly_inapplicable", "-", ""),
        # one image failed; gradient matching, far from the upload, has the best picture of one
        # image with one upload and of none with several
        "mjp": (
            "altered_client below_floor partly_inapplicable",
            "assumes_8_bit cut_short not_converged partly_inapplicable partly_unscored",
            *("assumes_8_bit cut_short partly_inapplicable partly_unscored", ""),
        ),
        # pixel_lattice does not weigh the noise
        "noise": (
            "altered_client below_floor noise_ignored",
            *("assumes_8_bit noise_ignored", "-", ""),
        ),
        "withheld": ("-", "partly_inapplicable", "-", ""),
        # pixel_lattice is never the best
        "unshuffled": ("-", "", "-", ""),
    }
    fewer = "fewer_attacks"
    assert [keys(row) for row in card.rows] == [  # withheld is like no other
        *("", "", fewer, "", f"{fewer} some_unshuffled"),
    ]
