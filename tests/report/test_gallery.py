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
from mjp_privacy.report.page import gallery
from mjp_privacy.report.page.gallery import (
    LARGEST_SIDE,
    SMALL_SIDE,
    data_uri,
    fill_gallery,
    images_in_order,
    spread_order,
)
from mjp_privacy.report.pictures import pixels
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.worst_case import derived_lines, reduced_groups
from tests.helpers.ladder_rows import simple_line
from tests.helpers.report_rows import (
    add_pictures,
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


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 48, 1000])
def test_every_place_comes_once_and_early_ones_are_spread(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    if count > 4:
        assert order[:2] == [0, count - 1]
        assert order[2] == pytest.approx((count - 1) / 2, abs=0.5)
        gaps = np.diff(sorted(order[:5]))
        assert max(gaps) - min(gaps) <= 1


def test_images_are_quantiles_of_the_psnr(tmp_path: Path) -> None:
    """21 images: 10 %, 50 % and 90 % first, then the ends, then the rest."""
    psnr = (*(float(7 * i % 21) for i in range(20)), 20.5)
    line = only_line(small_run(tmp_path, psnr))
    by_score = [image_id(i) for i in np.argsort(psnr, kind="stable")]
    order = list(images_in_order(line.images.names, line))
    assert order[:3] == [(by_score[place], True) for place in (2, 10, 18)]
    assert order[3:5] == [(by_score[0], False), (by_score[20], False)]
    assert sorted(name for name, _ in order) == sorted(by_score)
    assert sum(strip for _, strip in order) == 3


def test_equal_scores_go_by_name_and_few_images_stand_for_more(tmp_path: Path) -> None:
    equal = only_line(small_run(tmp_path / "equal", (9.0, 9.0, 9.0)))
    assert [name for name, _ in images_in_order(equal.images.names, equal)] == [
        image_id(i) for i in range(3)
    ]
    one = only_line(small_run(tmp_path / "one", (9.0,)))
    assert list(images_in_order(one.images.names, one)) == [(image_id(0), True)]


def test_without_scores_the_first_pictures_by_name_are_shown(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = intact("masked_span")
    store.write_cells([entry])
    simple_line(store, entry, ["unscored"] * 5)
    write_pictures(store, entry, {image_id(i): 20.0 for i in range(5)})
    lines = load_runs([tmp_path]).lines
    expected = [(image_id(i), i < 3) for i in range(5)]
    assert list(images_in_order(lines[0].images.names, None)) == expected
    assert list(images_in_order(lines[0].images.names, lines[0])) == expected


# what is kept -------------------------------------------------------------------------------------


def test_every_line_shows_the_same_images(tmp_path: Path) -> None:
    lines = load_runs([two_attacks(tmp_path)]).lines
    derived = derived_lines(reduced_groups(lines))
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


def test_the_original_is_kept_once_and_the_input_where_it_differs(tmp_path: Path) -> None:
    for setting, shuffled in (("a", False), ("b", True), ("c", True)):
        lines = load_runs([two_attacks(tmp_path / setting, setting)]).lines
        filled = fill_gallery(lines, lines[0])
        keys = [shown.original() for shown in filled.shown]
        assert None not in keys
        assert len(set(keys)) == 4
        assert all(bool(shown.fed) == shuffled for shown in filled.shown)
        names = {
            key
            for shown in filled.shown
            for key in (shown.original(), *shown.fed.values(), *shown.lines.values())
        }
        assert names - {None} == set(filled.pictures)


def test_masks_are_digits(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = intact("masked_span")
    store.write_cells([entry])
    simple_line(store, entry, [20.0, 30.0])
    image = photograph(0)
    both = torch.stack([image, image])
    mask = torch.tensor([[True, False, True, True], [False, False, False, True]])
    add_pictures(store, entry["run_id"], {"images": both, "mask": mask}, [image_id(0), image_id(1)])
    filled = fill_gallery(load_runs([tmp_path]).lines, None)
    assert {shown.image_id: shown.masks[1] for shown in filled.shown} == {
        image_id(0): "1011",
        image_id(1): "0001",
    }
    assert all(shown.original() is None for shown in filled.shown)


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


def test_images_without_a_picture_take_no_room(tmp_path: Path) -> None:
    line = only_line(small_run(tmp_path))
    filled = fill_gallery([line], line)
    assert (filled.shown, filled.pictures) == ([], {})


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
