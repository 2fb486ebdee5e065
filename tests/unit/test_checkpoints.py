"""Weight files in every layout, what is refused, and what the report says."""

import argparse
import hashlib
import json
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from model_fixtures import ARCHITECTURE, MEAN, STD, some_images, some_masks, tiny
from safetensors.torch import save_file
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mjp_privacy.errors import UserError
from mjp_privacy.models import Victim, load_model

State = dict[str, Tensor]
KNOWN: dict[str, Any] = {"num_heads": 3, "mean": MEAN, "std": STD}
FULL = {"unknown_embedding": True, "index_embedding": True}


def state_of(**changes: Any) -> State:
    return {
        name: p.detach().clone() for name, p in tiny(torch.float32, **changes).state_dict().items()
    }


def official(state: State) -> State:
    """The authors' names: one table of N+2 rows, the regressor under `dlocr`."""
    table = torch.cat((state["pos_embed"], state["unk_embed"]), dim=1)[0]
    found = {"pos_embed.weight": table}
    for name, tensor in state.items():
        if name not in ("pos_embed", "unk_embed"):
            found[name.replace("dal_regressor.", "dlocr.")] = tensor
    return found


def saved(tmp_path: Path, content: Any, name: str = "weights.pth") -> Path:
    path = tmp_path / name
    torch.save(content, path)
    return path


def prefixed(state: State, prefix: str) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def assert_loaded(model: Victim, state: State) -> None:
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
    "state_dict": lambda s: {"state_dict": s, "arch": "vit"},
    "model in state_dict": lambda s: {"state_dict": {"model": s}},
    "state_dict in model": lambda s: {"model": {"state_dict": s}},
    "module.": lambda s: prefixed(s, "module."),
    "model.": lambda s: prefixed(s, "model."),
    "module. in model": lambda s: {"model": prefixed(s, "module.")},
    "module.model.": lambda s: prefixed(s, "module.model."),
    "compiled": lambda s: {"model": prefixed(s, "_orig_mod.")},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".pth.tar", ".PTH"])
def test_pytorch_files(tmp_path: Path, layout: str, suffix: str) -> None:
    if suffix != ".pth" and layout != "model":
        pytest.skip("one layout is enough for each suffix")
    state = state_of()
    path = saved(tmp_path, LAYOUTS[layout](state), f"weights{suffix}")
    model = load_model(checkpoint=path, **KNOWN)
    assert_loaded(model, state)
    report = model.card.checkpoint
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


def test_deits_settings_beside_the_weights(tmp_path: Path) -> None:
    state = state_of()
    arguments = argparse.Namespace(lr=5e-4, model="deit", output_dir="", opt_betas=None)
    path = saved(tmp_path, {"model": state, "args": arguments, "model_ema": state, "epoch": 1})
    model = load_model(checkpoint=path, **KNOWN)
    assert_loaded(model, state)
    assert model.card.checkpoint.beside == ("args", "epoch", "model_ema")


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


def test_the_sha256_is_the_files(tmp_path: Path) -> None:
    path = saved(tmp_path, state_of())
    report = load_model(checkpoint=path, **KNOWN).card.checkpoint
    assert report.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


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
    with pytest.raises(UserError, match=r"img_size cannot be read.*img_size=…"):
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
    with pytest.raises(UserError, match=r"no unknown embedding \(unk_embed.*unknown_init: mean_po"):
        load_model(checkpoint=path, unknown_embedding=True, **KNOWN)
    with pytest.raises(UserError, match=r"Unknown unknown_init 'zero'\. Did you mean zeros\?"):
        load_model(checkpoint=path, unknown_embedding=True, unknown_init="zero", **KNOWN)


@pytest.mark.parametrize("how", ["mean_position", "zeros"])
def test_a_missing_unknown_embedding_is_filled_as_asked(tmp_path: Path, how: Any) -> None:
    state = state_of()
    path = saved(tmp_path, state)
    model = load_model(checkpoint=path, unknown_embedding=True, unknown_init=how, **KNOWN)
    expected = state["pos_embed"][:, 1:].mean(1, keepdim=True)
    expected = torch.zeros(1, 1, 24) if how == "zeros" else expected
    assert_loaded(model, {**state, "unk_embed": expected})
    report = model.card.checkpoint
    assert report.missing == ("unk_embed",)
    assert "unk_embed is not trained: set to" in report.notes[0]


def test_a_trained_unknown_embedding_is_not_refilled(tmp_path: Path) -> None:
    state = state_of(unknown_embedding=True)
    path = saved(tmp_path, official(state))
    model = load_model(checkpoint=path, unknown_init="zeros", **KNOWN)
    assert_loaded(model, state)
    assert model.card.checkpoint.missing == model.card.checkpoint.notes == ()


def test_an_unknown_embedding_cannot_be_filled_without_a_table(tmp_path: Path) -> None:
    path = saved(tmp_path, state_of(position_embedding="strict"))
    with pytest.raises(UserError, match=r"lacks 2 of .* tensors: pos_embed, unk_embed"):
        load_model(
            checkpoint=path, img_size=32, unknown_embedding=True, unknown_init="zeros", **KNOWN
        )


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
    assert model(some_images(1, size).float(), some_masks(1)[0] if size == 32 else None).shape


def test_a_table_of_no_square_grid_is_refused(tmp_path: Path) -> None:
    state = state_of()
    state["pos_embed"] = torch.zeros(1, 16, 24)
    path = saved(tmp_path, state)
    with pytest.raises(UserError, match=r"pos_embed has 16 rows: expected one class row and a sq"):
        load_model(checkpoint=path, img_size=32, **KNOWN)


# never guessed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["mean", "std", "num_heads"])
def test_what_a_file_does_not_say_must_be_given(tmp_path: Path, missing: str) -> None:
    path = saved(tmp_path, state_of())
    known = {key: value for key, value in KNOWN.items() if key != missing}
    with pytest.raises(UserError, match=rf"weights.pth: {missing} cannot be read.*{missing}=…"):
        load_model(checkpoint=path, **known)


def test_the_normalisation_of_an_architecture_is_not_guessed(tmp_path: Path) -> None:
    path = saved(tmp_path, state_of())
    with pytest.raises(UserError, match=r"mean, std cannot be read off .* never guessed"):
        load_model("vit_tiny_patch8_32", checkpoint=path)


def test_facts_in_the_files_metadata_are_used(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    facts = {"mean": MEAN, "std": 0.5, "num_heads": 3, "img_size": 48, "trained_gamma": 0.03}
    save_file(state_of(), path, {key: json.dumps(value) for key, value in facts.items()})
    card = load_model(checkpoint=path).card
    assert (card.mean, card.std) == (MEAN, (0.5, 0.5, 0.5))
    assert (card.img_size, card.trained_gamma) == (48, 0.03)
    assert card.architecture == "vit d24 l2 h3 p8@48"
    card = load_model(checkpoint=path, mean=0.25, img_size=32).card  # the user's word goes first
    assert (card.mean, card.std, card.img_size) == ((0.25,) * 3, (0.5,) * 3, 32)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"mean": "a half"}, r"metadata 'mean' is no JSON value: 'a half'"),
        ({"mean": '"0.5"'}, r"mean: expected one number or three.*got '0.5'"),
        ({"mean": "0.5", "std": "[0, 1, 1]"}, r"std: expected one positive number.*\[0, 1, 1\]"),
        ({"mean": "0.5", "std": "0.5", "num_heads": '"3"'}, r"whole numbers from 1.*num_heads='3'"),
        ({"mean": "0.5", "std": "0.5"}, r"num_heads cannot be read"),
    ],
)
def test_wrong_metadata_says_which(tmp_path: Path, facts: dict[str, str], message: str) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(state_of(), path, facts)
    with pytest.raises(UserError, match=message):
        load_model(checkpoint=path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mean", "0.5"),
        ("mean", [0.5, 0.5]),
        ("mean", [0.5, 0.5, float("nan")]),
        ("mean", "abc"),
        ("std", 0),
        ("std", -0.5),
        ("std", [0.2, float("inf"), 0.2]),
        ("std", {"r": 1}),
    ],
)
def test_a_wrong_normalisation_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = saved(tmp_path, state_of())
    with pytest.raises(UserError, match=f"{key}: expected one .*number or three, one a channel; g"):
        load_model(checkpoint=path, **{**KNOWN, key: value})


# files that are refused ---------------------------------------------------------------------------


class Bomb:
    """A pickle of this writes a file where it is loaded with care for nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "ran"))


@pytest.mark.parametrize("where", ["beside", "alone", "pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    tmp_path: Path, where: str
) -> None:
    trap = tmp_path / "ran"
    path = tmp_path / "weights.pth"
    if where == "pickle":
        path.write_bytes(pickle.dumps(Bomb(trap)))
    else:
        beside = {"model": state_of(), "hook": Bomb(trap)}
        torch.save(beside if where == "beside" else Bomb(trap), path)
    with pytest.raises(UserError, match=r"cannot be read as plain weights.*save its state_dict al"):
        load_model(checkpoint=path, **KNOWN)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Bomb(trap)))  # noqa: S301 (the trap works)
    assert trap.exists()


def test_a_whole_model_object_is_refused_and_named(tmp_path: Path) -> None:
    path = saved(tmp_path, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(
        UserError, match=r"GLOBAL torch.nn.modules.container.Sequential.*state_dict"
    ):
        load_model(checkpoint=path, **KNOWN)


@pytest.mark.parametrize("content", [[torch.zeros(2)], torch.zeros(2), 3])
def test_a_file_of_no_dictionary_is_refused(tmp_path: Path, content: Any) -> None:
    path = saved(tmp_path, content)
    kind = type(content).__name__
    with pytest.raises(
        UserError, match=f"expected a dictionary of tensors, got {kind}. Save model"
    ):
        load_model(checkpoint=path, **KNOWN)


@pytest.mark.parametrize(
    ("content", "got"),
    [({}, "an empty file"), ({"model": {}}, "an empty file"), ({"epoch": 3, 1: "x"}, "1, epoch")],
)
def test_a_file_without_weights_is_refused(tmp_path: Path, content: Any, got: str) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(UserError, match=f"holds no weights: expected tensors by name, got {got}"):
        load_model(checkpoint=path, **KNOWN)


def test_tensors_by_number_are_no_vit(tmp_path: Path) -> None:
    path = saved(tmp_path, {0: torch.zeros(2), 1: torch.zeros(3)})
    with pytest.raises(UserError, match=r"is no plain ViT classifier.*got 0, 1, …"):
        load_model(checkpoint=path, **KNOWN)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kept", [0, 5, 60, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, suffix: str, kept: float) -> None:
    path = tmp_path / f"weights{suffix}"
    torch.save(state_of(), path) if suffix == ".pth" else save_file(state_of(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    with pytest.raises(
        UserError, match=rf"weights\{suffix}.* (readable safetensors|plain weights)"
    ):
        load_model(checkpoint=path, **KNOWN)


@pytest.mark.filterwarnings("ignore")
def test_a_file_of_anything_is_a_user_error(tmp_path: Path) -> None:
    good = saved(tmp_path, {"model": {"a": torch.zeros(3)}}).read_bytes()
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "noise.pth"
    for _ in range(300):
        changed = bytearray(good)
        for place in torch.randint(400, (4,), generator=generator).tolist():
            changed[place] = int(torch.randint(256, (1,), generator=generator))
        for content in (bytes(changed), bytes(changed[64:128])):
            path.write_bytes(content)
            with pytest.raises(UserError, match="noise.pth"):
                load_model(checkpoint=path, **KNOWN)


@pytest.mark.parametrize(
    ("name", "came"), [("w.npz", ".npz"), ("w.onnx", ".onnx"), ("w", "no suf")]
)
def test_another_suffix_is_refused(tmp_path: Path, name: str, came: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"x")
    with pytest.raises(
        UserError, match=rf"expected .safetensors, .pth or .pt, got '{came}.*onvert"
    ):
        load_model(checkpoint=path, **KNOWN)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pth", tmp_path):
        with pytest.raises(
            UserError, match=rf"No checkpoint at {path}: expected .* Check the path"
        ):
            load_model(checkpoint=path, **KNOWN)


# files of another model ---------------------------------------------------------------------------


def refusal(tmp_path: Path, state: State, **given: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_model(checkpoint=saved(tmp_path, state), **{**KNOWN, **given})
    return str(caught.value)


@pytest.mark.parametrize("name", ["norm.weight", "blocks.1.attn.qkv.bias", "pos_embed"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    state = state_of()
    del state[name]
    message = refusal(tmp_path, state, img_size=32)
    assert f"weights.pth lacks 1 of the model's {len(state) + 1} tensors: {name}." in message
    assert "check that the model" in message


@pytest.mark.parametrize("name", ["head.weight", "cls_token", "patch_embed.proj.weight"])
def test_a_file_that_is_no_classifier_is_named(tmp_path: Path, name: str) -> None:
    state = state_of()
    del state[name]
    message = refusal(tmp_path, state)
    assert f"no plain ViT classifier: expected a tensor '{name}', got" in message
    assert "Give a checkpoint in timm, DeiT or MJP layout" in message


def test_the_class_count(tmp_path: Path) -> None:
    message = refusal(tmp_path, state_of(), num_classes=7)
    assert "tensor 'head.weight' has shape (5, 24), expected (7, 24)" in message
    assert "Set num_classes: 5, or give a checkpoint with 7" in message


def test_the_patch_size(tmp_path: Path) -> None:
    message = refusal(tmp_path, state_of(), patch_size=4, img_size=32)
    assert "'patch_embed.proj.weight' has shape (24, 3, 8, 8), expected (24, 3, 4, 4)" in message
    assert "Set patch_size: 8 and embed_dim: 24" in message


def test_the_width(tmp_path: Path) -> None:
    message = refusal(tmp_path, state_of(), embed_dim=48)
    assert "tensor 'cls_token' has shape (1, 1, 24), expected (1, 1, 48)" in message
    assert "Set embed_dim: 24" in message


def test_the_depth(tmp_path: Path) -> None:
    message = refusal(tmp_path, state_of(), depth=3)
    assert "lacks 12 of" in message
    assert "blocks.2.attn.proj.bias" in message
    assert "(depth, " in message
    message = refusal(tmp_path, state_of(), depth=1)
    assert "holds 12 tensors of layers that the model has not: blocks.1.attn.proj.bias" in message
    assert "check that the model's depth is the file's" in message


@pytest.mark.parametrize(
    "name", ["blocks.0.attn.q_norm.weight", "norm_pre.weight", "pre_logits.fc.weight"]
)
def test_layers_of_another_network_are_not_dropped_in_silence(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, {**state_of(), name: torch.zeros(24)})
    assert f"holds 1 tensors of layers that the model has not: {name}" in message
    assert "the file is a plain ViT's" in message


@pytest.mark.parametrize("name", ["dist_token", "reg_token", "blocks.0.ls1.gamma"])
def test_a_vit_that_is_not_plain_is_refused(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, {**state_of(), name: torch.zeros(1, 1, 24)})
    assert (
        f"holds '{name}': expected a plain ViT with one class token and no layer scale" in message
    )


def test_a_distilled_deit_is_refused(tmp_path: Path) -> None:
    from timm.models.deit import VisionTransformerDistilled

    message = refusal(tmp_path, VisionTransformerDistilled(**ARCHITECTURE).state_dict())
    assert "holds 'dist_token'" in message
    assert "DeiT without distillation" in message


def test_a_tensor_of_other_axes_is_named(tmp_path: Path) -> None:
    state = state_of()
    state["pos_embed"] = state["pos_embed"][0]
    assert "tensor 'pos_embed' has shape (17, 24), expected 3 axes" in refusal(tmp_path, state)
    state["head.weight"] = torch.zeros(5)
    assert "tensor 'head.weight' has shape (5,), expected 2 axes" in refusal(tmp_path, state)


def test_heads_that_do_not_divide_the_width(tmp_path: Path) -> None:
    message = refusal(tmp_path, state_of(), num_heads=5)
    assert "expected img_size divisible by patch_size and embed_dim by num_heads" in message
    assert "got 32/8 and 24/5" in message
    assert "got 36/8 and 24/3" in refusal(tmp_path, state_of(), img_size=36)


@pytest.mark.parametrize(
    "given", [{"num_heads": 0}, {"img_size": 0}, {"depth": -1}, {"depth": 2.0}]
)
def test_dimensions_are_whole_numbers(tmp_path: Path, given: dict[str, Any]) -> None:
    ((key, value),) = given.items()
    assert f"expected whole numbers from 1, got {key}={value}" in refusal(
        tmp_path, state_of(), **given
    )


def test_a_regressor_the_file_has_not(tmp_path: Path) -> None:
    message = refusal(tmp_path, state_of(), dal="linear")
    assert "lacks 2 of" in message
    assert "dal_regressor.layers.bias" in message
    assert "dal, index_embedding) is the file's" in message


# names --------------------------------------------------------------------------------------------


def test_an_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"Unknown model 'deit_smal_mjp'. Did you mean deit_small_m"
    ):
        load_model("deit_smal_mjp")
    with pytest.raises(
        UserError, match=r"Unknown model 'resnet50'.*Available: vit_small, deit_sma"
    ):
        load_model("resnet50")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"img_sise": 32}, r"Unknown model field 'img_sise'. Did you mean img_size\?"),
        (
            {"position_embedding": "expose"},
            r"Unknown position_embedding 'expose'. Did you mean exp",
        ),
        ({"dal": "lineer"}, r"Unknown dal 'lineer'. Did you mean linear\?"),
    ],
)
def test_an_unknown_field_suggests_the_nearest(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_model("deit_small", checkpoint="random", **given)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("deit_small_mjp", "authors offer it on their repository's page"),
        ("deit_small_mjp_no_unk", "yhlleo/MJP"),
        ("deit_small_no_pe", "No trained DeiT-S without position embeddings is public"),
        ("vit_tiny_patch16_224", "Give checkpoint=PATH"),
        (None, "Give checkpoint=PATH"),
    ],
)
def test_a_model_without_a_checkpoint_says_where_to_get_one(name: str | None, advice: str) -> None:
    with pytest.raises(UserError, match=f"needs a checkpoint. .*{advice}.*checkpoint='random'"):
        load_model(name, mean=0.5, std=0.5)


# timm's downloads ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("vit_smol_patch16_224", "vit_small_patch16_224"),
        ("vit_small_patch16_225.augreg_in1k", "vit_small_patch16_224"),
        ("vit_small_patch16_224.augreg_in2k", "vit_small_patch16_224.augreg_in1k"),
    ],
)
def test_a_download_that_does_not_exist_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(
        UserError, match=f"Unknown timm model .*Did you mean {near}[?].*Available: "
    ):
        load_model(checkpoint=f"timm:{name}")
    if "." in name:
        with pytest.raises(UserError, match=f"Unknown timm model .*Did you mean {near}[?]"):
            load_model(name)


def test_a_failed_download_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, pretrained: bool) -> nn.Module:
        raise OSError("no route to host")

    monkeypatch.setattr(timm, "create_model", fails)
    message = r"could not download vit_small_patch16_224.augreg.*\(OSError\).*give the file: --wei"
    with pytest.raises(UserError, match=message):
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
