"""The table of identification and that of agreement, with planted pictures and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.lines import Line
from mjp_privacy.report.notes import BOUNDS, not_scored
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.tables.comparisons import agreement_table, correlation
from mjp_privacy.report.tables.details import identification_table
from tests.helpers.report_rows import (
    add_pictures,
    cell,
    image_id,
    image_rows,
    notes_of,
    photograph,
    shuffled,
    write_rows,
)

NAMES = [f"image {at}" for at in range(6)]
PLAIN = torch.stack([photograph(at) for at in range(6)])
MOVED = torch.stack([shuffled(image) for image in PLAIN])
HALF = torch.arange(16).repeat(6, 1) < 8


def lines_of(
    folder: Path,
    stored: Sequence[dict[str, Tensor]],
    failed: Sequence[str] = (),
    photographs: int | None = None,
    **changes: Any,
) -> list[Line]:
    """A line for each set of tensors; none is stored for images that failed.

    photographs: of which the images were cut, the same number of each
    """
    store = RunStore(folder)
    entries = [cell(f"line {at}", **changes) for at in range(len(stored))]
    store.write_cells(entries)
    kept = [at for at, name in enumerate(NAMES) if name not in failed]
    for entry, tensors in zip(entries, stored, strict=True):
        rows = []
        for name in NAMES:
            made = image_rows(entry, name, 20.0, status="failed" if name in failed else "ok")
            group = {} if photographs is None else {"group": f"{NAMES.index(name) % photographs}"}
            rows += [row | group for row in made]
        write_rows(store, entry, rows)
        if tensors:
            some = {kind: tensor[kept].clone() for kind, tensor in tensors.items()}
            add_pictures(store, entry["run_id"], some, [NAMES[at] for at in kept])
    return list(load_runs([folder]).lines)


def pictures(images: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    known = {"images": images, "plain": PLAIN, "target": PLAIN.clone(), "input": MOVED}
    return known if mask is None else {**known, "mask": mask}


def test_exact_pictures_point_to_themselves(tmp_path: Path) -> None:
    made = identification_table(lines_of(tmp_path, [pictures(PLAIN)]))
    assert made is not None
    assert len(made.header) == len(made.align) == len(made.rows[0])
    every = "6 of 6 (100 %, 61–100); 1.000"
    assert made.rows[0][2:7] == ("6 of 6", "16.7 %; 0.408", every, every, every)
    assert made.rows[0][7:] == ("–", "–", "–")  # nothing was shuffled


def test_crops_of_two_photographs_are_two_trials(tmp_path: Path) -> None:
    made = identification_table(lines_of(tmp_path, [pictures(PLAIN)], photographs=2))
    assert made is not None
    low = 100 * scipy.stats.binomtest(2, 2).proportion_ci(method="wilson").low
    assert made.rows[0][4] == f"6 of 6 (100 %, {low:.0f}–100); 1.000"


def test_swapped_pictures_point_to_others(tmp_path: Path) -> None:
    made = identification_table(lines_of(tmp_path, [pictures(PLAIN.roll(1, 0))]))
    assert made is not None
    assert all(text.startswith("0 of 6 (0 %, 0–39); ") for text in made.rows[0][4:7])


def test_patches_in_another_order_match_exactly(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, [pictures(MOVED, HALF)], setting="c", gamma=0.27)
    made = identification_table(lines)
    assert made is not None
    assert "γ=0.27" in made.rows[0][1]
    assert made.rows[0][7:] == ("6 of 6 (100 %, 61–100); 1.000", "16.7 %; 0.408", "≥ 100")


def test_images_that_failed_are_seen_in_the_count(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, [pictures(PLAIN)], failed=NAMES[:2])
    made = identification_table(lines)
    assert made is not None
    assert made.rows[0][2:4] == ("4 of 6", "25.0 %; 0.521")


def test_lines_without_pictures_or_originals_are_skipped(tmp_path: Path) -> None:
    without_truth = {"images": PLAIN}
    lines = lines_of(tmp_path, [{}, without_truth, pictures(PLAIN)])
    made = identification_table(lines)
    assert made is not None
    assert [row[0] for row in made.rows] == ["3"]
    assert identification_table(lines[:2]) is None
    assert identification_table([]) is None


# agreement ----------------------------------------------------------------------------------------

SCORES = {
    "psnr": [10.0, 14.0, 12.0, 30.0, math.inf, 22.0],
    "ssim": [0.2, 0.3, 0.1, 0.7, 1.0, 0.8],
    "lpips": [0.9, 0.5, 0.8, 0.3, 0.0, 0.35],
}


def scored_line(folder: Path) -> Line:
    store, entry = RunStore(folder), cell("scored")
    store.write_cells([entry])
    rows = []
    for name, psnr, ssim, lpips in zip(NAMES, *SCORES.values(), strict=True):
        rows += image_rows(entry, name, psnr, ssim=ssim, lpips=lpips)
    rows += image_rows(entry, "broken", 1.0, status="failed", reason="no")
    write_rows(store, entry, rows)
    return load_runs([folder]).lines[0]


def test_agreement_is_scipys(tmp_path: Path) -> None:
    made = agreement_table(scored_line(tmp_path))
    assert made is not None
    at = {name: column for column, name in enumerate(made.header)}
    rows = {row[0]: row for row in made.rows}
    quality = {"PSNR": SCORES["psnr"], "SSIM": SCORES["ssim"]}
    quality["LPIPS"] = [-value for value in SCORES["lpips"]]
    for above, below in (("PSNR", "SSIM"), ("SSIM", "LPIPS"), ("PSNR", "LPIPS")):
        rho = scipy.stats.spearmanr(quality[above], quality[below]).statistic
        tau = scipy.stats.kendalltau(quality[above], quality[below]).statistic
        assert rows[above][at[below]] == correlation(float(rho))
        assert rows[below][at[above]] == correlation(float(tau))
    assert rows["PSNR"][at["MSE"]] == rows["MSE"][at["PSNR"]] == "1"
    assert all(row[at[name]] == "" for name, row in rows.items())
    assert "over 6 images of line 1" in made.caption


# what the notes under the tables say, and when ----------------------------------------------------


def keys(folder: Path, psnr: float = 12.0, zero_rows: float = 0.0, **facts: object) -> set[str]:
    """The keys of the notes on a line of one picture, whose ceiling is 20 dB."""
    store = RunStore(folder)
    entry = cell("x", **facts)
    store.write_cells([entry])
    diagnostics = {"cond_a": 1e9, "zero_rows": zero_rows, "ceiling_psnr": 20.0}
    write_rows(store, entry, image_rows(entry, image_id(0), psnr, diagnostics=diagnostics))
    (line,) = load_runs([folder]).lines
    return {note.__name__ for note in BOUNDS if list(note(line))}


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
