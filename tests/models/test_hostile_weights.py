"""Weights from strangers: whatever is in a file, a sentence comes of it and nothing is built."""

import contextlib
import itertools
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.loading import outline_model
from mjp_privacy.models.tensor_files import save_tensors
from tests.helpers.models import KNOWN, State, saved, state_of
from tests.helpers.night import nightly


def refusal(path: Path, **given: Any) -> str:
    """What is said of a file, which is the same before the run and in it."""
    said = []
    for load in (outline_model, load_model):
        with pytest.raises(UserError) as caught:
            load(checkpoint=path, **{**KNOWN, **given})
        said.append(str(caught.value))
    assert said[0] == said[1]
    return said[0]


def stored(folder: Path, state: State, suffix: str) -> Path:
    path = folder / f"weights{suffix}"
    plain = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(plain, path) if suffix == ".safetensors" else torch.save(plain, path)
    return path


SHAPES = [(), (0,), (1,), (24,), (1, 0, 24), (0, 24), (24, 0), (1, 1, 1, 1, 1), (1, 17, 0)]
SHAPES += [(2, 17, 24), (1, 18, 24), (24, 3, 0, 0), (0, 3, 8, 8), (24, 1, 8, 8), (24, 3, 8, 4)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("suffix", "step"),
    [(".safetensors", 7), (".pth", 7), nightly(".safetensors", 1), nightly(".pth", 1)],
)
def test_each_tensor_in_each_wrong_shape(tmp_path: Path, suffix: str, step: int) -> None:
    """By day every seventh pair: each tensor, and each shape, is among them."""
    good = state_of(unknown_embedding=True, dal="nonlinear", index_embedding=True)
    shapes = SHAPES if suffix == ".safetensors" else SHAPES[:5]
    pairs = list(itertools.product(good, shapes))[::step]
    assert {shape for _, shape in pairs} == {*shapes}
    for name, shape in pairs:
        if tuple(good[name].shape) == shape or (name.endswith("_embed") and shape[1:] == ()):
            continue
        state = {**good, name: torch.zeros(shape)}
        said = refusal(stored(tmp_path, state, suffix), img_size=32)
        assert "weights" in said
        assert name in said or "patches of" in said or "head" in said, (name, shape, said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((f"blocks.{n}.norm1.weight", f"blocks.{n}.norm1") for n in ("-1", "01", "٣", 10**9)),
        ("blocks.foo.weight", "blocks.foo.weight"),
        ("blocks.", "blocks."),
        ("blocks.3.norm1.weight", "0, 1, 3"),
        ("blocks.999999.norm1.weight", "0, 1, 999999"),
        ("head.\x1b[2J", "head.\\x1b[2J"),
        ("module.cls_token", "module.cls_token"),
    ],
)
def test_names_that_no_network_has(tmp_path: Path, name: str, said: str) -> None:
    state = {**state_of(), name: torch.zeros(24)}
    assert said in refusal(stored(tmp_path, state, ".safetensors"))


@pytest.mark.parametrize(
    "kind",
    [torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_numbers_that_are_no_floats(tmp_path: Path, kind: torch.dtype, suffix: str) -> None:
    state = {**state_of(), "blocks.1.attn.qkv.weight": torch.zeros(72, 24).to(kind)}
    said = refusal(stored(tmp_path, state, suffix))
    assert f"weights{suffix}, blocks.1.attn.qkv.weight" in said


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_taken_and_noted(tmp_path: Path, kind: torch.dtype) -> None:
    state = {name: tensor.to(kind) for name, tensor in state_of().items()}
    state["steps"] = torch.tensor(3)  # of another part: of any kind, and not noted
    model = load_model(checkpoint=stored(tmp_path, state, ".safetensors"), **KNOWN)
    report = model.card.checkpoint
    assert (report.stored_as, report.unexpected) == (str(kind).removeprefix("torch."), ("steps",))
    assert report.notes == ()  # a note would give a run's rows another name
    assert model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, state["head.weight"].float())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_that_are_no_numbers(tmp_path: Path, number: float, suffix: str) -> None:
    state = state_of()
    state["blocks.1.mlp.fc2.bias"][3] = number
    with pytest.raises(UserError) as caught:
        load_model(checkpoint=stored(tmp_path, state, suffix), **KNOWN)
    assert "blocks.1.mlp.fc2.bias" in str(caught.value)
    assert "1 of 24" in str(caught.value)


CIRCLE: dict[str, Any] = {}
CIRCLE["model"] = CIRCLE  # a container that holds itself
ODD: list[tuple[Any, str]] = [
    ({"model": {"model": {"model": {"model": {}}}}}, "model"),
    ({"model": [1, 2], "x": (1, (2,))}, "model, x"),
    ({(1, 2): torch.zeros(1), None: torch.zeros(1)}, "'patch_embed.proj.weight'"),
    ({1: torch.zeros(1), "1": torch.zeros(1)}, "one name"),
    ({10**30: torch.zeros(1)}, "got int"),
    ({f"t{i}": 0 for i in range(10_001)}, "10001"),
    ({"a": torch.zeros([1] * 9)}, "weights.pth, a"),
    ({"\x1b[2J": torch.zeros(1)}, "\\x1b[2J"),
    ({"x" * 5000: torch.zeros(1)}, "xxx...xxx"),
    (CIRCLE, "weights.pth"),
]


@pytest.mark.parametrize(("content", "said"), ODD)
def test_containers_of_odd_kinds(tmp_path: Path, content: Any, said: str) -> None:
    message = refusal(saved(tmp_path, content))
    assert said in message
    assert len(message) < 1500


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".bin"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "got a named pipe"),
        (lambda path: path.touch(), "weights"),
        (lambda path: path.write_bytes(os.urandom(5000)), "weights"),
        (lambda path: path.symlink_to(path), "weights"),
        (lambda path: path.symlink_to("/dev/zero"), "got a device"),
        (lambda path: (path.touch(), os.truncate(path, 65 << 30)), "65,536"),
    ],
)
def test_what_is_no_file_of_weights(
    tmp_path: Path, suffix: str, make: Callable[[Path], object], said: str
) -> None:
    path = tmp_path / f"weights{suffix}"
    make(path)
    assert said in refusal(path)


@pytest.mark.parametrize("name", ["", "\0", "x" * 5000, "a/" * 3000, "packaged:\x1b[2J", "timm:"])
def test_paths_that_are_none(name: str) -> None:
    with pytest.raises(UserError) as caught:
        load_model(checkpoint=name, **KNOWN)
    assert len(str(caught.value)) < 20_000
    assert "\x1b" not in str(caught.value)


def test_what_this_package_sealed_is_known_when_a_bit_changed(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_tensors(path, state_of(), {}, digest=True)
    assert load_model(checkpoint=path, **KNOWN).embed_dim == 24
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"weights.safetensors: .*changed after it was written"):
        load_model(checkpoint=path, **KNOWN)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_damage_anywhere_is_a_sentence_and_takes_no_memory(tmp_path: Path, suffix: str) -> None:
    path = stored(tmp_path, state_of(), suffix)
    good, draw = path.read_bytes(), random.Random(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(60):
        changed = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(4000)] ^= 1 << draw.randrange(8)
        for content in (changed, good[: draw.randrange(len(good))]):
            path.write_bytes(content)
            with contextlib.suppress(UserError):
                load_model(checkpoint=path, **KNOWN)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300_000, "KiB"
