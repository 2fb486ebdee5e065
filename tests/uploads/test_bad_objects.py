"""Objects that cannot be attacked or saved: each is a UserError that names the argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mjp_privacy import attack_gradients, save_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images
from tests.uploads.test_attack_gradients import gradient_of

NAN, HUGE = float("nan"), 10**400
LONG, CONTROLS = "x" * 5000, "a\x1b[2Jb\n"
MOST = 1200
"""Characters of a message."""


class Foreign:
    """An object of a class that nothing here knows."""


def held(value: Any) -> dict[str, Any]:
    """Gradients of one parameter."""
    return {"head.bias": value}


NUMBERS: list[Any] = ["0.1", True, None, NAN, -1, HUGE, float("inf"), [0.1], torch.ones(2), "", {}]
COUNTS: list[Any] = [*NUMBERS[:2], *NUMBERS[3:], 0, 1.5, 10**9, "5"]
BAD: dict[str, list[Any]] = {
    "model": [None, 5, "vit_tiny_patch16_224", [], [5], {}, nn.Module(), nn.Linear(2, 2), Foreign],
    "gradients": [
        *(5, "gradients.pt", [], [[]], [{}], {}, Foreign(), np.ones(3), torch.ones(3)),
        *map(held, (None, 5, "x", [1.0], np.array([None] * 10), np.array(["a"] * 10), Foreign())),
        *(held(torch.ones(10, dtype=dtype)) for dtype in (torch.int64, torch.bool, torch.cfloat)),
        *(held(torch.ones(shape)) for shape in (0, 9, (10, 10, 1), (2, 9))),
        held(torch.ones(10).to(torch.float8_e4m3fn)),
        held(torch.ones(10, device="meta")),
        held(torch.quantize_per_tensor(torch.ones(10), 0.1, 0, torch.qint8)),
        held(torch.full((10,), NAN)),
        held(torch.zeros(10)),
        {LONG: torch.ones(1)},
        {CONTROLS: torch.ones(1)},
        {5: torch.ones(1)},
        [torch.ones(1), {}],
        [torch.ones(1)] * 7,
    ],
    "labels": [
        *("3", ["a"], [None], {}, Foreign(), [], -1, 10, HUGE, [2**70], 1.5, True),
        *(torch.ones(1), torch.ones(1, dtype=torch.cfloat), torch.ones(0, dtype=torch.long)),
        *(np.array(["3"]), LONG),
    ],
    "mean": ["0.5", NAN, [0.5, 0.5], [[0.5] * 3], 300, (HUGE,) * 3, ("a",) * 3, Foreign(), True],
    "std": [0, -0.5, NAN, [0.5, 0, 0.5], 300, "x", (HUGE,) * 3],
    "images": [
        *(5, "cat.png", [], [[0.5]], Foreign(), np.array(["a"]), np.array([None])),
        *(torch.rand(1, 1, 32, 32), torch.rand(3, 9, 9), torch.rand(0, 3, 32, 32), torch.ones(())),
        torch.full((1, 3, 64, 64), NAN),
        torch.rand(1, 3, 64, 64, dtype=torch.cfloat),
        torch.zeros(1, 3, 64, 64, dtype=torch.bool),
        torch.rand(1, 3, 64, 64, device="meta"),
    ],
    "kind": [None, 5, "", "Gradient", LONG, CONTROLS, [], np.ones(3)],
    "batch": [value for value in COUNTS if value is not None],
    "steps": COUNTS,
    "lr": [*NUMBERS, 0],
    "momentum": [*NUMBERS, 1.5],
    "weight_decay": NUMBERS,
    "noise": NUMBERS,
    "rounding": NUMBERS,
    "optimizer": [None, 5, "", "lion", "SGD ", LONG, [], {}],
}
ATTACKING: dict[str, list[Any]] = {
    **BAD,
    "attacks": [
        *(5, None, "", "aprl", LONG, CONTROLS, [], [5], {}, {"april": None}, {5: {}}, [["april"]]),
        *({"april": {"engin": 1}}, {LONG: {}}, torch.ones(2), Foreign()),
    ],
    "dal_lambda": NUMBERS,
    "seed": [None, "5", -1, 2**63, 1.5, True, HUGE],
}
SAVING: dict[str, list[Any]] = {
    **{name: BAD[name][:3] for name in BAD},
    "folder": [None, 5, "", " ", "a\0b", []],
    "name": [None, 5, "", "../x", "a/b", ".hidden", "x" * 300, CONTROLS, []],
    "label": [5, "", " ", LONG, CONTROLS, []],
    "round": [None, "3", -1, 1.5, 10**30, True],
    "series": [5, "", LONG, CONTROLS, []],
    "gamma": [None, "0.3", -0.1, 1.5, NAN, True],
    "recipe": [5, "dal", [], {"dall": True}, {"dal": 5}, {"defenses": ["int9"]}, {5: 5}],
}
OF_TRAINING = ("lr", "steps", "optimizer", "momentum", "weight_decay")
"""Arguments that matter for weight differences."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return planted_model()


@pytest.fixture(scope="module")
def gradients(model: LoadedModel) -> dict[str, Tensor]:
    return gradient_of(model, planted_images(1), torch.tensor([3]))


def arguments(
    name: str, value: Any, model: LoadedModel, gradients: dict[str, Tensor]
) -> dict[str, Any]:
    training = {"kind": "weight_difference", "lr": 0.1} if name in OF_TRAINING else {}
    return {"model": model, "gradients": gradients, **training, name: value}


def check_said(name: str, value: Any, error: UserError) -> None:
    said = str(error)
    assert len(said) < MOST, said[:200]
    assert said.replace("\n", "").isprintable(), ascii(said)
    if name == "model" or (name == "folder" and value in ("", " ")):
        return
    assert name.removesuffix("s") in said.lower(), said


CASES = [(name, place) for name, values in ATTACKING.items() for place in range(len(values))]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_bad_object_is_refused_by_its_name(
    name: str, place: int, model: LoadedModel, gradients: dict[str, Tensor]
) -> None:
    given = {"attacks": "mask_locator", **arguments(name, ATTACKING[name][place], model, gradients)}
    with pytest.raises(UserError) as caught:
        attack_gradients(**given)
    check_said(name, ATTACKING[name][place], caught.value)


TO_SAVE = [(name, place) for name, values in SAVING.items() for place in range(len(values))]


@pytest.mark.parametrize(("name", "place"), TO_SAVE)
def test_nothing_of_a_bad_object_is_saved(
    name: str, place: int, tmp_path: Path, model: LoadedModel, gradients: dict[str, Tensor]
) -> None:
    place_of = {"folder": tmp_path / "uploads"}
    given = {**place_of, **arguments(name, SAVING[name][place], model, gradients)}
    with pytest.raises(UserError) as caught:
        save_upload(**given)
    check_said(name, SAVING[name][place], caught.value)
    assert not list(tmp_path.rglob("*.*"))
