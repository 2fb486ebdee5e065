"""A federation under Flower: as a simulation, or as a SuperLink with SuperNodes on loopback.

Both start a `flower-superlink` and submit the app to it with `flwr run`, as a user would.

OUT/flower/   Flower's home: the app, its run config, and the programs' logs
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import lock, output_folder, write_json
from mjp_privacy.core.schema import PathText, Positive, schema
from mjp_privacy.core.text import shown
from mjp_privacy.federation.config import FederationConfig
from mjp_privacy.federation.rounds import RESOLVED
from mjp_privacy.federation.task import data_path
from mjp_privacy.training.run_files import MODEL

Engine = Literal["flower", "flower-deployment"]
HOME, NAME = "flower", "mjp-federation"
CLIENT_APP = "mjp_privacy.federation.flower.app:client_app"
SERVER_APP = "mjp_privacy.federation.flower.app:server_app"


@schema
class RunOptions:
    """The app's options with their defaults, in Flower's run config with - for _."""

    config: PathText = ""
    row: str = ""
    data: PathText = ""
    val: str = ""
    out: PathText = ""
    device: str = "cpu"
    record: Literal["all", "attacked", "none"] = "attacked"
    """Which tensors of each upload are written: every one, those of `record.parameters`, none."""
    patience: Positive = 60.0
    """Seconds to wait for the first SuperNode."""
    round_timeout: Positive = 600.0
    """Seconds after which a client that has not answered is left out of its round."""


RUN_CONFIG: Mapping[str, str | float] = {
    name.replace("_", "-"): value for name, value in dataclasses.asdict(RunOptions()).items()
}
"""The options as the app's defaults; pyproject.toml must hold the same."""


def run_flower(
    config: FederationConfig,
    data: str | Path,
    out: str | Path,
    engine: Engine = "flower",
    *,
    val: str | Path | None = None,
    device: str = "cpu",
    record: str = "attacked",
    client: str = CLIENT_APP,
) -> Path:
    """Run all rounds that are left under Flower; the final model's path.

    device, record  as in RunOptions
    client  the ClientApp as module:attribute, Flower's notation

    `run_flower(config, "images", "out", "flower-deployment", record="all")`
    """
    for name in ("flwr", "ray") if engine == "flower" else ("flwr",):
        if find_spec(name) is None:
            raise UserError(
                f"--engine {engine}: expected the package {name}, which is not installed here. "
                "Run pip install '.[federated]' on Python 3.11 or newer."
            )
    folder = output_folder(Path(out)).resolve()
    home, number = folder / HOME, config.clients.number
    run: dict[str, str | float] = {
        "config": str(home / RESOLVED),
        "data": data_path(data),
        "val": data_path(val) if val else "",
        "out": str(folder),
        "device": device,
        "record": record,
    }
    simulated = number if engine == "flower" else None
    with lock(home), superlink(home, simulated) as link:
        write_json(home / RESOLVED, dataclasses.asdict(config))
        if simulated is None:
            link.start_nodes(min(number, max(2, os.cpu_count() or 2)))
        link.run(write_app(home / NAME, client), run)
    return folder / MODEL


def write_app(folder: Path, client: str = CLIENT_APP) -> Path:
    """Write a Flower app that refers to this package and copies none of its code; its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(
        f"""[project]
name = "{NAME}"
version = "0.0.0"
description = "A federation whose server records every upload"
license = "MIT"
[tool.flwr.app]
publisher = "mjp-privacy"
[tool.flwr.app.components]
serverapp = "{SERVER_APP}"
clientapp = "{client}"
[tool.flwr.app.config]
{_toml(RUN_CONFIG)}""",
        encoding="utf-8",
    )
    return folder


def _toml(values: Mapping[str, str | float]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


# Flower's programs ------------------------------------------------------------------------------

LINK = "loopback"  # the name of our SuperLink in Flower's configuration
MARK = "federation | "  # opens the lines of our server, to tell them from Flower's
START_SECONDS, STOP_SECONDS = 300.0, 10.0  # the first where many others are at work, too

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment in which nothing phones home and no package is installed. The last variable makes Ray
listen on the loopback interface only, on any system."""

Process = subprocess.Popen[bytes]


@contextmanager
def superlink(home: Path, simulated: int | None = None) -> Iterator[SuperLink]:
    """A SuperLink for a `with` block; at its end, it and all its SuperNodes are ended.

    simulated  number of virtual SuperNodes; None: real ones, by `start_nodes`

    `with superlink(home) as link: link.start_nodes(2); link.run(app, {})`
    """
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    address = f"127.0.0.1:{port}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{LINK}"\n'
        f'[superlink.{LINK}]\naddress = "{address}"\ninsecure = true\n',
        encoding="utf-8",
    )
    command = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--simulation"] if simulated else []
    # Ray's sockets need a short path, and Ray does not remove its files.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        places = {"FLWR_HOME": str(home.resolve()), "RAY_TMPDIR": scratch, "PATH": programs}
        link = SuperLink(home, address, simulated, {**os.environ, **QUIET, **places})
        try:
            started = link.start(command, "superlink")
            link.wait_for(started, lambda _: _answers(f"http://{address}/health"))
            yield link
        finally:
            for process, _ in link.started:
                _stop(process)
            shutil.rmtree(home / "apps", ignore_errors=True)  # Flower's copies of the app


@dataclass
class SuperLink:
    """A running SuperLink and the SuperNodes that were started for it; see `superlink`."""

    home: Path
    address: str
    simulated: int | None
    environment: Mapping[str, str]
    started: list[tuple[Process, Path]] = field(default_factory=list)
    """Each program with its log."""

    def start(self, command: Sequence[str], name: str) -> tuple[Process, Path]:
        """Start a program of which all output goes into a log."""
        log = self.home / f"{name}.log"
        with log.open("wb") as file:
            self.started.append((_popen(command, file, self.environment), log))
        return self.started[-1]

    def wait_for(self, program: tuple[Process, Path], ready: Callable[[Path], bool]) -> None:
        """Wait until a program is ready, as its log may say; UserError with the end of the log
        where it does not come to it."""
        process, log = program
        until = time.monotonic() + START_SECONDS
        while not ready(log):
            if process.poll() is not None or time.monotonic() > until:
                raise UserError(
                    f"Flower's {log.stem} did not start: expected it on the loopback interface "
                    f"within {START_SECONDS:.0f} s. {log} ends with: {_tail(log)}"
                )
            time.sleep(0.2)

    def start_nodes(self, number: int) -> None:
        """Start SuperNodes that share the clients among them; on return they are connected."""
        nodes = []
        for node in range(number):
            command = ["flower-supernode", "--insecure", "--superlink", self.address]
            command += ["--port", str(free_port())]
            nodes.append(self.start(command, f"supernode{node}"))
        for program in nodes:
            self.wait_for(program, lambda log: b"SuperNode ID" in log.read_bytes())

    def run(self, app: Path, config: Mapping[str, str | float]) -> None:
        """Submit the app, show what its server says, and return when it has finished."""
        values = self.home / "run.toml"
        values.write_text(_toml(config), "utf-8")
        options = ["--run-config", str(values)]
        if self.simulated:  # one processor for each node at work
            each = f"client-resources-num-cpus=1 init-args-num-cpus={os.cpu_count() or 1}"
            options += ["--federation-config", f"num-supernodes={self.simulated} {each}"]
        self._command(["run", str(app), LINK, *options, "--stream"])
        listed = self._command(["list", LINK, "--format", "json"])
        try:
            run = json.loads(listed[listed.index("{") :])["runs"][0]
            status, details = str(run["status"]), str(run.get("status-details", ""))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"flwr list: expected the run's status as JSON, got {shown(listed, 200)!r}. "
                "Install the version of Flower that pyproject.toml names."
            ) from error
        if status != "finished:completed":
            why = details.partition("failed with exception: ")[2] or details
            log = self.home / "run.log"
            raise UserError(f"Flower's run ended as {status}. {why} Flower's output is in {log}.")

    def _command(self, arguments: Sequence[str]) -> str:
        """Run a `flwr` command; its output, which is also logged. Our server's lines are shown."""
        output, log = [], self.home / f"{arguments[0]}.log"
        process = _popen(["flwr", *arguments], subprocess.PIPE, self.environment)
        assert process.stdout is not None
        try:
            with log.open("w", encoding="utf-8") as file:
                for raw in process.stdout:
                    output.append(raw.decode(errors="replace"))
                    file.write(output[-1])
                    file.flush()
                    if output[-1].startswith(MARK):
                        print(output[-1].removeprefix(MARK), end="", file=sys.stderr, flush=True)
            if process.wait():
                raise UserError(f"flwr {arguments[0]} failed. {log} ends with: {_tail(log)}")
        finally:
            _stop(process)
        return "".join(output)


# processes --------------------------------------------------------------------------------------


def _popen(command: Sequence[str], output: Any, environment: Mapping[str, str]) -> Process:
    """Start a program in its own process group, which ends when this process does."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=_follow_parent if sys.platform == "linux" else None,
    )


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def _follow_parent() -> None:
    """On Linux, have this process sent SIGTERM when its parent is gone, however that happened."""
    if _LIBC is not None:
        _LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


def _stop(process: Process) -> None:
    """Ask a process to end, wait a little, then kill it and everything that it started."""
    if process.poll() is None:
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(path: Path) -> str:
    lines = path.read_bytes().decode(errors="replace").split("\n")
    return " | ".join(lines[-4:]).strip(" |")
