"""The FedSGD client against a plain autograd loop; the labels that its gradients show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import STEPS_AT_ONCE, FedSGDClient, predict
from mjp_privacy.client.traces import label_in_gradient
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.mjp_vit import with_closed_form_block
from mjp_privacy.uploads.header import UploadHeader
from mjp_privacy.uploads.record import Upload
from tests.helpers.families import SIDE, checkpoint
from tests.helpers.models import some_images, some_labels, some_masks, tiny

APRIL = ["pos_embed", "blocks.0.attn.qkv.weight"]
PATCH = ["pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"]
SIMPLE = [*APRIL, *PATCH[1:], "unk_embed", "cls_token", "blocks.1.mlp.fc1.bias", "head.weight"]
MIXED = ["blocks.0.norm1.weight", "pos_embed", "norm.bias"]


def step_inputs(number: int, masks: Tensor | None = None) -> ClientInput:
    ids = tuple(f"image-{i}" for i in range(number))
    return ClientInput(some_images(number), some_labels(number), ids, masks)


def autograd_loop(
    model: LoadedModel, inputs: ClientInput, *, batch: int = 1, dal: float = 0.0
) -> dict[str, Tensor]:
    """Every parameter's gradient, (steps, *shape), by backward() after backward()."""
    steps = []
    for first in range(0, len(inputs.images), batch):
        own = slice(first, first + batch)
        mask = None if inputs.mask is None else inputs.mask[own]
        images = inputs.images[own].to(model.cls_token.dtype)
        loss = nn.functional.cross_entropy(model(model.normalize(images), mask), inputs.labels[own])
        if dal:
            loss = loss + dal * model.dal_loss(mask)
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        pairs = zip(parameters.items(), found, strict=True)
        steps.append({name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs})
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


def assert_same(found: Any, expected: dict[str, Tensor], names: Sequence[str] | None) -> None:
    assert list(found) == list(expected if names is None else names)
    for name, gradient in found.items():
        assert not gradient.requires_grad
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12 * scale)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("names", [None, APRIL, PATCH, SIMPLE, MIXED, ["head.bias"]])
def test_gradients_of_single_images(masked: bool, names: list[str] | None) -> None:
    model = tiny(unknown_embedding=True)
    inputs = step_inputs(3, some_masks(3) if masked else None)
    update = FedSGDClient(model).update(inputs, names=names)
    assert_same(update.grads, autograd_loop(model, inputs), names)
    assert (update.kind, update.batch, update.dtype) == ("gradient", 1, torch.float64)


@pytest.mark.parametrize("names", [None, SIMPLE])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_a_batch_are_the_mean_of_its_images(
    names: list[str] | None, masked: bool
) -> None:
    model = tiny(unknown_embedding=True)
    inputs = step_inputs(6, some_masks(6) if masked else None)
    update = FedSGDClient(model, ClientConfig(batch=2)).update(inputs, names=names)
    expected = autograd_loop(model, inputs, batch=2)
    assert expected["pos_embed"].shape == (3, 1, 17, 24)
    assert_same(update.grads, expected, names)
    assert update.batch == 2


@pytest.mark.parametrize("names", [APRIL, None])
def test_empty_and_full_masks(names: list[str] | None) -> None:
    model = tiny(unknown_embedding=True)
    masks = torch.stack([torch.zeros(16), torch.ones(16), some_masks(1)[0]]).bool()
    inputs = step_inputs(3, masks)
    found = FedSGDClient(model).update(inputs, names=names).grads
    assert_same(found, autograd_loop(model, inputs), names)
    assert (found["pos_embed"][:, 0, 1:][masks] == 0).all()
    assert (found["pos_embed"][:, 0, 1:][~masks].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("kind", ["linear", "nonlinear", "pca"])
@pytest.mark.parametrize("names", [None, APRIL])
@pytest.mark.parametrize("batch", [1, 2])
def test_localization_in_the_loss(kind: str, names: list[str] | None, batch: int) -> None:
    model = tiny(unknown_embedding=True, dal=kind)
    inputs = step_inputs(4, some_masks(4))
    config = ClientConfig(dal=True, dal_lambda=0.3, batch=batch)
    found = FedSGDClient(model, config).update(inputs, names=names).grads
    assert_same(found, autograd_loop(model, inputs, batch=batch, dal=0.3), names)
    without = autograd_loop(model, inputs, batch=batch)
    assert not torch.allclose(found["pos_embed"], without["pos_embed"])


@pytest.mark.parametrize(
    "variant",
    [
        {"position_embedding": "exposed"},
        {"position_embedding": "strict"},
        {"index_embedding": True},
        {"unknown_embedding": True, "index_embedding": True, "dal": "nonlinear"},
    ],
)
def test_every_variant_of_the_model(variant: dict[str, Any]) -> None:
    model, inputs = tiny(**variant), step_inputs(2, some_masks(2))
    expected = autograd_loop(model, inputs)
    assert_same(FedSGDClient(model).update(inputs).grads, expected, None)
    tables = [name for name in ("pos_embed", "index_embed", "unk_embed") if name in expected]
    assert_same(FedSGDClient(model).update(inputs, names=tables).grads, expected, tables)
    assert ("pos_embed" in expected) == (variant.get("position_embedding") != "strict")
    assert all(expected[name].any() for name in tables)


@pytest.mark.parametrize("names", [None, APRIL])
def test_the_victim_of_the_closed_form(names: list[str] | None) -> None:
    model = with_closed_form_block(tiny(unknown_embedding=True))
    inputs = step_inputs(3, some_masks(3))
    found = FedSGDClient(model).update(inputs, names=names).grads
    expected = autograd_loop(model, inputs)
    assert_same(found, expected, names)
    # What APRIL rests on: q'dq + k'dk + v'dv = sum over tokens of g z'.
    weight = model.blocks[0].attn.qkv.weight.detach()
    first = FedSGDClient(model).update(step_inputs(3), names=APRIL).grads
    z = model.embed(model.normalize(inputs.images)).detach()
    left = torch.einsum("od,noe->nde", weight, first["blocks.0.attn.qkv.weight"])
    right = torch.einsum("nti,ntj->nij", first["pos_embed"][:, 0], z)
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("given", [{"dal": "linear"}, {"dal": "none"}])
def test_localization_needs_both_the_option_and_a_regressor(given: dict[str, str]) -> None:
    """Without them the regressor itself has a gradient of zeros, where there is one."""
    model, number = tiny(unknown_embedding=True, depth=1, **given), STEPS_AT_ONCE + 3
    config = ClientConfig(dal=given["dal"] == "none")
    inputs = step_inputs(number, some_masks(number))  # more than are differentiated at once
    expected = autograd_loop(model, inputs)
    for names in (None, APRIL):
        found = FedSGDClient(model, config).update(inputs, names=names).grads
        assert_same(found, expected, names)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("names", [None, APRIL])
def test_the_model_is_left_as_it_was(training: bool, names: list[str] | None) -> None:
    """Its weights, its mode and its hooks; while it computes it is in the client's mode."""
    model, seen = tiny(unknown_embedding=True).train(training), []
    watch = model.blocks[0].register_forward_pre_hook(
        lambda module, _: seen.append(module.training)
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for mode in ("eval", "train"):
        seen.clear()
        client = FedSGDClient(model, ClientConfig(mode=mode))  # type: ignore[arg-type]
        client.update(step_inputs(1), names=names)
        assert set(seen) == {mode == "train"}
        assert {module.training for module in model.modules()} == {training}
    watch.remove()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not [hook for m in model.modules() for hook in m._forward_hooks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predictions_are_the_largest_logits(dtype: torch.dtype) -> None:
    model, inputs = tiny(dtype, unknown_embedding=True), step_inputs(4, some_masks(4))
    x = model.normalize(inputs.images.to(dtype))
    assert torch.equal(predict(model, inputs.images, inputs.mask), model(x, inputs.mask).argmax(-1))
    assert torch.equal(predict(model, inputs.images, None), model(x).argmax(-1))


def test_mistakes_are_named_and_leave_the_training_flag() -> None:
    model = tiny(unknown_embedding=True).train()
    withheld = ClientConfig(withhold=("patch_embed.proj.wieght",))
    for client, inputs, names, named in (
        (ClientConfig(), step_inputs(2, torch.zeros(2, 9).bool()), APRIL, "mask"),
        (ClientConfig(), step_inputs(1), ["cls_token", "pos_embd"], "pos_embed"),
        (withheld, step_inputs(1), None, "patch_embed.proj.weight"),
        (ClientConfig(batch=2), step_inputs(3), None, "client.batch"),
    ):
        with pytest.raises(UserError) as caught:
            FedSGDClient(model, client).update(inputs, names=names)
        assert named in str(caught.value)
        assert model.training


@pytest.fixture(params=["swin", "resnet"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_true_picture_has_no_distance(tmp_path: Path) -> None:
    """The gradient that the attacker computes of the true picture is the uploaded one."""
    from attacks.breaching import UploadedParameters

    model = load_model(checkpoint=checkpoint(tmp_path, "swin"))
    x, labels = torch.rand(1, 3, SIDE, SIDE), torch.tensor([3])
    mask = torch.rand(1, 64) < 0.3
    inputs = ClientInput(x, labels, ["x"], mask)
    sent = FedSGDClient(model).update(inputs).grads
    names = [name for name in sent if not name.startswith("dal_regressor")]
    victim = UploadedParameters(model, names, mask)
    loss = F.cross_entropy(victim(model.normalize(x)), labels)
    for name, mine in zip(names, torch.autograd.grad(loss, list(victim.parameters())), strict=True):
        assert torch.allclose(mine, sent[name][0], atol=1e-6), name
    hidden = (sent["absolute_pos_embed"][0, 0] == 0).all(-1)
    assert torch.equal(hidden, mask[0])


def test_the_pixels_gradient_is_found_beside_localization(tmp_path: Path) -> None:
    from attacks.gradient_matching import _gradients_of_pixels

    model = load_model(checkpoint=checkpoint(tmp_path, "swin"))
    mask = torch.rand(1, 64) < 0.3
    inputs = ClientInput(torch.rand(1, 3, SIDE, SIDE), torch.tensor([3]), ["x"], mask)
    both = FedSGDClient(model, ClientConfig(dal=True, dal_lambda=100.0)).update(inputs)
    alone = FedSGDClient(model).update(inputs).grads["absolute_pos_embed"][0]
    grads = {name: gradient[0] for name, gradient in both.grads.items()}
    assert not torch.allclose(grads["absolute_pos_embed"], alone, atol=1e-4)
    found = _gradients_of_pixels(model, grads, both, mask)["absolute_pos_embed"]
    assert torch.allclose(found, alone, atol=1e-6)


def test_gradients_of_several_images_are_each_its_own(tmp_path: Path, family: str) -> None:
    model = load_model(checkpoint=checkpoint(tmp_path, family))
    x, labels = torch.rand(4, 3, SIDE, SIDE), torch.tensor([0, 1, 2, 3])
    client = FedSGDClient(model, ClientConfig(batch=2))
    sent = client.update(ClientInput(x, labels, list("abcd"))).grads
    parameters = [p for n, p in model.named_parameters() if not n.startswith(("dal", "unk"))]
    names = [n for n, _ in model.named_parameters() if not n.startswith(("dal", "unk"))]
    for step in range(2):
        part = slice(2 * step, 2 * step + 2)
        loss = F.cross_entropy(model(model.normalize(x[part])), labels[part])
        for name, mine in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            assert torch.allclose(mine, sent[name][step], atol=1e-5), name


def test_recorded_uploads_are_of_plain_vits(tmp_path: Path) -> None:
    half = (0.5, 0.5, 0.5)
    weights = checkpoint(tmp_path, "swin")
    upload = Upload(weights.parent, "one", UploadHeader("one", weights.name, half, half))
    for load in (Upload.model, Upload.outline):
        with pytest.raises(UserError, match="swin"):
            load(upload)


def classifier_gradient(
    label: int, classes: int, bias: bool, smoothing: float = 0.0
) -> dict[str, Tensor]:
    torch.manual_seed(label)
    head = nn.Linear(16, classes, bias=bias)
    loss = nn.functional.cross_entropy(
        head(torch.randn(1, 16)), torch.tensor([label]), label_smoothing=smoothing
    )
    loss.backward()
    return {
        f"head.{n}": p.grad.unsqueeze(0) for n, p in head.named_parameters() if p.grad is not None
    }


def test_every_class_is_read_off_bias_and_weight() -> None:
    steps = [classifier_gradient(label, 7, bias=True) for label in range(7)]
    whole = {name: torch.cat([step[name] for step in steps]) for name in steps[0]}
    smoothed = [classifier_gradient(label, 7, bias=False, smoothing=0.1) for label in range(7)]
    softer = {"head.weight": torch.cat([step["head.weight"] for step in smoothed])}
    for grads in (whole, {"head.weight": whole["head.weight"]}, softer):
        told = label_in_gradient(grads)
        assert told is not None
        assert told.tolist() == list(range(7))


def test_what_shows_no_class_is_unknown() -> None:
    assert label_in_gradient({}) is None
    assert label_in_gradient(classifier_gradient(1, 2, bias=False)) is None  # both rows are alike
    torch.manual_seed(0)
    assert label_in_gradient({"head.weight": torch.randn(1, 7, 16)}) is None  # of another loss
