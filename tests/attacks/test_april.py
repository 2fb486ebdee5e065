"""APRIL's options, what it refuses and in which words, and what it tells about a system."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attacks import find_attack
from attacks.april import QKV, TABLE, UNKNOWN, April, UnknownAwareApril
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, Refusal
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_view


def view_of(attack: April | UnknownAwareApril, setting: str = "a", **model: object) -> AttackerView:
    view, _ = planted_view(planted_model(**model), attack, setting)
    return view


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (April, "april: engine is 'batched' or 'breaching', got 'quick'"),
        (UnknownAwareApril, "batched engine only: expected engine 'batched', got 'quick'"),
    ],
)
def test_an_engine_that_nobody_knows(attack: type, said: str) -> None:
    with pytest.raises(UserError, match=said):
        attack(engine="quick")


def test_attacks_with_equal_options_are_equal_also_when_one_was_run() -> None:
    used = April()
    view = view_of(used)
    used.run(view, generator=torch.Generator())
    assert used == April()
    assert used != April(engine="breaching")
    assert repr(used) == "April(engine='batched')"
    assert used.attacker(view.model) is used.attacker(view.model)
    assert April().attacker(view.model) is not used.attacker(view.model)
    with pytest.raises(TypeError):
        April("batched", {})  # type: ignore[call-arg]


def test_breaching_needs_a_bias() -> None:
    view = view_of(April())
    view.model.patch_embed.proj.bias = None
    refusal = April(engine="breaching").unsupported(view)
    text = "breaching's own code needs a bias in the patch embedding; batched does not"
    assert refusal == Refusal("model", text)
    assert April().unsupported(view) is None


def test_what_is_not_in_the_upload_is_named() -> None:
    view = view_of(April())
    update = view.updates[0]
    bare = replace(view, updates=[replace(update, grads={TABLE: update.grads[TABLE]})])
    assert April().unsupported(bare) == Refusal(
        "missing_gradient", f"the upload holds no gradient of {QKV}"
    )
    for change, kind, said in (
        ({"batch": 3}, "batch", "APRIL is for batch 1; the client's batch is 3"),
        ({"kind": "weight_difference"}, "weight_difference", "the upload is a weight difference"),
    ):
        refusal = April().unsupported(replace(view, updates=[replace(update, **change)]))
        assert refusal is not None
        assert refusal.kind == kind
        assert said in refusal.text


@pytest.mark.parametrize(
    ("name", "said"), [("dist_token", "a distillation token"), ("index_embed", "an index table")]
)
def test_tables_that_the_equations_leave_out_are_refused(name: str, said: str) -> None:
    view = view_of(April())
    assert April().unsupported(view) is None
    setattr(view.model, name, torch.nn.Parameter(torch.zeros(1, 1, 96)))
    refusal = April().unsupported(view)
    assert refusal is not None
    assert refusal.kind == "model"
    assert said in refusal.text


def test_the_aware_one_needs_an_unknown_embedding() -> None:
    aware = UnknownAwareApril()
    plain, masks = (planted_model(unknown_embedding=has) for has in (False, True))
    assert aware.needs(plain) == (TABLE, QKV)
    assert aware.needs(masks) == (TABLE, QKV, UNKNOWN)
    view, _ = planted_view(plain, April(), "a")
    assert aware.unsupported(view) == Refusal(
        "unknown_embedding", "the model has no unknown embedding"
    )


def test_the_aware_one_counts_and_finds_the_masked_patches() -> None:
    aware = find_attack("april_unk_aware")
    view, inputs = planted_view(
        planted_model(unknown_embedding=True), aware, "b", client=ClientConfig()
    )
    found = aware.run(view, generator=torch.Generator())
    assert torch.equal(found.mask, inputs.mask)
    assert found.diagnostics["zero_rows"].tolist() == inputs.mask.sum(-1).tolist()
