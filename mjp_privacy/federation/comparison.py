"""Federations beside each other: accuracy against worst-case leakage, as a table and a picture.

table.md, comparison.csv   a row for each federation: top-1, leakage of its last recorded round
tradeoff.png               accuracy over leakage, for attacks on one upload and on several
rounds.png, rounds.csv     accuracy and leakage over the rounds (`picture.py`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, write_atomically
from mjp_privacy.core.read import is_there
from mjp_privacy.federation.config import plain
from mjp_privacy.federation.picture import SCOPES, THRESHOLD, draw_rounds, leakage_table
from mjp_privacy.federation.stored import RESOLVED, evaluations, stored_config
from mjp_privacy.metrics.shares import Share, wilson
from mjp_privacy.report.charts.tradeoff import draw_tradeoff
from mjp_privacy.report.charts.tradeoff_points import comparable, points_from_comparison
from mjp_privacy.report.tables.text import DASH
from mjp_privacy.training.journal import METRICS


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Write the table and the pictures of finished federations; the table's path.

    runs: the --out folders of `mjp federate`.
    """
    for run in runs:
        for name in (RESOLVED, METRICS):
            if not is_there(run / name):
                raise UserError(f"{run} holds no {name}: expected the --out of `mjp federate`.")
    output_folder(out)
    table = comparison_table(runs)
    draw_rounds(runs, out)
    lines = table.to_csv(index=False)  # pandas takes some paths for addresses
    write_atomically(out / "comparison.csv", lambda place: place.write_text(lines, "utf-8"))
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
        config = plain(stored_config(run))
        of_run = leakage[leakage["run"] == str(run)]
        if of_run.empty:
            continue
        last = of_run[of_run["round"] == of_run["round"].max()]
        facts = {**_accuracy(run), "defence": defence_text(config)}
        rows += [{**record, **facts} for record in last.to_dict("records")]
    return pd.DataFrame(rows)


def _accuracy(run: Path) -> dict[str, Any]:
    """Top-1 after the last round, with a 95 % interval over the test images (Wilson's)."""
    lines = [line for line in evaluations(run) if line.val_top1 is not None]
    if not lines:
        return {"top1": math.nan, "top1_low": math.nan, "top1_high": math.nan, "rounds": 0}
    top1, images = lines[-1].val_top1 or 0.0, lines[-1].val_images
    low, high = wilson(top1 / 100, images)
    return {
        "top1": top1,
        "top1_low": 100 * low,
        "top1_high": 100 * high,
        "test_images": images,
        "rounds": lines[-1].round,
    }


def defence_text(config: Mapping[str, Any]) -> str:
    """What this federation's client does that a plain one does not, such as "MJP γ=0.27; int8"."""
    client, parts = config["client"], []
    if config["gamma"]:
        parts.append(f"MJP γ={config['gamma']:g}")
    own = ("dal", "plain_share", "withhold", "positions", "lora", "position_noise", "augment")
    for name in own:
        value = client.get(name)
        if value not in (None, False, 0, 0.0, [], (), "", "own", "none"):
            text = ", ".join(value) if isinstance(value, (list, tuple)) else value
            parts.append(name if value is True else f"{name} {text}")
    return "; ".join([*parts, *(client.get("defenses") or ())]) or "none"


def markdown(table: pd.DataFrame) -> str:
    """The table in Markdown: a line for each federation and probe, both scopes side by side."""
    heads = ["client", "defence", "B", "E", "round", "top-1 [95 %]", "n test"]
    for scope in SCOPES:
        heads += [f"PSNR, {scope} [95 %]", f"≥ {THRESHOLD:.0f} dB", "≥ 100 dB"]
    heads += ["grey", "n", "not reached, 1 upload", "any", "failed"]
    heads += ["unshuffled, 1 upload", "any"]
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
            n = int(row["n"])
            cells += [Share(round(row["success"] * n), n).text(), f"{row['from_100']} of {n}"]
        cells += [f"{first['floor']:.1f}", f"{first['n']}"]
        by_scope = scopes.set_index("scope")
        cells += [f"{by_scope.loc[scope, 'unreached']}" for scope in SCOPES]
        cells.append(f"{by_scope.loc[SCOPES[1], 'failed']}")
        cells += [f"{by_scope.loc[scope, 'unshuffled']}" for scope in SCOPES]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n\n" + NOTE


NOTE = (
    "PSNR: worst case over the attacks, for each image the best standard PSNR in dB (chosen with "
    "the private image at hand, so an upper bound of what one attacker gets), capped at 100 in "
    "means. not reached: images that no attack applies to; they count as a uniform grey, as do "
    "images whose best attack is worse than that. failed: images for which some attack broke "
    "down. unshuffled: images of which an attack read an upload in which no patch was masked, "
    "which is a plain client's; of batches only the first upload is known. round: the one whose "
    "uploads were attacked. top-1: accuracy of the final weights on unshuffled test images, Wilson "
    "interval over the images; one training run a line.\n"
)


def _top1(row: Any) -> str:
    if math.isnan(row["top1"]):
        return DASH
    return f"{row['top1']:.1f} [{row['top1_low']:.1f}, {row['top1_high']:.1f}]"


def _draw(table: pd.DataFrame, path: Path) -> None:
    """A panel for each scope; where batch or steps differ, those with the fewest are shown."""
    panels = {f"Attacks on {scope}": points_from_comparison(table, scope) for scope in SCOPES}
    floors = {f"Attacks on {s}": comparable(table, s)["floor"].mean() for s in SCOPES}
    draw_tradeoff(panels, path, floors=floors)
