"""The tables of a report: figures by hand and by SciPy, and which columns and rows they have."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mjp_privacy.metrics.statistics import Share
from mjp_privacy.report import comparisons
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.curves import UPLOADS, panel_charts
from mjp_privacy.report.notes import all_notes
from mjp_privacy.report.text import TextTable
from mjp_privacy.report.write import write_report
from tests.helpers.report_rows import (
    cell,
    intact,
    lines_of,
    run_of,
    small_run,
)

MJP: dict[str, Any] = {"setting": "c", "gamma": 0.27}


def by_header(table: TextTable) -> list[dict[str, str]]:
    """A mapping by header for every row."""
    assert len(table.align) == len(table.header) == len(set(table.header))
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


# every line ---------------------------------------------------------------------------------------


def test_the_rank_ceiling_stands_beside_attacks_that_it_bounds(tmp_path: Path) -> None:
    bounded = ("april", "april_unk_aware", "oracle_inverse")
    names = (*bounded, "patch_gradient", "masked_span", "unheard of")
    cells = [cell(name, attack=f"a label of {name}", attack_name=name) for name in names]
    cells[2]["role"] = "ceiling"
    run_of(tmp_path, *((entry, [15.0], {"ceiling_psnr": 24.0}) for entry in cells))
    table = read_contents([tmp_path]).tables[1].frame.set_index("run_id").loc[list(names)]
    for name, row in table.iterrows():
        found = row[["ceiling_mean", "ceiling_n", "ceiling_distance"]].tolist()
        expected = [24.0, 1, 9.0] if name in bounded else [math.nan, 0, math.nan]
        assert found == pytest.approx(expected, nan_ok=True), name


def test_lines_without_figures_say_why(tmp_path: Path) -> None:
    refused = {"status": "unsupported", "reason": "needs N + 1 <= D"}
    run_of(
        *(tmp_path / "run", (cell("refused", **refused), []), (cell("interrupted", seed=1), [])),
        *((cell("unscored", seed=2), ["unscored"] * 5), (cell("lost", seed=3), ["failed"] * 4)),
        (cell("single", seed=4), [9.5]),
    )
    write_report([tmp_path / "run"], tmp_path / "out")
    table = pd.read_csv(tmp_path / "out" / "table.csv").query("variant == 'paper'")
    assert list(table["line"]) == [1, 2, 3, 4, 5]
    known = [
        refused,
        {"status": "failed", "n": 0},
        {"n": 0, "n_unscored": 5, "acc_n": 0},
        {"n": 0, "n_failed": 4, "reason": "so it is"},
        {"n": 1, "psnr_n": 1},
    ]
    for (_, row), facts in zip(table.iterrows(), known, strict=True):
        assert row[list(facts)].to_dict() == facts
    assert math.isnan(row["psnr_lo"])
    markdown = (tmp_path / "out" / "table.md").read_text()
    assert all(said in markdown for said in ("| 9.50 [–] |", "needs N + 1 &lt;= D |", "so it is"))


def test_runs_are_concatenated_and_those_of_one_name_told_apart(tmp_path: Path) -> None:
    first, second = small_run(tmp_path / "one/x"), small_run(tmp_path / "two/x", dtype="float64")
    write_report([second, first], tmp_path / "out")
    table = pd.read_csv(tmp_path / "out/table.csv")
    assert table["run"].tolist() == ["two/x", "one/x"] * 2
    assert table["line"].tolist() == [1, 2] * 2
    assert "| # | Run | Model |" in (tmp_path / "out/table.md").read_text()
    samples = pd.read_csv(tmp_path / "out/samples.csv")
    assert set(samples["run"]) == {"one/x", "two/x"}


def main_of(folder: Path) -> list[dict[str, str]]:
    return by_header(read_contents([folder]).main)


def test_columns_of_the_main_table(tmp_path: Path) -> None:
    """Those in which lines differ. Controls have no facts of attacks: their 0 uploads make none."""
    other = cell("y", plain_share=0.5, augment="crop", server_lr=0.01)
    grey = intact("grey", role="floor", uploads=0, engine="none")
    lines = (cell("x", gamma=0.1), other, grey)
    first, second, control = main_of(run_of(tmp_path, *((line, [9.0]) for line in lines)))
    names = ("plain share", "augment", "server lr")
    assert [first[name] for name in names] == ["0", "none", "0"]
    assert [second[name] for name in names] == ["0.5", "crop", "0.01"]
    assert not {"uploads", "engine", "role"} & control.keys()


def test_measures_have_the_columns_that_exist(tmp_path: Path) -> None:
    """Images that have no such diagnostic are counted out; PSNR is capped in means."""
    known = {"mask_recall": 0.8, "visible_psnr": 90.0, "gradient_residual": 1e-6, "seconds": 2.0}
    both = {name: [value, value * 1.25] for name, value in known.items()}
    both |= {"jigsaw_direct": [math.nan, 0.25]}
    run_of(tmp_path, (cell("x", gamma=0.1), []), (cell("y"), [9.0, 9.0], both))
    rows = read_contents([tmp_path]).tables[1].frame.iloc[:, -10:]
    assert rows.loc[0].isna().sum() == 5
    assert rows.loc[1].to_dict() == pytest.approx(
        {
            **{"mask_recall_mean": 0.9, "mask_recall_n": 2, "visible_psnr_mean": 95.0},
            **{"visible_psnr_n": 2, "jigsaw_direct_mean": 0.25, "jigsaw_direct_n": 1},
            **{"gradient_residual_median": 1.125e-6, "gradient_residual_n": 2},
            **{"seconds_median": 2.25, "seconds_n": 2},
        }
    )


# paired tests -------------------------------------------------------------------------------------

PLAIN, SPAN = (intact("patch_gradient"), [60.0, 50.0, 70.0]), [18.0, 25.0, 11.0]


@pytest.mark.parametrize(
    "other", [{"batch": 2}, {"dtype": "float64"}, {"size": 192}, {"data": "other.zip"}, {"seed": 1}]
)
def test_clients_in_other_circumstances_are_not_compared(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    """Those that are compared, and how: the approved table.md."""
    run_of(tmp_path, PLAIN, (intact("y", **MJP, **other), SPAN))
    assert read_contents([tmp_path]).tests is None


def test_rows_marked_ok_without_any_score_count_as_failed(tmp_path: Path) -> None:
    contents = read_contents([run_of(tmp_path, (intact("x"), [30.0, math.nan]))])
    assert [table.frame.loc[0, "n_failed"] for table in contents.tables] == [1, 1]
    assert contents.lines[0].frame["status"].tolist() == ["ok", "failed"]
    assert any("failed" in item for item in contents.reasons)


def test_a_mean_just_below_the_cap_is_not_rounded_to_it(tmp_path: Path) -> None:
    run_of(tmp_path, (intact("x"), [99.998, 99.998]))
    (row,) = main_of(tmp_path)
    assert row["PSNR ↓"].startswith("99.998 [")
    assert row["median"] == "99.998"


def test_comparisons_beyond_the_most_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparisons, "MOST", 3)
    noisy = [(intact(f"{at}", attack="x", defenses=f"noise {at}"), SPAN) for at in range(5)]
    run_of(tmp_path, PLAIN, (cell("april"), SPAN), *noisy)
    table = read_contents([tmp_path]).tests
    assert table is not None
    assert len(table.rows) == 3
    assert " 3 further comparisons" in table.caption


# notes --------------------------------------------------------------------------------------------


def notes_of(folder: Path) -> str:
    return "\n".join(item for part in all_notes(lines_of(folder)) for item in part.items)


def test_unshuffled_pictures_are_counted_and_the_exact_ones_among_them(tmp_path: Path) -> None:
    empty = {"empty_mask": [1.0, 0.0, 1.0, 0.0, 1.0]}
    run_of(tmp_path, (intact("masked_span", **MJP), [math.inf, math.inf, 20.0, 18.0, 16.0], empty))
    (sentence,) = [line for line in notes_of(tmp_path).splitlines() if "Unshuffled" in line]
    assert [part for part in sentence.split() if part.isdigit()] == ["3", "5", "1", "2"]


def test_equal_failures_are_one_sentence_with_their_counts(tmp_path: Path) -> None:
    """Of whole lines and of images, over all lines; an image counts once for all its scores."""
    refused = {"status": "unsupported", "reason": "a batch of 2"}
    lines: list[tuple[dict[str, Any], Sequence[float | str]]] = [
        (cell(f"{at}", seed=at), [*["unsupported"] * count, 12.0, "failed"])
        for at, count in enumerate((2, 4, 0))
    ]
    lines += [(cell(f"whole {i}", seed=3 + i, **refused), []) for i in range(2)]
    assert [text.split(":")[0] for text in read_contents([run_of(tmp_path, *lines)]).reasons] == [
        *("2 lines unsupported", "6 rows unsupported", "3 rows failed")
    ]


def test_images_that_a_run_did_not_come_to_are_counted_with_the_reasons(tmp_path: Path) -> None:
    contents = read_contents([small_run(tmp_path, planned_images=5)])
    (reason,) = contents.reasons
    assert reason.startswith("2 images not run: ")
    assert reason in contents.notes[0].items


# over uploads and over batches --------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        *({"dtype": "float64"}, {"augment": "flip"}, {"model": "ViT-S"}, {"setting": "b"}),
        {"attack_options": '{"prior": "free"}'},
    ],
)
def test_what_a_curve_must_not_mix_has_a_panel_of_its_own(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    lines = [
        (cell(f"{n} {len(own)}", uploads=n, attack_name="multi_round", **MJP | own), [20.0, 30.0])
        for own in ({}, change)
        for n in (1, 2)
    ]
    points = read_contents([run_of(tmp_path, *lines)]).points
    assert points["panel"].tolist() == [1, 1, 2, 2]
    if "augment" in change:
        assert points["differs"].tolist() == ["", "", "augment flip", "augment flip"]
        assert len(panel_charts(points, UPLOADS)) == 2


def fresh(batch: int, uploads: int, name: str = "shared_picture", **more: Any) -> dict[str, Any]:
    client = {"batch": batch, "partners": "fresh"}
    return client | {"uploads": uploads, "attack": name, "attack_name": name} | more


def batches(folder: Path, *lines: tuple[Mapping[str, Any], int, float]) -> pd.DataFrame:
    """The points of a run with these lines: facts, exact pictures of five, PSNR of the others."""
    run_of(
        folder,
        *(
            (intact(f"{at}", **facts), [math.inf] * exact + [psnr + i for i in range(exact, 5)])
            for at, (facts, exact, psnr) in enumerate(lines)
        ),
    )
    return read_contents([folder]).batches


SINGLE = {"attack": "alone", "attack_name": "alone"}


def test_points_over_batches_are_the_attacks_that_recover_most(tmp_path: Path) -> None:
    """A client of single pictures has no partners: it opens the panels of all that have."""
    points = batches(
        *(tmp_path / "one", (SINGLE, 5, 0.0), (fresh(4, 2), 3, 12.0)),
        *((fresh(4, 2, "other"), 2, 60.0), (fresh(4, 1, "batch_span"), 0, 13.0)),
        *((fresh(8, 2), 0, 10.0), (fresh(8, 2, "other"), 0, 20.0)),
        (fresh(4, 2, "april", victim="april_block"), 5, 0.0),
        (fresh(16, 0, "grey", role="floor"), 5, 10.0),
    )
    assert points["panel"].tolist() == [1] * 4
    assert points[["batch", "uploads"]].values.tolist() == [[1, 1], [4, 1], [4, 2], [8, 2]]
    assert points["attack"].tolist() == ["alone", "batch_span", "shared_picture", "other"]
    assert points["exact"].tolist() == [5, 0, 3, 0]
    assert points["n"].tolist() == [5] * 4
    assert points["psnr_median"].tolist() == [100, 15, 100, 22]
    assert tuple(points.loc[2, ["exact_lo", "exact_hi"]]) == pytest.approx(Share(3, 5).interval)
    assert set(points["differs"]) == {"partners fresh"}
    fixed = fresh(2, 1, "batch_span", partners="fixed")
    lines = (fresh(2, 2), 5, 0.0), (fixed, 0, 14.0), (fixed | {"batch": 4}, 0, 13.0)
    points = batches(tmp_path / "two", (SINGLE, 5, 0.0), *lines)
    by_panel = {n: group["batch"].tolist() for n, group in points.groupby("panel")}
    assert by_panel == {1: [1, 2], 2: [1, 2, 4]}


def test_the_chart_of_batches_is_written_and_what_is_stale_removed(tmp_path: Path) -> None:
    out = tmp_path / "run" / "report"
    assert len(batches(tmp_path / "run", (fresh(2, 2), 4, 5.0), (fresh(4, 2), 1, 20.0))) == 2
    (out / "figures").mkdir(parents=True)
    for stale in ("figures/uploads_1.svg", "rounds.csv", "mine.html"):
        (out / stale).touch()
    write_report([tmp_path / "run"], out)
    assert pd.read_csv(out / "batches.csv")["exact"].tolist() == [4, 1]
    assert "batch 2: 80.0, n=5" in (out / "figures" / "batches_1.svg").read_text()
    assert not (out / "rounds.csv").exists()
    assert not (out / "figures/uploads_1.svg").exists()
    assert (out / "mine.html").exists()


# the paper's table 5 ------------------------------------------------------------------------------

VIT = {"model": "ViT-Ti", "architecture": "vit_tiny_patch16_224", "size": 192}
VIT_MJP = {**VIT, "model": "ViT-Ti+MJP"}


def test_table5_has_the_papers_order_with_its_own_rows_beneath(tmp_path: Path) -> None:
    """What really leaks is the best attack on the same client, in the precision of the row. Its
    figures are in the approved table.md."""

    def paper(model: str, setting: str) -> dict[str, Any]:
        return {"paper_row": {"model": model, "setting": setting}, "planned_images": 2}

    zero = {"zero_rows": 9.0}
    run_of(
        tmp_path,
        (cell("april_c", **VIT_MJP, **MJP, **paper("DeiT-S+MJP", "c")), [8.0, 9.0], zero),
        (cell("april_a", **VIT, **paper("ViT-S", "a")), [17.0, 19.0]),
        (cell("april_64", **VIT, dtype="float64", **paper("ViT-S", "a")), [30.0, 31.0]),
        (intact("patch_gradient", **VIT), [40.0, math.inf]),
        (intact("masked_span", **VIT_MJP, **MJP), [22.0, 23.0], zero),
        (cell("april_b", **VIT, setting="b", gamma=0.9, **paper("ViT-S", "b")), [15.0, 16.0]),
    )
    table = read_contents([tmp_path]).table5
    assert table is not None
    rows = table.rows
    assert [row[0] for row in rows] == ["(1)", "", "(2)", "", "(4)", ""]
    assert rows[0][7] == "17.82"  # in the paper's variant
    assert rows[0][11] == "1 of 2 exactly: patch_gradient"
    assert rows[2][11] == "not run"
    assert rows[4][11].startswith("0 of 2 exactly, 2 at 20 dB")


def test_table5_tells_clients_of_one_model_apart_and_counts_what_has_no_score(
    tmp_path: Path,
) -> None:
    """Each with the precision it has; an attack that was refused was run, the published one is no
    attack that says what leaks."""
    noisy = {"defenses": "gaussian_noise 0.1", "dtype": "float64"}
    lines = [
        (cell("april"), [10.0, "failed"]),
        (cell("noisy", **noisy), [11.0, 12.0]),
        (cell("batch", batch=2), ["unsupported", "unsupported"]),
        (cell("four", batch=4), ["unsupported", "unsupported"]),
        (intact("patch_gradient", batch=4), ["unsupported", "unsupported"]),
    ]
    table = read_contents([run_of(tmp_path, *lines)]).table5
    assert table is not None
    assert len({row[1] for row in table.rows}) == 4
    assert [row[10:] for row in table.rows] == [
        ("1 of 2", "not run"),
        ("2", "not run"),
        ("0 of 2", "not run"),
        ("0 of 2", "does not apply"),
    ]


def test_table5_of_ones_own_models_and_without_the_published_attack(tmp_path: Path) -> None:
    """Beneath random weights the paper's row does not stand, though the config names it."""
    named = {"model": "ViT-S", "setting": "a"}
    mine = cell("april", model="mine", checkpoint="random", paper_row=named)
    own = read_contents([run_of(tmp_path / "own", (mine, [12.0]))]).table5
    assert own is not None
    assert [row[:3] for row in own.rows] == [("(1)", "mine", "a")]
    assert "Random weights" in own.caption
    run_of(tmp_path / "none", (intact("patch_gradient"), [12.0]))
    assert read_contents([tmp_path / "none"]).table5 is None
    shuffled = {"setting": "b", "gamma": 0.9}  # the same upload as that of (c)
    spans = (intact(f"{of}", **shuffled | {"attack": "x", "setting": of}) for of in "bc")
    lines = zip((cell("april", **shuffled), *spans), ([12.0], [30.0], [22.0]), strict=True)
    table = read_contents([run_of(tmp_path / "shuffled", *lines)]).table5
    assert table is not None
    assert "median 22.0 dB" in table.rows[0][11]
    assert "Random weights" not in table.caption
    assert "plain picture: x" in table.rows[0][11]
