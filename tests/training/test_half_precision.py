"""Products in bfloat16 where a CPU has no instructions for them: float32, rounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from mjp_privacy.training import learner as half_precision
from mjp_privacy.training.config_files import load_training
from mjp_privacy.training.learner import RoundedProducts, rounds_products
from mjp_privacy.training.trainer import train
from tests.helpers.families import family_content
from tests.helpers.night import by_day
from tests.helpers.segmentation import SWIN, pair_folder
from tests.helpers.segmentation import small as segmentation
from tests.helpers.training import curve, small

CPU = torch.device("cpu")
HALF = {"precision": "bfloat16"}
ULP = 2.0**-7  # of a bfloat16, relative to its power of two


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


OPERATIONS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: F.linear(numbers(5, 7, 24), numbers(11, 24, seed=1), numbers(11, seed=2)),
    "matmul": lambda: numbers(9, 24) @ numbers(24, 5, seed=1),
    "attention": lambda: numbers(2, 3, 9, 24) @ numbers(2, 3, 24, 9, seed=1),
    "baddbmm": lambda: torch.baddbmm(
        numbers(3, 4, 6), numbers(3, 4, 24, seed=1), numbers(3, 24, 6, seed=2), beta=0.5, alpha=2
    ),
    "patches": lambda: F.conv2d(numbers(2, 3, 8, 8), numbers(6, 3, 4, 4, seed=1), None, 4),
    "convolution": lambda: F.conv2d(
        numbers(2, 3, 8, 8), numbers(6, 3, 3, 3, seed=1), numbers(6, seed=2), padding=1
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_product_is_the_exact_one_rounded_once(name: str) -> None:
    """Against float64, in which all these sums are exact enough to round."""
    with RoundedProducts():
        ours = OPERATIONS[name]()
    exact = _in_float64(OPERATIONS[name])
    assert exact.dtype == torch.float64  # so it is one of PRODUCTS
    assert ours.dtype == torch.bfloat16
    assert (ours == exact.bfloat16()).double().mean() > 0.99  # the rest: a tie in float32
    step = ULP * torch.exp2(exact.abs().log2().floor())
    assert ((ours.double() - exact).abs() <= 0.51 * step + 1e-5).all()


def _in_float64(operation: Callable[[], Tensor]) -> Tensor:
    """The operation with its bfloat16 numbers, computed in float64."""

    class Exact(RoundedProducts):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function in half_precision.PRODUCTS:
                args = [arg.double() if isinstance(arg, Tensor) else arg for arg in args]
            return function(*args, **(kwargs or {}))

    with Exact():
        return operation()


def test_gradients_are_those_of_torch_up_to_the_order_of_sums() -> None:
    """Far nearer to torch's own bfloat16 than float32 is, which rounds nowhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 10))
    images = torch.randn(16, 48)

    def gradient(mode: AbstractContextManager[object], *, bfloat16: bool = True) -> Tensor:
        model.zero_grad()
        with mode:
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                loss = model(images).float().square().mean()
            loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    native, whole = gradient(nullcontext()), gradient(nullcontext(), bfloat16=False)
    ours = gradient(RoundedProducts())
    assert (ours - native).norm() < 0.05 * (whole - native).norm()


def test_gradients_of_a_convolution_are_rounded_once() -> None:
    """As with instructions for bfloat16; torch's own path without them rounds at every image."""

    def gradients() -> Tensor:
        parts = torch.ops.aten.convolution_backward(
            numbers(16, 32, 2, 2),
            numbers(16, 3, 8, 8, seed=1),
            numbers(32, 3, 4, 4, seed=2),
            [32],
            *([4, 4], [0, 0], [1, 1], False, [0, 0], 1),
            [True, True, True],
        )
        return torch.cat([part.flatten() for part in parts])

    exact = _in_float64(gradients)
    assert exact.dtype == torch.float64
    with RoundedProducts():
        ours = gradients()
    assert (ours == exact.bfloat16()).double().mean() > 0.99


def test_other_operations_are_torchs_own() -> None:
    left, right = torch.randn(5, 7), torch.randn(7, 3)
    half = numbers(5, 7)
    plain = (left @ right, half.exp(), half.softmax(-1))
    with RoundedProducts():
        inside = (left @ right, half.exp(), half.softmax(-1))
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


def test_only_a_training_in_bfloat16_on_such_a_cpu_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(half_precision, "has_bfloat16", lambda: False)
    half = small(recipe=HALF)
    assert rounds_products(half, CPU)
    assert not rounds_products(half, torch.device("cuda"))
    assert not rounds_products(small(recipe={"precision": "float32"}), CPU)
    assert rounds_products(small(recipe={**HALF, "compile": True}), CPU)
    monkeypatch.setattr(half_precision, "has_bfloat16", lambda: True)
    assert not rounds_products(half, CPU)


def test_a_cpu_is_asked_and_a_torch_that_cannot_say_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Knows:
        def _is_mkldnn_bf16_supported(self) -> bool:
            return True

    monkeypatch.setattr(torch.ops, "mkldnn", Knows())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert half_precision.has_bfloat16()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not half_precision.has_bfloat16()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not half_precision.has_bfloat16()


class NoBfloat16(RoundedProducts):
    """Raises where a product of bfloat16 numbers reaches torch, and counts those of others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in half_precision.PRODUCTS:
            assert not any(isinstance(arg, Tensor) and arg.dtype == torch.bfloat16 for arg in args)
            self.seen += 1
        assert "attention" not in str(function)
        return function(*args, **(kwargs or {}))


def of_family(family: str) -> Any:
    stock = family_content(family)
    return load_training({**stock, "recipe": {**stock["recipe"], **HALF}}, epochs=1)


TRAININGS: dict[str, Callable[[], Any]] = {
    "classifier": lambda: small(recipe={**HALF, "ema_decay": 0.9, "compile": True}),
    "swin": lambda: of_family("swin"),
    "resnet": lambda: of_family("resnet"),
    "linear": lambda: segmentation(recipe=HALF),
    "upernet": lambda: segmentation(recipe=HALF, segmentation={"head": "upernet", "channels": 16}),
    "swin_linear": lambda: segmentation(**SWIN, recipe=HALF),
}


@pytest.mark.parametrize("name", by_day(TRAININGS, {0}))
def test_no_product_of_a_training_and_its_validation_is_slow(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(half_precision, "has_bfloat16", lambda: False)
    config, files = TRAININGS[name](), {"data": data, "val": data}
    if config.task == "segmentation":
        files = {"data": pair_folder(tmp_path / "ade")}
    with NoBfloat16() as products:
        train(config, **files, out=tmp_path / "run", device="cpu")
    assert products.seen > 100


def test_a_training_says_it_once_and_keeps_it_with_the_weights(
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(half_precision, "has_bfloat16", lambda: False)
    config = small(recipe={**HALF, "epochs": 1})
    path = train(config, data=data, val=data, out=tmp_path / "run", device="cpu")
    assert capfd.readouterr().err.count("computed in float32 and rounded") == 1
    train(config, data=data, val=data, out=tmp_path / "run", device="cpu")
    assert "computed in float32" not in capfd.readouterr().err
    assert "val_top1" in curve(tmp_path / "run")[-1]
    with safe_open(path, "pt") as file:
        (made_with,) = json.loads(file.metadata()["made_with"])
    assert made_with["products"] == "float32, rounded to bfloat16"
    monkeypatch.setattr(half_precision, "has_bfloat16", lambda: True)
    path = train(config, data=data, out=tmp_path / "other", device="cpu")
    with safe_open(path, "pt") as file:
        assert "products" not in json.loads(file.metadata()["made_with"])[0]
