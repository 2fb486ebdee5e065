"""The picture of the same images through every line."""

from __future__ import annotations

from pathlib import Path

from mjp_privacy.report.comparison import tiles_of, write_comparison
from mjp_privacy.report.loading import load_runs
from tests.helpers.report_rows import synthetic_run


def test_the_same_images_in_every_line(tmp_path: Path) -> None:
    """Original and each different input once, then every line that stored the image."""
    synthetic_run(tmp_path / "run", 12)
    lines = load_runs([tmp_path / "run"]).lines
    shown = write_comparison(lines, tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").is_file()
    assert len(shown) == 2
    for image_id in shown:
        titles = [tile.title for tile in tiles_of(lines, image_id)]
        assert titles[0] == "original"
        assert titles.count("original") == 1
        scored = [line for line in lines if image_id in line.scored("psnr", "standard").index]
        kept = [line for line in scored if line.store.find_reconstruction(line.run_id, image_id)]
        assert kept
        assert sum("dB" in title or "exact" in title for title in titles) == len(kept)


def test_nothing_to_show(tmp_path: Path) -> None:
    assert write_comparison([], tmp_path / "none.png") == ()
    assert not (tmp_path / "none.png").exists()
