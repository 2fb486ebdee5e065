"""What stands under the card's table: who sees what, what was not tried, what would change it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from attacks import ATTACKS, TRAITS, traits_of
from mjp_privacy.report.card.chosen_clients import same_client
from mjp_privacy.report.card.clients import Client, short_gamma
from mjp_privacy.report.card.content import CardRow
from mjp_privacy.report.card.rows import exact_pictures, published_line
from mjp_privacy.report.lines import Line, image_counts

SURVEY = "threat model {} of Carletti et al., USENIX Security 2025"
LETTERS = {
    "B": "sees the upload and knows the model",
    "C": "also knows the client's learning rate and number of steps",
    "D": "also has public photographs to fit a prior on",
}


def facts(client: Client, row: CardRow) -> tuple[tuple[str, str], ...]:
    """Who attacks, what is sent, which model and pictures: as (heading, text)."""
    pairs = (
        ("Who attacks", _attacker(client)),
        ("What is sent", _upload(client)),
        ("The model", _model(client)),
        ("The pictures", _pictures(client)),
        ("Accuracy", _accuracy(row)),
    )
    return tuple((heading, text) for heading, text in pairs if text)


def _attacker(client: Client) -> str:
    letters = {threat_letter(line) for line in client.matching or client.group.attacks}
    strongest = max(letters)
    knowledge = ", ".join(text for letter, text in LETTERS.items() if letter <= strongest)
    published = published_line(client)
    beside = ""
    if published is not None:
        letter = threat_letter(published)
        beside = f" The published attack needs {letter}, and a client with block 0 altered for it."
        if published.cell.model.first_block == "closed_form":
            beside = f" The published attack needs {letter}."
    return f"A server that follows the protocol, {knowledge} ({SURVEY.format(strongest)}).{beside}"


def threat_letter(line: Line) -> str:
    """The survey's letter for what an attack knows: B, C or D."""
    client = line.cell.client
    if "public photographs" in traits_of(line.cell.attack.known_as) and not _without_data(line):
        return "D"
    return "C" if client.upload == "weight_difference" or client.steps > 1 else "B"


def _without_data(line: Line) -> bool:
    try:
        options = json.loads(line.cell.attack.options or "{}")
    except ValueError:
        return False
    return isinstance(options, dict) and options.get("prior") == "stationary"


def _upload(client: Client) -> str:
    cell = client.cell
    sent = "weight difference" if cell.client.upload == "weight_difference" else "gradient"
    steps = f"{cell.client.steps} local step{'s' if cell.client.steps > 1 else ''}"
    rounds = max((line.uploads for line in client.matching), default=1)
    most = f"up to {rounds} uploads of the same picture" if rounds > 1 else "one upload"
    parts = [f"{cell.dtype} {sent} of {steps}"]
    parts += [f"batch {cell.client.batch}"] if cell.client.batch else []
    parts += [f"without that of {cell.client.withhold}"] if cell.client.withhold else []
    return f"{', '.join(parts)}; {most}."


def _model(client: Client) -> str:
    cell = client.cell
    architecture = f" ({cell.model.architecture})" if cell.model.architecture else ""
    weights = f", weights {cell.model.checkpoint}" if cell.model.checkpoint else ""
    trained = cell.model.trained_gamma
    if trained is None:
        recipe = "how it was trained is not in its file"
        recipe += "; it is attacked as a client with MJP" if cell.gamma else ""
    else:
        recipe = f"trained with γ {short_gamma(trained)}" if trained else "trained without MJP"
    scored = [line for line in client.group.attacks if line.count("psnr", "standard")]
    altered = any(line.cell.attack.victim == "april_block" for line in scored)
    block = (
        " APRIL meets a copy with block 0 altered, which no client trains."
        if altered and cell.model.first_block != "closed_form"
        else ""
    )
    return f"{cell.model.label}{architecture}{weights}; {recipe}.{block}"


def _pictures(client: Client) -> str:
    first = client.lines[0]
    ids = set().union(*(line.images.names for line in client.lines))
    size = f" at {first.cell.model.size}×{first.cell.model.size}" if first.cell.model.size else ""
    photographs = (
        f", crops of {len(set(first.groups.values()))} photographs" if first.groups else ""
    )
    labels = "" if first.cell.command.true_labels else "; labels are the model's own predictions"
    count = f"{len(ids)} picture{'' if len(ids) == 1 else 's'}"
    source = first.cell.command.data or "unknown files"
    return f"{count}{size}, source: {source}{photographs}{labels}."


def _accuracy(row: CardRow) -> str:
    if row.accuracy is None:
        return "not known: no labels, or nothing was scored."
    return (
        f"{row.accuracy:.1f} % top-1 on {row.accuracy_n} of the attacked pictures, as the client "
        "feeds them."
    )


def not_tried(clients: Sequence[Client], client: Client) -> tuple[str, ...]:
    """What this report did not try on its main client, in a few words; `clients`: all of them."""
    alike = [other for other in clients if same_client(other) == same_client(client)]
    lines = [line for other in alike for line in other.group.attacks if len(line.images)]
    ran = {line.cell.attack.known_as for line in lines}
    alone = (client.cell.client.batch or 1) == 1
    masks = any(line.some_above_zero("zero_rows") for line in lines)
    shuffles_alone = bool(client.cell.gamma) and not masks
    missing = [
        name
        for name in ATTACKS
        if name not in ran
        and name != "mask_locator"
        and not (alone and "batches" in traits_of(name))
        and (shuffles_alone or "shuffled alone" not in traits_of(name))
    ]
    cells = [other.cell for other in clients]
    items = [f"attacks on this client: {', '.join(missing)}"] if missing else []
    if all((cell.client.batch or 1) == 1 for cell in cells):
        items.append("batches of more than one picture")
    if all(cell.client.steps == 1 for cell in cells):
        items.append("several local steps")
    if len({cell.seed for cell in cells}) == 1:
        items.append("other seeds of masks and noise than one")
    shas = {cell.model.checkpoint_sha for cell in cells if cell.gamma == client.cell.gamma}
    items += ["other checkpoints of the same recipe"] if len(shas) == 1 else []
    return tuple(items)


def would_change(client: Client, row: CardRow) -> tuple[str, ...]:
    """What would move the main figure, as far as this report's own lines show it."""
    items = []
    if row.one_upload and (line := _best_without("8 bit", client)) is not None:
        items.append(
            "pixels that are no multiples of 1/255: without that assumption one upload gives "
            f"{_exact_of(line)} pictures exactly ({line.attack})"
        )
    if row.one_upload and (line := _best_without("public photographs", client)) is not None:
        items.append(
            f"an attacker without photographs: {line.attack} gets {_exact_of(line)} exactly from "
            "one upload"
        )
    if row.any_uploads and row.one_upload:
        one, several = row.one_upload, row.any_uploads
        items.append(
            f"more uploads of the same picture: {several.exact} of {several.of} exactly and "
            f"{several.above_20} at 20 dB or more, where one gives {one.exact} and {one.above_20}"
        )
    if client.masks and client.cell.client.plain_share == 0:
        items.append("steps that the recipe leaves unshuffled: each gives its picture away")
    return tuple(items)


def _exact_of(line: Line) -> str:
    counts = image_counts(line, "standard")
    return f"{exact_pictures(line)} of {counts.ok + counts.failed + counts.unsupported}"


def _best_without(trait: str, client: Client) -> Line | None:
    """The best attack on one upload without this trait, by exact pictures and then by median.

    None where no attack has the trait, or all have it.
    """
    if trait not in TRAITS:
        raise ValueError(f"no attack has the trait {trait!r}")
    single = [line for line in client.matching if line.uploads == 1]
    others = [line for line in single if trait not in traits_of(line.cell.attack.known_as)]
    if len(others) in (0, len(single)):
        return None
    return max(others, key=lambda x: (exact_pictures(x), x.scored("psnr", "standard").median()))
