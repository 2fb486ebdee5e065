"""Tables of evaluated models in the layout of the paper's Tables 1, 3 and 4, beside its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from mjp_privacy.core.drawing import band, colour, dashes, drawn, picture
from mjp_privacy.metrics.statistics import Summary, summarise
from mjp_privacy.training.presets import Preset
from mjp_privacy.training.published import PublishedModel

MEASURES = {  # name: heading, direction that is better for the model, factor, decimals
    "top1": ("Top-1 %", "↑", 100, 1),
    "top5": ("Top-5 %", "↑", 100, 1),
    "top1_shuffled": ("Top-1 % shuffled", "↑", 100, 1),
    "diff_norm": ("Diff. Norm.", "↓", 1, 2),
    "consistency": ("Consistency %", "↑", 100, 1),
}
PAPERS_GAMMA_UNKNOWN = (
    "The paper does not print the γ of its shuffled images for Tables 3 and 4; its models are "
    "DeiT-S on ImageNet-1K at 224. Figures stand beside ours unadjusted; a difference says "
    "something only for that model on that data."
)

MEASURED = {
    "paper": "Preset paper: the paper does not print how it measures; this is as without a preset.",
    "authors_code": "Preset authors_code: accuracy on crops of 256/224, shuffled with one mask for "
    "128 images; Diff. Norm. and Consistency on whole pictures squashed to a square; ImageNet's "
    "mean and std, where the command gave none. Not to be compared with figures without it.",
}


@dataclass(frozen=True)
class Evaluated:
    """One model and its measurements: a row for each image and γ, or two where accuracy and
    consistency are measured on different pictures of it."""

    label: str
    rows: pd.DataFrame
    trained_gamma: float | None
    paper: PublishedModel | None
    cond_w: float = math.nan  # of the patch embedding
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> dict[str, str]:
        """Why images were not measured, by the image."""
        rows = self.rows[self.rows["status"] != "ok"]
        return dict(zip(rows["image_id"], rows["reason"], strict=True))


def summary_table(models: Sequence[Evaluated], preset: Preset = "ours") -> pd.DataFrame:
    """A line for each model and γ: mean, interval and n of every measure, the paper's figures.

    preset: whose way of measuring it was; any but ours has a column
    """
    lines = []
    whose = {} if preset == "ours" else {"preset": preset}
    for model in models:
        for gamma, rows in model.rows.groupby("gamma", sort=True):
            whole = (rows["status"] == "ok").groupby(rows["image_id"]).all()  # of an image's rows
            line: dict[str, object] = {
                "model": model.label,
                **whose,
                "trained_gamma": model.trained_gamma,
                "cond_w": model.cond_w,
                "gamma": gamma,
                "n": int(whole.sum()),
                "failed": int((~whole).sum()),
            }
            measured = set[str]()
            for name, (_, _, factor, _) in MEASURES.items():
                summary = summarised(rows, name)
                if name != "diff_norm":
                    summary = summary.as_share()
                measured |= set() if math.isnan(summary.mean) else {name}
                line[name] = factor * summary.mean
                line[f"{name}_low"] = factor * summary.low
                line[f"{name}_high"] = factor * summary.high
            paper = model.paper if gamma else None  # the paper's figures are of shuffled input
            line["paper_row"] = paper.label if paper else ""
            for name in ("top1", "diff_norm", "consistency"):
                line[f"paper_{name}"] = getattr(paper, name) if paper and name in measured else None
            lines.append(line)
    return pd.DataFrame(lines)


def summarised(rows: pd.DataFrame, name: str) -> Summary:
    """Mean and interval of one measure over the images; images that failed are counted."""
    values = rows[name].astype(float) if name in rows else pd.Series(math.nan, index=rows.index)
    counted = values.notna() | (rows["status"] != "ok")
    return summarise(
        values[counted].to_numpy(),
        list(rows["status"][counted]),
        groups=list(rows["group"][counted]),
    )


def markdown(table: pd.DataFrame, models: Sequence[Evaluated]) -> str:
    """The lines of `summary_table` as a Markdown table with notes below."""
    heads = ["Model", "trained γ", "cond(W)", "γ", "n"]
    heads += [f"{title} {arrow}" for title, arrow, *_ in MEASURES.values()]
    heads += ["paper's row", "paper's Top-1 (Δ)", "paper's Diff. Norm. (Δ)", "paper's Cons. (Δ)"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for _, line in table.iterrows():
        cells = [str(line["model"]).replace("|", "\\|"), _number(line["trained_gamma"], "g")]
        cells.append(_number(line["cond_w"], ".1f"))
        n = f"{line['n']}" + (f" ({line['failed']} failed)" if line["failed"] else "")
        cells += [_number(line["gamma"], "g"), n]
        for name, (*_, decimals) in MEASURES.items():
            cells.append(_with_interval(line, name, decimals))
        cells.append(str(line["paper_row"]) or "–")
        for name, decimals in (("top1", 1), ("diff_norm", 2), ("consistency", 1)):
            cells.append(_beside(line[f"paper_{name}"], line[name], decimals))
        lines.append("| " + " | ".join(cells) + " |")
    notes = sorted({note for model in models for note in model.notes})
    if any(model.paper for model in models):
        notes.append(PAPERS_GAMMA_UNKNOWN)
    notes += [MEASURED[preset] for preset in table.get("preset", pd.Series(dtype=str)).unique()]
    notes.append(
        "Mean [95 % interval over images], n = images; shares have Wilson's, others a bootstrap's. "
        "Each image is shuffled once and each line is one trained model; the intervals do not "
        "cover either choice."
    )
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


def _number(value: float | None, form: str) -> str:
    return "–" if value is None or pd.isna(value) else format(value, form)


def _with_interval(line: pd.Series, name: str, decimals: int) -> str:
    mean, low, high = (line[key] for key in (name, f"{name}_low", f"{name}_high"))
    if pd.isna(mean):
        return "–"
    interval = "" if pd.isna(low) else f" [{low:.{decimals}f}, {high:.{decimals}f}]"
    return f"{mean:.{decimals}f}{interval}"


def _beside(paper: float | None, ours: float, decimals: int) -> str:
    if paper is None or pd.isna(paper):
        return "–"
    difference = "" if pd.isna(ours) else f" ({ours - paper:+.{decimals}f})"
    return f"{paper:.{decimals}f}{difference}"


def draw_sweep(table: pd.DataFrame, path: Path) -> None:
    """Draw consistency, [CLS] difference and top-1 over γ as in Fig. 3, a line for each model."""
    names = ("consistency", "diff_norm", "top1_shuffled")
    with picture(path, 11, 3.4) as figure:
        for axes, name in zip(figure.subplots(1, 3), names, strict=True):
            for number, (label, line) in enumerate(table.groupby("model", sort=False)):
                points = line[line[name].notna()]  # a protocol measures some of the three
                look = {"color": colour(number), "linestyle": dashes(number)}
                axes.plot(
                    *(points["gamma"], points[name]),
                    marker="o",
                    markersize=3,
                    label=drawn(label),
                    **look,
                )
                ends = points[f"{name}_low"], points[f"{name}_high"]
                band(axes, points["gamma"], *ends, colour(number))
            axes.set_title(f"{MEASURES[name][0]} {MEASURES[name][1]}")
            axes.set_xlabel("γ of the shuffled input")
        figure.axes[0].legend()
