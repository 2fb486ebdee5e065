"""Whether what an attack returns is a Reconstruction of its images: right types, right shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from mjp_privacy.core.text import shown
from mjp_privacy.interfaces import AttackerView, Reconstruction


class WrongAnswer(ValueError):
    """An attack returned something else than a Reconstruction of its images."""


def checked_reconstruction(answer: Any, view: AttackerView, count: int) -> Reconstruction:
    """The attack's answer for `count` images, without a graph; WrongAnswer where it is none.

    Pictures may hold NaN: those are failures of single images.
    """
    if not isinstance(answer, Reconstruction):
        raise WrongAnswer(f"expected a Reconstruction, got {type(answer).__name__}")
    patches = view.model.grid**2
    picture = (count, len(view.pixels.mean), view.pixels.size, view.pixels.size)
    images = _tensor("images", answer.images, picture, real=True)
    mask = _tensor("mask", answer.mask, (count, patches), real=False)
    permutation = _tensor("permutation", answer.permutation, (count, patches), real=False)
    if (
        permutation is not None
        and not 0 <= int(permutation.min()) <= int(permutation.max()) < patches
    ):
        raise WrongAnswer(f"permutation: expected numbers of patches, 0 to {patches - 1}")
    if not isinstance(answer.diagnostics, Mapping):
        kind = type(answer.diagnostics).__name__
        raise WrongAnswer(f"diagnostics: expected tensors by name, got {kind}")
    diagnostics = {
        _diagnostic(name): _tensor(f"diagnostics[{name!r}]", values, (count,), real=None)
        for name, values in answer.diagnostics.items()
    }
    return replace(
        answer,
        images=images,
        mask=mask,
        permutation=permutation,
        diagnostics={name: values for name, values in diagnostics.items() if values is not None},
        inapplicable=_reasons(answer.inapplicable, count),
    )


def _tensor(name: str, value: Any, shape: tuple[int, ...], *, real: bool | None) -> Tensor | None:
    """The value without its graph, or None if it is None.

    real: whether it must hold floating-point numbers, or whole ones or booleans; None: any of them
    """
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise WrongAnswer(f"{shown(name, 60)}: expected a tensor, got {type(value).__name__}")
    if tuple(value.shape) != shape:
        raise WrongAnswer(
            f"{shown(name, 60)}: expected the shape {shape}, got {tuple(value.shape)}"
        )
    kind = "float" if value.is_floating_point() else "complex" if value.is_complex() else "whole"
    expected = {True: ("float",), False: ("whole",), None: ("float", "whole")}[real]
    if kind not in expected:
        words = " or ".join(expected)
        raise WrongAnswer(f"{shown(name, 60)}: expected {words} numbers, got {value.dtype}")
    return value.detach()


def _diagnostic(name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 100:
        raise WrongAnswer(f"diagnostics: expected short names, got {shown(repr(name), 60)}")
    return name


def _reasons(inapplicable: Any, count: int) -> dict[int, str]:
    """{place: why} with places among the images, and texts."""
    fits = isinstance(inapplicable, Mapping) and all(
        type(place) is int and 0 <= place < count and isinstance(reason, str)
        for place, reason in inapplicable.items()
    )
    if not fits:
        got = shown(repr(inapplicable), 100)
        raise WrongAnswer(f"inapplicable: expected reasons by image, 0 to {count - 1}, got {got}")
    return {place: shown(reason) for place, reason in inapplicable.items()}
