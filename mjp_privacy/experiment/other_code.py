"""Refuses to mix results of two versions of the code without being asked.

A command that finds finished units which other code made stops before it computes anything. It says
which files differ; `stale` decides what happens then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, get_args

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.code_ledger import read_codes
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.description import describe
from mjp_privacy.experiment.finished import UNRECORDED, Finished
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.source import UploadSource
from mjp_privacy.experiment.source_code import SourceCode, SourceReader

Stale = Literal["ask", "fresh", "keep"]
"""What to do with finished units of other code: stop and say so, make them again, keep them."""


def stale_choice(fresh: bool, keep: bool) -> Stale:
    """What the options --fresh and --keep of a command line stand for."""
    if fresh and keep:
        raise UserError(
            "Expected one of --fresh and --keep, got both: --fresh makes results of other code "
            "again, --keep keeps them. Leave one out."
        )
    return "fresh" if fresh else "keep" if keep else "ask"


def check_stale(stale: str) -> None:
    """Raise UserError unless this is one of the choices."""
    if stale not in get_args(Stale):
        raise UserError(
            f"Expected stale to be one of {', '.join(map(repr, get_args(Stale)))}, got {stale!r}. "
            "'ask' stops at results that other code made, 'fresh' makes them again, 'keep' keeps "
            "them."
        )


def code_of_cells(plan: Plan, *, with_defenses: bool) -> dict[Cell, SourceCode]:
    """The code that makes each cell's results.

    with_defenses: whether this command computes uploads; those that are recorded were made before.
    """
    reader = SourceReader()
    return {
        cell: reader.code_of(cell.attack.name, cell.client.defenses if with_defenses else ())
        for cell in plan.cells
    }


def refuse_other_code(
    plan: Plan, source: UploadSource, codes: Mapping[Cell, SourceCode], finished: Finished
) -> None:
    """Raise UserError if other code made finished units of this plan, naming the files that differ.

    Only weights tell which rows belong to a cell, so models are opened here, but only in a folder
    that holds results of other code at all.
    """
    if finished.codes() <= {code.digest for code in codes.values()}:
        return
    recorded = read_codes(finished.store.root)
    cells = 0
    differing: dict[str, None] = {}  # an ordered set
    for model, blocks in plan.blocks.items():
        for cell, run_id in _run_ids(plan, source, model).items():
            code = codes[cell]
            made = {
                digest
                for block in blocks
                for digest in finished.of_other_code(run_id, block, code.digest).values()
                if digest != UNRECORDED
            }
            cells += bool(made)
            for digest in sorted(made):
                differing |= dict.fromkeys(differences(recorded.get(digest), code.files))
    if cells:
        raise UserError(
            f"{cells_of_other_code(cells, plan)} ({', '.join(differing)}): --fresh makes these "
            'again, --keep keeps them. From Python: stale="fresh" or stale="keep".'
        )


def cells_of_other_code(count: int, plan: Plan) -> str:
    """How many cells have results of other code, as messages begin."""
    return f"{_holding(count, plan)} results made by other code"


def _holding(count: int, plan: Plan) -> str:
    return f"{count} of {len(plan.cells)} cells hold{'s' if count == 1 else ''}"


def kept_cells(of_other_code: Collection[str], unrecorded: Collection[str], plan: Plan) -> str:
    """What is said at the end of cells whose results were kept though other code made them, or code
    that was not recorded; empty if there are none.

    of_other_code, unrecorded: the run_ids of these cells
    """
    said = []
    if of_other_code:
        said.append(f"{cells_of_other_code(len(of_other_code), plan)}, which were kept")
    if unrecorded:
        said.append(f"{_holding(len(unrecorded), plan)} results made before code was recorded")
    return f"{'; '.join(said)}; --fresh makes them again" if said else ""


def _run_ids(plan: Plan, source: UploadSource, model: str) -> dict[Cell, str]:
    """The run_id of each cell of a model; none if it cannot be loaded, for then it has no rows."""
    try:
        loaded = source.open(model).model
    except UserError:
        return {}
    return {
        cell: describe(cell, plan.experiment, plan.attacks[cell], source, loaded).run_id
        for cell in plan.cells_of(model)
    }


def differences(made: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """What changed between two states of the code, in words.

    differences({"a.py": "1", "b.py": "2"}, {"a.py": "3"}) is ["a.py changed", "b.py removed"].
    made: None if it is not known, because the run folder's code.json is gone.
    """
    if made is None:
        return ["which files is not known: code.json lacks them"]
    words = {name: "added" for name in now if name not in made}
    words |= {name: "removed" for name in made if name not in now}
    words |= {name: "changed" for name in now if made.get(name, now[name]) != now[name]}
    return [f"{name} {words[name]}" for name in sorted(words)]
