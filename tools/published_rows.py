"""The per-image rows of a published table in one small file, such as results/ladder/rows.parquet.

One row for each line of the report and image, also of the derived lines (`role`: worst_case,
attackers_choice). All that is known of a line stands in columns, so that any program can read it;
the file's metadata has the commit of the code and what is known of the runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically
from mjp_privacy.experiment.cell_facts import CellFacts, CommandFacts, columns_of
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.statistics import PSNR_CAP, Share, Summary
from mjp_privacy.report.clients import clients_of, derived_lines
from mjp_privacy.report.figures import exact_share, success_share, summary
from mjp_privacy.report.lines import CLIENT_FACTS, client_text, image_frame
from mjp_privacy.report.lines import Line as ReportLine
from mjp_privacy.report.runs import load_runs

Facts = dict[str, Any]
KEY = b"mjp_privacy"  # of the file's metadata, JSON

SCORES = {
    "psnr": ("psnr", "standard"),
    "psnr_paper": ("psnr", "paper"),  # inf: equal in every 8-bit value
    **{metric: (metric, "standard") for metric in ("ssim", "lpips", "mse")},
    **{f"{metric}_paper": (metric, "paper") for metric in ("mse", "fft2d", "ssim", "lpips")},
    **{
        name: (name, "diagnostic")
        for name in (
            *("gradient_residual", "zero_rows", "grey_psnr", "ceiling_psnr"),
            *("always_masked", "empty_mask", "cond_a", "certain", "order_found"),
        )
    },
    **{"top1": ("top1", "intact"), "top1_altered": ("top1", "altered")},
}
"""Columns of numbers: (metric, variant)."""

REPEATS = "repeated_patches"
OF_IMAGE = {*SCORES, REPEATS, "image_id", "group", "status", "reason"}
"""Columns that say something of an image; all others are facts of its line."""

PLAIN_CLIENT = {"mode": "eval", "loss": "cross_entropy", "batch": 1}
LEFT_OUT = {*columns_of(CommandFacts), *OF_IMAGE, "run_id", "cell_key"} - {"data_is_papers"}
"""Facts of the command that made a cell, such as names of folders, and its keys in the run."""


def write(
    runs: Sequence[Path],
    path: Path,
    *,
    commit: str,
    source: str,
    repeats: Mapping[str, int] | None = None,
) -> None:
    """Write the rows of these runs into one file.

    commit   of the code that made the rows
    source   what the pictures are
    repeats  repeated patches by image_id (`publish.py repeats`), a column of their own
    """
    lines = load_runs(runs).lines
    lines = [line for line in (*lines, *derived_lines(clients_of(lines))) if len(line.images)]
    if not lines:
        raise UserError(f"Expected runs with rows, got none in {', '.join(map(str, runs))}.")
    frame = pd.concat([_rows(line, source) for line in lines], ignore_index=True)
    if repeats is not None:
        frame[REPEATS] = frame["image_id"].map(dict(repeats)).astype("Int16")
    names = dict.fromkeys(line.run for line in lines)
    about = [_about(run, name, commit) for run, name in zip(runs, names, strict=True)]
    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({KEY: json.dumps({"runs": about}, sort_keys=True)})
    floats = [field.name for field in table.schema if pa.types.is_float32(field.type)]
    layout: Facts = {
        "use_dictionary": [name for name in table.schema.names if name not in floats],
        "use_byte_stream_split": floats,
    }
    layout |= {"compression": "zstd", "compression_level": 19}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda place: pq.write_table(table, place, **layout))


def _rows(line: ReportLine, source: str) -> pd.DataFrame:
    """One row for each image of a line."""
    images = line.images
    cell = line.cell.columns
    client = [key for key in CLIENT_FACTS if cell.get(key) != PLAIN_CLIENT.get(key, object())]
    facts = {
        name: json.dumps(fact) if isinstance(fact, (list, tuple, dict)) else fact
        for name, fact in cell.items()
        if name not in LEFT_OUT
    }
    facts |= {"line": line.number, "run": line.run, "data": source}
    facts |= {"attack": line.attack, "role": line.cell.role, "uploads": line.uploads}
    facts |= {"client": client_text(cell, client), "image_id": images.to_numpy()}
    scores = {
        name: line.scored(*key).reindex(images).to_numpy(dtype=np.float32)
        for name, key in SCORES.items()
    }
    outcome = {name: line.frame[name].tolist() for name in ("status", "reason")}
    group = None if line.groups is None else line.groups.tolist()
    frame = pd.DataFrame({**facts, "group": group, **scores, **outcome})
    return frame.dropna(axis=1, how="all")


def _about(run: Path, name: str, commit: str) -> Facts:
    """What is said of a run that rows came from."""
    config = (run / "experiment.yaml").read_bytes()
    log = run / "log.jsonl"
    start = json.loads(log.open().readline()) if log.is_file() else {}
    moment = datetime.fromtimestamp(start["time"], timezone.utc) if start else None
    return {
        **{"name": name, "config": yaml.safe_load(config)["experiment"]["name"]},
        **{"config_sha256": hashlib.sha256(config).hexdigest(), "commits": commit},
        **{fact: start.get(fact) for fact in ("commit", "torch")},
        "threads": start.get("threads", 1),  # of a worker
        "date": moment and moment.date().isoformat(),
    }


@dataclass(frozen=True)
class Published:
    """A file of published rows: `read(path).lines[0].figure("median")`."""

    runs: Sequence[Facts]
    rows: pd.DataFrame

    @cached_property
    def lines(self) -> Sequence[Line]:
        """Its lines in their order."""
        rows = self.rows.sort_values(["line", "image_id"])
        facts = rows.drop_duplicates("line").drop(columns=OF_IMAGE & {*rows}).to_dict("records")
        by_line = zip(facts, rows.groupby("line"), strict=True)
        return [Line(of, of_line) for of, (_, of_line) in by_line]


def read(path: Path) -> Published:
    """A file that `write` wrote."""
    if not path.is_file():
        raise UserError(f"Expected published rows at {path}, but there is no such file.")
    file = pq.ParquetFile(path)
    metadata = (file.metadata.metadata or {}).get(KEY)
    if metadata is None:
        raise UserError(f"Expected published rows, got {path}: tools/publish.py writes them.")
    rows = file.read().to_pandas()
    if rows.duplicated(["line", "image_id"]).any():
        raise UserError(f"Expected a number for each line, got two lines of one number in {path}.")
    missing = dict.fromkeys([name for name in ("group", *SCORES) if name not in rows])
    return Published(
        json.loads(metadata)["runs"],
        rows.assign(**missing).astype(dict.fromkeys(SCORES, np.float64)),
    )


@dataclass(frozen=True)
class Line:
    """One line of a table: its facts by their names, and figures of its rows by theirs.

        [line.figure(name) for name in ("model", "exact", "share20", "mean_psnr")]
        # "ViT-Ti", 126, "195 of 200 (98 %, 94–99)", "76.6 [71.9, 80.7]"

    Figures are n (images with a score), of (those given to the attacker), exact and share_exact
    (equal in every 8-bit value; the one meaning of the word), shareN and fromN (at N dB or more),
    mean_psnr (of min(PSNR, 100), with its interval), average (the mean alone), median, quartiles,
    accuracy (top-1 of the model on these images) and paper_METRIC.
    """

    facts: Mapping[str, Any]
    rows: pd.DataFrame

    def figure(self, name: str) -> Any:
        """A fact or figure by its name."""
        if name in self.facts:
            return self.facts[name]
        if name in ("exact", "share_exact") or re.fullmatch(r"(share|from)\d+", name):
            share = self.share(name)
            return share.text() if name.startswith("share") else share.count
        if name.startswith("paper_"):
            metric = name.removeprefix("paper_")
            decimals, score = 2 if metric == "psnr" else 4, summary(self.line, metric, "paper")
            mean, low, high = (f"{x:.{decimals}f}" for x in (score.mean, score.low, score.high))
            return f"{mean} [{low}, {high}]"
        scored, of = self.psnr, self.share("exact").of
        over = "" if scored.n == of else f" (over {scored.n})"
        quarter, half, three = self._quantiles() if scored.n else [math.nan] * 3
        figures = {
            "n": scored.n,
            "of": of,
            "accuracy": 100 * float(self.rows["top1"].mean()),
            "average": scored.mean,
            "mean_psnr": mean_text(scored.mean, scored.low, scored.high) + over,
            "median": half,
            "quartiles": f"{number(quarter)}–{number(three)}",
        }
        if name not in figures:
            raise UserError(f"There is no figure {name!r}; expected one of {', '.join(figures)}.")
        return figures[name] if scored.n or name in ("n", "of", "accuracy") else math.nan

    @cached_property
    def line(self) -> ReportLine:
        """The same as a line of a report: a published figure is that of the report."""
        names = {name: ".".join(key) for name, key in SCORES.items()}
        kept = self.rows[["image_id", "group", "status", "reason", *names]].rename(columns=names)
        asked = {name: self.facts[name] for name in ("setting", "gamma", "dtype", "seed")}
        return ReportLine(0, "", CellFacts(**asked), image_frame(kept), RunStore(Path()))

    def scored(self, column: str) -> pd.Series[float]:
        """A column's values by image, of the images that have one."""
        return self.line.scored(*SCORES[column])

    def share(self, name: str) -> Share:
        """Of the images the attacker was given: those without a reconstruction count as missed."""
        if name.endswith("exact"):
            return exact_share(self.line)
        return success_share(self.line, float(re.sub(r"\D", "", name)))

    @cached_property
    def psnr(self) -> Summary:
        """Of min(PSNR, 100)."""
        return summary(self.line, "psnr", "standard")

    def _quantiles(self) -> list[float]:
        """The quartiles of PSNR; half way to infinity is infinite, as for NumPy's median."""
        values = np.sort(self.scored("psnr").to_numpy())
        found = []
        for share in (0.25, 0.5, 0.75):
            place, weight = divmod(share * (len(values) - 1), 1)
            lower, upper = values[int(place)], values[int(place + (weight > 0))]
            between = lower if lower == upper else (1 - weight) * lower + weight * upper
            found.append(float(between))
        return found


def short_commits(names: str) -> str:
    """The same words with each commit cut to seven digits; a '+' for changed code stays."""
    return re.sub(r"\b([0-9a-f]{7})[0-9a-f]+\b", r"\1", names)


def mean_text(mean: float, low: float, high: float) -> str:
    """`76.6 [71.9, 80.7]`, or `100, the cap` where no image is below it."""
    interval = "–" if math.isnan(low) else f"{low:.1f}, {high:.1f}"
    return "100, the cap" if low == high == PSNR_CAP else f"{mean:.1f} [{interval}]"


def number(value: Any) -> str:
    """A figure as it is printed: one decimal for a float, ∞ for an infinite one, – for none."""
    if not isinstance(value, float):
        return str(value)
    return "–" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.1f}"
