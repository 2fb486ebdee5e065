"""Worst case and attacker's choice, by hand and image by image; and uploads without their truth."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.figures import DerivedLine
from tests.helpers.card_run import card_of_lines
from tests.helpers.federations import MJP
from tests.helpers.report_rows import (
    cell,
    derived_of,
    image_id,
    image_row,
    intact,
    lines_of,
    run_of,
    unscored_run,
    write_rows,
)

ONE, ANY = "1 upload", "any number of uploads"


def outcome(line: DerivedLine, image: str) -> str:
    """The status of one image."""
    return str(line.frame.loc[image, "status"])


def psnr_of(line: DerivedLine) -> list[float]:
    return list(line.scored("psnr", "standard"))


# by hand ------------------------------------------------------------------------------------------


def test_of_exact_pictures_one_that_assumes_less_is_taken(tmp_path: Path) -> None:
    lattice, span = intact("pixel_lattice", **MJP), intact("masked_span", **MJP)
    exact, known = [math.inf, math.inf, 60.0], {"zero_rows": 3.0}
    run_of(tmp_path, (lattice, exact, known), (span, [120.0, 99.0, 50.0], known))
    worst = derived_of(tmp_path)[f"worst_case, {ONE}"]
    assert worst.counts == {"pixel_lattice": 2, "masked_span": 1}
    assert psnr_of(worst) == [120.0, math.inf, 60.0]


def test_an_exact_picture_is_taken_before_one_of_more_decibels_that_is_not(tmp_path: Path) -> None:
    store, lines = RunStore(tmp_path), [intact("masked_span"), intact("token_span")]
    store.write_cells(lines)
    for line, standard, paper in zip(lines, (60.0, 95.0), (math.inf, 92.0), strict=True):
        rows = [image_row(image_id(0), standard) | {"psnr.paper": paper}]
        write_rows(store, line, rows)
    worst = derived_of(tmp_path)[f"worst_case, {ONE}"]
    assert (len(worst.exact_images), psnr_of(worst)) == (1, [60.0])


def test_what_has_no_value_is_no_candidate(tmp_path: Path) -> None:
    """A score that is no number, and a reconstruction without a residual."""
    lines = (intact("x"), [math.nan, math.nan, 7.0]), (intact("y"), [9.0, math.nan, 8.0])
    worst = derived_of(run_of(tmp_path / "scores", *lines))[f"worst_case, {ONE}"]
    assert psnr_of(worst) == [9.0, 8.0]
    assert outcome(worst, image_id(1)) == "failed"
    first = {"gradient_residual": [0.3, math.nan]}
    lines = ((intact(name), [10.0, 40.0], first) for name in "xy")
    choice = derived_of(run_of(tmp_path / "residuals", *lines))[f"attackers_choice, {ONE}"]
    assert outcome(choice, image_id(1)) == "unsupported"
    assert choice.counts == {"x": 1, "y": 0}


def test_an_attack_that_names_masks_alone_decides_of_no_picture(tmp_path: Path) -> None:
    """A picture that all others were refused on is one that did not leak, and is counted."""
    client, masked = {"setting": "c", "gamma": 0.27}, {"zero_rows": 9.0}
    lines = [
        (intact("masked_span", **client), [math.inf, "unsupported", 9.0], masked),
        (intact("token_peeling", **client), [30.0, "unsupported", 8.0], masked),
        (intact("mask_locator", **client), ["unscored", "unscored", "failed"], masked),
    ]
    found = card_of_lines(tmp_path / "some", *lines).rows[0].one_upload
    assert found is not None
    assert (found.exact, found.n, found.of) == (1, 2, 3)
    assert [flag.key for flag in found.flags] == ["partly_inapplicable"]
    lost = (
        (intact("masked_span", **client), ["failed"], masked),
        (lines[2][0], ["unscored"], masked),
    )
    assert card_of_lines(tmp_path / "none", *lost).rows[0].absent["one_upload"] == "failed"


# what competes ------------------------------------------------------------------------------------


def test_one_attack_is_nothing_to_choose_from(tmp_path: Path) -> None:
    """Another attack on another dtype, one without rows, controls and other runs make no ladder."""
    other = intact("x64", dtype="float64", attack="y")
    none = intact("none", status="unsupported", reason="D < N")
    lines = [(intact("x"), [9.0]), (other, [9.0]), (intact("grey", role="floor"), [9.0])]
    again = (intact("x", attack="again"), [9.0])
    runs = [run_of(tmp_path / "one", *lines, (none, [])), run_of(tmp_path / "two", again)]
    assert read_contents(runs).derived == []


@pytest.mark.parametrize(
    "change",
    [
        *({"gamma": 0.5}, {"setting": "b"}, {"seed": 1}, {"checkpoint_sha": "cd" * 32}),
        *({"dal": True}, {"augment": "flip"}, {"withhold": ["pos_embed"]}),
        *({"position_noise": 0.1}, {"a fact of tomorrow": "x"}),
    ],
)
def test_two_targets_are_never_one_group(tmp_path: Path, change: dict[str, Any]) -> None:
    run_of(tmp_path, (intact("x"), [10.0]), (intact("y", **change), [10.0]))
    assert derived_of(tmp_path) == {}


def test_uploads_are_counted_and_without_residuals_there_is_no_choice(tmp_path: Path) -> None:
    """Who may use one upload is not compared with who has three."""
    of_three = (intact("r", uploads=3), [25.0] * 2)
    run_of(tmp_path, (intact("x"), [10.0, 30.0]), (intact("y"), [20.0, 12.0]), of_three)
    derived = derived_of(tmp_path)
    assert list(derived) == [f"worst_case, {ONE}", f"worst_case, {ANY}"]
    once, several = derived.values()
    assert (psnr_of(once), psnr_of(several)) == ([20.0, 30.0], [25.0, 30.0])
    assert (once.uploads, several.uploads) == (1, 3)
    assert several.counts == {"x": 1, "y": 0, "r": 1}


def test_attacks_on_one_upload_have_no_worst_case_without_one_that_matches(tmp_path: Path) -> None:
    """Though one on several uploads does."""
    masked: dict[str, Any] = {"setting": "c", "gamma": 0.27}
    rounds = intact("r", attack_name="multi_round", uploads=6, **masked)
    run_of(
        tmp_path,
        (intact("patch_gradient", **masked), [9.0, 8.0], {"zero_rows": 50.0}),
        (rounds, [30.0, 40.0]),
    )
    assert list(derived_of(tmp_path)) == [f"worst_case, {ANY}"]
    (row,) = read_contents([tmp_path]).card.rows
    assert row.one_upload is None
    assert row.any_uploads is not None
    assert row.any_uploads.mean == 35.0


# uploads without their private images -------------------------------------------------------------


def test_the_table_of_residuals(tmp_path: Path) -> None:
    """The smallest one is chosen, of equal ones the first; attacks on an altered client only where
    no other made a picture. The attacker's choice has pictures, the worst case none."""
    values = [0.1 * i**2 for i in range(7)]
    low, median, high = np.percentile(values, (25, 50, 75))
    residuals = {
        "patch_gradient": values,
        "masked_span": [9.0, 0.0, 0.4],
        "token_span": [math.nan],
        "april": [0.0, *[math.nan] * 6, 0.1],
    }
    attacks = {name: {"gradient_residual": held} for name, held in residuals.items()}
    contents = read_contents([unscored_run(tmp_path, attacks | {"empty": {}})])
    derived = {line.cell.role: line for line in contents.derived}
    choice = derived["attackers_choice"]
    assert not choice.has_truth
    assert choice.picture_ids == sorted(choice.chosen.index) != []
    assert all(choice.reconstruction(image) is not None for image in choice.picture_ids)
    assert derived["worst_case"].picture_ids == []
    *_, table = contents.comparisons
    assert table.rows == (
        ("plain", "patch_gradient", "7", f"{median:.4f} [{low:.4f}, {high:.4f}]", "6"),
        ("plain", "masked_span", "3", "0.4000 [0.2000, 4.7000]", "1"),
        ("plain", "token_span", "1", "unknown: no labels or no gradient", "0"),
        ("plain", "april", "8", "0.0500 [0.0250, 0.0750]", "1"),
    )


def test_a_line_that_says_nothing_is_not_taken_for_one_without_truth(tmp_path: Path) -> None:
    """Refused and failed attacks, and one that makes no picture."""
    locator = cell("unscored", attack="mask_locator")
    run_of(tmp_path, (cell("refused"), ["unsupported"]), (locator, ["unscored"]), (cell("x"), []))
    for line in lines_of(tmp_path):
        assert line.has_truth
        assert line.picture_ids == []
    assert read_contents([tmp_path]).comparisons == []
