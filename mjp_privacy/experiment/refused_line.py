"""The line of uploads that cannot be attacked, in a run folder."""

from __future__ import annotations

from mjp_privacy.client.recorded.groups import REFUSED
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore


def forget_refused(store: RunStore) -> None:
    """Remove the line of refused uploads from a run folder."""
    try:
        cells = store.read_cells()
    except UserError:  # a new folder
        return
    kept = [cell for cell in cells if cell.get("model") != REFUSED]
    for run_id in {str(cell["run_id"]) for cell in cells} - {str(cell["run_id"]) for cell in kept}:
        for path in store.row_files(run_id):
            path.unlink()
    if len(kept) < len(cells):
        store.write_cells(kept)
