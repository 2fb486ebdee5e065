"""`load_model`: from a model's name or a file of weights to a network and a card describing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.models.beside import with_facts_beside
from mjp_privacy.models.building import LoadedModel as LoadedModel
from mjp_privacy.models.building import build, check_complete, with_card
from mjp_privacy.models.checkpoint_files import (
    CHECKPOINT,
    PACKAGED_PREFIX,
    TIMM_PREFIX,
    WeightFile,
    download_timm,
    read_weight_file,
)
from mjp_privacy.models.checkpoint_tables import UnknownInit
from mjp_privacy.models.checkpoints import (
    CheckpointReport,
    layout_of,
    load_into,
    of_a_model,
    to_own_names,
)
from mjp_privacy.models.family_files import is_other, load_other
from mjp_privacy.models.mismatch import check_same_model
from mjp_privacy.models.shape import shape_of
from mjp_privacy.models.spec import (
    ModelSpec,
    at_size,
    check_choice,
    completed,
    filled,
    overridden,
    with_metadata,
)
from mjp_privacy.models.tensor_files import check_finite
from mjp_privacy.models.variant import Variant
from mjp_privacy.models.zoo import spec_by_name, timm_spec

RANDOM = "random"


def load_model(
    name: str | None = None,
    *,
    checkpoint: str | Path | None = None,
    unknown_init: UnknownInit | None = None,
    seed: int = 0,
    **overrides: Any,
) -> LoadedModel:
    """A model in eval mode on the CPU, in float32, with its `card`: load_model("cifar_vit").

    name         a named model (`deit_small_mjp`, ...) or a plain timm ViT
                 (`vit_tiny_patch16_224`, `vit_base_patch16_224.augreg_in21k_ft_in1k`).
                 Without a name the architecture is read off the checkpoint. `num_heads`, `mean`
                 and `std` do not show in tensors: they are taken from the file's metadata or the
                 JSON files beside it (`models.beside`), or must be given.
    checkpoint   a file (.safetensors, .pth, .pt, .bin) in one of the layouts of models/README.md,
                 a folder as timm, transformers and open_clip save one, `timm:NAME` for a download,
                 or `random` for seeded untrained weights.
    overrides    fields of `ModelSpec`: img_size, patch_size, embed_dim, depth, num_heads,
                 num_classes, mean, std, position_embedding, unknown_embedding, dal, ...
    unknown_init how to fill E_unk if the checkpoint has none; the card's notes say so.
    """
    check_choice("unknown_init", unknown_init, UnknownInit)
    check_seed(seed)
    spec, source = asked_for(name, checkpoint, overrides)
    if source == RANDOM:
        return _random_model(spec, seed)
    if source.startswith(TIMM_PREFIX):
        spec = declared_by_timm(spec, source)
        file = download_timm(source.removeprefix(TIMM_PREFIX))
        spec, _ = outlined(spec, file, overrides, unknown_init)
        state = to_own_names(file)
    else:  # names and shapes first: what does not fit costs neither time nor memory
        header = read_weight_file(source, shapes_only=True)
        if is_other(header):
            return other_network(name, read_weight_file(source), overrides)
        spec, _ = outlined(spec, header, overrides, unknown_init)
        file = read_weight_file(source)
        state = to_own_names(file)
        check_finite(of_a_model(state), file.path, CHECKPOINT)
    model = build(spec, file.shown)
    return with_card(model, spec, load_into(model, state, file, unknown_init=unknown_init))


def other_network(
    name: str | None, file: WeightFile, overrides: Mapping[str, Any], *, outline: bool = False
) -> LoadedModel:
    """The Swin or ResNet of a file, under the type that the rooms above have for every model.

    It has what they use of all models (`families.OtherNetwork`); what reads a ViT's own parts asks
    for `family` before.
    """
    return cast(LoadedModel, load_other(name, file, overrides, outline=outline))


def check_values(name: str | None, checkpoint: str | Path | None) -> None:
    """Raise a UserError where a file of weights holds NaN or infinity; names and shapes are checked
    by an outline. Weights that are downloaded, drawn or come with this package are not read."""
    source = asked_for(name, checkpoint, {})[1]
    if source != RANDOM and not source.startswith((TIMM_PREFIX, PACKAGED_PREFIX)):
        file = read_weight_file(source)
        state = file.tensors if is_other(file) else of_a_model(to_own_names(file))
        check_finite(state, file.path, CHECKPOINT)


def outlined(
    named: ModelSpec,
    file: WeightFile,
    overrides: Mapping[str, Any],
    unknown_init: UnknownInit | None,
    made_up: Mapping[str, Any] | None = None,
) -> tuple[ModelSpec, LoadedModel]:
    """The complete spec of a file's model, and the network without values that the file fills.

    Raises a UserError for whatever `load_model` refuses, but for values that are no numbers.

    named    the spec of the model's name, with the user's fields in it
    made_up  facts for those that neither file nor user states
    """
    spec, state = read_off(named, file, overrides)
    spec = filled(spec, made_up or {})
    check_complete(spec, file.shown)
    check_same_model(named, shape_of(state, file.shown), file.shown)
    with torch.device("meta"):
        outline = build(spec, file.shown)
    shapes = {name: tensor.to("meta") for name, tensor in state.items()}
    load_into(outline, shapes, file, unknown_init=unknown_init)
    return spec, outline


def check_seed(seed: object) -> None:
    """Raise a UserError unless the seed of random weights is one that 63 bits hold."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
        raise UserError(f"seed: expected a whole number from 0 to 2**63 - 1, got {seed!r}.")


def asked_for(
    name: str | None, checkpoint: str | Path | None, overrides: Mapping[str, Any]
) -> tuple[ModelSpec, str]:
    """The spec of a name with the user's fields in it, and where its weights come from."""
    spec = overridden(spec_by_name(name) if name else ModelSpec("custom"), overrides)
    source = str(checkpoint) if checkpoint is not None else spec.checkpoint
    if source is None:
        raise UserError(
            f"Model {spec.name!r} needs a checkpoint. {spec.where or 'Give checkpoint=PATH.'} "
            "On the command line: --weights PATH. checkpoint='random' builds it untrained."
        )
    if source == RANDOM:  # no file says what the blocks compute: the plain ViT's
        spec = filled(spec, {"activation": Variant().activation})
    return spec, source


def declared_by_timm(spec: ModelSpec, source: str) -> ModelSpec:
    """The spec, its open fields taken from what timm declares for `timm:NAME`."""
    declared = timm_spec(source.removeprefix(TIMM_PREFIX))
    return filled(spec, vars(at_size(declared, spec.img_size)))


def read_off(
    spec: ModelSpec, file: WeightFile, overrides: Mapping[str, Any]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The spec with what a file says, and the file's tensors by this model's names.

    What the user gave wins over the file's metadata, and these over the JSON files beside it. The
    tensors' values are not read.
    """
    state, layout = to_own_names(file), layout_of(file.tensors)
    shape = shape_of(state, file.shown)
    spec = with_facts_beside(spec, file.path, layout, shape)
    spec = overridden(with_metadata(spec, file), overrides)
    return completed(spec, shape, layout), state


def _random_model(spec: ModelSpec, seed: int) -> LoadedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("random weights", spec.name, seed))
        check_complete(spec, spec.name)
        model = build(spec, spec.name)
    spec = replace(spec, trained_gamma=None)
    report = CheckpointReport(RANDOM, f"random-{seed}", "random", notes=("untrained weights",))
    return with_card(model, spec, report)
