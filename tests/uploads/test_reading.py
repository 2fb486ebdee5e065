"""Gradients in every form that users have them, and the words for those that cannot be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel
from mjp_privacy.uploads.reading import read_gradients, separate_uploads
from tests.helpers.models import some_images, some_labels, tiny


@pytest.fixture
def model() -> LoadedModel:
    return tiny(torch.float32)


def step(model: LoadedModel) -> dict[str, Tensor]:
    """The gradient of one image, by name, also left in .grad."""
    model.zero_grad()
    x = model.normalize(some_images(1).float())
    nn.functional.cross_entropy(model(x), some_labels(1)).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_every_form_reads_the_same(model: LoadedModel) -> None:
    by_name = step(model)
    forms: dict[str, Any] = {
        "dictionary": by_name,
        "leading axis": {name: g.unsqueeze(0) for name, g in by_name.items()},
        "module.": {f"module.{name}": g for name, g in by_name.items()},
        "_orig_mod.module.": {f"_orig_mod.module.{name}": g for name, g in by_name.items()},
        "parameter order": [p.grad for p in model.parameters()],
        "NumPy": {name: g.numpy() for name, g in by_name.items()},
        "model": model,
        ".grad": None,
        "pairs": [(name, p.grad) for name, p in model.named_parameters()],
        "big-endian NumPy": {name: g.numpy().astype(">f4") for name, g in by_name.items()},
        "with None": {**by_name, "head.bias": None, "cls_token": None},
    }
    expected = read_gradients(by_name, model, model)
    assert set(expected) == set(by_name)
    for form, held in forms.items():
        (held,) = separate_uploads(held)
        read = read_gradients(held, model, model)
        assert all(torch.equal(read[name], by_name[name].unsqueeze(0)) for name in read), form
        assert len(read) == len(by_name) - (2 if form == "with None" else 0), form


def test_a_list_may_leave_out_frozen_parameters(model: LoadedModel) -> None:
    by_name = step(model)
    model.cls_token.requires_grad_(False)
    values = [g for name, g in by_name.items() if name != "cls_token"]
    read = read_gradients(values, model, model)
    assert set(read) == set(by_name) - {"cls_token"}
    assert torch.equal(read["head.bias"][0], by_name["head.bias"])


def test_wrapped_models_are_read_by_their_own_names(model: LoadedModel) -> None:
    by_name = step(model)
    wrapped = nn.DataParallel(model)
    read = read_gradients(None, wrapped, model)
    assert all(torch.equal(read[name][0], g) for name, g in by_name.items())


def test_several_uploads_are_told_from_one_list(model: LoadedModel) -> None:
    one = step(model)
    assert separate_uploads(one) == [one]
    assert len(separate_uploads([one, one])) == 2
    assert len(separate_uploads(list(one.values()))) == 1
    assert len(separate_uploads([list(one.values())] * 3)) == 3
    assert len(separate_uploads(g for g in one.values())) == 1


def changed(model: LoadedModel, **entries: Any) -> dict[str, Any]:
    return {**step(model), **{name.replace("__", "."): value for name, value in entries.items()}}


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"head__weight": torch.ones(3, 24)}, r"head\.weight .*\(3, 24\).*\(5, 24\)"),
    "unknown name": ({"hed__bias": torch.ones(5)}, r"hed\.bias.*head\.bias"),
    "mixed axes": ({"head__bias": torch.ones(2, 5)}, r"head\.bias"),
}
"""Entries, and what the refusal names; `test_bad_objects.py` has values of every other type."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_entry_is_named(model: LoadedModel, mistake: str) -> None:
    entries, words = MISTAKES[mistake]
    with pytest.raises(UserError, match=words):
        read_gradients(changed(model, **entries), model, model)


def test_weights_in_place_of_gradients_are_refused(model: LoadedModel) -> None:
    with pytest.raises(UserError, match="weights"):
        read_gradients(dict(model.named_parameters()), model, model)


def test_a_classifier_of_zeros_passes_nothing_back(model: LoadedModel) -> None:
    """torchvision's fresh ViT has such a classifier."""
    with torch.no_grad():
        model.head.weight.zero_()  # type: ignore[union-attr]
    with pytest.raises(UserError, match="classifier"):
        read_gradients(step(model), model, model)
