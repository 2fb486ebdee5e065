"""The federation in one process: the reference that other engines are compared with.

OUT/federation.json     the resolved config
OUT/metrics.jsonl       a line for each evaluation: round, top-1, how far the weights moved
OUT/uploads/            what a curious server wrote down (`uploads/record.py`)
OUT/attack/             the attacks on these uploads (`mjp federate`)
OUT/checkpoint.pt       where the same command goes on after a stop
OUT/model.safetensors   the final model
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from attacks import find_attack
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import lock, output_folder, write_json
from mjp_privacy.core.machine import pick_device
from mjp_privacy.core.read import FileKind, is_there, read_json, read_json_lines, typed
from mjp_privacy.core.schema import NotNegative, Whole, schema
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.data import spread_subset
from mjp_privacy.federation.config import FederationConfig, Probe, probe_client
from mjp_privacy.federation.task import ServerState, Task, Weights
from mjp_privacy.interfaces import ClientUpdate, Control
from mjp_privacy.models import LoadedModel
from mjp_privacy.training.run_files import (
    CHECKPOINT,
    FEDERATION,
    LENIENT,
    METRICS,
    MODEL,
    Checkpoint,
    Journal,
    Percent,
    check_config,
    check_weights,
    identity_of,
    load_checkpoint,
    save_checkpoint,
)
from mjp_privacy.uploads.folder import examine
from mjp_privacy.uploads.record import UploadHeader, record_weights, save_weights, write_upload

# what its folder holds ----------------------------------------------------------------------------

UPLOADS, ATTACK, RESOLVED = "uploads", "attack", FEDERATION
CONFIG = FileKind(
    "the config that `mjp federate` wrote", "Give another --out, or delete this folder.", 1 << 20
)
LINES = FileKind(
    "a line for each evaluation, as `mjp federate` writes them",
    "Delete the line that is wrong; the others still hold.",
)


@schema
class Evaluation:
    """A line of metrics.jsonl: the federation after some rounds."""

    step: Whole
    round: Whole
    val_top1: Percent | None
    moved: NotNegative | None = None
    val_images: Whole = 0
    timing: dict[str, Any] | None = None


@dataclass(frozen=True, config=LENIENT, kw_only=True)
class FederationCheckpoint(Checkpoint):
    """A checkpoint of a federation: its round, its weights, the server's optimiser."""

    optimizer: ServerState


def stored_config(folder: Path) -> FederationConfig:
    return read_json(folder / RESOLVED, CONFIG, FederationConfig)


def training_part(config: FederationConfig) -> dict[str, Any]:
    """The config without its attacks, which decide nothing of the training."""
    return asdict(replace(config, attacks=()))


def evaluations(folder: Path) -> list[Evaluation]:
    """All complete lines of the folder's metrics.jsonl; one that is no evaluation is an error, and
    so is one that changed after it was written."""
    path = folder / METRICS
    return [typed(line, path, LINES, Evaluation) for line in read_json_lines(path, LINES)]


# what a curious server writes down ----------------------------------------------------------------

CLOSED_FORM = (
    "pos_embed",
    "unk_embed",
    "patch_embed.proj.weight",
    "patch_embed.proj.bias",
    *(
        f"blocks.0.{layer}.{kind}"
        for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    ),
)
"""The parameters that closed forms read of one picture: embeddings, block 0's linear layers."""


class Recorder:
    """Writes into a folder the uploads that certain private images would cause, as `Recording`
    says: training is the same with and without it."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task, self.folder = task, folder
        config, records = task.config, task.train.records
        chosen = spread_subset(records, config.record.images, config.seed)
        self.places = [records.index(record) for record in chosen]
        for probe in config.record.probes if config.record.rounds else ():
            least = probe.batch * (2 if probe.partners == "fresh" else 1)
            if len(chosen) < least:
                raise UserError(
                    f"record.probes: batch {probe.batch} with partners {probe.partners} takes at "
                    f"least {least} images, got {len(chosen)}. Give more images or a smaller batch."
                )

    def whole(self, probe: Probe) -> list[int]:
        """The places of a probe's images, which fill whole batches."""
        return self.places[: len(self.places) // probe.batch * probe.batch]

    def due(self, round: int) -> Iterator[tuple[Probe, int, list[str]]]:
        """The probes that are recorded in this round, each with the round its series began in and
        the names of its uploads."""
        record = self.task.config.record
        for probe in record.probes:
            kind = f"b{probe.batch}s{probe_client(self.task.config.client, probe).steps}"
            numbers = range(len(self.whole(probe)) // probe.batch)
            for start in record.rounds:
                if start <= round < start + probe.uploads:
                    names = [f"{kind}_r{start:05d}_{n:03d}_at{round:05d}" for n in numbers]
                    yield probe, start, names

    def record(self, weights: Mapping[str, Tensor], round: int) -> None:
        """Write the probes' uploads of a round."""
        config, task = self.task.config, self.task
        for probe, start, names in self.due(round):
            client = probe_client(config.client, probe)
            feeding = task.feeding(client)
            whole = self.whole(probe)
            order = feeding.order(task.ids(whole), round - start)
            places = [whole[index] for index in order.tolist()]
            inputs, model = task.steps(places, client, round), task.with_weights(weights)
            kept = kept_names(config, model)
            update = make_upload(model, inputs, client, names=kept, round=round, seed=config.seed)
            partial = len(kept) < len(sent_names(config, model))
            header = header_of(config, client, model, self.folder, partial)
            plain = feeding.photographs(task.pixels(places), task.ids(places), round)
            photographs = [task.train.records[place].group for place in places]
            for step, name in enumerate(names):
                own = replace(header, series=name.partition("_at")[0])
                images = slice(step * probe.batch, (step + 1) * probe.batch)
                sent, fed = update.part(slice(step, step + 1)), inputs[0].part(images)
                cut_from = photographs[images]
                write_upload(self.folder, name, own, sent, fed, plain[images], cut_from)


def header_of(
    config: FederationConfig, client: ClientConfig, model: LoadedModel, root: Path, partial: bool
) -> UploadHeader:
    """What the uploads of a client have in common that are written into a folder, with the weights
    that they were made with; partial: only some of what was sent is written."""
    return UploadHeader(
        label=config.title,
        weights=record_weights(root, model),
        mean=model.card.mean,  # type: ignore[arg-type]
        std=model.card.std,  # type: ignore[arg-type]
        gamma=config.gamma,
        recipe=client,
        partial=partial,
    )


def kept_names(config: FederationConfig, model: LoadedModel) -> tuple[str, ...]:
    """The model's parameters whose tensors are written down, in the model's order."""
    sent, client, wanted = sent_names(config, model), config.client, config.record.parameters
    if wanted is None and (client.adapters or client.train == "head"):
        return sent  # closed forms read none of it
    if wanted is None:
        attacks = (find_attack(each.name, each.options) for each in config.attacks)
        read = (each.needs(model) for each in attacks if not isinstance(each, Control))
        wanted = (*CLOSED_FORM, *chain.from_iterable(read))
    return tuple(name for name in sent if name in wanted)


def sent_names(config: FederationConfig, model: LoadedModel) -> tuple[str, ...]:
    """The parameters that clients send, in the model's order."""
    return tuple(FedSGDClient(model, config.client).wanted(None))


# the rounds ---------------------------------------------------------------------------------------

CHECKPOINT_SECONDS = 60.0
NAMED = 3  # uploads that a line names
SAY_SECONDS = 15.0  # at least this long between two lines of progress


class Federation:
    """All rounds of one config: `Federation(task, out).run()`; one that was killed goes on where it
    stopped, and ends with the same weights."""

    def __init__(self, task: Task, out: Path) -> None:
        self.task, self.config, self.out = task, task.config, out
        self.recorder = Recorder(task, out / UPLOADS)
        self.journal = Journal(out, self.config.rounds)
        part, initial = training_part(self.config), self.config.initial
        self.identity = identity_of(part, task.train, task.test, initial)
        self.round = 0
        self.weights: Weights = task.initial_weights()
        self.state = ServerState()

    def run(self, uploads: Callable[[], Iterable[ClientUpdate]] | None = None) -> Path:
        """Run all rounds that are left; the path of the final model.

        uploads  of the clients of this round, where others than this process compute them
        """
        self._resume()
        write_json(self.out / RESOLVED, asdict(self.config))
        self._check_uploads()
        rounds = self.config.rounds
        if self.round == rounds:
            self.journal.say("finished already; its model is written again")
        if self.round in (0, rounds):  # of a last one, where neither file knows its line
            self._measure(None, None)
        saved = said = time.monotonic()
        while self.round < rounds:
            started = time.monotonic()
            self.recorder.record(self.weights, self.round)
            sent = uploads() if uploads else self.task.round_uploads(self.weights, self.round)
            self._advance(sent, started)
            now, last = time.monotonic(), self.round == rounds
            if last or now - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = now
            if last or now - said > SAY_SECONDS:
                self._say(now - started)
                said = now
        path, facts = self.out / MODEL, {"trained_gamma": self.config.gamma}
        model = self.task.with_weights(self.weights)
        save_weights(path, model, {"name": self.config.name, **facts})
        return path

    def _advance(self, uploads: Iterable[ClientUpdate], started: float) -> None:
        """The server's step on a round's uploads; then evaluate where it is time to."""
        before = self.weights
        self.weights, self.state = self.task.server_step(before, self.state, uploads, self.round)
        self.round += 1
        moved = torch.stack([(self.weights[n] - before[n]).norm() for n in before]).norm()
        if not bool(moved.isfinite()):
            raise UserError(
                f"In round {self.round} the weights are no longer finite numbers. Start again in "
                "another --out with a smaller server.lr or client.lr, or less noise."
            )
        if self.round == self.config.rounds or self.round % self.config.evaluate_every == 0:
            self._measure(float(moved), time.monotonic() - started)

    def _measure(self, moved: float | None, seconds: float | None) -> None:
        """Write a line of metrics.jsonl about the current weights, once for each round."""
        if any(line.step == self.round for line in evaluations(self.out)):
            return
        test = self.task.test
        self.journal.write(
            {
                "step": self.round,
                "round": self.round,
                "val_top1": round(self.task.evaluate(self.weights), 4) if test else None,
                "moved": moved,
                "val_images": len(test) if test else 0,
                "timing": {"seconds_per_round": seconds},
            }
        )

    def _say(self, seconds: float) -> None:
        """A line of progress, with the last accuracy where there is one; seconds: of a round."""
        tested = [line.val_top1 for line in evaluations(self.out) if line.val_top1 is not None]
        top1 = f" · top-1 {tested[-1]:.1f} %" if tested else ""
        images = self.config.clients.per_round * self.config.client.batch / seconds
        minutes, rest = divmod(round((self.config.rounds - self.round) * seconds), 60)
        self.journal.say(
            f"{self.config.name}: round {self.round}/{self.config.rounds}{top1} · "
            f"{images:.0f} images/s · {minutes} min {rest:02d} s left"
        )

    # after a kill -----------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint that the same command goes on from."""
        state = {
            **self.identity,
            "step": self.round,
            "model": self.weights,
            "optimizer": asdict(self.state),
            "measured": self.journal.last,
        }
        save_checkpoint(self.out, state)

    def _resume(self) -> None:
        evaluations(self.out)  # a damaged line is told before anything is computed
        rounds = self.config.rounds
        stored = load_checkpoint(self.out, self.identity, FederationCheckpoint, rounds)
        if stored is not None:
            path, server, device = self.out / CHECKPOINT, stored.optimizer, self.task.device
            like = {name: weight.cpu() for name, weight in self.weights.items()}
            check_weights(stored.model, like, path, "model")
            for moments in (server.first, server.second):  # of what clients send, maybe a part
                known = {name: like[name] for name in like if name in moments}
                check_weights(moments, known, path, "optimizer")
            self.round = stored.step
            self.weights, first, second = (
                {name: tensor.to(device) for name, tensor in of.items()}
                for of in (stored.model, server.first, server.second)
            )
            self.state = ServerState(server.step, first, second)
            self.journal.say(f"going on from round {self.round} of {self.config.rounds}")
        elif is_there(self.out / RESOLVED):  # killed before its first checkpoint
            configs = (stored_config(self.out), self.config)
            check_config(*(json.loads(json.dumps(training_part(one))) for one in configs))
        self.journal.keep_until(self.round, stored.measured if stored else None)

    def _check_uploads(self) -> None:
        """Say which uploads of earlier rounds are refused for their damage: their series are left
        out of the attack, and never another one takes their place. Raise where one, or its private
        images, is not there: what is left of its series would be taken for another one."""
        due = [n for r in range(self.round) for _, _, names in self.recorder.due(r) for n in names]
        sound, folder = set[str](), self.out / UPLOADS
        with suppress(UserError):  # there is none
            sound = {upload.name for upload in examine(folder).sound} if due else sound
        lost = [name for name in due if name not in sound]
        absent = [
            n for n in due if not any(folder.glob(f"{n}.*")) or not any(folder.glob(f"truth/{n}.*"))
        ]
        again = f"Take {CHECKPOINT} out of {shown(self.out)}, and the same command makes all again"
        if absent:
            raise UserError(
                f"{len(absent)} upload(s) in {shown(folder)}, or their private images, are "
                f"missing: {first_of(absent, NAMED)}. Expected all that were recorded. {again}."
            )
        if lost:
            named = first_of(lost, NAMED)
            self.journal.say(
                f"{len(lost)} upload(s) in {shown(folder)} are refused: {named}. {again}"
            )


def federate(
    config: FederationConfig,
    data: str | Path,
    out: str | Path,
    val: str | Path | None = None,
    device: str = "cpu",
) -> Path:
    """Run all rounds that are left, in one process; the final model's path.

    `federate(load_federation("configs/federated/quick.yaml"), "cifar10-train.zip", "out")`.
    """
    task = Task(config, data, val, pick_device(device))
    folder = output_folder(Path(out))
    with lock(folder):
        return Federation(task, folder).run()
