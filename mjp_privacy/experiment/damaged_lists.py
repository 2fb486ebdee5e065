"""What is damaged of a run folder's files beside rows, pictures and cells.json, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mjp_privacy.core.errors import BadFile
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.core.sealed import check_seal
from mjp_privacy.experiment.adopted_files import read_adopted
from mjp_privacy.experiment.cell_list import UNSEALED
from mjp_privacy.experiment.code_ledger import code_fault
from mjp_privacy.experiment.image_list import ImageList
from mjp_privacy.experiment.timings import Timings

if TYPE_CHECKING:
    from mjp_privacy.experiment.store import RunStore


EXPERIMENT = FileKind("the experiment of a run", "Run the attack again.", 1 << 24)


def experiment_files(root: Path) -> list[Path]:
    """The experiments that a run folder was filled by; the last one first."""
    return [root / "experiment.yaml", *sorted((root / "experiments").glob("*.yaml"))]


def damaged_lists(store: RunStore) -> Iterator[str]:
    """A sentence for each damaged file; the next run mends it as the sentence says."""
    sealed = store.format != UNSEALED
    if fault := code_fault(store.root, needed=sealed):
        yield f"code.json ({fault}): which files earlier code was made of is not known"
    if read_adopted(store.root) is None:
        yield (
            "adopted.json is damaged: which files an earlier version wrote is not known; a run "
            "takes those that it can read for whole"
        )
    if damaged := _damaged_lines(store.image_list):
        yield f"images.csv ({damaged}): a run takes what is lost from the images it is given"
    if damaged := _damaged_lines(store.timings):
        yield f"timings.jsonl ({damaged}): a run removes them"
    for path in experiment_files(store.root):
        try:
            if is_there(path):
                check_seal(path, EXPERIMENT, needed=sealed)
        except BadFile as error:
            yield f"{store.place(path)} ({error.got}): the run of that experiment writes it again"


def _damaged_lines(read: Callable[[], ImageList | Timings]) -> str:
    """How many lines of a file are damaged, in words; empty if none are."""
    try:
        count = read().damaged
    except BadFile as error:
        return error.got
    return f"{count} damaged line(s)" if count else ""
