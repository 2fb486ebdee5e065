"""Federations beside each other: accuracy against worst-case leakage, as a table and a picture.

table.md, comparison.csv   a row for each federation: top-1, leakage of its last recorded round
tradeoff.png               accuracy over leakage, for attacks on one upload and on several
rounds.png, rounds.csv     accuracy and leakage over the rounds
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.drawing import MUTED, band, colour, drawn, picture
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import check_each_once, check_own, output_folder, write_atomically
from mjp_privacy.core.read import is_there
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.federation.config import FederationConfig
from mjp_privacy.federation.rounds import ATTACK, RESOLVED, evaluations, stored_config
from mjp_privacy.metrics.statistics import PSNR_CAP, Share, range_of, summarise, wilson
from mjp_privacy.report.clients import clients_of
from mjp_privacy.report.lines import Line
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.tradeoff import comparable, draw_tradeoff, points_from_comparison
from mjp_privacy.training.evaluation import markdown_table, with_interval, write_report
from mjp_privacy.training.run_files import METRICS, check_command

WRITTEN = ("table.md", "comparison.csv", "tradeoff.png", "rounds.png", "rounds.csv")
"""What a comparison's folder holds."""


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Write the table and the pictures of these --out folders; the table's path."""
    for run in runs:
        check_finished(run)
    check_each_once(runs, "--out folders of `mjp federate`")
    check_own(out, "mjp compare", WRITTEN)
    output_folder(out)
    leakage = leakage_table(runs)
    table = comparison_table(runs, leakage)
    draw_rounds(runs, leakage, out)
    write_report(out, {"comparison.csv": table}, "table.md", markdown(table))
    panels = {f"Attacks on {scope}": points_from_comparison(table, scope) for scope in SCOPES}
    floors = {f"Attacks on {s}": comparable(table, s)["floor"].mean() for s in SCOPES}
    draw_tradeoff(panels, out / "tradeoff.png", floors=floors)
    return out / "table.md"


def check_finished(run: Path) -> None:
    """Raise unless this is the folder of a federation whose last measurement is there: the accuracy
    of an earlier round would stand beside the leakage."""
    check_command(run, "federate")
    for name in (RESOLVED, METRICS):
        if not is_there(run / name):
            raise UserError(f"{run} holds no {name}: expected the --out of `mjp federate`.")
    rounds, measured = stored_config(run).rounds, evaluations(run)
    if all(line.round != rounds for line in measured):
        raise UserError(
            f"{shown(run / METRICS)}: expected the measurement after round {rounds}, the last; got "
            f"{f'the last one of round {measured[-1].round}' if measured else 'none'}. Run the "
            "same `mjp federate` again: it goes on, or makes what was damaged again."
        )


def comparison_table(runs: Sequence[Path], leakage: pd.DataFrame) -> pd.DataFrame:
    """A row for each federation, probe and scope, at the last round that was recorded."""
    last = leakage[leakage["round"] == leakage.groupby("run")["round"].transform("max")]
    facts = []
    for run in runs:
        of_run: dict[str, Any] = {"run": str(run), "test_images": 0}
        of_run |= dict.fromkeys(("top1", "top1_low", "top1_high"), math.nan)
        tested = [line for line in evaluations(run) if line.val_top1 is not None]
        if tested:
            top1, images = tested[-1].val_top1 or 0.0, tested[-1].val_images
            low, high = wilson(top1 / 100, images)
            of_run |= {"top1": top1, "top1_low": 100 * low, "top1_high": 100 * high}
            of_run["test_images"] = images
        of_run["rounds"] = tested[-1].round if tested else 0
        facts.append(of_run | {"defence": defence_text(stored_config(run))})
    return last.merge(pd.DataFrame(facts), on="run")


def defence_text(config: FederationConfig) -> str:
    """What this federation's client does that a plain one does not, such as "MJP γ=0.27; int8"."""
    parts = [f"MJP γ={config.gamma:g}"] if config.gamma else []
    own = (
        *("dal", "plain_share", "mask", "withhold", "positions", "lora", "train"),
        *("position_noise", "augment", "autocast"),
    )
    for name in own:
        value = getattr(config.client, name)
        if value != getattr(ClientConfig, name):
            text = ", ".join(value) if isinstance(value, tuple) else value
            parts.append(name if value is True else f"{name} {text}")
    return "; ".join([*parts, *config.client.defenses]) or "none"


def markdown(table: pd.DataFrame) -> str:
    heads = ["client", "defence", "B", "E", "round", "top-1 [95 %]", "n test", "attacks on"]
    heads += ["PSNR [95 %]", f"≥ {THRESHOLD:.0f} dB", "≥ 100 dB", "grey", "n"]
    heads += ["not reached", "failed", "unshuffled"]
    lines = []
    for row in table.to_dict("records"):
        n, share = int(row["n"]), float(row["success"])
        cells = [row[name] for name in ("label", "defence", "batch", "steps", "round")]
        cells += [with_interval(row["top1"], row["top1_low"], row["top1_high"])]
        cells += [row["test_images"], row["scope"]]
        cells += [f"{row['psnr']:.1f} [{row['low']:.1f}, {row['high']:.1f}]"]
        cells += [Share(round(share * n), n).text(), f"{row['from_100']} of {n}"]
        cells += [f"{row['floor']:.1f}", n]
        cells += [row[name] for name in ("unreached", "failed", "unshuffled")]
        lines.append([*map(str, cells)])
    return "\n".join(markdown_table(heads, lines)) + "\n\n" + NOTE


NOTE = (
    "PSNR: worst case over the attacks, for each image the best standard PSNR in dB (chosen with "
    "the private image at hand, so an upper bound of what one attacker gets), capped at 100 in "
    "means. not reached: images that no attack applies to; they count as a uniform grey, as do "
    "images whose best attack is worse than that. failed: images for which some attack broke "
    "down. unshuffled: images of which an attack read an upload in which no patch was masked, "
    "which is a plain client's; of batches only the first upload is known. round: the one whose "
    "uploads were attacked. top-1: accuracy of the final weights on unshuffled test images, with "
    "test_images on so many of them, spread evenly over the classes; Wilson interval over the "
    "images; one training run a line.\n"
)


THRESHOLD = 20.0  # dB at which a person recognises the picture
SCOPES = ("1 upload", "any number of uploads")
TITLES = (
    ("accuracy", "test top-1 (%)"),
    ("psnr", "worst-case PSNR (dB, capped at 100)"),
    ("success", f"images recovered at ≥ {THRESHOLD:.0f} dB (%)"),
)
UNSHUFFLED = "some uploads unshuffled"
HOLLOW: dict[str, Any] = {"markersize": 5, "markerfacecolor": "white"}
"""The marker of a round in which an attack read an unshuffled upload."""


def leakage_table(runs: Sequence[Path]) -> pd.DataFrame:
    """A row for each federation, round, batch, number of steps and scope."""
    rows = []
    for run in runs:
        attacked = run / ATTACK
        if not attacked.is_dir():
            raise UserError(
                f"{run} holds no {ATTACK} folder: expected the --out of `mjp federate` with "
                "attacks in its config."
            )
        for client in clients_of(load_runs([attacked]).lines):
            known = client.cell.columns
            if "round" not in known:
                continue
            facts = {"run": str(run), "label": known["client_label"]}
            facts |= {name: known[name] for name in ("round", "batch", "steps")}
            for scope in SCOPES:
                rows.append({**facts, "scope": scope, **worst_case(client.lines, scope)})
    return pd.DataFrame(rows)


def worst_case(lines: Sequence[Line], scope: str) -> dict[str, Any]:
    """Mean, interval and success over the images, of the best attack on each.

    scope: one of SCOPES, the attacks that are considered; lines: of one round, controls included.
    """
    reach = [line for line in lines if scope != SCOPES[0] or line.uploads == 1]
    attacks = [line for line in reach if line.cell.role == "attack"]
    floor = _floors(lines)
    found = [line.scored("psnr", "standard") for line in attacks]
    best = pd.concat([*found, pd.Series(dtype=float)]).groupby(level=0).max()
    values = best.reindex(floor.index).clip(lower=floor).fillna(floor)
    cut = next((line.groups for line in lines if line.groups is not None), None)
    photographs = None if cut is None else cut.reindex(values.index).tolist()
    summary = summarise(
        values.tolist(), ["ok"] * len(values), groups=photographs, within=range_of("psnr")
    )
    failed = set[str]().union(*(line.failed_images for line in attacks))
    unshuffled = set[str]().union(*(line.unshuffled_images for line in attacks))
    return {
        "n": summary.n,
        "psnr": summary.mean,
        "low": summary.low,
        "high": summary.high,
        "success": float((values >= THRESHOLD).mean()),
        "from_100": int((values >= PSNR_CAP).sum()),
        "floor": float(floor.mean()),
        "unreached": int((~floor.index.isin(best.index)).sum()),
        "failed": len(failed),
        "unshuffled": len(unshuffled),
    }


def _floors(lines: Sequence[Line]) -> pd.Series[float]:
    """The PSNR of a uniform grey, by image, which every run stores; UserError where the run is
    unfinished: a missing image would look like a protected one."""
    for line in lines:
        if line.not_run:
            damaged = first_of([shown(path.name) for path in line.left_out], 3) or "none"
            raise UserError(
                f"{line.store.root}: expected a finished attack; {line.label} holds "
                f"{len(set(line.images))} of {line.planned} images (damaged files: {damaged}). Run "
                "the same command again."
            )
    known = [line.scored("grey_psnr", "diagnostic") for line in lines]
    return pd.concat(known).groupby(level=0, sort=False).last()


def draw_rounds(runs: Sequence[Path], table: pd.DataFrame, out: Path) -> Path:
    """Write the `leakage_table` of these runs as rounds.csv, and rounds.png: top-1, worst-case PSNR
    and recovered images over the rounds; the picture's path."""
    write_atomically(out / "rounds.csv", partial(table.to_csv, index=False))
    accuracies = {
        run: [(line.round, line.val_top1) for line in evaluations(run) if line.val_top1 is not None]
        for run in runs
    }
    titles = dict(TITLES) if any(accuracies.values()) else dict(TITLES[1:])
    with picture(out / "rounds.png", 1 + 2.83 * len(titles), 3.8) as figure:
        panels = dict(zip(titles, figure.subplots(1, len(titles)), strict=True))
        first = next(iter(panels.values()))
        for number, run in enumerate(runs):
            of_run, shade = table[table["run"] == str(run)], colour(number)
            first.plot([], [], color=shade, label=drawn(of_run["label"].iloc[0]))
            if "accuracy" in panels:
                panels["accuracy"].plot(*zip(*accuracies[run], strict=True), color=shade)
            _draw_leakage(panels, of_run, shade)
        panels["psnr"].axhline(table["floor"].mean(), color=MUTED, linewidth=1, linestyle=":")
        for name, axes in panels.items():
            axes.set_title(titles[name])
            axes.set_xlabel("round")
            axes.set_ylim(bottom=0)
        first.legend(fontsize=7)
        styles = [("--", SCOPES[0]), ("-", SCOPES[1]), (":", "uniform grey")]
        keys = [panels["psnr"].plot([], [], s, color=MUTED, label=name)[0] for s, name in styles]
        if (table["unshuffled"] > 0).any():
            look = {"color": MUTED, **HOLLOW}
            keys.append(panels["psnr"].plot([], [], "o", label=UNSHUFFLED, **look)[0])
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=7)
    return out / "rounds.png"


def _draw_leakage(panels: Mapping[str, Any], of_run: pd.DataFrame, shade: str) -> None:
    """A federation's PSNR and recovered images over the rounds, for the kind of client with the
    smallest batch and the fewest steps."""
    psnr, success = panels["psnr"], panels["success"]
    look: dict[str, Any] = {"color": shade, "marker": "o", "markersize": 3}
    for scope, style in zip(SCOPES, ("--", "-"), strict=True):
        shown = of_run[of_run["scope"] == scope]
        shown = shown[shown["batch"] == of_run["batch"].min()]
        shown = shown[shown["steps"] == shown["steps"].min()].sort_values("round")
        rounds, marked = shown["round"], shown[shown["unshuffled"] > 0]
        psnr.plot(rounds, shown["psnr"], style, **look)
        psnr.plot(marked["round"], marked["psnr"], "o", color=shade, **HOLLOW)
        band(psnr, rounds, shown["low"], shown["high"], shade)
        success.plot(rounds, 100 * shown["success"], style, **look)
