"""Lines derived from others: per image the best attack, or the one an attacker would take.

A group is all lines that attack the same target. For each image of a group, with its attacks a in
the order of the cells,

    worst_case        argmax_a PSNR_a (standard)     needs the truth: an upper bound of any selector
    attackers_choice  argmin_a gradient_residual_a   needs no truth

is chosen, and every metric of the image comes from the chosen attack's reconstruction. Controls
are never candidates. Attacks on a client with an altered block 0 are candidates only where the
model was trained with that block, and where patches are masked there is no worst case without an
attack that knows MJP or an exact picture. Attacks that failed on an image are not among its
candidates; an image without candidates has a reason in place of scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attacks import traits_of
from mjp_privacy.experiment.cell_facts import AttackFacts, OutcomeFacts
from mjp_privacy.metrics.coded import Coded, Images
from mjp_privacy.report.lines import Line, exact_images, target_of
from mjp_privacy.report.published import grouped, which
from mjp_privacy.report.rows import Column, Scores, joined


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

    Where a client masks patches, that is an attack which knows MJP and made a picture, or any that
    got an exact one. Without one there is no worst case: what an attack made for another client
    gets says nothing about this one.
    single: only attacks that use one upload.
    """
    trained = [line for line in attacks if meets_trained_model(line)]
    trained = [line for line in trained if not single or line.uploads == 1]
    masked = any(line.cell.gamma and line.some_above_zero("zero_rows") for line in attacks)
    known = any(
        exact_images(line)
        or ("masks" in traits_of(line.cell.attack.known_as) and reconstructs(line))
        for line in trained
    )
    return trained if known or not masked else []


def choose(members: Sequence[Line], rule: Rule) -> Choice:
    """The best member for each image; among equals the first in the order of the cells."""
    distinct = {line.images for line in members}
    images = (
        members[0].images if len(distinct) == 1 else Images.of(chain(*(i.ids for i in distinct)))
    )
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


OF_IMAGE = frozenset(
    (
        *("ceiling_psnr", "grey_psnr", "oracle_in_place_psnr", "mean_visible_psnr"),
        *("shuffled_patches", "moved_patches", "empty_mask"),
    )
)
"""Diagnostics that are the same for every attack on an image."""

OF_RECONSTRUCTION = frozenset(("visible_psnr", "masked_psnr", "gradient_residual"))
"""Diagnostics that score a reconstruction; all others describe how the attack worked."""

REASONS_NAMED = 30

NO_RESIDUAL = "no attack that reconstructed this image has a gradient residual to choose by"


class Choice(Mapping[str, Line]):
    """The line that was chosen for each image, by its id; images without one are left out."""

    def __init__(
        self, images: Images, members: Sequence[Line], member: NDArray[np.integer]
    ) -> None:
        self.images = images
        self.members = members
        self.member = member
        """(n,) the chosen member of each image by its place among the members; -1 for none."""

    def __getitem__(self, image_id: str) -> Line:
        member = int(self.member[self.images.place[image_id]])
        if member < 0:
            raise KeyError(image_id)
        return self.members[member]

    def __iter__(self) -> Iterator[str]:
        return (self.images.ids[at] for at in np.flatnonzero(self.member >= 0).tolist())

    def __len__(self) -> int:
        return int((self.member >= 0).sum())

    @property
    def counts(self) -> list[int]:
        """How many images each member was chosen for."""
        chosen = self.member[self.member >= 0]
        return [int(n) for n in np.bincount(chosen, minlength=len(self.members))]


class ChosenScores(Scores):
    """The rows of the chosen reconstructions, as a table of scores.

    Diagnostics of the image come from the chosen line too, or else from the first that has them.
    """

    codes = None
    unreadable: Mapping[str, str] = {}

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.images = choice.images
        keys = dict.fromkeys(key for line in choice.members for key in line.table.keys)
        self.keys = [key for key in keys if _kind(*key)]

    def column(self, metric: str, variant: str) -> Column | None:
        """The rows of one metric; None where it was not computed."""
        kind = _kind(metric, variant)
        columns = [
            column._replace(at=self.images.places(line.images.ids)[column.at])
            for line in (self.choice.members if kind else ())
            for column in [line.column(metric, variant)]
        ]
        member, open_images = self.choice.member, np.ones(len(self.images), dtype=bool)
        parts = []
        for only_scored, only_chosen in PREFERRED[kind]:
            for number, column in enumerate(columns):
                taken = open_images[column.at]
                if only_chosen:
                    taken &= member[column.at] == number
                if only_scored:
                    taken &= column.statuses.equal("ok")
                parts.append(column.chosen(taken))
                open_images[column.at[taken]] = False
        if kind == "score" and self._unchosen:
            parts.append(self._without_choice(columns))
        return joined([part for part in parts if len(part.at)])

    @cached_property
    def photographs(self) -> Coded | None:  # type: ignore[override]
        """The photograph that each image was cut from, as the first member with it says."""
        tables = [line.table for line in self.choice.members]
        if all(table.photographs is None for table in tables):
            return None
        found = dict(zip(self.images.ids, self.images.ids, strict=True))
        for table in reversed(tables):
            photographs = table.photographs.tolist() if table.photographs else table.images.ids
            found |= zip(table.images.ids, photographs, strict=True)
        return Coded.of([*found.values()])

    def _without_choice(self, columns: Sequence[Column]) -> Column:
        """Rows that say why no member was chosen for an image."""
        with_rows = np.unique(np.concatenate([column.at for column in columns]))
        at = with_rows[self.choice.member[with_rows] < 0].astype(np.int32)
        said = [self._unchosen[place] for place in at.tolist()]
        statuses, reasons = (Coded.of([pair[part] for pair in said]) for part in (0, 1))
        return Column(at, np.full(len(at), np.nan), statuses, reasons)

    @cached_property
    def _unchosen(self) -> dict[int, tuple[str, str]]:
        """(status, reason) of each image without a choice, as its members' PSNR say them; a NaN
        counts as failed."""
        without = self.choice.member < 0
        said: list[dict[int, tuple[str, str]]] = []
        for line in self.choice.members:
            column = line.column("psnr", "standard")
            column = column._replace(at=self.images.places(line.images.ids)[column.at])
            column = column.chosen(without[column.at])
            pairs = zip(column.statuses.tolist(), column.reasons.tolist(), strict=True)
            said.append(dict(zip(column.at.tolist(), pairs, strict=True)))
            broken = column.at[column.statuses.equal("ok") & np.isnan(column.values)]
            said[-1] |= dict.fromkeys(broken.tolist(), ("failed", "its PSNR is not a number"))
        reason = cache(partial(_reason, self.choice.members))
        places = np.flatnonzero(without).tolist()
        return {at: reason(tuple(of_line.get(at) for of_line in said)) for at in places}


PREFERRED: Mapping[str, Sequence[tuple[bool, bool]]] = {
    **{"score": ((False, True),), "reconstruction": ((False, True),), "": ()},
    "image": ((True, True), (True, False), (False, True), (False, False)),
}
"""Which rows stand for an image, by kind of metric, the first before the next: whether only those
with a score, and whether only those of the chosen line."""


def _kind(metric: str, variant: str) -> str:
    """Whether a metric scores the picture, the reconstruction without truth, or the image; "" for
    what describes how an attack worked."""
    if variant in ("paper", "standard"):
        return "score"
    if variant == "diagnostic" and metric in OF_RECONSTRUCTION:
        return "reconstruction"
    of_image = variant == "diagnostic" and metric in OF_IMAGE
    return "image" if of_image or (metric, variant) == ("top1", "intact") else ""


def _reason(members: Sequence[Line], outcomes: Sequence[tuple[str, str] | None]) -> tuple[str, str]:
    """(status, reason) of an image for which no member was chosen."""
    by_member = zip(members, outcomes, strict=True)
    tried = [(line, *outcome) for line, outcome in by_member if outcome is not None]
    statuses = {status for _, status, _ in tried}
    if "ok" in statuses:
        return "unsupported", NO_RESIDUAL
    status = next((s for s in ("failed", "unscored") if s in statuses), "unsupported")
    texts = [f"{line.attack} {state}: {why or 'no reason given'}" for line, state, why in tried]
    return status, "; ".join(texts)


# without the private images -----------------------------------------------------------------------

PREFERENCE = (
    *("plain_step", "shared_picture", "multi_round", "batch_lattice", "layer_span"),
    *("pixel_lattice", "masked_span", "batch_span", "span_matching", "patch_gradient"),
    *("patch_jigsaw", "patch_lattice", "patch_prior", "token_span", "inverting_gradients"),
    *("gradvit", "april_optimization"),
    *("april_prior", "april_unk_aware", "april"),
)
"""The ladder from its top: which attack to trust first where no residual tells. It is the order of
what they reach on one upload or more in results/ladder, not a measurement of the upload at hand."""


def has_truth(line: Line) -> bool:
    """Whether the private images behind this line were given, as its rows and pictures tell.

    False where pictures are stored but none that they could be compared with. A line without
    pictures (a control, a refused attack, one that makes none) says nothing: True. Ask the other
    lines of its group.
    """
    if isinstance(line, DerivedLine):
        return all(has_truth(member) for member in line.members)
    if line.column("psnr", "standard").statuses.equal("ok").any():
        return True
    stored = picture_ids(line)
    tensors = line.reconstruction(stored[0]) if stored else None
    return tensors is None or "target" in tensors


def picture_ids(line: Line) -> list[str]:
    """The images for which a reconstruction is stored, scored or not, sorted."""
    if isinstance(line, DerivedLine):
        stored = [(member, picture_ids(member)) for member in line.taken]
        return sorted(i for member, ids in stored for i in ids if line.chosen.get(i) is member)
    return sorted(line.store.pictured(line.run_id))


def attackers_choice_by_image(lines: Sequence[Line]) -> dict[str, Line]:
    """The attack that somebody without the truth would take for each image that has a picture.

    attackers_choice_by_image(group.attacks)["upload_7/0"].attack     "pixel_lattice"

    That is the one with the smallest gradient residual; among equals the first line. For an image
    without any residual (the labels are unknown, or the gradient was not sent) it is the highest
    rung of the ladder that made a picture, in the order PREFERENCE: a habit, not a choice that the
    upload supports. Other attacks come after those, one with more uploads before one with fewer.
    Attacks that met a client with an altered block 0 count only where no other made a picture.
    """
    attacks = [line for line in lines if line.role == "attack"]
    trained = [line for line in attacks if meets_trained_model(line)]
    altered = [line for line in attacks if not meets_trained_model(line)]
    return {**_choice(altered), **_choice(trained)}


def _choice(attacks: Sequence[Line]) -> dict[str, Line]:
    by_habit: dict[str, Line] = {}
    for line in sorted(attacks, key=_rank):
        for image in picture_ids(line):
            by_habit.setdefault(image, line)
    by_residual = choose(attacks, ATTACKERS_CHOICE)
    return by_habit | {i: line for i, line in by_residual.items() if i in by_habit}


def _rank(line: Line) -> tuple[int, int]:
    """The place of an attack in the order of PREFERENCE; lower is trusted more."""
    name = line.cell.attack.known_as
    place = PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE)
    return place, -line.uploads


# in words ----------------------------------------------------------------------------------------


def choice_notes(lines: Sequence[Line], derived: Sequence[DerivedLine]) -> list[str]:
    """Notes on what each derived line is made of, and on which lines are controls."""
    notes = [_sentence(line) for line in derived]
    notes += grouped([*lines, *derived], _missing_images)
    controls = [line for line in lines if line.role in ("floor", "ceiling")]
    if controls:
        notes.append(
            f"Controls ({which(controls, lines)}) are not attacks: a floor shows what a score is "
            "worth, a ceiling what an attack can reach. They may use the private images, so they "
            "are not compared with published figures, and no derived line chooses them."
        )
    return notes


def _sentence(line: DerivedLine) -> str:
    how = (
        "an oracle selection that takes, for each image, the attack with the highest PSNR "
        "(standard); an upper bound on what any selector can reach"
        if line.role == WORST_CASE.name
        else "for each image the attack with the smallest gradient residual; the private images "
        "are not used for the choice"
    )
    counts = ", ".join(f"{name} {count}" for name, count in line.counts.items())
    parts = [
        f"Line {line.number}, {line.attack}: {how}. A choice was made for {len(line.chosen)} "
        f"images: {counts}."
    ]
    if line.uploads > 1:
        parts.append(f"Its attacks may use up to {line.uploads} uploads of one image.")
    if incomplete := _incomplete_choices(line):
        lacking = "score" if line.role == WORST_CASE.name else "residual"
        parts.append(
            f"For {incomplete} of these images not every attack could be compared: at least one "
            f"has no {lacking}."
        )
    return " ".join(parts)


def _incomplete_choices(line: DerivedLine) -> int:
    """On how many images at least one member has no value to be chosen by."""
    (rule,) = (rule for rule in RULES if rule.name == line.role)
    images = line.chosen.images
    compared = np.zeros(len(images), dtype=int)
    for member in line.members:
        column = member.column(rule.metric, rule.variant)
        compared[images.places(member.images.ids)[column.at[column.scored]]] += 1
    return int(((line.chosen.member >= 0) & (compared < len(line.members))).sum())


def _missing_images(line: Line) -> list[str]:
    """Why images of a derived line have no reconstruction; other lines have their own section."""
    if not isinstance(line, DerivedLine):
        return []
    column = line.column("psnr", "standard")
    column = column.chosen(~column.statuses.equal("ok"))
    reasons = Counter(zip(column.statuses.tolist(), column.reasons.tolist(), strict=True))
    return [
        f"{'1 image' if count == 1 else f'{count} images'} {status}: {reason}"
        for (status, reason), count in reasons.most_common(REASONS_NAMED)
    ]
