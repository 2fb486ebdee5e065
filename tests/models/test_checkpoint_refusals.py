"""Weight files that are refused, and names and facts that are missing or wrong."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from timm.models.deit import VisionTransformerDistilled
from torch import nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.checkpoints import shape_of
from tests.helpers.models import ARCHITECTURE, KNOWN, MEAN, State, saved, state_of

# never guessed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["mean", "std", "num_heads"])
def test_what_a_file_does_not_say_must_be_given(tmp_path: Path, missing: str) -> None:
    path = saved(tmp_path, state_of())
    known = {key: value for key, value in KNOWN.items() if key != missing}
    words = rf"weights.pth: {missing} cannot be read .* and is never guessed.*{missing}=….*Give it"
    with pytest.raises(UserError, match=words):
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
        ({"mean": "a half"}, r"metadata 'mean' is not JSON: 'a half'"),
        ({"mean": '"0.5"'}, r"mean: expected one number or three.*got '0.5'"),
        ({"mean": "0.5", "std": "[0, 1, 1]"}, r"std: expected one positive number.*\[0, 1, 1\]"),
        (
            {"mean": "0.5", "std": "0.5", "num_heads": '"3"'},
            r"num_heads: Input should be a valid integer; got '3'",
        ),
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
    with pytest.raises(UserError, match=f"{key}: expected one .*number or three, one per channel"):
        load_model(checkpoint=path, **{**KNOWN, key: value})


# files that are refused ---------------------------------------------------------------------------


class Bomb:
    """A pickle of this writes a file where it is loaded with care for nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "ran"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
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
    with pytest.raises(UserError, match=r"weights\.pth.*save its state_dict alone"):
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
    with pytest.raises(UserError, match=r"is not a plain ViT classifier.*got 0, 1, …"):
        load_model(checkpoint=path, **KNOWN)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kept", [0, 5, 60, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, suffix: str, kept: float) -> None:
    path = tmp_path / f"weights{suffix}"
    torch.save(state_of(), path) if suffix == ".pth" else save_file(state_of(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    with pytest.raises(
        UserError,
        match=rf"weights\{suffix}: expected the weights",
    ):
        load_model(checkpoint=path, **KNOWN)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_damaged_file_is_a_user_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"noise{suffix}"
    state = {"a": torch.zeros(3)}
    torch.save({"model": state}, path) if suffix == ".pth" else save_file(state, path)
    good, generator = path.read_bytes(), torch.Generator().manual_seed(0)
    for _ in range(200):
        changed = bytearray(good)
        for place in torch.randint(min(len(good), 400), (4,), generator=generator).tolist():
            changed[place] = int(torch.randint(256, (1,), generator=generator))
        for content in (bytes(changed), bytes(changed[64:128])):
            path.write_bytes(content)
            with pytest.raises(UserError, match=f"noise[{suffix}]"):
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
    assert f"not a plain ViT classifier: expected a tensor '{name}', got" in message
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
    assert "holds 12 tensors of layers that the model does not have: blocks.1.attn" in message
    assert "check that the model's depth is the file's" in message


@pytest.mark.parametrize(
    "name", ["blocks.0.attn.q_norm.weight", "norm_pre.weight", "pre_logits.fc.weight"]
)
def test_layers_of_another_network_are_not_dropped_in_silence(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, {**state_of(), name: torch.zeros(24)})
    assert f"holds 1 tensors of layers that the model does not have: {name}" in message
    assert "the file holds a plain ViT" in message


@pytest.mark.parametrize("name", ["dist_token", "reg_token", "blocks.0.ls1.gamma"])
def test_a_vit_that_is_not_plain_is_refused(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, {**state_of(), name: torch.zeros(1, 1, 24)})
    assert (
        f"holds '{name}': expected a plain ViT with one class token and no layer scale" in message
    )


def test_a_distilled_deit_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, VisionTransformerDistilled(**ARCHITECTURE).state_dict())
    assert "holds 'dist_token'" in message
    assert "DeiT without distillation" in message
    assert "has two heads (head, head_dist): a model that answers with two heads is" in message


def test_hugging_faces_distilled_deit_has_two_heads(tmp_path: Path) -> None:
    state = state_of()
    heads = {"cls_classifier.weight": state["head.weight"]}
    heads |= {"distillation_classifier.weight": state["head.weight"]}
    del state["head.weight"]
    message = refusal(tmp_path, {**state, **heads})
    assert "has two heads (cls_classifier, distillation_classifier): a model that ans" in message
    assert "is not supported. Expected one with a single head" in message


def test_a_live_network_is_told_which_layouts_are_known() -> None:
    state = state_of()
    del state["cls_token"]
    with pytest.raises(UserError) as caught:
        shape_of(state, "MyViT", classifies=False)
    assert "MyViT is not a plain ViT: expected a tensor 'cls_token', got" in str(caught.value)
    assert "Known are the layouts of the authors' MJP; timm, DeiT's authors" in str(caught.value)
    assert "Give a checkpoint" not in str(caught.value)


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
