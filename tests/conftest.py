"""Fixtures every test may use."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of third-party weights and images; tests that need it skip without it."""
    folder = os.environ.get("MJP_PRIVACY_DATA")
    if not folder:
        pytest.skip("MJP_PRIVACY_DATA is not set: no real weights and images to test on")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"MJP_PRIVACY_DATA={folder} is not a folder")
    return path
