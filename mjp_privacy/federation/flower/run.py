"""A federation under Flower: as a simulation, or as a SuperLink with SuperNodes on loopback.

Both start a `flower-superlink` and submit the app to it with `flwr run`, as a user would. In a
simulation, clients are Flower's virtual nodes; a deployment has a process for each SuperNode.

OUT/flower/   Flower's home: the app, its run config, and the programs' logs
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import lock, output_folder, write_json
from mjp_privacy.data.places import keep_apart
from mjp_privacy.federation.config import FederationConfig, plain
from mjp_privacy.federation.flower.programs import superlink
from mjp_privacy.federation.images import data_path
from mjp_privacy.federation.rounds import RESOLVED
from mjp_privacy.training.snapshots import MODEL

Engine = Literal["flower", "flower-deployment"]
HOME = "flower"
NAME = "mjp-federation"
CLIENT_APP = "mjp_privacy.federation.flower.app:client_app"
SERVER_APP = "mjp_privacy.federation.flower.app:server_app"

RunConfig = Mapping[str, str | float]
RUN_CONFIG: RunConfig = {
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
"""The app's options with their defaults; pyproject.toml must hold the same.

record  which tensors of each upload are written: all, attacked (`record.parameters`) or none
patience  seconds within which every client should have a SuperNode
round-timeout  seconds after which a client that has not answered is left out of its round
"""


def run_flower(
    config: FederationConfig,
    data: str | Path,
    out: str | Path,
    engine: str = "flower",
    *,
    val: str | Path | None = None,
    nodes: int | None = None,
    client: str = CLIENT_APP,
    **options: str | float,
) -> Path:
    """Run all rounds that are left under Flower; the final model's path.

    nodes  SuperNodes of a deployment; None: one for each client, at most as many as processors
    client  the ClientApp as module:attribute, Flower's notation
    options  those of RUN_CONFIG: device, record, patience, round_timeout

    `run_flower(config, "images", "out", "flower-deployment", nodes=2, record="all")`
    """
    require_flower(engine)
    keep_apart(out, {"--data": data, "--val": val})
    folder = output_folder(Path(out)).resolve()
    home = folder / HOME
    run: dict[str, str | float] = {
        "config": str(home / RESOLVED),
        "data": data_path(data),
        "val": data_path(val) if val else "",
        "out": str(folder),
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    if unknown := sorted(set(run) - set(RUN_CONFIG)):
        raise UserError(
            f"Flower's options: expected {', '.join(RUN_CONFIG)}, got {', '.join(unknown)}."
        )
    number = config.clients.number
    if nodes is not None and not 1 <= nodes <= number:
        raise UserError(
            f"nodes: expected 1 to {number} SuperNodes for {number} clients, got {nodes}."
        )
    simulated = number if engine == "flower" else None
    with lock(home), superlink(home, simulated) as link:
        write_json(home / RESOLVED, plain(config))
        if simulated is None:
            link.start_nodes(nodes or min(number, max(2, os.cpu_count() or 2)))
        link.run(write_app(home / NAME, client), run)
    return folder / MODEL


def require_flower(engine: str) -> None:
    """Raise UserError for an unknown engine, or where a package that it needs is missing."""
    if engine not in get_args(Engine):
        raise UserError(f"--engine: expected {' or '.join(get_args(Engine))}, got {engine!r}.")
    needed = ("flwr", "ray") if engine == "flower" else ("flwr",)
    if missing := [name for name in needed if find_spec(name) is None]:
        raise UserError(
            f"--engine {engine}: expected the package {missing[0]}, which is not installed here "
            f"(Python {sys.version_info.major}.{sys.version_info.minor}). Run "
            "pip install '.[federated]' on Python 3.11 or newer."
        )


def write_app(folder: Path, client: str = CLIENT_APP) -> Path:
    """Write a Flower app that refers to this package and copies none of its code; its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = "\n".join(f"{key} = {json.dumps(value)}" for key, value in RUN_CONFIG.items())
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
{config}
""",
        encoding="utf-8",
    )
    return folder
