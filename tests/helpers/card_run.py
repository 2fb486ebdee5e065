"""A made-up run of six clients whose card has every kind of figure, and its figures by hand.

What is expected is computed here from the parquet files with numpy alone, so that a mistake in the
report's own summaries shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.answer import build_card
from mjp_privacy.report.card import Card, CardFigure, CardRow
from mjp_privacy.report.clients import clients_of
from mjp_privacy.report.runs import load_runs
from tests.helpers import recomputed
from tests.helpers.ladder_rows import run_of
from tests.helpers.report_rows import as_many, image_rows, intact, write_rows

COUNT = 12
IMAGES = tuple(f"crop {i:02d}.png" for i in range(COUNT))
PHOTOGRAPHS = {
    image: f"photograph {i // 3 if i < 9 else 3 + i % 2}" for i, image in enumerate(IMAGES)
}
"""Three photographs with three crops each, and two with one or two."""

MJP: dict[str, Any] = {"setting": "c", "gamma": 0.27}
CLIENTS: Mapping[str, dict[str, Any]] = {
    "plain": {"setting": "a", "gamma": 0.0},
    "mjp": MJP,
    "noise": MJP | {"defenses": "gaussian_noise 0.01"},
    "withheld": MJP | {"withhold": "pos_embed"},
    "unshuffled": MJP | {"plain_share": 0.5},
    "april only": MJP | {"dal": True},
}
TITLES = {
    "plain": "plain",
    "mjp": "MJP γ .27",
    "noise": "MJP γ .27, gaussian noise 0.01",
    "withheld": "MJP γ .27, withhold pos embed",
    "unshuffled": "MJP γ .27, plain share 0.5",
    "april only": "MJP γ .27, DAL in the loss",
}
CANDIDATES: Mapping[str, tuple[str, ...]] = {
    "plain": ("patch_gradient",),
    "mjp": ("patch_gradient", "masked_span", "pixel_lattice", "inverting_gradients"),
    "noise": ("pixel_lattice",),
    "withheld": ("token_span",),
    "unshuffled": ("masked_span", "pixel_lattice"),
    "april only": (),
}
"""The attacks on one upload among which the best is chosen, in the order of the cells."""

F, U, N = "failed", "unsupported", "unscored"
E = math.inf
PSNR: Mapping[str, Mapping[str, Sequence[float | str]]] = {
    "plain": {
        "april": (15, 16, 14, 22, 15, 13, 21, 12, 15, 16, 17, 18.5),
        "patch_gradient": (E, E, 101, E, 130, E, 40, E, E, 57, F, E),
    },
    "mjp": {
        "april": (7, 6, 8, 6.5, 7.5, 9, 21, 5, 4, 7, 6, F),
        "patch_gradient": (9, 14, 8, 7, 6, 31, 9, 5, 6, F, U, U),
        "masked_span": (19, 21, 22, 25, 18, 17, 26, 14, F, F, U, U),
        "pixel_lattice": (E, 18, 58, U, U, E, 33, 13, F, 12, U, N),
        "inverting_gradients": (11, 10, 12, 13, 9, 8, 10, 15.5, F, U, U, U),
        "multi_round": (E, E, E, E, 62, 20, 19.99, 70, F, 41, F, N),
        "grey": (11, 12, 10, 13, 11, 12, 10, 11, 9, 12, 13, 11),
        "mean_image": (12, 12, 11, 13, 12, 12, 11, 11, 10, 12, 13, 12),
        "other_image": (8, 9, 7, 8, 8, 9, 7, 8, 7, 9, 8, 8),
        "oracle_inverse": (50,) * COUNT,
    },
    "noise": {
        "april": (6, 5, 6, 7, 5, 4, 6, 5, 6, 7, 6, 5),
        "pixel_lattice": (20, 24, 19, 12.5, 30, 18, 17, 21, 22, 13, 25, 26),
        "grey": (11, 12, 10, 13, 11, 12, 10, 11, 9, 12, 13, F),
    },
    "withheld": {"token_span": (14, 15, 13, 12.5, F, 21, 16, 17, 18, U, 20, 13)},
    "unshuffled": {
        "masked_span": (20, 23, 24, 60, 19, 18, 29, 15, 21, 22, 23, 24),
        "pixel_lattice": (19, 22, 23, 54, 18, 17, 28, 14, 20, 21, 22, 23),
    },
    "april only": {"april": (8.9, 9, 9.1, 8.8, 9.2, 8.7, 9.3, 8.9, 9, 9.1, 8.8, 9.2)},
}
ROLES = {"oracle_inverse": "ceiling"} | dict.fromkeys(
    ("grey", "mean_image", "other_image"), "floor"
)
RESIDUALS = {"patch_gradient": 0.3, "masked_span": 0.21, "inverting_gradients": 0.5}
"""Of every image; all others explain an upload the better the later it comes."""

GREY = tuple(10.5 + i / 4 for i in range(COUNT))


def run_id(client: str, attack: str) -> str:
    return f"{client} {attack}".replace(" ", "-")


def card_run(folder: Path) -> Path:
    """Write the run."""
    store, entries = RunStore(folder), {}
    for client, attacks in PSNR.items():
        for attack in attacks:
            facts = {"attack": attack, "attack_name": attack, "role": ROLES.get(attack, "attack")}
            facts |= {"victim": "april_block"} if attack == "april" else {}
            facts |= {"attack": "multi_round R=6", "uploads": 6} if attack == "multi_round" else {}
            facts |= {"planned_images": COUNT, "trained_gamma": CLIENTS[client]["gamma"]}
            entries[client, attack] = intact(run_id(client, attack), **facts, **CLIENTS[client])
    store.write_cells(list(entries.values()))
    for (client, attack), entry in entries.items():
        rows = [row for i in range(COUNT) for row in _rows(entry, i, PSNR[client][attack][i])]
        write_rows(store, entry, rows)
    return folder


def _rows(entry: Mapping[str, Any], index: int, psnr: float | str) -> list[dict[str, Any]]:
    known: dict[str, Any] = {}
    if isinstance(psnr, str):
        known, psnr = {"status": psnr, "reason": f"{entry['attack']} says so"}, 0.0
    diagnostics = {"grey_psnr": GREY[index]}
    if entry["role"] == "attack":
        diagnostics |= {"gradient_residual": RESIDUALS.get(entry["attack"], 1 / (3 + index))}
    if entry["gamma"] and entry["attack"] in ("april", "patch_gradient"):
        diagnostics |= {"zero_rows": 50.0}
    if entry["attack"] == "april":
        diagnostics |= {"cond_a": 1e9 if entry["gamma"] == 0 else 1e5}
    top1 = {"intact": float(index % 5 > 0)}
    made = image_rows(
        entry, IMAGES[index], float(psnr), diagnostics=diagnostics, top1=top1, **known
    )
    for row in made:
        row["group"] = PHOTOGRAPHS[IMAGES[index]]
        if (row["metric"], row["variant"], row["status"]) == ("psnr", "paper", "ok") and psnr > 56:
            row["value"] = math.inf  # so close that rounding to 8 bits makes it equal
    return made


# by hand ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What a card must say of one attacker."""

    mean: float
    low: float
    high: float
    median: float
    n: int
    exact: int
    above_20: int
    of: int
    trials: float  # as how many independent images these `of` count
    chosen: Mapping[str, str]  # attack by image


class ByHand:
    """Figures of the run's files, without any code of the report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, client: str, attacks: Sequence[str]) -> dict[str, pd.DataFrame]:
        """The rows of each attack that was run, by image."""
        ran = [a for a in attacks if (self.folder / "rows" / run_id(client, a)).is_dir()]
        return {a: recomputed.rows_of(self.folder, run_id(client, a)) for a in ran}

    def best(self, client: str, attacks: Sequence[str]) -> Expected:
        """Per image the attack with the highest standard PSNR; the first of equals."""
        rows = self.rows(client, attacks)
        chosen = recomputed.best_of(rows).dropna().to_dict()
        exact = sum(rows[a].loc[image, "psnr.paper"] == math.inf for image, a in chosen.items())
        statuses = pd.DataFrame({a: of["status"] for a, of in rows.items()})
        tried = statuses.isin(["ok", "failed"]).any(axis=1)
        tried |= (statuses == "unsupported").all(axis=1)
        return _expected(
            recomputed.worst_case(rows, "psnr.standard"), exact, statuses[tried], chosen
        )

    def accuracy(self, client: str) -> tuple[float, int]:
        """Top-1 in percent over all images that were attacked, and how many they are."""
        rows = self.rows(client, list(PSNR[client]))
        found = pd.DataFrame({a: recomputed.scored(of, "top1.intact") for a, of in rows.items()})
        hits = found.max(axis=1)
        return 100 * float(hits.mean()), len(hits)


def _expected(
    values: pd.Series[float], exact: int, tried: pd.DataFrame, chosen: Mapping[str, str]
) -> Expected:
    capped = values.clip(upper=recomputed.CAP).sort_index()
    low, high = interval(capped.to_dict())
    return Expected(
        **{"mean": float(capped.mean()), "low": low, "high": high},
        **{"median": float(capped.median()), "n": len(values), "exact": exact},
        **{"above_20": int((values >= 20).sum()), "of": len(tried)},
        trials=as_many([PHOTOGRAPHS[image] for image in tried.index]) if len(tried) else 0.0,
        chosen=chosen,
    )


def interval(values: Mapping[str, float]) -> tuple[float, float]:
    """Percentile bootstrap of the mean over whole photographs."""
    names = sorted({PHOTOGRAPHS[image] for image in values})
    members = [[values[image] for image in values if PHOTOGRAPHS[image] == name] for name in names]
    draws = np.random.default_rng(0).integers(0, len(names), (2000, len(names)), dtype=np.int32)
    means = []
    for draw in draws:
        pooled = [value for place in draw for value in members[place]]
        means.append(sum(pooled) / len(pooled))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


# cards --------------------------------------------------------------------------------------------


def card_of(folder: Path) -> Card:
    """The card that a report of this run has."""
    return build_card(clients_of(load_runs([folder]).lines))


def card_of_lines(folder: Path, *lines: tuple[Any, ...]) -> Card:
    """The card of a run of these lines: cell, PSNR or status by image, diagnostics of all."""
    return card_of(run_of(folder, *lines))


def keys(flagged: CardFigure | CardRow | None) -> str:
    """The keys of the flags, in the order of the alphabet: `below_floor unfinished`."""
    assert flagged is not None
    return " ".join(sorted(flag.key for flag in flagged.flags))
