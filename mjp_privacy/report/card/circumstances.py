"""What two clients must share so that they can be compared."""

from __future__ import annotations

from mjp_privacy.report.card.clients import DEFENCES, Client
from mjp_privacy.report.cell_columns import MODEL_FACTS, Scalar, target_of

OF_A_DEFENCE = frozenset(
    ("setting", "gamma", "dal", "dal_lambda", "plain_share", "mask", *DEFENCES, *MODEL_FACTS)
)
"""Facts in which a defended client differs from an undefended one; all others are circumstances."""


def circumstances(client: Client) -> tuple[tuple[str, Scalar], ...]:
    """What two clients must share so that the defence is what they differ in."""
    cell = client.cell
    shared = [(key, value) for key, value in target_of(cell) if key not in OF_A_DEFENCE]
    return (*shared, ("size", cell.model.size), ("data", cell.command.data))
