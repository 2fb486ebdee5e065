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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from torch import Tensor

from attacks import traits_of
from mjp_privacy.experiment.cell_facts import AttackFacts, OutcomeFacts
from mjp_privacy.report.cell_columns import target_of
from mjp_privacy.report.chosen_scores import Choice, ChosenScores
from mjp_privacy.report.line import Line
from mjp_privacy.report.scores import JoinedTable


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
    chosen: Choice  # by image_id; images without a candidate are not in it

    @property
    def counts(self) -> dict[str, int]:
        """How many images each member was chosen for, by its label (`april, line 3` if shared)."""
        labels = [line.cell.attack.title for line in self.members]
        return {
            label if labels.count(label) == 1 else f"{label}, line {line.number}": count
            for label, line, count in zip(labels, self.members, self.chosen.counts, strict=True)
        }

    @property
    def taken(self) -> tuple[Line, ...]:
        """The members that were chosen for some image."""
        pairs = zip(self.members, self.chosen.counts, strict=True)
        return tuple(member for member, count in pairs if count)

    @property
    def rows(self) -> pd.DataFrame:
        """The scores of the chosen reconstructions; `attack` and `run_id` name the chosen line."""
        parts = [
            self.scores(metric, variant).assign(metric=metric, variant=variant)
            for metric, variant in self.table.keys
        ]
        rows = pd.concat(parts, ignore_index=True)
        chosen = [self.chosen.get(image) for image in rows["image_id"]]
        rows = rows.assign(
            attack=["" if line is None else line.attack for line in chosen],
            run_id=["" if line is None else line.run_id for line in chosen],
        )
        return rows.sort_values("image_id", kind="stable").reset_index(drop=True)

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
    members = tuple(line for line in adaptive_attacks(attacks) if len(line.images))
    if len(members) < 2:
        return []
    once = adaptive_attacks(attacks, single=True)
    single = tuple(line for line in once if len(line.images))
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
        line.count("psnr", "standard") > 0
        or line.count("gradient_residual", "diagnostic") > 0
        or (len(line.images) > 0 and len(line.store.pictured(line.run_id)) > 0)
    )


def adaptive_attacks(attacks: Sequence[Line], *, single: bool = False) -> Sequence[Line]:
    """The attacks on the trained model, if at least one of them is a match for the client.

    Where a client masks patches, that is an attack which knows MJP and made a picture. Without one
    there is no worst case: what an attack made for another client gets says nothing about this one.
    single: only attacks that use one upload.
    """
    trained = [line for line in attacks if meets_trained_model(line)]
    trained = [line for line in trained if not single or line.uploads == 1]
    masked = any(line.cell.gamma and line.some_above_zero("zero_rows") for line in attacks)
    known = any(
        "masks" in traits_of(line.cell.attack.known_as) and reconstructs(line) for line in trained
    )
    return trained if known or not masked else []


def choose(members: Sequence[Line], rule: Rule) -> Choice:
    """The best member for each image; among equals the first in the order of the cells."""
    images = JoinedTable([line.table for line in members]).images
    best = np.full(len(images), -np.inf)
    member = np.full(len(images), -1, dtype=np.int16)
    for number, line in enumerate(members):
        column = line.column(rule.metric, rule.variant)
        column = column.chosen(column.scored)
        at = images.places(line.images.ids)[column.at]
        merit = rule.sign * column.values
        better = (member[at] < 0) | (merit > best[at])
        best[at[better]], member[at[better]] = merit[better], number
    return Choice(images, tuple(members), member)


def _line(members: tuple[Line, ...], chosen: Choice, rule: Rule, label: str) -> DerivedLine:
    first = members[0]
    uploads = max((line.uploads for line in members if reconstructs(line)), default=1)
    planned = max(line.cell.outcome.planned_images for line in members)
    cell = replace(
        first.cell,
        attack=AttackFacts(title=label, name=label, role=rule.name, uploads=uploads),
        outcome=OutcomeFacts(run_id=f"{label}, {first.run_id}", planned_images=planned),
    )
    return DerivedLine(0, first.run, cell, ChosenScores(chosen), first.store, members, chosen)
