"""The console's answer: ten lines at most, none wider than the console, no name cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.report.card import Card, CardFigure, card_table
from mjp_privacy.report.console import LINES, WIDTH, console_card, console_text
from mjp_privacy.report.write import write_report
from tests.helpers.card_run import card_of, card_of_lines, card_run
from tests.helpers.night import nightly
from tests.helpers.report_rows import approved, intact

ESCAPES = "\x1b[31mred\x1b[0m\r\x07\x00\u202e\u2028second line\nthird\tline"
FIGURE = CardFigure("masked_span", 3, 71.74, 66.91, 76.26, 80.0, 200, 116, 188, 200)


def fits(text: str, most: int = LINES) -> list[str]:
    """The lines of a text that fits the console and steers no terminal."""
    lines = text.removesuffix("\n").split("\n")
    assert len(lines) <= most
    assert max(map(len, lines)) <= WIDTH
    assert all(letter.isprintable() for line in lines for letter in line)
    return lines


def clients(folder: Path, facts: list[dict[str, Any]]) -> Card:
    """A card of as many clients; each gets two attacks, one with several uploads, and a floor."""
    lines: list[tuple[Any, ...]] = []
    psnr: list[float | str] = [101.0, 35.5, 20.0, "failed"]
    for i, changes in enumerate(facts):
        known: dict[str, Any] = {"setting": "c", "gamma": 0.27} | changes
        of_six = {"attack": f"R=6 {i}", "attack_name": "multi_round", "uploads": 6}
        lines += [
            (intact(f"{i} span", attack="masked_span", **known), psnr),
            (intact(f"{i} rounds", **of_six, **known), psnr[::-1]),
            (intact(f"{i} grey", attack="grey", role="floor", **known), [60.0] * 4),
        ]
    return card_of_lines(folder, *lines)


def test_the_answer_as_printed_on_the_page_and_first_of_a_report(tmp_path: Path) -> None:
    """Approved as it is: read both files when they change."""
    folder = card_run(tmp_path / "run")
    card = card_of(folder)
    text = console_card(card)
    fits(text)
    approved("console.txt", text)
    facts = [f"{name}: {value}" for name, value in card.facts]
    rows = [*map(" | ".join, card_table(card).rows), card.beside, *facts]
    approved("card.txt", "\n".join((*rows, *card.would_change, *card.not_tried)) + "\n")
    printed = write_report([folder], tmp_path / "out", everything=True, pictures="none").console
    assert printed.startswith(text)
    fits(printed, LINES + 7)
    assert "worst_case, " in (tmp_path / "out" / "table.md").read_text()
    wide = replace(FIGURE, n=9999, exact=9998, above_20=9999, of=10000, flags=card.flags)
    figures = {"published": wide, "one_upload": wide, "any_uploads": replace(wide, of=9999)}
    of_wide = tuple(replace(row, **figures) for row in card.rows)
    fits(console_card(replace(card, rows=of_wide, verdict="a word " * 900)))


def test_the_client_of_the_answer_and_the_undefended_one_are_never_left_out(tmp_path: Path) -> None:
    """Though three others stand before and behind it, and there is room for few."""
    facts: list[dict[str, Any]] = [
        *({"withhold": "pos_embed", "gamma": 0.0, "model": f"A{i}" * 20} for i in range(2)),
        *({"model": f"B{i}" * 20} for i in range(3)),
        {"gamma": 0.0, "model": "C"},
    ]
    made = clients(tmp_path, facts)
    text = " ".join(" ".join(fits(console_card(made))).split())
    assert made.rows[made.main].client == f"MJP γ .27 · {'B0' * 20}"
    assert "C, no defence used" in text
    assert "further client" in text


@pytest.mark.parametrize("count", [2, 7, nightly(40)])
def test_any_number_of_clients_fits_and_the_others_are_counted(tmp_path: Path, count: int) -> None:
    made = clients(tmp_path, [{"gamma": (i + 1) / 50} for i in range(count)])
    lines = fits(console_card(made))
    shown = [line for line in lines if line.startswith("MJP γ") and " ≥ 20 dB" in line]
    assert 0 < len(shown) <= count
    assert (f"{count - len(shown)} further client" in lines[-1]) == (count > len(shown))


def test_no_clients_and_no_truth(tmp_path: Path) -> None:
    made = card_of_lines(tmp_path / "none", (intact("grey", role="floor"), [11.0], {}))
    assert fits(console_card(made)) == [made.verdict]
    made = card_of_lines(tmp_path / "x", (intact("masked_span", gamma=0.27), ["unscored"] * 3, {}))
    assert not any("nan" in line for line in fits(console_card(made)))


def test_reasons_are_cut_to_a_line_and_counted() -> None:
    made = Card("A sentence.", "", "")
    reasons = [f"{i} images failed: {ESCAPES} {'x' * 300}" for i in range(9)]
    lines = fits(console_text(made, reasons))
    assert lines[0] == "A sentence."
    assert [line[:9] for line in lines[2:6]] == [f"{i} images " for i in range(4)]
    assert "5 further" in lines[6]
    assert len(lines) == 7
    assert console_text(made, []) == "A sentence.\n"


@pytest.mark.parametrize(("exact", "share"), [(20, "at least 57 %"), (5, "5 to 66 %")])
def test_what_crops_prove_stands_beside_their_count(exact: int, share: str) -> None:
    """Wilson's interval over the photographs, not over the crops."""
    figure = replace(FIGURE, exact=exact, above_20=20, of=20, trials=5.13, photographs=6)
    assert f"{exact} of 20 exactly (6 photographs: {share})" in figure.counts()
