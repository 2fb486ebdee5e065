"""The paper's Tables 3 and 4 as trained here: accuracy and leakage of every printed row by seed.

    trained: {paper: 4, evaluation: a/summary.csv, rows: a/rows.parquet, seeds: [0, 1]}
    spread:  {paper: 4, evaluation: a/summary.csv, seeds: [0, 1], against: A, fixed: …}
    noise:   {evaluation: a/summary.csv, seeds: [0, 1], fixed: {consistency: [B]}}

Both files call a model ROW_SEED (`G_0`, `gamma_0.09_1`). Models of one seed share their start and
the order of images, so a row's figure is taken as (row) + (seed) + noise, and the noise's variance
is that of a two-way table without repetition: one estimate for all rows, because two seeds say
little of one row alone. `fixed` rows have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import t

from mjp_privacy.core.errors import UserError
from mjp_privacy.training.evaluation import TABLE3, TABLE4, PublishedModel
from tools.published_rows import Line, read

Spec = Mapping[str, Any]
ONE, ANY = "worst_case, 1 upload", "worst_case, any number of uploads"
MEASURES = {
    "top1": ("top-1 %", "{:.1f}"),
    "top1_shuffled": ("shuffled %", "{:.1f}"),
    "diff_norm": ("Diff. Norm.", "{:.2f}"),
    "consistency": ("consistency %", "{:.1f}"),
}
DASH = "–"


def table(spec: Spec, folder: Path) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Heads and cells of one of these tables; `folder`: results/."""
    kinds = {"trained": _trained, "spread": _spread, "noise": _noise}
    (kind,) = {*kinds} & {*spec}
    models = pd.read_csv(folder / spec[kind]["evaluation"]).set_index("model")
    return kinds[kind](spec[kind], models, folder)


def printed_rows(paper: int) -> Mapping[str, PublishedModel]:
    """The rows of the paper's Table 3 or 4, by the names that their training has here.

    Every shuffling row of Table 4 has γ = .27 here, so that row J is Table 3's row of this ratio.
    """
    if paper not in (3, 4):
        raise UserError(f"Expected paper: 3 or 4, got {paper}.")
    ratios = {"J" if g == 0.27 else f"gamma_{g:g}": row for g, row in TABLE3.items()}
    return ratios if paper == 3 else TABLE4


Clients = dict[str, dict[str, dict[str, Line]]]


def clients(rows: Path) -> Clients:
    """The worst case by model, by the client in words, and by ONE and ANY number of uploads; of a
    client that shuffles nothing every upload is the same one."""
    found: Clients = {}
    for line in read(rows).lines:
        facts = line.facts
        if facts["attack"] == ONE or (facts["attack"] == ANY and facts["setting"] != "a"):
            shuffles = "" if facts["setting"] == "a" else f" γ {facts['gamma']:g}"
            does = "" if facts["client"] == DASH else f", {facts['client']}"
            words = f"({facts['setting']}){shuffles}{does}"
            found.setdefault(facts["model"], {}).setdefault(words, {})[facts["attack"]] = line
    return found


def _trained(spec: Spec, models: pd.DataFrame, folder: Path) -> tuple[Any, Any]:
    """A line for each printed row and client; figures of the seeds stand beside each other."""
    attacked, rows = clients(folder / spec["rows"]), []
    for name, printed in printed_rows(spec["paper"]).items():
        labels = [f"{name}_{seed}" for seed in spec["seeds"]]
        paper = [printed.top1, printed.diff_norm, printed.consistency]
        trained = models.reindex(labels)
        facts = [
            _name(printed),
            *(
                ", ".join(DASH if pd.isna(value) else form.format(value) for value in trained[name])
                for name, (_, form) in MEASURES.items()
            ),
            ", ".join(DASH if figure is None else f"{figure:g}" for figure in paper),
        ]
        words = dict.fromkeys(w for label in labels for w in attacked.get(label, ()))
        for place, client in enumerate(words or [DASH]):
            lines = [attacked.get(label, {}).get(client, {}) for label in labels]
            leaks = [cell for scope in (ONE, ANY) for cell in _leakage(lines, scope)]
            rows.append([*(facts if not place else [""] * len(facts)), client, *leaks])
    heads = ["row", *(head for head, _ in MEASURES.values())]
    heads += ["paper: top-1, Diff. Norm., consistency", "attacked as"]
    for scope in ("one upload, earlier attacks", "six uploads"):
        heads += [f"{scope}: {figure}" for figure in ("exact", "≥ 20 dB", "mean dB")]
    return heads, rows


def _name(printed: PublishedModel) -> str:
    """The row's name; the model that it starts from is no DeiT-S here."""
    return printed.row.replace("DeiT-S", "ViT")


def _leakage(seeds: Sequence[Mapping[str, Line]], scope: str) -> Iterator[str]:
    """Exact pictures, those at 20 dB or more and the mean, of each seed."""
    lines = [lines[scope] if scope in lines and lines[scope].psnr.n else None for lines in seeds]
    for figure, form in (("exact", "{}"), ("from20", "{}"), ("average", "{:.1f}")):
        values = [DASH if line is None else form.format(line.figure(figure)) for line in lines]
        yield ", ".join(values) if any(lines) else DASH


# what another seed moves --------------------------------------------------------------------------


def seed_noise(values: NDArray[np.float64]) -> tuple[float, int, float]:
    """Standard deviation of one training, its degrees of freedom, and half of the 95 % interval of
    a difference between two rows of one seed. values[row, seed]"""
    rows, seeds = values.shape
    freedom = max(rows - 1, 0) * (seeds - 1)
    if freedom < 1:
        return math.nan, 0, math.nan
    noise = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    deviation = math.sqrt(float((noise**2).sum()) / freedom)
    return deviation, freedom, float(t.ppf(0.975, freedom)) * deviation * math.sqrt(2)


def by_row(models: pd.DataFrame, measure: str, seeds: Sequence[int]) -> pd.DataFrame:
    """A measure of the rows that were trained from every seed: a row each, a column a seed."""
    names = models.index.str.rsplit("_", n=1).str
    long = models.assign(row=names[0], seed=names[1])
    wide = long.pivot(index="row", columns="seed", values=measure)
    return wide.reindex(columns=[str(seed) for seed in seeds]).dropna()


def _noise(spec: Spec, models: pd.DataFrame, _: Path) -> tuple[Any, Any]:
    """What another seed moves in a row, and which differences it explains."""
    rows = []
    for measure, fixed in spec["fixed"].items():
        values = by_row(models, measure, spec["seeds"]).drop(index=fixed).to_numpy()
        deviation, freedom, single = seed_noise(values)
        widest = np.ptp(values, axis=1).max()
        of_seeds = single / math.sqrt(values.shape[1])
        figures = (f"{x:.2f}" for x in (widest, deviation, of_seeds, single))
        rows.append([_head(measure), str(len(values)), *figures, str(freedom)])
    heads = ["measure", "rows", "seeds of a row differ by up to", "deviation of a training"]
    return [*heads, "± of two rows' means", "± of two rows of one seed", "degrees of freedom"], rows


def _spread(spec: Spec, models: pd.DataFrame, _: Path) -> tuple[Any, Any]:
    """Each row minus one of them, in the mean of the seeds; the interval is of the seeds alone."""
    printed, base = printed_rows(spec["paper"]), spec["against"]
    named = printed[base].row.partition(":")[0]
    ends = (", mean [95 %]", ", paper")
    heads = [f"{_head(m)} − {named}{end}" for m in spec["fixed"] for end in ends]
    rows = []
    for name, row in printed.items():
        cells = [_name(row)]
        for measure, fixed in spec["fixed"].items():
            values = by_row(models, measure, spec["seeds"])
            single = seed_noise(values.drop(index=fixed).to_numpy())[2]
            if name not in values.index or base not in values.index:
                cells.append(DASH)
            else:
                seeds = (values.loc[name] - values.loc[base]).to_numpy()
                mean, half = seeds.mean(), single / math.sqrt(len(seeds))
                fixed_row = {name, base} & {*fixed} or math.isnan(half)
                interval = "" if fixed_row else f" [{mean - half:+.1f}, {mean + half:+.1f}]"
                cells.append(f"{mean:+.1f}{interval}")
            cells.append(f"{getattr(row, measure) - getattr(printed[base], measure):+.1f}")
        if name != base:
            rows.append(cells)
    return ["row", *heads], rows


def _head(measure: str) -> str:
    return measure.replace("top1", "top-1")
