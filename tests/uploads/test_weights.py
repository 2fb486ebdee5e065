"""Weights beside uploads: a file holds one model, each is stored once, and nobody's change."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.experiment.recorded import Recorded
from mjp_privacy.experiment.simulated import moved
from mjp_privacy.experiment.source import ModelVariants
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.uploads.folder import UploadFolder, group_uploads
from mjp_privacy.uploads.record import record_weights
from tests.helpers.federations import run, task
from tests.helpers.models import some_images, some_labels, tiny
from tests.helpers.runs import TINY


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 6},
        {"activation": "quick_gelu"},
        {"norm_eps": 1e-5},
        {"mean": 0.4},
        {"std": 0.3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_equal_tensors_of_another_model_are_another_file(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = UploadFolder(tmp_path)
    model, other = load_model(**TINY), load_model(**{**TINY, **changes})
    other.load_state_dict(model.state_dict())
    places = [record_weights(folder.root, each) for each in (model, other, model, other)]
    assert places[:2] == places[2:]
    assert len(set(places)) == 2 == len(list((tmp_path / "weights").iterdir()))
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for each, place in zip((model, other), places, strict=False):
        again = load_model(checkpoint=tmp_path / place)
        assert (again.card.mean, again.card.std) == (each.card.mean, each.card.std)
        assert again(again.normalize(image)).equal(each(each.normalize(image)))


def memory(model: LoadedModel) -> set[int]:
    return {parameter.data_ptr() for parameter in model.parameters()}


def weights(model: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_variants_leave_the_loaded_model_as_it_is() -> None:
    variants = ModelVariants(tiny(torch.float32), torch.device("cpu"))
    before = weights(variants.model)
    altered = [
        variants.of(block0, dtype, positions)
        for block0 in ("intact", "april_block")
        for dtype in ("float32", "float64")
        for positions in ("own", "sinusoidal")
    ]
    assert altered[0] is variants.model
    assert variants.of("april_block", "float64") is altered[6]  # each is made once
    assert all(memory(a).isdisjoint(memory(b)) for a, b in combinations(altered, 2))
    after = weights(variants.model)
    assert all(after[name].dtype == torch.float32 for name in before)
    assert all(after[name].equal(before[name]) for name in before)


def test_a_servers_step_makes_a_model_of_its_own() -> None:
    model = tiny()
    before = weights(model)
    inputs = ClientInput(some_images(2), some_labels(2), ("a", "b"))
    after = moved(FedSGDClient(model, ClientConfig(server_lr=0.1)), inputs)
    assert memory(after).isdisjoint(memory(model))
    assert all(weights(model)[name].equal(before[name]) for name in before)
    assert not after.head.weight.equal(model.head.weight)


def test_two_callers_of_a_federation_have_two_models(tmp_path: Path) -> None:
    federation = task(tmp_path)
    start = federation.initial_weights()
    zero = {name: torch.zeros_like(weight) for name, weight in start.items()}
    first = federation.with_weights(start)
    second = federation.with_weights(zero)
    assert memory(first).isdisjoint(memory(second))
    assert all(p.equal(start[name]) for name, p in first.named_parameters())
    with torch.no_grad():
        first.cls_token.fill_(9.0)
    assert not start["cls_token"].eq(9.0).any()
    assert second.cls_token.eq(0.0).all()
    assert not federation.with_weights(start).cls_token.eq(9.0).any()


def test_recorded_models_in_two_precisions_are_two(tmp_path: Path) -> None:
    recorded = run(tmp_path) / "uploads"
    (group,) = group_uploads(UploadFolder(recorded).entries())
    opened = Recorded(recorded, [group], torch.device("cpu"), {}).open(group.name)
    series = group.series[0].uploads
    assert series[0].header.weights != series[1].header.weights
    models = [opened.at(upload, dtype) for upload in series for dtype in ("float32", "float64")]
    assert [m.cls_token.dtype for m in models] == [torch.float32, torch.float64] * 2
    assert all(memory(a).isdisjoint(memory(b)) for a, b in combinations(models, 2))
    assert opened.model is models[0]
