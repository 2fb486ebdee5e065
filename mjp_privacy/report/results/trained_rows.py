"""The paper's Tables 3 and 4 as trained here: accuracy and leakage of every printed row.

    trained: {paper: 4, evaluation: a/summary.csv, rows: a/rows.parquet, seeds: [0, 1]}

Both files call a model ROW_SEED (`G_0`, `gamma_0.09_1`), as `tools/ablations.py` does. A printed
row that nobody has trained has a line that says so. A model that was attacked as several clients
has a line for each; where several seeds were trained, their mean and range follow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.report.charts.tradeoff_points import TradeoffPoint
from mjp_privacy.report.export import markdown_text
from mjp_privacy.report.results.figures import LineFigures, text_of
from mjp_privacy.report.results.lines import csv_at, published_at
from mjp_privacy.training.published import TABLE3, TABLE4, PublishedModel

UNTRAINED, UNATTACKED, NO_ATTACK = "not trained yet", "not attacked yet", "no attack applies"
ONE, ANY = "worst_case, 1 upload", "worst_case, any number of uploads"
MEASURES = {"top1": 1, "top1_shuffled": 1, "diff_norm": 2, "consistency": 1}  # decimals
HEADS = (
    *("row", "γ", "training", "top-1 %", "shuffled %", "Diff. Norm.", "consistency %"),
    "paper: top-1, Diff. Norm., consistency",
    *("attacked as", "one upload: exact, ≥ 20 dB", "mean [95 %]"),
    *("up to six uploads: exact, ≥ 20 dB", "mean [95 %]"),
)
OURS = 0.27
"""The γ of every shuffling row of Table 4 here, so that row J is Table 3's row of this ratio."""


@dataclass(frozen=True)
class Client:
    """One way in which a model was attacked: the best attack on one upload and on several."""

    words: str  # the setting, γ and what the client does that a plain one does not
    one: LineFigures
    several: LineFigures | None  # None where no attack took more than one, or all would be alike


@dataclass(frozen=True)
class TrainedModel:
    """A trained row: its line of `mjp evaluate`, and its clients in the order of the grid."""

    label: str
    evaluation: Mapping[Hashable, Any]
    clients: tuple[Client, ...]


def printed_rows(paper: int) -> dict[str, PublishedModel]:
    """The rows of the paper's Table 3 or 4, by the names that their training has here."""
    if paper == 4:
        return dict(TABLE4)
    if paper == 3:
        return {"J" if g == OURS else f"gamma_{g:g}": row for g, row in TABLE3.items()}
    raise UserError(f"trained: paper: expected table 3 or 4, got {paper}.")


def trained_models(evaluation: Path, rows: Path) -> dict[str, TrainedModel]:
    """The models of an evaluation's summary.csv by label, with what attacks got of each."""
    clients: dict[str, dict[str, dict[str, LineFigures]]] = {}
    for line in published_at(rows).all_lines:
        if line.attack in (ONE, ANY):
            of_model = clients.setdefault(line.cell.model.label, {})
            figures = LineFigures(line)
            of_model.setdefault(_client_words(figures), {})[line.attack] = figures
    return {
        str(row["model"]): TrainedModel(
            str(row["model"]),
            row,
            tuple(
                Client(words, lines[ONE], _several(lines))
                for words, lines in clients.get(str(row["model"]), {}).items()
            ),
        )
        for row in csv_at(evaluation).to_dict("records")
    }


def trained_table(table: Mapping[str, Any], folder: Path) -> list[list[str]]:
    """The cells of the table, HEADS first; `folder`: results/."""
    models = trained_models(folder / table["evaluation"], folder / table["rows"])
    lines = [[*HEADS]]
    for name, printed in printed_rows(table["paper"]).items():
        labels = {seed: f"{name}_{seed}" for seed in table["seeds"]}
        trained = {seed: models[label] for seed, label in labels.items() if label in models}
        missing = ", ".join(str(seed) for seed in labels if seed not in trained)
        for seed, model in trained.items():
            lines += _model_lines(printed, f"seed {seed}", model)
        if missing:
            lines.append(_untrained_line(printed, f"seed {missing}"))
        if len(trained) > 1:
            lines += _spread_lines(printed, [*trained.values()])
    return lines


def tradeoff_points(models: Mapping[str, TrainedModel], attack: str) -> Iterator[TradeoffPoint]:
    """Accuracy and leakage of each row as its first client, the mean over its seeds: bars reach
    from the lowest to the highest end of the seeds' intervals. Where no attack applies a model
    stands at the floor, as in every chart.

    attack: ONE or ANY, which is ONE where no attack took more
    """
    grey, rows = floor(models), dict[str, list[TrainedModel]]()
    for model in models.values():
        if model.clients:
            rows.setdefault(model.label.rpartition("_")[0], []).append(model)
    for name, seeds in rows.items():
        clients = [model.clients[0] for model in seeds]
        lines = [c.several if attack == ANY and c.several else c.one for c in clients]
        top1 = [model.evaluation for model in seeds]
        setting, masks = lines[0].fact("setting"), re.fullmatch("[GHIJ]|gamma.*", name)
        yield TradeoffPoint(
            label=_short_name(name) + (" as fed" if setting == "b" else ""),
            family="none" if setting == "a" else "MJP" if masks else "other",
            strength=lines[0].fact("gamma") if re.match("gamma|J", name) else math.nan,
            accuracy=_mean([row["top1"] for row in top1]),
            accuracy_low=min(row["top1_low"] for row in top1),
            accuracy_high=max(row["top1_high"] for row in top1),
            leakage=_mean([line.average if line.n else grey for line in lines]),
            leakage_low=min(line.low if line.n else grey for line in lines),
            leakage_high=max(line.high if line.n else grey for line in lines),
            n=lines[0].of,
            not_reached=0 if any(line.n for line in lines) else lines[0].of,
        )


def _short_name(row: str) -> str:
    """A row's name in the chart: J, or γ 0.21."""
    return row.replace("gamma_", "γ ")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def floor(models: Mapping[str, TrainedModel]) -> float:
    """Mean PSNR of a uniform grey on the attacked images, which are the same for all models."""
    lines = (client.one for model in models.values() for client in model.clients)
    return next((line.grey for line in lines if line.n), math.nan)


def _several(lines: Mapping[str, LineFigures]) -> LineFigures | None:
    """The best over several uploads; of a client that shuffles nothing each is the first again."""
    return None if lines[ONE].fact("setting") == "a" else lines.get(ANY)


def _client_words(figures: LineFigures) -> str:
    setting, gamma, client = (figures.fact(key) for key in ("setting", "gamma", "client"))
    shuffles = "" if setting == "a" else f" γ {gamma:g}"
    return f"({setting}){shuffles}" + ("" if client == "–" else f", {client}")


def _untrained_line(printed: PublishedModel, seeds: str) -> list[str]:
    return [name_here(printed), "", seeds, UNTRAINED, *[""] * 3, _paper(printed), *[""] * 5]


def name_here(printed: PublishedModel) -> str:
    """The row's name; the model that it starts from is no DeiT-S here."""
    return printed.row.replace("DeiT-S", "ViT")


def _paper(printed: PublishedModel) -> str:
    return ", ".join(
        f"{figure:g}" if figure is not None else "–"
        for figure in (printed.top1, printed.diff_norm, printed.consistency)
    )


def _model_lines(printed: PublishedModel, seed: str, model: TrainedModel) -> Iterator[list[str]]:
    gamma = text_of(model.evaluation["trained_gamma"], "g")
    measures = [_measure(model.evaluation, name) for name in MEASURES]
    facts = [name_here(printed), gamma, seed, *measures, _paper(printed)]
    if not model.clients:
        yield [*facts, UNATTACKED, *[""] * 4]
    for place, client in enumerate(model.clients):
        words = markdown_text(client.words)
        leakage = [*_leakage(client.one), *_leakage(client.several)]
        yield [*([""] * len(facts) if place else facts), words, *leakage]


def _measure(row: Mapping[Hashable, Any], name: str) -> str:
    mean, low, high = (
        f"{row[key]:.{MEASURES[name]}f}" for key in (name, f"{name}_low", f"{name}_high")
    )
    return f"{mean} [{low}, {high}]"


def _leakage(line: LineFigures | None) -> list[str]:
    if line is None:
        return ["–", "–"]
    if not line.n:
        return [NO_ATTACK, "–"]
    return [f"{line.exact}, {line.from_(20).count} of {line.of}", line.mean]


def _spread_lines(printed: PublishedModel, models: Sequence[TrainedModel]) -> Iterator[list[str]]:
    """Mean and range over the seeds; of clients those that all of them were attacked as."""
    measures = [_spread([m.evaluation[name] for m in models], MEASURES[name]) for name in MEASURES]
    facts = [name_here(printed), "", f"{len(models)} seeds: mean (range)", *measures, ""]
    by_words = [{client.words: client for client in model.clients} for model in models]
    shared = [words for words in by_words[0] if all(words in clients for clients in by_words)]
    for place, words in enumerate(shared or [""]):
        clients = [of_model[words] for of_model in by_words] if words else []
        cells = [
            cell
            for scope in ("one", "several")
            for cell in _spread_leakage([getattr(client, scope) for client in clients])
        ]
        first = [""] * len(facts) if place else facts
        yield [*first, markdown_text(words) or UNATTACKED, *cells]


def _spread_leakage(lines: Sequence[LineFigures | None]) -> list[str]:
    known = [line for line in lines if line is not None and line.n]
    if not lines or len(known) < len(lines):
        return ["–", "–"]
    counts = (
        _spread([line.exact for line in known], 1),
        _spread([line.from_(20).count for line in known], 1),
    )
    return [", ".join(counts), _spread([line.average for line in known], 1)]


def _spread(values: Sequence[float], decimals: int) -> str:
    texts = (text_of(float(v), f".{decimals}f") for v in (_mean(values), min(values), max(values)))
    mean, low, high = texts
    return f"{mean} ({low}–{high})"
