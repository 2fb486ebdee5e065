"""The federation as a Flower app: `client_app` and `server_app` call the functions of `Task`.

    flwr run . --run-config 'config="configs/federated/cifar10.yaml" data="/images" out="/run"'

A SuperNode plays the clients of its partition: with `partition-id=p num-partitions=n` in its node
config, which simulated nodes have, these are p, p + n, p + 2n, ... A node config may also name a
`data` and a `device` of its own. The server needs the images too, since it splits them.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import lock, output_folder
from mjp_privacy.core.machine import pick_device
from mjp_privacy.federation.config import FederationConfig, load_federation
from mjp_privacy.federation.flower.run import MARK
from mjp_privacy.federation.flower.strategy import (
    PARTITION,
    RecordingStrategy,
    arrays,
    read_order,
    reply_of,
)
from mjp_privacy.federation.rounds import Federation
from mjp_privacy.federation.task import Task
from mjp_privacy.training.journal import Journal

try:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise UserError("Flower: expected flwr 1.41 or newer. pip install '.[federated]'.") from error

client_app = ClientApp()
server_app = ServerApp()


# client -------------------------------------------------------------------------------------


@client_app.query()
def introduce(message: Message, context: Context) -> Message:
    """Answer the server's question which clients this node plays."""
    partition, partitions = _partition(context)
    fields = ConfigRecord({"partition-id": partition, "num-partitions": partitions})
    return Message(RecordDict({PARTITION: fields}), reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Answer the server's order with one client's upload in one round."""
    config, weights, client, round = read_order(message.content)
    partition, partitions = _partition(context)
    if client % partitions != partition:
        raise UserError(
            f"Asked for client {client}: expected one of partition {partition} of {partitions}. "
            "Give each SuperNode a partition-id of its own."
        )
    task = _task(config, _setting(context, "data"), _setting(context, "device") or "cpu")
    update = task.client_update(weights, client, round)
    return Message(reply_of(update, config.client.batch), reply_to=message)


@lru_cache(maxsize=1)
def _task(config: FederationConfig, data: str, device: str) -> Task:
    """Made once for each process, because a simulation's processes serve many messages."""
    return Task.from_config(config, _folder(data, "data"), device=pick_device(device))


def _partition(context: Context) -> tuple[int, int]:
    """The node's partition-id and num-partitions."""
    try:
        names = ("partition-id", "num-partitions")
        partition, partitions = (int(context.node_config[name]) for name in names)
        if not 0 <= partition < partitions:
            raise ValueError
    except (KeyError, ValueError) as error:
        raise UserError(
            "A SuperNode's clients: expected a partition-id below num-partitions in its node "
            f"config, got {dict(context.node_config)}. Start it with "
            "flower-supernode --node-config 'partition-id=0 num-partitions=2' ..."
        ) from error
    return partition, partitions


def _setting(context: Context, name: str) -> str:
    """A value of the node config, or else of the run config; empty if neither has it."""
    return str(context.node_config.get(name) or context.run_config.get(name) or "")


# server -------------------------------------------------------------------------------------


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run all rounds that are left, in a folder laid out like that of the in-process engine."""
    run = context.run_config
    path = _folder(str(run["config"]), "config")
    config = load_federation(path, str(run["row"]) or None)
    data = _folder(str(run["data"]), "data")
    val = Path(str(run["val"])) if run["val"] else None
    folder = output_folder(_folder(str(run["out"]), "out"))
    with lock(folder):
        device = pick_device(str(run["device"]) or "cpu")
        federation = Federation(Task.from_config(config, data, val, device), folder)
        federation.journal = _Marked(folder, config.rounds)
        if federation.begin():
            return
        strategy = RecordingStrategy(
            federation,
            record=str(run["record"]),
            patience=_seconds(run, "patience"),
        )
        strategy.meet(grid)
        strategy.start(
            grid,
            arrays(federation.weights),
            num_rounds=config.rounds - federation.round,
            timeout=_seconds(run, "round-timeout"),
        )
        federation.end()


class _Marked(Journal):
    """Marks our lines, so that they can be told from Flower's."""

    def say(self, message: str) -> None:
        """Print a message behind the mark."""
        super().say(MARK + message)


def _folder(value: str, name: str) -> Path:
    if not value:
        raise UserError(
            f"{name}: expected a path in Flower's run config, got none. "
            f"Give one: flwr run . --run-config '{name}=\"PATH\"'"
        )
    return Path(value)


def _seconds(run: Any, name: str) -> float:
    value = run[name]
    if not isinstance(value, (int, float)) or value <= 0:
        raise UserError(f"{name}: expected seconds above 0 in the run config, got {value!r}.")
    return float(value)
