"""Outlines: what is known of a model before its weights are read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.loading import check_names, outline_model, outline_spec
from mjp_privacy.models.zoo import NAMED_MODELS
from tests.helpers.models import KNOWN, MEAN, SMALL, STD, saved, state_of


def shapes(model: LoadedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def facts(model: LoadedModel) -> dict[str, Any]:
    card = {name: v for name, v in vars(model.card).items() if name != "checkpoint"}
    return card | {"dal": model.dal_kind, "positions": model.position_embedding}


def same(outline: LoadedModel, model: LoadedModel) -> None:
    assert shapes(outline) == shapes(model)
    assert facts(outline) == facts(model)
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}
    assert not outline.training


@pytest.mark.parametrize("name", [name for name in NAMED_MODELS if name.startswith("cifar")])
def test_an_outline_has_all_but_the_weights_of_a_packaged_model(name: str) -> None:
    same(outline_model(name, whole=True), load_model(name))


@pytest.mark.parametrize("kind", ["plain", "mjp", "official", "overridden", "random"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_an_outline_has_all_but_the_weights_of_a_file(
    tmp_path: Path, kind: str, suffix: str
) -> None:
    changes = {"unknown_embedding": True, "dal": "linear"} if kind in ("mjp", "official") else {}
    state = state_of(**changes)
    if kind == "official":
        table = torch.cat((state.pop("pos_embed")[0], state.pop("unk_embed")[0]))
        state = {n.replace("dal_regressor.", "dlocr."): t for n, t in state.items()}
        state["pos_embed.weight"] = table
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        saved(tmp_path, {"model": state, "epoch": 3})
    else:
        save_file(state, path)
    given = {**KNOWN, "checkpoint": path}
    if kind == "overridden":
        given |= {"img_size": 48, "position_embedding": "exposed"}
    if kind == "random":
        given = {**SMALL, "checkpoint": "random", "unknown_embedding": True, "trained_gamma": 0.5}
    same(outline_model(**given, whole=True), load_model(**given))


def test_metadata_are_read_and_pixels_or_heads_may_be_unknown(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    said = {"mean": MEAN, "std": STD, "num_heads": 3, "trained_gamma": 0.25}
    save_file(state_of(), path, {key: json.dumps(value) for key, value in said.items()})
    card = outline_model(checkpoint=path, whole=True).card
    assert (card.mean, card.std, card.trained_gamma) == (MEAN, STD, 0.25)
    save_file(state_of(), path)
    assert outline_spec(checkpoint=path)[0].num_heads is None
    assert outline_model(checkpoint=path).embed_dim == 24
    with pytest.raises(UserError, match=r"num_heads, mean, std .*--num-heads, --mean, --std"):
        outline_model(checkpoint=path, whole=True)


def test_large_and_downloadable_models_need_neither_weights_nor_a_network() -> None:
    started = time.process_time()
    large = outline_model("vit_large_patch16_224", checkpoint="random")
    assert (large.embed_dim, len(large.blocks)) == (1024, 24)
    assert outline_model("vit_base_patch32_224.augreg_in21k_ft_in1k", whole=True).patch_size == 32
    assert time.process_time() - started < 2


def test_known_names_and_files_pass() -> None:
    check_names("vit_tiny_patch16_224", "nowhere.pth")
    check_names(None, "packaged:cifar_vit")
