"""Clients as points of accuracy and leakage: their families, their strength, the Pareto front."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from mjp_privacy.core.drawing import MUTED, colour
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind

ONE_UPLOAD = "1 upload"
COMPARISON = FileKind("the comparison.csv of `mjp compare`", "Compare the federations again.")
COLUMNS = ("label", "defence", "scope", "top1", "top1_low", "top1_high", "psnr", "low", "high", "n")


@dataclass(frozen=True)
class Family:
    """Defences of one kind: how their points look."""

    name: str
    colour: str
    marker: str


_LOOKS = {
    **{"none": (6, "s"), "MJP": (0, "o"), "noise": (1, "^"), "DP-SGD": (2, "D")},
    **{"sparsification": (3, "v"), "quantisation": (4, "P"), "withheld": (5, "X")},
    "pairs with MJP": (7, "o"),
}
FAMILIES = {name: Family(name, colour(n), marker) for name, (n, marker) in _LOOKS.items()}
FAMILIES["other"] = Family("other", MUTED, "s")
"""By name, in the order in which they are explained."""

_RECIPE = ("MJP", "dal", "plain_share")  # what belongs to MJP itself
_KINDS = (
    (r"dp_?sgd", "DP-SGD"),
    (r"gaussian_noise|laplace", "noise"),
    (r"top_?k|random_?k|prun|spars", "sparsification"),
    (r"b?float\d+|int\d+|sign|quanti", "quantisation"),
    (r"withhold|positions|lora", "withheld"),
)
_SMALLER_IS_STRONGER = ("sparsification",)  # its number is the share of entries that is sent


@dataclass(frozen=True)
class TradeoffPoint:
    """One client: its accuracy in percent and what leaks in dB (capped at 100), with intervals."""

    label: str
    family: str  # one of FAMILIES; any other is drawn as "other"
    strength: float  # grows with the defence; NaN: stands in no order
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    leakage: float
    leakage_low: float
    leakage_high: float
    n: int
    not_reached: int = 0  # images that no attack of the list applies to: they count as the floor
    not_scored: int = 0  # images without a score, which are in no figure

    @property
    def kind(self) -> Family:
        """How its family looks."""
        return FAMILIES.get(self.family, FAMILIES["other"])

    @property
    def drawable(self) -> bool:
        """Whether it has both figures."""
        return math.isfinite(self.accuracy) and math.isfinite(self.leakage)

    @property
    def unattacked(self) -> bool:
        """Whether half of the images or more have no score of an attack: then what leaks is not
        known, and a client whose attacks fail must not look protected."""
        lacking = self.not_reached + self.not_scored
        return lacking > 0 and 2 * lacking >= self.n + self.not_scored

    @property
    def words(self) -> str:
        """Its figures in words."""
        known = ", half of the images or more have no score" if self.unattacked else ""
        accuracy = f"{self.accuracy:.1f} %{_interval(self.accuracy_low, self.accuracy_high)}"
        leakage = f"{self.leakage:.1f} dB{_interval(self.leakage_low, self.leakage_high)}"
        return f"{self.label}: top-1 {accuracy}, {leakage}, n={self.n}{known}"


def _interval(low: float, high: float) -> str:
    return f" [{low:.1f}, {high:.1f}]" if math.isfinite(low) and math.isfinite(high) else ""


def family_and_strength(defence: str) -> tuple[str, float]:
    """The family of a client and how strong its defence is, from its text in comparison.csv.

    family_and_strength("MJP γ=0.27; dal")  # ("MJP", 0.27)
    family_and_strength("MJP γ=0.27; dal; int8")  # ("pairs with MJP", nan)
    """
    parts = [part.strip() for part in defence.split(";") if part.strip()]
    if parts in ([], ["none"]):
        return "none", math.nan
    own = [part for part in parts if part.split()[0] not in _RECIPE]
    if len(own) < len(parts):
        if own:
            return "pairs with MJP", math.nan
        changed = any(part.startswith("plain_share") for part in parts)  # another recipe
        return "MJP", math.nan if changed else _number(parts[0])
    if len(own) > 1:
        return "other", math.nan
    family = next((name for pattern, name in _KINDS if re.match(pattern, own[0])), "other")
    return family, _strength(family, own[0])


def _strength(family: str, text: str) -> float:
    if family == "quantisation":
        bits = re.search(r"\d+", text)
        return 1 / int(bits.group()) if bits else 1.0
    if family in ("withheld", "other"):
        return math.nan
    value = _number(text)
    return -value if family in _SMALLER_IS_STRONGER else value


def _number(text: str) -> float:
    """The first number behind a space or an equals sign; NaN without one."""
    found = re.search(r"[ =]([\d.]+(?:e[+-]?\d+)?)", text)
    try:
        return float(found.group(1)) if found else math.nan
    except ValueError:
        return math.nan


def points_from_comparison(
    source: Path | pd.DataFrame, scope: str = ONE_UPLOAD
) -> tuple[TradeoffPoint, ...]:
    """The points of comparison.csv, as `mjp compare` writes it, or of its table.

    scope: "1 upload" or "any number of uploads".
    """
    table = _comparison(source) if isinstance(source, Path) else source
    return tuple(_point(row) for _, row in comparable(table, scope).iterrows())


def _comparison(path: Path) -> pd.DataFrame:
    COMPARISON.check(path)
    with COMPARISON.reading(path):
        return pd.read_csv(path)


def comparable(table: pd.DataFrame, scope: str = ONE_UPLOAD) -> pd.DataFrame:
    """The rows of a scope that differ in their defences only: of the federations with the
    smallest batch, those with the fewest local steps."""
    missing = [name for name in COLUMNS if name not in table]
    if missing:
        raise UserError(
            f"Expected the columns {', '.join(COLUMNS)} of `mjp compare`, but {', '.join(missing)} "
            "is missing. Give the comparison.csv of its --out."
        )
    for name in ("batch", "steps"):
        if name in table:
            table = table[table[name] == table[name].min()]
    return table[table["scope"] == scope]


def _point(row: pd.Series) -> TradeoffPoint:
    family, strength = family_and_strength(str(row["defence"]))
    return TradeoffPoint(
        label=str(row["label"]),
        family=family,
        strength=strength,
        accuracy=float(row["top1"]),
        accuracy_low=float(row["top1_low"]),
        accuracy_high=float(row["top1_high"]),
        leakage=float(row["psnr"]),
        leakage_low=float(row["low"]),
        leakage_high=float(row["high"]),
        n=int(row["n"]),
        not_reached=0 if pd.isna(row.get("unreached")) else int(row["unreached"]),
    )


def pareto_front(points: Iterable[TradeoffPoint]) -> list[TradeoffPoint]:
    """The clients that no other beats: none leaks as little and is as accurate, one of them more.

    In the order of their leakage. Clients of whose images half or more have no score are left out.
    """
    front: list[TradeoffPoint] = []
    known = [point for point in points if point.drawable and not point.unattacked]
    for point in sorted(known, key=lambda point: (point.leakage, -point.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return front


def strength_lines(points: Sequence[TradeoffPoint]) -> list[list[TradeoffPoint]]:
    """The points of each family in the order of their strength, where two or more have one."""
    by_family: dict[str, list[TradeoffPoint]] = {}
    for point in points:
        if point.drawable and math.isfinite(point.strength):
            by_family.setdefault(point.family, []).append(point)
    return [
        sorted(family, key=lambda point: point.strength)
        for family in by_family.values()
        if len(family) > 1
    ]
