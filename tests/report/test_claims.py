"""Published figures are computed again: by hand on planted rows, and on the repository's own."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.results.claims import FIGURE, Claims, main
from mjp_privacy.report.results.figures import CountFigures, Figures, LineFigures, text_of
from mjp_privacy.report.results.lines import select
from mjp_privacy.report.results.rows import write_published
from mjp_privacy.report.results.tables import _better, _carry_on
from tests.helpers.report_rows import cell, image_rows, write_rows

ROOT = Path(__file__).resolve().parents[2]
PSNR = [math.inf, math.inf, math.inf, math.inf, 25.0, 12.0, 19.999, 20.0]
CLAIMS = """
lines:
  lattice: {rows: rows.parquet, attack: pixel_lattice}
  other: {csv: other.csv, label: plain}
tables:
  - {file: page.md, name: all, titles: [Client], figures: [share_exact, share20, mean],
     lines: [[lattice, MJP]]}
claims:
  - {file: page.md, text: "exact for {lattice.exact} of {lattice.of}, median {lattice.median}"}
  - {file: page.md, text: "the other has {other.share20} and {other.psnr:.2f} dB"}
unchecked:
  - {file: page.md, text: nobody knows, why: rows were lost}
"""
PAGE = """# Page

It is exact for 3 of
8, median ∞ and the other has 3 of 20 (15 %, 5–36) and 18.90 dB; nobody knows.

<!-- table: all begin -->
old
<!-- table: all end -->
The end.
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one run of eight images, one of them beyond the attack."""
    store = RunStore(tmp_path / "run")
    entry = cell("a" * 16, attack="pixel_lattice", victim="intact")
    rows = [row for i, value in enumerate(PSNR) for row in image_rows(entry, f"i{i}", value)]
    rows += image_rows(entry, "i8", 0.0, status="unsupported", reason="no mask")
    write_rows(store, entry, rows)
    store.write_cells([entry])
    (store.root / "experiment.yaml").write_text("experiment: {name: planted}\n")
    (tmp_path / "results").mkdir()
    write_published([store.root], tmp_path / "results" / "rows.parquet", commit="abc")
    (tmp_path / "results" / "claims.yaml").write_text(CLAIMS, encoding="utf-8")
    other = {"label": ["plain"], "success": [0.15], "n": [20], "psnr": [18.9], "from_100": [0]}
    pd.DataFrame(other).to_csv(tmp_path / "results" / "other.csv", index=False)
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    return tmp_path


def lattice(root: Path) -> LineFigures:
    figures = Claims(root).figures["lattice"]
    assert isinstance(figures, LineFigures)
    return figures


def test_figures_are_those_of_a_hand_count(root: Path) -> None:
    figures = lattice(root)
    assert (figures.n, figures.of, figures.exact) == (8, 9, 4)
    assert (figures.figure("from20"), figures.figure("from30")) == (6, 4)
    assert figures.average == pytest.approx(np.minimum(PSNR, 100).mean(), rel=1e-6)
    assert figures.median == math.inf  # half way between 25 and ∞
    assert figures.quantile(0.25) == pytest.approx(19.99975, rel=1e-6)
    assert figures.worst == 12.0
    assert text_of(figures.median) == "∞"
    assert str(figures.figure("share_exact")).startswith("4 of 9 (44 %, 1")
    assert figures.mean.endswith(" (over 8)")


def test_a_wrong_figure_is_found_and_mended(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [verdict.holds for verdict in Claims(root).verdicts()] == [False, True, False, True]
    with pytest.raises(SystemExit) as stopped:
        main(["--root", str(root)])
    assert stopped.value.code == 1
    said = capsys.readouterr().out
    assert "expected “exact for 4 of 9, median ∞”" in said
    assert "found “exact for 3 of 8, median ∞”" in said
    assert "4 claims: 2 wrong, 1 not checked" in said
    with pytest.raises(SystemExit) as stopped:
        main(["--root", str(root), "--write"])
    assert stopped.value.code == 0
    page = (root / "page.md").read_text(encoding="utf-8")
    assert "It is exact for 4 of\n9, median ∞ and the other" in page  # line breaks stay
    assert "| MJP | 4 of 9 (44 %, " in page
    assert page.startswith("# Page\n")
    assert page.endswith("<!-- table: all end -->\nThe end.\n")


@pytest.mark.parametrize(
    "text",
    [
        *("–", "∞", "12", "-3.4", "0.0e-05", "1.2e-07", "17.7–∞"),
        *("100, the cap", "100, the cap (over 183)"),
        *("92.8 [90.0, 95.4]", "92.8 [90.0,\n  95.4] (over 3)"),
        *("116 of 200 (58 %, 51–65)", "199 of 200 (99.5 %, 97–99.9)"),
    ],
)
def test_every_figure_can_be_found_in_a_sentence(text: str) -> None:
    found = re.search(f"gets {FIGURE} dB", f"it gets {text} dB.")
    assert found is not None
    assert found[1] == text


def test_a_part_of_a_figure_is_none() -> None:
    """The full stop behind a claimed figure is not the point inside of another one."""
    assert re.search(rf"gets {FIGURE}\.", "it gets 12.9, a mean image 13.1") is None
    assert re.search(rf"gets {FIGURE} %", "it gets 12.9 % of them") is not None


def test_words_are_no_figure() -> None:
    assert re.search(f"gets {FIGURE} dB", "it gets some dB, 12 gets in dB") is None


def test_a_sentence_that_is_gone_is_wrong(root: Path) -> None:
    main_write(root)
    page = (root / "page.md").read_text(encoding="utf-8")
    (root / "page.md").write_text(page.replace("nobody knows", "all know"), encoding="utf-8")
    gone = [verdict for verdict in Claims(root).verdicts() if not verdict.holds]
    assert [verdict.expected for verdict in gone] == ["nobody knows"]
    assert "nothing like it" in str(gone[0])


def test_one_changed_cell_of_a_table_is_wrong(root: Path) -> None:
    main_write(root)
    page = (root / "page.md").read_text(encoding="utf-8")
    (root / "page.md").write_text(page.replace("| 4 of 9 ", "| 5 of 9 "), encoding="utf-8")
    assert [v.claim for v in Claims(root).verdicts() if not v.holds] == ["table all"]


def main_write(root: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--root", str(root), "--write"])
    assert stopped.value.code == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("attack: pixel_lattice", "attack: april", "Expected one line in rows.parquet"),
        ("label: plain", "label: MJP", "Expected one row of other.csv"),
        ("lattice.exact", "lattice.exactly", "no figure 'exactly'"),
        ("lattice.exact", "lettuce.exact", "'lettuce', which stands not under lines"),
    ],
)
def test_what_claims_yaml_gets_wrong_is_said(root: Path, old: str, new: str, message: str) -> None:
    path = root / "results" / "claims.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        list(Claims(root).verdicts())


def test_every_figure_of_the_readme_holds(tmp_path: Path) -> None:
    """Of all pages it is the one that is read; the others wait for the night."""
    content = yaml.safe_load((ROOT / "results" / "claims.yaml").read_text("utf-8"))
    parts = {
        part: [one for one in content[part] if one["file"] == "README.md"]
        for part in ("claims", "tables", "unchecked")
    }
    named = re.findall(r"{(\w+)\.", str(parts["claims"]))
    named += [line[0] for table in parts["tables"] for line in table.get("lines", ())]
    parts["lines"] = {name: content["lines"][name] for name in named}
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    (tmp_path / "results" / "claims.yaml").write_text(yaml.safe_dump(parts), "utf-8")
    for path in (ROOT / "results").iterdir():
        if path.is_dir():
            (tmp_path / "results" / path.name).symlink_to(path)
    verdicts = list(Claims(tmp_path).verdicts())
    assert len(verdicts) > 10
    wrong = [str(verdict) for verdict in verdicts if not verdict.holds]
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
def test_every_published_figure_holds() -> None:
    """What `make results-check` does."""
    wrong = [str(verdict) for verdict in Claims(ROOT).verdicts() if not verdict.holds]
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
def test_the_ladder_s_counts_by_another_road() -> None:
    """The README's exact counts and shares from the parquet file with pandas alone."""
    frame = pd.read_parquet(ROOT / "results" / "ladder" / "rows.parquet")
    lines = Claims(ROOT).content["lines"]
    figures = {
        name: select(lines[name], ROOT / "results") for name in ("c_lattice", "c_six", "c_worst")
    }
    for name, attack in (("c_lattice", "pixel_lattice"), ("c_six", "multi_round (6)")):
        client = (frame["setting"] == "c") & (frame["client"] == "–")
        rows = frame[client & (frame["attack"] == attack)]
        line = figures[name]
        assert line.figure("exact") == np.isposinf(rows["psnr_paper"]).sum()
        assert line.figure("from30") == (rows["psnr"] >= 30).sum()
        assert line.figure("of") == len(rows)
        assert line.figure("average") == pytest.approx(rows["psnr"].clip(upper=100).mean())
    one = (
        client
        & (frame["role"] == "attack")
        & (frame["uploads"] == 1)
        & (frame["attack"] != "april")
    )
    best = frame[one].groupby("image_id")["psnr"].max()
    assert figures["c_worst"].figure("from20") == (best >= 20).sum()


def test_no_markdown_is_larger_than_a_page_can_bear() -> None:
    large = [
        (str(path.relative_to(ROOT)), path.stat().st_size)
        for folder in ("results", "attacks", "configs", "mjp_privacy")
        for path in (ROOT / folder).rglob("*.md")
        if path.stat().st_size > 40_000
    ]
    large += [(path.name, path.stat().st_size) for path in ROOT.glob("*.md")]
    assert [entry for entry in large if entry[1] > 40_000] == []


def test_every_folder_of_results_that_is_named_is_committed() -> None:
    """Also where the folder lies here and git leaves it out."""
    named = re.findall(
        r"\]\((\w+)/README\.md\)", (ROOT / "results" / "README.md").read_text("utf-8")
    )
    ignored = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert named
    assert [name for name in named if f"!/results/{name}/" not in ignored] == []


def test_every_link_of_the_results_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in [*(ROOT / "results").rglob("*.md"), ROOT / "attacks" / "README.md"]
        for link in re.findall(r"\]\((?!http)([^)#\s]+)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert broken == []


KINDS = """
lines: {lattice: {rows: rows.parquet, attack: pixel_lattice}}
tables:
  - {file: page.md, name: every, every: {rows: rows.parquet}, facts: [model, attack],
     figures: [n, share30]}
  - {file: page.md, name: grid, head: "R = ",
     grid: {csv: grid.csv, down: gamma, across: uploads, figure: psnr_mean}}
  - {file: page.md, name: files, files: [rows.parquet]}
  - {file: page.md, name: card, card: rows.parquet}
"""


def test_every_kind_of_table(root: Path) -> None:
    (root / "results" / "claims.yaml").write_text(KINDS, encoding="utf-8")
    planted = {"gamma": [0.1, 0.1, 0.5], "uploads": [1, 2, 1], "psnr_mean": [20.04, math.inf, 9.0]}
    pd.DataFrame(planted).to_csv(root / "results" / "grid.csv", index=False)
    names = ("every", "grid", "files", "card")
    blocks = (f"<!-- table: {name} begin -->\n<!-- table: {name} end -->" for name in names)
    (root / "page.md").write_text("\n\n".join(blocks), encoding="utf-8")
    main_write(root)
    page = (root / "page.md").read_text(encoding="utf-8")
    assert "| model | attack | n | ≥ 30 dB |" in page
    assert "| DeiT-S | pixel_lattice | 8 | 4 of 9 (44 %, " in page
    assert (
        "| γ | R = 1 | R = 2 |\n| --- | ---: | ---: |\n| 0.1 | 20.0 | ∞ |\n| 0.5 | 9.0 | – |"
        in page
    )
    assert "| [rows.parquet](rows.parquet) | planted | 9 | abc | None | None | None | " in page
    assert "4 of 9 exactly" in page


def test_a_part_of_the_pictures_by_their_repeats(root: Path) -> None:
    counts = {f"i{index}": int(index in (0, 4)) for index in range(9)}
    path = root / "results" / "rows.parquet"
    write_published([root / "run"], path, commit="abc", repeats=counts)
    lines = "lines:\n" + "".join(
        f'  {name}: {{rows: rows.parquet, attack: pixel_lattice, only: "{only}"}}\n'
        for name, only in (("some", "repeats"), ("none", "no repeats"))
    )
    (root / "results" / "claims.yaml").write_text(lines, encoding="utf-8")
    figures = Claims(root).figures
    assert [figures["some"].figure(name) for name in ("of", "exact", "from20")] == [2, 1, 2]
    assert [figures["none"].figure(name) for name in ("of", "exact", "from20")] == [7, 3, 4]


def test_a_grid_takes_the_best_line_and_carries_it_on() -> None:
    lines = {name: CountFigures(count, 9) for name, count in (("few", 2), ("many", 7))}
    assert _better(None, lines["few"], "count") is lines["few"]
    assert _better(lines["many"], lines["few"], "count") is lines["many"]
    again = CountFigures(7, 9)
    assert _better(lines["many"], again, "count") is again  # of equals the later one
    cells: dict[str, dict[str, Figures]] = {"2": {"1": lines["many"], "4": lines["few"]}}
    _carry_on(cells, ("1", "2", "4"), "count")
    assert cells == {"2": {"1": lines["many"], "4": lines["many"]}}
