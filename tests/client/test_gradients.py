"""The FedSGD client against plain autograd loops, and what its gradients show: class, autocast."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.breaching import UploadedParameters
from attacks.gradient_matching import _gradients_of_pixels
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FIRST_SCALE, STEPS_AT_ONCE, FedSGDClient, predict
from mjp_privacy.client.traces import HALF, label_in_gradient, rounded, shown_autocast
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.mjp_vit import with_closed_form_block
from tests.helpers.families import SIDE, checkpoint
from tests.helpers.models import some_images, some_labels, some_masks, tiny
from tests.helpers.runs import one_cell

APRIL = ["pos_embed", "blocks.0.attn.qkv.weight"]
PATCH = ["pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"]
SIMPLE = [*APRIL, *PATCH[1:], "unk_embed", "cls_token", "blocks.1.mlp.fc1.bias", "head.weight"]
MIXED = ["blocks.0.norm1.weight", "pos_embed", "norm.bias"]
MANY = STEPS_AT_ONCE + 3  # more steps than are differentiated at once
Names = Sequence[str] | None


def step_inputs(number: int, masks: Tensor | None = None) -> ClientInput:
    ids = tuple(f"image-{i}" for i in range(number))
    return ClientInput(some_images(number), some_labels(number), ids, masks)


def loss_of(model: LoadedModel, step: ClientInput, dal: float = 0.0) -> Tensor:
    """The loss of one step, written out."""
    logits = model(model.normalize(step.images.to(model.like.dtype)), step.mask)
    loss = F.cross_entropy(logits, step.labels)
    return loss + dal * model.dal_loss(step.mask) if dal else loss


def autograd_loop(
    model: LoadedModel, inputs: ClientInput, *, batch: int = 1, dal: float = 0.0
) -> dict[str, Tensor]:
    """Every parameter's gradient, (steps, *shape), by backward() after backward()."""
    steps = []
    for first in range(0, len(inputs.images), batch):
        loss = loss_of(model, inputs.part(slice(first, first + batch)), dal)
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        pairs = zip(parameters.items(), found, strict=True)
        steps.append({name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs})
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


def compared(
    model: LoadedModel, inputs: ClientInput, client: ClientConfig, names: Names, dal: float = 0.0
) -> dict[str, Tensor]:
    """The client's gradients, which are those of the loop."""
    update = FedSGDClient(model, client).update(inputs, names=names)
    assert (update.kind, update.batch) == ("gradient", client.batch)
    expected = autograd_loop(model, inputs, batch=client.batch, dal=dal)
    assert list(update.grads) == list(expected if names is None else names)
    for name, gradient in update.grads.items():
        assert not gradient.requires_grad
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12 * scale)
    return expected


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("batch", "names"),
    [(1, None), (1, APRIL), (1, PATCH), (1, MIXED), (1, ["head.bias"]), (2, None), (2, SIMPLE)],
)
def test_a_steps_gradient_is_the_mean_of_its_images(batch: int, names: Names, masked: bool) -> None:
    inputs = step_inputs(3 * batch, some_masks(3 * batch) if masked else None)
    expected = compared(tiny(unknown_embedding=True), inputs, ClientConfig(batch=batch), names)
    assert expected["pos_embed"].shape == (3, 1, 17, 24)


def test_rows_of_masked_patches_are_zero() -> None:
    masks = torch.stack([torch.zeros(16), torch.ones(16), some_masks(1)[0]]).bool()
    model, inputs = tiny(unknown_embedding=True), step_inputs(3, masks)
    compared(model, inputs, ClientConfig(), None)
    rows = compared(model, inputs, ClientConfig(), APRIL)["pos_embed"][:, 0, 1:]
    assert (rows[masks] == 0).all()
    assert (rows[~masks].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("names", [None, APRIL])
@pytest.mark.parametrize(
    ("variant", "dal", "batch", "steps"),
    [
        ({"unknown_embedding": True, "dal": "linear"}, 0.3, 1, 4),
        ({"unknown_embedding": True, "dal": "nonlinear"}, 0.3, 2, 2),
        ({"unknown_embedding": True, "dal": "pca"}, 0.3, 2, 2),
        ({"unknown_embedding": True, "dal": "linear", "depth": 1}, 0.0, 1, MANY),
        ({"unknown_embedding": True, "depth": 1}, 0.0, 1, MANY),
        ({"position_embedding": "exposed"}, 0.0, 1, 2),
        ({"position_embedding": "strict"}, 0.0, 1, 2),
        ({"index_embedding": True}, 0.0, 1, 2),
        ({"unknown_embedding": True, "index_embedding": True, "dal": "nonlinear"}, 0.0, 1, 2),
    ],
)
def test_every_variant_of_the_model_and_of_the_loss(
    variant: dict[str, Any], dal: float, batch: int, steps: int, names: Names
) -> None:
    """Localization needs both the option and a regressor; without them the regressor itself has a
    gradient of zeros, where there is one."""
    model, inputs = tiny(**variant), step_inputs(steps * batch, some_masks(steps * batch))
    wants = dal > 0 or "dal" not in variant
    client = ClientConfig(dal=wants, dal_lambda=dal, batch=batch)
    here = [n for n, _ in model.named_parameters() if names is None or n in (*names, "index_embed")]
    expected = compared(model, inputs, client, names and here, dal)
    without = autograd_loop(model, inputs, batch=batch)
    table = variant.get("position_embedding") != "strict"
    assert ("pos_embed" in expected) == table
    if table:
        assert torch.allclose(expected["pos_embed"], without["pos_embed"]) == (dal == 0)


@pytest.mark.parametrize("names", [None, APRIL])
def test_the_victim_of_the_closed_form(names: Names) -> None:
    """With what APRIL rests on: q'dq + k'dk + v'dv = sum over tokens of g z'."""
    model = with_closed_form_block(tiny(unknown_embedding=True))
    compared(model, step_inputs(3, some_masks(3)), ClientConfig(), names)
    inputs = step_inputs(3)
    sent = FedSGDClient(model).update(inputs, names=APRIL).grads
    z = model.embed(model.normalize(inputs.images)).detach()
    weight = model.blocks[0].attn.qkv.weight.detach()
    left = torch.einsum("od,noe->nde", weight, sent["blocks.0.attn.qkv.weight"])
    right = torch.einsum("nti,ntj->nij", sent["pos_embed"][:, 0], z)
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("names", [None, APRIL])
def test_the_model_is_left_as_it_was(training: bool, names: Names) -> None:
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


def test_predictions_are_the_largest_logits() -> None:
    model, inputs = tiny(torch.float32, unknown_embedding=True), step_inputs(4, some_masks(4))
    x = model.normalize(inputs.images.float())
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
        with pytest.raises(UserError, match=named):
            FedSGDClient(model, client).update(inputs, names=names)
        assert model.training


# networks of other families -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["swin", "resnet"])
def test_gradients_of_several_images_are_each_its_own(tmp_path: Path, family: str) -> None:
    model = load_model(checkpoint=checkpoint(tmp_path, family))
    ids, labels = tuple("abcd"), torch.arange(4)
    inputs = ClientInput(torch.rand(4, 3, SIDE, SIDE), labels, ids)
    sent = FedSGDClient(model, ClientConfig(batch=2)).update(inputs).grads
    for name, expected in autograd_loop(model, inputs, batch=2).items():
        if not name.startswith(("dal", "unk")):
            assert torch.allclose(sent[name], expected, atol=1e-5), name


def test_attackers_compute_a_swins_gradients_as_its_client_does(tmp_path: Path) -> None:
    """Of the true picture; and what localization adds to the loss is taken off again."""
    model = load_model(checkpoint=checkpoint(tmp_path, "swin"))
    mask, labels = torch.rand(1, 64) < 0.3, torch.tensor([3])
    inputs = ClientInput(torch.rand(1, 3, SIDE, SIDE), labels, ["x"], mask)
    alone = FedSGDClient(model).update(inputs).grads
    names = [name for name in alone if not name.startswith("dal_regressor")]
    victim = UploadedParameters(model, names, mask)
    loss = F.cross_entropy(victim(model.normalize(inputs.images)), labels)
    for name, mine in zip(names, torch.autograd.grad(loss, list(victim.parameters())), strict=True):
        assert torch.allclose(mine, alone[name][0], atol=1e-6), name
    assert torch.equal((alone["absolute_pos_embed"][0, 0] == 0).all(-1), mask[0])
    both = FedSGDClient(model, ClientConfig(dal=True, dal_lambda=100.0)).update(inputs)
    grads = {name: gradient[0] for name, gradient in both.grads.items()}
    table = alone["absolute_pos_embed"][0]
    assert not torch.allclose(grads["absolute_pos_embed"], table, atol=1e-4)
    found = _gradients_of_pixels(model, grads, both, mask)["absolute_pos_embed"]
    assert torch.allclose(found, table, atol=1e-6)


# the class that a gradient shows ------------------------------------------------------------------


def of_a_classifier(label: int, classes: int, smoothing: float = 0.0) -> dict[str, Tensor]:
    torch.manual_seed(label)
    head = nn.Linear(16, classes)
    logits, target = head(torch.randn(1, 16)), torch.tensor([label])
    loss = F.cross_entropy(logits, target, label_smoothing=smoothing)
    both = torch.autograd.grad(loss, (head.weight, head.bias))
    return {name: g[None] for name, g in zip(("head.weight", "head.bias"), both, strict=True)}


def test_every_class_is_read_off_bias_and_weight_and_none_made_up() -> None:
    for smoothing in (0.0, 0.1):
        steps = [of_a_classifier(label, 7, smoothing) for label in range(7)]
        whole = {name: torch.cat([step[name] for step in steps]) for name in steps[0]}
        for kept in ({"head.bias"}, {"head.weight"}, set(whole)):
            told = label_in_gradient({name: g for name, g in whole.items() if name in kept})
            assert told is not None
            assert told.tolist() == list(range(7))
    two = of_a_classifier(1, 2)["head.weight"]  # whose rows are alike
    of_another_loss = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    for silent in ({}, {"head.weight": two}, {"head.weight": of_another_loss}):
        assert label_in_gradient(silent) is None


# under autocast, bit for bit ----------------------------------------------------------------------

each_kind = pytest.mark.parametrize("kind", ["bf16", "fp16"])


@pytest.fixture(scope="module")
def single() -> LoadedModel:
    return tiny(unknown_embedding=True, dal="linear").float()


def inputs_of(count: int) -> ClientInput:
    inputs = step_inputs(count, some_masks(count))
    return ClientInput(inputs.images.float(), inputs.labels, inputs.image_ids, inputs.mask)


def by_hand(
    model: LoadedModel, step: ClientInput, kind: str, dal: float = 0.0, halve: bool = True
) -> dict[str, Tensor]:
    """`torch.autocast`, a backward pass scaled as GradScaler does for fp16, and the gradients
    divided by the scale, which is halved until all of them are finite."""
    scale = FIRST_SCALE if kind == "fp16" else 1.0
    while True:
        trained = copy.deepcopy(model)
        with sdpa_kernel(SDPBackend.MATH):
            with torch.autocast("cpu", HALF[kind]):
                loss = loss_of(trained, step, dal)
            (loss * scale).backward()
        grads = {n: p.grad / scale for n, p in trained.named_parameters() if p.grad is not None}
        if not halve or all(bool(grad.isfinite().all()) for grad in grads.values()):
            return grads
        scale /= 2


@each_kind
@pytest.mark.parametrize(("batch", "dal"), [(1, 0.0), (3, 0.0), (1, 0.5)])
def test_uploads_are_those_of_a_plain_loop(
    single: LoadedModel, kind: Any, batch: int, dal: float
) -> None:
    """Also where only some parameters are asked for, and with DAL in the loss."""
    inputs = inputs_of(2 * batch)
    client = ClientConfig(autocast=kind, batch=batch, dal=dal > 0, dal_lambda=dal)
    update = make_upload(single, [inputs], client)
    some = FedSGDClient(single, client).gradients(inputs, names=SIMPLE)
    assert update.autocast == kind
    for place in range(2):
        step = inputs.part(slice(place * batch, (place + 1) * batch))
        expected = by_hand(single, step, kind, dal)
        assert len(expected) > 20
        for name, gradient in expected.items():
            assert update.grads[name][place].equal(gradient), name
            assert name not in some or some[name][place].equal(gradient), name


@each_kind
def test_local_steps_under_autocast(single: LoadedModel, kind: Any) -> None:
    """Two steps of torch's SGD on weights that stay in float32."""
    client = ClientConfig(autocast=kind, upload="weight_difference", steps=2, lr=0.1)
    sent = make_upload(single, [inputs_of(1)] * 2, client).grads
    trained = copy.deepcopy(single)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(2):
        grads = by_hand(trained, inputs_of(1), kind)
        for name, parameter in trained.named_parameters():
            parameter.grad = grads.get(name)
        optimizer.step()
    after = dict(trained.named_parameters())
    for name, before in single.named_parameters():
        assert torch.allclose(sent[name][0], after[name] - before, rtol=0, atol=1e-7), name


@pytest.mark.parametrize("factor", [300, 1e9])
def test_the_loss_scale_is_halved_where_half_precision_ends(factor: float) -> None:
    """A head with large weights makes gradients that overflow; no scale brings in the largest."""
    model = tiny(unknown_embedding=True).float()
    with torch.no_grad():
        model.head.weight.mul_(factor)
    first = by_hand(model, inputs_of(1), "fp16", halve=False)
    assert not all(bool(grad.isfinite().all()) for grad in first.values())
    if factor > 300:
        with pytest.raises(UserError, match="autocast"):
            make_upload(model, [inputs_of(1)], ClientConfig(autocast="fp16"))
        return
    sent = make_upload(model, [inputs_of(1)], ClientConfig(autocast="fp16")).grads
    assert all(bool(gradient.isfinite().all()) for gradient in sent.values())


def test_float64_beside_autocast_is_refused() -> None:
    fields = {"dtypes": ["float32", "float64"], "client": {"autocast": "bf16"}}
    with pytest.raises(UserError, match="autocast"):
        load_experiment(one_cell() | fields)


@each_kind
def test_gradients_show_the_autocast_that_made_them(single: LoadedModel, kind: Any) -> None:
    sent = make_upload(single, [inputs_of(1)], ClientConfig(autocast=kind)).grads
    plain = make_upload(single, [inputs_of(1)], ClientConfig()).grads
    afterwards = {name: g.to(HALF[kind]).float() for name, g in sent.items()}
    without_table = {name: g for name, g in sent.items() if name != "pos_embed"}
    assert shown_autocast(sent) == kind
    assert {shown_autocast(of) for of in (plain, afterwards, without_table)} == {"none"}
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert rounded(values, HALF[kind]).equal(values.to(HALF[kind]).double())
    small = values * 2.0**-40  # below the numbers of float16
    assert rounded(small, HALF[kind]).equal(rounded(values, HALF[kind]) * 2.0**-40)
