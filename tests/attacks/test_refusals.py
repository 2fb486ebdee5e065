"""Why an attack does not apply: each reason met, with its kind and the numbers that it names.

What a missing gradient, a batch of two or a model without positions does is asked of every attack
by tests/contract/test_attacks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from attacks import find_attack
from attacks.equations.patch_system import too_few_equations
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.interfaces import AttackerView, Refusal
from mjp_privacy.models.loading import outline_model
from tests.helpers.models import planted_model
from tests.helpers.planted import changed, keeping, planted_images, planted_view

Change = Callable[[AttackerView], AttackerView]
Options = Mapping[str, Any]

SMALL = {"img_size": 8}  # N = 4 patches of p = 48 pixels, width D = 96
LARGE = {"img_size": 16, "patch_size": 8, "embed_dim": 48}  # N = 4, p = 192, D = 48
WIDE = LARGE | {"embed_dim": 128}
TABLE = torch.nn.Parameter(torch.zeros(1, 1, 96))
MATCHING = ("inverting_gradients", "april_optimization", "gradvit", "span_matching")


def in_model(name: str, part: Any) -> Change:
    """The view, in whose model something else stands: in_model("blocks.0.norm1", part)."""

    def change(view: AttackerView) -> AttackerView:
        where, _, last = name.rpartition(".")
        setattr(view.model.get_submodule(where), last, part)
        return view

    return change


def with_facts(**facts: Any) -> Change:
    return lambda view: changed(view, **facts)


def unlabelled(view: AttackerView) -> AttackerView:
    return replace(keeping(view, lambda name: name != "head.bias"), labels=None)


def fresh_and_masked(view: AttackerView) -> AttackerView:
    """Two of the four positions are masked in all pictures."""
    grads = {name: sent.clone() for name, sent in view.updates[0].grads.items()}
    grads["pos_embed"][:, :, 1:3] = 0
    return changed(view, grads=grads, partners="fresh")


DIFFERENCE = {"kind": "weight_difference", "lr": 0.1}
as_sent, difference, fresh = with_facts(), with_facts(**DIFFERENCE), with_facts(partners="fresh")


@dataclass(frozen=True)
class Case:
    """An attack on an upload that it cannot read, the refusal's kind, and what its text names."""

    attack: str
    kind: str
    named: str = ""
    batch: int = 1
    model: Options = field(default_factory=dict)
    change: Change = as_sent
    options: Options = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.attack}-{self.kind}-{self.named[:30]}"


FEW = "underdetermined"
CASES = (
    *(Case(name, "labels", batch=2, model=SMALL, change=unlabelled) for name in MATCHING),
    *(Case(n, "weight_difference", model=SMALL, change=difference) for n in (*MATCHING, "april")),
    Case("inverting_gradients", "missing_gradient", change=with_facts(grads={})),
    *(
        Case("patch_gradient", "weight_difference", named, change=with_facts(**DIFFERENCE | facts))
        for named, facts in (
            ("2 AdamW steps", {"optimizer": "adamw", "steps": 2}),
            ("lion", {"optimizer": "lion"}),
            ("learning rate", {"lr": None}),
        )
    ),
    Case("april", "batch", "batch is 2", batch=2),
    Case("april", "model", "distillation", change=in_model("dist_token", TABLE)),
    Case("april", "model", "index table", change=in_model("index_embed", TABLE)),
    Case("april", FEW, "N + 1 = 65 unknowns > D = 48", model={"embed_dim": 48}),
    Case(
        *("april", "model", "bias"),
        change=in_model("patch_embed.proj.bias", None),
        options={"engine": "breaching"},
    ),
    Case("april_unk_aware", "unknown_embedding"),
    Case("pixel_lattice", "unknown_embedding"),
    Case("patch_lattice", FEW, "N = 64 patches, and a lattice of 48", options={"most": 48}),
    Case("token_span", "block", model={"first_block": "closed_form"}),
    Case("token_span", "block", change=in_model("blocks.0.norm1", torch.nn.Identity())),
    Case("token_span", "block", "ln_pre", change=in_model("norm_pre", torch.nn.LayerNorm(96))),
    Case("token_span", FEW, "N + 3 = 67 unknowns > D = 64", model={"embed_dim": 64}),
    Case("token_span", "batch", "2", batch=2),
    # N B <= 96 allows 24, N (B - 1) < 48 twelve
    Case("batch_span", FEW, "N (B - 1) = 60 differences >= p = 48", batch=16, model=SMALL),
    Case("batch_span", FEW, "N B = 128 patches > D = 96", batch=32, model=SMALL),
    Case("batch_span", FEW, "no batch of this model", batch=2),
    Case("span_matching", FEW, "N B = 128 patches", batch=32, model=SMALL),
    Case("layer_span", FEW, "50 tokens of a batch >= D = 48", 10, SMALL | {"embed_dim": 48}),
    Case("batch_lattice", FEW, "12 differences > 10", 4, LARGE, options={"most": 10}),
    Case("batch_lattice", FEW, "12 differences >= p = 12", 4, {"img_size": 4, "patch_size": 2}),
    Case("batch_lattice", FEW, "= 1 * 15", 2, LARGE | {"img_size": 32, "embed_dim": 32}),
    Case("head_features", FEW, "10 classes", batch=12),
    Case("shared_picture", "batch", "client.partners: fresh", 4, LARGE),
    Case("shared_picture", "uploads", "one", 4, LARGE, fresh, {"uploads": 1}),
    Case("shared_picture", FEW, "4 * 12 = 48 patches >= D = 48", 12, LARGE, fresh),
    # N (B - 1) = 100 of p = 192: two uploads leave 184 equations
    Case("shared_picture", FEW, "2 * (192 - 4 * 25) = 184 equations <= p", 26, WIDE, fresh),
    Case("shared_picture", FEW, "- 2 masked) = 188 equations", 25, WIDE, fresh_and_masked),
)


def refusal_of(case: Case) -> Refusal | None:
    attack, model = find_attack(case.attack, dict(case.options)), planted_model(**case.model)
    images = planted_images(max(4, case.batch), model.card.img_size)
    client = ClientConfig(batch=case.batch)
    view, _ = planted_view(model, attack, "a", images=images, client=client)
    return attack.unsupported(case.change(view))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_reason_is_given(case: Case) -> None:
    reason = refusal_of(case)
    assert reason is not None
    assert (reason.kind, case.named in reason.text) == (case.kind, True), reason.text


def test_more_uploads_tell_what_two_do_not() -> None:
    assert refusal_of(Case("shared_picture", "", "", 26, WIDE, fresh, {"uploads": 3})) is None


# the inequality that closed forms need, and the way out -------------------------------------------


def outline(size: int, patch: int, width: int) -> Any:
    shape = {"img_size": size, "patch_size": patch, "embed_dim": width}
    return outline_model(checkpoint="random", depth=1, num_heads=1, num_classes=2, **shape)


@pytest.mark.parametrize(
    ("size", "patch", "width", "extra", "numbers"),
    [
        (48, 16, 10, 0, None),
        (48, 16, 10, 1, None),
        (48, 16, 10, 2, ("= 11", "10", "block 0's", "32 px")),
        (224, 16, 192, 0, ("196", "192", "208 px")),
        (224, 14, 192, 0, ("256", "192", "182 px")),
        (64, 32, 3, 0, ("4", "3", "no picture")),
    ],
)
def test_too_many_patches_are_refused_with_the_largest_size_that_will_do(
    size: int, patch: int, width: int, extra: int, numbers: tuple[str, ...] | None
) -> None:
    refusal = too_few_equations(outline(size, patch, width), extra=extra, who="block 0's equations")
    assert (refusal is None) == (numbers is None)
    if refusal is not None and numbers is not None:
        assert refusal.kind == FEW
        assert all(said in refusal.text for said in numbers)


@pytest.mark.parametrize("width", [16, 17, 24, 25, 100])
def test_the_largest_size_is_the_largest_that_is_not_refused(width: int) -> None:
    sizes = [s for s in range(8, 121, 8) if too_few_equations(outline(s, 8, width)) is None]
    assert f"up to {max(sizes)} px" in str(too_few_equations(outline(120, 8, width)))
