"""The answer and its card: every number by hand from the stored rows, whom it is about, and that
nothing which failed, is late, unscored or missing looks like protection."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.answer import WORDS
from mjp_privacy.report.card import Card, CardFigure, CardRow
from mjp_privacy.report.clients import CARD_ROWS
from mjp_privacy.report.contents import read_contents
from tests.helpers.card_run import (
    CANDIDATES,
    CLIENTS,
    PHOTOGRAPHS,
    TITLES,
    ByHand,
    Expected,
    card_of,
    card_of_lines,
    card_run,
    keys,
)
from tests.helpers.report_rows import (
    add_pictures,
    cell,
    image_id,
    image_rows,
    intact,
    wide,
    write_rows,
)

ON_CARD = [client for client in CLIENTS if CANDIDATES[client]]
MASKED: dict[str, Any] = {"setting": "c", "gamma": 0.27}
WITHHELD = {"withhold": "pos_embed"}
ZERO = {"zero_rows": 3.0, "grey_psnr": 12.0}


def numbers(text: str) -> list[float]:
    """The numbers in a sentence; those in words such as float32 and in γ .27 are names."""
    return [float(found) for found in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", text)]


# every number of the made-up run ------------------------------------------------------------------


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


def same(figure: CardFigure | None, expected: Expected, attack: str | None = None) -> None:
    assert figure is not None
    for name in ("mean", "low", "high", "median", "n", "exact", "above_20", "of"):
        assert getattr(figure, name) == pytest.approx(getattr(expected, name)), name
    assert attack in (None, figure.attack)


@pytest.mark.parametrize("client", ON_CARD)
def test_every_figure_is_that_of_the_rows(card: Card, by_hand: ByHand, client: str) -> None:
    row, candidates = row_of(card, client), CANDIDATES[client]
    best = by_hand.best(client, candidates)
    taken = [attack for attack in candidates if attack in best.chosen.values()]
    counts = {attack: list(best.chosen.values()).count(attack) for attack in taken}
    named = sorted(counts, key=lambda attack: -counts[attack])[:2]
    several = ", ".join(f"{attack} {counts[attack]}" for attack in named)
    same(row.one_upload, best, several if len(named) > 1 else named[0])
    assert (row.any_uploads is None) == (client != "mjp")
    if row.any_uploads is not None:
        same(row.any_uploads, by_hand.best(client, (*candidates, "multi_round")))
    assert (row.published is None) == (client in ("withheld", "unshuffled"))
    if row.published is not None:
        same(row.published, by_hand.best(client, ["april"]))
    floor = ("noise", "grey") if client == "noise" else ("mjp", "mean_image")
    same(row.floor, by_hand.best(floor[0], [floor[1]]), floor[1])
    assert (row.accuracy, row.accuracy_n) == pytest.approx(by_hand.accuracy(client))


def test_the_run_has_something_to_tell_apart(by_hand: ByHand) -> None:
    """Else the test above would pass with the wrong rule: all differ from one another."""
    best = by_hand.best("mjp", CANDIDATES["mjp"])
    assert set(best.chosen.values()) == set(CANDIDATES["mjp"])
    assert len({best.n, best.exact, best.above_20, best.of}) == 4
    floors = {a: by_hand.best("mjp", [a]).mean for a in ("grey", "mean_image", "other_image")}
    assert max(floors, key=lambda name: floors[name]) == "mean_image"


def test_without_controls_the_floor_is_the_grey_that_every_run_stores(tmp_path: Path) -> None:
    folder = card_run(tmp_path, floors=False)
    by_hand, card = ByHand(folder), card_of(folder)
    for client in ON_CARD:
        same(row_of(card, client).floor, by_hand.grey(client), "uniform grey")


def test_every_number_of_the_sentences(card: Card, by_hand: ByHand) -> None:
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
    accuracy, n = by_hand.accuracy("mjp")
    assert numbers(dict(card.facts)["Accuracy"])[:3] == [round(accuracy), 1, n]
    span, matching = (by_hand.best("mjp", [a]) for a in ("masked_span", "inverting_gradients"))
    lattice, photographs, recipe = card.would_change
    assert "masked_span" in lattice
    assert numbers(lattice.replace("1/255", "")) == [span.exact, span.of]
    assert "inverting_gradients" in photographs
    assert numbers(photographs) == [matching.exact, matching.of]
    assert "unshuffled" in recipe


def test_what_was_not_tried_was_not(card: Card) -> None:
    attacks, *others = card.not_tried
    assert attacks.partition(": ")[2].split(", ") == [
        *("april_unk_aware", "april_prior", "patch_prior", "plain_step", "patch_lattice"),
        *("token_span", "april_optimization", "gradvit"),
    ]
    assert {"batches of more than one picture", "several local steps"} < set(others)


def test_flags_of_the_made_up_run(card: Card) -> None:
    figures = {
        client: tuple(keys(figure) if figure else "-" for figure in row.figures.values())
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
    fewer = "fewer_attacks"  # withheld is like no other
    assert [keys(row) for row in card.rows] == ["", "", fewer, "", f"{fewer} some_unshuffled"]


# whom it is about, and who stands on it -----------------------------------------------------------

PLAIN_LINE = (intact("patch_gradient"), [30.0, 40.0], {"grey_psnr": 12.0})
WITHHELD_LINE = (intact("token_span", **WITHHELD), [25.0, 8.0], {"grey_psnr": 12.0})


@pytest.mark.parametrize(
    ("lines", "main"),
    [
        ([PLAIN_LINE, WITHHELD_LINE], "plain, withhold pos embed"),
        (
            [WITHHELD_LINE, PLAIN_LINE, (intact("masked_span", **MASKED), [11.0], ZERO)],
            "MJP γ .27",
        ),
        ([(cell("april", **MASKED), [9.0], ZERO), PLAIN_LINE], "plain"),  # no attack knows it
    ],
)
def test_the_answer_is_about_the_defended_client(
    tmp_path: Path, lines: list[Any], main: str
) -> None:
    made = card_of_lines(tmp_path, *lines)
    assert made.rows[made.main].client == main
    assert main == "plain" or main.removeprefix("plain, ") in made.verdict


def test_the_undefended_client_always_stands_on_it(tmp_path: Path) -> None:
    """Also where it comes last, and no attack that matches it was run."""
    gammas = [0.1 + i / 20 for i in range(CARD_ROWS + 2)]
    cells = [intact(f"{g}", attack="masked_span", setting="c", gamma=g) for g in gammas]
    made = card_of_lines(tmp_path, *((entry, [20.0]) for entry in cells), (cell("p"), [15.0]))
    assert len(made.rows) == CARD_ROWS
    assert (made.rows[0].client, made.rows[0].defended) == ("plain", False)
    assert made.further == len(gammas) + 1 - CARD_ROWS


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"float64 b": 40.0, "float64 c": 30.0, "float32 b": 20.0, "float32 c": 10.0}, 10.0),
        ({"float64 c": 30.0, "float32 b": 20.0, "float32 a": 10.0}, 30.0),
        ({"float32 a": 10.0, "float64 b": 30.0}, 30.0),
        ({"float64 a": 10.0, "bfloat16 a": 25.0, "float32 a": 30.0}, 25.0),
    ],
)
def test_one_client_in_several_settings_and_precisions_stands_once(
    tmp_path: Path, values: dict[str, float], expected: float
) -> None:
    """In the setting that asks for the plain picture, and there in the lowest precision."""
    lines = []
    for name, psnr in values.items():
        dtype, setting = name.split()
        facts: dict[str, Any] = {"attack": "masked_span", "setting": setting, "dtype": dtype}
        lines.append((intact(name, gamma=0.27, **facts), [psnr]))
    made = card_of_lines(tmp_path, *lines)
    (row,) = made.rows
    assert row.one_upload is not None
    assert (row.one_upload.mean, made.further) == (expected, 0)


def test_an_undefended_client_that_is_not_alike_is_named(tmp_path: Path) -> None:
    for batch in (1, 4):
        plain = intact("patch_gradient", batch=batch)
        span = (intact("masked_span", **MASKED), [20.0, 30.0])
        made = card_of_lines(tmp_path / f"{batch}", span, (plain, [40.0, 50.0]))
        assert ("plain · batch 4" in made.beside) == (batch == 4)
        assert numbers(made.beside)[-3:] == [0, 2, 20]


def test_accuracy_and_grey_are_over_the_images_of_all_lines(tmp_path: Path) -> None:
    """Three lines on overlapping images, of which one attack failed on one and stored no grey."""
    hits = {0: 1.0, 1: 1.0, 2: 0.0, 3: 1.0, 4: 0.0, 5: 0.0, 6: 1.0}
    images = {"patch_gradient": range(4), "patch_prior": range(2, 6), "oracle_inverse": [6]}
    store = RunStore(tmp_path)
    entries = {name: intact(name) for name in images}
    entries["oracle_inverse"]["role"] = "ceiling"
    store.write_cells(list(entries.values()))
    for name, entry in entries.items():
        for i in images[name]:
            known: dict[str, Any] = {"status": "failed", "reason": "so it is"} if i == 1 else {}
            grey, top1 = {"grey_psnr": 10.0 + i}, {"intact": hits[i]}
            rows = image_rows(entry, image_id(i), 20.0, diagnostics=grey, top1=top1, **known)
            store.write(name, i, wide(rows).assign(run_id=name))
    (row,) = card_of(tmp_path).rows
    assert (row.accuracy, row.accuracy_n) == (50, 6)
    assert row.floor is not None
    assert row.floor.mean == pytest.approx(10 + (0 + 2 + 3 + 4 + 5 + 6) / 6)
    assert (row.floor.n, row.floor.of, row.floor.above_20) == (6, 6, 0)
    assert keys(row.one_upload) == "cut_short partly_inapplicable unfinished"


# the verdict --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "psnrs", "grey", "parts"),
    [
        (MASKED, [math.inf, 30.0, 12.0], 12.0, ["does not protect these", "1 of 3 exactly"]),
        (MASKED, [21.0, 30.0, 12.0], 12.0, ["does not protect these", "2 of 3 at 20 dB"]),
        (MASKED, [21.0, 11.0, 12.0], 12.0, ["does not protect all", "1 of 3"]),
        (MASKED, [19.9, 11.0, 12.0], 12.0, ["not shown"]),
        (MASKED, [9.0, 11.0, 10.0], 12.0, ["not shown", "failed"]),
        (MASKED, [29.0, 28.0, 12.0, 11.0], 24.0, ["not shown"]),  # so does a uniform grey
        (MASKED | {"setting": "b"}, [math.inf], 12.0, ["the shuffled pictures", "exactly"]),
    ],
)
def test_the_verdict_of_a_defended_client(
    tmp_path: Path, facts: dict[str, Any], psnrs: list[float], grey: float, parts: list[str]
) -> None:
    diagnostics = {"zero_rows": 3.0, "grey_psnr": grey}
    made = card_of_lines(tmp_path, (intact("masked_span", **facts), psnrs, diagnostics))
    assert all(part in made.verdict for part in ["MJP γ .27", *parts])
    assert len(made.verdict.split()) <= WORDS


def test_the_verdict_of_an_undefended_client(tmp_path: Path) -> None:
    made = card_of_lines(tmp_path, (intact("patch_gradient"), [30.0, math.inf], {}))
    assert "protect" not in made.verdict
    assert "1 of 2 exactly" in made.verdict


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_missing_rows_are_said_where_the_figure_stands(tmp_path: Path, lost: int) -> None:
    """Of an attack that lacks some of its rows, or all: a weaker one takes its place."""
    planned: dict[str, Any] = MASKED | {"planned_images": 2}
    strong = (intact("pixel_lattice", **planned), [90.0, 80.0][: 2 - lost], ZERO)
    made = card_of_lines(tmp_path, (intact("masked_span", **planned), [22.0, 21.0], ZERO), strong)
    assert ("unfinished" in keys(made.rows[made.main].one_upload)) == bool(lost)
    assert ("rows are missing" in made.verdict) == bool(lost)


@pytest.mark.parametrize(("attack", "said"), [("pixel_lattice", True), ("masked_span", False)])
def test_an_assumption_is_named_where_the_chosen_attack_makes_it(
    tmp_path: Path, attack: str, said: bool
) -> None:
    made = card_of_lines(tmp_path, (intact(attack, **MASKED), [30.0], {}))
    assert ("8-bit" in made.assumptions) == said
    assert "batch 1" in made.assumptions
    assert "as declared" in made.assumptions


@pytest.mark.parametrize(
    ("floor", "named", "flags"),
    [
        ([10.0, 30.0], False, "partly_inapplicable"),
        ([18.0, 18.0], True, "below_floor partly_inapplicable"),
        ([20.0, 2.0], False, "below_floor partly_inapplicable"),
    ],
)
def test_a_side_of_the_floor_is_named_only_where_the_same_images_agree(
    tmp_path: Path, floor: list[float], named: bool, flags: str
) -> None:
    """The attack got an easy image alone: above its floor there, below the floor of both."""
    block = {"first_block": "closed_form"}
    april = (cell("april", **block), [15.0, "failed"])
    made = card_of_lines(tmp_path, april, (intact("grey", role="floor", **block), floor))
    assert keys(made.rows[0].published) == keys(made.rows[0].one_upload) == flags
    assert ("the 18.0 dB without any" in made.beside) == named
    assert ("failed" in made.verdict) == ("below_floor" in flags)


@pytest.mark.parametrize(
    ("six", "uploads"), [(["unsupported"] * 2, 2), (["failed"] * 2, 2), ([60.0, "failed"], 6)]
)
def test_only_uploads_of_an_attack_with_a_result_are_said(
    tmp_path: Path, six: list[float | str], uploads: int
) -> None:
    rounds = [
        intact(f"r{n}", attack_name="multi_round", attack=f"multi_round ({n})", uploads=n)
        for n in (2, 6)
    ]
    plain = (intact("patch_gradient"), [30.0, 40.0])
    made = card_of_lines(tmp_path, plain, (rounds[0], [50.0] * 2), (rounds[1], six))
    assert f"{uploads} uploads of the same picture" in made.beside
    derived = [line for line in read_contents([tmp_path]).derived if line.uploads > 1]
    assert {line.uploads for line in derived} == {uploads}


# what must not look like protection ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("april", "words"),
    [
        ("unsupported", "does not apply"),
        ("failed", "failed"),
        ("unscored", "not scored"),
        (None, "not run"),
    ],
)
def test_why_there_is_no_figure(tmp_path: Path, april: str | None, words: str) -> None:
    lines: list[tuple[Any, ...]] = [(intact("patch_gradient"), [30.0])]
    lines += [(intact("april", victim="april_block"), [april])] if april else []
    (row,) = card_of_lines(tmp_path, *lines).rows
    assert row.published is None
    assert row.absent_of("published") == words


LATE = {"over_budget": 1.0, "attack_seconds": 30.0}


@pytest.mark.parametrize(
    ("psnr", "diagnostics", "expected", "in_vain"),
    [
        ([25.0, 26.0], {}, "", False),
        (["failed", "failed"], {}, "cut_short", True),
        ([25.0, "failed"], {}, "cut_short", False),
        ([12.0, 13.0], LATE, "cut_short", True),
        (["unsupported", "unsupported"], {}, "", False),  # it does not apply: it was tried
    ],
)
def test_an_attack_that_failed_or_ran_out_of_time_is_marked_and_not_said_to_be_tried(
    tmp_path: Path,
    psnr: list[float | str],
    diagnostics: dict[str, float],
    expected: str,
    in_vain: bool,
) -> None:
    span = (intact("masked_span", **MASKED), [21.0, 22.0], ZERO)
    made = card_of_lines(tmp_path, span, (intact("token_span", **MASKED), psnr, diagnostics))
    assert keys(made.rows[0].one_upload) == expected
    untried, *others = made.not_tried
    assert "token_span" not in untried
    assert any("token_span" in item for item in others) == in_vain


@pytest.mark.parametrize("facts", [{"setting": "b"}, {"dtype": "float64"}])
def test_an_attack_in_another_setting_or_precision_was_not_tried_here(
    tmp_path: Path, facts: dict[str, str]
) -> None:
    span = (intact("masked_span", **MASKED), [21.0], ZERO)
    made = card_of_lines(tmp_path, span, (intact("token_span", **MASKED | facts), [20.0], ZERO))
    assert "token_span" in made.not_tried[0]
    assert "masked_span" not in made.not_tried[0]


def test_exact_pictures_count_whatever_the_attack_knows(tmp_path: Path) -> None:
    """Of an attack that does not know the masks: its exact pictures leaked all the same."""
    exact = (intact("patch_gradient", **MASKED), [math.inf, 9.0], ZERO)
    beside = (intact("april_unk_aware", **MASKED), [8.0, 8.0], ZERO)
    alone, both = card_of_lines(tmp_path / "1", exact), card_of_lines(tmp_path / "2", exact, beside)
    assert keys(alone.rows[0]) == "no_adaptive_attack"
    for made in (alone, both):
        figure = made.rows[0].one_upload
        assert figure is not None
        assert (figure.exact, figure.of) == (1, 2)
        assert "1 of 2 exactly" in made.verdict


@pytest.mark.parametrize("psnr", [[30.0, math.nan], [math.nan, math.nan]])
def test_rows_marked_ok_without_any_score_count_as_not_recovered(
    tmp_path: Path, psnr: list[float]
) -> None:
    """Neither a line of such rows nor such rows of a line vanish."""
    card_of_lines(tmp_path, (intact("patch_gradient"), psnr))
    contents = read_contents([tmp_path])
    lost = sum(map(math.isnan, psnr))
    for table in contents.tables:
        row = table.frame.iloc[0]
        assert (row["n"], row["n_failed"]) == (2 - lost, lost)
        assert row["psnr_from_20"] == 50 * (2 - lost)
    samples = contents.lines[0].rows.query("metric == 'psnr' and variant == 'standard'")
    assert samples["status"].tolist() == ["ok"] * (2 - lost) + ["failed"] * lost
    assert any("failed" in item for item in contents.reasons)


def test_an_experiment_that_is_part_of_another_is_no_second_one(tmp_path: Path) -> None:
    before = card_of_lines(tmp_path, (intact("patch_gradient"), [30.0])).verdict
    folder = tmp_path / "experiments"
    folder.mkdir()
    model = "models: {A: {model: vit_small}}\ngrid: [{models: [A], settings: [a], attacks: ["
    for name, attacks in (("small", "april"), ("large", "april, grey"), ("other", "other_image")):
        listed = ", ".join(f"{{name: {attack}}}" for attack in attacks.split(", "))
        text = (
            f"name: {name}\nseed: 0\ndtypes: [float32]\nattacks: [{listed}]\n{model}{attacks}]}}]"
        )
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
        said = read_contents([tmp_path]).card.verdict
        assert (said != before) == (name == "other")
    assert "small" not in said


# without truth ------------------------------------------------------------------------------------


def without_truth(folder: Path, of_lines: dict[str, dict[str, list[float]]], **facts: Any) -> Card:
    """The card of attacks whose pictures nobody could score; diagnostics by attack and image."""
    store = RunStore(folder)
    entries = {name: intact(name, **facts) for name in of_lines}
    store.write_cells(list(entries.values()))
    for name, diagnostics in of_lines.items():
        ids = [image_id(i) for i in range(len(next(iter(diagnostics.values()))))]
        rows = []
        for i, image in enumerate(ids):
            lost = image_rows(entries[name], image, 0.0, status="unscored", reason="no truth")
            for metric, values in diagnostics.items():
                known = {"metric": metric, "variant": "diagnostic", "value": values[i]}
                lost.append(lost[0] | known | {"status": "ok", "reason": ""})
            rows += lost
        write_rows(store, entries[name], rows)
        add_pictures(store, name, {"images": torch.rand(len(ids), 3, 8, 8)}, ids)
    return card_of(folder)


@pytest.mark.parametrize(
    ("residuals", "facts", "parts", "absent"),
    [
        ([1.3e-6], {}, ["1 picture", "1.3e-06", "no proof"], "certain"),
        ([1e-3, 3e-3], {}, ["2 pictures", "0.002"], "safety"),
        ([1e-3], MASKED, ["no proof", "0.001"], "certain"),
        ([0.8], {}, ["no evidence of safety", "0.8"], "certain"),
        ([0.05, 0.05], {}, ["0.05"], "safety"),
    ],
)
def test_uploads_without_truth(
    tmp_path: Path, residuals: list[float], facts: dict[str, object], parts: list[str], absent: str
) -> None:
    made = without_truth(tmp_path, {"masked_span": {"gradient_residual": residuals}}, **facts)
    assert "exactly" not in made.verdict
    assert all(part in made.beside for part in parts)
    assert absent not in made.beside


@pytest.mark.parametrize(("batch", "expected"), [(1, 2), (2, 1)])
def test_certain_pictures_of_a_batch_are_not_added_up_over_attacks(
    tmp_path: Path, batch: int, expected: int
) -> None:
    """They come in no known order, so that two attacks may mean the same one."""
    known = {"gradient_residual": [0.1, 0.1]}
    marks = {"batch_span": [1.0, 0.0], "span_matching": [0.0, 1.0]}
    lines = {name: known | {"certain": values} for name, values in marks.items()}
    words = without_truth(tmp_path, lines, batch=batch).beside.split()
    assert int(words[words.index("certain:") - 1]) == expected


def test_uploads_that_only_could_not_be_scored_are_not_said_to_be_without_truth(
    tmp_path: Path,
) -> None:
    card_of_lines(tmp_path, (intact("masked_span", **MASKED), ["unscored"]))
    tensors = {"images": torch.rand(1, 3, 8, 8), "target": torch.rand(1, 3, 8, 8)}
    add_pictures(RunStore(tmp_path), "masked_span", tensors, [image_id(0)])
    beside = card_of(tmp_path).beside
    assert "images are known" in beside
    assert "not known" not in beside
