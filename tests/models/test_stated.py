"""What a file of weights states of its model: every entry typed, bounded, and named when wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.loading import outline_model
from mjp_privacy.models.spec import METADATA
from tests.helpers.models import state_of

SIZE: list[Any] = [0, -1, 16_385, 10**9, 2**70, 3.5, "32", True, [32], {}]
CHANNELS: list[Any] = ["0.5", "abc", True, {}, [], [0.5, 0.5], [0.5] * 4, [0.5, "0.5", 0.5], 300]
CHANNELS += [[0.5, None, 0.5], [[0.5] * 3], 10**400]
WORD: list[Any] = ["", "no such", 5, True, ["learned"], {}, "x" * 5000]
WRONG: dict[str, list[Any]] = {
    "mean": CHANNELS,
    "std": [*CHANNELS, 0, -0.5, [0.5, 0, 0.5], 1e-300],
    "num_heads": SIZE,
    "img_size": SIZE,
    "resize": SIZE,
    "interpolation": WORD,
    "position_embedding": WORD,
    "first_block": WORD,
    "dal": WORD,
    "norm_eps": [0, -1e-6, 2, 10**9, "1e-6", True, []],
    "activation": WORD,
    "trained_gamma": [-0.1, 1.1, 10**9, "0.3", True, [0.3]],
    "adapters": ["", "4", {"rank": 0}, "{rank: 4, head: 3}", {"targets": ["qkv"]}, [4], True],
}
TEXTS = ["", "nothing", "{", "NaN", "Infinity", "[NaN, 1, 1]", "[" * 30_000, "9" * 5000, "\x00"]
GOOD = {"mean": "0.5", "std": "0.5", "num_heads": "3"}


def weights(folder: Path, metadata: dict[str, str]) -> Path:
    path = folder / "weights.safetensors"
    save_file(state_of(), path, metadata)
    return path


def test_every_entry_is_in_the_table() -> None:
    assert set(WRONG) == set(METADATA)


CASES = [(key, json.dumps(value)) for key, values in WRONG.items() for value in values]
CASES += [(key, text) for key in METADATA for text in TEXTS]


@pytest.mark.parametrize("key", METADATA)
def test_a_wrong_entry_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    """By `load_model` and, before any weights are read, by the outline that `check` asks."""
    cases = [text for name, text in CASES if name == key]
    assert len(cases) >= 14
    for text in cases:
        path = weights(tmp_path, {**GOOD, key: text})
        for load in (load_model, outline_model):
            with pytest.raises(UserError) as caught:
                load(checkpoint=path)
            said = str(caught.value)
            assert (
                "weights.safetensors: expected metadata of weights that state their model" in said
            )
            assert f"{key}: " in said or f"metadata {key!r}" in said, text[:60]
            assert len(said) < 1200
            assert "Copy or download it again" in said


def test_entries_of_other_programs_do_not_matter(tmp_path: Path) -> None:
    strange = {"format": "pt", "recipe": "mine", "depth": "x", "": "{", "author": "\x1b[2J"}
    assert load_model(checkpoint=weights(tmp_path, {**GOOD, **strange})).embed_dim == 24


@pytest.mark.parametrize("value", [None, 0, 1, 0.25])
def test_what_is_right_is_taken(tmp_path: Path, value: float | None) -> None:
    path = weights(tmp_path, {**GOOD, "trained_gamma": json.dumps(value)})
    assert load_model(checkpoint=path).card.trained_gamma == value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"img_size": "32"}, "expected whole numbers from 1, got img_size='32'"),
        ({"img_size": 10**9}, "got img_size=1000000000 (at most 16384)"),
        ({"num_heads": True}, "got num_heads=True"),
        ({"num_heads": 2**70}, "(at most 16384)"),
        ({"depth": 513}, "got depth=513 (at most 512)"),
        ({"num_classes": 10**7}, "got num_classes=10000000 (at most 1000000)"),
        ({"mlp_ratio": -1}, "mlp_ratio: Input should be greater than 0; got -1"),
        ({"mlp_ratio": 1e9}, "mlp_ratio: Input should be less than or equal to 64"),
        ({"resize": 0}, "resize: Input should be greater than or equal to 1"),
        ({"interpolation": "bicubik"}, "got 'bicubik'. Did you mean bicubic?"),
        ({"unknown_embedding": "yes"}, "unknown_embedding: Input should be a valid boolean"),
        ({"trained_gamma": 2}, "trained_gamma: Input should be less than or equal to 1"),
        ({"norm_eps": 5}, "norm_eps: expected a positive number, got 5"),
        ({"dal": 5}, "Unknown dal '5'"),
        ({"seed": 2**63}, "seed: expected a whole number from 0 to 2**63 - 1"),
        ({"seed": -1}, "seed: expected a whole number from 0 to 2**63 - 1"),
        ({"std": 1e-300}, "std: expected one positive number or three"),
    ],
)
def test_what_a_user_gives_is_as_bounded(given: dict[str, Any], said: str) -> None:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    fields = {**sizes, "num_classes": 5, "mean": 0.5, "std": 0.5, **given}
    for load in (load_model, outline_model):
        with pytest.raises(UserError) as caught:
            load(checkpoint="random", **fields)
        assert said in str(caught.value)


def test_sizes_that_are_real_one_by_one_and_not_together() -> None:
    sizes = {"img_size": 32, "patch_size": 8, "num_heads": 2, "num_classes": 5}
    large = {**sizes, "embed_dim": 16_384, "depth": 512, "mean": 0.5, "std": 0.5}
    for load in (load_model, outline_model):
        with pytest.raises(UserError, match=r"about 1,649,.* expected one that fits into 25,000"):
            load(checkpoint="random", **large)


def test_a_network_that_memory_does_not_hold_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mjp_privacy.models.loading.free_bytes", lambda device: 50_000)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    with pytest.raises(UserError, match=r"fits into the 0.0 GB of memory that are free"):
        load_model(checkpoint="random", **sizes, num_classes=5, mean=0.5, std=0.5)
    with torch.device("meta"):  # an outline takes none
        outline_model(checkpoint="random", **sizes, num_classes=5, mean=0.5, std=0.5)
