"""What the clients and the server of a federation do, for the in-process loop and Flower alike.

Everything is a function of (config, images, weights, client, round): only the server keeps a state.
So a round can be computed anywhere, with its clients in any order, and computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import Feeding
from mjp_privacy.client.gradients import FedSGDClient, predict
from mjp_privacy.client.upload import BETAS, EPSILON, make_upload, with_sinusoidal_positions
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed, torch_generator
from mjp_privacy.data import embedded_images
from mjp_privacy.data.files import EMBEDDED
from mjp_privacy.federation.config import FederationConfig, Server
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.loading import RANDOM
from mjp_privacy.models.mjp_vit import with_adapters
from mjp_privacy.models.vit import copied
from mjp_privacy.training.batches import Examples, decode_all, find_examples
from mjp_privacy.training.config import Recipe, TrainingConfig

TEST_BATCH = 250
IMAGES_TOGETHER = 32  # images differentiated at once; bounds the memory

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class ServerState:
    """Adam's moments; empty before the first step and with plain SGD."""

    step: int = 0
    first: Mapping[str, Tensor] = field(default_factory=dict)
    second: Mapping[str, Tensor] = field(default_factory=dict)


class Task:
    """One federation's images, clients and network; `parts` are each client's places in `train`.

    data, val: training images, and test images, as in `federation_images`
    """

    def __init__(
        self,
        config: FederationConfig,
        data: str | Path,
        val: str | Path | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.config, self.device = config, torch.device(device)
        train, test = federation_images(config, data, val)
        self.train = train.drawn(config.train_images, config.seed)
        self.test = None if test is None else test.drawn(config.test_images, config.seed)
        self.model = _initial_model(config).to(self.device)
        side = config.model.img_size
        self.images = decode_all(self.train, side)
        self.test_images = None if self.test is None else decode_all(self.test, side, "test")
        clients, labels = config.clients, self.train.labels
        if len(labels) < clients.number:
            raise UserError(
                f"clients.number: expected at most as many clients as images ({len(labels)}), "
                f"got {clients.number}. Give fewer clients or more images."
            )
        if clients.split == "iid":
            self.parts = iid(labels, clients.number, seed=config.seed)
        else:
            least, alpha = min(config.client.batch, len(labels) // clients.number), clients.alpha
            self.parts = dirichlet(
                labels, clients.number, alpha=alpha, least=least, seed=config.seed
            )

    # server -----------------------------------------------------------------------------------

    def initial_weights(self) -> Weights:
        """The weights before round 0 by parameter name, on the task's device."""
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def participants(self, round: int) -> list[int]:
        """The clients of a round, drawn for (seed, round), in order of their numbers."""
        clients = self.config.clients
        generator = torch_generator("participants", self.config.seed, round)
        order = torch.randperm(clients.number, generator=generator)
        return sorted(order[: clients.per_round].tolist())

    def server_step(
        self,
        weights: Mapping[str, Tensor],
        state: ServerState,
        uploads: Iterable[ClientUpdate],
        round: int,
    ) -> tuple[Weights, ServerState]:
        """The weights and the optimiser's state after the server's step on a round's uploads;
        weights that no client uploaded are passed on as they are."""
        server, step = self.config.server, state.step + 1
        rate, adam = learning_rate(server, round, self.config.rounds), server.optimizer == "adam"
        moved, first, second = dict(weights), dict(state.first), dict(state.second)
        for name, gradient in mean_gradient(uploads).items():
            moment = gradient
            if adam:
                zero = torch.zeros_like(gradient)
                first[name] = BETAS[0] * first.get(name, zero) + (1 - BETAS[0]) * gradient
                second[name] = (
                    BETAS[1] * second.get(name, zero) + (1 - BETAS[1]) * gradient.square()
                )
                moment = first[name] / (1 - BETAS[0] ** step)
                moment = moment / ((second[name] / (1 - BETAS[1] ** step)).sqrt() + EPSILON)
            moved[name] = weights[name] - rate * (moment + server.weight_decay * weights[name])
        return moved, ServerState(step, first, second) if adam else state

    def evaluate(self, weights: Mapping[str, Tensor]) -> float:
        """Top-1 in percent on the test images, unshuffled."""
        assert self.test is not None
        assert self.test_images is not None
        model = self.with_weights(weights)
        labels = torch.tensor(self.test.labels)
        right = 0
        for chosen in torch.arange(len(labels)).split(TEST_BATCH):
            pixels = self.test_images[chosen].float() / 255
            right += int((predict(model, pixels, None) == labels[chosen]).sum())
        return 100 * right / len(labels)

    # clients ----------------------------------------------------------------------------------

    def round_uploads(self, weights: Mapping[str, Tensor], round: int) -> Iterator[ClientUpdate]:
        """What the server averages in a round.

        Where clients send their gradients unaltered, it is a single upload with their mean, which
        takes a third of the time; otherwise every client's own.
        """
        clients = self.participants(round)
        client = self.config.client
        if client.defenses or client.position_noise or client.upload != "gradient":
            yield from self.client_updates(weights, clients, round)
            return
        places = [place for number in clients for place in self.drawn(number, round)]
        trainer = FedSGDClient(self.with_weights(weights), client)
        (inputs,) = self.steps(places, client, round)
        mean = trainer.mean_gradient(inputs)
        grads = {name: gradient.unsqueeze(0) for name, gradient in mean.items()}
        yield ClientUpdate(grads, batch=len(places))

    def client_update(self, weights: Mapping[str, Tensor], client: int, round: int) -> ClientUpdate:
        """The whole upload of one client in one round; its leading axis is 1."""
        return next(self.client_updates(weights, [client], round))

    def client_updates(
        self, weights: Mapping[str, Tensor], clients: Sequence[int], round: int
    ) -> Iterator[ClientUpdate]:
        """The uploads of several clients, in the order given; a few are computed at a time."""
        batch, config = self.config.client.batch, self.config
        model = self.with_weights(weights)
        together = max(IMAGES_TOGETHER // batch, 1)
        for start in range(0, len(clients), together):
            members = clients[start : start + together]
            places = [place for client in members for place in self.drawn(client, round)]
            inputs = self.steps(places, config.client, round)
            update = make_upload(model, inputs, config.client, round=round, seed=config.seed)
            yield from (update.part(slice(place, place + 1)) for place in range(len(members)))

    def drawn(self, client: int, round: int) -> list[int]:
        """A client's images of a round; none occurs twice where the client has enough.

        With fresh partners they are those of an epoch, shuffled and without what does not fill a
        batch. Epochs are counted in rounds of the federation: a client that is left out of a round
        misses that round's batch. Else every round draws a batch by itself.
        """
        part, batch = self.parts[client], self.config.client.batch
        what, number, place = "client images", round, 0
        if self.config.client.partners == "fresh":
            what = "client epoch"
            number, place = divmod(round, max(len(part) // batch, 1))
        generator = torch_generator(what, self.config.seed, client, number)
        order = torch.randperm(len(part), generator=generator)
        repeated = order.repeat(-(-batch // len(part)))[place * batch : (place + 1) * batch]
        return [part[index] for index in repeated.tolist()]

    def steps(self, places: Sequence[int], client: ClientConfig, round: int) -> list[ClientInput]:
        """What the model is fed for these training images in each local step of a round: augmented,
        then shuffled."""
        feeding, pixels, ids = self.feeding(client), self.pixels(places), self.ids(places)
        labels = torch.tensor([self.train.labels[place] for place in places])
        numbers = feeding.rounds_of_steps(round)
        return [feeding.input(pixels, labels, ids, number) for number in numbers]

    def feeding(self, client: ClientConfig) -> Feeding:
        """How such a client feeds its images to the model: in the paper's setting c where clients
        shuffle, in a where they do not."""
        config = self.config
        setting = "c" if config.gamma else "a"
        return Feeding(client, setting, config.gamma, config.model.patch_size, config.seed)

    def pixels(self, places: Sequence[int]) -> Tensor:
        """These training images, in [0, 1]."""
        return self.images[list(places)].float() / 255

    def ids(self, places: Sequence[int]) -> tuple[str, ...]:
        """The names of these training images."""
        return tuple(self.train.records[place].image_id for place in places)

    def with_weights(self, weights: Mapping[str, Tensor]) -> LoadedModel:
        """A new network that holds a copy of these weights."""
        model = copied(self.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        return model


def _initial_model(config: FederationConfig) -> LoadedModel:
    """The network before round 0: random, or that of `initial` with E_unk at the mean position;
    with the fixed positions and the adapters that clients have."""
    shape, initial, adapters = config.model, config.initial, config.client.adapters
    fields = asdict(shape)
    del fields["drop_path"]
    fields["position_embedding"] = "strict" if shape.position_embedding == "none" else None
    if initial is None:
        fields |= {"name": None, "checkpoint": RANDOM, "seed": config.seed}
        fields["resize"] = shape.img_size
    else:
        fields |= {"name": initial.model, "checkpoint": initial.checkpoint, "dal": None}
        fields["unknown_embedding"] = shape.unknown_embedding or None
        fields["unknown_init"] = "mean_position"
    model = load_model(**fields)
    if config.client.dal and model.dal_regressor is None:
        raise UserError(
            "client.dal: expected a model with a localization regressor, got one without. Set "
            "model.dal, start from weights that hold one, or set client.dal: false."
        )
    if config.client.positions == "sinusoidal":
        model = with_sinusoidal_positions(model)
    return model if adapters is None else with_adapters(model, adapters, config.seed)


def federation_images(
    config: FederationConfig, data: str | Path, val: str | Path | None
) -> tuple[Examples, Examples | None]:
    """Labelled training images, and test images if there are any.

    data: any layout that the trainer takes, or `embedded`: crops of the photographs that every
    installation has, each of which is a class, without test images; val: None: no test images
    """
    if str(data) != EMBEDDED:
        alike = TrainingConfig(
            config.name,
            model=config.model,
            recipe=Recipe(batch=config.client.batch),
            data=config.data,
        )
        return find_examples(alike, Path(data), Path(val) if val else None)
    if val:
        raise UserError(
            f"--val: expected none beside --data {EMBEDDED}, whose photographs clients train on, "
            f"got {val}. Leave --val out, or give both as class folders."
        )
    source = embedded_images()
    names = sorted({str(record.group) for record in source.records})
    if config.model.num_classes < len(names):
        raise UserError(
            f"--data {EMBEDDED} holds {len(names)} photographs, each a class: expected "
            f"model.num_classes of {len(names)} or more, got {config.model.num_classes}."
        )
    records = (
        replace(record, label=names.index(str(record.group)), label_source="folder")
        for record in source.records
    )
    train = Examples(source, tuple(records))
    return train, None


def data_path(path: str | Path) -> str:
    """The path that other processes find the same images at; `embedded` is no path."""
    return EMBEDDED if str(path) == EMBEDDED else str(Path(path).resolve())


MOST_DRAWS = 100  # attempts at a Dirichlet split in which every client has enough images


def iid(labels: Sequence[int], clients: int, *, seed: int) -> list[list[int]]:
    """Each client's images, as places in `labels`: shuffled and dealt out in turn."""
    order = np.random.default_rng(derive_seed("partition", "iid", seed)).permutation(len(labels))
    return [sorted(order[client::clients].tolist()) for client in range(clients)]


def dirichlet(
    labels: Sequence[int], clients: int, *, alpha: float, least: int, seed: int
) -> list[list[int]]:
    """Each client's images, as places in `labels`, with classes spread unevenly.

    Every class is dealt out by shares from Dirichlet(alpha, ..., alpha): a small alpha gives each
    client few classes. Drawn again until every client has `least` images.
    """
    generator = np.random.default_rng(derive_seed("partition", "dirichlet", seed))
    kinds = np.asarray(labels)
    for _ in range(MOST_DRAWS):
        parts: list[list[int]] = [[] for _ in range(clients)]
        for kind in np.unique(kinds):
            places = generator.permutation(np.flatnonzero(kinds == kind))
            shares = generator.dirichlet(np.full(clients, alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(places)).astype(int)
            for part, dealt in zip(parts, np.split(places, cuts), strict=True):
                part.extend(dealt.tolist())
        if min(map(len, parts)) >= least:
            return [sorted(part) for part in parts]
    raise UserError(
        f"None of {MOST_DRAWS} Dirichlet splits of {len(labels)} images gave each of {clients} "
        f"clients {least}. Give fewer clients, a smaller client.batch or a larger alpha."
    )


def mean_gradient(uploads: Iterable[ClientUpdate]) -> Weights:
    """The mean of the uploads by parameter name, weighted by the images of their steps; only one
    upload is in memory at a time."""
    total, mean, first = 0, dict[str, Tensor](), None
    for update in uploads:
        kind = (update.kind, tuple(sorted(update.grads)))
        first = first or kind
        if kind != first:
            raise UserError(
                "The clients of a round sent uploads of different kinds or parameters. Expected "
                "the same kind (gradient or weight_difference) and the same names from each."
            )
        weight = update.batch if update.kind == "gradient" else -update.batch
        for name, gradient in update.grads.items():
            part = gradient[0] * weight
            mean[name] = mean[name].add_(part) if name in mean else part
        total += update.batch
    if not total:
        raise UserError("No client sent an upload in this round: expected at least one.")
    return {name: tensor.div_(total) for name, tensor in mean.items()}


def learning_rate(server: Server, round: int, rounds: int) -> float:
    """Linear warm-up, then constant or half a cosine to zero; the cosine counts from round 0."""
    if round < server.warmup:
        return server.lr * (round + 1) / server.warmup
    if server.schedule == "constant":
        return server.lr
    return server.lr * (1 + math.cos(math.pi * round / rounds)) / 2
