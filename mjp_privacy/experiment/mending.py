"""What a run does first in a folder that is there already: it leaves only what can be trusted.

    examined = Examination.of(Path("results/demo"))     # reads alone
    examined.said                                       # a line for each damaged file
    examined.mend()                                     # writes

Damaged files of rows and pictures are moved into RUN/damaged, with the rows that belong to damaged
pictures, so that their images are no longer finished and the same run makes them again. Damaged
lines of timings.jsonl are removed, those of images.csv written anew by `Inventory`. The files of a
folder that an earlier version wrote, which have no seals, are read whole once and listed in
adopted.json: from then on they may no more change than others. Where that list is lost, files that
can be read and never had a seal stay and are listed again: results are not thrown away for want of
a list. No other process may write into the folder meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import is_there
from mjp_privacy.core.sealed import BLANK, forget_seals, read_seal, write_sealed_text
from mjp_privacy.core.text import shown
from mjp_privacy.experiment.adopted_files import write_adopted
from mjp_privacy.experiment.cell_list import UNSEALED, cells_path, folder_format
from mjp_privacy.experiment.code_ledger import code_fault, code_file, seal_codes
from mjp_privacy.experiment.compaction import take_out
from mjp_privacy.experiment.damage import CellDamage, Damage, Fault, fault_lines, find_damage
from mjp_privacy.experiment.damaged_lists import EXPERIMENT, damaged_lists, experiment_files
from mjp_privacy.experiment.image_list import write_images
from mjp_privacy.experiment.places import check_places
from mjp_privacy.experiment.store import ASIDE, RunStore
from mjp_privacy.experiment.timings import tidy_timings

NAMED = 10
"""Damaged files that are called by their names."""


@dataclass(frozen=True)
class Examination:
    """What was found in a folder before anything is written."""

    store: RunStore
    damage: Damage
    said: Sequence[str] = ()  # what is told of it, a line for each file
    is_new: bool = False  # nothing was there yet

    @classmethod
    def of(cls, root: Path) -> Examination:
        """Read all that a folder holds; nothing is written."""
        forget_seals()
        check_places(root)
        store = RunStore(root)
        if not store.stored_cells() and not is_there(store.images_path):
            return cls(store, Damage({}), is_new=True)
        damage = find_damage(store)
        said = [*_said_of_files(store, damage.faults), *damage.remarks, *damaged_lists(store)]
        if is_there(cells_path(root)) and folder_format(root) is None:
            said.append(
                f"cells.json is damaged: it is moved into {ASIDE} and written again; the cells of "
                "other commands come back when these are given again"
            )
        return cls(store, damage, said)

    def mend(self) -> None:
        """Leave only what can be trusted in the folder."""
        if self.is_new:
            return
        for run_id, cell in self.damage.cells.items():
            _set_aside(self.store, run_id, cell)
        sealed = self.store.format != UNSEALED
        cells = cells_path(self.store.root)
        if is_there(cells) and folder_format(self.store.root) is None:
            self.store.set_aside(cells)
        if code_fault(self.store.root, needed=sealed):
            self.store.set_aside(code_file(self.store.root))
        if not self.store.sealed:
            _adopt(self.store)
            return
        if unlisted := self.damage.unlisted:
            seals = {self.store.place(path): read_seal(path) for path in unlisted if is_there(path)}
            write_adopted(self.store.root, {place: seal.digest for place, seal in seals.items()})
        _mend_lists(self.store)


def _said_of_files(store: RunStore, faults: Sequence[Fault]) -> Iterator[str]:
    if faults:
        yield (
            f"{len(faults)} file(s) of rows or pictures are damaged: the files are moved into "
            f"{ASIDE}, their images are attacked again by the command that plans them"
        )
        for line in fault_lines(store, faults, NAMED):
            yield f"  damaged: {shown(line)}"


def _set_aside(store: RunStore, run_id: str, cell: CellDamage) -> None:
    """Move what is damaged, and the rows of its blocks: pictures last, for as long as they are
    there a killed run finds the damage again."""
    for path in cell.rows:
        store.set_aside(path)
    for block in cell.blocks:
        path = store.rows_path(run_id, block)
        if path.is_file():
            store.set_aside(path)
    parts, _ = store.rows_of(run_id)
    if cell.blocks:
        for path in parts:
            take_out(store, run_id, path, cell.blocks)
    for path in cell.pictures:
        if path.exists():
            store.set_aside(path)


def _mend_lists(store: RunStore) -> None:
    """Remove damaged lines of timings.jsonl; whatever is no file of lines is set aside."""
    try:
        store.image_list()
    except BadFile:
        store.set_aside(store.images_path)
    try:
        if store.timings().damaged:
            tidy_timings(store.timings_path, checked=True)
    except BadFile:
        store.set_aside(store.timings_path)


# folders of earlier versions ----------------------------------------------------------------------


def _adopt(store: RunStore) -> None:
    """List the digests of all files without a seal, and give lines their checksums."""
    files = [path for run_id in store.stored_cells() for path in _files(store, run_id)]
    seals = {store.place(path): read_seal(path) for path in files}
    write_adopted(store.root, {p: seal.digest for p, seal in seals.items() if not seal.written})
    _mend_lists(store)
    if is_there(store.images_path):
        write_images(store.images_path, store.image_list().images.values())
    if is_there(store.timings_path):
        tidy_timings(store.timings_path, checked=False)
    seal_codes(store.root)
    for path in filter(is_there, experiment_files(store.root)):
        with suppress(BadFile):
            write_sealed_text(path, f"# {BLANK}\n{EXPERIMENT.text(path)}")
    with suppress(UserError):  # where it cannot be read the run writes it
        store.write_cells(store.read_cells())


def _files(store: RunStore, run_id: str) -> Collection[Path]:
    return [*store.row_files(run_id), *store.pictures.files(run_id).values()]
