"""What a curious server writes down: the uploads that certain private images would cause.

Beginning at each of `record.rounds`, a probe feeds its images to the federation's own client, in as
many successive rounds as the probe has uploads, each time with that round's weights. The server
never averages these uploads, so training is the same with and without recording.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from torch import Tensor

from attacks import find_attack
from mjp_privacy.client.config import ClientConfig, client_recipe
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import spread_subset
from mjp_privacy.federation.config import FederationConfig, Probe, probe_client
from mjp_privacy.federation.task import Task
from mjp_privacy.interfaces import Control
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.tensor_files import TensorFile, check_digest
from mjp_privacy.uploads.folder import load_upload
from mjp_privacy.uploads.header import UploadHeader
from mjp_privacy.uploads.record import WEIGHTS_FILE, Upload, record_weights, write_upload

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


@dataclass
class Recorder:
    """Writes the probes' uploads of a federation into a folder."""

    task: Task
    folder: Path

    def __post_init__(self) -> None:
        config = self.task.config
        chosen = spread_subset(self.task.train.records, config.record.images, config.seed)
        place_of = {record: place for place, record in enumerate(self.task.train.records)}
        self.places = [place_of[record] for record in chosen]

    def due(self, round: int) -> Iterator[tuple[Probe, int, list[str]]]:
        """The probes that are recorded in this round, each with the round its series began in and
        the names of its uploads."""
        record = self.task.config.record
        for probe in record.probes:
            kind = f"b{probe.batch}s{probe_client(self.task.config.client, probe).steps}"
            numbers = range(len(self.places) // probe.batch)
            for start in record.rounds:
                if start <= round < start + probe.uploads:
                    names = [f"{kind}_r{start:05d}_{n:03d}_at{round:05d}" for n in numbers]
                    yield probe, start, names

    def record(
        self, weights: Mapping[str, Tensor], round: int, only: Collection[str] | None = None
    ) -> None:
        """Write the probes' uploads of a round, or those with these names."""
        config, task = self.task.config, self.task
        for probe, start, names in self.due(round):
            wanted = names if only is None else [name for name in names if name in only]
            if not wanted:
                continue
            client = probe_client(config.client, probe)
            feeding = task.feeding(client)
            order = feeding.order(task.ids(self.places), round - start)
            places = [self.places[index] for index in order.tolist()]
            inputs, model = task.steps(places, client, round), task.with_weights(weights)
            kept = kept_names(config, model)
            update = make_upload(model, inputs, client, names=kept, round=round, seed=config.seed)
            partial = len(kept) < len(_sent_names(config, model))
            header = header_of(config, client, model, self.folder, partial)
            plain = feeding.photographs(task.pixels(places), task.ids(places), round)
            for step, name in enumerate(names):
                if name in wanted:
                    own = replace(header, series=name.partition("_at")[0])
                    images = slice(step * probe.batch, (step + 1) * probe.batch)
                    sent, fed = update.part(slice(step, step + 1)), inputs[0].part(images)
                    write_upload(self.folder, name, own, sent, fed, plain[images])

    def damaged(self, until: int) -> dict[int, list[str]]:
        """The uploads of rounds before this one that are not there as they were recorded, by
        round."""
        damaged = {r: list(filter(self._is_damaged, self._names(r))) for r in range(until)}
        return {round: names for round, names in damaged.items() if names}

    def weights(self, round: int) -> Mapping[str, Tensor] | None:
        """The weights before a round, as they were recorded with its uploads; None where no header
        names them any more, or their file is damaged."""
        for name in self._names(round):
            with suppress(UserError):
                return TensorFile(self._opened(name).weights_path, WEIGHTS_FILE).tensors()
        return None

    def _names(self, round: int) -> list[str]:
        return [name for _, _, names in self.due(round) for name in names]

    def _opened(self, name: str) -> Upload:
        """An upload whose header and weights are sound; UserError where they are not."""
        upload = load_upload(self.folder, name)
        upload.check_weights()
        check_digest(upload.weights_path, WEIGHTS_FILE)
        return upload

    def _is_damaged(self, name: str) -> bool:
        """Whether a file of an upload, or of its weights, is missing or another one."""
        try:
            upload = self._opened(name)
            upload.check_seals()
            upload.tensor_file()
            return upload.truth_file() is None
        except UserError:
            return True


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
        recipe=client_recipe(client),
        partial=partial,
    )


def kept_names(config: FederationConfig, model: LoadedModel) -> tuple[str, ...]:
    """The model's parameters whose tensors are written down, in the model's order."""
    existing, adapters = _sent_names(config, model), config.client.adapters
    wanted = config.record.parameters
    if wanted is None and adapters is not None:  # closed forms read none of what is sent
        return existing
    if wanted is None:
        attacks = (find_attack(each.name, each.options) for each in config.attacks)
        read = (each.needs(model) for each in attacks if not isinstance(each, Control))
        wanted = (*CLOSED_FORM, *chain.from_iterable(read))
    return tuple(name for name in existing if name in wanted)


def _sent_names(config: FederationConfig, model: LoadedModel) -> tuple[str, ...]:
    """The parameters that clients send: all, or those of their low-rank adapters."""
    existing, adapters = (name for name, _ in model.named_parameters()), config.client.adapters
    return tuple(name for name in existing if adapters is None or adapters.trains(name))
