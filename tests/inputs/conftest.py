"""The valid inputs that are spoiled here: they take some seconds to make, once a session."""

from pathlib import Path

import matplotlib.pyplot  # noqa: F401  imported once here, not in every forked command
import pytest

from mjp_privacy.cli import COMMANDS
from tests.inputs.base import write_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for command in COMMANDS.values():
        command.load()
    folder = tmp_path_factory.mktemp("base")
    write_base(folder)
    return folder
