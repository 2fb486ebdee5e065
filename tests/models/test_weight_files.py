"""Files of weights in every layout: what is read, and what the report says of it; of other
libraries' files what no tensor shows, read from the JSON files beside them."""

import hashlib
import json
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.tensor_files import save_tensors
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
from tests.helpers.models import (
    ARCHITECTURE,
    KNOWN,
    MEAN,
    STD,
    State,
    saved,
    some_images,
    some_masks,
    state_of,
    tiny,
)

FULL = {"unknown_embedding": True, "index_embedding": True}


def official(state: State) -> State:
    """The authors' names: one table of N+2 rows, the regressor under `dlocr`."""
    table = torch.cat((state["pos_embed"], state["unk_embed"]), dim=1)[0]
    others = {name: t for name, t in state.items() if name not in ("pos_embed", "unk_embed")}
    renamed = {name.replace("dal_regressor.", "dlocr."): t for name, t in others.items()}
    return {"pos_embed.weight": table, **renamed}


def prefixed(state: State, prefix: str) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def assert_loaded(model: LoadedModel, state: State) -> None:
    """Same parameters, to the bit, and nothing else."""
    found = model.state_dict()
    assert set(found) == set(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())


# formats and layouts ------------------------------------------------------------------------------

FORMS: dict[str, Callable[[State], Any]] = {
    "ordered": OrderedDict,
    "parameters": lambda s: {name: nn.Parameter(tensor) for name, tensor in s.items()},
    "model": lambda s: {"model": s, "epoch": 3},
    "state_dict in model": lambda s: {"model": {"state_dict": s}},
    "module.model.": lambda s: prefixed(s, "module.model."),
    "compiled": lambda s: {"model": prefixed(s, "_orig_mod.")},
}
SUFFIXES = (".pth", ".pt", ".bin", ".pth.tar", ".PTH", ".pth")


@pytest.mark.parametrize(("form", "suffix"), zip(FORMS, SUFFIXES, strict=True))
def test_pytorch_files(tmp_path: Path, form: str, suffix: str) -> None:
    state = state_of()
    path = saved(tmp_path, FORMS[form](state), f"weights{suffix}")
    model = load_model(checkpoint=path, **KNOWN)
    assert_loaded(model, state)
    report = model.card.checkpoint
    assert report.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (report.source, report.layout) == (path.name, "timm")
    assert report.missing == report.unexpected == report.notes == ()
    assert (model.card.architecture, model.card.num_classes) == ("vit d24 l2 h3 p8@32", 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_precision_becomes_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype) for name, tensor in state_of().items()}
    more = {"steps": torch.tensor(3)}  # of another part: of any kind, and not noted
    path = tmp_path / "weights.safetensors"
    save_file(prefixed({**state, **more}, "module."), path)
    if dtype == torch.float16:
        path = saved(tmp_path, {**state, **more})
    model = load_model(checkpoint=str(path), **KNOWN)
    assert_loaded(model, {name: tensor.float() for name, tensor in state.items()})
    report = model.card.checkpoint
    assert f"torch.{report.stored_as}" == str(dtype)
    assert report.unexpected == ("steps",)
    assert report.notes == ()  # a note would give a run's rows another name


class CfgNode(dict[str, Any]):
    """yacs' settings object, as far as pickle sees it: a dict with attributes beside its items."""

    __module__ = "yacs.config"

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__({k: CfgNode(v) if isinstance(v, dict) else v for k, v in items.items()})
        self.__dict__["__immutable__"] = True
        self.__dict__["__deprecated_keys__"] = {"OLD.KEY", "OLDER.KEY"}
        self.__dict__["__renamed_keys__"] = {"A": ("B", "because")}


@pytest.mark.parametrize("dal", ["none", "pca", "linear", "nonlinear"])
def test_the_official_layout_as_its_trainer_saves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dal: str
) -> None:
    model = tiny(torch.float32, dal=dal, **FULL)
    content = {
        "model": official(model.state_dict()),
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "lr_scheduler": {"t_initial": 10, "base_values": [1e-3], "noise_range_t": None},
        "max_accuracy": 80.5,
        "config": CfgNode({"DATA": {"PATHS": ("a", "b"), "ZIP": False}, "AUG": {"ON": {1, 2}}}),
    }
    with monkeypatch.context() as patch:  # where it is read there is no yacs
        patch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
        patch.setitem(sys.modules, "yacs.config", types.SimpleNamespace(CfgNode=CfgNode))
        path = saved(tmp_path, content)
    found = load_model(checkpoint=path, dal="pca" if dal == "pca" else None, **KNOWN)
    assert_loaded(found, model.state_dict())
    report = found.card.checkpoint
    assert (found.dal_kind, report.layout) == (dal, "official_mjp")
    assert report.beside == ("config", "lr_scheduler", "max_accuracy", "optimizer")
    assert report.missing == report.unexpected == report.notes == ()
    x, mask = some_images(2).float(), some_masks(2)
    assert torch.equal(found(x, mask), model(x, mask))
    assert dal == "none" or torch.equal(found.dal_loss(mask), model.dal_loss(mask))


def test_a_named_model_takes_a_file_and_keeps_what_it_knows(tmp_path: Path) -> None:
    state = state_of(unknown_embedding=True, dal="nonlinear")
    path = saved(tmp_path, {"model": official(state)})
    model = load_model("deit_small_mjp", checkpoint=path, **ARCHITECTURE)
    assert_loaded(model, state)
    assert (model.card.name, model.card.mean, model.card.std) == ("deit_small_mjp", MEAN, STD)
    model = load_model("deit_small_mjp_no_unk", checkpoint=path, **ARCHITECTURE)
    assert model.unk_embed is None
    assert model.card.checkpoint.unexpected == ("unk_embed",)
    assert len(model.card.checkpoint.notes) == 1


def test_an_mlp_of_any_width_is_read_off_the_file(tmp_path: Path) -> None:
    """int(dim * (width / dim)) may be width - 1, as for 152 and 405; the file's width counts."""
    assert int(152 * (405 / 152)) == 404
    model = VisionTransformer(**{**ARCHITECTURE, "embed_dim": 152, "num_heads": 2, "depth": 1})
    model.blocks[0].mlp.fc1, model.blocks[0].mlp.fc2 = nn.Linear(152, 405), nn.Linear(405, 152)
    path = saved(tmp_path, model.state_dict())
    assert_loaded(load_model(checkpoint=path, **{**KNOWN, "num_heads": 2}), model.state_dict())


def test_facts_in_the_files_metadata_are_used(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    facts = {"mean": MEAN, "std": 0.5, "num_heads": 3, "img_size": 48, "trained_gamma": 0.03}
    strange = {"format": "pt", "recipe": "mine", "depth": "x", "": "{", "author": "\x1b[2J"}
    save_file(state_of(), path, strange | {key: json.dumps(v) for key, v in facts.items()})
    card = load_model(checkpoint=path, mean=0.25).card  # the user's word goes first
    assert (card.mean, card.std, card.img_size) == ((0.25,) * 3, (0.5,) * 3, 48)
    assert (card.trained_gamma, card.architecture) == (0.03, "vit d24 l2 h3 p8@48")
    assert card.checkpoint.source == "model.safetensors"  # a folder is no part of a run_id


# the report ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", ["exposed", "strict"])
def test_weights_with_and_without_position_embeddings(tmp_path: Path, reading: str) -> None:
    state = {**state_of(dal="linear", **FULL), "teacher.weight": torch.zeros(3)}
    trained = saved(tmp_path, {**official(state), "step": 7})
    given = {"position_embedding": reading, **KNOWN}
    model = load_model(checkpoint=trained, index_embedding=False, **given)
    report, strict = model.card.checkpoint, reading == "strict"
    assert len(report.notes) == 2  # removed from weights that were trained with them; E_unk too
    assert ("pos_embed" in report.unexpected) == (model.pos_embed is None) == strict
    regressor = ("dal_regressor.layers.bias", "dal_regressor.layers.weight")
    unused = {*regressor, "index_embed", "teacher.weight", "unk_embed"}
    assert (set(report.unexpected) - {"pos_embed"}, report.beside) == (unused, ("step",))
    assert strict or not model.pos_embed.any()
    state = state_of(position_embedding="strict")
    path = saved(tmp_path, state)
    with pytest.raises(UserError, match="img_size=…"):
        load_model(checkpoint=path, **given)
    model = load_model(checkpoint=path, img_size=32, **given)
    zero = {} if strict else {"pos_embed": torch.zeros(1, 17, 24)}
    assert_loaded(model, {**state, **zero})
    report = model.card.checkpoint
    assert (report.missing, len(report.notes)) == (tuple(zero), len(zero))
    path = saved(tmp_path, state_of(position_embedding="exposed"))  # saved at zero: no remark
    assert load_model(checkpoint=path, **given).card.checkpoint.notes == ()


@pytest.mark.parametrize("how", ["mean_position", "zeros", "random"])
def test_a_missing_unknown_embedding_is_filled_as_asked_alone(tmp_path: Path, how: Any) -> None:
    state = state_of()
    given = {"checkpoint": saved(tmp_path, state), "unknown_embedding": True, **KNOWN}
    with pytest.raises(UserError, match="unknown_init"):
        load_model(**given)
    model = load_model(unknown_init=how, **given)
    expected = state["pos_embed"][:, 1:].mean(1, keepdim=True)
    if how == "zeros":
        expected = torch.zeros(1, 1, 24)
    elif how == "random":  # the same each time, and of N(0, 1)
        expected = load_model(unknown_init=how, **given).unk_embed.detach()
        assert 0.5 < float(expected.std()) < 1.5
    assert_loaded(model, {**state, "unk_embed": expected})
    report = model.card.checkpoint
    assert (report.missing, len(report.notes)) == (("unk_embed",), 1)
    trained = state_of(unknown_embedding=True)
    model = load_model(checkpoint=saved(tmp_path, official(trained)), unknown_init=how, **KNOWN)
    assert_loaded(model, trained)


def test_position_embeddings_are_resampled_as_timm_does(tmp_path: Path) -> None:
    state, size, grid = state_of(**FULL), 64, 8
    path = saved(tmp_path, {"model": official(state)})
    model = load_model(checkpoint=path, img_size=size, **KNOWN)
    for name in ("pos_embed", "index_embed"):
        state[name] = resample_abs_pos_embed(state[name], [grid, grid], num_prefix_tokens=1)
    assert_loaded(model, state)
    assert len(model.card.checkpoint.notes) == 2
    assert f"{grid}×{grid}" in model.card.checkpoint.notes[0]
    assert model.card.img_size == size
    assert model(some_images(1, size).float()).shape == (1, 5)


def test_what_this_package_sealed_is_known_when_a_bit_changed(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_tensors(path, state_of(), {}, digest=True)
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"weights.safetensors: .*changed"):
        load_model(checkpoint=path, **KNOWN)


# timm's downloads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["", ".augreg_in21k_ft_in1k"])
def test_a_download_brings_its_own_normalisation(monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    asked: list[str] = []

    def downloads(name: str, pretrained: bool) -> nn.Module:
        if "small" in name:
            raise OSError("no route to host")
        asked.append(name)
        torch.manual_seed(0)
        sizes = {"embed_dim": 192, "depth": 1, "num_heads": 3, "num_classes": 1000}
        return VisionTransformer(img_size=384, patch_size=16, **sizes)

    monkeypatch.setattr(timm, "create_model", downloads)
    name, half = f"vit_tiny_patch16_384{tag}", (0.5, 0.5, 0.5)
    given = {"checkpoint": f"timm:{name}", "depth": 1}
    model = load_model("vit_tiny_patch16_384" if tag else None, **given)
    assert asked == [name]
    card = model.card
    assert (card.mean, card.std, card.img_size, card.resize) == (half, half, 384, 384)
    assert card.architecture == "vit d192 l1 h3 p16@384"
    assert_loaded(model, downloads(name, True).state_dict())
    assert (card.checkpoint.source, len(card.checkpoint.sha256)) == (name, 64)
    with pytest.raises(UserError, match=r"vit_small_patch16_224.augreg.*OSError"):
        load_model("vit_small")


# JSON files beside --------------------------------------------------------------------------------


JSON_MEAN, JSON_STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
PROCESSOR = {
    "image_mean": JSON_MEAN,
    "image_std": JSON_STD,
    "size": {"shortest_edge": 36},
    "resample": 2,
}
VIT = {"hidden_size": DIM, "num_attention_heads": 4, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}
OPEN_CLIP = {
    "model_cfg": {
        "quick_gelu": True,
        "vision_cfg": {"image_size": SIDE, "width": DIM, "head_width": 24},
    },
    "preprocess_cfg": {"mean": JSON_MEAN, "std": JSON_STD, "interpolation": "bicubic"},
}
GIVEN = {"num_heads": 4, "mean": 0.5, "std": 0.5}


def folder(place: Path, state: nn.Module | dict[str, Tensor], name: str, **beside: Any) -> Path:
    """A folder as libraries save one; `beside` by the JSON file's name without its suffix."""
    state = state.state_dict() if isinstance(state, nn.Module) else state
    state = {n: t.detach().clone().contiguous() for n, t in state.items()}
    place.mkdir(exist_ok=True)
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


def old_names(module: nn.Module) -> dict[str, Tensor]:
    """A ViT's tensors as transformers 4 and files on its hub name them."""
    old = {"vit.layers.": "vit.encoder.layer.", "attention.o_proj": "attention.output.dense"}
    old |= {f"attention.{p[0]}_proj": f"attention.attention.{p}" for p in ("query", "key", "value")}
    old |= {"mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}
    state = {}
    for name, tensor in module.state_dict().items():
        for new, before in old.items():
            name = name.replace(new, before)
        state[name] = tensor
    return state


def test_transformers_folders(tmp_path: Path) -> None:
    """As it saves them itself, and under its old names."""
    processor = library("transformers").CLIPImageProcessor(image_mean=JSON_MEAN, image_std=JSON_STD)
    for kind in ("ViT", "DeiT", "CLIP of transformers"):
        module: Any = randomised(SOURCES[kind].build())
        module.save_pretrained(tmp_path / kind)
        processor.save_pretrained(tmp_path / kind)
        model = load_model(checkpoint=tmp_path / kind)
        assert_same(model, lambda x, kind=kind, module=module: SOURCES[kind].run(module, x))
        assert model.card.mean == tuple(JSON_MEAN)
    module, beside = randomised(SOURCES["ViT"].build()), {"preprocessor_config": PROCESSOR}
    place = folder(tmp_path, old_names(module), "pytorch_model.bin", config=VIT, **beside)
    model = load_model(checkpoint=place)
    assert_same(model, lambda x: module(x).logits)
    card = model.card
    assert (card.checkpoint.layout, card.std) == ("hf_vit", tuple(JSON_STD))
    assert (card.img_size, card.resize, card.interpolation) == (SIDE, 36, "bilinear")
    assert card.architecture == "vit d96 l2 h4 p4@32, eps 1e-12"


def test_open_clip_whose_activation_is_not_guessed(tmp_path: Path) -> None:
    module: Any = randomised(open_clip_model())
    name = "open_clip_model.safetensors"
    model = load_model(checkpoint=folder(tmp_path, module, name, open_clip_config=OPEN_CLIP))
    assert_same(model, module.encode_image)
    assert model.card.architecture.endswith("no head bias, eps 1e-05, quick_gelu")
    assert (model.card.mean, model.card.activation) == (tuple(JSON_MEAN), "quick_gelu")
    assert model.card.resize == SIDE  # open_clip's crop has the whole short side
    tower = randomised(open_clip_tower())
    silent = folder(tmp_path / "silent", tower, "open_clip_pytorch_model.bin")
    assert_same(load_model(checkpoint=silent, activation="gelu", **GIVEN), tower)
    for given, said in (({}, "activation=…"), ({"activation": "gellu"}, "gellu")):
        with pytest.raises(UserError, match=said):
            load_model(checkpoint=silent, **given, **GIVEN)


def test_timms_folder_whose_pictures_are_no_squares(tmp_path: Path) -> None:
    """A table of 4 × 9 patches, which is no 6 × 6."""
    height, width = 4 * PATCH, 9 * PATCH
    module = randomised(timm_vit(embed_dim=192, depth=1, num_heads=3, img_size=(height, width)))
    pictures = {"mean": JSON_MEAN, "std": JSON_STD, "crop_pct": 0.8, "interpolation": "bilinear"}
    pictures |= {"input_size": [3, height, width]}
    stated = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": pictures}
    place = folder(tmp_path, module, "model.safetensors", config=stated)
    model, x = load_model(checkpoint=place), torch.randn(2, 3, height, width)
    torch.testing.assert_close(model(x), module(x), rtol=1e-4, atol=1e-5)
    card = model.card
    assert (model.grid, card.img_size) == ((4, 9), (height, width))
    assert (card.mean, card.resize, card.interpolation) == (tuple(JSON_MEAN), 20, "bilinear")
    own = {"mean": json.dumps(0.5), "std": json.dumps(0.25)}
    save_file(module.state_dict(), tmp_path / "model.safetensors", own)
    card = load_model(checkpoint=place, std=1.0).card  # user, then metadata, then JSON
    assert (card.mean, card.std, card.resize) == ((0.5,) * 3, (1.0,) * 3, 20)
    (place / "config.json").write_text('{"seed": 1, "mean": 7}')  # another program's: left alone
    given = {"num_heads": 3, "img_size": (height, width)}
    assert load_model(checkpoint=place, **given).card.mean == (0.5,) * 3


@pytest.mark.parametrize(
    "changed", [{"pool_type": "avg"}, {"no_ln_pre": True}, {"act_kwargs": {"approximate": "tanh"}}]
)
def test_open_clips_that_compute_otherwise_are_refused(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    stated = {**OPEN_CLIP, "model_cfg": {"vision_cfg": {"width": DIM, "head_width": 24, **changed}}}
    name = "open_clip_model.safetensors"
    place = folder(tmp_path, open_clip_model(), name, open_clip_config=stated)
    with pytest.raises(UserError, match=next(iter(changed))):
        load_model(checkpoint=place)


@pytest.mark.parametrize(
    "changed", [{"global_pool": "avg"}, {"act_layer": "relu"}, {"pre_norm": True}]
)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_dinov2"])
def test_timms_folders_of_changed_networks_are_refused(
    name: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    stated = {"architecture": name, "model_args": {"img_size": 56, "num_classes": 3, **changed}}
    network = timm_vit(embed_dim=192, depth=1, num_heads=3)
    place = folder(tmp_path, network, "model.safetensors", config=stated)
    with pytest.raises(UserError, match=next(iter(changed))):
        load_model(checkpoint=place, mean=0.5, std=0.5)


def test_pixels_are_fed_as_the_processor_says(tmp_path: Path) -> None:
    """Without normalisation where it says so; at another size the crop stays alike."""
    said = {**PROCESSOR, "size": 36, "do_normalize": False}
    beside = {"config": VIT, "preprocessor_config": said}
    place = folder(tmp_path, SOURCES["ViT"].build(), "pytorch_model.bin", **beside)
    card = load_model(checkpoint=place).card
    assert (card.mean, card.std, card.resize) == ((0.0,) * 3, (1.0,) * 3, 36)
    assert load_model(checkpoint=place, img_size=2 * SIDE).card.resize == 72
    (place / "preprocessor_config.json").write_text(json.dumps({**said, "rescale_factor": 1.0}))
    with pytest.raises(UserError, match="rescale_factor"):
        load_model(checkpoint=place)


WRONG_JSON: list[tuple[str, Any, str]] = [
    ("config", "{", "config.json"),
    ("config", [], "config.json"),
    ("config", {**VIT, "hidden_act": "silu"}, "hidden_act.*'silu'"),
    ("config", {**VIT, "hidden_size": 768}, "width 96.*width 768"),
    ("config", {"num_attention_heads": "4"}, "num_attention_heads.*'4'"),
    ("config", {"hidden_size": 10**9}, "hidden_size.*16384"),
    ("config", {"vision_config": 3}, "num_heads"),
    ("preprocessor_config", {"image_mean": "x"}, "preprocessor_config.json.*image_mean.*'x'"),
    ("preprocessor_config", {"size": {"height": True}}, "size.*True"),
    ("preprocessor_config", {**PROCESSOR, "resample": 1}, "resample"),
    ("preprocessor_config", {}, "mean=…, std=…"),
]


@pytest.mark.parametrize(("file", "content", "named"), WRONG_JSON)
def test_json_that_is_wrong_or_of_another_model(
    tmp_path: Path, file: str, content: Any, named: str
) -> None:
    beside: dict[str, Any] = {"config": VIT, "preprocessor_config": {**PROCESSOR, "size": 36}}
    module = SOURCES["ViT"].build()
    place = folder(tmp_path, module, "pytorch_model.bin", **{**beside, file: content})
    with pytest.raises(UserError, match=f"(?s){named}"):
        load_model(checkpoint=place)
