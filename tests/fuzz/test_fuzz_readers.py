"""Every reader of files meets changed files: only a UserError may come out, soon, and in bounds.

The same inputs each time; `tools/fuzz --seconds 600` goes on with others.
"""

import contextlib
import sys
from collections.abc import Mapping

import pytest

from mjp_privacy.core.errors import UserError
from tests.fuzz.campaign import fuzzed, summed
from tests.fuzz.readers import READERS
from tests.fuzz.trial import SLOW, Tally
from tests.inputs.shared import shared_table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds of processes as on Linux")

SECONDS, INPUTS, SEED = 5.0, 1500, 16
MOST_MIB = 2048


@pytest.fixture(scope="module")
def tallies(request: pytest.FixtureRequest) -> Mapping[str, Tally]:
    """What came of the readers that this session asks of, two at a time."""
    asked = {item.name for item in request.session.items}
    names = [name for name in READERS if f"test_a_reader_meets_changed_files[{name}]" in asked]
    server = shared_table().server
    return {tally.reader: tally for tally in fuzzed(server, names, SECONDS, SEED, INPUTS)}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_meets_changed_files(name: str, tallies: Mapping[str, Tally]) -> None:
    tally = tallies[name]
    assert not tally.faults, "\n".join(
        f"{what} [seed {seed}]" for what, seed in tally.faults.items()
    )
    assert tally.tried >= 10
    assert tally.refused or name in FORGIVING  # the changes do reach it
    assert tally.slowest < SLOW
    assert tally.memory < MOST_MIB


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


FORGIVING = {
    "timings",
    "training curves",
    "code",
    "images.csv",
    "rows",
    "report of rows",
    "pictures",
}
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
