"""The valid inputs that are spoiled here: they take some seconds to make, once a session."""

from pathlib import Path

import pytest

from tests.inputs.base import write_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_base(folder)
    return folder
