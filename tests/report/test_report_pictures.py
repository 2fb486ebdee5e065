"""Which pictures a report draws, and of which images."""

import math
import re
from pathlib import Path

import matplotlib.image
import pytest
import torch

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.loading import load_runs
from mjp_privacy.report.pictures import (
    Example,
    attack_text,
    choose,
    examples,
    file_name,
    picture,
    psnr_text,
    shown_kinds,
)
from mjp_privacy.report.write import ReportSummary, write_report
from tests.helpers.report_rows import (
    cell,
    image_id,
    image_rows,
    only_line,
    small_run,
    write_pictures,
    write_rows,
)

TEXTS = ("table.md", "table.html", "table.tex", "table.csv", "samples.csv")


def test_images_are_quantiles(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run", tuple(float(i) for i in range(21)))
    chosen = choose(only_line(folder))
    assert chosen == [(image_id(i), [q]) for i, q in ((1, 0.05), (5, 0.25), (10, 0.5))] + [
        (image_id(i), [q]) for i, q in ((15, 0.75), (19, 0.95))
    ]


def test_equal_scores_go_by_name_and_few_images_stand_for_more(tmp_path: Path) -> None:
    equal = only_line(small_run(tmp_path / "equal", (9.0, 9.0, 9.0)))
    assert [name for name, _ in choose(equal)] == [image_id(0), image_id(1), image_id(2)]
    two = only_line(small_run(tmp_path / "two", (12.0, 8.0)))
    assert choose(two) == [(image_id(1), [0.05, 0.25]), (image_id(0), [0.5, 0.75, 0.95])]


def test_the_input_is_shown_where_it_was_shuffled(written: tuple[Path, ReportSummary]) -> None:
    plain, shuffled, *_ = load_runs([written[0].parent / "run"]).lines
    assert shown_kinds(examples(plain)) == ["plain", "images"]
    assert shown_kinds(examples(shuffled)) == ["plain", "input", "images"]
    assert {example.against for example in examples(plain)} == {"the original"}
    assert {example.against for example in examples(shuffled)} == {"the shuffled input"}


def test_strip_shows_the_reconstruction(written: tuple[Path, ReportSummary]) -> None:
    """Not blank, and larger where there are three rows of pictures."""
    folder = written[0] / "figures"
    plain = matplotlib.image.imread(folder / "line_001_DeiT-S-a-april-float32.png")
    shuffled = matplotlib.image.imread(folder / "line_002_DeiT-S-b-april-float32.png")
    assert plain.shape[1] == shuffled.shape[1]
    assert plain.shape[0] < shuffled.shape[0]
    assert all(image[..., :3].std() > 0.1 for image in (plain, shuffled))


def test_a_run_without_reconstructions_has_no_strips(run: Path, tmp_path: Path) -> None:
    stale = tmp_path / "out" / "figures" / "line_007_of_an_earlier_report.png"
    stale.parent.mkdir(parents=True)
    stale.touch()
    stale.with_name("overview.png").touch()
    other = stale.with_name("mine.png")
    other.touch()
    summary = write_report([run], tmp_path / "out")
    assert [path.name for path in summary.files if path.suffix == ".png"] == ["psnr.png"]
    assert not stale.exists()
    assert not stale.with_name("overview.png").exists()
    assert other.exists()


def test_a_run_without_a_score_has_no_figures(tmp_path: Path) -> None:
    RunStore(tmp_path / "run").write_cells([cell("x", status="unsupported", reason="D < N + 1")])
    summary = write_report([tmp_path / "run"], tmp_path / "out")
    assert [path.name for path in summary.files] == list(TEXTS)
    assert not summary.any_failed


def test_one_image_and_odd_labels_can_be_drawn(tmp_path: Path) -> None:
    """Mathematics in a label is text; one value has no density; an id may hold anything."""
    store = RunStore(tmp_path / "run")
    entry = cell("x", model=r"$\frac{1$ ../..\ :*?", setting="c", gamma=0.27)
    store.write_cells([entry])
    write_rows(store, entry, image_rows(entry, r"$\a{", 15.0))
    write_pictures(store, entry, {r"$\a{": 15.0})
    summary = write_report([tmp_path / "run"], tmp_path / "out")
    strips = [path for path in summary.files if path.name.startswith("line_")]
    assert [path.parent for path in strips] == [tmp_path / "out" / "figures"]
    assert re.fullmatch(r"[A-Za-z0-9_.+-]+", file_name(only_line(tmp_path / "run")))


def test_pictures_are_clipped_and_grey_where_there_is_no_number() -> None:
    image = torch.tensor([math.nan, -1.0, 2.0, 0.25]).reshape(1, 2, 2)
    shown = picture(image)
    assert shown.shape == (2, 2, 3)
    assert shown[..., 0].ravel().tolist() == [0.5, 0.0, 1.0, 0.25]


@pytest.mark.parametrize(
    ("psnr", "expected"),
    [(19.25, "19.2 dB"), (100.0, "100.0 dB"), (100.01, ">100 dB"), (math.inf, "exact")],
)
def test_scores_over_pictures_are_capped_as_in_tables(psnr: float, expected: str) -> None:
    assert psnr_text(psnr) == expected
    example = Example("photo", (0.5,), psnr, {}, "the original")
    assert example.title == f"50 %: {expected}\nphoto"


def test_controls_are_called_so_in_pictures(tmp_path: Path) -> None:
    names = []
    for role in ("attack", "floor", "ceiling"):
        entry = {"attack": "a_control_with_a_long_name", "role": role}
        names.append(attack_text(only_line(small_run(tmp_path / role, **entry)), 11))
    assert names == ["a_con…_name", "control: a_con…_name", "control: a_con…_name"]
