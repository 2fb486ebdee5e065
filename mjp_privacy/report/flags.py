"""Flags: footnotes of one figure or client on the card, each a row of a table: its name, its
sentence, when it holds; and the attacks that were not tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attacks import ATTACKS, lacks_parts, traits_of
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.metrics.statistics import PSNR_CAP, are
from mjp_privacy.report.clients import Client, same_kind
from mjp_privacy.report.figures import PSNR, DerivedLine
from mjp_privacy.report.lines import DIAGNOSTIC, Line, once
from mjp_privacy.uploads.checks import MISNORMALISED

RESOLVED = {"float32": 2.0**24, "float64": 2.0**53}
"""The largest cond(A) that a significand of so many bits resolves."""

RESIDUAL_CONVERGED = 0.1
"""An optimising attack whose picture leaves more than this of the gradient has not converged."""


@dataclass(frozen=True)
class Flag:
    """A warning: `name` in a few words, `text` as a sentence, `applies` says whether it holds for a
    client and a line of it; that of a client gets its first line."""

    key: str
    name: str
    text: str
    applies: Callable[[Client, Line], bool] = field(repr=False, compare=False)


@once
def figure_flags(client: Client, line: Line) -> tuple[Flag, ...]:
    """The flags of what one attacker got, an attack's line or a worst case; controls have none, nor
    what was not scored."""
    if line.cell.role in ("floor", "ceiling") or not line.count(*PSNR):
        return ()
    return tuple(flag for flag in OF_FIGURES if flag.applies(client, line))


def client_flags(client: Client) -> tuple[Flag, ...]:
    """The flags that hold for all that was got from a client."""
    return tuple(flag for flag in OF_CLIENTS if flag.applies(client, client.lines[0]))


def _rivals(client: Client, line: Line) -> list[Line]:
    """The attacks on the trained model that compete for the pictures of a figure; none where it is
    neither one of them nor their best."""
    reach = (other for other in client.attacks if other.uploads <= max(line.uploads, 1))
    rivals = [other for other in reach if other.competes]
    return rivals if line in (*rivals, *client.derived) else []


SHOWN = ("linear", "nonlinear")
"""Regressors of L_DAL whose part in a row of the table's gradient the row itself shows."""
NOT_OF_POSITIONS = ("token_peeling", "head_features")
"""Attacks on batches that read no gradient of positions."""


def _masks_apart(client: Client) -> bool:
    """Whether L_DAL in a batch's loss is of several masks, one of each picture, and no row shows
    how much of it it holds."""
    cell = client.cell
    several = (cell.batch or 1) > 1 and cell.mask == CellFacts.mask
    return bool(cell.dal and cell.gamma and several and cell.regressor not in SHOWN)


def _adds_errors(client: Client) -> bool:
    """Whether the client's defences, one that nobody knows included, do more than clip."""
    cell = client.cell
    if not cell.defenses or cell.position_noise:
        return bool(cell.position_noise)
    try:
        known = ClientConfig(defenses=tuple(cell.defenses.split(" + ")), batch=cell.batch or 1)
        return known.has_errors
    except UserError:
        return True


def _below(client: Client, line: Line) -> bool:
    """Whether the line's mean is below that of the floor on the same images."""
    floor = client.floor
    return floor is not None and bool(
        (line.scored(*PSNR).clip(upper=PSNR_CAP) - floor.scored(*PSNR)).sum() < 0
    )


def _median_above(line: Line, trait: str, diagnostic: str, limit: float) -> bool:
    """Whether a diagnostic of an attack with this trait is mostly above the limit."""
    return any(
        line.scored(diagnostic, DIAGNOSTIC).median() > limit  # of none it is NaN
        for line in line.shown_attacks
        if trait in line.traits
    )


def _unfinished(client: Client, line: Line) -> bool:
    """Whether a planned image has no row, or attacks that compete for the client's pictures have
    not the same images: some were not run yet, or their rows are damaged."""
    members = line.members if isinstance(line, DerivedLine) else (line,)
    competing = (*members, *_rivals(client, line))
    begun = [member for member in competing if len(member.images)]
    differ = any(not other.images.equals(begun[0].images) for other in begun)
    return any(member.not_run for member in competing) or differ


def _cut_short(client: Client, line: Line) -> bool:
    """Whether an attack failed, or was ended by its time, on a picture that is not exact here."""
    attacks = _rivals(client, line) or [line]
    if len(exact := line.exact_images) and len(exact) == len(line.images):
        return False
    single = attacks == [line]  # whose failures have a flag of their own
    return any(
        attack.late_images - exact
        or (not single and attack.failed_images - exact)
        or attack.cell.status == "failed"
        for attack in attacks
    )


def _lacks(line: Line, *, unscored: bool) -> bool:
    """Whether some pictures count nowhere; or whether some without a score count as lost."""
    values, statuses, _ = line.column(*PSNR)
    nowhere = are(statuses, "unscored")
    return bool(nowhere.any() if unscored else (values.isna() & ~nowhere).any())


def some_unshuffled(client: Client) -> bool:
    """Whether in some of a shuffling client's uploads nothing is shuffled."""
    recipe = client.cell.plain_share != CellFacts.plain_share
    return bool(client.cell.gamma) and (recipe or any(x.unshuffled_images for x in client.lines))


def missed_attacks(client: Client, others: Sequence[Client]) -> tuple[str, ...]:
    """Attacks on one upload that made pictures of a like client and were not even tried on this
    one: with them, more might leak."""
    tried, kind = {line.cell.known_as for line in client.attacks}, same_kind(client)
    found = (
        line.cell.known_as
        for other in others
        if other.attacks and same_kind(other) == kind
        for line in other.matching
        if line.uploads == 1
    )
    return tuple(dict.fromkeys(name for name in found if name not in tried))


OF_FIGURES: tuple[Flag, ...] = (
    Flag(
        "below_floor",
        "below the floor",
        "A picture made without any gradient scores as well: the attack failed, which measures no "
        "protection.",
        _below,
    ),
    Flag(
        "altered_client",
        "altered client",
        "The attack met a model whose block 0 was altered for it, which no client trains.",
        lambda client, line: not line.meets_trained_model,
    ),
    Flag(
        "noise_ignored",
        "noise not modelled",
        "The client adds known errors, which an attack here left out of account: one that weighs "
        "them may get more.",
        lambda client, line: (
            _adds_errors(client) and any("noise" not in x.traits for x in line.shown_attacks)
        ),
    ),
    Flag(
        "dal_left_in",
        "L_DAL left in",
        "The gradient of positions holds L_DAL for a mask of each picture's own, which an attack "
        "here cannot take out of a batch: more may leak.",
        lambda client, line: (
            _masks_apart(client)
            and any(x.cell.known_as not in NOT_OF_POSITIONS for x in line.shown_attacks)
        ),
    ),
    Flag(
        "not_converged",
        "not converged",
        "The attack ended far from the uploaded gradient: more steps or starts may give more.",
        lambda client, line: _median_above(line, "steps", "gradient_residual", RESIDUAL_CONVERGED),
    ),
    Flag(
        "ill_conditioned",
        "ill-conditioned",
        "Rounding decides this score, so another machine may give another: on most images cond(A) "
        "exceeds what the gradients' precision resolves.",
        lambda client, line: _median_above(
            line, "rank", "cond_a", RESOLVED.get(line.cell.dtype, math.inf)
        ),
    ),
    Flag(
        "assumes_8_bit",
        "8-bit pixels assumed",
        "Some of these pictures come from an attack that takes pixels for multiples of 1/255.",
        lambda client, line: any("8 bit" in x.traits for x in line.shown_attacks),
    ),
    Flag(
        "partly_inapplicable",
        "not applicable to all",
        "On some pictures every attack was refused or failed: not recovered, and in no mean.",
        lambda client, line: _lacks(line, unscored=False),
    ),
    Flag(
        "partly_unscored",
        "not all scored",
        "Some pictures that an attack made could not be scored: they are in no count or mean.",
        lambda client, line: _lacks(line, unscored=True),
    ),
    Flag(
        "cut_short",
        "an attack failed",
        "An attack failed or ran out of time on some of these pictures: it may get more.",
        _cut_short,
    ),
    Flag(
        "unfinished",
        "unfinished",
        "Rows are missing, not run yet or damaged; weaker attacks fill the gap: more may leak.",
        _unfinished,
    ),
)

OF_CLIENTS: tuple[Flag, ...] = (
    Flag(
        "no_adaptive_attack",
        "no adaptive attack",
        "No attack that knows this client gave a picture: what is shown is the least that leaks.",
        lambda client, line: not any(map(client.knows, client.matching)),
    ),
    Flag(
        "fewer_attacks",
        "fewer attacks",
        "An attack that scored on a like client was not run on this one, so that the two cannot be "
        "compared: with it, more may leak.",
        lambda client, line: bool(client.matching and missed_attacks(client, client.others)),
    ),
    Flag(
        "untrained",
        "not trained with MJP",
        "The model was not trained with MJP: its E_unk was set, not learned.",
        lambda client, line: client.untrained,
    ),
    Flag(
        "undeclared_error",
        "error not declared",
        "A defence changes the upload without saying by how much, so that attacks trust it too far "
        "and the client looks safer than it is.",
        lambda client, line: any(x.some_above_zero("undeclared_error") for x in client.lines),
    ),
    Flag(
        "some_unshuffled",
        "some uploads unshuffled",
        "In some uploads nothing was shuffled, by the recipe or because the mask was empty; the "
        "attacker sees in which.",
        lambda client, line: some_unshuffled(client),
    ),
    Flag(
        "another_normalisation",
        "other mean and std than declared",
        "Some pictures' pixels do not fit the declared mean and std: colours and contrast are not "
        "the client's, and scores may be lower than what leaks (`mjp check` says which fit).",
        lambda client, line: any(x.some_above_zero(MISNORMALISED) for x in client.lines),
    ),
)


# what was not tried -------------------------------------------------------------------------------

FAMILIES = ("swin", "resnet")
"""How the cards of networks begin that are no ViTs."""


def not_tried(clients: Sequence[Client], client: Client) -> tuple[str, ...]:
    """What this report did not try on its main client, in a few words; `clients`: all of them.

    An attack was tried if it was run in the client's own setting and precision, and neither failed
    nor ran out of its time on every picture. Which of the others apply `mjp check` says.
    """
    lines = [line for line in client.attacks if len(line.images)]
    cut = {x.number: len(x.failed_images | x.late_images) == len(x.images) for x in lines}
    ran = {line.cell.known_as for line in lines if not cut[line.number]}
    in_vain = {line.cell.known_as for line in lines} - ran
    missing = [name for name in applicable(client) if name not in ran | in_vain]
    cells = [other.cell for other in clients]
    shas = {cell.checkpoint_sha for cell in cells if cell.gamma == client.cell.gamma}
    items = {
        f"attacks on this client, of which some may not apply: {', '.join(missing)}": bool(missing),
        f"failed or ran out of time on every picture: {', '.join(sorted(in_vain))}": bool(in_vain),
        "clients with MJP": not any(cell.gamma for cell in cells),
        "batches of more than one picture": all((c.batch or 1) == 1 for c in cells),
        "several local steps": all(cell.steps == 1 for cell in cells),
        "other seeds of masks and noise than one": len({cell.seed for cell in cells}) == 1,
        "other checkpoints of the same recipe": len(shas) == 1,
    }
    return tuple(item for item, untried in items.items() if untried)


def applicable(client: Client) -> list[str]:
    """The attacks that may make pictures of such a client: none that is made for what it does not
    do, for networks of another family, or that takes single pictures as another of the list."""
    cell = client.cell
    masks = any(line.some_above_zero("zero_rows") for line in client.attacks)
    unfit = {"no picture"}
    unfit |= set() if cell.gamma and not masks else {"shuffled alone"}
    unfit |= set() if some_unshuffled(client) else {"unshuffled uploads"}
    unfit |= {"single as another"} if (cell.batch or 1) == 1 else set()
    names = [name for name in ATTACKS if not unfit & traits_of(name)]
    network = (cell.architecture or "").lower()
    families = [family for family in FAMILIES if network.startswith(family)]
    return [name for name in names if not any(lacks_parts(name, family) for family in families)]
