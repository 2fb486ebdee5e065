"""The answer: whether the pictures are protected, against whom, what was assumed and not tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attacks.equations import CERTAIN
from mjp_privacy.core.schema import height_width
from mjp_privacy.core.text import counted, first_of, shown
from mjp_privacy.experiment.source import IN_STEP_OF
from mjp_privacy.report.card import (
    Card,
    CardFigure,
    CardRow,
    card_figure,
    card_row,
    plain_pictures,
)
from mjp_privacy.report.clients import (
    Client,
    attacked_ones,
    card_clients,
    images_of,
    rounds_of,
    short_gamma,
)
from mjp_privacy.report.figures import capped_median, exact_share
from mjp_privacy.report.flags import RESIDUAL_CONVERGED, not_tried
from mjp_privacy.report.lines import DIAGNOSTIC, Line, options_of
from mjp_privacy.report.text import percent

WORDS = 30
"""The verdict has at most so many."""

LADDER = "ladder_vit"
"""The config that runs every attack that knows MJP on one's own weights."""

MATCHES = 1e-2
"""Residual below which a picture has the uploaded gradient for all purposes."""

THREATS = {
    "B": "the upload and the model",
    "C": "the upload, the model, learning rate and number of steps",
    "D": "the upload, the model and public photographs to fit a prior on",
}
"""What the attacker has, by the letters of Carletti et al., USENIX Security 2025."""


def build_card(clients: Sequence[Client], experiments: Sequence[Sequence[str]] = ()) -> Card:
    """The card of a report on these clients; of run folders that hold several `experiments` it says
    so first."""
    shared = [shown(first_of(names, 3)) for names in experiments if len(names) > 1]
    first = f"Several experiments share a folder ({'; '.join(shared)}). " if shared else ""
    shown_ones, main, further = card_clients(clients)
    if not shown_ones:
        return Card(f"{first}No client was attacked: there are no rows of an attack.", "", "")
    rows = tuple(map(card_row, shown_ones))
    row = rows[main]
    return Card(
        *(first + verdict(row), assumptions(row), beside(row)),
        rows=rows,
        further=further,
        main=main,
        facts=facts(row),
        not_tried=not_tried(attacked_ones(clients), row.client),
        would_change=would_change(row),
    )


def verdict(row: CardRow) -> str:
    """Whether the client's pictures are protected, as far as the attacks that were run show it:
    `MJP γ .27 does not protect these pictures: one upload gives 116 of 200 exactly.`"""
    client = row.client
    if all(len(line.failed_images) == max(len(line.images), 1) for line in client.attacks):
        return f"Not shown: every attack on the {client.name} client failed; its rows say why."
    if not client.matching:
        return (
            f"Not shown: no attack that knows the {client.name} client gave a picture here; "
            f"those that do: mjp attack {LADDER} --weights FILE."
        )
    best = row.best
    if best is None:
        return "Not scored: the private pictures are not known here."
    told = replace(best, above_20=best.above_20 - plain_pictures(client, row.deciding))
    defence = client.name if client.cell.gamma else f"“{client.name.removeprefix('plain, ')}”"
    defence += " without its training" if client.untrained else ""
    several = len(rounds_of(client, client.others)) > 1
    when = f" in round {client.cell.other['round']}" if several else ""
    shuffled = bool(client.cell.gamma) and client.cell.setting == "b"
    pictures = "the shuffled pictures" if shuffled else "these pictures"  # what was compared
    if not best.exact and (why := _failure(best, told, row.floor)):
        said = f"{defence} protects {pictures}" if client.defended else f"{pictures} leak"
        return f"That {said} is not shown: {why}."
    if client.defended:
        said = f"{defence}{when} does not protect {'' if told.most else 'all of '}{pictures}"
    else:
        said = f"{pictures.capitalize() if told.most else f'Some of {pictures}'} leak{when}"
    said += f": {'one upload gives' if best is row.one_upload else 'several uploads give'} "
    level = f"{best.exact} of {best.of} exactly"
    # the exact ones of which an attack on as many uploads read one in which nothing was shuffled
    read = [x.unshuffled_images for x in client.matching if (x.uploads == 1) != row.by_several]
    exact = row.deciding.exact_images if row.deciding and client.cell.gamma else frozenset[str]()
    if sent_plain := len(exact.intersection(frozenset().union(*read))):
        of_them = "all" if sent_plain == best.exact else f"{sent_plain} of them"
        level += f", {of_them} from unshuffled steps"
    said += level if best.exact else f"{told.above_20} of {best.of} at 20 dB or more"
    if best.flagged("unfinished"):
        return f"{said}; rows are missing: more may leak."
    longer = f"{said}, {told.reached}."
    more = best.exact and told.above_20 > best.exact and len(longer.split()) <= WORDS
    return longer if more else f"{said}."


def _failure(best: CardFigure, told: CardFigure, floor: CardFigure | None) -> str:
    """Why pictures that are not exact show no leak; empty where they do. `told`: without those
    that show little."""
    if best.flagged("below_floor"):
        return "the best attack gets less than a picture made without any gradient: it failed"
    if not best.above_20:
        return "no attack of this report reaches 20 dB, and others may"
    if not told.above_20:
        return "what reaches 20 dB is hardly better than a plain colour, and others may get more"
    if floor is not None and floor.above_20 / floor.of >= best.above_20 / best.of:
        return "as many pictures reach 20 dB without any gradient"
    return ""


def assumptions(row: CardRow) -> str:
    """Who the attacker is and what is assumed, in one sentence."""
    client, line = row.client, row.deciding
    chosen = line.shown_attacks if line else client.matching
    known = frozenset().union(*(line.traits for line in chosen))
    further = ["has a prior of public photographs"] if "D" in map(threat_letter, chosen) else []
    further += ["takes pixels for 8-bit values"] if "8 bit" in known else []
    return (
        f"Attacker: a server that follows the protocol, sees "
        f"{_uploads(line.uploads if row.by_several and line else 1)} ({_batch(client)}"
        f"{client.cell.dtype} {_sent(client)}) and knows the model ({client.cell.model})"
        f"{', the labels' if 'steps' in known else ''} and normalisation as declared"
        f"{'; it ' if further else ''}{' and '.join(further)}."
    )


def _uploads(most: int) -> str:
    return f"up to {most} uploads of the same picture" if most > 1 else "one upload"


def _batch(client: Client) -> str:
    return f"batch {client.cell.batch}, " if client.cell.batch else ""


def _sent(client: Client) -> str:
    """`gradient`, `weight difference of 3 local steps`."""
    cell = client.cell
    kind = "weight difference" if cell.upload == "weight_difference" else "gradient"
    return f"{kind} of {cell.steps} local steps" if cell.steps > 1 else kind


def beside(row: CardRow) -> str:
    """What the card does not say of the client that the answer is about: pictures that do not
    count, files that are none, crops; or what can be said without the truth."""
    client, best, parts = row.client, row.best, []
    if client.matching and best is None:
        return without_truth(client)
    if best is not None and (plain := plain_pictures(client, row.deciding)):
        flat = f"{counted(plain, 'picture')} at 20 dB or more and hardly better than a plain colour"
        parts.append(f"Not counted: {flat}.")
    reasons = {image: reason for line in client.lines for image, reason in line.unreadable.items()}
    if unread := sum(not reason.startswith(IN_STEP_OF) for reason in reasons.values()):
        parts.append(f"Not attacked: {counted(unread, 'file')} without a readable image.")
    if best is not None and best.photographs is not None:
        parts.append(f"The pictures are crops of {counted(best.photographs, 'photograph')}.")
    return " ".join(parts)


def without_truth(client: Client) -> str:
    """What can be said of uploads whose private images are not known."""
    from mjp_privacy.uploads.checks import MISNORMALISED

    who = f"the {client.name} client ({_batch(client)}{client.cell.dtype})"
    if all(line.has_truth for line in client.attacks):
        return f"Nothing that {who} leaks could be scored, although the private images are known."
    found = frozenset().union(*(line.picture_ids for line in client.matching))
    pictures = counted(len(found), "picture")
    said = [f"Of uploads of {who} attacks made {pictures}"]
    known = [line.scored("gradient_residual", DIAGNOSTIC) for line in client.matching]
    if medians := [values.median() for values in known if len(values)]:
        gap, left = min(medians), "the best attack's leave {:.2g} of the gradient unexplained"
        said.append(f"{left.format(gap)} in the median")
        if gap < MATCHES:
            said[-1] += ", which is no proof of a good picture"
        elif gap >= RESIDUAL_CONVERGED:
            said[-1] += (
                ", which is no evidence of safety: the attacks do not reach it, or the client's "
                "loss (dropout, label smoothing, mixup), labels, mean and std or batch differ from "
                "what the header says"
            )
    if certain := _marked(client, CERTAIN):
        said.append(
            f"{certain} certain: no other picture solves the equations of the patch embedding, as "
            "far as mean, std and order of channels are as declared"
        )
    if doubted := _marked(client, MISNORMALISED):
        said.append(
            f"the pixels of {doubted} do not fit the declared mean and std, so that colours and "
            "contrast are not the client's (`mjp check` says which fit)"
        )
    return f"{'; '.join(said)}. The private images are not known here, so nothing was scored."


def _marked(client: Client, diagnostic: str) -> int:
    """How many pictures of the client its attacks mark so.

    Pictures of a batch come in no known order, so that those of two attacks may be the same ones:
    then the attack counts that marks most.
    """
    of_lines = (line.scored(diagnostic, DIAGNOSTIC) for line in client.matching)
    marked = [set(values.index[values == 1]) for values in of_lines]
    if (client.cell.batch or 1) > 1:
        return max(map(len, marked), default=0)
    return len(set().union(*marked))


# who sees what ------------------------------------------------------------------------------------


WITHOUT = {
    "8 bit": "pixels that are no multiples of 1/255",
    "public photographs": "an attacker without photographs",
}
"""What an attack without this trait need not assume."""

ASSUMED = (
    "model, batch, precision, labels, mean, std and order of channels are those that the client "
    "declares. Pictures are exact or certain under this condition: no single one shows whether red "
    "and blue were swapped."
)


def facts(row: CardRow) -> tuple[tuple[str, str], ...]:
    """Who attacks, what is sent, which model and pictures: as (heading, text)."""
    client, cell = row.client, row.client.cell
    letter = max(threat_letter(line) for line in client.matching or client.attacks)
    survey = f"threat model {letter} of Carletti et al., USENIX Security 2025"
    parts = [f"{cell.dtype} {_sent(client)}"]
    parts += [f"batch {cell.batch}"] if cell.batch else []
    parts += [f"without that of {cell.withhold}"] if cell.withhold else []
    most = max((line.uploads for line in client.matching), default=1)
    architecture = f" ({cell.architecture})" if cell.architecture else ""
    weights = f", weights {cell.checkpoint}" if cell.checkpoint else ""
    recipe = "how it was trained is not in its file"
    if client.untrained:
        recipe = "not trained with MJP: its E_unk was set"
    elif cell.trained_gamma is not None:
        gamma = cell.trained_gamma
        recipe = f"trained with γ {short_gamma(gamma)}" if gamma else "trained without MJP"
    elif cell.gamma:
        recipe += "; it is attacked as a client with MJP"
    size = "×".join(map(str, height_width(cell.pixels or 0)))
    size = f" at {size}" if cell.pixels else ""
    pictures = f"{counted(len(images_of(client.lines)), 'picture')}{size}"
    pictures += f", source: {cell.data or 'unknown files'}"
    if client.lines[0].groups is not None:
        pictures += f", crops of {client.lines[0].units} photographs"
    if not cell.true_labels:
        pictures += "; labels are the model's own predictions"
    accuracy = "not known: no labels, or nothing was scored."
    if row.accuracy is not None:
        attacked = f"{row.accuracy_n} of the attacked pictures, as the client feeds them"
        accuracy = f"{percent(row.accuracy, row.accuracy_n)} % top-1 on {attacked}."
    return (
        ("Who attacks", f"a server that follows the protocol, with {THREATS[letter]} ({survey})."),
        ("What is sent", f"{', '.join(parts)}; {_uploads(most)}."),
        ("What is assumed", ASSUMED),
        ("The model", f"{cell.model}{architecture}{weights}; {recipe}."),
        ("The pictures", f"{pictures}."),
        ("Accuracy", accuracy),
    )


def threat_letter(line: Line) -> str:
    """The survey's letter for what an attack knows: B, C or D."""
    cell, options = line.cell, options_of(line.cell.attack_options) or {}
    if "public photographs" in line.traits and options.get("prior") != "stationary":
        return "D"
    return "C" if cell.upload == "weight_difference" or cell.steps > 1 else "B"


def would_change(row: CardRow) -> tuple[str, ...]:
    """What would move the main figure, as far as this report's own lines show it: the best attack
    on one upload without a trait, where some attacks have it and some do not."""
    client, items = row.client, []
    single = [line for line in client.matching if line.uploads == 1] if row.one_upload else []
    for trait, changed in WITHOUT.items():
        others = [line for line in single if trait not in line.traits]
        if others and len(others) < len(single):
            best = max(others, key=lambda line: (exact_share(line).count, capped_median(line)))
            got = card_figure(client, best)
            if row.one_upload and got.counts() != row.one_upload.counts():
                counts = got.counts()
                items.append(f"{changed}: {best.attack} gets {counts} from one upload")
    if client.masks and client.cell.plain_share == 0:
        items.append("steps that the recipe leaves unshuffled: each gives its picture away")
    return tuple(items)
