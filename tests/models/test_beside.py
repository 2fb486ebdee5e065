"""Files of other libraries: what no tensor shows is read from the JSON files beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from tests.helpers.libraries import (
    DIM,
    PATCH,
    SIDE,
    SOURCES,
    library,
    open_clip_model,
    open_clip_tower,
    randomised,
    timm_vit,
)

MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
PICTURES = {"image_mean": MEAN, "image_std": STD, "size": {"shortest_edge": 36}, "resample": 2}
VIT = {"hidden_size": DIM, "num_attention_heads": 4, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}
OPEN_CLIP = {
    "model_cfg": {"quick_gelu": True, "vision_cfg": {"width": DIM, "head_width": 24}},
    "preprocess_cfg": {"mean": MEAN, "std": STD, "interpolation": "bicubic"},
}
TIMM_PICTURES = {"mean": MEAN, "std": STD, "input_size": [3, SIDE, SIDE]}
TIMM_PICTURES |= {"crop_pct": 0.8, "interpolation": "bilinear"}
TIMM = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": TIMM_PICTURES}
GIVEN = {"num_heads": 4, "mean": 0.5, "std": 0.5}


def folder(place: Path, state: nn.Module | dict[str, Tensor], name: str, **beside: Any) -> Path:
    """A folder as libraries save one; `beside` by the JSON file's name without its suffix."""
    state = state.state_dict() if isinstance(state, nn.Module) else state
    state = {n: t.detach().clone().contiguous() for n, t in state.items()}
    save = save_file if name.endswith(".safetensors") else torch.save
    save(state, place / name)
    for file, content in beside.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (place / f"{file}.json").write_text(text, encoding="utf-8")
    return place


def assert_same(model: Any, run: Any) -> None:
    """The model's outputs are the library's, to 1e-5 of the largest number."""
    x = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found, expected = model(x), run(x)
        assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


OLD = {
    "vit.layers.": "vit.encoder.layer.",
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
"""Parts of parameters' names in transformers 4, as files on its hub have them."""


def test_transformers_vit_under_old_names(tmp_path: Path) -> None:
    module, state = randomised(SOURCES["ViT"].build()), {}
    for name, tensor in module.state_dict().items():
        for new, old in OLD.items():
            name = name.replace(new, old)
        state[name] = tensor
    beside = {"config": VIT, "preprocessor_config": PICTURES}
    model = load_model(checkpoint=folder(tmp_path, state, "pytorch_model.bin", **beside))
    assert_same(model, lambda x: module(x).logits)
    card = model.card
    assert card.checkpoint.layout == "hf_vit"
    assert (card.mean, card.std) == (tuple(MEAN), tuple(STD))
    assert (card.img_size, card.resize, card.interpolation) == (SIDE, 36, "bilinear")
    assert card.architecture == "vit d96 l2 h4 p4@32, eps 1e-12"


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "CLIP of transformers"])
def test_what_transformers_itself_saves(tmp_path: Path, kind: str) -> None:
    module: Any = randomised(SOURCES[kind].build())
    module.save_pretrained(tmp_path)
    processor = library("transformers").CLIPImageProcessor(image_mean=MEAN, image_std=STD)
    processor.save_pretrained(tmp_path)
    model = load_model(checkpoint=tmp_path)
    assert_same(model, lambda x: SOURCES[kind].run(module, x))
    assert model.card.mean == tuple(MEAN)


def test_open_clip_whose_activation_is_not_guessed(tmp_path: Path) -> None:
    module: Any = randomised(open_clip_model())
    name = "open_clip_model.safetensors"
    model = load_model(checkpoint=folder(tmp_path, module, name, open_clip_config=OPEN_CLIP))
    assert_same(model, module.encode_image)
    assert model.card.architecture.endswith("no head bias, eps 1e-05, quick_gelu")
    assert (model.card.mean, model.card.activation) == (tuple(MEAN), "quick_gelu")
    tower, silent = randomised(open_clip_tower()), tmp_path / "silent"
    silent.mkdir()
    folder(silent, tower, "open_clip_pytorch_model.bin")
    with pytest.raises(UserError, match="activation=…"):
        load_model(checkpoint=silent, **GIVEN)
    assert_same(load_model(checkpoint=silent, activation="gelu", **GIVEN), tower)
    with pytest.raises(UserError, match="gellu"):
        load_model(checkpoint=silent, activation="gellu", **GIVEN)


def test_timm(tmp_path: Path) -> None:
    module = randomised(timm_vit(embed_dim=192, depth=1, num_heads=3))
    place = folder(tmp_path, module, "model.safetensors", config=TIMM)
    model = load_model(checkpoint=place)
    assert_same(model, module)
    card = model.card
    assert (card.mean, card.resize, card.interpolation) == (tuple(MEAN), 40, "bilinear")
    assert (card.norm_eps, card.activation) == (None, None)
    own = {"mean": json.dumps(0.5), "std": json.dumps(0.25)}
    save_file(module.state_dict(), tmp_path / "model.safetensors", own)
    card = load_model(checkpoint=place, std=1.0).card  # user, then metadata, then JSON
    assert (card.mean, card.std, card.resize) == ((0.5,) * 3, (1.0,) * 3, 40)
    (place / "config.json").write_text('{"seed": 1, "mean": 7}')  # another program's: left alone
    assert load_model(checkpoint=place, num_heads=3, std=0.5).card.mean == (0.5,) * 3


def test_timms_json_states_both_sides_of_a_picture(tmp_path: Path) -> None:
    """A table of 4 × 9 patches, which is no 6 × 6."""
    height, width = 4 * PATCH, 9 * PATCH
    module = randomised(timm_vit(embed_dim=192, depth=1, num_heads=3, img_size=(height, width)))
    stated = TIMM["pretrained_cfg"] | {"input_size": [3, height, width]}
    place = folder(tmp_path, module, "model.safetensors", config=TIMM | {"pretrained_cfg": stated})
    model = load_model(checkpoint=place)
    assert (model.grid, model.card.img_size) == ((4, 9), (height, width))
    x = torch.randn(2, 3, height, width)
    torch.testing.assert_close(model(x), module(x), rtol=1e-4, atol=1e-5)


WRONG: list[tuple[str, Any, str]] = [
    ("config", "{", "config.json"),
    ("config", [], "config.json"),
    ("config", {**VIT, "hidden_act": "silu"}, "hidden_act.*'silu'"),
    ("config", {**VIT, "hidden_size": 768}, "width 96.*width 768"),
    ("config", {"num_attention_heads": "4"}, "num_attention_heads.*'4'"),
    ("config", {"hidden_size": 10**9}, "hidden_size.*16384"),
    ("config", {"layer_norm_eps": -1e-6}, "layer_norm_eps.*-1e-06"),
    ("config", {"vision_config": 3}, "num_heads"),
    ("preprocessor_config", {"image_mean": "x"}, "preprocessor_config.json.*image_mean.*'x'"),
    ("preprocessor_config", {"resample": "bicubic"}, "resample.*'bicubic'"),
    ("preprocessor_config", {"size": {"height": True}}, "size.*True"),
    ("preprocessor_config", {}, "mean, std"),
]


@pytest.mark.parametrize(("file", "content", "named"), WRONG)
def test_json_that_is_wrong_or_of_another_model(
    tmp_path: Path, file: str, content: Any, named: str
) -> None:
    beside: dict[str, Any] = {"config": VIT, "preprocessor_config": {**PICTURES, "size": 36}}
    module = SOURCES["ViT"].build()
    place = folder(tmp_path, module, "pytorch_model.bin", **{**beside, file: content})
    with pytest.raises(UserError, match=f"(?s){named}"):
        load_model(checkpoint=place)
