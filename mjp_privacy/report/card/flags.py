"""Marks on figures that must not be taken at face value, each with its reason in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from attacks import traits_of
from mjp_privacy.experiment.cell_facts import ClientFacts
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.card.clients import Client
from mjp_privacy.report.lines import Line, not_run
from mjp_privacy.report.unshuffled import unshuffled_images
from mjp_privacy.report.worst_case import DerivedLine, meets_trained_model

DIGITS = {"float32": 24, "float64": 53}
"""Bits of a significand: cond(A) is compared with 2 to this power."""

RESIDUAL_CONVERGED = 0.1
"""An optimising attack whose picture leaves more than this of the gradient has not converged."""


@dataclass(frozen=True)
class Flag:
    """A warning: `mark` is the letter beside a figure, `name` a few words, `text` a sentence."""

    mark: str
    name: str
    text: str


BELOW_FLOOR = Flag(
    "f",
    "below the floor",
    "A picture made without the gradient scores as well: the attack failed, which is no measure of "
    "how well the client is protected.",
)
NOT_ADAPTIVE = Flag(
    "n",
    "no adaptive attack",
    "No attack that knows this client was run with success, so nothing here says what it leaks.",
)
NOT_CONVERGED = Flag(
    "c",
    "not converged",
    "The attack optimises in steps and ended far from the uploaded gradient: more steps or other "
    "starts may give more.",
)
NOISE_IGNORED = Flag(
    "w",
    "noise not modelled",
    "The client adds known errors to its upload, and the attack does not weigh them.",
)
ILL_CONDITIONED = Flag(
    "i",
    "ill-conditioned",
    "cond(A) exceeds what the precision of the gradients resolves on most images: rounding decides "
    "the score, and another machine may give another.",
)
ASSUMES_8_BIT = Flag(
    "p",
    "8-bit pixels assumed",
    "Some of the pictures come from an attack that takes pixels for multiples of 1/255.",
)
UNSHUFFLED = Flag(
    "u",
    "some uploads unshuffled",
    "In some uploads nothing was shuffled, by the client's recipe or because its mask was empty, "
    "and the attacker can see in which.",
)
PARTLY_INAPPLICABLE = Flag(
    "r",
    "not applicable to all",
    "Some attacks or pictures were refused or failed; they count as not recovered in the shares, "
    "and are missing from the mean.",
)
ALTERED_BLOCK = Flag(
    "x",
    "altered client",
    "The attack met a model whose block 0 was altered for it, which no client trains.",
)


UNFINISHED = Flag(
    "z",
    "unfinished",
    "Some attacks have no rows of all pictures, because they were not run yet or their rows are "
    "damaged; what is missing is filled by weaker ones.",
)
UNDECLARED = Flag(
    "e",
    "error not declared",
    "A defence changes the upload and does not say by how much, or cannot know it, so that the "
    "attacks take the upload for better than it is: the client looks safer than it is.",
)
FEWER_ATTACKS = Flag(
    "a",
    "fewer attacks",
    "An attack that scored on another client of this model and setting was not run on this one, so "
    "that the two cannot be compared.",
)


def figure_flags(client: Client, line: Line, floor: pd.Series[float]) -> tuple[Flag, ...]:
    """The flags of what one attacker got, an attack's line or a worst case.

    Controls have none, nor what was not scored. floor: PSNR of the best control by image
    """
    if line.role in ("floor", "ceiling") or not line.count("psnr", "standard"):
        return ()
    checks: tuple[tuple[Flag, Callable[[], bool]], ...] = (
        (BELOW_FLOOR, lambda: _below(line, floor)),
        (ALTERED_BLOCK, lambda: _altered(line)),
        (NOISE_IGNORED, lambda: client.noisy and not all(map(_weighs_noise, _chosen(line)))),
        (NOT_CONVERGED, lambda: _not_converged(line)),
        (ILL_CONDITIONED, lambda: _ill_conditioned(line)),
        (ASSUMES_8_BIT, lambda: any("8 bit" in _traits(member) for member in _chosen(line))),
        (PARTLY_INAPPLICABLE, lambda: _some_not_scored(line)),
        (UNFINISHED, lambda: _unfinished(client, line)),
    )
    return tuple(flag for flag, applies in checks if applies())


def client_flags(client: Client, others: Sequence[Client]) -> tuple[Flag, ...]:
    """The flags that hold for all that was got from a client; `others`: all clients."""
    flags = [] if client.matching else [NOT_ADAPTIVE]
    flags += [FEWER_ATTACKS] if client.matching and fewer_attacks(client, others) else []
    flags += [UNDECLARED] if _occurs(client, "undeclared_error") else []
    plain_share = client.cell.client.plain_share != ClientFacts.plain_share
    unshuffled = plain_share or any(map(unshuffled_images, client.lines))
    return (*flags, *([UNSHUFFLED] if client.cell.gamma and unshuffled else []))


def _occurs(client: Client, diagnostic: str) -> bool:
    """Whether a diagnostic is above 0 on any image of any line."""
    return any(line.some_above_zero(diagnostic) for line in client.lines)


def fewer_attacks(client: Client, others: Sequence[Client]) -> bool:
    """Whether an attack on one upload that scored on a like client was not even tried on this one.

    Alike are clients of one run, model, setting, γ and precision, where both mask or neither does.
    """
    tried = {line.attack for line in client.group.attacks}
    return any(
        line.uploads == 1 and line.attack not in tried
        for other in others
        if _alike(client) == _alike(other)
        for line in other.matching
    )


def _alike(client: Client) -> tuple[object, ...]:
    cell = client.cell
    facts = (cell.model.label, cell.setting, cell.gamma, cell.dtype, cell.client.batch)
    return (*facts, client.lines[0].run, client.masks, cell.client.withhold)


def _below(line: Line, floor: pd.Series[float]) -> bool:
    """Whether the line's mean is below that of the floor on the same images."""
    scored = line.scored("psnr", "standard").clip(upper=PSNR_CAP)
    both = scored.index.intersection(floor.index)
    return len(both) > 0 and float((scored[both] - floor[both]).sum()) < 0


def _unfinished(client: Client, line: Line) -> bool:
    """Whether a planned image has no row, or attacks that compete for the client's pictures have
    not the same images: some were not run yet, or their rows are damaged."""
    rivals = [
        attack
        for attack in client.group.attacks
        if meets_trained_model(attack) and attack.uploads <= max(line.uploads, 1)
    ]
    if line not in (*rivals, *client.group.derived):
        return not_run(line) > 0
    members = line.members if isinstance(line, DerivedLine) else (line,)
    begun = [member for member in (*members, *rivals) if len(member.images)]
    images = {id(member.images) for member in begun}  # equal ones are one object
    return len(images) > 1 or any(map(not_run, (*members, *rivals)))


def _chosen(line: Line) -> tuple[Line, ...]:
    """The attacks whose pictures a line shows: its own, or those that a worst case took."""
    if not isinstance(line, DerivedLine):
        return (line,)
    return line.taken


def _traits(line: Line) -> frozenset[str]:
    return traits_of(line.cell.attack.known_as)


def _weighs_noise(line: Line) -> bool:
    return "noise" in _traits(line)


def _altered(line: Line) -> bool:
    altered = line.cell.attack.victim == "april_block"
    return altered and line.cell.model.first_block != "closed_form"


def _not_converged(line: Line) -> bool:
    searching = [member for member in _chosen(line) if "steps" in _traits(member)]
    residuals = [member.scored("gradient_residual", "diagnostic") for member in searching]
    return any(len(values) and values.median() > RESIDUAL_CONVERGED for values in residuals)


def _ill_conditioned(line: Line) -> bool:
    bits = DIGITS.get(line.cell.dtype)
    bounded = [member for member in _chosen(line) if "rank" in _traits(member)]
    conditions = [member.scored("cond_a", "diagnostic") for member in bounded]
    return bits is not None and any(len(c) and c.median() > 2.0**bits for c in conditions)


def _some_not_scored(line: Line) -> bool:
    return not line.column("psnr", "standard").scored.all()
