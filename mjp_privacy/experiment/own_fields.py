"""Options of the command line that do not reach entries of the grid, which set their own value.

`--client.batch 4` and `--dtypes float64` change the experiment's client and precisions; an entry
of the grid that names its own keeps it. Said here, so that nobody takes a figure of batch 1 for
one of batch 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import plain
from mjp_privacy.experiment.config import Experiment, GridEntry

CLIENT, DTYPES = "--client.", "dtypes"


def unreached(argv: Sequence[str], experiment: Experiment) -> list[str]:
    """A note for each option of this command line that some entries of the grid do not take.

    Raises where no entry takes it, because the option would change nothing. `experiment` is the
    one that the options have changed already.

        unreached(["batches.yaml", "--client.batch", "4"], experiment)
    """
    notes = []
    for option, field in _given(argv).items():
        wanted = experiment.dtypes if field == DTYPES else getattr(experiment.client, field)
        own = [
            value
            for entry in experiment.grid
            if (value := _own(entry, field)) is not None and not _same(value, wanted)
        ]
        if not own:
            continue
        values = plain(", ".join(dict.fromkeys(map(_text, own))))
        if len(own) == len(experiment.grid):
            raise UserError(
                f"{option} would change nothing: expected an entry in the grid of "
                f"{experiment.name} without its own {field}, but they say {values}. Leave the "
                "option out, or change a copy of the config."
            )
        notes.append(
            f"note: {option} does not reach {len(own)} of the grid's {len(experiment.grid)} "
            f"entries, whose own {field} is {values}"
        )
    return notes


def _given(argv: Sequence[str]) -> Mapping[str, str]:
    """The options of this command line that an entry can have its own value of, with its field."""
    fields = {
        field.name.replace("_", "-"): field.name for field in dataclasses.fields(ClientConfig)
    }
    given = {}
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        field = name.removeprefix(CLIENT)
        if name == f"--{DTYPES}":
            given[name] = DTYPES
        elif name.startswith(CLIENT):
            given[name] = fields.get(field) or fields[field.removeprefix("no-")]
    return given


def _own(entry: GridEntry, field: str) -> Any:
    """What the entry says of this field; None where it leaves it to the experiment."""
    return entry.dtypes if field == DTYPES else (entry.client or {}).get(field)


def _same(own: Any, wanted: Any) -> bool:
    """Whether two values are the same, a list like a tuple."""
    both = (own, wanted)
    first, second = (tuple(value) if isinstance(value, list) else value for value in both)
    return bool(first == second)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)
