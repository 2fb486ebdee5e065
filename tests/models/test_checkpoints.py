"""Weight files in every layout, what is refused, and what the report says."""

import hashlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel, load_model
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
    found = {"pos_embed.weight": table}
    for name, tensor in state.items():
        if name not in ("pos_embed", "unk_embed"):
            found[name.replace("dal_regressor.", "dlocr.")] = tensor
    return found


def prefixed(state: State, prefix: str) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def assert_loaded(model: LoadedModel, state: State) -> None:
    """Same parameters, to the bit, and nothing else."""
    found = model.state_dict()
    assert set(found) == set(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())


# settings objects as the authors' trainer pickles them --------------------------------------------


class CfgNode(dict[str, Any]):
    """yacs' settings object, as far as pickle sees it: a dict with attributes beside its items."""

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__({k: CfgNode(v) if isinstance(v, dict) else v for k, v in items.items()})
        self.__dict__["__immutable__"] = True
        self.__dict__["__deprecated_keys__"] = {"OLD.KEY", "OLDER.KEY"}
        self.__dict__["__renamed_keys__"] = {"A": ("B", "because")}
        self.__dict__["__new_allowed__"] = False


@pytest.fixture
def yacs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Lets CfgNode be pickled as yacs.config.CfgNode; call it to take yacs away again."""
    module = types.ModuleType("yacs.config")
    module.CfgNode = CfgNode  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(CfgNode, "__module__", "yacs.config")
        patch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
        patch.setitem(sys.modules, "yacs.config", module)
        yield patch.undo


def settings() -> CfgNode:
    return CfgNode(
        {
            "BASE": [""],
            "DATA": {"IMG_SIZE": 224, "PATHS": ("a", "b"), "ZIP": False},
            "MODEL": {"TYPE": "vit_s_16", "DROP_PATH_RATE": 0.1, "RESUME": None},
            "AUG": {"JIGSAW": 0.5, "REPEATED": {"ON": {1, 2}}},
        }
    )


# layouts ------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[State], Any]] = {
    "flat": lambda s: s,
    "ordered": OrderedDict,
    "parameters": lambda s: {name: nn.Parameter(tensor) for name, tensor in s.items()},
    "model": lambda s: {"model": s, "epoch": 3},
    "state_dict in model": lambda s: {"model": {"state_dict": s}},
    "module. in model": lambda s: {"model": prefixed(s, "module.")},
    "module.model.": lambda s: prefixed(s, "module.model."),
    "compiled": lambda s: {"model": prefixed(s, "_orig_mod.")},
}


SUFFIXES = (".pt", ".bin", ".pth.tar", ".PTH")
FILES = [*((layout, ".pth") for layout in LAYOUTS), *(("model", suffix) for suffix in SUFFIXES)]


@pytest.mark.parametrize(("layout", "suffix"), FILES)
def test_pytorch_files(tmp_path: Path, layout: str, suffix: str) -> None:
    state = state_of()
    path = saved(tmp_path, LAYOUTS[layout](state), f"weights{suffix}")
    model = load_model(checkpoint=path, **KNOWN)
    assert_loaded(model, state)
    report = model.card.checkpoint
    assert report.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (report.source, report.layout) == (path.name, "timm")
    assert report.missing == report.unexpected == report.notes == ()
    assert model.card.architecture == "vit d24 l2 h3 p8@32"
    assert model.card.num_classes == 5


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_and_the_old_format_become_float32(
    tmp_path: Path, dtype: torch.dtype, legacy: bool
) -> None:
    state = {name: tensor.to(dtype) for name, tensor in state_of().items()}
    path = tmp_path / "weights.pth"
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    assert_loaded(load_model(checkpoint=path, **KNOWN), {n: t.float() for n, t in state.items()})


@pytest.mark.parametrize("prefix", ["", "model.", "module."])
def test_safetensors(tmp_path: Path, prefix: str) -> None:
    state, path = state_of(), tmp_path / "weights.safetensors"
    save_file(prefixed(state, prefix), path)
    assert_loaded(load_model(checkpoint=str(path), **KNOWN), state)


@pytest.mark.parametrize("dal", ["none", "pca", "linear", "nonlinear"])
def test_the_official_layout_as_its_trainer_saves_it(
    tmp_path: Path, yacs: Callable[[], None], dal: str
) -> None:
    model = tiny(torch.float32, dal=dal, **FULL)
    content = {
        "model": official(model.state_dict()),
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "lr_scheduler": {"t_initial": 10, "base_values": [1e-3], "noise_range_t": None},
        "max_accuracy": 80.5,
        "epoch": 299,
        "config": settings(),
    }
    path = saved(tmp_path, content)
    yacs()
    assert "yacs" not in sys.modules
    found = load_model(checkpoint=path, dal="pca" if dal == "pca" else None, **KNOWN)
    assert_loaded(found, model.state_dict())
    assert (found.dal_kind, found.card.checkpoint.layout) == (dal, "official_mjp")
    report = found.card.checkpoint
    assert report.beside == ("config", "epoch", "lr_scheduler", "max_accuracy", "optimizer")
    assert report.missing == report.unexpected == report.notes == ()
    x, mask = some_images(2).float(), some_masks(2)
    assert torch.equal(found(x, mask), model(x, mask))
    assert dal == "none" or torch.equal(found.dal_loss(mask), model.dal_loss(mask))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_the_official_layout_flat(tmp_path: Path, suffix: str) -> None:
    state, path = state_of(dal="linear", **FULL), tmp_path / f"weights{suffix}"
    flat = prefixed(official(state), "model.")
    flat["io.logits"] = torch.zeros(2)
    torch.save(flat, path) if suffix == ".pth" else save_file(flat, path)
    model = load_model(checkpoint=path, **KNOWN)
    assert_loaded(model, state)
    assert model.card.checkpoint.beside == ("io.logits",)
    assert (model.dal_kind, model.index_embed is not None) == ("linear", True)


def test_a_named_model_takes_a_file_and_keeps_what_it_knows(tmp_path: Path) -> None:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    state = state_of(unknown_embedding=True, dal="nonlinear")
    path = saved(tmp_path, {"model": official(state)})
    model = load_model("deit_small_mjp", checkpoint=path, num_classes=5, **sizes)
    assert_loaded(model, state)
    assert (model.card.name, model.card.mean, model.card.std) == ("deit_small_mjp", MEAN, STD)
    model = load_model("deit_small_mjp_no_unk", checkpoint=path, num_classes=5, **sizes)
    assert model.unk_embed is None
    assert torch.equal(model(some_images(1).float(), some_masks(1)), model(some_images(1).float()))
    assert model.card.checkpoint.unexpected == ("unk_embed",)
    assert "unknown embedding is not used" in model.card.checkpoint.notes[0]


def test_an_mlp_of_any_width_is_read_off_the_file(tmp_path: Path) -> None:
    """int(dim * (width / dim)) may be width - 1, as for 152 and 405; the file's width counts."""
    assert int(152 * (405 / 152)) == 404
    model = VisionTransformer(**{**ARCHITECTURE, "embed_dim": 152, "num_heads": 2, "depth": 1})
    for width in (404, 405, 608):
        model.blocks[0].mlp.fc1 = nn.Linear(152, width)
        model.blocks[0].mlp.fc2 = nn.Linear(width, 152)
        path = saved(tmp_path, model.state_dict())
        assert_loaded(load_model(checkpoint=path, **{**KNOWN, "num_heads": 2}), model.state_dict())


# the report ---------------------------------------------------------------------------------------


def test_tensors_the_model_does_not_use_are_reported(tmp_path: Path) -> None:
    state = state_of(dal="linear", **FULL)
    state["teacher.weight"] = torch.zeros(3)
    path = saved(tmp_path, {**state, "step": 7})
    model = load_model(
        checkpoint=path, dal="none", unknown_embedding=False, index_embedding=False, **KNOWN
    )
    report = model.card.checkpoint
    assert report.beside == ("step",)
    assert report.unexpected == (
        "dal_regressor.layers.bias",
        "dal_regressor.layers.weight",
        "index_embed",
        "teacher.weight",
        "unk_embed",
    )


@pytest.mark.parametrize("reading", ["exposed", "strict"])
def test_position_embeddings_are_removed_and_the_report_says_so(
    tmp_path: Path, reading: str
) -> None:
    state = state_of(unknown_embedding=True, dal="linear")
    path = saved(tmp_path, official(state))
    model = load_model(checkpoint=path, position_embedding=reading, **KNOWN)
    report = model.card.checkpoint
    assert "position embeddings removed from weights that were trained with them" in report.notes[0]
    assert ("pos_embed" in report.unexpected) == (reading == "strict")
    assert {"unk_embed", "dal_regressor.layers.weight"} <= set(report.unexpected)
    assert (model.pos_embed is None) == (reading == "strict")
    assert reading == "strict" or not model.pos_embed.any()


@pytest.mark.parametrize("reading", ["exposed", "strict"])
def test_weights_trained_without_position_embeddings(tmp_path: Path, reading: str) -> None:
    state = state_of(position_embedding="strict")
    path = saved(tmp_path, state)
    with pytest.raises(UserError, match="img_size=…"):
        load_model(checkpoint=path, position_embedding=reading, **KNOWN)
    model = load_model(checkpoint=path, position_embedding=reading, img_size=32, **KNOWN)
    report = model.card.checkpoint
    zero = {"pos_embed": torch.zeros(1, 17, 24)} if reading == "exposed" else {}
    assert_loaded(model, {**state, **zero})
    assert report.missing == tuple(zero)
    assert report.notes == (("pos_embed is not in the checkpoint: fixed at zero",) if zero else ())
    exposed = state_of(position_embedding="exposed")  # the table was saved, at zero: no remark
    path = saved(tmp_path, exposed)
    model = load_model(checkpoint=path, position_embedding=reading, **KNOWN)
    assert model.card.checkpoint.notes == ()


# the unknown embedding ----------------------------------------------------------------------------


def test_a_missing_unknown_embedding_is_never_invented(tmp_path: Path) -> None:
    path = saved(tmp_path, state_of())
    with pytest.raises(UserError, match="unknown_init"):
        load_model(checkpoint=path, unknown_embedding=True, **KNOWN)
    with pytest.raises(UserError, match="zeros"):
        load_model(checkpoint=path, unknown_embedding=True, unknown_init="zero", **KNOWN)


@pytest.mark.parametrize("how", ["mean_position", "zeros", "random"])
def test_a_missing_unknown_embedding_is_filled_as_asked(tmp_path: Path, how: Any) -> None:
    state = state_of()
    path = saved(tmp_path, state)
    model = load_model(checkpoint=path, unknown_embedding=True, unknown_init=how, **KNOWN)
    expected = state["pos_embed"][:, 1:].mean(1, keepdim=True)
    expected = torch.zeros(1, 1, 24) if how == "zeros" else expected
    if how == "random":  # the same each time, and of N(0, 1)
        again = load_model(checkpoint=path, unknown_embedding=True, unknown_init=how, **KNOWN)
        expected = again.unk_embed.detach()
        assert 0.5 < float(expected.std()) < 1.5
    assert_loaded(model, {**state, "unk_embed": expected})
    report = model.card.checkpoint
    assert report.missing == ("unk_embed",)
    assert "unk_embed is not trained" in report.notes[0]


@pytest.mark.parametrize("how", ["mean_position", "zeros", "random"])
def test_a_trained_unknown_embedding_is_not_refilled(tmp_path: Path, how: Any) -> None:
    state = state_of(unknown_embedding=True)
    model = load_model(checkpoint=saved(tmp_path, official(state)), unknown_init=how, **KNOWN)
    assert_loaded(model, state)
    assert model.card.checkpoint.missing == model.card.checkpoint.notes == ()


# another image size -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [24, 48, 64])
def test_position_embeddings_are_resampled_as_timm_does(tmp_path: Path, size: int) -> None:
    state = state_of(**FULL)
    path = saved(tmp_path, {"model": official(state)})
    model = load_model(checkpoint=path, img_size=size, **KNOWN)
    grid = size // 8
    for name in ("pos_embed", "index_embed"):
        expected = resample_abs_pos_embed(state[name], [grid, grid], num_prefix_tokens=1)
        state[name] = expected
        assert torch.equal(expected[:, 0], model.get_parameter(name)[:, 0])
    assert_loaded(model, state)
    assert len(model.card.checkpoint.notes) == 2
    assert f"pos_embed resampled from 4×4 to {grid}×{grid}" in model.card.checkpoint.notes[0]
    assert model.card.img_size == size
    assert model(some_images(1, size).float()).shape == (1, 5)


# timm's downloads ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("vit_smol_patch16_224", "vit_small_patch16_224"),
        ("vit_small_patch16_225.augreg_in1k", "vit_small_patch16_224"),
        ("vit_small_patch16_224.augreg_in12k", "vit_small_patch16_224.augreg_in1k"),
    ],
)
def test_a_download_that_does_not_exist_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UserError, match=f"{near}[?]"):
        load_model(checkpoint=f"timm:{name}")


def test_a_failed_download_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, pretrained: bool) -> nn.Module:
        raise OSError("no route to host")

    monkeypatch.setattr(timm, "create_model", fails)
    with pytest.raises(UserError, match=r"vit_small_patch16_224.augreg.*OSError"):
        load_model("vit_small")


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("tag", ["", ".augreg_in21k_ft_in1k"])
def test_a_download_brings_its_own_normalisation(
    monkeypatch: pytest.MonkeyPatch, tag: str, named: bool
) -> None:
    asked: list[str] = []

    def downloads(name: str, pretrained: bool) -> nn.Module:
        assert pretrained
        asked.append(name)
        torch.manual_seed(0)
        sizes = {"embed_dim": 192, "depth": 1, "num_heads": 3, "num_classes": 1000}
        return VisionTransformer(img_size=384, patch_size=16, **sizes)

    monkeypatch.setattr(timm, "create_model", downloads)
    name = f"vit_tiny_patch16_384{tag}"
    plain = "vit_tiny_patch16_384" if named else None
    model = load_model(plain, checkpoint=f"timm:{name}", depth=1)
    assert asked == [name]
    card, half = model.card, (0.5, 0.5, 0.5)
    assert (card.mean, card.std, card.img_size, card.resize) == (half, half, 384, 384)
    assert card.architecture == "vit d192 l1 h3 p16@384"
    assert_loaded(model, downloads(name, True).state_dict())
    assert card.checkpoint.source == name
    again = load_model(plain, checkpoint=f"timm:{name}", depth=1).card.checkpoint
    assert again.sha256 == card.checkpoint.sha256
    assert len(again.sha256) == 64
