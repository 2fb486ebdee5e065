"""`load_model`: from a model's name or a file of weights to a network and a card describing it.

An outline is the same model without weights, on torch's meta device: every parameter with its shape
and without its values, so that whether an attack applies can be asked before anything is loaded or
downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed, free_bytes
from mjp_privacy.core.read import json_value, typed
from mjp_privacy.core.registry import Entry, unknown_name
from mjp_privacy.core.schema import size_text
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import (
    PACKAGED_PREFIX,
    TIMM_PREFIX,
    WeightFile,
    download_timm,
    located,
    read_weight_file,
)
from mjp_privacy.models.checkpoints import (
    STATES,
    UnknownInit,
    completed,
    fill,
    load_into,
    shape_of,
    stated,
    timm_beside,
    to_own_names,
    with_facts_beside,
)
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.mjp_vit import (
    CheckpointReport,
    FirstBlock,
    MJPVisionTransformer,
    Network,
    PositionEmbedding,
    check_mask,
    with_adapters,
)
from mjp_privacy.models.sizes import Sizes, Variant, check_parameters, low_rank
from mjp_privacy.models.timm_networks import STATED, load_timm
from mjp_privacy.models.zoo import (
    NEEDED,
    PICTURES,
    PIXELS,
    ModelSpec,
    at_size,
    check_complete,
    check_given,
    check_timm_name,
    filled,
    is_timm_network,
    overridden,
    spec_by_name,
    timm_spec,
)

RANDOM = "random"
MADE_UP: Mapping[str, Any] = {
    "mean": (0.0,) * 3,
    "std": (1.0,) * 3,
    "num_heads": 1,
    "num_classes": 1000,
    "activation": "gelu",
}
"""What no attack's applicability depends on, for outlines of models that do not state it."""


class LoadedModel(MJPVisionTransformer):
    """A plain ViT with its card."""


# from a name or a file to a model -----------------------------------------------------------------


@torch.inference_mode(False)
def load_model(
    name: str | None = None,
    *,
    checkpoint: str | Path | None = None,
    unknown_init: UnknownInit | None = None,
    seed: int = 0,
    **overrides: Any,
) -> LoadedModel:
    """A model in eval mode on the CPU, in float32, with its `card`: load_model("cifar_vit").

    name         a named model (`deit_small_mjp`, ...) or a timm ViT
                 (`vit_tiny_patch16_224`, `vit_small_patch14_dinov2.lvd142m`). One that is no plain
                 ViT is a `TimmNetwork`, which keeps timm's own forward.
                 Without a name the architecture is read off the checkpoint. `num_heads`, `mean`
                 and `std` do not show in tensors: they are taken from the file's metadata or the
                 JSON files beside it (`models.checkpoints`), or must be given.
    checkpoint   a file (.safetensors, .pth, .pt, .bin) in one of the layouts of models/README.md,
                 a folder as timm, transformers and open_clip save one, `timm:NAME` for a download,
                 or `random` for seeded untrained weights.
    overrides    fields of `ModelSpec`: img_size, patch_size, embed_dim, depth, num_heads,
                 num_classes, mean, std, position_embedding, unknown_embedding, dal, ...
    unknown_init how to fill E_unk if the checkpoint has none; the card's notes say so.
    """
    return _model(name, checkpoint, overrides, unknown_init, seed)


def outline_model(
    name: str | None = None,
    *,
    checkpoint: str | Path | None = None,
    unknown_init: UnknownInit | None = None,
    seed: int = 0,
    whole: bool = False,
    **overrides: Any,
) -> LoadedModel:
    """The model that `load_model` would load from the same arguments, without its weights.

    outline_model("vit_large_patch16_224", checkpoint="random", num_classes=1000)

    whole   raise, as `load_model` does, where mean, std, heads or classes are not known. By default
            these are made up, since no attack's applicability depends on them.
    """
    return _model(name, checkpoint, overrides, unknown_init, seed, {} if whole else MADE_UP)


def outline_spec(
    name: str | None = None, *, checkpoint: str | Path | None = None, **overrides: Any
) -> tuple[ModelSpec, str]:
    """All that is known of a plain ViT before its weights are read, and where these come from."""
    spec, source = _asked_for(name, checkpoint, overrides)
    if source == RANDOM or source.startswith(TIMM_PREFIX):
        return spec, source
    file = read_weight_file(source, shapes_only=True)
    if SIZES in file.metadata:
        raise UserError(
            f"{file.shown} holds another network than a plain ViT, to which closed forms do not "
            "apply. Expected a plain ViT; give this file to `mjp evaluate`, or as a model of a "
            "config to `mjp attack`."
        )
    return _read_off(spec, file, overrides)[0], file.shown


def check_names(name: str | None, checkpoint: str | None) -> None:
    """Raise a UserError, with the nearest name, if a model or a shipped checkpoint is not known."""
    if name is not None:
        spec_by_name(name)
    if checkpoint is not None and checkpoint.startswith(TIMM_PREFIX):
        check_timm_name(checkpoint.removeprefix(TIMM_PREFIX))
    if checkpoint is not None and checkpoint.startswith(PACKAGED_PREFIX):
        located(checkpoint)


def check_values(name: str | None, checkpoint: str | Path | None) -> None:
    """Raise a UserError where a file of weights holds NaN or infinity; names and shapes are checked
    by an outline. Weights that are downloaded, drawn or come with this package are not read."""
    source = str(checkpoint or spec_by_name(str(name)).checkpoint)
    if source != RANDOM and not source.startswith((TIMM_PREFIX, PACKAGED_PREFIX)):
        read_weight_file(source)


def _model(
    name: str | None,
    checkpoint: str | Path | None,
    overrides: Mapping[str, Any],
    unknown_init: UnknownInit | None,
    seed: int,
    made_up: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """The model, a plain ViT or another network, from the place that `checkpoint` names.

    made_up  facts for those that nothing states; given, the model is an outline without weights
    """
    if unknown_init not in (None, *get_args(UnknownInit)):
        raise unknown_name("unknown_init", shown(unknown_init, 60), get_args(UnknownInit))
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
        raise UserError(f"seed: expected a whole number from 0 to 2**63 - 1, got {seed!r}.")
    outline, place = made_up is not None, str(checkpoint)
    network = name or (place.removeprefix(TIMM_PREFIX) if place.startswith(TIMM_PREFIX) else None)
    if network is not None and is_timm_network(network):
        spec, source = ModelSpec(network), _source(spec_by_name(network), checkpoint)
    else:
        network = None  # a plain ViT
        spec, source = _asked_for(name, checkpoint, overrides)
    downloaded = source.startswith(TIMM_PREFIX)
    if source == RANDOM or (outline and downloaded):
        if network is None:
            return _plain(spec, source, None, seed=seed, made_up=made_up)
        return cast(LoadedModel, load_timm(None, network, overrides, seed=seed, made_up=made_up))

    def load(file: WeightFile, made_up: Mapping[str, Any] | None) -> LoadedModel:
        of_timm = network is not None or STATED in file.metadata
        beside = None if of_timm else timm_beside(file.path)
        if of_timm or beside is not None:
            named, facts = beside or (None, {})
            facts |= {key: value for key, value in overrides.items() if value is not None}
            named = network or name or named
            other = load_timm(file, named, facts, unknown_init=unknown_init, made_up=made_up)
            return cast(LoadedModel, other)
        if SIZES in file.metadata:
            outline = made_up is not None
            return cast(LoadedModel, load_other(name, file, overrides, outline=outline))
        return _plain(spec, source, file, overrides, unknown_init=unknown_init, made_up=made_up)

    if downloaded:
        return load(download_timm(source.removeprefix(TIMM_PREFIX)), None)
    # Names and shapes first: what does not fit costs neither time nor memory.
    model = load(read_weight_file(source, shapes_only=True), made_up or {})
    return model if outline else load(read_weight_file(source), None)


def _plain(
    spec: ModelSpec,
    source: str,
    file: WeightFile | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    unknown_init: UnknownInit | None = None,
    seed: int = 0,
    made_up: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """A plain ViT with the numbers of a file, or without one with numbers drawn from the seed.

    spec     that of the model's name, with the user's fields in it
    made_up  as in `_model`
    """
    where, state = spec.name if source == RANDOM else source, dict[str, Tensor]()
    if file is not None:
        where = file.shown
        spec, state = _read_off(spec, file, overrides or {})
    elif source == RANDOM:
        spec = replace(spec, trained_gamma=None)
    spec = filled(spec, made_up or {})
    check_complete(spec, where)
    if not spec.num_classes:
        raise UserError(
            f"{where}: expected a head of 1 class or more, got num_classes=0. Give a file with its "
            "classifier, or the network itself to attack_gradients."
        )
    with torch.random.fork_rng(devices=[]), torch.device("cpu" if made_up is None else "meta"):
        torch.manual_seed(derive_seed("random weights", spec.name, seed))
        model = build(spec, where)
    report = CheckpointReport(RANDOM, f"random-{seed}", RANDOM, notes=("untrained weights",))
    if file is not None:
        report = load_into(model, state, file, unknown_init=unknown_init)
    if made_up is not None:
        report = CheckpointReport(where, "", RANDOM, notes=("an outline without weights",))
    return with_card(model, spec, report)


# the spec -----------------------------------------------------------------------------------------


def _asked_for(
    name: str | None, checkpoint: str | Path | None, overrides: Mapping[str, Any]
) -> tuple[ModelSpec, str]:
    """The spec of a name with the user's fields in it and, for a download, what timm declares; and
    where its weights come from."""
    spec = overridden(spec_by_name(name) if name else ModelSpec("custom"), overrides)
    source = _source(spec, checkpoint)
    if source == RANDOM:  # no file says what the blocks compute: the plain ViT's
        spec = filled(spec, {"activation": Variant().activation})
    if source.startswith(TIMM_PREFIX):
        declared = timm_spec(source.removeprefix(TIMM_PREFIX))
        spec = filled(spec, vars(at_size(declared, spec.img_size)))
    return spec, source


def _source(spec: ModelSpec, checkpoint: str | Path | None) -> str:
    source = spec.checkpoint if checkpoint is None else str(checkpoint)
    if source is None:
        raise UserError(
            f"Model {spec.name!r} needs a checkpoint. {spec.where or 'Give checkpoint=PATH.'} "
            "On the command line: --weights PATH. checkpoint='random' builds it untrained."
        )
    return source


def _read_off(
    named: ModelSpec, file: WeightFile, overrides: Mapping[str, Any]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The spec with what a file says, and the file's tensors by this model's names. What the user
    gave wins over the file's metadata, and these over the JSON files beside it."""
    state, layout = to_own_names(file), file.layout
    shape = shape_of(state, file.shown)
    spec = with_facts_beside(named, file.path, layout, shape)
    spec = overridden(replace(spec, **stated(file)), overrides)
    return completed(spec, shape, layout, file.shown), state


# the network --------------------------------------------------------------------------------------


def build(spec: ModelSpec, source: str) -> LoadedModel:
    """The network of a complete spec, with weights as torch draws them."""
    numbers: dict[str, Any] = {key: getattr(spec, key) for key in NEEDED}
    numbers["mlp_ratio"] = spec.mlp_ratio or 4.0
    outline = torch.empty(0).is_meta  # it takes no memory
    free = None if outline else free_bytes(torch.device("cpu"))
    check_parameters(source, **numbers, free=free)
    model = LoadedModel(
        **numbers,
        position_embedding=spec.position_embedding,
        unknown_embedding=bool(spec.unknown_embedding),
        index_embedding=bool(spec.index_embedding),
        dal=spec.dal or "none",
        first_block=spec.first_block or "intact",
        variant=spec.variant,
    )
    return with_adapters(model, low_rank(spec.adapters), seed=0) if spec.adapters else model


def with_card(model: LoadedModel, spec: ModelSpec, report: CheckpointReport) -> LoadedModel:
    """The model in eval mode, with the card of this spec."""
    architecture = (
        f"vit d{spec.embed_dim} l{spec.depth} h{spec.num_heads} "
        f"p{spec.patch_size}@{size_text(spec.img_size or 0)}"
        + (" closed-form block 0" if model.first_block == "closed_form" else "")
        + str(model.variant)
    )
    model.card = spec.card(architecture, report)
    if model.variant != Variant():
        own = model.variant
        model.card = replace(model.card, norm_eps=own.norm_eps, activation=own.activation)
    return model.eval()


# Swins and ResNets, which this package trains -----------------------------------------------------


class OtherNetwork(Network):
    """What training, evaluation and clients use of a network that is no plain ViT; its features are
    what its classifier reads, (B, 1, D), in the place of a ViT's tokens."""

    before = 0
    position_embedding: PositionEmbedding
    first_block: FirstBlock = "intact"
    pos_embed = index_embed = adapters = None

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.family = sizes, sizes.family
        self.patch_size, self.grid = sizes.patch_size, Grid.of(sizes.img_size, sizes.patch_size)
        self.tokens = self.grid.patches
        self.position_embedding = "learned" if sizes.positions else "strict"
        self.dal_kind = sizes.dal
        self.unk_embed = self.dal_regressor = None

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimiser should not decay."""
        return set()

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the classifier reads (B, 1, D), of normalised images (B, C, H, W)."""
        raise NotImplementedError

    def forward_head(self, features: Tensor) -> Tensor:
        """Logits (B, classes) from these features."""
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised images (B, C, H, W); mask (N,) or (B, N) bool, True = shuffled -> logits."""
        side = self.sizes.img_size
        if x.ndim != 4 or x.shape[-2:] != (side, side):
            raise UserError(f"Expected images (B, 3, {side}, {side}), got {tuple(x.shape)}.")
        if mask is not None:
            check_mask(mask, self.tokens, len(x))
        return self.forward_head(self.forward_features(x, mask))


NETWORKS: Mapping[str, Entry] = {
    "swin": Entry("mjp_privacy.paper.networks:JigsawSwin"),
    "resnet": Entry("mjp_privacy.paper.networks:JigsawResNet"),
}


def build_other(sizes: Sizes, drop_path: float = 0.0) -> OtherNetwork:
    """The network of these sizes, with weights as torch draws them.

    build_other(Sizes("resnet", 224, 16, 64, (3, 4, 6, 3), 1000)) is ResNet-50
    """
    network: OtherNetwork = NETWORKS[sizes.family].load()(sizes, drop_path)
    return network


SIZES = "network"
"""The entry of a file's metadata that states the sizes of a network that `mjp train` made and that
is no ViT."""


def load_other(
    name: str | None, file: WeightFile, overrides: Mapping[str, Any], *, outline: bool = False
) -> OtherNetwork:
    """The network of such a file in eval mode, with its card.

    outline  without weights, on torch's meta device: the file's shapes are enough
    """
    content = json_value(file.metadata[SIZES], file.path, STATES)
    sizes = typed(content, file.path, STATES, Sizes)
    sizes.check(file.shown)
    given = {key: value for key, value in overrides.items() if value is not None}
    check_given(file.shown, {**given, **({"model": name} if name else {})}, PICTURES)
    facts = {key: value for key, value in stated(file).items() if key in PICTURES}
    spec = overridden(replace(ModelSpec(f"custom {sizes.family}"), **facts), given)
    check_complete(spec, file.shown, PIXELS)
    spec = replace(spec, img_size=sizes.img_size, num_classes=sizes.num_classes)
    with torch.device("meta" if outline else "cpu"):
        network = build_other(sizes)
    fill(network, file.tensors, weights_of(network), file.shown)
    report = CheckpointReport(file.path.name, file.sha256, sizes.family)
    network.card = spec.card(str(sizes), report)
    return network.eval()


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a network: parameters, and statistics such as batch norm's."""
    kept = network.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in kept.items() if tensor.is_floating_point()}
