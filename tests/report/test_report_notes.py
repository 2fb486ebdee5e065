"""What the notes under the tables say, and when."""

from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.figures import build_table
from mjp_privacy.report.notes import LINE_NOTES, REASONS_SHOWN, not_scored
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.write import ReportSummary, write_report
from tests.helpers.report_rows import (
    cell,
    image_id,
    image_rows,
    notes_of,
    write_rows,
)


def test_notes_say_what_differs(everything: tuple[Path, ReportSummary]) -> None:
    text = (everything[0] / "table.md").read_text()
    for expected in (
        "not declared to be ImageNet-1K validation images like the paper's",
        "neither norm1 nor residuals",
        "(lines 1–2, 4–8)",
        "Client gradients in float64",
        "mode eval, loss cross_entropy, batch 1, no DAL in the loss",
        "A note of the runner. (line 1)",
        "although no row of A is zero",
        "(cond(A) exceeds 2^24 on 7 of 22 images)",
        "A has zero rows, those of shuffled patches, on 24 of 24 images",
        "do not cover the same images",
        "repeats all five scores",
        "poster's caption says .27",
        "min(PSNR, 100)",
        "2000 resamples",
    ):
        assert expected in text


def keys(folder: Path, psnr: float = 12.0, zero_rows: float = 0.0, **facts: object) -> set[str]:
    """The keys of the notes on a line of one picture, whose ceiling is 20 dB."""
    store = RunStore(folder)
    entry = cell("x", **facts)
    store.write_cells([entry])
    diagnostics = {"cond_a": 1e9, "zero_rows": zero_rows, "ceiling_psnr": 20.0}
    write_rows(store, entry, image_rows(entry, image_id(0), psnr, diagnostics=diagnostics))
    (line,) = load_runs([folder]).lines
    return {note.key for note in LINE_NOTES if list(note.of(line))}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, {"rounding"}),
        ({"zero_rows": 3.0}, {"zero_rows"}),
        ({"psnr": 19.95}, set()),
        # a gap that a defence, steps or a batch cause is not called rounding
        ({"defenses": "gaussian_noise 0.01"}, set()),
        ({"position_noise": 0.1}, set()),
        ({"steps": 2, "pseudo_gradient": "approximate"}, set()),
        ({"batch": 2}, set()),
        ({"planned_images": 5}, {"rounding", "unfinished"}),
    ],
)
def test_the_gap_to_the_ceiling_is_explained_by_what_was_measured(
    tmp_path: Path, facts: dict[str, Any], expected: set[str]
) -> None:
    assert keys(tmp_path, **facts) == expected


@pytest.mark.parametrize(
    ("facts", "shuffled"),
    [
        ({"gamma": 0.5, "defenses": "int8"}, True),
        ({"gamma": 0.5, "defenses": "top_k 0.1"}, False),
        ({"gamma": 0.0, "defenses": "top_k 0.1"}, False),
    ],
)
def test_zero_rows_are_called_shuffled_patches_only_where_they_are(
    tmp_path: Path, facts: dict[str, Any], shuffled: bool
) -> None:
    assert keys(tmp_path, zero_rows=3.0, **facts) == {"zero_rows"}
    assert ("shuffled patches" in notes_of(tmp_path)) == shuffled


def test_a_model_trained_with_the_altered_block_is_told_from_one_that_got_it(
    tmp_path: Path,
) -> None:
    for block, said in (
        ("closed_form", "was trained with the block that april needs"),
        ("intact", "which has weights trained for the intact one"),
    ):
        store = RunStore(tmp_path / block)
        entry = cell("x", first_block=block)
        store.write_cells([entry])
        write_rows(store, entry, image_rows(entry, image_id(0), 12.0))
        assert said in notes_of(tmp_path / block)


def test_an_unfinished_line_says_so(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = cell("x", planned_images=5)
    store.write_cells([entry])
    diagnostics = {"grey_psnr": 12.5, "ceiling_psnr": 20.0}
    write_rows(store, entry, image_rows(entry, image_id(0), 12.0, diagnostics=diagnostics))
    assert "UNFINISHED: 4 of 5 images were not run" in notes_of(tmp_path)
    lines = load_runs([tmp_path]).lines
    frame = build_table(lines, "paper").frame
    assert frame["n_not_run"].tolist() == [4]
    assert frame["grey_mean"].tolist() == [12.5]
    assert frame["below_grey"].tolist() == [100.0]
    summary = write_report([tmp_path], tmp_path / "out")
    assert "4 not run" in (tmp_path / "out" / "table.md").read_text()
    assert summary.any_failed


def test_many_reasons_are_cut_short(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = cell("x")
    store.write_cells([entry])
    known = [{"status": "failed", "reason": f"reason {i}."} for i in range(REASONS_SHOWN + 2)]
    rows = [r for i, k in enumerate(known) for r in image_rows(entry, image_id(i), 0.0, **k)]
    write_rows(store, entry, rows)
    text = notes_of(tmp_path)
    assert f"reason {REASONS_SHOWN - 1}." in text
    assert f"reason {REASONS_SHOWN}." not in text
    assert "2 further reasons; see samples.csv" in text


def test_the_short_report_keeps_reasons_and_says_where_the_rest_is(
    written: tuple[Path, ReportSummary],
) -> None:
    text = (written[0] / "table.md").read_text()
    assert "2 images failed: lstsq did not converge" in text
    assert "further notes: index.html, or mjp report" in text
    for folded in ("2000 resamples", "poster's caption says .27", "A note of the runner."):
        assert folded not in text


def test_equal_failures_are_one_sentence_with_their_counts(tmp_path: Path) -> None:
    """Of whole lines and of images, over all lines; an image counts once for all its scores."""
    store = RunStore(tmp_path)
    refused = {"status": "unsupported", "reason": "a batch of 2"}
    cells = [cell("x"), cell("y", seed=1), cell("z", seed=2)]
    cells += [cell(f"whole {i}", seed=3 + i, **refused) for i in range(2)]
    store.write_cells(cells)
    for entry, count in zip(cells[:3], (2, 4, 0), strict=True):
        rows = [image_rows(entry, image_id(i), 0.0, **refused) for i in range(count)]
        rows.append(image_rows(entry, image_id(9), 12.0))
        rows.append(image_rows(entry, image_id(10), 0.0, status="failed", reason="no floats"))
        write_rows(store, entry, [row for of_image in rows for row in of_image])
    assert not_scored(load_runs([tmp_path]).lines) == [
        "2 lines unsupported: a batch of 2 (lines 4–5)",
        "6 rows unsupported: a batch of 2 (lines 1–2)",
        "3 rows failed: no floats (lines 1–3)",
    ]
