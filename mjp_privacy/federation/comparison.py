"""Federations beside each other: accuracy against worst-case leakage, as a table and a picture.

table.md, comparison.csv   a row for each federation: top-1, leakage of its last recorded round
tradeoff.png               accuracy over leakage, for attacks on one upload and on several
rounds.png, rounds.csv     accuracy and leakage over the rounds (`picture.py`)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mjp_privacy.core.colours import colour
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, write_atomically
from mjp_privacy.federation.picture import SCOPES, THRESHOLD, draw_rounds, leakage_table
from mjp_privacy.federation.rounds import RESOLVED
from mjp_privacy.training.journal import METRICS, read_metrics

DECIBELS = (10, 15, 20, 30, 50, 100)


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Write the table and the pictures of finished federations; the table's path.

    runs: the --out folders of `mjp federate`.
    """
    for run in runs:
        for name in (RESOLVED, METRICS):
            if not (run / name).is_file():
                raise UserError(f"{run} holds no {name}: expected the --out of `mjp federate`.")
    output_folder(out)
    table = comparison_table(runs)
    draw_rounds(runs, out)
    write_atomically(out / "comparison.csv", lambda path: table.to_csv(path, index=False))
    path = out / "table.md"
    text = markdown(table)
    write_atomically(path, lambda place: place.write_text(text, encoding="utf-8"))
    _draw(table, out / "tradeoff.png")
    return path


def comparison_table(runs: Sequence[Path]) -> pd.DataFrame:
    """A row for each federation, probe and scope, at the last round that was recorded."""
    leakage = leakage_table(runs)
    rows = []
    for run in runs:
        config = json.loads((run / RESOLVED).read_text(encoding="utf-8"))
        of_run = leakage[leakage["run"] == str(run)]
        if of_run.empty:
            continue
        last = of_run[of_run["round"] == of_run["round"].max()]
        facts = {**_accuracy(run), "defence": defence_text(config)}
        rows += [{**record, **facts} for record in last.to_dict("records")]
    return pd.DataFrame(rows)


def _accuracy(run: Path) -> dict[str, Any]:
    """Top-1 after the last round, with a 95 % interval over the test images (Wilson's)."""
    lines = [line for line in read_metrics(run / METRICS) if line["val_top1"] is not None]
    if not lines:
        return {"top1": math.nan, "top1_low": math.nan, "top1_high": math.nan, "rounds": 0}
    top1, images = lines[-1]["val_top1"], lines[-1].get("val_images") or 0
    low, high = wilson(top1 / 100, images)
    return {
        "top1": top1,
        "top1_low": 100 * low,
        "top1_high": 100 * high,
        "test_images": images,
        "rounds": lines[-1]["round"],
    }


def wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share of n trials; the default z gives 95 %."""
    if not n:
        return math.nan, math.nan
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return min(middle - half, share), max(middle + half, share)


def defence_text(config: Mapping[str, Any]) -> str:
    """What this federation's client does that a plain one does not, such as "MJP γ=0.27; int8"."""
    client, parts = config["client"], []
    if config["gamma"]:
        parts.append(f"MJP γ={config['gamma']:g}")
    for name in ("dal", "plain_share", "withhold", "positions", "position_noise", "augment"):
        value = client.get(name)
        if value not in (None, False, 0, 0.0, [], (), "own", "none"):
            text = ", ".join(value) if isinstance(value, list) else value
            parts.append(name if value is True else f"{name} {text}")
    return "; ".join([*parts, *(client.get("defenses") or ())]) or "none"


def markdown(table: pd.DataFrame) -> str:
    """The table in Markdown: a line for each federation and probe, both scopes side by side."""
    heads = ["client", "defence", "B", "E", "round", "top-1 [95 %]", "n test"]
    for scope in SCOPES:
        heads += [f"PSNR, {scope} [95 %]", f"≥ {THRESHOLD:.0f} dB", "≥ 100 dB"]
    heads += ["grey", "n", "not reached, 1 upload", "any", "failed"]
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    keys = ["run", "label", "batch", "steps", "round"]
    for _, scopes in table.groupby(keys, sort=False):
        first = scopes.iloc[0]
        cells = [str(first["label"]), str(first["defence"]), f"{first['batch']}"]
        cells += [f"{first['steps']}", f"{first['round']}", _top1(first)]
        cells += [f"{first.get('test_images', 0):.0f}"]
        for scope in SCOPES:
            row = scopes[scopes["scope"] == scope].iloc[0]
            cells.append(f"{row['psnr']:.1f} [{row['low']:.1f}, {row['high']:.1f}]")
            cells += [f"{100 * row['success']:.0f} %", f"{row['exact']}"]
        cells += [f"{first['floor']:.1f}", f"{first['n']}"]
        by_scope = scopes.set_index("scope")
        cells += [f"{by_scope.loc[scope, 'unreached']}" for scope in SCOPES]
        cells.append(f"{by_scope.loc[SCOPES[1], 'failed']}")
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n\n" + NOTE


NOTE = (
    "PSNR: worst case over the attacks, for each image the best standard PSNR in dB (chosen with "
    "the private image at hand, so an upper bound of what one attacker gets), capped at 100 in "
    "means. not reached: images that no attack applies to; they count as a uniform grey, as do "
    "images whose best attack is worse than that. failed: images for which some attack broke "
    "down. round: the one whose uploads were attacked. top-1: accuracy of the final weights on "
    "unshuffled test images, Wilson interval over the images; one training run a line.\n"
)


def _top1(row: Any) -> str:
    return f"{row['top1']:.1f} [{row['top1_low']:.1f}, {row['top1_high']:.1f}]"


def _draw(table: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    fewest = {name: table[name].min() for name in ("batch", "steps")}
    base = table[(table["batch"] == fewest["batch"]) & (table["steps"] == fewest["steps"])]
    for axes, scope in zip(panels, SCOPES, strict=True):
        shown = base[base["scope"] == scope]
        for number, (_, row) in enumerate(shown.iterrows(), 1):
            _draw_point(axes, row, number)
        axes.axvline(shown["floor"].mean(), color="#888888", linestyle=":", linewidth=0.8)
        axes.axvline(THRESHOLD, color="#888888", linestyle="--", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlim(10, 115)
        axes.set_xticks(DECIBELS, [str(value) for value in DECIBELS])
        axes.minorticks_off()
        axes.set_xlabel("worst-case PSNR (dB, capped at 100; left is private)")
        axes.set_title(scope, fontsize=10)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test top-1 (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=7.5)
    write_atomically(path, lambda place: figure.savefig(place, format="png", dpi=150))


def _draw_point(axes: Any, row: Any, number: int) -> None:
    """A federation as a numbered point with its intervals; the legend explains the number."""
    shade = colour(number - 1)
    axes.errorbar(
        row["psnr"],
        row["top1"],
        xerr=[[row["psnr"] - row["low"]], [row["high"] - row["psnr"]]],
        yerr=[[row["top1"] - row["top1_low"]], [row["top1_high"] - row["top1"]]],
        fmt="o",
        color=shade,
        markersize=9,
        linewidth=0.6,
        alpha=0.85,
        label=f"{number}  {row['label']}",
    )
    centre = {"ha": "center", "va": "center_baseline"}
    axes.annotate(str(number), (row["psnr"], row["top1"]), color="white", fontsize=6.5, **centre)
