"""One report in every format beside the files that a person approved, its figures made again from
the parquet files by another program, and what counts in none: files that are no images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.write import write_report
from tests.helpers.card_run import PHOTOGRAPHS, PSNR, card_of, card_run
from tests.helpers.report_rows import add_pictures, approved, cell, image_id, photograph, run_of
from tests.helpers.runs import attack, names, photographs, tiny

FORMATS = ("table.md", "table5.tex", "table.csv", "table5.csv")
FORMATS += ("samples.csv", "rounds.csv")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("approved")
    card_run(folder / "run")
    write_report([folder / "run"], folder / "out", pictures="none")
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_the_approved_one(made: Path, name: str) -> None:
    """Of samples.csv the rows of one scored and one lost image of two cells; of table.md what
    stands before the paired tests, whose figures are tested elsewhere, and the notes."""
    lines = (made / "out" / name).read_text(encoding="utf-8").splitlines(keepends=True)
    if name == "table.md":
        lines = lines[: lines.index("## Paired tests, image by image\n")]
    if name == "samples.csv":
        of_images = [line for line in lines if ",0.png," in line or ",2.png," in line]
        lines[1:] = [line for line in of_images if line.startswith(("april,", "masked_span,"))]
    approved(name, "".join(lines))


# made again by pandas and NumPy alone, so that no mistake of the package is repeated --------------

CAP = 100.0  # dB, of PSNR in means
METRICS = ("mse", "fft2d", "psnr", "ssim", "lpips")
ONE = ["masked_span", "pixel_lattice"]
ANY = [*ONE, "multi_round_2", "multi_round_4"]


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


def interval(values: pd.Series[float]) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean; crops of one photograph are drawn together."""
    parts = values.clip(upper=CAP).groupby([PHOTOGRAPHS[int(name[0])] for name in values.index])
    sums, sizes = parts.sum().to_numpy(), parts.size().to_numpy()
    drawn = np.random.default_rng(7).integers(0, len(sums), (20_000, len(sums)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def chosen_of(made: Path, members: list[str], rule: str = "worst_case") -> pd.Series[str]:
    """The attack that each image is taken from: the first with the highest PSNR, or with the
    smallest residual."""
    column = "psnr.standard" if rule == "worst_case" else "gradient_residual.diagnostic"
    values = pd.DataFrame({name: scored(rows_of(made, name), column) for name in members})
    return values.idxmax(axis=1) if rule == "worst_case" else values.idxmin(axis=1)


def taken(made: Path, chosen: pd.Series[str], column: str) -> pd.Series[float]:
    """A metric of every image's chosen attack."""
    return pd.Series({i: rows_of(made, name).loc[i, column] for i, name in chosen.items()})


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
    low, high = interval(values)  # two bootstraps of other draws
    found = (line["psnr_lo"], line["psnr_hi"])
    assert found == pytest.approx((low, high), abs=0.06 * (high - low))
    assert line["psnr_median"] == values.median()
    assert line["psnr_exact"] == np.isposinf(scored(rows, "psnr.paper")).sum()
    tried = rows["status"].isin(["ok", "failed", "unsupported"]).sum()
    assert line["psnr_from_20"] == 100 * (values >= 20).sum() / tried
    counts = [(rows["status"] == status).sum() for status in ("ok", "failed")]
    assert [line["n"], line["n_failed"]] == counts
    assert line["acc_mean"] == pytest.approx(100 * scored(rows, "top1.intact").mean())


@pytest.mark.parametrize("rule", ["worst_case", "attackers_choice"])
@pytest.mark.parametrize(("scope", "members"), [("1 upload", ONE), ("any number of uploads", ANY)])
def test_reductions_are_recomputed_from_the_rows(
    made: Path, rule: str, scope: str, members: list[str]
) -> None:
    chosen = chosen_of(made, members, rule)
    line = line_of(made, "standard", "attack", f"{rule}, {scope}")
    for metric in ("psnr", "ssim", "lpips"):
        expected = mean(taken(made, chosen, f"{metric}.standard"))
        assert line[f"{metric}_mean"] == pytest.approx(expected, rel=1e-12)
    choices = pd.read_csv(made / "out" / "choices.csv").query(f"reduction == '{rule}, {scope}'")
    assert choices.set_index("image_id")["chosen_run_id"].to_dict() == chosen.to_dict()


def test_figures_of_the_card_are_recomputed_from_the_rows(made: Path) -> None:
    plain, mjp = card_of(made / "run").rows
    assert plain.any_uploads is None
    for found, members in (
        *((plain.published, ["april"]), (plain.one_upload, ["patch_gradient"])),
        *((mjp.published, ["april_mjp"]), (mjp.one_upload, ONE), (mjp.any_uploads, ANY)),
        *((plain.floor, ["grey"]), (mjp.floor, ["grey"])),
    ):
        assert found is not None
        chosen = chosen_of(made, members)
        values = taken(made, chosen, "psnr.standard")
        statuses = pd.DataFrame({name: rows_of(made, name)["status"] for name in members})
        none = (statuses == "unsupported").all(axis=1)
        tried = int((statuses.isin(["ok", "failed"]).any(axis=1) | none).sum())
        assert found.mean == pytest.approx(mean(values)), members
        assert found.median == values.clip(upper=CAP).median()
        assert (found.n, found.of, found.above_20) == (len(values), tried, (values >= 20).sum())
        assert found.exact == np.isposinf(taken(made, chosen, "psnr.paper")).sum()
        low, high = interval(values)
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.06 * (high - low))
        if members == ONE:
            assert found.attack == ", ".join(f"{name} {(chosen == name).sum()}" for name in ONE)
    for row in (plain, mjp):
        assert (row.accuracy, row.accuracy_n) == (80, 5)  # of all lines


def test_table5_is_recomputed_from_the_rows(made: Path) -> None:
    """What leaks is that of the best attack on the same client."""
    table = pd.read_csv(made / "out" / "table5.csv", float_precision="round_trip")
    expected = {"april": ("ViT-Ti", "a", ["patch_gradient"]), "april_mjp": ("ViT-Ti+MJP", "c", ONE)}
    for (_, row), (name, known) in zip(table.iterrows(), expected.items(), strict=True):
        assert (row["model"], row["setting"]) == known[:2]
        rows, chosen = rows_of(made, name), chosen_of(made, known[2])
        assert row["acc_mean"] == pytest.approx(100 * scored(rows, "top1.intact").mean())
        for metric in METRICS:
            expected_mean = mean(scored(rows, f"{metric}.paper"))
            assert row[f"{metric}_mean"] == pytest.approx(expected_mean)
        assert row["leak_exact"] == np.isposinf(taken(made, chosen, "psnr.paper")).sum()
        assert row["leak_at_20"] == (taken(made, chosen, "psnr.standard") >= 20).sum()


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


def test_what_shares_a_step_with_it_is_in_no_figure_either(folder: Path, tmp_path: Path) -> None:
    (folder / "0.png").unlink()
    attack(folder, tmp_path / "run", config(client={"batch": 2}, block=6))
    contents = read_contents([tmp_path / "run"])
    assert {len(set(line.images)) for line in contents.lines} == {4}
    mate = set(names(6)) - {"0.png", *contents.lines[0].images}
    assert "broken.jpg" in contents.reasons[0]
    assert mate.pop() in contents.reasons[1]


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
