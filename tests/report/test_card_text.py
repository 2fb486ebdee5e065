"""The card on the console and in Markdown: twelve lines at most, no line wider than the console."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.card.content import Card, CardFigure
from mjp_privacy.report.card.flags import BELOW_FLOOR, NOT_ADAPTIVE
from mjp_privacy.report.card.text import (
    HEADINGS,
    LINES,
    WIDTH,
    card_notes,
    card_table,
    console_card,
    counts_text,
    figures_of,
    interval_text,
)
from mjp_privacy.report.console import console_text
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.write import write_report
from tests.helpers.card_run import CLIENTS, TITLES, card_of, card_of_lines, card_run
from tests.helpers.ladder_rows import simple_line
from tests.helpers.night import nightly
from tests.helpers.report_rows import HOSTILE, intact

ESCAPES = "\x1b[31mred\x1b[0m\r\x07\x00\u202e\u2028second line\nthird\tline"
FIGURE = CardFigure("masked_span", 3, 71.74, 66.91, 76.26, 80.0, 200, 116, 188, 200)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Card:
    return card_of(card_run(tmp_path_factory.mktemp("card_text") / "run"))


def fits(text: str, most: int = LINES) -> list[str]:
    """The lines of a text that fits the console and steers no terminal."""
    lines = text.removesuffix("\n").split("\n")
    assert len(lines) <= most
    assert max(map(len, lines)) <= WIDTH
    assert all(letter.isprintable() for line in lines for letter in line)
    return lines


def clients(folder: Path, facts: Sequence[dict[str, Any]]) -> Card:
    """A card of as many clients; each gets two attacks, one with several uploads, and a floor."""
    cells: list[tuple[dict[str, Any], list[float | str], dict[str, float]]] = []
    for i, changes in enumerate(facts):
        known: dict[str, Any] = {"setting": "c", "gamma": 0.27} | changes
        psnr: list[float | str] = [101.0, 35.5, 20.0, "failed"]
        cells.append(
            (intact(f"{i} span", attack="masked_span", **known), psnr, {"grey_psnr": 60.0})
        )
        several = {"attack": f"R=6 {i}", "attack_name": "multi_round", "uploads": 6}
        cells.append((intact(f"{i} rounds", **several, **known), psnr[::-1], {"grey_psnr": 60.0}))
        cells.append((intact(f"{i} grey", attack="grey", role="floor", **known), [60.0] * 4, {}))
    return card_of_lines(folder, *cells)


# the console --------------------------------------------------------------------------------------


def test_the_made_up_run_fits(card: Card) -> None:
    lines = fits(console_card(card))
    text = "\n".join(lines)
    said = f"{card.verdict} {card.sentence} {card.beside}"
    assert " ".join(text.split("\n\n")[0].split()) == said
    assert len(card.verdict.split()) <= 30
    for client in CLIENTS:
        assert (TITLES[client][:9] in text) or client == "april only"
    for flag in card.flags:
        assert f"{flag.mark} {flag.name}" in " ".join(lines)
    assert any("further client" in line for line in lines)


def test_its_cells_are_the_figures_of_the_card(card: Card) -> None:
    """A row's cells stand under their headings, and every mean and count is the card's."""
    head, *lines = console_card(card).split("\n\n")[1].splitlines()
    places = [head.index(heading) for heading in HEADINGS]
    shown = 0
    for row in card.rows:
        line = next(
            (x for x in lines if x.startswith(row.client[:8]) and row.client[-6:] in x), None
        )
        if line is None:
            continue
        shown += 1
        starts = [*places, WIDTH]
        cells = [line[a:b].strip() for a, b in pairwise(starts)]
        *figures, floor = figures_of(row)
        assert floor is not None
        assert cells[3] == f"{floor.mean:.1f}"
        for figure, cell in zip(figures, cells, strict=False):
            if figure is None:
                assert cell == "–"
                continue
            assert cell.startswith(f"{figure.mean:.1f}")
            assert f"{figure.exact}|{figure.above_20}" in cell
            marks = "".join(flag.mark for flag in figure.flags)
            assert f" {marks}," in cell or not marks
    assert shown >= 2


def test_the_client_of_the_sentence_and_the_undefended_one_are_never_left_out(
    tmp_path: Path,
) -> None:
    """Though three others stand before and behind it, and there is room for few."""
    facts: list[dict[str, Any]] = [
        *({"withhold": "pos_embed", "gamma": 0.0, "model": f"A{i}"} for i in range(2)),
        *({"model": f"B{i}"} for i in range(3)),
        {"gamma": 0.0, "model": "C"},
    ]
    made = clients(tmp_path, facts)
    assert made.rows[made.main].client == "MJP γ .27 (c) · B0"
    assert "MJP γ .27 client" in made.sentence
    text = "\n".join(fits(console_card(made)))
    assert "MJP γ .27 (c) · B0" in text
    assert "plain (c) · C" in text
    assert "further client" in text


@pytest.mark.parametrize("count", [1, 2, 7, nightly(40)])
def test_any_number_of_clients_fits(tmp_path: Path, count: int) -> None:
    made = clients(tmp_path, [{"gamma": (i + 1) / 50} for i in range(count)])
    lines = fits(console_card(made))
    table = [line for line in lines if "MJP γ" in line and "|" in line]
    assert len(table) == min(count, len(table)) > 0
    if count > len(table):
        assert f"{count - len(table)} further client" in lines[-1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "facts",
    [
        {"model": HOSTILE},
        {"model": ESCAPES},
        {"model": "a model " * 60},
        {"model": "w" * 3000},
        {"defenses": "int8 + " * 400},
        {"defenses": ESCAPES * 50},
        {"withhold": HOSTILE * 30, "model": "x" * 200},
        {"round": "r" * 500, "client_label": ESCAPES},
        {"dtype": "float" + "6" * 400},
    ],
)
def test_hostile_and_long_labels_fit(tmp_path: Path, facts: dict[str, Any]) -> None:
    changes = [{}, facts, {**facts, "gamma": 0.5}]
    fits(console_card(clients(tmp_path / "several", changes)))
    made = clients(tmp_path / "one", [facts])
    assert any("|" in line for line in fits(console_card(made))[-6:])


def test_many_flags_and_large_counts_fit(card: Card) -> None:
    """Each figure as wide as it can be, in every column."""
    wide = replace(
        FIGURE, n=9999, exact=9998, above_20=9999, of=10000, flags=card.flags, attack="w" * 300
    )
    rows = tuple(
        replace(row, published=wide, one_upload=wide, any_uploads=replace(wide, of=9999))
        for row in card.rows
    )
    fits(console_card(replace(card, rows=rows)))
    fits(console_card(replace(card, rows=rows, sentence="a word " * 900)))
    fits(console_card(replace(card, rows=rows, sentence="", beside="")))


def test_an_ordinary_ladder_loses_no_count_or_mark(card: Card) -> None:
    """Where intervals have no room they go, and nothing else does."""
    figures = [
        replace(FIGURE, flags=(BELOW_FLOOR, NOT_ADAPTIVE), n=of, of=of) for of in (200, 60, 40)
    ]
    rows = tuple(
        replace(row, published=figures[0], one_upload=figures[1], any_uploads=figures[2])
        for row in card.rows
    )
    text = "\n".join(fits(console_card(replace(card, rows=rows))))
    assert "[66.9, 76.3]" not in text
    assert "[95 %]" not in text
    for of in (200, 60, 40):
        assert f"71.7 fn, 116|188 of {of}" in text


def test_intervals_stand_where_there_is_room(card: Card) -> None:
    rows = tuple(
        replace(row, published=FIGURE, one_upload=FIGURE, any_uploads=None) for row in card.rows
    )
    text = "\n".join(fits(console_card(replace(card, rows=rows))))
    assert "71.7 [66.9, 76.3], 116|188" in text
    assert re.search(r"\[95 %\], exact\|≥20 of 200", text)


def test_no_clients_and_no_truth(tmp_path: Path) -> None:
    made = card_of_lines(tmp_path / "none", (intact("grey", role="floor"), [11.0], {}))
    assert fits(console_card(made)) == ["No client was attacked: there are no rows of an attack."]
    store = RunStore(tmp_path / "blind")
    entry = intact("masked_span", gamma=0.27)
    store.write_cells([entry])
    simple_line(store, entry, ["unscored"] * 3)
    lines = fits(console_card(card_of(tmp_path / "blind")))
    assert lines
    assert not any("|" in line or "nan" in line for line in lines)


@pytest.mark.parametrize("everything", [False, True])
def test_the_console_opens_with_the_card(tmp_path: Path, everything: bool) -> None:
    card_run(tmp_path / "run")
    printed = write_report([tmp_path / "run"], tmp_path / "out", everything=everything).console
    first = console_card(read_contents([tmp_path / "run"]).card)
    assert printed.startswith(first)
    fits(printed, 10_000)
    assert ("±" in printed) == everything


def test_reasons_are_cut_to_a_line_and_counted() -> None:
    made = Card("A sentence.", "", (), 0, (), (), ())
    reasons = [f"{i} images failed: {ESCAPES} {'x' * 300}" for i in range(9)]
    lines = fits(console_text(made, reasons))
    assert lines[0] == "A sentence."
    assert [line[:9] for line in lines[2:6]] == [f"{i} images " for i in range(4)]
    assert lines[6] == "and 5 further reasons: see the page"
    assert len(lines) == 7
    assert console_text(made, []) == "A sentence.\n"


# cells --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "71.7 [66.9, 76.3]"),
        ({"flags": (BELOW_FLOOR, NOT_ADAPTIVE)}, "71.7 [66.9, 76.3] fn"),
        ({"low": math.nan, "high": math.nan}, "71.7"),
        ({"mean": 100.0, "low": 100.0, "high": 100.0}, "100 (cap)"),
        ({"mean": 99.96, "low": 99.0, "high": 100.0}, "99.96 [99.0, 100.0]"),
        ({"mean": 99.94, "low": 99.0, "high": 100.0}, "99.9 [99.0, 100.0]"),
        ({"n": 190}, "71.7 [66.9, 76.3] over 190"),
        ({"n": 190, "flags": (BELOW_FLOOR,)}, "71.7 [66.9, 76.3] over 190 f"),
        ({"mean": 100.0, "n": 190}, "100 (cap) over 190"),
        ({"mean": math.nan}, "–"),
    ],
)
def test_means_in_words(changes: dict[str, Any], expected: str) -> None:
    assert interval_text(replace(FIGURE, **changes)) == expected


def test_counts_in_words() -> None:
    assert counts_text(FIGURE) == "116 exact, 188 ≥ 20 of 200"
    assert counts_text(None) == counts_text(replace(FIGURE, mean=math.nan)) == ""
    assert interval_text(None) == "–"


# Markdown -----------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_client_with_its_attack_named(card: Card) -> None:
    table = card_table(card)
    assert table.header == ("Client", *HEADINGS)
    assert len(table.align) == len(table.header)
    for row, cells in zip(card.rows, table.rows, strict=True):
        marks = "".join(flag.mark for flag in row.flags)
        assert cells[0] == row.client + (f" ({marks})" if marks else "")
        for figure, cell in zip(figures_of(row), cells[1:], strict=True):
            if figure is None:
                assert cell == "–"
            else:
                assert cell == f"{interval_text(figure)}; {counts_text(figure)}; {figure.attack}"


def test_every_letter_in_the_table_is_explained_below(card: Card) -> None:
    notes = card_notes(card)
    for flag in card.flags:
        assert f"{flag.mark}: {flag.name}. {flag.text}" in notes
    for heading, text in card.facts:
        assert f"{heading}: {text}" in notes
    assert any(note.startswith("Not tried: attacks on this client: ") for note in notes)
    assert any(note.startswith("What would change the figure: ") for note in notes)
    assert not any(
        note.startswith("What would") for note in card_notes(replace(card, would_change=()))
    )


@pytest.mark.nightly
def test_markdown_opens_with_the_sentence(tmp_path: Path, card: Card) -> None:
    card_run(tmp_path / "run")
    write_report([tmp_path / "run"], tmp_path / "out", pictures="none")
    lines = (tmp_path / "out/table.md").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert lines[2] == f"**{card.sentence} {card.beside}**"
