"""The federation as a Flower app: `client_app` and `server_app` call the functions of `Task`.

    flwr run . --run-config 'config="configs/federated/cifar10.yaml" data="/images" out="/run"'

OUT/received/r00003_c0017.safetensors   client 17's upload in round 3, with its header
OUT/rounds.jsonl                        a line for each round: who answered, who did not, and why

In every round the participants are dealt out to the SuperNodes that are there: client c to number
c mod n of them, in the order of their ids. A node config may name a `data` and a `device` of its
own. The server needs the images too, since it splits them.

Probes, metrics, checkpoints and the final model are those of `rounds.Federation`, so a run that
was stopped can go on, also with another engine. A client that fails is left out of its round.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import lock, output_folder, write_atomically
from mjp_privacy.core.machine import pick_device
from mjp_privacy.core.read import FileKind, json_lines
from mjp_privacy.core.schema import parse
from mjp_privacy.core.text import cut, first_of
from mjp_privacy.federation.config import FederationConfig, load_federation
from mjp_privacy.federation.flower.run import MARK, RunOptions
from mjp_privacy.federation.rounds import (
    Federation,
    header_of,
    kept_names,
    sent_names,
    training_part,
)
from mjp_privacy.federation.task import Task
from mjp_privacy.interfaces import ClientUpdate
from mjp_privacy.uploads.record import write_upload

try:
    from flwr.app import (
        ArrayRecord,
        ConfigRecord,
        Context,
        Message,
        MessageType,
        RecordDict,
    )
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise UserError("Flower: expected flwr 1.41 or newer. pip install '.[federated]'.") from error

client_app = ClientApp()
server_app = ServerApp()


# client -------------------------------------------------------------------------------------


@client_app.train()
def train(message: Message, context: Context) -> Message:
    order = message.content.config_records["order"]
    config = load_federation(json.loads(str(order["config"])))
    weights = tensors(message.content.array_records["weights"])
    client, round = whole(order["client"]), whole(order["round"])
    task = _task(config, _setting(context, "data"), _setting(context, "device") or "cpu")
    update = task.client_update(weights, client, round)
    return Message(reply_of(update), reply_to=message)


@lru_cache(maxsize=1)
def _task(config: FederationConfig, data: str, device: str) -> Task:
    """Made once for each process, because a simulation's processes serve many messages."""
    if not data:
        raise UserError("data: expected a path in Flower's run config or the node's, got none.")
    return Task(config, Path(data), device=pick_device(device))


def _setting(context: Context, name: str) -> str:
    """A value of the node config, or else of the run config; empty if neither has it."""
    return str(context.node_config.get(name) or context.run_config.get(name) or "")


# server -------------------------------------------------------------------------------------


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run all rounds that are left, in a folder laid out like that of the in-process engine."""
    given = {name.replace("-", "_"): value for name, value in context.run_config.items()}
    run = parse(RunOptions, given, "Flower's run config")
    config = load_federation(Path(run.config), run.row or None)
    val, folder = Path(run.val) if run.val else None, output_folder(Path(run.out))
    with lock(folder):
        task = Task(config, Path(run.data), val, pick_device(run.device or "cpu"))
        federation = Federation(task, folder)
        federation.journal.mark = MARK
        federation.run(FlowerClients(federation, grid, run).uploads)


# the rounds ---------------------------------------------------------------------------------------

RECEIVED, ROUNDS = "received", "rounds.jsonl"
LINES = FileKind(
    "a line for each round, as the federation writes them",
    "Delete this file; it says who answered in which round, and nothing is computed from it.",
)
SHOWN, MOST = 8, 1000  # clients that a message names, and characters of what it says of all
WAIT = 1.0  # seconds between two searches for SuperNodes


class FlowerClients:
    """Sends one message to each participant of a round; all else is left to the federation."""

    def __init__(self, federation: Federation, grid: Grid, run: RunOptions) -> None:
        self.federation, self.grid, self.run = federation, grid, run
        self._missing: dict[int, str] = {}

    def uploads(self) -> list[ClientUpdate]:
        """What the participants of the federation's round send, written before it is used."""
        federation, nodes = self.federation, self._nodes()
        weights, sent = arrays(federation.weights), list[tuple[int, Message]]()
        self._missing = {}
        for client in federation.task.participants(federation.round):
            order = order_of(federation.config, weights, client, federation.round)
            node = nodes[client % len(nodes)]
            sent.append((client, Message(order, node, MessageType.TRAIN)))
        messages = [message for _, message in sent]
        replies = self.grid.send_and_receive(messages, timeout=self.run.round_timeout)
        client_of = {message.metadata.message_id: client for client, message in sent}
        uploads = self._read(replies, client_of)
        for client, update in uploads.items():
            self._keep(client, update)
        self._note(sorted(uploads))
        if not uploads:
            federation.save()
            why = "; ".join(f"{client}: {why}" for client, why in self._missing.items())
            raise UserError(
                f"Round {federation.round}: no client sent an upload ({why[:MOST]}). Mend the "
                "clients and run the same command again; it goes on from this round."
            )
        return list(uploads.values())

    def _nodes(self) -> list[int]:
        """The SuperNodes that are there, in the order of their ids; waits for the first one."""
        until = time.monotonic() + self.run.patience
        while not (nodes := sorted(self.grid.get_node_ids())):
            if time.monotonic() > until:
                raise UserError(
                    f"No SuperNode in {self.run.patience:.0f} s: expected one at least. Start "
                    "them, or give a longer `patience`."
                )
            time.sleep(WAIT)
        return nodes

    # what they send --------------------------------------------------------------------------

    def _read(
        self, replies: Iterable[Message], client_of: dict[str, int]
    ) -> dict[int, ClientUpdate]:
        """Uploads by client; who sent none is noted as missing."""
        uploads: dict[int, ClientUpdate] = {}
        for reply in replies:
            client = client_of.pop(reply.metadata.reply_to_message_id)
            try:
                if reply.has_error():
                    raise UserError(cause(reply.error.reason or f"error {reply.error.code}"))
                federation = self.federation
                update = read_reply(reply.content, federation.task, federation.round)
                self._check(update)
                uploads[client] = update
            except (UserError, AttributeError, KeyError, TypeError, ValueError) as error:
                self._missing[client] = str(error)
        self._missing |= dict.fromkeys(client_of.values(), "no answer in time")
        self._missing = dict(sorted(self._missing.items()))  # not in the order of arrival
        return dict(sorted(uploads.items()))

    def _check(self, update: ClientUpdate) -> None:
        """Refuse an upload that does not fit the weights and what clients send of them."""
        weights, config = self.federation.weights, self.federation.config
        sent = sent_names(config, self.federation.task.model)
        for name, grad in update.grads.items():
            expected = (1, *weights[name].shape) if name in sent else None
            if tuple(grad.shape) != expected:
                raise UserError(f"{name}: expected shape {expected}, got {tuple(grad.shape)}")
            if not (grad.is_floating_point() and bool(grad.isfinite().all())):
                raise UserError(f"{name}: expected finite numbers, got others")
        if lacking := [name for name in sent if name not in update.grads]:
            raise UserError(f"expected every parameter, got none of {first_of(lacking, SHOWN)}")

    def _keep(self, client: int, update: ClientUpdate) -> None:
        """Write an upload's files, before the server uses it."""
        if self.run.record == "none":
            return
        config, root = self.federation.config, self.federation.out / RECEIVED
        model = self.federation.task.with_weights(self.federation.weights)
        kept = set(update.grads) if self.run.record == "all" else set(kept_names(config, model))
        header = header_of(config, config.client, model, root, not kept >= set(update.grads))
        grads, noise, rounding = (
            {name: tensor for name, tensor in of.items() if name in kept}
            for of in (update.grads, update.noise, update.rounding)
        )
        part = replace(update, grads=grads, noise=noise, rounding=rounding)
        name = f"r{update.round:05d}_c{client:04d}"
        write_upload(root, name, replace(header, client=str(client)), part)

    def _note(self, arrived: list[int]) -> None:
        """Write a line of rounds.jsonl; it replaces that of an earlier attempt at the round."""
        round, path = self.federation.round, self.federation.out / ROUNDS
        lines = [
            line
            for line in json_lines(path, LINES)[0]
            if type(line.get("round")) is int and line["round"] < round  # others were damaged
        ]
        lines.append({"round": round, "arrived": arrived, "missing": self._missing})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(path, lambda place: place.write_text(text, "utf-8"))
        for client, why in self._missing.items():
            self.federation.journal.say(
                f"round {round}: client {client} sent no upload ({why}); going on with "
                f"{len(arrived)} of {len(arrived) + len(self._missing)}"
            )


# what is sent -----------------------------------------------------------------------------------

CPU = torch.device("cpu")
LONGEST = 300  # characters that are shown of a client's failure
TENSORS = ("grads", "noise", "rounding")
"""Fields of an upload that hold tensors by name. With `undeclared`, they are all that is sent: the
server knows the client's recipe, the round and the weights that it gave."""


def order_of(config: FederationConfig, weights: ArrayRecord, client: int, round: int) -> RecordDict:
    """What the server sends to a client; the config goes along, so that nodes need only images, and
    without the attacks, which are none of a client's business."""
    fields: dict[str, Any] = {"client": client, "round": round}
    fields["config"] = json.dumps(training_part(config))
    return RecordDict({"weights": weights, "order": ConfigRecord(fields)})


def reply_of(update: ClientUpdate) -> RecordDict:
    """An upload as a reply."""
    content = RecordDict({name: arrays(getattr(update, name)) for name in TENSORS})
    silent = update.undeclared is not None and bool(update.undeclared[0])
    content["upload"] = ConfigRecord({"undeclared": silent})
    return content


def read_reply(content: RecordDict, task: Task, round: int) -> ClientUpdate:
    """A reply's upload in a round, on the task's device."""
    values, noise, rounding = (tensors(content.array_records[n], task.device) for n in TENSORS)
    client = task.config.client
    silent = bool(content.config_records["upload"]["undeclared"])
    return FedSGDClient(task.model, client).described(
        values,
        noise=noise,
        rounding=rounding,
        undeclared=torch.tensor([silent], device=task.device) if client.defenses else None,
        round=round,
    )


def cause(reason: str) -> str:
    """What went wrong with a client, without what Flower and Ray put around the message."""
    inner = re.sub(r"\x1b\[\d+m", "", reason).rpartition("Message: ")[2]
    wrapped = re.fullmatch(r"<class '[^']*'>:<'(.*)", inner, re.DOTALL)
    text = (wrapped[1] if wrapped else inner).removesuffix("'>")
    return cut(" ".join(text.split()), LONGEST)


def arrays(by_name: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: tensor.detach().cpu() for name, tensor in by_name.items()})


def tensors(record: ArrayRecord, device: torch.device = CPU) -> dict[str, Tensor]:
    """A record's tensors by name, on this device; they do not share the record's memory."""
    return {
        name: torch.from_numpy(array.numpy().copy()).to(device) for name, array in record.items()
    }


def whole(value: Any) -> int:
    """The value as a whole number; a message from elsewhere may hold anything."""
    if not isinstance(value, int):
        raise UserError(f"A message holds {value!r} where a whole number was expected.")
    return value
