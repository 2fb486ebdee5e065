"""One report in every format beside the files that a person approved, the figures of its lines made
again from the parquet files by another program; files that are no images count in none."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.statistics import mean_interval
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.write import write_report
from tests.helpers.card_run import PHOTOGRAPHS, PSNR, card_run
from tests.helpers.report_rows import add_pictures, approved, cell, image_id, photograph, run_of
from tests.helpers.runs import attack, names, photographs, tiny

FORMATS = ("table.md", "table5.tex", "table.csv", "table5.csv", "samples.csv", "rounds.csv")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("approved")
    card_run(folder / "run")
    write_report([folder / "run"], folder / "out", pictures="none")
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_the_approved_one(made: Path, name: str) -> None:
    """Of samples.csv the rows of one scored and one lost image of two cells; of table.md the tables
    without the notes. That paired tests are SciPy's: tests/metrics."""
    lines = (made / "out" / name).read_text(encoding="utf-8").splitlines(keepends=True)
    if name == "table.md":
        lines = lines[: lines.index("## Under which assumptions\n")]
    if name == "samples.csv":
        of_images = [line for line in lines if ",0.png," in line or ",2.png," in line]
        lines[1:] = [line for line in of_images if line.startswith(("april,", "masked_span,"))]
    approved(name, "".join(lines))


def test_words_of_the_charts_are_the_approved_ones(made: Path) -> None:
    """What stands on each chart, what it says where the mouse rests, and its description."""
    lines, told = list[str](), ("title", "text", "desc")
    for file in sorted((made / "out" / "figures").glob("*.svg")):
        elements = ElementTree.parse(file).getroot().iter()
        words = ["".join(element.itertext()) for element in elements if element.tag.endswith(told)]
        lines += [f"# {file.name}", *words]
    approved("charts.txt", "\n".join(lines) + "\n")


# made again by pandas and NumPy alone, so that no mistake of the package is repeated --------------

CAP = 100.0  # dB, of PSNR in means
METRICS = ("mse", "fft2d", "psnr", "ssim", "lpips")


def rows_of(made: Path, name: str) -> pd.DataFrame:
    """The images of a cell by their ids, in order."""
    parts = [pd.read_parquet(file) for file in (made / "run" / "rows" / name).glob("*.parquet")]
    return pd.concat(parts).set_index("image_id").sort_index()


def scored(rows: pd.DataFrame, column: str) -> pd.Series[float]:
    """The values of a metric that count."""
    return rows.loc[rows["status"] == "ok", column].dropna()


def mean(values: pd.Series[float]) -> float:
    """Per image first, average last; only PSNR is ever as large as its cap."""
    return float(values.clip(upper=CAP).mean())


def line_of(made: Path, variant: str, name: str, value: str) -> pd.Series:
    table = pd.read_csv(made / "out" / "table.csv", float_precision="round_trip")
    (at,) = table.index[(table["variant"] == variant) & (table[name] == value)]
    return table.loc[at]


@pytest.mark.parametrize("variant", ["standard", "paper"])
@pytest.mark.parametrize("name", list(PSNR))
def test_table_csv_is_recomputed_from_the_rows(made: Path, name: str, variant: str) -> None:
    rows, line = rows_of(made, name), line_of(made, variant, "run_id", name)
    for metric in METRICS:
        values = scored(rows, f"{metric}.{variant}")
        assert line[f"{metric}_mean"] == pytest.approx(mean(values), rel=1e-12)
        assert line[f"{metric}_n"] == len(values)
    values = scored(rows, f"psnr.{variant}")
    groups = [PHOTOGRAPHS[int(name[0])] for name in values.index]  # tests/metrics has intervals
    interval = mean_interval(values.clip(upper=CAP).to_numpy(), groups)
    ends = max(interval[0], 0), min(interval[1], CAP)
    assert (line["psnr_lo"], line["psnr_hi"]) == pytest.approx(ends)
    assert line["psnr_median"] == values.median()
    assert line["psnr_exact"] == np.isposinf(scored(rows, "psnr.paper")).sum()
    tried = rows["status"].isin(["ok", "failed", "unsupported"]).sum()
    assert line["psnr_from_20"] == 100 * (values >= 20).sum() / tried
    counts = [(rows["status"] == status).sum() for status in ("ok", "failed")]
    assert [line["n"], line["n_failed"]] == counts
    assert line["acc_mean"] == pytest.approx(100 * scored(rows, "top1.intact").mean())


# files that are no images -------------------------------------------------------------------------

ATTACKS = [{"name": "patch_gradient"}, {"name": "patch_prior"}, {"name": "grey"}]


def config(**changes: Any) -> dict[str, Any]:
    models = {"ViT": tiny()["models"]["ViT"]}
    grid = [{"models": ["ViT"], "settings": ["a"]}]
    return tiny(attacks=ATTACKS, models=models, grid=grid, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six photographs and a file that is no image."""
    images = photographs(tmp_path / "images")
    (images / "labels.csv").unlink()
    (images / "broken.jpg").write_bytes(b"no image")
    return images


def test_a_file_that_is_no_image_is_in_no_figure_and_named_once(
    folder: Path, tmp_path: Path
) -> None:
    done = attack(folder, tmp_path / "run", config())
    assert (done.exit_code, len(done.failures)) == (3, 1)
    contents = read_contents([tmp_path / "run"])
    for line in contents.lines:
        assert set(line.images) == set(names(6))
    (row,) = contents.card.rows
    for figure in (row.one_upload, row.floor):
        assert figure is not None
        assert (figure.of, figure.n) == (6, 6)
    assert "6 of 6 exactly" in contents.card.verdict
    assert "partly_inapplicable" not in {flag.key for flag in contents.card.flags}
    for table in contents.tables:
        assert not table.frame[["n_failed", "n_not_run"]].any(axis=None)
    summary = write_report([tmp_path / "run"], tmp_path / "report")
    assert summary.console.count("broken.jpg") == 1
    assert summary.not_run == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("broken.jpg") == 1
    assert "6 of 7" not in page
    assert "broken.jpg" in (tmp_path / "report" / "samples.csv").read_text()


def test_pictures_of_two_runs_with_equal_names_are_not_mixed(tmp_path: Path) -> None:
    for at, name in enumerate(("one", "two")):
        run_of(tmp_path / name, (cell("april", setting="c", gamma=0.27), [20.0]))
        plain = photograph(at)[None]
        tensors = {"images": plain * 0.5, "target": plain, "plain": plain}
        add_pictures(RunStore(tmp_path / name), "april", tensors, [image_id(0)])
    gallery = read_contents([tmp_path / "one", tmp_path / "two"]).gallery
    (shown,) = gallery.shown
    assert set(shown.lines) == {1, 2}
    assert len({gallery.pictures[kept["original"]] for kept in shown.lines.values()}) == 2
