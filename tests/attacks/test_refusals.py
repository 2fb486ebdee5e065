"""Why an attack does not apply: each reason met, with its kind and the numbers that it names.

What a missing gradient, a batch of two or a model without positions does is asked of every attack
by tests/contract/test_attacks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attacks import find_attack
from attacks.april import April
from attacks.equations.patch_system import lacks_gradients, too_few_equations
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.models.loading import outline_model
from tests.helpers.models import planted_model
from tests.helpers.planted import changed, keeping, planted_images, planted_view

Change = Callable[[AttackerView], AttackerView]

SMALL = {"img_size": 8}  # N = 4 patches of p = 48 pixels, width D = 96
LARGE = {"img_size": 16, "patch_size": 8, "embed_dim": 48}  # N = 4, p = 192, D = 48
DIFFERENCE = {"kind": "weight_difference"}


def in_model(**parts: Any) -> Change:
    """The view, in whose model's first modules something else stands: in_model(index_embed=…)."""

    def change(view: AttackerView) -> AttackerView:
        for name, part in parts.items():
            where, _, last = name.rpartition("__")
            setattr(view.model.get_submodule(where.replace("__", ".")), last, part)
        return view

    return change


def with_facts(**facts: Any) -> Change:
    return lambda view: changed(view, **facts)


def unlabelled(view: AttackerView) -> AttackerView:
    return replace(keeping(view, lambda name: name != "head.bias"), labels=None)


TABLE = torch.nn.Parameter(torch.zeros(1, 1, 96))
MATCHING = ("inverting_gradients", "april_optimization", "gradvit", "span_matching")


def fresh(view: AttackerView) -> AttackerView:
    return changed(view, partners="fresh")


def fresh_and_masked(view: AttackerView) -> AttackerView:
    """Two of the four positions are masked in all pictures."""
    grads = {name: sent.clone() for name, sent in view.updates[0].grads.items()}
    grads["pos_embed"][:, :, 1:3] = 0
    return changed(fresh(view), grads=grads)


CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], Change | None, str, str]] = [
    # attack, its options, model, client, change of the view, kind, words
    *((name, {}, SMALL, {"batch": 2}, unlabelled, "labels", "labels") for name in MATCHING),
    *(
        (name, {}, SMALL, {}, with_facts(**DIFFERENCE), "weight_difference", "difference")
        for name in (*MATCHING, "april")
    ),
    (
        *("inverting_gradients", {}, SMALL, {}),
        *(lambda view: keeping(view, lambda name: False), "missing_gradient", "no gradient"),
    ),
    ("april", {}, {}, {"batch": 2}, None, "batch", "batch is 2"),
    ("april", {}, {}, {}, in_model(dist_token=TABLE), "model", "distillation"),
    ("april", {}, {}, {}, in_model(index_embed=TABLE), "model", "index table"),
    ("april", {}, {"embed_dim": 48}, {}, None, "underdetermined", "N + 1 = 65 unknowns > D = 48"),
    (
        *("april", {"engine": "breaching"}, {}, {}),
        *(in_model(patch_embed__proj__bias=None), "model", "bias"),
    ),
    ("april_unk_aware", {}, {}, {}, None, "unknown_embedding", "unknown"),
    ("pixel_lattice", {}, {}, {}, None, "unknown_embedding", "unknown"),
    ("token_span", {}, {"first_block": "closed_form"}, {}, None, "block", "no LayerNorm"),
    *(
        ("token_span", {}, model, client, change, kind, words)
        for model, client, change, kind, words in (
            ({"embed_dim": 64}, {}, None, "underdetermined", "N + 3 = 67 unknowns > D = 64"),
            ({}, {"batch": 2}, None, "batch", "batch 1"),
            ({}, {}, in_model(blocks__0__norm1=torch.nn.Identity()), "block", "no LayerNorm"),
        )
    ),
    # N B <= 96 allows 24, N (B - 1) < 48 twelve
    (
        *("batch_span", {}, SMALL, {"batch": 16}, None, "underdetermined"),
        "N (B - 1) = 60 differences >= p = 48",
    ),
    ("batch_span", {}, SMALL, {"batch": 32}, None, "underdetermined", "N B = 128 patches > D = 96"),
    ("batch_span", {}, {}, {"batch": 2}, None, "underdetermined", "no batch of this model does"),
    ("span_matching", {}, SMALL, {"batch": 32}, None, "underdetermined", "N B = 128 patches"),
    (
        *("layer_span", {}, SMALL | {"embed_dim": 48}, {"batch": 10}, None, "underdetermined"),
        "B (N + 1) = 50 tokens of a batch >= D = 48",
    ),
    (
        *("batch_lattice", {"most": 10}, LARGE, {"batch": 4}, None, "underdetermined"),
        "N (B - 1) = 12 differences > 10",
    ),
    (
        *("batch_lattice", {}, {"img_size": 4, "patch_size": 2}, {"batch": 4}),
        *(None, "underdetermined", "N (B - 1) = 12 differences >= p = 12"),
    ),
    (
        *("batch_lattice", {}, LARGE | {"img_size": 32, "embed_dim": 32}, {"batch": 2}),
        *(None, "underdetermined", "N (B - 1) = 16 differences > R (D - N - 1) = 1 * 15"),
    ),
    ("shared_picture", {}, LARGE, {"batch": 4}, None, "batch", "client.partners: fresh"),
    ("shared_picture", {"uploads": 1}, LARGE, {"batch": 4}, fresh, "uploads", "one was given"),
    (
        *("shared_picture", {}, LARGE, {"batch": 12}, fresh, "underdetermined"),
        "N B = 4 * 12 = 48 patches >= D = 48",
    ),
    # N (B - 1) = 100 of p = 192: two uploads leave 184 equations
    (
        *("shared_picture", {}, LARGE | {"embed_dim": 128}, {"batch": 26}, fresh),
        *("underdetermined", "2 * (192 - 4 * 25) = 184 equations <= p = 192"),
    ),
    (
        *("shared_picture", {}, LARGE | {"embed_dim": 128}, {"batch": 25}, fresh_and_masked),
        *("underdetermined", "(192 - 4 * 24 - 2 masked) = 188 equations <= p = 192"),
    ),
]


@pytest.mark.parametrize(("name", "options", "model", "client", "change", "kind", "words"), CASES)
def test_a_reason_is_given(
    name: str,
    options: dict[str, Any],
    model: dict[str, Any],
    client: dict[str, Any],
    change: Change | None,
    kind: str,
    words: str,
) -> None:
    attack, config = find_attack(name, options), ClientConfig(**client)
    victim = planted_model(**model)
    images = planted_images(max(4, config.batch), victim.card.img_size)
    view, _ = planted_view(victim, attack, "a", images=images, client=config)
    reason = attack.unsupported(view if change is None else change(view))
    assert reason is not None
    assert (reason.kind, words in reason.text) == (kind, True), reason.text


def test_more_uploads_tell_what_two_do_not() -> None:
    attack, model = (
        find_attack("shared_picture", {"uploads": 3}),
        planted_model(**LARGE | {"embed_dim": 128}),
    )
    client, images = ClientConfig(batch=26), planted_images(52, 16)
    view, _ = planted_view(model, attack, "a", images=images, client=client)
    assert attack.unsupported(fresh(view)) is None


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"optimizer": "adamw", "steps": 2}, "2 AdamW steps"),
        ({"optimizer": "lion"}, "lion"),
        ({"lr": None}, "learning rate"),
    ],
)
def test_other_weight_differences_hold_no_gradient(facts: dict[str, Any], said: str) -> None:
    view, _ = planted_view(planted_model(), April(), "a")
    view = changed(view, **{**DIFFERENCE, "lr": 0.1, **facts})
    assert said in str(lacks_gradients(view, "pos_embed"))


# the inequality that closed forms need, and the way out -------------------------------------------


def outline(size: int, patch: int, width: int) -> Any:
    shape = {"img_size": size, "patch_size": patch, "embed_dim": width}
    return outline_model(checkpoint="random", depth=1, num_heads=1, num_classes=2, **shape)


def test_too_few_equations_count_the_extra_unknowns() -> None:
    """N = 9 patches and a width of 10: one unknown more has room, two have none."""
    model = outline(48, 16, 10)
    assert too_few_equations(model) is None
    assert too_few_equations(model, extra=1) is None
    refusal = too_few_equations(model, extra=2, who="block 0's equations")
    assert all(said in refusal.text for said in ("= 11", "10", "block 0's", "32 px"))


@pytest.mark.parametrize(
    ("size", "patch", "width", "numbers"),
    [
        (224, 16, 192, ("196", "192", "208 px")),
        (224, 14, 192, ("256", "192", "182 px")),
        (64, 32, 3, ("4", "3", "no picture")),
    ],
)
def test_too_many_patches_are_refused_with_the_largest_size_that_will_do(
    size: int, patch: int, width: int, numbers: tuple[str, ...]
) -> None:
    refusal = too_few_equations(outline(size, patch, width))
    assert refusal.kind == "underdetermined"
    assert all(said in refusal.text for said in numbers)
    for width in (16, 17, 24, 25, 100):
        sizes = [s for s in range(8, 121, 8) if too_few_equations(outline(s, 8, width)) is None]
        assert f"up to {max(sizes)} px" in str(too_few_equations(outline(120, 8, width)))
