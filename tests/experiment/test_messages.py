"""Lines between the processes of a run: what is none is a ValueError, whatever stands in it."""

import pytest
from mjp_privacy.experiment.messages import message_of

NO_MESSAGES = (
    *("", "7", "null", "[]", '["a"]', "{}", '["BlockRead", 7]', '["no such", {}]', "[[], {}]"),
    "[" * 100_000,
)


@pytest.mark.parametrize("line", NO_MESSAGES)
def test_a_line_that_is_no_message(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- of pydantic or of json, as it comes
        message_of(line)
