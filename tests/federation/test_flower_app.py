"""The Flower app without its engines: a grid that calls the client app in this process."""

import io
import json
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.federations import assert_close, federated_images, small_federation

pytest.importorskip("flwr", reason="the extra `federated` is not installed")

import tomli
from flwr.app import Array, Context, Error, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.supercore.task_identity import TaskIdentity

import mjp_privacy
from mjp_privacy.core.errors import UserError
from mjp_privacy.federation.config import FederationConfig
from mjp_privacy.federation.flower import app as flower_app
from mjp_privacy.federation.flower.app import reply_of
from mjp_privacy.federation.flower.run import CLIENT_APP, RUN_CONFIG, SERVER_APP
from mjp_privacy.federation.rounds import federate
from mjp_privacy.federation.task import ServerState, Task
from mjp_privacy.interfaces import ClientUpdate
from tests.helpers.uploads import load_uploads

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
Answer = Callable[[Message, Context], Message]


class Grid:
    """Nodes in this process; `answer` stands for a node's ClientApp."""

    def __init__(self, data: Path, nodes: int = 2, answer: Answer | None = None) -> None:
        self.answer = answer or flower_app.train
        self.contexts = {10 + at: context(node={}, data=str(data)) for at in range(nodes)}
        self.asked: list[int] = []

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        assert timeout == RUN_CONFIG["round-timeout"]
        return [reply for message in messages if (reply := self._one(message)) is not None]

    def _one(self, message: Message) -> Message | None:
        metadata = message.metadata
        metadata.__dict__["_message_id"] = message.object_id
        self.asked.append(metadata.dst_node_id)
        try:
            return self.answer(message, self.contexts[metadata.dst_node_id])
        except TimeoutError:
            return None
        except Exception as error:
            return Message(Error(code=0, reason=str(error)), reply_to=message)


def context(*, node: dict[str, Any], **run: Any) -> Context:
    return Context(
        run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={**RUN_CONFIG, **run}
    )


@pytest.fixture(autouse=True, scope="module")
def _identity() -> None:
    """Flower's messages know whose run they are of."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federated_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def config() -> FederationConfig:
    return small_federation(attacks=[{"name": "patch_gradient"}])


def serve(grid: Grid, images: Path, out: Path, config: FederationConfig, **run: Any) -> Path:
    """What the ServerApp does, told by a run config."""
    path = out.parent / f"{out.name}.json"
    path.write_text(json.dumps(asdict(config)))
    given = {"config": str(path), "data": str(images), "out": str(out), "patience": 0.1, **run}
    flower_app.serve(grid, context(node={}, **given))  # type: ignore[arg-type]
    return out


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (out / "rounds.jsonl").read_text().splitlines()]


def assert_equal_weights(one: Path, other: Path) -> None:
    """But for rounding: one process makes several clients' gradients together."""
    assert_close(*(load_file(run / "model.safetensors") for run in (one, other)))


def failing(at: int, clients: set[int], error: type[Exception] = MemoryError) -> Answer:
    def train(message: Message, context: Context) -> Message:
        order = message.content["order"]
        if order["round"] == at and order["client"] in clients:
            raise error("no memory")
        return flower_app.train(message, context)

    return train


# parity -------------------------------------------------------------------------------------------


def test_rounds_are_those_of_one_process(
    data: Path, config: FederationConfig, tmp_path: Path
) -> None:
    """Weights, probes and what is measured; in one process, and under Flower to round 1, where
    every client fails, then to the end."""
    one, out, val = (tmp_path / name for name in ("one", "flower", "val"))
    federate(config, data, one, federated_images(val))
    run: dict[str, Any] = {"val": str(val), "record": "all"}
    with pytest.raises(UserError, match="Round 1"):
        serve(Grid(data, answer=failing(1, {0, 1, 2})), data, out, config, **run)
    assert len(load_uploads(out / "received")) == 3
    serve(Grid(data), data, out, config, **run)
    serve(Grid(data, answer=failing(0, {0, 1, 2})), data, out, config, **run)  # nothing is left
    assert [line["round"] for line in lines(out)] == [0, 1, 2]
    assert len(load_uploads(out / "received")) == 9
    assert_equal_weights(one, out)
    measured = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (one, out)
    ]
    for here, there in zip(*measured, strict=True):
        assert (here["round"], here["val_top1"]) == (there["round"], there["val_top1"])
        assert here["moved"] == there["moved"] or here["moved"] == pytest.approx(
            there["moved"], rel=1e-5
        )
    probes = [load_uploads(run / "uploads") for run in (one, out)]
    assert len(probes[0]) == 2
    for mine, theirs in zip(*probes, strict=True):
        assert (mine.name, mine.header.round) == (theirs.name, theirs.header.round)
        assert torch.equal(mine.truth().images, theirs.truth().images)  # type: ignore[union-attr]
        assert_close(mine.tensors(), theirs.tensors())


SENT: list[tuple[dict[str, Any], dict[str, Any], str, int]] = [
    ({"upload": "weight_difference", "steps": 2, "momentum": 0.9}, {"lr": 1.0}, "all", 0),
    ({"defenses": [{"gaussian_noise": 0.01}, "int8"]}, {"optimizer": "adam"}, "all", 0),
    ({"dal": True}, {}, "attacked", 12),
    ({}, {}, "none", 0),
]


@pytest.mark.parametrize(("client", "server", "record", "tensors"), SENT)
def test_every_upload_is_a_file_as_far_as_it_is_asked_for(
    client: dict[str, Any],
    server: dict[str, Any],
    record: str,
    tensors: int,
    data: Path,
    tmp_path: Path,
) -> None:
    """Every client's in every round, with the weights that it was made from; local steps, FedAdam
    and defences, with what they say of their noise, end with one process' weights."""
    config = small_federation(client={"batch": 2, **client}, server={"lr": 0.01, **server})
    federate(config, data, tmp_path / "one")
    serve(Grid(data), data, tmp_path / "run", config, record=record)
    assert_equal_weights(tmp_path / "one", tmp_path / "run")
    received, task = tmp_path / "run/received", Task(config, data)
    entries = load_uploads(received) if received.exists() else []
    every = [f"r{round:05d}_c{client:04d}" for round in range(3) for client in range(3)]
    assert [entry.name for entry in entries] == (every if record != "none" else [])
    for entry in entries:
        header, weights = entry.header, load_file(entry.weights_path)
        made = task.client_update(weights, int(header.client), header.round)
        sent, found = {name: grad[0] for name, grad in made.grads.items()}, entry.tensors()
        assert len(found) == (tensors or len(sent))
        assert_close(found, {name: sent[name] for name in found})
        noise = {name: float(level[0]) for name, level in made.noise.items() if name in found}
        assert header.noise == noise
        assert (header.gamma, header.partial) == (0.27, bool(tensors))
        assert header.recipe == config.client


# who does not answer ------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "why"), [(MemoryError, "no memory"), (TimeoutError, "time")])
def test_a_client_that_fails_is_left_out_of_its_round(
    error: type[Exception], why: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_federation(rounds=2)
    out = serve(Grid(data, answer=failing(1, {2}, error)), data, tmp_path / "run", config)
    task, state = Task(config, data), ServerState()
    weights = task.initial_weights()
    for round, clients in enumerate(((0, 1, 2), (0, 1))):
        uploads = list(task.client_updates(weights, clients, round))
        weights, state = task.server_step(weights, state, uploads, round)
    assert_close(load_file(out / "model.safetensors"), weights)
    first, second = (line["missing"] for line in lines(out))
    assert (first, list(second)) == ({}, ["2"])
    assert why in second["2"]
    assert "client 2" in capsys.readouterr().err


def test_clients_are_dealt_out_to_the_nodes_that_are_there(
    data: Path, config: FederationConfig, tmp_path: Path
) -> None:
    """One that goes is replaced; without any, or told something odd, the run ends in one line."""
    grid = Grid(data, nodes=3)

    def train(message: Message, own: Context) -> Message:
        if message.content["order"]["round"] == 0:
            grid.contexts.pop(12, None)
        return flower_app.train(message, own)

    grid.answer = train
    missing = [line["missing"] for line in lines(serve(grid, data, tmp_path / "run", config))]
    assert [list(clients) for clients in missing] == [["2"], [], []]  # it went with its order
    assert grid.asked == [10, 11, 12, 10, 11, 10, 10, 11, 10]
    grid.contexts.clear()
    with pytest.raises(UserError, match="SuperNode"):
        serve(grid, data, tmp_path / "none", config)
    for run in ({"data": ""}, {"record": "most"}, {"patience": 0}, {"round-timeout": "ten"}):
        with pytest.raises(UserError, match=next(iter(run)).replace("-", "_")):
            serve(Grid(data), data, tmp_path / "wrong", config, **run)


OTHER = {name: reply_of(ClientUpdate({name: torch.zeros(1, 5)})) for name in ("norm.weight", "no")}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *((lambda sent, of=other: sent.update(of), name) for name, other in OTHER.items()),
        (lambda sent: sent["grads"].pop("head.bias"), "head.bias"),
        (
            lambda sent: sent["grads"].update({"head.bias": Array(np.full((1, 3), np.nan))}),
            "finite",
        ),
        (lambda sent: sent.pop("upload"), "upload"),
    ],
)
def test_an_upload_that_does_not_fit_is_no_upload(
    change: Callable[[RecordDict], object], named: str, data: Path, tmp_path: Path
) -> None:
    def train(message: Message, own: Context) -> Message:
        reply = flower_app.train(message, own)
        if message.content["order"]["client"] == 0:
            change(reply.content)
        return reply

    config = small_federation(rounds=1, record={})
    (line,) = lines(serve(Grid(data, answer=train), data, tmp_path / "run", config))
    assert line["arrived"] == [1, 2]
    assert named in line["missing"]["0"]


def test_flwr_run_finds_the_app() -> None:
    """The block says what `write_app` says, and bundles nothing that would hide the package."""
    content = tomli.loads((ROOT / "pyproject.toml").read_text())
    app = content["tool"]["flwr"]["app"]
    assert app["components"] == {"serverapp": SERVER_APP, "clientapp": CLIENT_APP}
    assert app["config"] == RUN_CONFIG
    assert content["project"]["version"] == mjp_privacy.__version__
    load_and_validate(ROOT / "pyproject.toml")
    bundle = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(ROOT)))
    assert sorted(bundle.namelist()) == [".info/CONTENT", "LICENSE", "pyproject.toml"]
