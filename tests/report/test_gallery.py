"""The pictures inside the page: the same images for every line, chosen by nobody, within bounds."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.answer import build_card
from mjp_privacy.report.clients import clients_of, derived_lines
from mjp_privacy.report.page import gallery
from mjp_privacy.report.page.gallery import (
    GAP,
    HEAD,
    LARGEST_SIDE,
    SIDE,
    SMALL_SIDE,
    Strip,
    card_strip,
    data_uri,
    fill_gallery,
    images_in_order,
    write_strip,
)
from mjp_privacy.report.pictures import pixels
from mjp_privacy.report.runs import load_runs
from tests.helpers.ladder_rows import simple_line
from tests.helpers.report_rows import (
    cell,
    image_id,
    intact,
    only_line,
    photograph,
    small_run,
    write_pictures,
)


def decoded(uri: str) -> tuple[str, np.ndarray]:
    head, _, data = uri.partition(",")
    with Image.open(io.BytesIO(base64.b64decode(data))) as opened:
        return head, np.asarray(opened.convert("RGB"))


def two_attacks(folder: Path, setting: str = "c", count: int = 4) -> Path:
    """The second attack is better on odd images, and stored the pictures of the first two alone."""
    store = RunStore(folder)
    entries = [intact(name, setting=setting, gamma=0.27) for name in ("masked_span", "token_span")]
    store.write_cells(entries)
    for at, entry in enumerate(entries):
        psnr = [20.0 + (i if i % 2 == at else 0) for i in range(count)]
        simple_line(store, entry, list(psnr))
        write_pictures(store, entry, {image_id(i): psnr[i] for i in range(2 if at else count)})
    return folder


# the order ----------------------------------------------------------------------------------------


def test_images_are_quantiles_of_the_psnr(tmp_path: Path) -> None:
    """21 images: 10 %, 50 % and 90 % first, then the ends, then the rest."""
    psnr = (*(float(7 * i % 21) for i in range(20)), 20.5)
    line = only_line(small_run(tmp_path, psnr))
    by_score = [image_id(i) for i in np.argsort(psnr, kind="stable")]
    order = list(images_in_order(set(line.images), line))
    assert order[:3] == [(by_score[place], True) for place in (2, 10, 18)]
    assert order[3:5] == [(by_score[0], False), (by_score[20], False)]
    assert sorted(name for name, _ in order) == sorted(by_score)
    assert sum(strip for _, strip in order) == 3


def test_without_scores_the_first_pictures_by_name_are_shown(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = intact("masked_span")
    store.write_cells([entry])
    simple_line(store, entry, ["unscored"] * 5)
    write_pictures(store, entry, {image_id(i): 20.0 for i in range(5)})
    lines = load_runs([tmp_path]).lines
    expected = [(image_id(i), i < 3) for i in range(5)]
    assert list(images_in_order(set(lines[0].images), None)) == expected
    assert list(images_in_order(set(lines[0].images), lines[0])) == expected


# what is kept -------------------------------------------------------------------------------------


def test_every_line_shows_the_same_images(tmp_path: Path) -> None:
    lines = load_runs([two_attacks(tmp_path)]).lines
    derived = derived_lines(clients_of(lines))
    filled = fill_gallery([*lines, *derived], derived[0])
    assert {shown.image_id for shown in filled.shown} == {image_id(i) for i in range(4)}
    for shown in filled.shown:
        stored = {
            line.number: kept["images"]
            for line in (*lines, *derived)
            if (kept := line.reconstruction(shown.image_id)) is not None
        }
        assert set(shown.lines) == set(stored)
        for number, image in stored.items():
            _, drawn = decoded(filled.pictures[shown.lines[number]])
            np.testing.assert_array_equal(drawn, pixels(image))
    (first,) = (shown for shown in filled.shown if shown.image_id == image_id(1))
    assert first.lines[derived[0].number] == first.lines[2]  # the same picture is kept once


@pytest.mark.parametrize(
    ("bound", "value", "images"),
    [("MOST_IMAGES", 2, 2), ("MOST_PICTURES", 5, 2), ("MOST_BYTES", 1, 1)],
)
def test_a_full_page_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, images: int
) -> None:
    lines = load_runs([two_attacks(tmp_path)]).lines
    monkeypatch.setattr(gallery, bound, value)
    assert len(fill_gallery(lines, lines[0]).shown) == images


# files --------------------------------------------------------------------------------------------


def test_small_pictures_lose_nothing() -> None:
    made = np.random.default_rng(0).integers(0, 256, (3, SMALL_SIDE, SMALL_SIDE))
    head, found = decoded(data_uri(torch.from_numpy(made / 255).float()))
    assert head == "data:image/png;base64"
    np.testing.assert_array_equal(found, made.transpose(1, 2, 0))


@pytest.mark.parametrize(("side", "shown"), [(SMALL_SIDE + 1, SMALL_SIDE + 1), (384, LARGEST_SIDE)])
def test_large_pictures_are_compressed_and_stay_alike(side: int, shown: int) -> None:
    image = photograph(3, side)
    head, found = decoded(data_uri(image))
    assert head == "data:image/webp;base64"
    assert found.shape == (shown, shown, 3)
    expected = torch.nn.functional.avg_pool2d(image, side // shown).permute(1, 2, 0).numpy()
    assert np.abs(found / 255 - expected).mean() < 0.02


# strip.png ----------------------------------------------------------------------------------------

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
    groups = clients_of(load_runs([folder]).lines)
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


# stored tensors as pictures, and the scores and names beside them ---------------------------------
