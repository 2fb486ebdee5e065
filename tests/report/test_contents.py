"""Which parts a report has: what is shown, what is folded, what clients are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.contents import Contents, read_contents
from tests.helpers.card_run import TITLES, card_run, run_id
from tests.helpers.ladder_rows import simple_line
from tests.helpers.report_rows import cell, intact, small_run


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    return read_contents([card_run(tmp_path_factory.mktemp("contents") / "run")])


def test_every_line_has_the_name_of_its_client(contents: Contents) -> None:
    lines = [*contents.lines, *contents.derived]
    assert set(contents.client_names) == {line.number for line in lines}
    for line in contents.lines:
        (client,) = (c for c in TITLES if run_id(c, line.cell.attack.known_as) == line.run_id)
        assert contents.client_names[line.number] == TITLES[client]
    for derived in contents.derived:
        names = {contents.client_names[member.number] for member in derived.members}
        assert names == {contents.client_names[derived.number]}


def test_the_card_stands_in_the_names_of_the_tables(contents: Contents) -> None:
    assert {row.client for row in contents.card.rows} <= set(contents.client_names.values())


def run_of(folder: Path, *dtypes: str) -> Contents:
    store = RunStore(folder)
    cells = [intact(dtype, attack="patch_gradient", dtype=dtype) for dtype in dtypes]
    store.write_cells(cells)
    for entry in cells:
        simple_line(store, entry, [20.0, 30.0])
    return read_contents([folder])


def test_lines_in_float64_are_folded_and_counted(tmp_path: Path) -> None:
    contents = run_of(tmp_path, "float32", "float64")
    shown, all_ = contents.main(folded=False), contents.main(folded=True)
    assert [row[0] for row in shown.rows] == ["1"]
    assert "1 lines in float64 are left out" in shown.caption.replace("1 line in", "1 lines in")
    assert [row[0] for row in all_.rows] == ["1", "2"]
    assert "left out" not in all_.caption


def test_a_run_in_float64_alone_is_shown(tmp_path: Path) -> None:
    contents = run_of(tmp_path, "float64")
    assert len(contents.main(folded=False).rows) == 1
    assert "left out" not in contents.main(folded=False).caption


def test_all_tables_show_the_standard_variant_but_one(tmp_path: Path) -> None:
    contents = run_of(tmp_path, "float32")
    assert contents.standard.variant == "standard"
    main = dict(
        zip(contents.main(folded=True).header, contents.main(folded=True).rows[0], strict=True)
    )
    assert main["PSNR ↓"].startswith("25.00 [")
    (paper,) = (t for t in contents.details if t.title.endswith("as the paper defines them"))
    assert dict(zip(paper.header, paper.rows[0], strict=True))["PSNR ↓"].startswith("25.25 [")


def test_the_paper_stands_beside_its_own_images_only(tmp_path: Path) -> None:
    paper = {"model": "DeiT-S", "setting": "a"}
    for same in (False, True):
        folder = small_run(tmp_path / f"{same}", paper_row=paper, data_is_papers=same)
        tables = read_contents([folder]).beside_paper
        assert [table.title for table in tables] == (["Beside the paper"] if same else [])


def test_a_strip_shows_the_main_clients_columns(contents: Contents) -> None:
    assert contents.strip is not None
    assert contents.strip.client.name == "MJP γ .27"
    assert [heading for heading, _ in contents.strip.columns] == [
        *("published attack (APRIL)", "best attack, one upload", "best attack, several uploads")
    ]


def test_a_run_without_attacks_has_contents_all_the_same(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = cell("grey", attack="grey", role="floor")
    store.write_cells([entry])
    simple_line(store, entry, [11.0])
    contents = read_contents([tmp_path])
    assert contents.strip is None
    assert contents.clients == []
    assert contents.comparisons == []
    assert len(contents.main(folded=False).rows) == 1


def test_no_run_is_an_error() -> None:
    with pytest.raises(UserError, match="one or more run folders"):
        read_contents([])
