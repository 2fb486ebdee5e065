"""Tables 3 and 4 as trained here: on planted rows, and the shipped configs against one another."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import expand, load_experiment
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.answer import not_tried
from mjp_privacy.report.clients import clients_of
from mjp_privacy.report.results.rows import read_published, write_published
from mjp_privacy.report.results.tables import render
from mjp_privacy.report.results.trained_rows import (
    ANY,
    ONE,
    floor,
    printed_rows,
    tradeoff_points,
    trained_models,
)
from mjp_privacy.report.worst_case import reduced_groups
from mjp_privacy.training.config_files import load_training
from tests.helpers.report_rows import image_rows, intact, write_rows

ROOT = Path(__file__).parents[2]
CONFIGS, RESULTS = ROOT / "configs", ROOT / "results" / "ablations"
SEEDS = (0, 1)
TRAINED = {"evaluation": "summary.csv", "rows": "rows.parquet", "seeds": [*SEEDS]}
MASKED = {"zero_rows": 3.0, "grey_psnr": 12.0}
SHUFFLED = {"setting": "c", "gamma": 0.27}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """G trained from two seeds, B from one as two clients, D evaluated alone; nothing else."""
    folder = tmp_path_factory.mktemp("results")
    cells = [
        (intact("masked_span", model="G_0", **SHUFFLED), [25.0, 15.0]),
        (intact("token_span", model="G_0", **SHUFFLED), [18.0, 17.0]),
        (intact("multi_round", model="G_0", uploads=6, **SHUFFLED), [math.inf, 60.0]),
        (intact("masked_span", model="G_1", **SHUFFLED), [31.0, 22.0]),
        (intact("token_span", model="G_1", **SHUFFLED), [18.0, 17.0]),
        (intact("multi_round", model="G_1", uploads=6, **SHUFFLED), [math.inf, math.inf]),
        (intact("token_span", model="B_0", withhold="pos_embed"), None),
        (intact("patch_gradient", model="B_0", withhold="pos_embed"), None),
        (intact("token_span", model="B_0"), [13.0, 14.0]),
        (intact("patch_gradient", model="B_0"), [math.inf, math.inf]),
    ]
    store, entries = RunStore(folder / "run"), []
    for number, (entry, values) in enumerate(cells):
        entry["run_id"] = f"{number:016d}"
        rows = []
        for image, value in enumerate(values or [0.0, 0.0]):
            unsupported = {} if values else {"status": "unsupported", "reason": "no table"}
            known = MASKED if entry["setting"] == "c" else {"grey_psnr": 12.0}
            rows += image_rows(entry, f"i{image}", value, diagnostics=known, **unsupported)
        write_rows(store, entry, rows)
        entries.append(entry)
    store.write_cells(entries)
    (store.root / "experiment.yaml").write_text("experiment: {name: planted}\n")
    write_published([store.root], folder / "rows.parquet", commit="abc")
    accuracy = {"G_0": 60.0, "G_1": 64.0, "B_0": 58.0, "D_0": 66.0}
    lines = [
        {"model": label, "trained_gamma": 0.27 if label[0] == "G" else 0.0, "gamma": 0.27}
        | {
            f"{name}{end}": top1 + shift
            for name in ("top1", "top1_shuffled", "diff_norm", "consistency")
            for end, shift in (("", 0.0), ("_low", -1.0), ("_high", 1.0))
        }
        for label, top1 in accuracy.items()
    ]
    pd.DataFrame(lines).to_csv(folder / "summary.csv", index=False)
    return folder


def table(results: Path, paper: int) -> list[list[str]]:
    text = render({"trained": {**TRAINED, "paper": paper}}, {}, results)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_a_row_has_accuracy_and_leakage_of_each_seed(results: Path) -> None:
    first, second, both = (row for row in table(results, 4) if row[0] == "G: A + JP + UNK")
    assert first[1:4] == ["0.27", "seed 0", "60.0 [59.0, 61.0]"]
    assert first[7] == "80.1, –, 83.8"
    assert first[8:10] == ["(c) γ 0.27", "0, 1 of 2"]
    assert first[10].startswith("21.0 [")  # 25 and 17: the better attack of each picture
    assert first[11] == "1, 2 of 2"
    assert first[12].startswith("80.0 [")  # 100, the cap, and 60
    assert second[3] == "64.0 [63.0, 65.0]"
    assert both[2:4] == ["2 seeds: mean (range)", "62.0 (60.0–64.0)"]
    assert both[9:11] == ["0.0 (0.0–0.0), 1.5 (1.0–2.0)", "23.8 (21.0–26.5)"]
    assert both[11:] == ["1.5 (1.0–2.0), 2.0 (2.0–2.0)", "90.0 (80.0–100.0)"]


def test_what_is_not_trained_or_not_attacked_has_a_line_that_says_so(results: Path) -> None:
    rows = table(results, 4)
    untrained = {row[0][0]: row[2] for row in rows if row[3] == "not trained yet"}
    one = {"B": "seed 1", "D": "seed 1"}
    assert untrained == {**dict.fromkeys("ACEFHIJ", "seed 0, 1"), **one}  # G has both
    (d,) = (row for row in rows if row[0].startswith("D:") and row[2] == "seed 0")
    assert (d[3], d[8], d[9]) == ("66.0 [65.0, 67.0]", "not attacked yet", "")
    assert {row[3] for row in table(results, 3)} == {"not trained yet"}
    assert {len(row) for row in rows} == {13}


def test_a_model_attacked_as_two_clients_has_two_lines(results: Path) -> None:
    place = next(i for i, row in enumerate(table(results, 4)) if row[0].startswith("B:"))
    withheld, sent = table(results, 4)[place : place + 2]
    assert withheld[8:] == ["(a), withhold pos_embed", "no attack applies", "–", "–", "–"]
    assert sent[:8] == [""] * 8
    assert sent[8:] == ["(a)", "2, 2 of 2", "100, the cap", "–", "–"]


def test_the_chart_shows_each_row_as_its_first_client(results: Path) -> None:
    models = trained_models(results / "summary.csv", results / "rows.parquet")
    one, several = (
        {point.label: point for point in tradeoff_points(models, attack)} for attack in (ONE, ANY)
    )
    assert [*one] == ["G", "B"]  # D was not attacked
    g, (zero, first) = one["G"], (models[f"G_{seed}"].clients[0].one for seed in SEEDS)
    assert (g.accuracy, g.accuracy_low, g.accuracy_high) == (62.0, 59.0, 65.0)
    assert (zero.average, first.average) == (21.0, 26.5)
    assert (g.leakage, g.family) == (23.75, "MJP")
    assert (g.leakage_low, g.leakage_high) == (zero.low, first.high)
    assert several["G"].leakage == 90.0
    assert (several["B"].leakage, one["B"].unattacked) == (12.0, True)
    assert floor(models) == 12.0


def test_a_ratio_is_named_as_such_in_the_chart(results: Path) -> None:
    models = trained_models(results / "summary.csv", results / "rows.parquet")
    ratio = replace(models["G_1"], label="gamma_0.09_1")
    (point,) = tradeoff_points({"gamma_0.09_1": ratio}, ONE)
    assert (point.label, point.strength) == ("γ 0.09", 0.27)


def test_another_table_of_the_paper_is_refused() -> None:
    with pytest.raises(UserError, match="expected table 3 or 4, got 5"):
        printed_rows(5)


def test_every_printed_row_can_be_trained_and_is_attacked_as_it_trains() -> None:
    experiment = load_experiment(CONFIGS / "ladder_ablations.yaml")
    names = {**printed_rows(4), **printed_rows(3)}
    assert {*experiment.models} == {f"{name}_{seed}" for name in names for seed in SEEDS}
    for name in names:
        recipe = load_training(CONFIGS / "training" / "ablations.yaml", name)
        cells = [cell for cell in expand(experiment) if cell.model in (f"{name}_0", f"{name}_1")]
        shuffles = recipe.jigsaw.shuffle != "none" and recipe.jigsaw.gamma > 0
        everything = recipe.jigsaw.shuffle == "patches_and_pixels"
        gamma = 1.0 if everything else recipe.jigsaw.gamma if shuffles else 0.0
        assert {cell.gamma for cell in cells} == {gamma}, name
        assert ("c" in {cell.setting for cell in cells}) == shuffles, name
        assert {cell.client.dal for cell in cells} == {recipe.model.dal != "none"}, name
        unmasked = shuffles and not recipe.model.unknown_embedding
        assert ("b" in {cell.setting for cell in cells}) == unmasked, name


@pytest.mark.nightly
def test_a_shuffling_client_without_e_unk_is_told_that_nobody_sorted_its_pictures() -> None:
    """The card lists patch_jigsaw as not tried on E, and never on a client that masks."""
    lines = read_published(RESULTS / "rows.parquet").lines
    for model, listed in (("E_0", True), ("G_0", False)):
        chosen = [
            line
            for line in lines
            if (line.cell.model.label, line.cell.setting) == (model, "c")
            and "jigsaw" not in line.attack
        ]
        (client,) = clients_of(reduced_groups(chosen))
        assert ("patch_jigsaw" in " ".join(not_tried([client], client))) == listed
