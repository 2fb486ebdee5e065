"""`mjp sample --shapes`: pictures and label maps drawn by code."""

from pathlib import Path

import numpy as np
import pytest

from mjp_privacy.cli import main
from mjp_privacy.paper.image_sets import GROUND, HIGH_DISC, LOW_DISC, SHAPES, SKY, drawn
from mjp_privacy.paper.segmentation_data import splits_of


def command(*words: object) -> int:
    return main(["sample", *map(str, words)])


def test_the_layout_is_ade20ks_and_a_seed_is_a_set(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("same", 3), ("other", 4), ("one", 3)):
        assert command("--shapes", 8, "--seed", seed, "--out", tmp_path / name) == 0
    sets = [splits_of(tmp_path / name, 6, "--data") for name in ("one", "same", "other")]
    assert [len(sets[0][split]) for split in ("training", "validation")] == [8, 2]
    digests = [one["training"].digest() for one in sets]
    assert digests[0] == digests[1] != digests[2]
    picture, labels = sets[0]["validation"].read(1)
    assert picture.size == labels.shape[::-1]


def test_every_class_occurs_and_discs_differ_only_by_where_they_are() -> None:
    """Outlines have no label; a disc's class is that of the ground below its centre."""
    sets = [drawn(seed) for seed in range(150)]
    for _, one in sets:
        assert (one[0] != GROUND).all()
        assert (one[-1] != SKY).all()
    shares = np.mean([np.bincount(one.ravel(), minlength=7) / one.size for _, one in sets], 0)
    assert len(shares) == len(SHAPES) + 1
    assert 0.02 < shares[0] < 0.2
    assert shares[1:].min() > 0.01
    high, low = (
        np.array([pixels[one == kind].mean() for pixels, one in sets if (one == kind).sum() > 60])
        for kind in (HIGH_DISC, LOW_DISC)
    )
    assert min(len(high), len(low)) > 30
    assert abs(high.mean() - low.mean()) < 3 * np.hypot(high.std(), low.std()) / 5


def test_options_that_do_not_fit_and_a_folder_with_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine" / "file.png"
    mine.parent.mkdir()
    mine.touch()
    for words, out, said in (
        (["--shapes", 0], "out", "got 0"),
        (["--shapes", 4, "--from", "x"], "out", "--shapes"),
        (["--shapes", 4, "--corrupt"], "out", "--corrupt"),
        ([], "out", "--from"),
        (["--shapes", 4], "mine", "mine"),
        (["--shapes", 4], "mine/file.png", "file.png"),
    ):
        assert command(*words, "--out", tmp_path / out) == 2
        assert said in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == [mine.parent, mine]
