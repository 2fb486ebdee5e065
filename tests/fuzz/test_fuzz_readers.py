"""Every reader of files meets changed files: only a UserError may come out, soon, and in bounds.

The same inputs each time, fifty times as many by `make nightly`; `tools/fuzz --seconds 600` goes on
with others.
"""

import contextlib
import sys

import pytest

from mjp_privacy.core.errors import UserError
from tests.fuzz.campaign import fuzzed, summed
from tests.fuzz.readers import READERS
from tests.fuzz.trial import SLOW, Tally
from tests.helpers.night import nightly
from tests.inputs.shared import shared_table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds of processes as on Linux")

SECONDS, SEED = 5.0, 16
BY_DAY, BY_NIGHT = 10, 1500
MOST_MIB = 2048


@pytest.mark.parametrize("inputs", [BY_DAY, nightly(BY_NIGHT)])
def test_every_reader_meets_changed_files(inputs: int) -> None:
    """All in one test, two readers at a time."""
    tallies = list(fuzzed(shared_table().server, list(READERS), SECONDS, SEED, inputs))
    assert len(tallies) == len(READERS)
    for tally in tallies:
        faults = [f"{what} [seed {seed}]" for what, seed in tally.faults.items()]
        assert not faults, "\n".join([tally.reader, *faults])
        assert tally.tried >= 10, tally.reader
        assert tally.refused or tally.reader in FORGIVING, tally.reader  # the changes do reach it
        assert tally.slowest < SLOW, tally.reader
        assert tally.memory < MOST_MIB, tally.reader


def test_every_reader_reads_what_was_not_changed() -> None:
    """Else nothing but the first check of each would be tried."""
    from pathlib import Path

    from tests.fuzz.trial import contents_of, workplace

    table = shared_table()
    for name, reader in READERS.items():
        folder = workplace(reader, table.base, table.base.parent / "unchanged" / name)
        for content in contents_of(reader, table.base):
            place: Path = reader.place(folder)
            place.unlink(missing_ok=True)
            place.write_bytes(content)
            with contextlib.suppress(*([UserError] if name in READ_NOTHING else [])):
                reader.read(folder)


FORGIVING = {"training curves", "cells", "rows", "report of rows", "report of cells", "pictures"}
"""They leave out what is damaged, and say so."""

READ_NOTHING = {
    "training state",  # of another config: what comes before is the whole reading
    "config beside weights",  # of another architecture than the weights
    "image",  # modes that have no fixed range
    "label file",
}


def test_what_is_counted() -> None:
    whole = summed(
        [Tally("x", 3, 1, 2, 0.5), Tally("x", 4, 2, 2, 1.5, memory=7, faults={"a": "1"})]
    )
    assert whole == Tally("x", 7, 3, 4, 1.5, memory=7, faults={"a": "1"})
