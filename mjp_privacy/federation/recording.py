"""What a curious server writes down: the uploads that certain private images would cause.

Beginning at each of `record.rounds`, a probe feeds its images to the federation's own client, in as
many successive rounds as the probe has uploads, each time with that round's weights. The server
never averages these uploads, so training is the same with and without recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from mjp_privacy.client.config import client_recipe
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.header import UploadHeader
from mjp_privacy.client.upload import make_upload
from mjp_privacy.data import spread_subset
from mjp_privacy.federation.config import FederationConfig, Probe, probe_client
from mjp_privacy.federation.task import Task
from mjp_privacy.models import LoadedModel

CLOSED_FORM = (
    "pos_embed",
    "unk_embed",
    "patch_embed.proj.weight",
    "blocks.0.attn.qkv.weight",
)
"""The parameters that closed-form attacks read; a tenth of a model of 1.3 million parameters."""


@dataclass
class Recorder:
    """Writes the probes' uploads of a federation into a folder."""

    task: Task
    folder: UploadFolder

    def __post_init__(self) -> None:
        config = self.task.config
        chosen = spread_subset(self.task.train.records, config.record.images, config.seed)
        place_of = {record: place for place, record in enumerate(self.task.train.records)}
        self.places = [place_of[record] for record in chosen]

    def due(self, round: int) -> Iterator[tuple[Probe, int]]:
        """The probes that are recorded in this round, each with the round its series began in."""
        record = self.task.config.record
        for probe in record.probes:
            for start in record.rounds:
                if start <= round < start + probe.uploads:
                    yield probe, start

    def record(self, weights: Mapping[str, Tensor], round: int) -> int:
        """Write the probes' uploads of a round; how many were written."""
        written = 0
        for probe, start in self.due(round):
            written += self._record(probe, start, weights, round)
        return written

    def _record(self, probe: Probe, start: int, weights: Mapping[str, Tensor], round: int) -> int:
        config, task = self.task.config, self.task
        client = probe_client(config.client, probe)
        places = task.shuffled(self.places, client, round - start)
        inputs = task.steps(places, client, round)
        model = task.with_weights(weights)
        names = kept_names(config, model)
        update = make_upload(model, inputs, client, names=names, round=round, seed=config.seed)
        series = [
            f"b{client.batch}s{client.steps}_r{start:05d}_{number:03d}"
            for number in range(len(self.places) // probe.batch)
        ]
        header = UploadHeader(
            label=config.title,
            weights=self.folder.record_weights(model),
            mean=model.card.mean,  # type: ignore[arg-type]
            std=model.card.std,  # type: ignore[arg-type]
            gamma=config.gamma,
            recipe=client_recipe(client),
            partial=len(names) < len(_sent_names(config, model)),
        )
        plain = task.photographs(places, client, round)
        paths = self.folder.record(
            update,
            header,
            [f"{name}_at{round:05d}" for name in series],
            inputs=inputs[0],
            plain=plain,
            series=series,
        )
        return len(paths)


def kept_names(config: FederationConfig, model: LoadedModel) -> tuple[str, ...]:
    """The model's parameters whose tensors are written down, in the model's order."""
    existing, adapters = _sent_names(config, model), config.client.adapters
    wanted = config.record.parameters
    if wanted is None and adapters is not None:  # closed forms read none of what is sent
        return existing
    return tuple(name for name in existing if name in (CLOSED_FORM if wanted is None else wanted))


def _sent_names(config: FederationConfig, model: LoadedModel) -> tuple[str, ...]:
    """The parameters that clients send: all, or those of their low-rank adapters."""
    existing, adapters = (name for name, _ in model.named_parameters()), config.client.adapters
    return tuple(name for name in existing if adapters is None or adapters.trains(name))
