"""The answer, its card and the console: every number by hand from the stored rows, whom it is
about, that nothing which failed, is late or missing looks like protection, and that it fits."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.cli import main
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.answer import WORDS
from mjp_privacy.report.card import WIDTH, Card, CardFigure, console_card, console_text
from mjp_privacy.report.clients import CARD_ROWS
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.write import write_report
from tests.helpers.card_run import card_of, card_of_lines, card_run, keys
from tests.helpers.report_rows import (
    add_pictures,
    approved,
    cell,
    image_id,
    intact,
    run_of,
    unscored_run,
)

MASKED: dict[str, Any] = {"setting": "c", "gamma": 0.27}
ZERO = {"zero_rows": 3.0, "grey_psnr": 12.0}


# what it says -------------------------------------------------------------------------------------

GREY, LATE = {"grey_psnr": 12.0}, {"over_budget": 1.0, "attack_seconds": 30.0}
SHARED: dict[str, Any] = {"planned_images": 2}
BLOCK = {"first_block": "closed_form"}
PLAIN_LINE = (intact("patch_gradient"), [30.0, 40.0], GREY)
WITHHELD = (intact("token_span", withhold="pos_embed"), [25.0, 8.0], GREY)
FURTHER = (intact("patch_prior"), [30.0, 40.0], GREY)
APRIL_ALONE = (cell("april", **MASKED), [9.0], ZERO)
SPAN = intact("masked_span", **MASKED)
TWO = (SPAN, [21.0, 22.0], ZERO)
BRIGHT = ZERO | {"grey_psnr": 21.0}
SIX = intact("multi_round", uploads=6, **MASKED)
FAILED = (intact("masked_span"), ["failed", "failed"])
HALF_FAILED = (intact("masked_span"), ["failed", "unsupported"])
EXACT = (intact("patch_gradient", **MASKED), [math.inf, 9.0], ZERO)


def span(*psnr: float, **more: Any) -> list[Any]:
    facts = MASKED | more
    return [(intact(f"span {facts['gamma']}", attack="masked_span", **facts), [*psnr], ZERO)]


def noised(line: tuple[Any, ...]) -> list[Any]:
    """The line of a client that adds a defence of `mjp list defenses`."""
    return [(line[0] | {"run_id": "noised", "defenses": "int8"}, *line[1:])]


def token(*psnr: float | str, of: dict[str, float] | None = None, **more: Any) -> list[Any]:
    return [TWO, (intact("token_span", **MASKED | more), [*psnr], of or {})]


def planned(*psnr: float) -> list[Any]:
    """A strong attack that lacks some of its rows, or all: a weaker one takes its place."""
    strong = (intact("pixel_lattice", **MASKED | SHARED), [*psnr], ZERO)
    return [*span(22.0, 21.0, **SHARED), strong]


def floor(*psnr: float) -> list[Any]:
    """The attack got an easy image alone, which decides on which side of the floor it is."""
    return [
        (cell("april", **BLOCK), [15.0, "failed"]),
        (intact("grey", role="floor", **BLOCK), [*psnr]),
    ]


def rounds(*six: float | str) -> list[Any]:
    of_two = intact("r2", attack_name="multi_round", uploads=2)
    of_six = intact("r6", attack_name="multi_round", uploads=6)
    return [PLAIN_LINE, (of_two, [50.0, 50.0]), (of_six, [*six])]


def defended(defence: str) -> list[Any]:
    """One defence, on a plain client and under MJP."""
    lines = {name: {"attack": "masked_span", "defenses": defence} for name in ("own", "both")}
    return [
        (intact(f"{defence} {name}", **facts, **(MASKED if name == "both" else {})), [15.0], ZERO)
        for name, facts in lines.items()
    ]


def april(*status: str) -> list[Any]:
    lines = [(intact("april", victim="april_block"), [word]) for word in status]
    return [*lines, (intact("patch_gradient"), [30.0])]


def once(**psnr: float) -> list[Any]:
    """One client in several settings and precisions: `float32_c=10.0`."""
    cells = {name: dict(zip(("dtype", "setting"), name.split("_"), strict=True)) for name in psnr}
    return [
        (intact(name, attack="masked_span", gamma=0.27, **cells[name]), [value])
        for name, value in psnr.items()
    ]


def recorded(round: int, *psnr: float, label: str = "MJP", **facts: Any) -> tuple[Any, ...]:
    """A line on uploads of one round: its own weights, and a model that is named after it."""
    model = {"model": f"{label}, round {round}", "checkpoint_sha": f"{round:02d}" * 32}
    run_id, facts = f"{label} {round}", MASKED | facts | model
    entry = intact(run_id, attack="masked_span", client_label=label, round=round, **facts)
    return entry, [*psnr], ZERO


UNSHUFFLED = {"empty_mask": [1.0, 0.0, 1.0]}
SAYS: list[tuple[list[Any], dict[str, str]]] = [
    # the defended client, beside none; MJP before other defences; one that some attack knows
    ([PLAIN_LINE, WITHHELD], {"main": "plain, withhold pos embed"}),
    ([WITHHELD, PLAIN_LINE, *span(11.0)], {"main": "MJP γ .27"}),
    # gradients that are withheld from a few attacks alone are no defence that a run asks about
    ([WITHHELD, PLAIN_LINE, FURTHER], {"main": "plain", "verdict": "!withhold"}),
    ([WITHHELD, PLAIN_LINE, FURTHER, *span(11.0)], {"main": "MJP γ .27"}),
    ([PLAIN_LINE, FURTHER, *noised(WITHHELD)], {"main": "withhold pos embed, int8"}),
    ([APRIL_ALONE, PLAIN_LINE], {"main": "plain"}),
    # one other defence beside none is what the run asks about; with several it is MJP
    ([PLAIN_LINE, *span(11.0), *defended("prune 0.1")], {"main": "plain, prune 0.1"}),
    ([PLAIN_LINE, *defended("prune 0.1"), *defended("int8"), TWO], {"main": "MJP γ .27"}),
    ([FAILED], {"verdict": "Not shown|every attack|failed"}),
    ([HALF_FAILED], {"verdict": "!every attack"}),
    # the verdict
    (span(math.inf, 30.0, 12.0), {"verdict": "does not protect these|1 of 3 exactly|!unshuffled"}),
    (
        [(SPAN, [math.inf] * 3, UNSHUFFLED)],
        {"verdict": "3 of 3 exactly, 2 of them from unshuffled"},
    ),
    ([(SPAN, [math.inf, 9.0], UNSHUFFLED)], {"verdict": "1 of 2 exactly, all from unshuffled"}),
    (span(21.0, 30.0, 12.0), {"verdict": "MJP γ .27|does not protect these|2 of 3 at 20 dB"}),
    (span(21.0, 11.0, 12.0), {"verdict": "does not protect all|1 of 3"}),
    (span(19.9, 11.0, 12.0), {"verdict": "not shown"}),
    (span(9.0, 11.0, 10.0), {"verdict": "not shown|failed"}),
    ([(SPAN, [29.0, 28.0, 12.0], ZERO | {"grey_psnr": 24.0})], {"verdict": "not shown"}),
    # pictures that show no more than a grey does do not decide against exact ones of six uploads
    (
        [(SPAN, [22.0, 23.0], BRIGHT), (SIX, [math.inf] * 2, BRIGHT)],
        {"verdict": "does not protect|several uploads give 2 of 2 exactly"},
    ),
    (span(math.inf, setting="b"), {"verdict": "the shuffled pictures|!these pictures"}),
    ([(intact("x"), [30.0, math.inf])], {"verdict": "!protect|1 of 2 exactly"}),
    # a model that was not trained with MJP says nothing of one that was
    (
        span(math.inf, notes=["unk_embed is not trained: set to zeros"]),
        {"verdict": "MJP γ .27 without its training|does not protect", "row": "untrained"},
    ),
    ([EXACT], {"verdict": "1 of 2 exactly", "row": "no_adaptive_attack"}),
    (planned(90.0, 80.0), {"verdict": "!missing", "best": "!unfinished"}),
    (planned(90.0), {"verdict": "missing", "best": "unfinished"}),
    ([recorded(7, 30.0)], {"verdict": "!round"}),
    # the undefended client stands on it, also where it comes last and nothing that matches was run
    (
        [*(span(20.0, gamma=0.1 + i / 20)[0] for i in range(CARD_ROWS + 2)), (cell("p"), [15.0])],
        {"rows": f"{CARD_ROWS} of {CARD_ROWS + 3}", "first": "plain"},
    ),
    # what is assumed, and which uploads are used
    ([(intact("pixel_lattice", **MASKED), [30.0])], {"assumptions": "8-bit|batch 1|as declared"}),
    (span(30.0), {"assumptions": "!8-bit"}),
    (rounds("unsupported", "unsupported"), {"uploads": "2"}),
    (rounds(60.0, "failed"), {"uploads": "6"}),
    # which side of the floor, where the same images agree
    (floor(10.0, 30.0), {"best": "!below_floor"}),
    (floor(18.0, 18.0), {"verdict": "failed", "best": "below_floor"}),
    # why there is no figure, and what was not tried: also not in another setting or precision
    (april("unsupported"), {"published": "does not apply"}),
    (april("failed"), {"published": "failed"}),
    (april("unscored"), {"published": "not scored"}),
    (april(), {"published": "not run"}),
    (token(25.0, 26.0), {"best": "!cut_short", "untried": "!token_span", "vain": "!token_span"}),
    (token("failed", "failed"), {"best": "cut_short", "vain": "token_span"}),
    (token(25.0, "failed"), {"best": "cut_short", "vain": "!token_span"}),
    (token(12.0, 13.0, of=LATE), {"best": "cut_short", "vain": "token_span"}),
    (token("unsupported", "unsupported"), {"best": "!cut_short", "untried": "!token_span"}),
    (token(20.0, dtype="float64"), {"untried": "token_span|!masked_span"}),
    # of several settings the one that asks for the plain picture, there in the lowest precision
    (
        once(float64_b=40.0, float64_c=30.0, float32_b=20.0, float32_c=10.0),
        {"level": "10.0 dB", "rows": "1 of 1"},
    ),
    (once(float64_c=30.0, float32_b=20.0, float32_a=10.0), {"level": "30.0 dB", "rows": "1 of 1"}),
    (once(float64_a=10.0, bfloat16_a=25.0, float32_a=30.0), {"level": "25.0 dB", "rows": "1 of 1"}),
]
"""Lines, and what stands in a part of their answer, or after a `!` does not."""


@pytest.mark.parametrize(("lines", "expected"), SAYS)
def test_what_the_answer_says(tmp_path: Path, lines: list[Any], expected: dict[str, str]) -> None:
    made = card_of_lines(tmp_path, *lines)
    row, (untried, *others) = made.rows[made.main], made.not_tried
    said = {"verdict": made.verdict, "assumptions": made.assumptions}
    if row.client.any_uploads is not None:
        said["uploads"] = f"{row.client.any_uploads.uploads}"
    said |= {"main": row.client.title, "row": keys(row), "published": row.absent["published"]}
    said |= {"rows": f"{len(made.rows)} of {len(made.rows) + made.further}"}
    said |= {"untried": untried, "vain": " ".join(others), "first": made.rows[0].client.title}
    if row.one_upload is not None:
        said |= {"best": keys(row.one_upload), "level": row.one_upload.level()}
    assert len(made.verdict.split()) <= WORDS
    for part, words in expected.items():
        for word in words.split("|"):
            assert (word.removeprefix("!") in said[part]) != word.startswith("!"), said[part]


@pytest.mark.parametrize(
    ("psnr", "code"), [(["failed"], 3), (["unsupported"], 0), (["failed", 9.0], 0)]
)
def test_a_report_without_any_picture_ends_as_one_that_failed(
    tmp_path: Path, psnr: list[Any], code: int
) -> None:
    run = run_of(tmp_path / "run", (intact("masked_span"), psnr))
    assert main(["report", str(run)]) == code


@pytest.mark.parametrize("worst", [*range(3), CARD_ROWS + 1])
def test_the_answer_is_about_the_round_that_leaks_most(tmp_path: Path, worst: int) -> None:
    """And says which, also where the card has no room for all rounds; what a client with another
    defence leaks does not count for it."""
    rounds = [
        recorded(n, *([math.inf, 30.0] if n == worst else [25.0, 30.0]), lr=0.1 / (n + 1))
        for n in range(CARD_ROWS + 2)
    ]
    other = recorded(99, math.inf, math.inf, label="int8", defenses="int8", gamma=0.27)
    prune = recorded(98, 10.0, 10.0, label="prune", defenses="prune 0.1")
    made = card_of_lines(tmp_path, *rounds, other, prune)
    assert (len(made.rows), made.further) == (CARD_ROWS, 4)
    main = made.rows[made.main]
    assert main.client.cell.other["round"] == worst
    assert main.one_upload is not None
    assert f"{main.one_upload.exact} of {main.one_upload.of}" in made.verdict
    assert f"round {worst} " in made.verdict


def flat_run(folder: Path, psnr: list[float], flat: set[int], grey: float = 12.0) -> Card:
    """A card of one attack on pictures with a stored original: noise, or nearly of one colour,
    which by itself scores 20 log10(1 / 0.05), or 26 dB."""
    run_of(folder, (intact("masked_span", defenses="int8"), psnr, {"grey_psnr": grey}))
    noise = torch.rand(len(psnr), 3, 8, 8, generator=torch.Generator().manual_seed(0))
    colour = torch.where(noise > 0.5, 0.55, 0.45)
    of_flat = torch.tensor([at in flat for at in range(len(psnr))]).view(-1, 1, 1, 1)
    tensors = {"images": noise, "target": torch.where(of_flat, colour, noise)}
    ids = [image_id(at) for at in range(len(psnr))]
    add_pictures(RunStore(folder), "masked_span", tensors, ids)
    return card_of(folder)


@pytest.mark.parametrize(
    ("psnr", "flat", "grey", "counted"),
    [
        ([22.0, 30.0], set(), 12.0, "2 of 2"),
        ([26.5, 30.0], {0}, 12.0, "1 of 2"),  # its mean colour is as good
        ([31.0, 30.0], {0, 1}, 12.0, "2 of 2"),  # better than it
        ([26.5, 27.0], {0, 1}, 12.0, "not shown"),
        ([22.0, 30.0], set(), 19.5, "1 of 2"),  # a uniform grey is as good
        ([math.inf, 26.5, 30.0], {0, 1}, 12.0, "1 of 3"),  # an exact one counts always
    ],
)
def test_a_picture_counts_as_leaked_where_it_is_better_than_its_own_floor(
    tmp_path: Path, psnr: list[float], flat: set[int], grey: float, counted: str
) -> None:
    """In the sentence; the table has all at 20 dB or more."""
    made = flat_run(tmp_path, psnr, flat, grey)
    assert counted in made.verdict
    (row,) = made.rows
    assert row.one_upload is not None
    assert row.one_upload.above_20 == len(psnr)
    if math.inf in psnr:
        assert "2 at 20" in made.verdict


# what was not tried -------------------------------------------------------------------------------

SWIN = {"architecture": "swin d96 s2,2 h3 56"}
HALF = MASKED | {"plain_share": 0.5}


@pytest.mark.parametrize(
    ("facts", "zero_rows", "listed", "absent"),
    [
        ({}, 0.0, "token_peeling patch_lattice", "plain_step mask_locator patch_jigsaw"),
        ({"batch": 2}, 0.0, "layer_span token_peeling", "plain_step"),
        (MASKED, 3.0, "pixel_lattice token_peeling", "patch_jigsaw plain_step"),
        (HALF, 3.0, "plain_step april", "patch_jigsaw"),
        (MASKED, 0.0, "patch_jigsaw", "plain_step"),
        (SWIN, 0.0, "", "gradvit patch_gradient april"),
    ],
)
def test_what_was_not_tried_is_made_for_such_a_client(
    tmp_path: Path, facts: dict[str, Any], zero_rows: float, listed: str, absent: str
) -> None:
    line = intact("inverting_gradients", **facts), [30.0], {"zero_rows": zero_rows}
    (named, *_) = card_of_lines(tmp_path, line).not_tried
    names = set(re.findall(r"\w+", named))
    assert names >= {*listed.split()}
    assert not names & {"inverting_gradients", *absent.split()}


# without truth ------------------------------------------------------------------------------------


def test_uploads_without_truth(tmp_path: Path) -> None:
    """Certain pictures of a batch come in no known order, so that two attacks may mean the same
    one: they are not added up."""
    for batch, expected in ((1, 2), (2, 1)):
        marks = {"batch_span": [1.0, 0.0], "span_matching": [0.0, 1.0]}
        of_lines = {n: {"gradient_residual": [0.1] * 2, "certain": v} for n, v in marks.items()}
        made = card_of(unscored_run(tmp_path / f"batch{batch}", of_lines, batch=batch))
        assert "exactly" not in made.verdict
        assert "2 pictures" in made.beside
        assert int(re.findall(r"(\S+) certain:", made.beside)[0]) == expected
    unmarked = {"masked_span": {"gradient_residual": [1e-6]}}
    assert "certain" not in card_of(unscored_run(tmp_path / "none", unmarked)).beside


def test_uploads_that_could_not_be_scored_are_not_without_truth(tmp_path: Path) -> None:
    card_of_lines(tmp_path, (intact("masked_span", **MASKED), ["unscored"]))
    tensors = {"images": torch.rand(1, 3, 8, 8), "target": torch.rand(1, 3, 8, 8)}
    add_pictures(RunStore(tmp_path), "masked_span", tensors, [image_id(0)])
    beside = card_of(tmp_path).beside
    assert "images are known" in beside
    assert "not known" not in beside


# on the console -----------------------------------------------------------------------------------

ESCAPES = "\x1b[31mred\x1b[0m\r\x07\x00\u202e\u2028second line\nthird\tline"
FIGURE = CardFigure("masked_span", 3, 71.74, 66.91, 76.26, 80.0, 200, 116, 188, 200)


def fits(text: str, most: int = 18) -> list[str]:
    """The lines of a text that fits the console and steers no terminal."""
    lines = text.removesuffix("\n").split("\n")
    assert len(lines) <= most
    assert max(map(len, lines)) <= WIDTH
    assert all(letter.isprintable() for line in lines for letter in line)
    return lines


def test_the_answer_as_printed_on_the_page_and_first_of_a_report(tmp_path: Path) -> None:
    """Approved as it is: read the file when it changes."""
    folder = card_run(tmp_path / "run")
    card = card_of(folder)
    text = console_card(card)
    fits(text)
    approved("console.txt", text)
    printed = write_report([folder], tmp_path / "out", pictures="none").console
    assert printed.startswith(text)
    fits(printed, 25)
    wide = replace(FIGURE, n=9999, exact=9998, above_20=9999, of=10000, flags=card.flags)
    figures = {"published": wide, "one_upload": wide, "any_uploads": replace(wide, of=9999)}
    of_wide = tuple(replace(row, **figures) for row in card.rows)
    fits(console_card(replace(card, rows=of_wide, verdict="a word " * 900)))


def test_any_number_of_clients_fits_and_the_others_are_counted(tmp_path: Path) -> None:
    lines = [span(25.0, gamma=(i + 1) / 50, model="A" * 90)[0] for i in range(CARD_ROWS + 2)]
    printed = fits(console_card(card_of_lines(tmp_path, *lines)))
    assert sum(" ≥ 20 dB" in line for line in printed) == CARD_ROWS
    assert "2 further clients" in printed[-1]


def test_no_clients_and_no_truth(tmp_path: Path) -> None:
    made = card_of_lines(tmp_path / "none", (intact("grey", role="floor"), [11.0], {}))
    assert fits(console_card(made)) == [made.verdict]
    contents = read_contents([tmp_path / "none"])
    assert (contents.strip, contents.comparisons) == (None, [])
    assert len(contents.main.rows) == 1
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
