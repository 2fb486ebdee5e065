"""Finished cells that leave a folder's tables because another model takes their lines.

A line of a table, the cell_key, is the same for every checkpoint of a model's label; the rows of
two checkpoints stand side by side on disk, under two run_ids, and cells.json names one of them.
"""

from __future__ import annotations

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import first_of
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.messages import ModelOpened
from mjp_privacy.experiment.store import RunStore

SHOWN = 3  # number of replaced cells that are named


def replaced_cells(store: RunStore, opened: ModelOpened) -> str:
    """What is said of cells with rows whose lines this model's cells take; empty if there are none.

    To be asked before the model's facts are written to cells.json.
    """
    now = {facts.outcome.cell_key: facts.run_id for facts in opened.facts}
    lost = [
        facts
        for facts in _stored(store)
        if facts.outcome.status == "ok"
        and now.get(facts.outcome.cell_key, facts.run_id) != facts.run_id
        and store.row_files(facts.run_id)
    ]
    if not lost:
        return ""
    titles = list(dict.fromkeys(f"{facts.attack.title} ({facts.setting})" for facts in lost))
    shown = first_of(titles, SHOWN)
    models = [facts.model for facts in lost]
    made_of = [f"{m.checkpoint}, sha256 {str(m.checkpoint_sha)[:12]}, {m.size} px" for m in models]
    return (
        f"{opened.model}: {len(lost)} finished cell(s) of {store.root} leave its tables, because "
        f"this run has another model or other options under the same name: {shown}, made of "
        f"{'; '.join(dict.fromkeys(made_of))}. Their rows stay in {store.root / 'rows'}; the "
        "command that made them shows them again. To have both, give this run an --out of its own"
    )


def _stored(store: RunStore) -> list[CellFacts]:
    try:
        return [CellFacts.read(columns) for columns in store.read_cells()]
    except UserError:
        return []
