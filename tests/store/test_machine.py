"""Whatever happens to a run folder, nothing that was written is lost or read wrong.

A model in memory knows which number each image was last written with. Files are written, written
again with other images, left half by a kill, flipped, dropped, compacted and set aside. What is in
no damaged file must be read as the model has it; what was in one may be older or missing, and the
file must be named.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore, stored_files
from tests.helpers.runs import flip
from tests.store.material import same_pictures, scores, write

IMAGES = ("a.png", "class_1/b.png", "c:d", "e~1", "nan", "ü\n")
Key = tuple[str, str]  # a cell and an image

cells = st.sampled_from(["c1", "c2"])


class Folder(RuleBasedStateMachine):
    """A run folder and what should be in it."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp()) / "run"
        self.store = RunStore(self.root)
        self.number = 0
        self.sure: dict[Key, int] = {}  # what must be read; -1: not done
        self.open: set[Key] = set()  # what was in a damaged file: anything that was ever written
        self.ever: dict[Key, set[int]] = {}
        self.flipped: set[Path] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.root.parent)

    # what happens -------------------------------------------------------------------------------

    @rule(
        cell=cells,
        block=st.integers(0, 2),
        images=st.sets(st.sampled_from(IMAGES), min_size=1),
        status=st.sampled_from(["ok", "ok", "failed"]),
    )
    def write(self, cell: str, block: int, images: set[str], status: str) -> None:
        numbers = {image: self.number + at for at, image in enumerate(sorted(images))}
        self.number += len(images)
        write(self.store, numbers, block=block, cell=cell, status=status)
        for image, number in numbers.items():
            self.sure[cell, image] = number if status == "ok" else -1
            self.ever.setdefault((cell, image), set()).add(self.sure[cell, image])
            self.open.discard((cell, image))
        self._forget_what_is_gone()

    @rule(cell=cells, share=st.floats(0, 1))
    def killed_while_writing(self, cell: str, share: float) -> None:
        known = self.store.files(cell)
        content = known[-1].path.read_bytes() if known else bytes(999)
        self.store.folder(cell).mkdir(parents=True, exist_ok=True)
        half = self.store.folder(cell) / f".00000.{len(known) + 1:04d}.parquet.12@here.tmp"
        half.write_bytes(content[: int(share * len(content))])

    @precondition(lambda self: self._files())
    @rule(at=st.integers(0, 999), share=st.floats(0, 1), bit=st.integers(0, 7))
    def flip(self, at: int, share: float, bit: int) -> None:
        path = self._files()[at % len(self._files())]
        self._no_longer_sure(path)
        flip(path, share, bit)
        self.flipped.add(path)

    @precondition(lambda self: self._files())
    @rule(at=st.integers(0, 999))
    def drop(self, at: int) -> None:
        path = self._files()[at % len(self._files())]
        self._no_longer_sure(path)
        path.unlink()
        self._forget_what_is_gone()

    @rule(cell=cells, fewest=st.sampled_from([1, 3, 50]))
    def compact(self, cell: str, fewest: int) -> None:
        damaged = any(path.parent.name == cell for path in self.flipped)
        try:
            self.store.compact(cell, fewest)
        except (ValueError, UserError):
            assert damaged, "a whole cell could not be compacted"
            return
        if not damaged and not any(key[0] == cell for key in self.open):
            contents = RunStore(self.root).cell(cell).contents
            inside = [name for content in contents for name in content.ids]
            assert len(inside) == len({*inside}), "an image stands in two files"

    @rule()
    def open_again(self) -> None:
        self.store = RunStore(self.root)

    @rule()
    def set_aside(self) -> None:
        self.store.set_aside(self.store.damaged())
        self.flipped.clear()
        assert self.store.damaged() == []

    # what must be -------------------------------------------------------------------------------

    @invariant()
    def damage_is_named(self) -> None:
        assert {*self.store.damaged()} == self.flipped

    @invariant()
    def nothing_is_lost_or_wrong(self) -> None:
        whole = self.store.without(self.flipped) if self.flipped else self.store
        for cell in ("c1", "c2"):
            found = scores(whole, cell)
            wanted = {image: value for (of, image), value in self.sure.items() if of == cell}
            assert {image: found[image] for image in wanted} == wanted
            for image in found.keys() - wanted.keys():
                assert (cell, image) in self.open
                assert found[image] in self.ever[cell, image]
            done = {image for image, value in found.items() if value >= 0}
            assert {*whole.pictured(cell)} == {*whole.finished(cell)} == done
            for image, value in found.items():
                assert same_pictures(whole.pictures(cell, image), int(value))

    # the model ----------------------------------------------------------------------------------

    def _files(self) -> list[Path]:
        """Files of rows that are not damaged yet."""
        return [
            file.path
            for cell in self.store.stored_cells()
            for file in stored_files(self.store.folder(cell))
            if file.path not in self.flipped
        ]

    def _no_longer_sure(self, path: Path) -> None:
        """The images that count in this file may be older or missing from now on."""
        cell = path.parent.name
        rows = self.store.without(self.flipped).cell(cell)
        at = [file.path for file in rows.files].index(path)
        for image in (name for name, (place, _) in rows.place.items() if place == at):
            self.sure.pop((cell, image), None)
            self.open.add((cell, image))

    def _forget_what_is_gone(self) -> None:
        """Damaged files that a later one replaced need no mending."""
        self.flipped = {path for path in self.flipped if path.exists()}


TestFolder = Folder.TestCase
TestFolder.settings = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
