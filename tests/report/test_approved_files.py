"""One report in every format beside the files that a person approved, and its figures made again
from the parquet files by another program."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.write import write_report
from tests.helpers import recomputed
from tests.helpers.report_rows import approved, cell, image_rows, intact, write_rows

VIT = {"model": "ViT-Ti", "architecture": "vit_tiny_patch16_224", "size": 192}
MJP = {**VIT, "model": "ViT-Ti+MJP", "setting": "c", "gamma": 0.27}
PSNR = {
    "april": (17.0, 21.5, "failed", 9.25, 14.0),
    "patch_gradient": (57.0, math.inf, 12.0, math.inf, 33.5),
    "april_mjp": (9.0, 8.5, 8.0, "unsupported", 7.75),
    "masked_span": (16.0, 22.0, 15.5, "failed", 30.25),
    "multi_round_2": (18.0, 26.0, 15.0, 31.0, math.inf),
    "multi_round_4": (25.0, 41.0, 14.5, 38.0, math.inf),
    "grey": (11.0, 10.5, 12.25, 9.5, 10.0),
}
"""Five images by cell: three photographs, of which the last two were cut in two."""
PHOTOGRAPHS = ("a", "b", "b", "c", "c")
FORMATS = ("table.md", "table.tex", "table.csv", "table5.md", "table5.tex", "table5.csv")
FORMATS += ("samples.csv", "choices.csv", "rounds.csv")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("approved")
    store = RunStore(folder / "run")
    entries = {
        "april": cell("april", **VIT, paper_row={"model": "ViT-S", "setting": "a"}),
        "patch_gradient": intact("patch_gradient", **VIT),
        "april_mjp": cell("april_mjp", **MJP, paper_row={"model": "DeiT-S+MJP", "setting": "c"}),
        "masked_span": intact("masked_span", **MJP),
        **{name: intact(name, **MJP, attack_name="multi_round") for name in PSNR if "_r" in name},
        "grey": intact("grey", **MJP, role="floor"),
    }
    for name, entry in entries.items():
        if "_r" in name:
            uploads = int(name[-1])
            options = json.dumps({"uploads": uploads})
            entry |= {"attack": "multi_round", "uploads": uploads, "attack_options": options}
        rows = []
        for at, psnr in enumerate(PSNR[name]):
            diagnostics = {"grey_psnr": float(PSNR["grey"][at]), "gradient_residual": 1 / (at + 2)}
            diagnostics |= {"zero_rows": 9.0} if entry["gamma"] else {}
            scores = {"status": psnr, "reason": f"{name} says so"} if isinstance(psnr, str) else {}
            of_image = image_rows(
                *(entry, f"{at}.png", 0.0 if isinstance(psnr, str) else psnr),
                diagnostics=diagnostics,
                top1={"intact": float(at > 0), "altered": float(at > 1)},
                **scores,
            )
            rows += [row | {"group": PHOTOGRAPHS[at]} for row in of_image]
        write_rows(store, entry, rows)
    store.write_cells([entry | {"planned_images": 5} for entry in entries.values()])
    write_report([folder / "run"], folder / "out", pictures="none")
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_the_approved_one(made: Path, name: str) -> None:
    """Of samples.csv the rows of one scored and one lost image of two cells."""
    lines = (made / "out" / name).read_text(encoding="utf-8").splitlines(keepends=True)
    if name == "samples.csv":
        shown = ("april,", "masked_span,"), (",0.png,", ",2.png,", ",3.png,")
        lines[1:] = [
            line
            for line in lines[1:]
            if line.startswith(shown[0]) and any(i in line for i in shown[1])
        ]
    approved(name, "".join(lines))


def line_of(made: Path, variant: str, **known: object) -> pd.Series:
    table = pd.read_csv(made / "out" / "table.csv", float_precision="round_trip")
    chosen = table[table["variant"] == variant]
    for name, value in known.items():
        chosen = chosen[chosen[name] == value]
    (at,) = chosen.index
    return chosen.loc[at]


@pytest.mark.parametrize("variant", ["standard", "paper"])
@pytest.mark.parametrize("name", list(PSNR))
def test_table_csv_is_recomputed_from_the_rows(made: Path, name: str, variant: str) -> None:
    rows = recomputed.rows_of(made / "run", name)
    line = line_of(made, variant, run_id=name)
    for metric in ("mse", "fft2d", "psnr", "ssim", "lpips"):
        column = f"{metric}.{variant}"
        values = recomputed.scored(rows, column)
        assert line[f"{metric}_mean"] == pytest.approx(recomputed.mean(values, column), rel=1e-12)
        assert line[f"{metric}_n"] == len(values)
    values = recomputed.scored(rows, f"psnr.{variant}")
    low, high = recomputed.interval(values, recomputed.photographs_of(rows))
    room = 0.06 * (high - low)  # two bootstraps of other draws
    assert line["psnr_lo"] == pytest.approx(low, abs=room)
    assert line["psnr_hi"] == pytest.approx(high, abs=room)
    assert line["psnr_median"] == values.median()
    assert line["psnr_exact"] == recomputed.exact(rows)
    tried = rows["status"].isin(["ok", "failed", "unsupported"]).sum()
    assert line["psnr_from_20"] == 100 * (values >= 20).sum() / tried
    counts = rows["status"].value_counts()
    assert line["n"] == counts.get("ok", 0)
    assert line["n_failed"] == counts.get("failed", 0)
    assert line["acc_mean"] == pytest.approx(100 * recomputed.scored(rows, "top1.intact").mean())


@pytest.mark.parametrize(
    ("attack", "members"),
    [
        ("worst_case, 1 upload", ["masked_span"]),
        ("worst_case, any number of uploads", ["masked_span", "multi_round_2", "multi_round_4"]),
    ],
)
def test_the_worst_case_is_recomputed_from_the_rows(
    made: Path, attack: str, members: list[str]
) -> None:
    attacks = {name: recomputed.rows_of(made / "run", name) for name in members}
    line = line_of(made, "standard", attack=attack)
    for metric in ("psnr", "ssim", "lpips"):
        column = f"{metric}.standard"
        best = recomputed.worst_case(attacks, column)
        assert line[f"{metric}_mean"] == pytest.approx(recomputed.mean(best, column), rel=1e-12)
    choices = pd.read_csv(made / "out" / "choices.csv").query("reduction == @attack")
    chosen = choices.set_index("image_id")["chosen_run_id"].to_dict()
    assert chosen == recomputed.best_of(attacks).to_dict()


def test_table5_is_recomputed_from_the_rows(made: Path) -> None:
    table = pd.read_csv(made / "out" / "table5.csv", float_precision="round_trip")
    facts = recomputed.cells_of(made / "run").set_index("run_id")
    for (_, row), (name, best) in zip(
        table.iterrows(),
        {"april": "patch_gradient", "april_mjp": "masked_span"}.items(),
        strict=True,
    ):
        rows = recomputed.rows_of(made / "run", name)
        assert (row["model"], row["setting"]) == tuple(facts.loc[name, ["model", "setting"]])
        assert row["acc_mean"] == pytest.approx(100 * recomputed.scored(rows, "top1.intact").mean())
        for metric in ("mse", "fft2d", "psnr", "ssim", "lpips"):
            column = f"{metric}.paper"
            values = recomputed.scored(rows, column)
            assert row[f"{metric}_mean"] == pytest.approx(recomputed.mean(values, column))
        leaked = recomputed.rows_of(made / "run", best)
        assert row["leak_exact"] == recomputed.exact(leaked)
        assert row["leak_at_20"] == recomputed.from_20_db(leaked)
