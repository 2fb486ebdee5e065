"""Which clients stand on the privacy card, and in which setting and precision."""

from __future__ import annotations

from collections.abc import Sequence

from mjp_privacy.report.card.clients import Client, clients_of
from mjp_privacy.report.worst_case import Group

CARD_ROWS = 5
"""The card shows at most this many clients; the tables have them all."""

PRECISIONS = ("bfloat16", "float16", "float32", "float64")
SETTINGS = ("c", "b", "a")
"""The card takes a client in the first of these that was run: (c) asks for the plain picture."""


def card_clients(groups: Sequence[Group]) -> tuple[list[Client], int]:
    """The clients on the card, and how many more there are: a choice of `distinct_clients`.

    Clients on which no matching attack was run are left to the tables, unless there are no others
    or the client is the only undefended one. The first undefended client stands first, the first
    with masks second.
    """
    ranked = distinct_clients(groups)
    matched = [client for client in ranked if client.matching]
    shown = _with_the_undefended(matched or ranked, ranked)
    return shown, len(ranked) - len(shown)


def distinct_clients(groups: Sequence[Group]) -> list[Client]:
    """Every client with rows once, in the order of the groups: of several settings and precisions
    the lowest precision, and setting (c) before (b) before (a)."""
    clients = clients_of(groups)
    chosen: dict[object, Client] = {}
    for client in sorted(clients, key=_preference):
        chosen.setdefault(same_client(client), client)
    order = {id(client.group): place for place, client in enumerate(clients)}
    ranked = sorted(chosen.values(), key=lambda client: order[id(client.group)])
    return [client for client in ranked if any(len(line.images) for line in client.lines)]


def _with_the_undefended(ranked: Sequence[Client], all_: Sequence[Client]) -> list[Client]:
    """The first clients, at least one of which is undefended, also if no attack matches it, and one
    masked, if there are any."""
    undefended = [client for client in (*ranked, *all_) if not client.defended][:1]
    masked = [client for client in ranked if client.masks][:1]
    wanted = {id(client.group): client for client in (*undefended, *masked, *ranked)}
    return list(wanted.values())[:CARD_ROWS]


def _preference(client: Client) -> tuple[bool, int, int]:
    cell = client.cell
    return (
        not client.matching,
        SETTINGS.index(cell.setting) if cell.setting in SETTINGS else len(SETTINGS),
        PRECISIONS.index(cell.dtype) if cell.dtype in PRECISIONS else len(PRECISIONS),
    )


def same_client(client: Client) -> object:
    """What stays the same when only the setting's target and the precision change."""
    cell = client.cell
    facts = (cell.model.label, cell.gamma, cell.client, cell.seed, repr(cell.other))
    return client.lines[0].run, facts
