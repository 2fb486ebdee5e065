"""Publish a run: its rows in one small file, and the tables of Markdown pages from such files.

    python -m tools.publish rows RUN [RUN …] --out results/ladder/rows.parquet --commit SHA
    python -m tools.publish repeats IMAGES --size 192 --patch 16 --out results/ladder/repeats.csv
    python -m tools.publish tables              # make results-check: each table, ok or WRONG
    python -m tools.publish tables --write      # make results-check WRITE=1
    python -m tools.publish card                # of the models that come with the package

`results/tables.yaml` says what stands between `<!-- table: NAME begin -->` and its end in a page:

    lines: NAME: {rows: FILE, …} names one line of published rows, or one row of a csv, by as many
           facts as tell it from the others (`dtype` is float32 unless it says otherwise)
    tables: of a file and a name, and one of these:
      lines: [[NAME, "plain, (a)"], …]    chosen lines with the words before them (`heads`)
      every: {rows: FILE, setting: c}     all lines that fit, or a list of such; `against: ATTACK`
                                          sets a paired difference beside each
      grid:  {of: {rows: FILE}, down: [gamma], across: "R = {uploads}", figure: mean_psnr}
      files: [FILE, …]                    the runs behind rows: config, commit, date
      trained, spread, noise              Tables 3 and 4 as trained here (trained_rows.py)
      paper_table5: all                   the paper's own lines
    columns: names of facts and figures, or {HEAD: a format such as "{top1:.1f} %"}
    full: FILE.csv, beside the page, has the whole table, and the page shows a part of it:
      show: {HEAD: [CELL, …], …}  these rows, or a list of such: rows that fit any of them; of an
                                  empty one the page has the link alone
      hide: [HEAD, …]             all columns but these
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import yaml
from safetensors import safe_open

from mjp_privacy.core.errors import UserError
from mjp_privacy.data.images import Preprocessing, open_images
from mjp_privacy.metrics.statistics import Share, paired_test
from mjp_privacy.models.zoo import NAMED_MODELS
from mjp_privacy.report.figures import ARROWS, TITLES
from mjp_privacy.report.table5 import TABLE5, digits
from mjp_privacy.training.evaluation import markdown_table
from tools import published_rows, trained_rows
from tools.published_rows import REPEATS, Line, Published, mean_text, number, short_commits

Spec = Mapping[str, Any]
Cells = tuple[list[str], list[list[str]]]
"""The heads of a table, and its rows."""

ROOT = Path(__file__).resolve().parents[1]
ZOO = ROOT / "mjp_privacy" / "assets" / "zoo"
CARD = ZOO / "README.md"
HEADS = {
    "share_exact": "exact in 8 bits",
    "quartiles": "25–75 %",
    "share20": "≥ 20 dB",
    "share30": "≥ 30 dB",
    "mean_psnr": "mean [95 %]",
    "setting": "Set.",
    "gamma": "γ",
    **{f"paper_{name.lower()}": f"{name} ↑" for name in ("MSE", "FFT2D", "LPIPS")},
    **{f"paper_{name.lower()}": f"{name} ↓" for name in ("PSNR", "SSIM")},
    "label": "client",
}
NO_FACTS = ("rows", "csv", "repeats", "without")
SAME_CLIENT = ("model", "setting", "gamma", "client", "dtype")


# tables -------------------------------------------------------------------------------------------


def cells(table: Spec, named: Mapping[str, Spec], folder: Path) -> Cells:
    """All of one table of tables.yaml; `folder`: results/."""
    if "lines" in table:
        chosen = [(words, _one(named[name], folder)) for name, *words in table["lines"]]
        return _lined(table, chosen)
    if "every" in table:
        lines = select(table["every"], folder)
        scored = [line for line in lines if line.rows.empty or line.figure("of")]
        return _lined(table, [([], line) for line in scored])
    if "grid" in table:
        return _grid(table["grid"], folder)
    if "files" in table:
        return _files(table["files"], folder)
    if "paper_table5" in table:
        heads = ["paper's line", *(f"{TITLES[name]} {arrow}" for name, arrow in ARROWS.items())]
        return heads, [
            [row.label, *(digits(name, getattr(row, name)) for name in ARROWS)] for row in TABLE5
        ]
    heads, rows = trained_rows.table(table, folder)
    return [*heads], [[*map(str, row)] for row in rows]


def shown(table: Spec, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """What the page has of a table: all of it, or with `full` a part and where the rest is."""
    if "full" not in table:
        if {"show", "hide"} & table.keys():
            raise UserError(f"Table {table['name']}: show and hide need full, a CSV of all of it.")
        return "\n".join(markdown_table(heads, rows))
    wanted = table.get("show", {})
    wanted = [wanted] if isinstance(wanted, Mapping) else wanted
    named = [dict(zip(heads, row, strict=True)) for row in rows]
    lacking = [head for head in table.get("hide", ()) if head not in heads]
    for one in wanted:
        fitting = [row for row in named if _fits(row, one)]
        for head, some in one.items():
            there = {row[head] for row in fitting}
            lacking += [f"{head} {cell} to show" for cell in _cells(some) if cell not in there]
    if lacking:
        raise UserError(f"Table {table['name']} has no {', no '.join(lacking)}.")
    part = [row for row in named if any(_fits(row, one) for one in wanted)]
    kept = [head for head in heads if head not in table.get("hide", ())]
    lines = [*markdown_table(kept, [[row[head] for head in kept] for row in part]), ""]
    columns = f", {len(heads)} columns" if len(kept) < len(heads) else ""
    whole = f"[All {len(rows)} rows{columns}]({table['full']})"
    return "\n".join([*(lines if part else []), whole])


def _fits(row: Mapping[str, str], wanted: Spec) -> bool:
    """Whether each named cell is the wanted one, or among the wanted ones."""
    return all(row.get(head) in _cells(some) for head, some in wanted.items())


def _cells(some: object) -> list[str]:
    return [*map(str, some if isinstance(some, list) else [some])]


def select(selection: Spec | Sequence[Spec], folder: Path) -> list[Line]:
    """The lines of a file that fit; a value that is a list fits any of its entries."""
    if not isinstance(selection, Mapping):
        return [line for one in selection for line in select(one, folder)]
    wanted = {k: v for k, v in selection.items() if k not in NO_FACTS}
    if "csv" in selection:
        rows = csv_at(folder / selection["csv"]).to_dict("records")
        lines = [Line(row, pd.DataFrame()) for row in rows]
    else:
        wanted = {"dtype": "float32", **wanted}
        lines = [*published_at(folder / selection["rows"]).lines]
    listed = {key: value for key, value in wanted.items() if isinstance(value, list)}
    found = [
        line
        for line in lines
        if all(line.facts.get(key) in listed.get(key, [value]) for key, value in wanted.items())
    ]
    for key, values in listed.items():
        if missing := {*values} - {line.facts[key] for line in found}:
            raise UserError(f"No line of {dict(selection)} has {key} {missing}.")
    return [_part(line, selection, folder) for line in found]


def _one(selection: Spec, folder: Path) -> Line:
    found = select(selection, folder)
    if len(found) != 1:
        raise UserError(f"Expected one line for {dict(selection)}, got {len(found)}: name more.")
    return found[0]


def _part(line: Line, selection: Spec, folder: Path) -> Line:
    """The line on a part of its pictures: `repeats` of a patch (or none), or `without` those of
    another file."""
    rows = line.rows
    if "repeats" in selection:
        rows = rows[(rows[REPEATS] > 0) == selection["repeats"]]
    if "without" in selection:
        others = published_at(folder / selection["without"]).rows["image_id"]
        rows = rows[~rows["image_id"].isin(others)]
    return line if rows is line.rows else Line(line.facts, rows)


def _lined(table: Spec, chosen: Sequence[tuple[Sequence[str], Line]]) -> Cells:
    """A table with a row for each line: the words before it, then its columns."""
    columns = _columns(table["columns"])
    heads = [*table.get("heads", ()), *columns]
    rows = [
        [*map(str, words), *(_cell(line, form) for form in columns.values())]
        for words, line in chosen
    ]
    if (attack := table.get("against")) is not None:
        lines = [line for _, line in chosen]
        heads += [f"− {attack}, paired [95 %]", "p (Wilcoxon)"]
        for row, line in zip(rows, lines, strict=True):
            row += _difference(line, attack, lines)
    return heads, rows


def _columns(named: Sequence[str | Mapping[str, str]]) -> dict[str, str]:
    """What is said of each line, by the head of its column."""
    return {
        head: form
        for one in named
        for head, form in (one if isinstance(one, dict) else {HEADS.get(one, one): one}).items()
    }


def _cell(line: Line, form: str) -> str:
    """A fact or figure, or a format filled with them."""
    if "{" not in form:
        value = line.figure(form)
        fact = form in line.facts and isinstance(value, float) and math.isfinite(value)
        return f"{value:g}" if fact else number(value)
    values = {name: line.figure(name) for name in re.findall(r"{(\w+)", form)}
    text = form.format(**values)
    return "–" if any(map(pd.isna, values.values())) else re.sub(r"\binf\b", "∞", text)


def _difference(line: Line, attack: str, lines: Sequence[Line]) -> list[str]:
    """Mean of (PSNR − that of this attack on the same client and picture), and Wilcoxon's p.

    Of several lines of that attack the one of the same run counts.
    """
    bases = [
        other
        for other in lines
        if other.facts["attack"] == attack
        and all(other.facts[fact] == line.facts[fact] for fact in SAME_CLIENT)
    ]
    bases = [base for base in bases if base.facts["run"] == line.facts["run"]] or bases
    if len(bases) != 1:
        got = f"Expected one line of {attack} beside {line.facts['attack']}, got {len(bases)}."
        raise UserError(got)
    both = pd.concat([line.scored("psnr"), bases[0].scored("psnr")], axis=1, join="inner")
    if bases[0] is line or both.empty:
        return ["–", "–"]
    known = line.line.groups
    groups = None if known is None else known[both.index].tolist()
    test = paired_test(*both.sort_index().to_numpy(float).T, groups=groups)
    over = "" if test.images == line.figure("of") else f" (over {test.images})"
    interval = "–" if math.isnan(test.low) else f"{test.low:.2f}, {test.high:.2f}"
    p = "< 1e-4" if test.p < 1e-4 else f"{test.p:.2g}"
    return [f"{test.mean:+.2f} [{interval}]{over}", p]


def _grid(grid: Spec, folder: Path) -> Cells:
    """One figure of each line: a row for each `down` (columns), a column for each `across`."""
    filled: dict[tuple[str, ...], dict[str, str]] = {}
    down = _columns(grid["down"])
    for line in select(grid["of"], folder):
        row = filled.setdefault(tuple(_cell(line, form) for form in down.values()), {})
        across = _cell(line, grid["across"])
        if across in row:
            raise UserError(f"Two lines of a grid fall on {across} of {row}.")
        row[across] = _cell(line, grid["figure"])
    heads = dict.fromkeys(across for row in filled.values() for across in row)
    rows = [[*words, *(row.get(head, "–") for head in heads)] for words, row in filled.items()]
    return [*down, *heads], rows


def _files(names: Sequence[str], folder: Path) -> Cells:
    """A row for each file of rows: what made it."""
    rows = []
    for name in names:
        published = published_at(folder / name)
        facts = ("config", "commits", "date")
        said = [", ".join(dict.fromkeys(str(r[fact]) for r in published.runs)) for fact in facts]
        images = published.rows.groupby("run", sort=False)["image_id"].nunique().unique()
        said = [short_commits(words) for words in (*said, ", ".join(map(str, images)))]
        rows.append([name, *said])
    return ["rows", "config", "commit", "date", "images"], rows


@cache
def published_at(path: Path) -> Published:
    """A file of published rows, read once."""
    return published_rows.read(path)


@cache
def csv_at(path: Path) -> pd.DataFrame:
    """A CSV of results/, read once, with share20 and mean_psnr where `mjp compare` wrote it."""
    if not path.is_file():
        raise UserError(f"Expected a table of results/ at {path}, but there is no such file.")
    rows = pd.read_csv(path)
    if "success" in rows:
        pairs = zip(rows["success"], rows["n"], strict=True)
        rows["share20"] = [Share(round(part * n), n).text() for part, n in pairs]
    for names in (["psnr", "low", "high"], ["psnr_mean", "psnr_mean_lo", "psnr_mean_hi"]):
        if {*names} <= {*rows}:
            rows["mean_psnr"] = [mean_text(*values) for values in rows[names].to_numpy()]
    return rows


# patches that a picture holds more than once: where one is masked, all twins are hidden -----------


def repeated_patches(picture: Any, patch: int) -> int:
    """How many patches equal another patch of the same picture in every 8-bit value.

    picture: (3, H, W) in [0, 1]. A uniform picture of 4 patches gives 4. Where an upload masks one
    of them, all its twins are hidden.
    """
    levels = np.rint(np.clip(np.asarray(picture), 0, 1) * 255).astype(np.uint8)
    parts = levels.reshape(3, levels.shape[1] // patch, patch, -1, patch).transpose(1, 3, 0, 2, 4)
    _, counts = np.unique(parts.reshape(-1, 3 * patch * patch), axis=0, return_counts=True)
    return int(counts[counts > 1].sum())


def count_repeats(images: Path, size: int, patch: int) -> pd.DataFrame:
    """image_id, label and repeated patches of each picture, cropped as a run crops it."""
    source, crop = open_images(images), Preprocessing(size)
    rows = [
        (one.image_id, one.label, repeated_patches(crop(source.decode(one)), patch))
        for one in source.records
    ]
    return pd.DataFrame(rows, columns=["image_id", "label", REPEATS])


# pages --------------------------------------------------------------------------------------------


def check(root: Path, write: bool = False) -> list[str]:
    """What stands otherwise in the pages than the rows give; or put it right (`write`)."""
    content = yaml.safe_load((root / "results" / "tables.yaml").read_text("utf-8"))
    wrong = []
    for table in content["tables"]:
        path, name = root / table["file"], table["name"]
        begin, end = (f"<!-- table: {name} {place} -->" for place in ("begin", "end"))
        before, _, rest = path.read_text("utf-8").partition(begin)
        found, ended, behind = rest.partition(end)
        if not ended:
            raise UserError(f"{path}: expected {begin} and {end} in the page: put them there.")
        whole = cells(table, content.get("lines", {}), root / "results")
        wanted = f"\n{shown(table, *whole)}\n"
        pieces = [(path, f"table {name} of {table['file']}", found, wanted)]
        if "full" in table:
            file = path.parent / table["full"]
            text = pd.DataFrame(whole[1], columns=whole[0]).to_csv(index=False, lineterminator="\n")
            stored = file.read_text("utf-8") if file.is_file() else ""
            pieces.insert(0, (file, str(file), stored, text))
        for place, what, found, wanted in pieces:
            if write:
                text = before + begin + wanted + end + behind if place == path else wanted
                place.write_text(text, "utf-8")
            elif found != wanted:
                there, rows = found.splitlines(), wanted.splitlines()
                wrong += [f"WRONG: {what}"]
                wrong += [f"  stands there: {line}" for line in there if line not in rows]
                wrong += [f"  rows give:    {line}" for line in rows if line not in there]
    return wrong


# the card of the packaged models ------------------------------------------------------------------


def card() -> str:
    """The text of the card: what a model is comes from its weights' own metadata and the registry
    of names, how good it is from results/zoo."""
    template = Path(__file__).with_name("model_card.md.j2").read_text("utf-8")
    summaries = [ROOT / "results" / "zoo" / name for name in ("summary.csv", "patch14.csv")]
    measured = pd.concat(map(pd.read_csv, summaries)).set_index("model")
    (gamma,) = measured["gamma"].unique()

    def share(row: pd.Series[Any], name: str) -> str:
        """A percentage and its interval."""
        return f"{row[name]:.1f} [{row[f'{name}_low']:.1f}, {row[f'{name}_high']:.1f}]"

    models, order = [], list(NAMED_MODELS)
    for file in sorted(ZOO.glob("*.safetensors"), key=lambda file: order.index(file.stem)):
        with safe_open(file, framework="np") as weights:
            known = {k: v for k, v in weights.metadata().items() if not k.startswith("mjp-")}
            parameters = sum(weights.get_tensor(key).size for key in weights.keys())
        facts = {key: json.loads(value) for key, value in known.items()}
        row = measured.loc[file.stem.removeprefix("cifar_")]
        facts |= {"name": file.stem, "summary": NAMED_MODELS[file.stem].summary}
        facts |= {"share": partial(share, row), "m": facts["recipe"]["model"]}
        models.append(facts | {"parameters": parameters})
    made = jinja2.Template(template, undefined=jinja2.StrictUndefined)
    return made.render(models=models, gamma=gamma) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="write the rows of runs into one file")
    rows.add_argument("runs", nargs="+", type=Path, help="run folders")
    rows.add_argument("--out", type=Path, required=True, help="the parquet file")
    rows.add_argument("--commit", required=True, help="of the code that made the rows")
    rows.add_argument("--source", required=True, help="what the pictures are")
    rows.add_argument("--repeats", type=Path, help="CSV of image_id and repeated_patches")
    repeats = commands.add_parser("repeats", help="count the repeated patches of pictures")
    repeats.add_argument("images", type=Path, help="a folder or zip of pictures")
    repeats.add_argument("--size", type=int, required=True, help="side of the picture, such as 192")
    repeats.add_argument("--patch", type=int, required=True, help="side of a patch, such as 16")
    repeats.add_argument("--out", type=Path, required=True, help="the CSV")
    tables = commands.add_parser("tables", help="check the tables of results/tables.yaml")
    tables.add_argument("--write", action="store_true", help="write them again")
    commands.add_parser("card", help="write the card of the packaged models")
    given = parser.parse_args(argv)
    try:
        if given.command == "rows":
            counts = given.repeats and csv_at(given.repeats).set_index("image_id")[REPEATS]
            facts = {"commit": given.commit, "source": given.source, "repeats": counts}
            published_rows.write(given.runs, given.out, **facts)
        elif given.command == "repeats":
            counted = count_repeats(given.images, given.size, given.patch)
            counted.to_csv(given.out, index=False, lineterminator="\n")
        elif given.command == "card":
            CARD.write_text(card(), encoding="utf-8")
        else:
            sys.exit("\n".join(check(ROOT, write=given.write)) or 0)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
