"""The inequality that closed forms need, and the way out, in the words that tables show."""

from __future__ import annotations

import re
from typing import Any

import pytest

from attacks.equations.patch_system import too_few_equations
from mjp_privacy.models.loading import outline_model


def outline(**fields: Any) -> Any:
    small = {"depth": 1, "num_heads": 1, "num_classes": 2}
    return outline_model(checkpoint="random", **{**small, **fields})


@pytest.mark.parametrize(
    ("size", "patch", "width", "said"),
    [
        (224, 16, 192, "N = 196 patches > D = 192: closed forms need patches <= width; up to 208"),
        (224, 14, 192, "N = 256 patches > D = 192: closed forms need patches <= width; up to 182"),
        (
            64,
            8,
            48,
            "N = 64 patches > D = 48: closed forms need patches <= width; up to 48 px they",
        ),
        (64, 32, 3, "N = 4 patches > D = 3: .*; no picture of more than one patch is small enough"),
    ],
)
def test_too_many_patches(size: int, patch: int, width: int, said: str) -> None:
    model = outline(img_size=size, patch_size=patch, embed_dim=width)
    refusal = too_few_equations(model)
    assert refusal is not None
    assert refusal.kind == "underdetermined"
    assert re.match(said, refusal.text)


def test_more_unknowns_than_patches() -> None:
    model = outline(img_size=48, patch_size=16, embed_dim=10)
    assert too_few_equations(model) is None
    assert too_few_equations(model, extra=1, who="APRIL's equations") is None
    refusal = too_few_equations(model, extra=2, who="block 0's equations")
    assert str(refusal) == (
        "N + 2 = 11 unknowns > D = 10: block 0's equations need patches + 2 <= width; up to 32 px "
        "they apply"
    )


def test_the_size_that_is_named_is_the_largest_that_will_do() -> None:
    for width in (16, 17, 24, 25, 100):
        sizes = [
            size
            for size in range(8, 121, 8)
            if too_few_equations(outline(img_size=size, patch_size=8, embed_dim=width)) is None
        ]
        refusal = too_few_equations(outline(img_size=120, patch_size=8, embed_dim=width))
        assert f"up to {max(sizes)} px they apply" in str(refusal)
