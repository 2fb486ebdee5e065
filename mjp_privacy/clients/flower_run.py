"""Flower's own programs, started and ended: a simulation, or a SuperLink with SuperNodes.

Both engines are one `flower-superlink` on a free port of the loopback interface, to which the app
is submitted by `flwr run`, as a user would. A simulation's clients are Flower's virtual nodes; a
deployment has a process a SuperNode. Nothing leaves the machine: no telemetry, no update check, no
installing of packages. Whatever ends this process's work ends theirs.

OUT/flower/   Flower's home: the app, its run config, and the programs' logs
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from mjp_privacy.clients.federation_config import FederationConfig, plain
from mjp_privacy.clients.rounds import RESOLVED
from mjp_privacy.errors import UserError
from mjp_privacy.store import output_folder, write_json
from mjp_privacy.training.snapshots import MODEL

Engine = Literal["flower", "flower-deployment"]
HOME, APP, LINK = "flower", "mjp-federation", "loopback"
START_SECONDS, STOP_SECONDS = 60.0, 10.0

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Nothing phones home, and no package is installed while running."""


def run_flower(
    config: FederationConfig,
    data: str | Path,
    out: str | Path,
    engine: Engine = "flower",
    *,
    val: str | Path | None = None,
    device: str = "cpu",
    nodes: int | None = None,
    record: str = "attacked",
) -> Path:
    """All rounds under Flower, or what is left of them; the final model's path.

    nodes   SuperNodes of a deployment; None: a client each, but no more than processors
    record  what is written of each upload: all, attacked (`record.parameters`) or none
    """
    require_flower(engine)
    folder = output_folder(Path(out))
    run: dict[str, str | float] = {
        "config": str(folder / HOME / RESOLVED),
        "data": str(Path(data).resolve()),
        "val": str(Path(val).resolve()) if val else "",
        "out": str(folder.resolve()),
        "device": device,
        "record": record,
    }
    write_json(folder / HOME / RESOLVED, plain(config))
    clients = config.clients.number
    simulated = clients if engine == "flower" else None
    with superlink(folder / HOME, simulated) as link:
        if engine == "flower-deployment":
            link.start_nodes(nodes or min(clients, max(2, os.cpu_count() or 2)))
        link.run(write_app(link.home), run)
    return folder / MODEL


def require_flower(engine: str) -> None:
    if engine not in get_args(Engine):
        raise UserError(f"--engine: expected {' or '.join(get_args(Engine))}, got {engine!r}.")
    missing = [n for n in ("flwr", "ray") if find_spec(n) is None and (n, engine) != _NO_RAY]
    if missing:
        raise UserError(
            f"--engine {engine}: expected the package {missing[0]}, which is not installed here. "
            "pip install '.[federated]' (Python 3.11 or newer)."
        )


_NO_RAY = ("ray", "flower-deployment")


# the app ------------------------------------------------------------------------------------

RUN_CONFIG: Mapping[str, str | float] = {
    "config": "",
    "row": "",
    "data": "",
    "val": "",
    "out": "",
    "device": "cpu",
    "record": "attacked",
    "patience": 60.0,
    "round-timeout": 600.0,
}
"""What the app can be told, and what holds where nothing is said."""


def write_app(home: Path, client: str = "mjp_privacy.clients.flower_app:client_app") -> Path:
    """A Flower app around this installed package."""
    folder = home / APP
    folder.mkdir(parents=True, exist_ok=True)
    config = "\n".join(f"{key} = {json.dumps(value)}" for key, value in RUN_CONFIG.items())
    (folder / "pyproject.toml").write_text(
        f"""[project]
name = "{APP}"
version = "0.0.0"
description = "A federation whose server records every upload"
license = "MIT"
[tool.flwr.app]
publisher = "mjp-privacy"
[tool.flwr.app.components]
serverapp = "mjp_privacy.clients.flower_app:server_app"
clientapp = "{client}"
[tool.flwr.app.config]
{config}
""",
        encoding="utf-8",
    )
    return folder


# the programs -------------------------------------------------------------------------------


@dataclass
class SuperLink:
    """A running SuperLink and the SuperNodes that were started for it."""

    home: Path
    port: int
    simulated: int | None
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_nodes(self, number: int, *, node_config: str = "") -> None:
        """SuperNodes, each with its share of the clients, connected when this returns."""
        for at in range(len(self.nodes), len(self.nodes) + number):
            own = f"partition-id={at} num-partitions={number} {node_config}".strip()
            address = ("--superlink", f"127.0.0.1:{self.port}", "--port", str(_free_port()))
            command = ("flower-supernode", "--insecure", *address, "--node-config", own)
            self.nodes.append(_start(command, self.home, f"supernode{at}"))
        for at, process in enumerate(self.nodes):
            log = self.home / f"supernode{at}.log"
            _wait_for(f"SuperNode {at}", process, log, lambda log=log: b"SuperNode ID" in _read(log))

    def run(self, app: Path, config: Mapping[str, str | float]) -> None:
        """Submit the app, show what its server says, and return when it has finished."""
        values = self.home / "run.toml"
        values.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in config.items()), "utf-8")
        given = ["--run-config", str(values)]
        if self.simulated:
            given += ["--federation-config", _simulation(self.simulated)]
        self._stream(["run", str(app), LINK, *given, "--stream"])
        last = self._runs()[0]
        if last["status"] != "finished:completed":
            raise UserError(
                f"Flower's run ended as {last['status']}: {_reason(last)} "
                f"Logs: {self.home}/superlink.log."
            )

    def _stream(self, arguments: Sequence[str]) -> None:
        """A command of `flwr`, its lines in flwr.log and, where they are our server's, shown."""
        with (self.home / "flwr.log").open("w", encoding="utf-8") as log:
            process = _popen(("flwr", *arguments), self.home, subprocess.PIPE)
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line.decode(errors="replace"))
                log.flush()
            if process.wait():
                raise UserError(
                    f"flwr {arguments[0]} ended with {process.returncode}: "
                    f"{_tail(self.home / 'flwr.log')}"
                )

    def _runs(self) -> list[dict[str, Any]]:
        """The runs of this SuperLink, the last one first."""
        command = ("flwr", "list", LINK, "--format", "json")
        process = _popen(command, self.home, subprocess.PIPE)
        text, _ = process.communicate()
        runs = json.loads(text[text.index(b"{") :])["runs"]
        return list(runs)


@contextmanager
def superlink(home: Path, simulated: int | None = None) -> Iterator[SuperLink]:
    """A SuperLink on loopback; it and all that was started for it end with the block."""
    home.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    connection = f'[superlink]\ndefault = "{LINK}"\n[superlink.{LINK}]\n'
    connection += f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(connection, encoding="utf-8")
    command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--disable-runtime-dependency-installation"]
    command += ["--simulation"] if simulated else []
    process = _start(command, home, "superlink")
    link = SuperLink(home, port, simulated)
    try:
        log, url = home / "superlink.log", f"http://127.0.0.1:{port}/health"
        _wait_for("SuperLink", process, log, lambda: _answers(url))
        yield link
    finally:
        for one in (*link.nodes, process):
            _stop(one)
        shutil.rmtree(home / "apps", ignore_errors=True)  # copies of the app that Flower made


def _simulation(nodes: int) -> str:
    return (
        f"num-supernodes={nodes} client-resources-num-cpus=1 "
        f"init-args-num-cpus={os.cpu_count() or 1}"
    )


def _start(command: Sequence[str], home: Path, name: str) -> subprocess.Popen[bytes]:
    with (home / f"{name}.log").open("wb") as log:
        return _popen(command, home, log)


def _popen(command: Sequence[str], home: Path, output: Any) -> subprocess.Popen[bytes]:
    """A program of this environment, in a process group of its own."""
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join((scripts, os.environ.get("PATH", "")))
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(home.resolve()), "PATH": path}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Politely, then with all that it started."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _wait_for(
    what: str, process: subprocess.Popen[bytes], log: Path, ready: Callable[[], bool]
) -> None:
    until = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > until:
            raise UserError(
                f"Flower's {what} did not start in {START_SECONDS:.0f} s: expected it on the "
                f"loopback interface. {log} ends with: {_tail(log)}"
            )
        time.sleep(0.2)


def _answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _tail(path: Path) -> str:
    return " | ".join(_read(path).decode(errors="replace").split("\n")[-4:]).strip(" |")


def _reason(run: Mapping[str, Any]) -> str:
    return str(run.get("details") or run.get("status-details") or "")
