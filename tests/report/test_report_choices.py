"""What a report shows of its reductions: tables, notes, choices.csv and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.figures import build_table
from mjp_privacy.report.worst_case import derived_lines, reduced_groups
from mjp_privacy.report.write import write_report
from tests.helpers.ladder_rows import derived_of, ladder_of, ladder_run, lines_of
from tests.helpers.report_rows import image_id, intact, write_pictures

ONE = "1 upload"


def test_derived_lines_stand_behind_all_others(tmp_path: Path) -> None:
    ladder_run(tmp_path / "run")
    summary = write_report([tmp_path / "run"], tmp_path / "out")
    table = pd.read_csv(tmp_path / "out/table.csv")
    table = table[table["variant"] == "standard"].set_index("line")
    assert table["attack"].tolist() == [
        *("april", "patch_gradient", "masked_span", "grey", "other_image", "oracle_inverse"),
        *(f"worst_case, {ONE}", f"attackers_choice, {ONE}"),
    ]
    assert table["role"].tolist() == [
        *["attack"] * 3,
        *("floor", "floor", "ceiling", "worst_case", "attackers_choice"),
    ]
    assert json.loads(table.loc[7, "chosen"]) == {
        "april": 1,
        "patch_gradient": 1,
        "masked_span": 1,
    }
    assert table.loc[:6, "chosen"].isna().all()
    assert table.loc[7, "psnr_mean"] == 25.0
    assert (table.loc[7, "psnr_from_20"], table.loc[7, "psnr_from_30"]) == (75.0, 25.0)
    assert (table.loc[1, "psnr_from_20"], table.loc[2, "psnr_from_20"]) == (25.0, 25.0)
    assert table.loc[7, "psnr_n"] == 3
    assert summary.lines == 6  # derived lines are no cells, and no failures
    assert summary.failed_images == 4
    assert "line 7" not in summary.console


def test_derived_lines_and_controls_are_marked_in_every_text(tmp_path: Path) -> None:
    ladder_run(tmp_path / "run")
    console = write_report([tmp_path / "run"], tmp_path / "out", everything=True).console
    texts = [(tmp_path / "out/table.md").read_text()]
    texts.append((tmp_path / "out/table.tex").read_text().replace(r"\_", "_"))
    for text in texts:
        assert f"worst_case, {ONE} (oracle selection)" in text
        assert f"attackers_choice, {ONE}" in text
        for control in ("grey", "other_image", "oracle_inverse"):
            assert f"{control} (control)" in text
        assert "A choice was made for 3 images: april 1, patch_gradient 1, masked_span 1." in text
    page = (tmp_path / "out/index.html").read_text().replace("&#39;", "'")
    for expected in (f"worst_case, {ONE}", f"attackers_choice, {ONE}", "are not attacks"):
        assert expected in page
    words = " ".join(console.split())
    for expected in ("worst_case,", "attackers_c", "(oracle", "(control)"):
        assert expected in words


def test_controls_and_reductions_stand_beside_no_published_figure(tmp_path: Path) -> None:
    ladder_run(tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    frame = build_table(lines, "paper", derived_lines(reduced_groups(lines))).frame
    assert frame["paper_row"].notna().tolist() == [True] + [False] * 7
    assert frame["paper_row"].iloc[0] == "(2) DeiT-S b"


def test_an_altered_attack_is_in_no_choice(tmp_path: Path) -> None:
    """The altered april has the best picture of image 2; nothing may show it as a worst case."""
    ladder_run(tmp_path / "run", altered="april")
    write_report([tmp_path / "run"], tmp_path / "out")
    choices = pd.read_csv(tmp_path / "out/choices.csv")
    assert set(choices["chosen_attack"]) == {"patch_gradient", "masked_span"}
    assert image_id(2) not in set(choices["image_id"])


def test_pictures_show_the_chosen_reconstruction(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entries = [intact("x"), intact("y")]
    ladder_of(tmp_path, (entries[0], [10.0, 30.0]), (entries[1], [20.0, 12.0]))
    for entry, psnr in zip(entries, ([10.0, 30.0], [20.0, 12.0]), strict=True):
        write_pictures(store, entry, {image_id(i): value for i, value in enumerate(psnr)})
    worst = derived_of(tmp_path)[f"worst_case, {ONE}"]
    one, two = lines_of(tmp_path)
    for line, index in ((two, 0), (one, 1)):
        kept, other = (by.reconstruction(image_id(index)) for by in (worst, line))
        assert kept is not None
        assert other is not None
        assert kept["images"].equal(other["images"])
    assert worst.reconstruction("nobody") is None
    assert not one.reconstruction(image_id(0))["images"].equal(  # type: ignore[index]
        worst.reconstruction(image_id(0))["images"]  # type: ignore[index]
    )
