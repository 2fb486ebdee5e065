"""How a client is configured, and which of its fields tell two cells of the grid apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mjp_privacy.client.defenses.registry import StepDefense, canonical, check_order, defense_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import Many, NotNegative, Positive, Share, Switch, parse, schema
from mjp_privacy.core.text import shown
from mjp_privacy.models.sizes import LowRank, PerhapsAdapters, low_rank

MOST_STEPS = 1_000_000
"""Local steps stay below this, so that round and step fit into one number in `local_round`."""

MOST_IMAGES = 10_000
"""In one step of a client."""

LocalSteps = Annotated[int, Field(strict=True, ge=1, lt=MOST_STEPS)]
Images = Annotated[int, Field(strict=True, ge=1, le=MOST_IMAGES)]
Momentum = Annotated[float, Field(strict=True, ge=0, lt=1)]
ParameterName = Annotated[str, Field(strict=True, min_length=1, max_length=200)]


def _one_line(item: Any) -> str:
    """A defence as YAML or the command line has it, as its line."""
    try:
        return canonical(item)
    except UserError as error:  # pydantic adds the name of the field
        raise PydanticCustomError("defense", str(error)) from error


DefenseText = Annotated[str, BeforeValidator(_one_line), Field(max_length=200)]


@schema
class ClientConfig:
    """How the client computes what it uploads. Each field is a column of every row."""

    mode: Literal["eval", "train"] = "eval"
    """Mode of the network, as in torch, while gradients are computed."""
    loss: Literal["cross_entropy"] = "cross_entropy"
    batch: Images = 1
    """Images in each step."""
    partners: Literal["fixed", "fresh"] = "fixed"
    """fixed: the same images stand together in every round; fresh: the block's images are one
    client's data, which it shuffles before every round but the first and cuts into batches, so
    that an image meets other partners each time and no upload says which images it holds."""
    dal: Switch = False
    """Add dal_lambda * L_DAL over the unmasked positions to the loss."""
    dal_lambda: NotNegative = 0.01
    plain_share: Share = 0.0
    """Probability that a step is not shuffled at all; the paper trains with .5."""
    mask: Literal["image", "batch"] = "image"
    """image: every image has its own shuffle; batch: a step's images share that of the first."""
    augment: Literal["none", "flip", "crop", "mixup"] = "none"
    """Random change of the image in every round, before the shuffle. Scores compare with the image
    of round 0 after this change."""
    withhold: Annotated[tuple[ParameterName, ...], Many] = ()
    """Parameters whose gradient is not uploaded, such as a frozen pos_embed."""
    positions: Literal["own", "sinusoidal"] = "own"
    """sinusoidal: a fixed 2-D sine table replaces the learned one; its gradient is not uploaded."""
    position_noise: NotNegative = 0.0
    """Gaussian noise on every row of the uploaded pos_embed gradient; its standard deviation
    relative to the root mean square of the gradient's nonzero entries."""
    server_lr: NotNegative = 0.0
    """Step size by which all weights move between rounds along the mean gradient of the block's
    images, as in a federation that trains; 0: every round has the same weights."""
    upload: Literal["gradient", "weight_difference"] = "gradient"
    """weight_difference: weights after the local steps minus those before, in the client's
    dtype."""
    lr: Positive = 0.1
    """Learning rate of the local steps; it enters a weight difference only."""
    weight_decay: NotNegative = 0.0
    """Weight decay of the local steps; it enters a weight difference only."""
    defenses: Annotated[tuple[DefenseText, ...], Many] = ()
    """Defences, applied in this order: `{dp_sgd: 0.5}`, `{top_k: 0.1}`, `int8`, ..."""
    steps: LocalSteps = 1
    """Local steps before weights are sent, all on the same images, each with a fresh mask."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimiser of the local steps. Adam without weight decay moves weights as adamw does."""
    momentum: Momentum = 0.0
    """Momentum of SGD; the velocity starts at zero in every upload."""
    autocast: Literal["none", "fp16", "bf16"] = "none"
    """Half precision in which products of matrices and convolutions are computed, as
    `torch.autocast` does (`client.autocast`); the weights and what is sent stay in float32."""
    train: Literal["all", "head"] = "all"
    """head: linear probing, the classifier alone is trained and sent while all else is frozen."""
    lora: PerhapsAdapters = ""
    """`{rank: 4, targets: [qkv, proj]}`: the client trains and sends low-rank adapters of these
    layers, and the classifier, while all else is frozen (`models/mjp_vit.py`); empty: none."""

    @property
    def stated(self) -> dict[str, Any]:
        """What an upload says of its client, by the names of `ClientUpdate`'s fields."""
        same = ("batch", "partners", "steps", "optimizer", "momentum", "autocast", "position_noise")
        trained = self.upload == "weight_difference"
        return {
            **{name: getattr(self, name) for name in same},
            "kind": self.upload,
            "lr": self.lr if trained else None,
            "weight_decay": self.weight_decay if trained else 0.0,
            "dal_lambda": self.dal_lambda if self.dal else 0.0,
            "clipped": self.clips,
        }

    @property
    def adapters(self) -> LowRank | None:
        return low_rank(self.lora) if self.lora else None

    @property
    def withheld(self) -> tuple[str, ...]:
        """Every parameter that is not uploaded: `withhold`, and pos_embed where it is fixed."""
        fixed = ("pos_embed",) if self.positions == "sinusoidal" else ()
        return tuple(dict.fromkeys((*self.withhold, *fixed)))

    @property
    def undivided(self) -> bool:
        """Whether the images of a block have to be computed together: the server's steps go along
        all of them, or the client draws its batches from them."""
        return self.server_lr > 0 or self.partners == "fresh"

    @property
    def one_plain_step(self) -> bool:
        """Whether the upload is the gradient of one step, or the result of one plain SGD step."""
        return self.steps == 1 and self.optimizer == "sgd" and self.momentum == 0

    @property
    def clips(self) -> bool:
        """Whether each example's gradient is shrunk by a factor that stays with the client."""
        return any(isinstance(defense_of(text), StepDefense) for text in self.defenses)

    @property
    def has_errors(self) -> bool:
        """Whether defences change the upload by more than such a factor, so that there is an error
        to be declared."""
        defenses = [defense_of(text) for text in self.defenses]
        return any(not isinstance(d, StepDefense) or d.deviation(self.batch) for d in defenses)

    @property
    def pseudo_gradient(self) -> Literal["exact", "approximate"]:
        """Whether the upload gives one gradient exactly or only approximately, defences aside.

        Momentum makes no difference: its first step is a plain one.
        """
        single_sgd_step = self.steps == 1 and self.optimizer == "sgd"
        return "exact" if single_sgd_step else "approximate"


FIRST_FIELDS = ("mode", "loss", "batch", "dal", "dal_lambda")
"""Fields that always enter a cell's identity. Fields that were added later enter it only where they
differ from their default, so that runs finished before they existed still count as finished."""


def local_round(round: int, step: int) -> int:
    """The number that the random choices of a local step are drawn for.

    The first step has the number of its round; every other step has a negative number that no
    round and no other step has: local_round(3, 0) is 3, local_round(3, 2) is -3000002.
    """
    return round if step == 0 else -(round * MOST_STEPS + step)


def client_identity(client: ClientConfig) -> dict[str, Any]:
    """The fields of a client that decide a cell's key and run_id."""
    return {**{name: getattr(client, name) for name in FIRST_FIELDS}, **client_recipe(client)}


def client_recipe(client: ClientConfig) -> dict[str, Any]:
    """The fields that differ from their default, to be written into a file."""
    return {
        field.name: getattr(client, field.name)
        for field in dataclasses.fields(client)
        if getattr(client, field.name) != field.default
    }


KINDS = ("gradient", "weight_difference")


def told_client(fields: Mapping[str, Any], where: str) -> ClientConfig:
    """The client of one upload, as users and headers tell it: by fields of a config, whose `upload`
    they call `kind`. A UserError, opened by `where`, names what is wrong.

    told_client({"kind": "weight_difference", "lr": 0.1, "steps": 4}, "recipe")
    """
    kind = fields.get("kind", fields.get("upload", "gradient"))
    if str(kind) not in KINDS:
        got = shown(" ".join(repr(kind).split()), 100)
        raise UserError(f"{where}.kind: expected {' or '.join(KINDS)}; got {got}.")
    known = {name: value for name, value in fields.items() if name != "kind"}
    client = parse(ClientConfig, {**known, "upload": kind}, where)
    if kind == "weight_difference" and "lr" not in fields:
        raise UserError(
            f"{where}.lr: expected the learning rate, which a weight difference is a gradient "
            "times of; got none."
        )
    check_client(client, None, where)
    return client


def check_client(client: ClientConfig, block: int | None, where: str) -> None:
    """Raise UserError where fields contradict each other, or a block does not hold whole steps.

    block: the number of images whose batches are cut together; None where there are no blocks, as
    of one upload
    where: the client's place in the config, such as "grid.0.client", which opens every message;
    the `block` stands beside it
    """
    counted = f"{where.removesuffix('client')}block"
    if block is not None and block % client.batch:
        raise UserError(
            f"{counted}: these images make whole steps; expected a multiple of the batch "
            f"({client.batch}), got {block}."
        )
    several = client.partners == "fresh" and client.batch > 1
    if several and block is not None and block < 2 * client.batch:
        raise UserError(
            f"{counted}: expected two batches at least with partners: fresh ({2 * client.batch} "
            f"images or more), got {block}: a single batch holds the same images in every round. "
            f"Set it to {2 * client.batch} or more, or partners: fixed."
        )
    check_order(client.defenses, where)
    for field, contradicts, expected in CONTRADICTIONS:
        if contradicts(client):
            got = getattr(client, field)
            raise UserError(f"{where}.{field}: expected {expected}; got {got}.")


CLEAN = "where server_lr is above 0: the simulated server moves along clean gradients of one step"
CONTRADICTIONS: tuple[tuple[str, Callable[[ClientConfig], bool], str], ...] = (
    (
        "partners",
        lambda c: c.partners == "fresh" and c.batch == 1,
        "fixed with batch: 1, for an image that is alone in its batch has no partners",
    ),
    (
        "momentum",
        lambda c: c.optimizer != "sgd" and c.momentum > 0,
        "0 with any optimizer but sgd, since the others have momentum of their own",
    ),
    (
        "upload",
        lambda c: c.upload == "gradient" and not c.one_plain_step,
        "weight_difference with several steps, momentum or another optimizer than sgd: such a "
        "client has no single gradient",
    ),
    (
        "position_noise",
        lambda c: c.position_noise > 0 and (c.server_lr > 0 or bool(c.defenses or c.lora)),
        "0 beside server_lr (whose moving weights would give the noise away), defenses (among them "
        "is gaussian_noise, on every parameter) and lora (no gradient of the table is sent)",
    ),
    (
        "train",
        lambda c: c.train != "all" and bool(c.lora or c.position_noise),
        "all beside lora and position_noise, which are of other parameters",
    ),
    ("defenses", lambda c: c.server_lr > 0 and bool(c.defenses), f"none {CLEAN}"),
    ("steps", lambda c: c.server_lr > 0 and not c.one_plain_step, f"one plain SGD step {CLEAN}"),
)
"""A field, when it contradicts the others, and what is expected of it."""
