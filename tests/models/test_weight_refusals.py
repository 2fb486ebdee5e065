"""Weights and facts that make no model, of friends and of strangers: each mistake is named, before
a run and in it, and nothing is built or run. Damaged bytes are drawn in tests/inputs."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.checkpoints import METADATA
from mjp_privacy.models.loading import outline_model
from tests.helpers.models import ARCHITECTURE, KNOWN, SMALL, State, saved, state_of

CLIP = {"pre_norm": True, "patch_bias": False, "head_bias": False, "norm_eps": 1e-5}


DINO = "vit_small_patch14_dinov2"


def refusal(**given: Any) -> str:
    """What is said of a model, which is the same before the run and in it."""
    said = []
    for load in (outline_model, load_model):
        with pytest.raises(UserError) as caught:
            load(**{"whole": True} if load is outline_model else {}, **given)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert len(said[0]) < 2000
    assert said[0].replace("\n", "").isprintable()
    return said[0]


def without(*names: str) -> Callable[[State], State]:
    return lambda state: {name: t for name, t in state.items() if name not in names}


def beside(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[State], State]:
    return lambda state: {**state, name: torch.zeros(shape, dtype=dtype)}


def named(name: str) -> Callable[[State], State]:
    """A network of timm's in place of the small one."""
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in timm.create_model(name).state_dict().items()}
    return lambda _: {n: torch.zeros(shape, dtype=torch.float16) for n, shape in shapes.items()}


FILES: list[tuple[Callable[[State], State], dict[str, Any], str]] = [
    (without("norm.weight"), {}, "1: norm.weight"),
    (without("pos_embed"), {}, "img_size=…"),
    (without("patch_embed.proj.weight"), {}, "'patch_embed.proj.weight'"),
    (without(), {"num_classes": 7}, "head.weight"),
    (without(), {"patch_size": 4, "img_size": 32}, "patch_embed.proj.weight"),
    (without(), {"embed_dim": 48}, "cls_token"),
    (without(), {"depth": 3}, "12: blocks.2"),
    (without(), {"num_heads": 5}, "24/5"),
    (beside("blocks.0.attn.q_norm.weight", 24), {}, "blocks.0.attn.q_norm.weight"),
    (beside("dist_token", 1, 1, 24), {}, "dist_pos_embed"),
    (beside("blocks.0.ls1.gamma", 24), {}, "'blocks.0.ls1.gamma'"),
    (beside("head_dist.weight", 5, 24), {}, "head_dist.weight"),
    (beside("pos_embed", 17, 24), {}, "(17, 24)"),
    (beside("pos_embed", 1, 16, 24), {}, "15 positions"),
    (beside(f"blocks.{10**9}.norm1.weight", 24), {}, "blocks.1000000000.norm1"),
    (beside("blocks.3.norm1.weight", 24), {}, "blocks.2"),
    (beside("head.\x1b[2J", 24), {}, r"head.\x1b[2J"),
    (beside("blocks.1.attn.qkv.weight", 72, 24, dtype=torch.int8), {}, "blocks.1.attn.qkv.weight"),
    (without(), {"name": "vit_tiny_patch16_224"}, "blocks.10"),
    (named("vit_tiny_patch16_224"), {"name": "vit_small_patch16_224"}, "another network"),
    (named("resnet18"), {"name": DINO, "num_heads": None, "num_classes": 5}, "another network"),
]


@pytest.mark.parametrize(("change", "given", "named"), FILES)
def test_a_file_of_another_network(
    tmp_path: Path, change: Callable[[State], State], given: dict[str, Any], named: str
) -> None:
    state = change(state_of())
    said = refusal(checkpoint=saved(tmp_path, state), **{**KNOWN, **given})
    assert named in said
    assert "weights.pth" in said


# files that hold no weights -----------------------------------------------------------------------


class Bomb:
    """A pickle of this writes a file where it is loaded with care for nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "ran"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    tmp_path: Path, form: str
) -> None:
    trap, path = tmp_path / "ran", tmp_path / "weights.pth"
    content = {"model": state_of(), "hook": Bomb(trap)}
    if form == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    said = refusal(checkpoint=path, **KNOWN)
    assert "weights.pth" in said
    assert "file an issue" not in said  # of torch's: the file is at fault
    assert not trap.exists()
    pickle.loads(pickle.dumps(Bomb(trap)))  # noqa: S301 (the trap works)
    assert trap.exists()


CIRCLE: dict[str, Any] = {}
CIRCLE["model"] = CIRCLE  # a container that holds itself
ODD: list[tuple[Any, str]] = [
    (nn.Sequential(nn.Linear(2, 2)), "Sequential"),
    ([torch.zeros(2)], "list"),
    ({"conv1.weight": torch.zeros(1)}, "conv1.weight"),
    ({(1, 2): torch.zeros(1), None: torch.zeros(1)}, "'patch_embed.proj.weight'"),
    ({1: torch.zeros(1), "1": torch.zeros(1)}, "one name"),
    ({f"t{i}": 0 for i in range(10_001)}, "10001"),
    ({"a": torch.zeros([1] * 9)}, "weights.pth, a"),
    ({"x" * 5000: torch.zeros(1)}, "xxx...xxx"),
    (CIRCLE, "weights.pth"),
]


@pytest.mark.parametrize(("content", "named"), ODD)
def test_a_file_of_something_else(tmp_path: Path, content: Any, named: str) -> None:
    assert named in refusal(checkpoint=saved(tmp_path, content), **KNOWN)


OTHER_FORMATS: dict[str, tuple[Callable[[Path], object], str]] = {
    "safetensors": (lambda path: save_file(state_of(), path), "safetensors file"),
    "a text": (lambda path: path.write_text("hello, these are no weights"), "torch.save"),
    "a pickle of text": (lambda path: path.write_bytes(pickle.dumps({"a": 1}, 0)), "torch.save"),
    "nothing": (Path.touch, "no bytes"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", OTHER_FORMATS)
def test_a_file_of_another_format_under_the_name_of_a_pth(tmp_path: Path, kind: str) -> None:
    make, named = OTHER_FORMATS[kind]
    make(path := tmp_path / "weights.pth")
    said = refusal(checkpoint=path, **KNOWN)
    assert "weights.pth" in said
    assert named in said


def test_a_path_of_no_weights(tmp_path: Path) -> None:
    """More kinds of no files are in tests/core/test_read."""
    for name in ("weights.safetensors", "weights.pth", "weights"):
        os.mkfifo(tmp_path / name)
        assert name in refusal(checkpoint=tmp_path / name, **KNOWN)
    for path in (tmp_path / "none.pth", tmp_path):
        assert str(path) in refusal(checkpoint=path, **KNOWN)


@pytest.mark.parametrize(
    "name", ["", "\0", "x" * 5000, "a/" * 3000, "packaged:\x1b[2J", "timm:"], ids=range(6)
)
def test_a_name_that_is_no_path(name: str) -> None:
    with pytest.raises(UserError) as caught:
        load_model(checkpoint=name, **KNOWN)
    assert len(str(caught.value)) < 20_000
    assert "\x1b" not in str(caught.value)


# facts that no tensor shows -----------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["mean", "std", "num_heads", "activation"])
def test_what_a_file_does_not_say_must_be_given(tmp_path: Path, missing: str) -> None:
    """The activation of a network as CLIP's, too."""
    (tmp_path / "my_vit").mkdir()
    path = tmp_path / "my_vit" / "model.safetensors"  # which many files are called
    save_file(state_of(**(CLIP if missing == "activation" else {})), path)
    known = {key: value for key, value in KNOWN.items() if key != missing}
    said = refusal(checkpoint=path, **known)
    assert f"{missing}=…" in said
    assert said.startswith(str(Path("my_vit", "model.safetensors")))
    assert outline_model(checkpoint=path, **known).embed_dim == 24  # no attack depends on them


SIZE: list[Any] = [0, 16_385, 3.5, "32", True]
CHANNELS: list[Any] = ["0.5", True, [], [0.5, 0.5], [0.5, None, 0.5], 300]
WORD: list[Any] = ["no such", 5, "x" * 5000]
WRONG: dict[str, list[Any]] = {
    "mean": [*CHANNELS, 10**400],
    "std": [*CHANNELS, 0, [0.5, 0, 0.5], 1e-300],
    **dict.fromkeys(("num_heads", "img_size", "resize"), SIZE),
    **dict.fromkeys(("interpolation", "position_embedding", "first_block", "dal"), WORD),
    "activation": WORD,
    "norm_eps": [0, 2, "1e-6", True],
    "trained_gamma": [-0.1, 1.1, "0.3", [0.3]],
    "adapters": [
        *("", {"rank": 0}, "{rank: 4, head: 3}", {"targets": ["qkv"]}, 4),
        *({"rank": 4, "targets": names} for names in (["query"], ["qkv", "qkv"])),
    ],
}
TEXTS = ["", "{", "NaN", "[" * 30_000, "9" * 5000, "\x00"]


@pytest.mark.parametrize("key", METADATA)
def test_a_wrong_entry_of_the_metadata_is_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "weights.safetensors"
    for text in [*map(json.dumps, WRONG[key]), *TEXTS]:
        save_file(state_of(), path, {"mean": "0.5", "std": "0.5", "num_heads": "3", key: text})
        said = refusal(checkpoint=path)
        assert "weights.safetensors" in said, text[:60]
        assert f"{key}: " in said or f"{key!r}" in said, text[:60]


GIVEN: dict[str, list[Any]] = {
    **{key: WRONG[key] for key in ("img_size", "mean")},
    "depth": [0, 513, 2.0],
    "num_classes": [0, 10**7],
    "mlp_ratio": [-1, 1e9],
    "unknown_embedding": ["yes"],
    "img_sise": [32],
    "unknown_init": ["zero"],
    "seed": [-1, 2**63],
}


@pytest.mark.parametrize("key", GIVEN)
def test_what_a_user_gives_is_as_bounded(key: str) -> None:
    for value in GIVEN[key]:
        assert key in refusal(checkpoint="random", **{**SMALL, key: value}), value


def test_sizes_that_are_real_one_by_one_and_not_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "24/7" in refusal(checkpoint="random", **{**SMALL, **ARCHITECTURE, "num_heads": 7})
    said = refusal(checkpoint="random", **{**SMALL, "embed_dim": 16_383, "depth": 512})
    assert "25,000,000,000" in said
    monkeypatch.setattr("mjp_privacy.models.loading.free_bytes", lambda device: 50_000)
    with pytest.raises(UserError, match=r"0\.0 GB"):
        load_model(checkpoint="random", **SMALL)
    outline_model(checkpoint="random", **SMALL)  # which takes no memory


NAMES: list[tuple[dict[str, Any], list[str]]] = [
    ({"name": "deit_smal_mjp"}, ["deit_smal_mjp", "deit_small_mjp?"]),
    ({"name": "resnet50"}, ["resnet50", "--weights"]),
    ({"name": "vit_tiny_patch16_224.augreg"}, ["vit_tiny_patch16_224.augreg"]),
    ({"checkpoint": "timm:vit_tinny_patch16_224"}, ["vit_tiny_patch16_224?"]),
    ({"checkpoint": "packaged:cifar_vitt"}, ["cifar_vit?"]),
    ({"name": "deit_small_mjp"}, ["deit_small_mjp", "yhlleo/MJP", "--weights"]),
    ({}, ["checkpoint"]),
]


@pytest.mark.parametrize(("given", "named"), NAMES)
def test_a_name_of_no_model_or_without_weights(given: dict[str, Any], named: list[str]) -> None:
    said = refusal(mean=0.5, std=0.5, **given)
    assert all(words in said for words in named), said
