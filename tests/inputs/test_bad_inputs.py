"""Bad inputs of every command: each is answered in a few lines that name it, none breaks anything.

The cases are made from the schemas and from every file that a command reads; a fixed choice of
them runs here, `tools/fuzz` runs all. A failed one is tried alone with

    tools/fuzz --match 'ITS NAME' --keep FOLDER
"""

import sys
from collections.abc import Callable

import pytest

from mjp_privacy.core.text import shown
from tests.inputs.case import Case
from tests.inputs.forks import Job, Outcome
from tests.inputs.shared import shared_table
from tests.inputs.table import ALWAYS, all_cases, chosen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds of processes as on Linux")

NUMBER, SEED = 300, 16
CASES = {case.title: case for case in chosen(all_cases(), NUMBER, SEED)}

Outcomes = Callable[[Case], Outcome]


@pytest.fixture(scope="module")
def outcome_of(request: pytest.FixtureRequest) -> Outcomes:
    """The outcome of a case; at the first question all cases that this session asks of are run."""
    known: dict[str, Outcome] = {}
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    parameters = [call.params.get("case") for call in calls if call]
    asked = [case for case in parameters if isinstance(case, Case)]  # other tests have cases too

    def ask(case: Case) -> Outcome:
        if case.title not in known:
            wanted = asked if case in asked else [case]
            known.update({each.title: outcome for each, outcome in shared_table().run(wanted)})
        if case.title not in known:
            pytest.skip("a superuser without mount namespaces: it could replace a device")
        return known[case.title]

    return ask


def test_there_are_enough_and_of_every_command() -> None:
    from mjp_privacy.cli import COMMANDS

    assert len(CASES) >= 250
    assert {case.argv[0] for case in CASES.values() if case.argv} >= set(COMMANDS)
    assert set(ALWAYS) <= set(CASES), sorted(set(ALWAYS) - set(CASES))


@pytest.mark.parametrize("case", CASES.values(), ids=[shown(title, 120) for title in CASES])
def test_a_bad_input(case: Case, outcome_of: Outcomes) -> None:
    outcome = outcome_of(case)
    assert not case.faults(outcome), outcome.said[-3000:]


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
