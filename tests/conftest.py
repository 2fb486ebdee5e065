"""Fixtures every test may use."""

import os
import sys
import warnings

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: a thread each, and for those
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # they start; read when NumPy and torch load

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import settings

from mjp_privacy.core import machine

WORKER_MEMORY = 3 << 30  # what a process of the tests may take, with room for those it starts

settings.register_profile("day", max_examples=50)
settings.register_profile("nightly", max_examples=300)
settings.load_profile("day")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """How many processes `pytest -n auto` starts; None: as many as xdist would."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ or not hasattr(os, "sysconf"):
        return None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone knows which cores are ours
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, memory // WORKER_MEMORY))


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


@pytest.fixture(autouse=True)
def _one_thread_for_tiny_steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Training tests take thousands of tiny steps; a second thread only waits in them. Flower's
    weights are compared with those of one process after Adam's steps, which magnify the rounding
    of gradients near zero: another number of threads rounds otherwise."""
    tiny = request.path.name.startswith(("test_training", "test_flower_app"))
    with machine.one_thread() if tiny else nullcontext():
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Rows of several processes equal those of one bit for bit where threads are equally many."""
    with machine.one_thread():
        yield


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that leaves gradients switched off is named in a warning and spoils no other: one run
    of five met them off in a fixture, and who had done it is not found yet."""
    torch = sys.modules.get("torch")
    if hasattr(torch, "is_grad_enabled") and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        warnings.warn(f"{item.nodeid} left gradients switched off", stacklevel=1)
