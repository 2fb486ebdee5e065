"""Worst case and attacker's choice of a made-up ladder: by hand, image by image."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.clients import clients_of, derived_lines
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.worst_case import NO_RESIDUAL, DerivedLine
from tests.helpers.ladder_rows import derived_of, ladder_of, ladder_run
from tests.helpers.report_rows import build_table, image_id, image_rows, intact, write_rows

ONE, ANY = "1 upload", "any number of uploads"


@pytest.fixture
def ladder(tmp_path: Path) -> dict[str, DerivedLine]:
    ladder_run(tmp_path / "run")
    return derived_of(tmp_path / "run")


def outcome(line: DerivedLine, image: str) -> tuple[str, str]:
    """Status and reason of one image's PSNR."""
    row = line.frame.loc[image]
    return row["status"], row["reason"]


def by_image(line: DerivedLine, metric: str, variant: str = "standard") -> list[float]:
    scores = line.scored(metric, variant)
    return [scores[image_id(i)] for i in range(len(scores))]


# by hand ------------------------------------------------------------------------------------------


def test_an_attack_on_an_altered_client_is_no_candidate(tmp_path: Path) -> None:
    ladder_run(tmp_path / "run", altered="april")
    worst = derived_of(tmp_path / "run")[f"worst_case, {ONE}"]
    assert worst.counts == {"patch_gradient": 1, "masked_span": 1}
    assert by_image(worst, "psnr") == [20.0, 25.0]


def test_attackers_choice_needs_no_truth(ladder: dict[str, DerivedLine]) -> None:
    """It takes patch_gradient's 15 dB where masked_span has 25, for its residual is less."""
    choice = ladder[f"attackers_choice, {ONE}"]
    assert by_image(choice, "psnr") == [20.0, 15.0, 30.0]
    assert choice.counts == {"april": 1, "patch_gradient": 2, "masked_span": 0}


def test_an_image_without_a_candidate_is_a_row_with_the_reason(
    ladder: dict[str, DerivedLine],
) -> None:
    for line in ladder.values():
        status, reason = outcome(line, image_id(3))
        assert status == "failed"
        assert reason == (
            "april failed: april says so; patch_gradient unsupported: patch_gradient says so; "
            "masked_span failed: masked_span says so"
        )
        frame = build_table([], "standard", [line]).frame.iloc[0]
        assert (frame["n"], frame["n_failed"], frame["lpips_n"]) == (3, 1, 3)


def test_what_is_of_the_image_stays_and_what_is_of_the_attack_goes(
    ladder: dict[str, DerivedLine],
) -> None:
    worst = ladder[f"worst_case, {ONE}"]
    assert list(worst.scored("grey_psnr", "diagnostic")) == [11.0] * 3
    assert list(worst.scored("ceiling_psnr", "diagnostic")) == [40.0] * 3
    assert list(worst.scored("shuffled_patches", "diagnostic")) == [7.0] * 3
    assert worst.scored("cond_a", "diagnostic").empty
    assert list(worst.scored("top1", "intact")) == [0.0, 1.0, 0.0]
    assert worst.scored("top1", "altered").empty
    frame = build_table([], "standard", [worst]).frame.iloc[0]
    assert math.isnan(frame["ceiling_distance"])  # it does not bound what was chosen


def test_controls_are_never_chosen(ladder: dict[str, DerivedLine]) -> None:
    """The ceiling control has 99 dB everywhere, the grey floor 11 dB on the image nobody has."""
    for line in ladder.values():
        assert {member.role for member in line.members} == {"attack"}
        assert line.scored("psnr", "standard").max() == 30.0


def test_a_score_that_is_no_number_is_no_candidate(tmp_path: Path) -> None:
    entries = [intact("x"), intact("y")]
    ladder_of(tmp_path, (entries[0], [math.nan, math.nan, 7.0]), (entries[1], [9.0, math.nan, 8.0]))
    worst = derived_of(tmp_path)[f"worst_case, {ONE}"]
    assert list(worst.scored("psnr", "standard")) == [9.0, 8.0]
    assert outcome(worst, image_id(1))[1].startswith("x failed: ")


# groups -------------------------------------------------------------------------------------------


def test_one_attack_is_nothing_to_choose_from(tmp_path: Path) -> None:
    """Another attack on another dtype, one without rows and controls make no ladder."""
    entries = [
        intact("x"),
        intact("x64", dtype="float64", attack="y"),
        intact("grey", role="floor"),
    ]
    ladder_of(tmp_path, *((entry, [10.0]) for entry in entries))
    store = RunStore(tmp_path)
    store.write_cells([*entries, intact("none", status="unsupported", reason="D < N")])
    assert derived_of(tmp_path) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 0.5},
        {"setting": "b"},
        {"seed": 1},
        {"checkpoint_sha": "cd" * 32},
        {"dal": True},
        {"augment": "flip"},
        {"withhold": ["pos_embed"]},
        {"position_noise": 0.1},
        {"a fact of tomorrow": "x"},
    ],
)
def test_two_targets_are_never_one_group(tmp_path: Path, change: dict[str, Any]) -> None:
    entries = [intact("x"), intact("y", **change)]
    ladder_of(tmp_path, *((entry, [10.0]) for entry in entries))
    assert derived_of(tmp_path) == {}


def test_uploads_are_counted(tmp_path: Path) -> None:
    """Who may use one upload is not compared with who has three."""
    entries = [
        intact("x"),
        intact("y", uploads=1),
        intact("r", uploads=3),
    ]
    ladder_of(
        tmp_path, (entries[0], [10.0, 30.0]), (entries[1], [20.0, 12.0]), (entries[2], [25.0] * 2)
    )
    derived = derived_of(tmp_path)
    assert list(derived) == [f"worst_case, {ONE}", f"worst_case, {ANY}"]
    once, several = derived.values()
    assert list(once.scored("psnr", "standard")) == [20.0, 30.0]
    assert list(several.scored("psnr", "standard")) == [25.0, 30.0]
    assert (once.uploads, several.uploads) == (1, 3)
    assert several.counts == {"x": 1, "y": 0, "r": 1}


def test_runs_are_not_mixed(tmp_path: Path) -> None:
    folders = [
        ladder_of(tmp_path / name, (intact("x", attack=name), [10.0])) for name in ("one", "two")
    ]
    assert derived_lines(clients_of(load_runs(folders).lines)) == []


def test_a_run_without_residuals_has_no_choice_by_them(tmp_path: Path) -> None:
    ladder_run(tmp_path, residuals=False)
    assert list(derived_of(tmp_path)) == [f"worst_case, {ONE}"]


def test_a_reconstruction_without_a_residual_cannot_be_chosen(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entries = [intact("x"), intact("y")]
    store.write_cells(entries)
    for entry in entries:
        rows = image_rows(entry, image_id(0), 10.0, diagnostics={"gradient_residual": 0.3})
        write_rows(store, entry, [*rows, *image_rows(entry, image_id(1), 40.0)])
    choice = derived_of(tmp_path)[f"attackers_choice, {ONE}"]
    assert outcome(choice, image_id(1)) == ("unsupported", NO_RESIDUAL)
    assert choice.counts == {"x": 1, "y": 0}


# what a report shows of its reductions ------------------------------------------------------------
