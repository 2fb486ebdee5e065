"""tools/publish.py: published rows equal their runs, and a changed figure or row is noticed; tables
3 and 4 as trained here."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.report.clients import clients_of, derived_lines
from mjp_privacy.report.figures import exact_share, summary
from mjp_privacy.report.runs import load_runs
from tests.helpers.report_rows import cell, run_of, synthetic_run
from tools import publish, published_rows
from tools.published_rows import read
from tools.trained_rows import seed_noise

ROOT = Path(__file__).resolve().parents[2]
PSNR = [math.inf, math.inf, math.inf, math.inf, 25.0, 12.0, 19.999, 20.0]
SHUFFLED = {"setting": "c", "gamma": 0.27, "victim": "intact"}


def planted_run(folder: Path, *lines: tuple[Any, ...]) -> Path:
    """A run as `mjp attack` leaves it; a line is a cell, PSNR or status by image, diagnostics."""
    numbered = [
        ({**entry, "run_id": f"{at:016d}"}, *more) for at, (entry, *more) in enumerate(lines)
    ]
    run_of(folder, *numbered)
    (folder / "experiment.yaml").write_text("experiment: {name: planted}\n")
    (folder / "log.jsonl").write_text('{"time": 0, "commit": "abc", "torch": "2.11.0"}\n')
    return folder


def run(folder: Path, scores: Mapping[str, Sequence[float | str]], **facts: Any) -> Path:
    """A run of these attacks, PSNR or status by image."""
    lines = [(cell("", attack=attack, **facts), values) for attack, values in scores.items()]
    return planted_run(folder, *lines)


def written(folder: Path, scores: Mapping[str, Sequence[float | str]], **facts: Any) -> Path:
    path = folder / "rows.parquet"
    published_rows.write([run(folder / "run", scores, **facts)], path, commit="abc", source="x")
    return path


# rows ---------------------------------------------------------------------------------------------


def test_published_lines_equal_those_of_the_report(tmp_path: Path) -> None:
    """Also the derived ones, and where images fail, are unscored or the cell was interrupted."""
    synthetic_run(tmp_path / "run", 12)
    (tmp_path / "run" / "experiment.yaml").write_text("experiment: {name: ladder}\n")
    path = tmp_path / "rows.parquet"
    published_rows.write([tmp_path / "run"], path, commit="abc", source="x")
    lines = load_runs([tmp_path / "run"]).lines
    lines = [x for x in (*lines, *derived_lines(clients_of(lines))) if len(x.images)]
    published = read(path).lines
    assert [line.facts["attack"] for line in published] == [line.attack for line in lines]
    for line, again in zip(lines, published, strict=True):
        assert again.figure("share_exact") == exact_share(line).text()
        assert again.psnr.counts == summary(line, "psnr", "standard").counts
        wanted = line.scored("psnr", "standard").to_numpy()  # stored in 32 bits
        assert again.scored("psnr").to_numpy() == pytest.approx(wanted, rel=1e-6)
    frame = pd.read_parquet(path)  # as any program reads it
    assert {"model", "setting", "gamma", "attack", "role", "batch", "psnr"} <= {*frame.columns}


def test_lines_that_share_a_number_are_refused(tmp_path: Path) -> None:
    """As where the rows of two runs were put together without numbering their lines anew."""
    path = written(tmp_path, {"april": [20.0]})
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table]), path)
    with pytest.raises(UserError, match=path.name):
        read(path)


def test_figures_are_those_of_a_hand_count(tmp_path: Path) -> None:
    (line,) = read(written(tmp_path, {"pixel_lattice": [*PSNR, "unsupported"]})).lines
    assert [line.figure(name) for name in ("n", "of", "exact", "from20", "from30")] == [
        8,
        9,
        4,
        6,
        4,
    ]
    assert line.figure("average") == pytest.approx(np.minimum(PSNR, 100).mean(), rel=1e-6)
    assert line.figure("median") == math.inf  # half way between 25 and ∞
    assert line.figure("quartiles") == "20.0–∞"
    assert line.figure("share_exact").startswith("4 of 9 (44 %, 1")
    assert line.figure("mean_psnr").endswith(" (over 8)")
    with pytest.raises(UserError, match="no figure 'exactly'"):
        line.figure("exactly")


def test_repeated_patches_are_counted_in_8_bits() -> None:
    image = torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(0))
    assert publish.repeated_patches(image, 4) == 0
    image[:, :4, :4] = image[:, 8:, 4:8]
    assert publish.repeated_patches(image, 4) == 2
    image[:, 4:8, 8:] = image[:, 8:, 4:8] + 1e-6  # another float, the same 8-bit values
    assert publish.repeated_patches(image, 4) == 3
    assert publish.repeated_patches(torch.zeros(3, 12, 12), 4) == 9


# tables -------------------------------------------------------------------------------------------

TABLES = """
lines:
  lattice: {rows: rows.parquet, attack: pixel_lattice}
tables:
  - {file: page.md, name: lines, heads: [client], lines: [[lattice, MJP]],
     columns: [share_exact, {≥ 20: "{from20} of {of}"}]}
  - {file: page.md, name: every, every: {rows: rows.parquet}, columns: [attack, gamma, n]}
  - {file: page.md, name: grid,
     grid: {of: {csv: grid.csv}, down: [gamma], across: "R = {uploads}", figure: "{psnr:.1f}"}}
  - {file: page.md, name: files, files: [rows.parquet]}
  - {file: page.md, name: part, every: {rows: rows.parquet, role: attack},
     columns: [attack, gamma, n], full: part.csv, show: {attack: token_span}, hide: [γ]}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one run and a page of every kind of table."""
    (tmp_path / "results").mkdir()
    scores = {"pixel_lattice": [*PSNR, "unsupported"], "token_span": [11.0] * 9}
    rows = written(tmp_path, scores, **SHUFFLED)
    rows.rename(tmp_path / "results" / "rows.parquet")
    planted = {"gamma": [0.1, 0.1, 0.5], "uploads": [1, 2, 1], "psnr": [20.04, math.inf, 9.0]}
    pd.DataFrame(planted).to_csv(tmp_path / "results" / "grid.csv", index=False)
    (tmp_path / "results" / "tables.yaml").write_text(TABLES, "utf-8")
    names = [table["name"] for table in yaml.safe_load(TABLES)["tables"]]
    blocks = (f"<!-- table: {name} begin -->\n<!-- table: {name} end -->" for name in names)
    (tmp_path / "page.md").write_text("# Page\n\n" + "\n\nWords.\n".join(blocks), "utf-8")
    publish.published_at.cache_clear()
    assert publish.check(tmp_path)  # nothing is there yet
    assert publish.check(tmp_path, write=True) == []
    return tmp_path


def test_every_kind_of_table_and_a_changed_figure_is_noticed(root: Path) -> None:
    page, file = root / "page.md", root / "part.csv"
    text, whole = page.read_text("utf-8"), "attack,γ,n\npixel_lattice,0.27,8\ntoken_span,0.27,9\n"
    assert text.startswith("# Page\n")
    assert text.count("\nWords.\n") == 4
    assert re.search(
        r"\| MJP \| 4 of 9 \(44 %, \d+–\d+\) \| 6 of 9 \|\n<!-- table: lines end", text
    )
    for table in (
        "| pixel_lattice | 0.27 | 8 |\n| token_span | 0.27 | 9 |",
        "| γ | R = 1 | R = 2 |\n|---|---|---|\n| 0.1 | 20.0 | ∞ |\n| 0.5 | 9.0 | – |",
        "| rows.parquet | planted | abc | 1970-01-01 | 9 |",
        "| attack | n |\n|---|---|\n| token_span | 9 |\n\n[All 2 rows, 3 columns](part.csv)\n",
    ):
        assert table in text
    assert file.read_text("utf-8") == whole
    assert publish.check(root) == []
    for changed in (whole.replace(",8", ",7"), None):
        file.write_text(changed, "utf-8") if changed else file.unlink()
        assert "part.csv" in publish.check(root)[0]
    file.write_text(whole, "utf-8")
    page.write_text(text.replace("| 6 of 9 |", "| 7 of 9 |"), "utf-8")
    said = publish.check(root)
    assert "table lines of page.md" in said[0]
    assert ["7 of 9" in said[1], "6 of 9" in said[2], len(said)] == [True, True, 3]
    page.write_text("# Page\n")
    with pytest.raises(UserError, match="put them there"):
        publish.check(root)


# the repository's own -----------------------------------------------------------------------------


def test_every_published_table_holds() -> None:
    """What `make results-check` does."""
    assert publish.check(ROOT) == []


def test_the_card_is_what_metadata_and_results_say() -> None:
    """And weights of other sources are named in the README of their folder."""
    names = [file.stem for file in publish.ZOO.glob("*.safetensors")]
    assert names
    assert all(f"| `{name}` |" in publish.card() for name in names)
    assert publish.CARD.read_text(encoding="utf-8") == publish.card(), "tools.publish card"
    weights = [
        file
        for room in ("mjp_privacy", "attacks")
        for file in ROOT.glob(f"{room}/**/*.safetensors")
    ]
    others = [file for file in weights if file.parent != publish.ZOO]
    assert len(others) == 3
    for file in others:
        assert file.name in (file.parent / "README.md").read_text(encoding="utf-8")


# models of the paper's rows -----------------------------------------------------------------------


def test_the_noise_of_seeds_is_that_of_a_table_without_repetition() -> None:
    """Rows and seeds have effects of their own; what is left over has this deviation."""
    values = np.array([[1.0, 2.5], [4.0, 5.0], [7.0, 8.5]])
    left = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    deviation, freedom, single = seed_noise(values)
    assert freedom == 2
    assert deviation == pytest.approx(math.sqrt((left**2).sum() / 2))
    assert single == pytest.approx(4.3027 * deviation * math.sqrt(2), rel=1e-4)
    assert seed_noise(values + np.array([0.0, 9.0]))[0] == pytest.approx(deviation)
    assert math.isnan(seed_noise(values[:1])[0])
