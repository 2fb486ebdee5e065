"""Which clients of a report are compared: a defended one and the undefended one beside it."""

from __future__ import annotations

from collections.abc import Sequence

from mjp_privacy.report.card.circumstances import circumstances
from mjp_privacy.report.card.clients import Client
from mjp_privacy.report.card.rows import any_uploads_line, one_upload_line
from mjp_privacy.report.loading import Line


def client_pairs(clients: Sequence[Client]) -> list[tuple[Client, Client]]:
    """(undefended, defended) for every defended client that has an undefended one beside it.

    The two agree in every circumstance: data, image size, batch, local steps, precision and so on,
    and both have a best attack. Among several undefended clients one whose model was not trained
    with shuffled patches is taken, then one of the same model, then the likest.
    """
    attacked = [client for client in clients if best_line(client, one_upload=False)]
    undefended = [client for client in attacked if not client.defended]
    pairs = []
    for client in attacked:
        if client.defended:
            around = circumstances(client)
            alike = [other for other in undefended if circumstances(other) == around]
            pairs += [(min(alike, key=lambda x: _distance(x, client)), client)] if alike else []
    return pairs


def _distance(undefended: Client, defended: Client) -> tuple[bool, ...]:
    one, other = undefended.cell.model, defended.cell.model
    return (
        bool(one.trained_gamma),
        one.label != other.label,
        one.position_embedding != other.position_embedding,
        one.first_block != other.first_block,
    )


def best_line(client: Client, *, one_upload: bool) -> Line | None:
    """The worst case of a client, as on the card; None where no matching attack scored.

    With `one_upload` over attacks on a single upload, else over all.
    """
    single = one_upload_line(client)
    return single if one_upload else any_uploads_line(client) or single
