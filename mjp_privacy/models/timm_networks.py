"""timm's Vision Transformers other than the plain one, through timm's own class and forward.

An attack on patches needs of such a network the convolution that embeds the patches, the table of
positions, if there is one, and how many of its rows belong to other tokens. They are found by
shapes, and `check_equation` measures the patch equation (`network_parts`) on the network itself.
MJP's E_unk takes the place of the table's rows at masked patches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError, format_error
from mjp_privacy.core.machine import derive_seed, free_bytes, torch_generator
from mjp_privacy.core.read import json_value
from mjp_privacy.core.schema import size_text
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import WeightFile, tensors_sha256
from mjp_privacy.models.checkpoints import STATES, UnknownInit, fill, filled_unknown
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.mjp_vit import CheckpointReport, Network, check_mask
from mjp_privacy.models.network_parts import (
    CHANNELS,
    HOLDS,
    IN_SIZE,
    NORMALISES,
    SAME_PICTURE,
    code_of,
    equation_errors,
    kind_of,
)
from mjp_privacy.models.vit import START_STD, input_of, start_
from mjp_privacy.models.zoo import (
    PICTURES,
    PIXELS,
    ModelSpec,
    check_complete,
    check_given,
    filled,
    overridden,
    timm_spec,
)

STATED = "timm"
"""The entry of a file's metadata by which it says which network of timm's it holds."""
FIELDS = ("img_size", "num_classes", *PICTURES)
"""Fields of a model that a user may set; the rest is the network's own."""
LAYER_SCALE, SCALES = 0.1, ("ls1.gamma", "ls2.gamma", "gamma_1", "gamma_2")
HEADS = ("head.weight", "head.fc.weight")

# the network --------------------------------------------------------------------------------------


class TimmNetwork(Network):
    """A network of timm's under its own names, with what clients and attacks use: it stands around
    the network and shares its parameters."""

    family = "timm"
    position_embedding = "learned"
    dal_kind = "none"
    first_block = "intact"
    dal_regressor = index_embed = adapters = None
    renamed: Mapping[str, str] | None = None
    """Own names of the parameters of a live network, by its names."""
    resampled: Tensor | None = None
    """(N, rows) by which a gradient of the live network's table becomes one of this table; without
    rows where that tells too little."""
    maps: frozenset[str] = frozenset()
    """Of those names, tables (1, D, H, W) that are kept as (1, H, W, D)."""
    normalises = False
    """Whether a live network normalises pictures itself: the card's mean and std are of both."""
    tower = ""
    """The part that is read of a live network that takes more than a picture."""

    def __init__(self, net: nn.Module, *, unknown_embedding: bool = False) -> None:
        super().__init__()
        for shared in ("_parameters", "_buffers", "_modules"):
            self.__dict__[shared] = getattr(net, shared)
        self.__dict__["net"] = net
        name = kind_of(net)
        embed: Any = getattr(net, "patch_embed", None)
        projection = getattr(embed, "proj", None)
        if not isinstance(projection, nn.Conv2d) or projection.kernel_size != projection.stride:
            raise UserError(
                f"{name}: expected patches that one convolution without overlap embeds "
                "(patch_embed.proj), got none: the attacks read that layer's gradient. Give "
                "another name; where another layer embeds patches, attack_gradients takes the live "
                "network, which no name or file builds here."
            )
        (patch, tall), colours = projection.kernel_size, projection.in_channels
        height, width = getattr(embed, "img_size", None) or (0, 0)
        if colours not in CHANNELS:
            raise UserError(
                f"{name}: expected a patch embedding that is given pixels of 3 channels, or 1 "
                f"(grey), got one of {colours}, such as the feature map that convolutions before "
                "it make: its gradient tells that map. Give another network."
            )
        if patch != tall or min(height, width) < patch:
            raise UserError(
                f"{name}: expected pictures in whole square patches; got {height}×{width} in "
                f"patches of {patch}×{tall}. Give img_size, multiples of the patch, or another "
                "network."
            )
        self.normalises = NORMALISES in vars(getattr(net, "rest", net))
        grid, table = Grid(height // patch, width // patch), getattr(net, "pos_embed", None)
        if grid.pixels(patch) != (height, width):
            embed.whole_size, embed.img_size = (height, width), grid.pixels(patch)
        behind_a_norm = not isinstance(getattr(embed, "norm", None), nn.Identity | None)
        behind_a_norm |= getattr(projection, "norm", None) is not None
        self.grid, self.patch_size = grid, int(patch)
        self.before, self.embed_dim = 0, projection.out_channels
        if not isinstance(table, nn.Parameter) or not table.requires_grad or behind_a_norm:
            self.position_embedding = "strict"  # a table's gradient is not the patches'
        else:
            rows = table[..., 0].numel()
            most = grid.patches + 1 + getattr(net, "num_prefix_tokens", 0)
            if not grid.patches <= rows <= most or table.shape[-1] != self.embed_dim:
                raise UserError(
                    f"{name}: expected a table of {grid.patches} to {most} positions of width "
                    f"{self.embed_dim}, got {rows} of width {table.shape[-1]}. Give a network "
                    "that adds its table to the embedded patches."
                )
            self.before = getattr(net, "rows_before", rows - grid.patches)
        if unknown_embedding and self.pos_embed is None:
            raise UserError(
                f"{name}: expected a table of positions whose rows MJP can mask, got "
                "none. Leave unknown_embedding out."
            )
        start = start_(torch.empty(1, 1, self.embed_dim)) if unknown_embedding else None
        self.register_parameter("unk_embed", None if start is None else nn.Parameter(start))

    def __getattr__(self, name: str) -> Any:
        """Networks without a distillation token have none of its name."""
        if name == "dist_token" and name not in self._parameters:
            return None
        return super().__getattr__(name)

    @property
    def pos_embed(self) -> nn.Parameter | None:
        """The table that is added to the embedded patches."""
        return None if self.position_embedding == "strict" else self._parameters["pos_embed"]

    @property
    def table(self) -> Tensor:
        """The rows of that table (1, rows, D)."""
        assert self.pos_embed is not None
        return self.pos_embed.flatten(1, -2)

    @cached_property
    def _changes(self) -> Tensor:
        """(tokens, width) bool: which numbers that block 0 is given change with the picture."""
        like_patches = torch.ones(self.grid.patches, self.embed_dim, dtype=torch.bool)
        if not len(getattr(self.net, "blocks", ())):  # a Swin's stages have no such name
            return like_patches
        pictures = self.probe("a picture for the places of patches", 2)
        with torch.no_grad():
            one, other = (input_of(self.net, self.blocks[0], x) for x in pictures.unsqueeze(1))
        if not isinstance(one, Tensor):  # a network of one's own may hand on anything
            return like_patches
        width = self.embed_dim if self.embed_dim in one.shape else one.shape[-1]
        return (one != other).reshape(-1, width)

    @property
    def tokens(self) -> int:
        """How many tokens block 0 sees: the patches', and others before or behind them."""
        return len(self._changes)

    @property
    def prefix(self) -> int:
        """How many of block 0's tokens stand before the patches."""
        return int(self._changes.any(1).byte().argmax())

    @property
    def token_width(self) -> int:
        """Of the tokens that block 0 is given."""
        return self._changes.shape[1]

    @property
    def other_tokens(self) -> str:
        """Why block 0's tokens are not one for each embedded patch, of its width; or "", as for an
        outline without weights, in which nothing can be told."""
        patches, outline = self.grid.patches, self._changes.is_meta
        count = patches if outline else int(self._changes.any(1).sum())
        if count != patches:
            return (
                f"{patches} patches are embedded, and of block 0's tokens {count} depend on the "
                "picture: what stands between them is not read"
            )
        if self.token_width != self.embed_dim:
            return (
                f"patches are embedded {self.embed_dim} wide, and block 0's tokens are "
                f"{self.token_width} wide: what stands between them is not read"
            )
        return ""

    def train(self, mode: bool = True) -> TimmNetwork:
        """The mode of the network around and inside."""
        self.net.training = mode
        super().train(mode)
        return self

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What timm's network computes before its head."""
        with self._masked(mask, len(x)):
            features: Tensor = self.net.forward_features(x)
        return features

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised images (B, C, H, W); mask (N,) or (B, N) bool, True = shuffled -> logits."""
        with self._masked(mask, len(x)):
            logits: Tensor = self.net(x)
        return logits

    @contextmanager
    def _masked(self, mask: Tensor | None, batch: int) -> Iterator[None]:
        """E_unk in the table's rows at masked patches, for one forward pass."""
        if mask is not None:
            check_mask(mask, self.grid.patches, batch)
        if mask is None or self.unk_embed is None:
            yield
            return
        table = self.pos_embed
        assert table is not None
        masked: Any = self.positions(mask).unflatten(1, table.shape[1:-1])
        holders = [part._parameters for part in self.modules()]  # a live network has it elsewhere
        places = [(held, n) for held in holders for n, value in held.items() if value is table]
        for held, name in places:
            held[name] = masked
        try:
            yield
        finally:
            for held, name in places:
                held[name] = table


def check_equation(network: TimmNetwork) -> None:
    """Raise unless the patch equation holds, so that no attack reads what a network does not do;
    without a table nothing sends the g_i."""
    kind, size = kind_of(network.net), network.grid.pixels(network.patch_size)
    x = network.probe("a picture for the patch equation")
    takes = f"that takes one picture of {size_text(size)} px"
    with torch.no_grad(), code_of(network.net, takes, IN_SIZE):
        given = input_of(network.net, network.patch_embed.proj, x)
        network.net(x)
    is_picture = given.ndim == 4 and given.shape[1] == x.shape[1]
    is_same = given.shape == x.shape and torch.equal(given, x)
    if given.shape == x.shape and network.normalises:  # which is undone but for rounding
        is_same = float((given - x).norm() / x.norm()) <= SAME_PICTURE
    if is_picture and not is_same:
        got = size_text((given.shape[2], given.shape[3]))
        raise UserError(
            f"{kind}: expected its patch embedding to be given the picture of {size_text(size)} "
            f"px, got another one, of {got} px: what stands before it normalises, pads, cuts or "
            "resizes pictures. Give the network behind that, its mean and std as the client's, and "
            "img_size=… of what it is given."
        )
    if network.pos_embed is None:
        return
    with code_of(
        network.net,
        "whose gradient torch.autograd.grad computes, of a patch embedding with a weight of its "
        "own",
        "Leave out checkpointing, and reparametrisations by remove_parametrizations; behind "
        "weight_norm's g and v the weight's gradient is g's times v/|v| plus v's times |v|/g.",
    ):
        weight = network.get_parameter("patch_embed.proj.weight")
        errors = equation_errors(network, x, network.pos_embed, weight)
    if errors is None:
        raise UserError(
            f"{kind}: expected a patch embedding and a table of positions that are learned, got "
            "no gradient of them. Its gradients cannot be attacked as a ViT's."
        )
    off = errors[network.before]
    if not off <= HOLDS:  # also where it is no number
        own = getattr(network.net, "rest", network).named_parameters()
        table = next((name for name, p in own if p is network.pos_embed), "pos_embed")
        table = table.replace("parametrizations.", "").removesuffix(".original")
        raise UserError(
            f"{kind}: expected a patch embedding with the gradient of patches to which {table} is "
            f"added, at most {HOLDS:.0e} of its length off, got one {off:.1e} off. Where a factor "
            "stands on the embedding or the table, give a network without it (weights times the "
            "factor, gradients divided by it), else img_size=…: without a table tokens are read."
        )


# from a name or a file to a network ---------------------------------------------------------------


def load_timm(
    file: WeightFile | None,
    name: str | None,
    given: Mapping[str, Any],
    *,
    seed: int = 0,
    unknown_init: UnknownInit | None = None,
    made_up: Mapping[str, Any] | None = None,
) -> TimmNetwork:
    """A network of timm's in eval mode, with its card.

    load_timm(None, "vit_small_patch14_dinov2", {"img_size": 98, "mean": 0.5, "std": 0.5, …})

    file          weights under timm's names; None: they are drawn from the seed
    name          of the architecture; None: the file's metadata state it
    given         fields of `ModelSpec`: FIELDS and unknown_embedding
    unknown_init  how to fill E_unk where it is asked for and the file has none
    made_up       facts for those that nothing states; given, the network is an outline without
                  weights, on torch's meta device
    """
    import timm  # two seconds, which only these networks cost

    facts: dict[str, Any] = {}
    if file is not None:
        stated = json_value(file.metadata.get(STATED, "{}"), file.path, STATES)
        stated = dict(stated) if isinstance(stated, Mapping) else {}
        name = name or stated.get("architecture")
        if not isinstance(name, str) or not timm.is_model(name.partition(".")[0]):
            got = f"an architecture {shown(repr(name), 60)} that this timm does not have"
            raise STATES.refusal(file.path, got, STATED)
        facts = {key: stated[key] for key in (*FIELDS, "unknown_embedding") if key in stated}
        head = next((file.tensors[key] for key in HEADS if key in file.tensors), ())
        facts.setdefault("num_classes", len(head))
        facts.setdefault("unknown_embedding", "unk_embed" in file.tensors)
    facts |= {key: value for key, value in given.items() if value is not None}
    spec = _spec(str(name), facts, made_up)
    outline = made_up is not None
    start = ("a fresh classifier", spec.name) if file else ("random weights", spec.name, seed)
    with _drawn(*start), torch.device("meta" if outline else "cpu"):
        network = _built(spec)
    if file is not None:
        report = _filled(network, spec, file, unknown_init)
    else:
        notes = ["an outline without weights"]
        if not outline:
            notes = ["untrained weights", *_spread(network, spec.name, seed)]
        report = CheckpointReport("random", f"random-{seed}", "random", notes=tuple(notes))
    if not outline:
        check_equation(network)
    return _with_card(network, spec, report)


@contextmanager
def _drawn(*parts: str | int) -> Iterator[None]:
    """torch's global generator, seeded by these names; afterwards it is as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(*parts))
        yield


def _spread(network: TimmNetwork, name: str, seed: int) -> list[str]:
    """Bring layer scale to where training takes it, and registers as far apart as positions; a note
    of it. At its start of 1e-5 the blocks do nothing, and all patches have nearly one gradient."""
    scales = [p for key, p in network.named_parameters() if key.endswith(SCALES)]
    with torch.no_grad(), _drawn("random registers", name, seed):
        for scale in scales:
            scale.fill_(LAYER_SCALE)
        if (registers := network._parameters.get("reg_token")) is not None:
            start_(registers)
    return [f"layer scale {LAYER_SCALE}"] if scales else []


def _filled(
    network: TimmNetwork, spec: ModelSpec, file: WeightFile, unknown_init: UnknownInit | None
) -> CheckpointReport:
    """Copy a file's tensors into the network. A backbone without a classifier gets a fresh one,
    seeded."""
    tensors, notes = dict(file.tensors), list[str]()
    if spec.unknown_embedding and "unk_embed" not in tensors and "pos_embed" in tensors:
        rows = tensors["pos_embed"].flatten(1, -2)[:, network.rows_of_patches]
        tensors["unk_embed"] = filled_unknown(rows, unknown_init, file.shown, notes)
    if spec.num_classes and not any(key in tensors for key in HEADS):
        fresh = {key: p.detach() for key, p in network.named_parameters() if key.startswith("head")}
        generator = torch_generator("a fresh classifier", spec.name)
        for tensor in fresh.values():
            if tensor.is_meta or tensor.ndim == 1:
                continue
            if not bool(tensor.any()):  # zeros would send no gradient on
                tensor.normal_(0, START_STD, generator=generator)
        tensors = {**fresh, **tensors}
        notes.append("a fresh classifier, seeded")
    fill(network, tensors, dict(network.named_parameters()), file.shown)
    return CheckpointReport(file.path.name, file.sha256, "timm", notes=tuple(notes))


def stated_by(network: TimmNetwork) -> dict[str, str]:
    """What a file of the network's weights says of it in its metadata."""
    card = network.card
    facts = {"architecture": card.name, "unknown_embedding": network.unk_embed is not None}
    facts |= {key: getattr(card, key) for key in FIELDS}
    return {STATED: json.dumps(facts)}


def of_timm(net: nn.Module, *, mean: tuple[float, ...], std: tuple[float, ...]) -> TimmNetwork:
    """A live network under timm's names, in eval mode, with its card; it is not copied."""
    network = TimmNetwork(net)
    declared = getattr(net, "pretrained_cfg", None) or {}
    name = str(declared.get("architecture", kind_of(net)))
    check_equation(network.eval())
    size = network.grid.pixels(network.patch_size)
    classes = int(getattr(net, "num_classes", 0) or 0)
    spec = ModelSpec(name, img_size=size, num_classes=classes, mean=mean, std=std)
    sha256 = tensors_sha256(dict(net.state_dict()))
    network = _with_card(network, spec, CheckpointReport(name, sha256, "timm"))
    if network.channels == 1:
        if len(set(mean)) > 1 or len(set(std)) > 1:
            raise UserError(
                f"{kind_of(net)}: expected one number as mean and as std of grey pictures, got "
                f"{mean} and {std}. Give those with which the client normalised them."
            )
        network.card = replace(network.card, mean=mean[:1], std=std[:1])
    return network


def _spec(
    name: str, given: Mapping[str, Any], made_up: Mapping[str, Any] | None = None
) -> ModelSpec:
    """The complete spec of a network; mean and std are those that timm declares where the name has
    the tag of such weights, and else must be given."""
    asked = {key: value for key, value in given.items() if value is not None}
    check_given(name, asked, (*FIELDS, "unknown_embedding"))
    spec = timm_spec(name)
    if "." not in name:
        spec = ModelSpec(name, img_size=spec.img_size, num_classes=spec.num_classes)
    classes = spec.num_classes or None  # timm declares 0 for what was trained without any
    spec = filled(overridden(replace(spec, num_classes=classes), asked), made_up or {})
    stated = replace(spec, num_classes=spec.num_classes or None)
    check_complete(stated, name, ("img_size", "num_classes", *PIXELS))
    return spec


def _built(spec: ModelSpec) -> TimmNetwork:
    """The network of a complete spec, with weights as timm draws them; on a device that holds
    numbers only if memory holds it; a UserError where timm has none of this size."""
    import timm

    if not torch.empty(0).is_meta:
        with torch.device("meta"):
            outline = _built(spec)
        needed = 4 * sum(parameter.numel() for parameter in outline.parameters())
        if (free := free_bytes(torch.device("cpu"))) is not None and needed > free:
            raise UserError(
                f"{spec.name} takes {needed / 1e9:,.1f} GB: expected a network that fits into the "
                f"{free / 1e9:.1f} GB of memory that are free. Give a smaller one."
            )
    base, sizes = spec.name.partition(".")[0], {"img_size": spec.img_size}
    try:
        try:
            net = timm.create_model(base, num_classes=spec.num_classes, **sizes)  # type: ignore[arg-type]
        except TypeError:  # no ViT, or one of a single size
            net = timm.create_model(base, num_classes=spec.num_classes)
    except Exception as error:  # each of timm's classes has its own limits
        raise UserError(
            f"{spec.name}: timm builds no such network of {shown(sizes)}: {format_error(error)}. "
            "Give another img_size, or none."
        ) from error
    network = TimmNetwork(net, unknown_embedding=bool(spec.unknown_embedding))
    asked, patch = spec.img_size or 0, network.patch_size
    if network.grid != Grid.of(asked, patch):
        size = size_text(network.grid.pixels(patch))
        raise UserError(
            f"{spec.name}: timm's network takes pictures of {size} px alone: expected "
            f"img_size={size} or none, got {size_text(asked)}."
        )
    return network


def _with_card(network: TimmNetwork, spec: ModelSpec, report: CheckpointReport) -> TimmNetwork:
    """The network in eval mode, with the card of this spec."""
    size = network.grid.pixels(network.patch_size)  # less than asked for where that is no multiple
    table = "" if network.pos_embed is not None else ", no position table"
    if table and "pos_embed" in network._parameters:
        table = ", position table behind a norm"
    sizes = f"d{network.embed_dim} p{network.patch_size}@{size_text(size)}"
    kind = kind_of(network.net)
    network.card = replace(spec, img_size=size).card(f"{kind} {sizes}{table}", report)
    return network.eval()
