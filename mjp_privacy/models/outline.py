"""Models without weights: what a name and the header of a file say, on torch's meta device.

An outline has every parameter of the model with its shape and without its values, so that whether
an attack applies can be asked before anything is loaded or downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.building import LoadedModel, build, check_complete, with_card
from mjp_privacy.models.checkpoint_files import (
    PACKAGED_PREFIX,
    TIMM_PREFIX,
    located,
    read_weight_file,
)
from mjp_privacy.models.checkpoint_tables import UnknownInit
from mjp_privacy.models.checkpoints import CheckpointReport
from mjp_privacy.models.family_files import is_other
from mjp_privacy.models.loading import (
    RANDOM,
    asked_for,
    check_seed,
    declared_by_timm,
    other_network,
    outlined,
    read_off,
)
from mjp_privacy.models.mismatch import check_same_model
from mjp_privacy.models.shape import shape_of
from mjp_privacy.models.spec import ModelSpec, check_choice, filled
from mjp_privacy.models.zoo import check_timm_name, spec_by_name

MADE_UP: Mapping[str, Any] = {
    "mean": (0.0,) * 3,
    "std": (1.0,) * 3,
    "num_heads": 1,
    "num_classes": 1000,
    "activation": "gelu",
}
"""Facts that no attack's applicability depends on, for models that do not state them."""


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
    check_choice("unknown_init", unknown_init, UnknownInit)
    check_seed(seed)
    made_up = {} if whole else MADE_UP
    named, source = asked_for(name, checkpoint, overrides)
    if source == RANDOM or source.startswith(TIMM_PREFIX):
        declared = named if source == RANDOM else declared_by_timm(named, source)
        spec = filled(declared, made_up)
        if source == RANDOM:
            spec = replace(spec, trained_gamma=None)
        check_complete(spec, source)
        with torch.device("meta"):
            model = build(spec, source)
    else:
        file = read_weight_file(source, shapes_only=True)
        if is_other(file):
            return other_network(name, file, overrides, outline=True)
        spec, model = outlined(named, file, overrides, unknown_init, made_up)
        source = file.shown
    report = CheckpointReport(source, "", "random", notes=("an outline without weights",))
    return with_card(model, spec, report)


def outline_spec(
    name: str | None = None, *, checkpoint: str | Path | None = None, **overrides: Any
) -> tuple[ModelSpec, str]:
    """All that is known of a model before its weights are read, and the source of the weights.

    What cannot be known stays None: the number of heads does not show in a file's tensors.
    """
    named, source = asked_for(name, checkpoint, overrides)
    if source == RANDOM:
        return named, source
    if source.startswith(TIMM_PREFIX):
        return declared_by_timm(named, source), source
    file = read_weight_file(source, shapes_only=True)
    if is_other(file):
        raise UserError(
            f"{file.shown} holds another network than a plain ViT: closed forms do not apply to "
            "it, and inverting_gradients does. Expected a plain ViT; give this file to "
            "`mjp evaluate`, or as a model of a config to `mjp attack`."
        )
    spec, state = read_off(named, file, overrides)
    check_same_model(named, shape_of(state, file.shown), file.shown)
    return spec, file.shown


def check_names(name: str | None, checkpoint: str | None) -> None:
    """Raise a UserError, with the nearest name, if a model or a shipped checkpoint is not known.

    check_names("deit_smal", None)  # Unknown model 'deit_smal'. Did you mean deit_small? ...
    """
    if name is not None:
        spec_by_name(name)
    if checkpoint is not None and checkpoint.startswith(TIMM_PREFIX):
        check_timm_name(checkpoint.removeprefix(TIMM_PREFIX))
    if checkpoint is not None and checkpoint.startswith(PACKAGED_PREFIX):
        located(checkpoint)
