"""Lines derived from others, the figures of any line, and the table of all lines as numbers.

A derived line is per image the best attack, or the one an attacker would take.

For each image of a client, with the attacks a on it in the order of the cells,

    worst_case        argmax_a min(PSNR_a, 100 dB)   needs the truth: an upper bound of any selector
    attackers_choice  argmin_a gradient_residual_a   needs no truth

is chosen, and every metric of the image comes from the chosen attack's reconstruction. For worst
cases pictures that are equal in every 8-bit value come first. Controls are never candidates.
Attacks on a client with an altered block 0 are candidates only where the model was trained with
that block, and where patches are masked there is no worst case without an attack that knows MJP or
an exact picture. Attacks that failed on an image are not among its candidates; an image without
candidates has a reason in place of scores.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.experiment.cell_facts import AttackFacts, OutcomeFacts, defaults_of
from mjp_privacy.metrics.pictures import arrow
from mjp_privacy.metrics.scores import METRICS as SCORES
from mjp_privacy.metrics.statistics import (
    PSNR_CAP,
    Share,
    Summary,
    are,
    independent_trials,
    range_of,
    summarise,
)
from mjp_privacy.report.lines import (
    ATTACK_FACTS,
    DIAGNOSTIC,
    OF_PICTURE,
    Key,
    Line,
    fact,
    once,
)

if TYPE_CHECKING:
    from torch import Tensor

# derived lines ------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """How a derived line chooses: the attack with the largest sign · value of a metric."""

    name: str
    metric: str
    variant: str
    sign: int


WORST_CASE = Rule("worst_case", "psnr", "standard", 1)
ATTACKERS_CHOICE = Rule("attackers_choice", "gradient_residual", "diagnostic", -1)
RULES = {rule.name: rule for rule in (WORST_CASE, ATTACKERS_CHOICE)}

OF_IMAGE = (
    *("group", "top1.intact"),
    *("ceiling_psnr.diagnostic", "grey_psnr.diagnostic", "oracle_in_place_psnr.diagnostic"),
    *("mean_visible_psnr.diagnostic", "shuffled_patches.diagnostic", "moved_patches.diagnostic"),
    "empty_mask.diagnostic",
)
"""Columns that are the same for every attack on an image."""

OF_RECONSTRUCTION = (
    *("status", "reason", "gradient_residual.diagnostic"),
    *("visible_psnr.diagnostic", "masked_psnr.diagnostic"),
)
"""Columns beside the scores that are of a reconstruction; all others tell how the attack worked."""

NO_RESIDUAL = "no attack that reconstructed this image has a gradient residual to choose by"


@dataclass(frozen=True, eq=False)
class DerivedLine(Line):
    """A line that takes each of its images from one of its members."""

    members: tuple[Line, ...]  # the attacks it chose among, in the order of the cells
    chosen: pd.Series[int]  # their places by image; images without a candidate are not in it

    @property
    def rule(self) -> Rule:
        """How it chose."""
        return RULES[self.cell.role]

    @property
    def counts(self) -> dict[str, int]:
        """How many images each member was chosen for, by its label (`april, line 3` if shared)."""
        labels = [line.attack for line in self.members]
        counts = self.chosen.value_counts()
        return {
            label if labels.count(label) == 1 else f"{label}, line {line.number}": int(
                counts.get(place, 0)
            )
            for place, (label, line) in enumerate(zip(labels, self.members, strict=True))
        }

    def source(self, image_id: str) -> Line | None:
        """The line that was chosen for an image."""
        place = self.chosen.get(image_id)
        return None if place is None else self.members[place]

    def reconstruction(self, image_id: str) -> dict[str, Tensor] | None:
        line = self.source(image_id)
        return None if line is None else line.reconstruction(image_id)

    @property
    def shown_attacks(self) -> tuple[Line, ...]:
        return tuple(self.members[place] for place in sorted(set(self.chosen)))

    @cached_property
    def picture_ids(self) -> list[str]:
        stored = [(member, member.picture_ids) for member in self.shown_attacks]
        return sorted(i for member, ids in stored for i in ids if self.source(i) is member)

    @property
    def has_truth(self) -> bool:
        return all(member.has_truth for member in self.members)


def derive(attacks: Sequence[Line], matching: Sequence[Line], masks: bool) -> list[DerivedLine]:
    """The derived lines of one client, all numbered 0; none with fewer than two attacks.

    Where some attacks use several uploads there are two lines for each rule: one over the attacks
    that use a single upload, one over all of them. An attack that was refused or failed on every
    image uses none.

    matching: those that are a match for the client; masks: whether it masks. What attacks made for
    another client get says nothing of one that does.
    """

    def competing(most: float) -> list[Line]:
        lines = [line for line in attacks if line.competes and line.uploads <= most]
        known = not masks or any(line in matching for line in lines)
        return [line for line in lines if known and len(line.images)]

    single, members = competing(1), competing(math.inf)
    if len(members) < 2:
        return []
    several = any(line.uploads > 1 and line.reconstructs for line in members)
    scopes = [(single, "1 upload")] if single else []
    scopes += [(members, "any number of uploads")] if several else []
    derived = []
    for rule, (candidates, scope) in product(RULES.values(), scopes):
        chosen, first = choose(candidates, rule), candidates[0]
        if len(chosen) or rule is WORST_CASE:  # without residuals none can be chosen
            label = f"{rule.name}, {scope}"
            uploads = max((line.uploads for line in candidates if line.reconstructs), default=1)
            facts = {**defaults_of(AttackFacts), **defaults_of(OutcomeFacts), "uploads": uploads}
            facts |= {"attack": label, "attack_name": label, "role": rule.name}
            facts |= {"planned_images": max(line.planned for line in candidates)}
            cell = replace(first.cell, **facts | {"run_id": f"{label}, {first.cell.run_id}"})
            of = (first.store, tuple(candidates), chosen)
            derived.append(DerivedLine(0, first.run, cell, _frame(candidates, chosen), *of))
    return derived


def choose(members: Sequence[Line], rule: Rule) -> pd.Series[int]:
    """The place of the best member for each image; of equals, or of PSNR at the cap, one that does
    not assume 8-bit pixels, and then the first in the order of the cells. Images for which none has
    a value are left out."""
    order = sorted(range(len(members)), key=lambda place: "8 bit" in members[place].traits)
    merits = pd.concat(
        [rule.sign * members[place].scored(rule.metric, rule.variant) for place in order], axis=1
    ).sort_index()
    worst = -sys.float_info.max  # of what is known, also where that is -inf
    known = merits.clip(lower=worst, upper=PSNR_CAP if rule is WORST_CASE else None)
    if rule is WORST_CASE:
        exact = [merits.index.isin(members[place].exact_images) for place in order]
        known += PSNR_CAP * (np.stack(exact, axis=1) | (known.to_numpy() == PSNR_CAP))
    best = np.array(order, dtype=np.int16)[known.fillna(-np.inf).to_numpy().argmax(axis=1)]
    return pd.Series(best, merits.index.rename("image_id"), dtype=np.int16)


def _frame(members: Sequence[Line], chosen: pd.Series[int]) -> pd.DataFrame:
    """The rows of the chosen reconstructions, or why none was chosen. What is the same for every
    attack on an image comes from the first that has it, where the chosen line has not."""
    kept = "|".join((*OF_IMAGE, *OF_RECONSTRUCTION, *(rf".*\.{of}" for of in OF_PICTURE)))
    parts = [line.frame.filter(regex=f"^(?:{kept})$") for line in members]
    every = pd.concat(parts, keys=range(len(members)))
    images = every.index.unique(level=1).sort_values()
    places = pd.MultiIndex.from_arrays([chosen, chosen.index])
    words = {"status": object, "reason": object}
    rows = every.loc[places].droplevel(0).reindex(images).astype(words)
    shared = [name for name in every if name in OF_IMAGE]
    rows[shared] = rows[shared].fillna(every[shared].groupby(level=1).first())
    reasons = _reasons(members, images.difference(chosen.index))
    rows.loc[reasons.index, ["status", "reason"]] = reasons
    return rows.astype(dict.fromkeys(words, "category"))


def _reasons(members: Sequence[Line], images: pd.Index) -> pd.DataFrame:
    """Status and reason of images for which no member was chosen: what its attacks ended with."""
    tried: dict[str, set[str]] = {}
    for line in members:
        rows = line.frame.loc[line.frame.index.intersection(images)]
        broken = (rows["status"] == "ok") & rows.get("psnr.standard", rows["status"]).isna()
        for image, status in rows["status"].astype(object).mask(broken, "failed").items():
            tried.setdefault(str(image), set()).add(status)
    reasons = {}
    for image, statuses in tried.items():
        status = next((s for s in ("failed", "unscored") if s in statuses), "unsupported")
        reasons[image] = status, f"of its attacks: {', '.join(sorted(statuses))}"
        if "ok" in statuses:
            reasons[image] = "unsupported", NO_RESIDUAL
    return pd.DataFrame.from_dict(reasons, "index", dtype=object, columns=["status", "reason"])


def attackers_choice_by_image(attacks: Sequence[Line]) -> dict[str, Line]:
    """The attack that somebody without the truth would take for each image, of those whose picture
    has a residual: that with the smallest one; among equals the first line.

    Attacks that met a client with an altered block 0 count only where no other made a picture.
    """
    taken: dict[str, Line] = {}
    for trained in (False, True):
        members = [line for line in attacks if line.meets_trained_model == trained]
        if members:
            pictures = {image for line in members for image in line.picture_ids}
            chosen = choose(members, ATTACKERS_CHOICE).items()
            taken |= {image: members[place] for image, place in chosen if image in pictures}
    return taken


# figures ------------------------------------------------------------------------------------------

METRICS = ("mse", "fft2d", "psnr", "ssim", "lpips")
"""The five scores in the paper's order of columns."""

TITLES: Mapping[str, str] = {
    "acc": "Acc.",
    "mse": "MSE",
    "fft2d": "FFT2D",
    "psnr": "PSNR",
    "ssim": "SSIM",
    "lpips": "LPIPS",
}

ARROWS: Mapping[str, str] = {
    "acc": arrow(True),
    **{name: arrow(SCORES[f"{name}/paper"].higher_is_better) for name in METRICS},
}
"""Which direction is better for the model owner: a bad reconstruction is good privacy."""

THRESHOLDS = (20, 30)
"""PSNR in dB from which an image counts as recovered: at 20 its content is usually recognisable, at
30 also its details."""


MEANS = (
    *("mask_precision", "mask_recall", "visible_psnr", "mean_visible_psnr", "masked_psnr"),
    *("oracle_permutation_psnr", "jigsaw_direct", "jigsaw_neighbour", "unshuffled_uploads"),
    *("always_masked", "open_directions", "lattice_found"),
)
MEDIANS = ("gradient_residual", "steps", "seconds")
"""Diagnostics that only some attacks and settings have: table.csv has the means and medians of
those that occur."""


@once
def summary(line: Line, metric: str, variant: str) -> Summary:
    """Summary of one metric of one line; a photograph counts once, however many crops it has."""
    values, statuses, groups = line.column(metric, variant)
    return summarise(values.to_numpy(), statuses, groups=groups, within=range_of(metric))


@once
def accuracies(line: Line) -> tuple[Summary, Summary]:
    """Shares of images that the model took for what they are: as trained, and as the attack met
    it."""
    intact, altered = (summary(line, "top1", which) for which in ("intact", "altered"))
    return intact.as_share(), altered.as_share()


def mean_of(line: Line, metric: str, variant: str = DIAGNOSTIC) -> float:
    """Mean of min(value, cap) over the images that have one; NaN where none has."""
    values = line.scored(metric, variant).to_numpy()
    return float(np.minimum(values, range_of(metric)[1]).mean()) if len(values) else math.nan


@once
def capped_median(line: Line, metric: str = "psnr", variant: str = "standard") -> float:
    """Median of min(value, cap) over the images that were scored; NaN where there is none."""
    values = line.scored(metric, variant).to_numpy()
    return float(np.median(np.minimum(values, range_of(metric)[1]))) if len(values) else math.nan


@once
def success_share(line: Line, threshold: float, variant: str = "standard") -> Share:
    """How many of the images an attacker was given are at or above `threshold` dB: those that the
    attack failed on or does not support count as not recovered."""
    return share_of_tried(line, int((line.scored("psnr", variant) >= threshold).sum()))


@once
def exact_share(line: Line) -> Share:
    """How many of the images an attacker was given came back equal in every 8-bit value."""
    return share_of_tried(line, len(line.exact_images))


def share_of_tried(line: Line, count: int) -> Share:
    """So many of the images that an attacker was given: all but those that were not scored."""
    _, statuses, photographs = line.column("psnr", "standard")
    tried = ~are(statuses, "unscored")
    trials = None if photographs is None else independent_trials(photographs[tried])
    return Share(count, int(tried.sum()), trials)


def _beside(line: Line, diagnostic: str) -> NDArray[np.float64]:
    """PSNR (standard) and a diagnostic of the images that have both: (2, n)."""
    columns = ["psnr.standard", f"{diagnostic}.{DIAGNOSTIC}"]
    known = line.frame.reindex(columns=columns).dropna()
    return known.to_numpy(np.float64).T


PSNR: Key = ("psnr", "standard")


def shared_scores(first: Line, second: Line) -> pd.DataFrame:
    """PSNR (standard) `first` and `second` of the images that both lines scored, by their ids.

    shared_scores(april, ours)["first"].mean()     # April's PSNR where ours was scored too
    """
    sides = {"first": first.scored(*PSNR), "second": second.scored(*PSNR)}
    return pd.concat(sides, axis=1, join="inner")


# the table of all lines ---------------------------------------------------------------------------

VARIANTS = ("paper", "standard")

IDENTITY = ("model", "architecture", "setting", "gamma", "trained_gamma", "attack", "dtype")

NOT_COLUMNS = frozenset(
    (
        *(*IDENTITY, "run_id", "cell_key", "seed", "status", "reason", "notes", "paper_row"),
        *("checkpoint", "checkpoint_sha", "victim", "data", "data_is_papers", "labels"),
        *("true_labels", "mean", "std", "resize", "interpolation", "planned_images", "role"),
    )
)
"""Cell entries that have a column of their own already, or a place in the notes."""


@dataclass(frozen=True)
class Table:
    """One variant of the metrics for every line."""

    variant: str
    frame: pd.DataFrame  # one row per line
    varying: tuple[str, ...]  # the further cell entries in which the lines differ


def build_tables(lines: Sequence[Line], derived: Sequence[DerivedLine] = ()) -> tuple[Table, ...]:
    """The tables of all VARIANTS."""
    varying = varying_columns(lines)
    rows: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    measures = [
        name for name in (*MEANS, *MEDIANS) if any(x.count(name, DIAGNOSTIC) for x in lines)
    ]
    for line in (*lines, *derived):
        known, bounds, measured = _facts(line, varying), _bounds(line), _measured(line, measures)
        for variant, of_variant in rows.items():
            scores, shares = _scores(line, variant)
            of_variant.append({**known, **scores, **bounds, **shares, **measured})
    return tuple(Table(v, pd.DataFrame.from_records(of), varying) for v, of in rows.items())


def varying_columns(lines: Sequence[Line]) -> tuple[str, ...]:
    """Scalar cell entries (seed first) in which lines differ and that have no column otherwise.

    Failed cells are ignored, since they may have failed before their entries were known. Controls
    are ignored for the entries of attacks: they have no options and see no upload.
    """
    described = [line for line in lines if line.cell.status != "failed"]
    cells = [line.cell.columns for line in described]
    attacks = [line.cell.columns for line in described if line.cell.role == "attack"]
    keys = dict.fromkeys(key for cell in cells for key in cell if key not in NOT_COLUMNS)
    if all(line.cell.known_as == line.attack for line in described):
        keys.pop("attack_name", None)  # it would repeat the labels
    return tuple(
        key
        for key in ["seed", *keys]
        if len({fact(cell, key) for cell in (attacks if key in ATTACK_FACTS else cells)}) > 1
    )


def _facts(line: Line, varying: Sequence[str]) -> dict[str, Any]:
    """What a line is; of the attack's facts, derived lines have only the number of uploads and
    controls have none."""
    foreign = set() if line.cell.role == "attack" else {*ATTACK_FACTS}
    if isinstance(line, DerivedLine):
        foreign.remove("uploads")
    cell = line.cell.columns
    return {
        **{"line": line.number, "run": line.run, "run_id": line.cell.run_id},
        **{key: cell.get(key) for key in IDENTITY},
        "seed": line.cell.seed,
        **{key: None if key in foreign else fact(cell, key) for key in varying if key != "seed"},
        **{"status": line.status, "reason": line.reason},
    }


def _scores(line: Line, variant: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Counts of images by PSNR or else the first other score, accuracy in percent, of the model as
    trained and of the one that the attack met, and the five scores. Then the shares of images from
    a PSNR on."""
    computed = (metric for metric in ("psnr", *METRICS) if (metric, variant) in line.keys)
    counts = summary(line, next(computed, "psnr"), variant).counts
    intact, altered = accuracies(line)
    values: dict[str, Any] = {"n": counts.ok, "n_failed": counts.failed}
    values |= {"n_unsupported": counts.unsupported, "n_unscored": counts.unscored}
    values |= {"n_not_run": line.not_run, **_columns("acc", intact, scale=100)}
    values |= _columns("acc_altered", altered, scale=100)
    for metric in METRICS:
        values |= _columns(metric, summary(line, metric, variant))
        if metric == "psnr":
            values["psnr_median"] = capped_median(line, metric, variant)
            values["psnr_exact"] = len(line.exact_images)
            values["psnr_at_20"] = success_share(line, 20, variant).count
    shares = {x: success_share(line, x, variant).percent for x in THRESHOLDS}
    return values, {f"psnr_from_{limit}": percent for limit, percent in shares.items()}


def _columns(name: str, score: Summary, *, scale: float = 1) -> dict[str, Any]:
    """The columns of one score."""
    figures = {"mean": score.mean, "lo": score.low, "hi": score.high}
    columns = {f"{name}_{part}": scale * value for part, value in figures.items()}
    return {**columns, f"{name}_n": score.n}


def _bounds(line: Line) -> dict[str, Any]:
    """What bounds a line: the grey, the ceiling where it inverts the embedding by minimum norm, and
    the linear system of its attack."""
    reached, grey = _beside(line, "grey_psnr")
    bounded = line.cell.role == "ceiling" or "rank" in line.traits
    under, ceiling = np.minimum(_beside(line, "ceiling_psnr"), PSNR_CAP)
    distance = float(np.mean(ceiling - under)) if bounded and len(ceiling) else math.nan
    medians = ("cond_a", "rank_a", "nonzero_rows", "zero_rows", "shuffled_patches")
    empty = line.scored("empty_mask", DIAGNOSTIC)
    below = 100 * float((reached < grey).mean()) if len(grey) else math.nan
    return {
        "grey_mean": mean_of(line, "grey_psnr"),
        **{"below_grey": below, "below_grey_n": len(grey)},
        "in_place_mean": mean_of(line, "oracle_in_place_psnr"),
        "ceiling_mean": mean_of(line, "ceiling_psnr") if bounded else math.nan,
        "ceiling_n": line.count("ceiling_psnr", DIAGNOSTIC) if bounded else 0,
        "ceiling_distance": distance,
        **{f"{name}_median": capped_median(line, name, DIAGNOSTIC) for name in medians},
        "empty_masks": int((empty > 0).sum()) if len(empty) else None,
        "role": line.cell.role,
        "chosen": json.dumps(line.counts) if isinstance(line, DerivedLine) else None,
    }


def _measured(line: Line, measures: Sequence[str]) -> dict[str, Any]:
    """The figures of the measures, then of how many images each is."""
    figures = {f"{name}_mean": mean_of(line, name) for name in measures if name in MEANS}
    medians = {name: capped_median(line, name, DIAGNOSTIC) for name in measures if name in MEDIANS}
    figures |= {f"{name}_median": value for name, value in medians.items()}
    return figures | {f"{name}_n": line.count(name, DIAGNOSTIC) for name in measures}
