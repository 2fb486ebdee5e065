"""strip.png: which columns it has, and that its tiles are the stored pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.answer import build_card
from mjp_privacy.report.card import HEADINGS
from mjp_privacy.report.page.gallery import GAP, HEAD, SIDE, Strip, card_strip, write_strip
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.worst_case import DerivedLine, reduced_groups
from mjp_privacy.report.write import write_report
from tests.helpers.ladder_rows import simple_line
from tests.helpers.report_rows import cell, image_id, intact, write_pictures

PSNR = {
    "april": [9.0, 8.0, 7.0],
    "masked_span": [30.0, 12.0, 20.0],
    "pixel_lattice": [20.0, 25.0, 15.0],
}


def strip_run(folder: Path, setting: str = "c") -> Path:
    """April, two attacks on one upload, one on several; all with pictures."""
    shared = {"setting": setting, "gamma": 0.27}
    cells = [
        cell("april", **shared),
        *(intact(n, **shared) for n in ("masked_span", "pixel_lattice")),
    ]
    cells.append(intact("rounds", attack_name="multi_round", uploads=6, **shared))
    store = RunStore(folder)
    store.write_cells(cells)
    for entry in cells:
        psnr = PSNR.get(entry["attack"], [28.0, 40.0, 50.0])
        simple_line(store, entry, list(psnr), zero_rows=50.0)
        write_pictures(store, entry, {image_id(i): value for i, value in enumerate(psnr)})
    return folder


def strip_of(folder: Path) -> Strip:
    groups = reduced_groups(load_runs([folder]).lines)
    strip = card_strip(groups, build_card(groups))
    assert strip is not None
    return strip


def tile(sheet: np.ndarray, row: int, column: int) -> np.ndarray:
    top, left = row * (SIDE + HEAD) + HEAD, column * (SIDE + GAP)
    return sheet[top : top + SIDE, left : left + SIDE]


def as_bytes(image: object) -> np.ndarray:
    """A stored picture (C, h, w) as the tile it must become."""
    pixels = np.rint(np.clip(np.asarray(image), 0, 1) * 255).astype(np.uint8)
    size = SIDE // pixels.shape[-1]
    return pixels.transpose(1, 2, 0).repeat(size, 0).repeat(size, 1)


def test_columns_are_those_of_the_card(tmp_path: Path) -> None:
    strip = strip_of(strip_run(tmp_path))
    assert [heading for heading, _ in strip.columns] == list(HEADINGS.values())[:3]
    april, once, several = (line for _, line in strip.columns)
    assert april.attack == "april"
    assert isinstance(once, DerivedLine)
    assert isinstance(several, DerivedLine)
    assert (once.uploads, several.uploads) == (1, 6)
    assert strip.chooser is once


def test_tiles_are_the_stored_pictures(tmp_path: Path) -> None:
    """Original, what was fed, april, the best of each image: not one attack's in every row."""
    strip = strip_of(strip_run(tmp_path / "run"))
    ids = [image_id(1), image_id(0)]
    assert write_strip(strip, ids, tmp_path / "figures/strip.png")
    with Image.open(tmp_path / "figures/strip.png") as opened:
        sheet = np.asarray(opened.convert("RGB"))
    assert sheet.shape == (2 * (SIDE + HEAD), 5 * (SIDE + GAP) - GAP, 3)
    store = RunStore(tmp_path / "run")
    best = {image_id(1): "pixel_lattice", image_id(0): "masked_span"}
    several = {image_id(1): "rounds", image_id(0): "masked_span"}
    for row, image in enumerate(ids):
        attacks = ["april", best[image], several[image]]
        stored = [store.pictures(name, image) for name in attacks]
        assert all(stored)
        expected = [stored[0]["plain"], stored[0]["input"], *(s["images"] for s in stored)]  # type: ignore[index]
        for column, image_tensor in enumerate(expected):
            np.testing.assert_array_equal(tile(sheet, row, column), as_bytes(image_tensor))
        heads = sheet[row * (SIDE + HEAD) : row * (SIDE + HEAD) + HEAD]
        assert heads.min() < 128  # something is written over every row


def test_what_was_fed_has_no_tile_where_it_is_the_original(tmp_path: Path) -> None:
    strip = strip_of(strip_run(tmp_path / "run", setting="a"))
    assert write_strip(strip, [image_id(0)], tmp_path / "strip.png")
    with Image.open(tmp_path / "strip.png") as opened:
        assert opened.width == 4 * (SIDE + GAP) - GAP


@pytest.mark.parametrize("ids", [[], ["nobody's.png"]])
def test_nothing_to_show(tmp_path: Path, ids: list[str]) -> None:
    strip = strip_of(strip_run(tmp_path / "run"))
    assert not write_strip(strip, ids, tmp_path / "strip.png")
    assert not (tmp_path / "strip.png").exists()


def test_without_scores_the_attacks_themselves_are_shown(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entries = [intact(name, gamma=0.27) for name in ("masked_span", "pixel_lattice")]
    store.write_cells(entries)
    for entry in entries:
        simple_line(store, entry, ["unscored"])
        write_pictures(store, entry, {image_id(0): 20.0})
    strip = strip_of(tmp_path)
    assert [heading for heading, _ in strip.columns] == ["masked_span", "pixel_lattice"]
    assert write_strip(strip, [image_id(0)], tmp_path / "strip.png")


def test_controls_have_no_strip(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = intact("grey", role="floor")
    store.write_cells([entry])
    simple_line(store, entry, [11.0])
    groups = reduced_groups(load_runs([tmp_path]).lines)
    assert card_strip(groups, build_card(groups)) is None


def test_a_report_shows_fixed_quantiles(tmp_path: Path) -> None:
    """Three images: 30, 25 and 20 dB; all of them are quantiles, the worst first."""
    strip_run(tmp_path / "run")
    write_report([tmp_path / "run"], tmp_path / "out")
    with Image.open(tmp_path / "out/figures/strip.png") as opened:
        sheet = np.asarray(opened.convert("RGB"))
    store = RunStore(tmp_path / "run")
    for row, index in enumerate((2, 1, 0)):
        stored = store.pictures("april", image_id(index))
        assert stored is not None
        np.testing.assert_array_equal(tile(sheet, row, 0), as_bytes(stored["plain"]))
