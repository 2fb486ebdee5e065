"""Published rows say what the run's rows say, and the report's lines come back from them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.lines import summary
from mjp_privacy.report.results.repeated_patches import count_repeats, repeated_patches
from mjp_privacy.report.results.rows import main, read_published, write_published
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.worst_case import derived_lines, reduced_groups
from tests.helpers.report_rows import cell, image_rows, synthetic_run, write_rows

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = "experiment:\n  name: ladder\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    synthetic_run(folder, 12)
    (folder / "experiment.yaml").write_text(CONFIG)
    (folder / "log.jsonl").write_text(
        '{"time": 0, "commit": "abc", "torch": "2.11.0", "threads": 1}\n'
    )
    return folder


def test_lines_come_back_as_they_were(run: Path, tmp_path: Path) -> None:
    write_published([run], tmp_path / "rows.parquet", commit=COMMIT, paper_scores=True)
    published = read_published(tmp_path / "rows.parquet")
    lines = load_runs([run]).lines
    assert [line.label for line in published.lines] == [line.label for line in lines]
    for line, again in zip(lines, published.lines, strict=True):
        assert again.cell.client == line.cell.client
        assert (again.status, again.reason) == (line.status, line.reason)
        for metric in ("mse", "psnr", "ssim", "lpips"):
            for variant in ("standard", "paper"):
                ours, theirs = summary(again, metric, variant), summary(line, metric, variant)
                assert ours.counts == theirs.counts, (line.label, metric, variant)
                assert ours.mean == pytest.approx(theirs.mean, rel=1e-6, nan_ok=True)
                assert ours.low == pytest.approx(theirs.low, rel=1e-6, nan_ok=True)


def test_the_worst_case_is_chosen_by_the_report_s_rule(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run")
    client = {"model": "ViT", "setting": "c", "gamma": 0.27, "victim": "intact"}
    weak = cell("a" * 16, attack="masked_span", **client)
    strong = cell("b" * 16, attack="pixel_lattice", **client)
    altered = cell("c" * 16, attack="april", **{**client, "victim": "april_block"})
    psnr = {
        weak["run_id"]: [20.0, 21.0, 22.0],
        strong["run_id"]: [math.inf, 12.0, 30.0],
        altered["run_id"]: [99.0, 99.0, 99.0],  # another client: never chosen
    }
    cells = [weak, strong, altered]
    for entry in cells:
        values = enumerate(psnr[entry["run_id"]])
        hidden = {"zero_rows": 3.0}
        rows = [
            row
            for i, value in values
            for row in image_rows(entry, f"image{i}", value, diagnostics=hidden)
        ]
        write_rows(store, entry, rows)
    store.write_cells(cells)
    (store.root / "experiment.yaml").write_text(CONFIG)
    write_published([store.root], tmp_path / "rows.parquet", commit=COMMIT)
    published = read_published(tmp_path / "rows.parquet")
    (worst,) = (line for line in published.all_lines if line.role == "worst_case")
    scores = worst.scored("psnr", "standard").sort_index()
    assert scores.tolist() == [math.inf, 21.0, 30.0]
    (expected,) = (
        line
        for line in derived_lines(reduced_groups(load_runs([store.root]).lines))
        if line.role == "worst_case"
    )
    assert expected.scored("psnr", "standard").sort_index().tolist() == scores.tolist()


def test_any_program_can_read_the_file(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_published([run], path, commit=COMMIT)
    frame = pd.read_parquet(path)
    for line in load_runs([run]).lines:
        stored = line.scored("psnr", "standard")
        of_line = frame[(frame["line"] == line.number) & frame["psnr"].notna()]
        np.testing.assert_allclose(of_line["psnr"], stored[of_line["image_id"]], rtol=1e-6)
        assert set(frame.loc[frame["line"] == line.number, "attack"]) <= {line.attack}
    assert frame["psnr"].dtype == np.float32
    facts = read_published(path)
    assert facts.commit == COMMIT
    (made,) = facts.runs
    assert (made.config, made.torch, made.threads, made.date) == (
        "ladder",
        "2.11.0",
        1,
        "1970-01-01",
    )
    assert len(made.config_sha256) == 64


def test_an_unfinished_run_keeps_images_that_all_lines_have(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run")
    first, second = (cell(letter * 16, attack=letter, victim="intact") for letter in "ab")
    for entry, images in ((first, 5), (second, 3)):
        rows = [row for i in range(images) for row in image_rows(entry, f"image{i}", 20.0 + i)]
        write_rows(store, entry, rows)
    store.write_cells([first, second])
    (store.root / "experiment.yaml").write_text(CONFIG)
    path = tmp_path / "rows.parquet"
    write_published([store.root], path, commit=COMMIT, finished_only=True)
    assert read_published(path).rows.groupby("line")["image_id"].nunique().tolist() == [3, 3]
    write_published([store.root], path, commit=COMMIT)
    assert read_published(path).rows.groupby("line")["image_id"].nunique().tolist() == [5, 3]


def test_the_command_adds_the_count_of_repeated_patches(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = sorted({i for line in load_runs([run]).lines for i in line.rows["image_id"]})
    counts = tmp_path / "repeats.csv"
    pd.DataFrame({"image_id": images, "repeated_patches": range(len(images))}).to_csv(counts)
    path = tmp_path / "out" / "rows.parquet"
    main([str(run), "--out", str(path), "--commit", COMMIT, "--repeats", str(counts)])
    assert "rows" in capsys.readouterr().out
    frame = read_published(path).rows.drop_duplicates("image_id").set_index("image_id")
    assert frame["repeated_patches"].to_dict() == {image: i for i, image in enumerate(images)}


def test_other_parquet_files_are_refused(tmp_path: Path) -> None:
    pd.DataFrame({"line": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(UserError, match="no file of published rows"):
        read_published(tmp_path / "other.parquet")
    with pytest.raises(UserError, match="no such file"):
        read_published(tmp_path / "missing.parquet")


def test_repeated_patches_are_counted_in_8_bits(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(3, 12, 12, generator=generator)
    assert repeated_patches(image, 4) == 0
    image[:, :4, :4] = image[:, 8:, 4:8]
    assert repeated_patches(image, 4) == 2
    image[:, 4:8, 8:] = image[:, 8:, 4:8] + 1e-6  # another float, the same 8-bit values
    assert repeated_patches(image, 4) == 3
    assert repeated_patches(torch.zeros(3, 12, 12), 4) == 9


def test_pictures_are_cropped_as_a_run_crops_them(tmp_path: Path) -> None:
    from PIL import Image

    flat = np.full((40, 40, 3), 90, dtype=np.uint8)
    busy = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    for name, picture in (("flat", flat), ("busy", busy)):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
    counted = count_repeats(tmp_path, size=32, patch=8).set_index("image_id")["repeated_patches"]
    assert counted.to_dict() == {"flat.png": 16, "busy.png": 0}
