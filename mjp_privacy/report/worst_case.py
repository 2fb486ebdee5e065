"""Lines derived from others: per image the best attack, or the one an attacker would take.

A group is all lines that attack the same target. For each image of a group, with its attacks a in
the order of the cells,

    worst_case        argmax_a PSNR_a (standard)     needs the truth: an upper bound of any selector
    attackers_choice  argmin_a gradient_residual_a   needs no truth

is chosen, and every metric of the image comes from the chosen attack's reconstruction. Controls
are never candidates. Attacks on a client with an altered block 0 are candidates only where the
model was trained with that block, and where patches are masked there is no worst case without an
attack that knows MJP. Attacks that failed on an image are not among its candidates; an image
without candidates has a reason in place of scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from torch import Tensor

from attacks import traits_of
from mjp_privacy.experiment.cell_facts import AttackFacts, OutcomeFacts
from mjp_privacy.report.cell_columns import target_of
from mjp_privacy.report.loading import Line

OF_IMAGE = frozenset(
    (
        *("ceiling_psnr", "grey_psnr", "oracle_in_place_psnr", "mean_visible_psnr"),
        *("shuffled_patches", "moved_patches", "empty_mask"),
    )
)
"""Diagnostics that are the same for every attack on an image."""

OF_RECONSTRUCTION = frozenset(("visible_psnr", "masked_psnr", "gradient_residual"))
"""Diagnostics that score a reconstruction; all others describe how the attack worked."""

NO_RESIDUAL = "no attack that reconstructed this image has a gradient residual to choose by"
KEYS = ["image_id", "metric", "variant"]


@dataclass(frozen=True)
class Rule:
    """How a derived line chooses: the attack with the largest sign · value of a metric."""

    name: str
    metric: str
    variant: str
    sign: int


WORST_CASE = Rule("worst_case", "psnr", "standard", 1)
ATTACKERS_CHOICE = Rule("attackers_choice", "gradient_residual", "diagnostic", -1)
RULES = (WORST_CASE, ATTACKERS_CHOICE)


@dataclass(frozen=True)
class DerivedLine(Line):
    """A line that takes each of its images from one of its members."""

    members: tuple[Line, ...]  # the attacks it chose among, in the order of the cells
    chosen: Mapping[str, Line]  # by image_id; images without a candidate are not in it

    @property
    def counts(self) -> dict[str, int]:
        """How many images each member was chosen for, by its label (`april, line 3` if shared)."""
        labels = [line.cell.attack.title for line in self.members]
        numbers = [line.number for line in self.chosen.values()]
        return {
            label if labels.count(label) == 1 else f"{label}, line {line.number}": numbers.count(
                line.number
            )
            for label, line in zip(labels, self.members, strict=True)
        }

    def reconstruction(self, image_id: str) -> dict[str, Tensor] | None:
        """The stored tensors of the line chosen for this image; None where there are none."""
        line = self.chosen.get(image_id)
        return None if line is None else line.reconstruction(image_id)


@dataclass(frozen=True)
class Group:
    """Lines on one target: the attacks, the controls, and what is derived from the attacks."""

    attacks: tuple[Line, ...]
    controls: tuple[Line, ...]
    derived: tuple[DerivedLine, ...] = ()


def reduced_groups(lines: Sequence[Line]) -> list[Group]:
    """Groups in the order of their first line; derived lines are numbered after all others."""
    by_target: dict[object, list[Line]] = {}
    for line in lines:
        by_target.setdefault((line.run, target_of(line.cell)), []).append(line)
    number = max((line.number for line in lines), default=0)
    groups = []
    for on_target in by_target.values():
        attacks = tuple(line for line in on_target if line.role == "attack")
        controls = tuple(line for line in on_target if line.role != "attack")
        derived = tuple(
            replace(line, number=number + i) for i, line in enumerate(derive(attacks), 1)
        )
        number += len(derived)
        groups.append(Group(attacks, controls, derived))
    return groups


def derived_lines(groups: Sequence[Group]) -> list[DerivedLine]:
    """The derived lines of all groups, in the order of their numbers."""
    return [line for group in groups for line in group.derived]


def derive(attacks: Sequence[Line]) -> list[DerivedLine]:
    """The derived lines of one group, all numbered 0; none with fewer than two attacks.

    Where some attacks use several uploads there are two lines for each rule: one over the attacks
    that use a single upload, one over all of them. An attack that was refused or failed on every
    image uses none.
    """
    members = tuple(line for line in adaptive_attacks(attacks) if len(line.rows))
    if len(members) < 2:
        return []
    once = adaptive_attacks(attacks, single=True)
    single = tuple(line for line in once if len(line.rows))
    several = any(line.uploads > 1 and reconstructs(line) for line in members)
    scopes = [(single, "1 upload")] if single else []
    scopes += [(members, "any number of uploads")] if several else []
    derived = []
    for rule in RULES:
        for candidates, scope in scopes:
            chosen = choose(candidates, rule)
            if chosen or rule is WORST_CASE:  # without stored residuals none can be chosen
                derived.append(_line(candidates, chosen, rule, f"{rule.name}, {scope}"))
    return derived


def meets_trained_model(line: Line) -> bool:
    """Whether the attack met the model that a client trains: not one whose block 0 was altered for
    the attack, unless the model was trained with that block."""
    return line.cell.attack.victim != "april_block" or line.cell.model.first_block == "closed_form"


def reconstructs(line: Line) -> bool:
    """Whether the line's attack made a picture: scored, with a residual, or stored."""
    return (
        len(line.scored("psnr", "standard")) > 0
        or len(line.scored("gradient_residual", "diagnostic")) > 0
        or (len(line.rows) > 0 and len(line.store.reconstructed(line.run_id)) > 0)
    )


def adaptive_attacks(attacks: Sequence[Line], *, single: bool = False) -> Sequence[Line]:
    """The attacks on the trained model, if at least one of them is a match for the client.

    Where a client masks patches, that is an attack which knows MJP and made a picture. Without one
    there is no worst case: what an attack made for another client gets says nothing about this one.
    single: only attacks that use one upload.
    """
    trained = [line for line in attacks if meets_trained_model(line)]
    trained = [line for line in trained if not single or line.uploads == 1]
    masked = any(
        line.cell.gamma and (line.scored("zero_rows", "diagnostic") > 0).any() for line in attacks
    )
    known = any(
        "masks" in traits_of(line.cell.attack.known_as) and reconstructs(line) for line in trained
    )
    return trained if known or not masked else []


def choose(members: Sequence[Line], rule: Rule) -> dict[str, Line]:
    """The best member for each image; among equals the first in the order of the cells."""
    best: dict[str, tuple[float, Line]] = {}
    for line in members:
        for image_id, value in line.scored(rule.metric, rule.variant).items():
            merit = rule.sign * float(value)
            if str(image_id) not in best or merit > best[str(image_id)][0]:
                best[str(image_id)] = merit, line
    return {image_id: line for image_id, (_, line) in best.items()}


def _line(
    members: tuple[Line, ...], chosen: Mapping[str, Line], rule: Rule, label: str
) -> DerivedLine:
    first = members[0]
    uploads = max((line.uploads for line in members if reconstructs(line)), default=1)
    planned = max(line.cell.outcome.planned_images for line in members)
    cell = replace(
        first.cell,
        attack=AttackFacts(title=label, name=label, role=rule.name, uploads=uploads),
        outcome=OutcomeFacts(run_id=f"{label}, {first.run_id}", planned_images=planned),
    )
    rows = _rows(members, chosen)
    return DerivedLine(0, first.run, cell, rows, first.store, members, chosen)


# rows ---------------------------------------------------------------------------------------------


def _rows(members: Sequence[Line], chosen: Mapping[str, Line]) -> pd.DataFrame:
    """The rows of the chosen reconstructions; `attack` and `run_id` name the chosen line.

    Diagnostics of the image come from the chosen line too, or else from the first that has them.
    """
    stacked = _stacked([line.rows.assign(_member=line.number) for line in members])
    of_choice = stacked["image_id"].astype(str).map({i: line.number for i, line in chosen.items()})
    taken = stacked["_member"] == of_choice
    metric, variant = stacked["metric"], stacked["variant"]
    score = variant.isin(["paper", "standard"])
    reconstruction = score | ((variant == "diagnostic") & metric.isin(OF_RECONSTRUCTION))
    image = ((variant == "diagnostic") & metric.isin(OF_IMAGE)) | (
        (metric == "top1") & (variant == "intact")
    )
    # rows with a value first, then the chosen line's; lexsort keeps the order of the cells
    order = np.lexsort((~taken, stacked["status"] != "ok"))
    parts = [
        stacked[taken & reconstruction],
        _without_choice(members, stacked[of_choice.isna() & score]),
        stacked.iloc[order][image.iloc[order]].drop_duplicates(KEYS),
    ]
    joined = _stacked(parts)
    rows = joined.sort_values("image_id", kind="stable").drop(columns="_member")
    return rows.reset_index(drop=True)


def _stacked(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The frames below one another; a column without any value has no say in the column's type."""
    columns = dict.fromkeys(name for frame in frames for name in frame)
    known = [frame.dropna(axis="columns", how="all") for frame in frames if len(frame)]
    return pd.concat(known, ignore_index=True).reindex(columns=list(columns))


def _without_choice(members: Sequence[Line], rows: pd.DataFrame) -> pd.DataFrame:
    """Rows that say why no member was chosen for an image, one for each score."""
    rows = rows.drop_duplicates(KEYS)
    if rows.empty:
        return rows
    outcomes = [_outcomes(line) for line in members]
    reasons = {image: _reason(members, outcomes, str(image)) for image in rows["image_id"].unique()}
    status, reason = zip(*(reasons[image] for image in rows["image_id"]), strict=True)
    return rows.assign(value=np.nan, status=status, reason=reason, attack="", run_id="")


def _outcomes(line: Line) -> dict[str, tuple[str, str]]:
    """(status, reason) of a line's PSNR by image; a NaN counts as failed."""
    rows = line.scores("psnr", "standard")
    broken = (rows["status"] == "ok") & rows["value"].isna()
    rows = rows.assign(
        status=rows["status"].mask(broken, "failed"),
        reason=rows["reason"].mask(broken, "its PSNR is not a number"),
    )
    pairs = zip(rows["status"].astype(str), rows["reason"].fillna("").astype(str), strict=True)
    return dict(zip(rows["image_id"].astype(str), pairs, strict=True))


def _reason(
    members: Sequence[Line], outcomes: Sequence[Mapping[str, tuple[str, str]]], image_id: str
) -> tuple[str, str]:
    """(status, reason) of an image for which no member was chosen."""
    by_member = zip(members, outcomes, strict=True)
    tried = [(line, *outcome[image_id]) for line, outcome in by_member if image_id in outcome]
    statuses = {status for _, status, _ in tried}
    if "ok" in statuses:
        return "unsupported", NO_RESIDUAL
    status = next((s for s in ("failed", "unscored") if s in statuses), "unsupported")
    texts = [f"{line.attack} {state}: {why or 'no reason given'}" for line, state, why in tried]
    return status, "; ".join(texts)
