"""Draws results/atlas/atlas.png: which share of the pictures each network gives away exactly.

    python -m tools.atlas_figure results/atlas

A dot a network and client with Wilson's 95 % interval, of the attack that gives most pictures, from
the published rows of the folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mjp_privacy.core.drawing import picture
from tools.published_rows import Line, read

FILES = ("rows.parquet", "no_table.parquet", "batches.parquet")
FLOOR = "grey"
COLOURS = {
    "a table of positions, one picture": "#0072b2",
    "a batch": "#56b4e9",
    "MJP client": "#d55e00",
    "no gradient of a table": "#009e73",
}


def kind_of(line: Line) -> str:
    """Which of COLOURS a line is of."""
    if line.facts["setting"] == "c":
        return "MJP client"
    if line.facts["batch"] > 1:
        return "a batch"
    needs_no_table = line.facts["attack"] in ("patch_lattice", "token_peeling")
    return "no gradient of a table" if needs_no_table else "a table of positions, one picture"


def best_lines(folder: Path) -> list[Line]:
    """For each network, setting and batch the line of most exact pictures, by kind."""
    best: dict[tuple[str, str, float], Line] = {}
    for line in [line for name in FILES for line in read(folder / name).lines]:
        facts = line.facts
        if facts["attack"] == FLOOR or facts["role"] != "attack":
            continue
        key = facts["model"], facts["setting"], facts["batch"]
        if key not in best or line.share("exact").percent > best[key].share("exact").percent:
            best[key] = line
    return sorted(best.values(), key=lambda line: list(COLOURS).index(kind_of(line)))


def name_of(line: Line) -> str:
    """Its network, its batch and its attack."""
    facts = line.facts
    batch = f", B = {facts['batch']:.0f}" if facts["batch"] > 1 else ""
    return f"{facts['model']}{batch}: {facts['attack']}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    lines = best_lines(folder)
    with picture(folder / "atlas.png", 9, 1.2 + 0.22 * len(lines), few_colours=True) as figure:
        axes = figure.subplots()
        named = set[str]()
        for place, line in enumerate(lines):
            share, kind = line.share("exact"), kind_of(line)
            axes.plot(share.interval, [place, place], color=COLOURS[kind], alpha=0.5, linewidth=2)
            label = None if kind in named else kind
            axes.plot([share.percent], [place], "o", color=COLOURS[kind], label=label)
            named.add(kind)
        axes.set_yticks(range(len(lines)), [name_of(line) for line in lines], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(-2, 102)
        axes.set_xlabel("pictures that are equal in every 8-bit value, % (95 % interval)")
        axes.grid(axis="x", alpha=0.3)
        figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
