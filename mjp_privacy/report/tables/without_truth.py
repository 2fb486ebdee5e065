"""Lines whose private images nobody gave: their pictures, their residual, the attacker's choice.

Uploads that somebody recorded elsewhere come without the images they were made of. Their rows are
`unscored`, yet the reconstructions are stored, and what an attacker goes by is known: how well each
one explains the upload (`gradient_residual`). A report shows that in place of scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from mjp_privacy.report.loading import Line
from mjp_privacy.report.tables.text import TextTable, number
from mjp_privacy.report.worst_case import (
    ATTACKERS_CHOICE,
    DerivedLine,
    Group,
    choose,
    meets_trained_model,
)

PREFERENCE = (
    *("plain_step", "shared_picture", "multi_round", "batch_lattice", "layer_span"),
    *("pixel_lattice", "masked_span", "batch_span", "span_matching", "patch_gradient"),
    *("patch_jigsaw", "patch_prior", "token_span", "inverting_gradients", "gradvit"),
    "april_optimization",
    *("april_prior", "april_unk_aware", "april"),
)
"""The ladder from its top: which attack to trust first where no residual tells. It is the order of
what they reach on one upload or more in results/ladder, not a measurement of the upload at hand."""

TITLE = "Uploads without their private images"
CAPTION = (
    "No score is possible here. Gradient residual: ‖gradient of the picture − upload‖ / ‖upload‖ "
    "over the patch embedding, median [quartiles] over the pictures; 0 explains the upload wholly, "
    "a picture without any gradient gets 1. Chosen: for how many pictures the attacker, who sees "
    "the residual and not the truth, would take this attack. A small residual is no proof of a "
    "good picture."
)
HEADER = ("client", "attack", "pictures", "gradient residual", "chosen")


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


def groups_without_truth(groups: Sequence[Group]) -> list[Group]:
    """The groups in which some attack's pictures have nothing to be compared with."""
    return [g for g in groups if not all(has_truth(line) for line in g.attacks)]


def residual_table(
    groups: Sequence[Group], client_of: Callable[[Group], str] | None = None
) -> TextTable | None:
    """What stands in place of scores for groups without truth; None if every group has it.

    client_of: what the report calls a group's client; None: its model and setting
    """
    rows = [
        (client_of(group) if client_of else _client(group), *cells)
        for group in groups_without_truth(groups)
        for cells in _rows(group)
    ]
    return TextTable(TITLE, CAPTION, HEADER, tuple(rows), "llrrr") if rows else None


def _client(group: Group) -> str:
    cell = group.attacks[0].cell
    return f"{cell.model.label} ({cell.setting})"


def _rows(group: Group) -> list[tuple[str, ...]]:
    """Attack, number of pictures, residual and number of choices, for attacks with pictures."""
    choices = Counter(line.number for line in attackers_choice_by_image(group.attacks).values())
    with_pictures = [(line, len(picture_ids(line))) for line in group.attacks]
    return [
        (line.title, str(count), _residual(line), f"{choices[line.number]}")
        for line, count in with_pictures
        if count
    ]


def _residual(line: Line) -> str:
    """`median [first quartile, third quartile]`, with its n where that is not the pictures'."""
    values = line.scored("gradient_residual", "diagnostic")
    if values.empty:
        return "unknown: no labels or no gradient"
    low, median, high = (number(float(values.quantile(q)), 4) for q in (0.25, 0.5, 0.75))
    return f"{median} [{low}, {high}]"
