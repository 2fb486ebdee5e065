"""Lines derived from others: per image the best attack, or the one an attacker would take.

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

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from mjp_privacy.experiment.cell_facts import AttackFacts, OutcomeFacts, defaults_of
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.lines import OF_PICTURE, Line

if TYPE_CHECKING:
    from torch import Tensor


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
