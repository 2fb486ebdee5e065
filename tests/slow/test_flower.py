"""The federation under Flower's real engines: its simulation, and a SuperLink with SuperNodes.

Two minutes in all, most of it in which processes start and ask each other for news.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.helpers.federations import assert_close, federated_images, small_federation

pytest.importorskip("flwr", reason="the extra `federated` is not installed")

from mjp_privacy.core.errors import UserError
from mjp_privacy.federation.config import FederationConfig
from mjp_privacy.federation.flower import run as flower_programs
from mjp_privacy.federation.flower.run import run_flower, superlink
from mjp_privacy.federation.rounds import federate
from tests.helpers.uploads import load_uploads

pytestmark = pytest.mark.nightly
PROGRAMS = ("flwr", "flower-", "raylet", "ray::")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federated_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def config() -> FederationConfig:
    """Plain SGD and one local step; clients 0 and 1 in round 0, and again in round 1."""
    return small_federation(rounds=2, clients={"number": 3, "per_round": 2})


@pytest.fixture(scope="module")
def reference(
    data: Path, config: FederationConfig, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("reference") / "run"
    federate(config, data, out, federated_images(out.parent / "val"))
    return out


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    before = running()
    yield
    until = time.monotonic() + 15
    while (left := running() - before) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left


def running() -> set[tuple[int, str]]:
    """Flower's and Ray's processes that tests of this file have started, without zombies."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            started_by = (place / "environ").read_bytes()
        except OSError:
            continue
        if f"PYTEST_CURRENT_TEST=tests/slow/{Path(__file__).name}".encode() not in started_by:
            continue
        names = [Path(word.decode(errors="replace")).name for word in words[:2]]
        found |= {(int(place.name), name) for name in names if name.startswith(PROGRAMS)}
    return found


def listening() -> set[str]:
    """Addresses, as the kernel writes them, on which those processes listen."""
    sockets, found = set(), set()
    for pid, _ in running():
        with contextlib.suppress(OSError):
            sockets |= {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                found.add(local.split(":")[0])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@contextlib.contextmanager
def only_loopback() -> Iterator[None]:
    """Nobody listens on another address; looked at twice a second."""
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            seen.update(listening())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert seen
    assert seen <= LOOPBACK


# parity -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine", [pytest.param("flower", marks=pytest.mark.engine), "flower-deployment"]
)
def test_final_weights_are_those_of_one_process(
    engine: Any, data: Path, config: FederationConfig, reference: Path, tmp_path: Path
) -> None:
    """To 1e-6, and every upload of every client is a file. What the files hold, and probes:
    tests/federation/test_flower_app.py."""
    val = federated_images(tmp_path / "val")
    with only_loopback():
        model = run_flower(config, data, tmp_path / "run", engine, val=val, record="all")
    assert_close(load_file(model), load_file(reference / "model.safetensors"))
    received = [entry.name for entry in load_uploads(tmp_path / "run/received")]
    assert received == [f"r0000{r}_c000{c}" for r in (0, 1) for c in (0, 1)]
    rounds = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert [line["missing"] for line in rounds] == [{}, {}]


# starting and ending ------------------------------------------------------------------------


def test_the_programs_end_with_whoever_started_them(tmp_path: Path) -> None:
    """Killed without a chance to tidy up."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from mjp_privacy.federation.flower.run import superlink\n"
        "with superlink(Path(sys.argv[1])) as link:\n"
        "    link.start_nodes(1); print('up', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "home")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert len(running()) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()  # the fixture looks whether something is left


def test_programs_that_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with superlink(tmp_path / "home") as link, pytest.raises(UserError, match=r"run\.log"):
        link.run(tmp_path / "nothing", {})
    monkeypatch.setattr(flower_programs, "free_port", lambda: 99999)
    with pytest.raises(UserError, match=r"superlink\.log"), superlink(tmp_path / "other"):
        pass
