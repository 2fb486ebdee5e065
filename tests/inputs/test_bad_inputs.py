"""Bad inputs of every command: each is answered in a few lines that name it, none breaks anything.

The cases are made from the schemas and from every file that a command reads; a fixed choice of
them runs here, a larger one by `make nightly`, and `tools/fuzz` runs all. A failed one is tried
alone with

    tools/fuzz --match 'ITS NAME' --keep FOLDER
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest

from mjp_privacy.cli import COMMANDS
from tests.inputs.case import Case
from tests.inputs.forks import Job, Outcome
from tests.inputs.shared import shared_table
from tests.inputs.table import ALWAYS, all_cases, chosen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds of processes as on Linux")

BY_DAY, BY_NIGHT, SEED = 60, 300, 16
CASES = chosen(all_cases(), BY_NIGHT, SEED)
FEW = chosen(all_cases(), BY_DAY, SEED)


def by_command(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """The cases of each command, which a single test runs: many at once, of one server."""
    found: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        found[case.argv[0] if case.argv and case.argv[0] in COMMANDS else "mjp"].append(case)
    return found


def test_there_are_enough_and_of_every_command() -> None:
    titles = {case.title for case in CASES}
    assert len(titles) >= 250
    assert set(ALWAYS) <= {case.title for case in FEW}
    others = {"demo"}  # attack and report, with their own checks
    assert set(COMMANDS) - others <= set(by_command(CASES))


@pytest.mark.parametrize("command", by_command(FEW))
def test_bad_inputs(command: str) -> None:
    none_breaks(by_command(FEW)[command])


@pytest.mark.nightly
@pytest.mark.parametrize("command", by_command(CASES))
def test_more_bad_inputs(command: str) -> None:
    none_breaks(by_command(CASES)[command])


def none_breaks(cases: Sequence[Case]) -> None:
    """Cases that would meet devices which a superuser could replace are not run at all."""
    broken = [
        f"{case.title}: {fault}\n{outcome.said[-1000:]}"
        for case, outcome in shared_table().run(cases)
        for fault in case.faults(outcome)
    ]
    assert not broken, "\n".join(broken)


def test_good_inputs_pass() -> None:
    """The same commands with what was not spoiled: the table measures the spoiling."""
    from tests.inputs.cases_commands import GOOD

    table = shared_table()
    cases = [
        Case("good", "good", (command, *words), copied=("*",)) for command, words in GOOD.items()
    ]
    for case, outcome in table.run(cases):
        assert outcome.code == 0, f"{case.argv}: {outcome.said}"


def test_a_hang_a_traceback_and_a_long_answer_are_faults() -> None:
    case = Case("x", "x", ("list",), expected="refused", names=("file.json",), field="lr")
    job = Job("x", [], None)  # type: ignore[arg-type]

    def said(code: int, errors: str, hung: bool = False) -> list[str]:
        return case.faults(Outcome(job, code, 1.0, 1.0, 1, hung, "", errors))

    trace = 'Traceback (most recent call last):\n  File "/x/mjp_privacy/a.py", line 3, in f\n'
    trace += "KeyError: 1"
    assert "KeyError: 1 at mjp_privacy/a.py:3 in f" in said(1, trace)[0]
    assert "HANG" in said(-9, "", hung=True)[0]
    assert "EXIT -9" in said(-9, "")[0]
    assert "EXIT 70" in said(70, "a fault of mjp-privacy")[0]
    assert "ACCEPTED" in said(0, "fine")[0]
    assert "LONG" in said(2, "file.json lr\n" * 100)[0]
    assert "CONTROL" in said(2, "file.json lr \x1b[2J")[0]
    assert "NAMES NEITHER" in said(2, "error: lr")[0]
    assert "FIELD lr" in said(2, "error: file.json")[0]
    assert said(2, "error: file.json, lr: expected a number") == []
