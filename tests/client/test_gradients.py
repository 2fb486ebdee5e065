"""The FedSGD client against plain autograd loops, and what its gradients show: class, autocast."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FIRST_SCALE, HALF, STEPS_AT_ONCE, FedSGDClient
from mjp_privacy.client.upload import label_in_gradient, make_upload, rounded, shown_autocast
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import LoadedModel
from tests.helpers.models import some_images, some_labels, some_masks, tiny

APRIL = ["pos_embed", "blocks.0.attn.qkv.weight"]
PATCH = ["pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"]
SIMPLE = [*APRIL, *PATCH[1:], "unk_embed", "cls_token", "blocks.1.mlp.fc1.bias", "head.weight"]
MIXED = ["blocks.0.norm1.weight", "pos_embed", "norm.bias"]
MANY = STEPS_AT_ONCE + 3  # more steps than are differentiated at once
MJP = {"unknown_embedding": True}
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


@pytest.mark.parametrize(
    ("variant", "dal", "batch", "steps", "names", "masked"),
    [
        *((MJP, 0.0, 1, 3, names, True) for names in (None, APRIL, PATCH, MIXED, ["head.bias"])),
        *((MJP, 0.0, 2, 3, names, True) for names in (None, SIMPLE)),
        *((MJP, 0.0, *case, False) for case in ((1, 3, None), (2, 3, SIMPLE))),
        *((MJP | {"first_block": "closed_form"}, 0.0, 1, 3, n, True) for n in (None, APRIL)),
        *((MJP | {"dal": "linear"}, 0.3, 1, 4, names, True) for names in (None, APRIL)),
        *((MJP | {"dal": kind}, 0.3, 2, 2, None, True) for kind in ("nonlinear", "pca")),
        (MJP | {"dal": "linear", "depth": 1}, 0.0, 1, MANY, None, True),
        (MJP | {"depth": 1}, 0.0, 1, MANY, APRIL, True),
        (MJP | {"index_embedding": True, "dal": "nonlinear"}, 0.0, 1, 2, None, True),
        *(({"position_embedding": kind}, 0.0, 1, 2, None, False) for kind in ("exposed", "strict")),
    ],
)
def test_a_steps_gradient_is_the_mean_of_its_images(
    variant: dict[str, Any], dal: float, batch: int, steps: int, names: Names, masked: bool
) -> None:
    """Localization needs both the option and a regressor; without them the regressor itself has a
    gradient of zeros, where there is one."""
    model = tiny(**variant)
    inputs = step_inputs(steps * batch, some_masks(steps * batch) if masked else None)
    client = ClientConfig(dal=dal > 0 or "dal" not in variant, dal_lambda=dal, batch=batch)
    update = make_upload(model, [inputs], client, names=names)
    assert (update.kind, update.batch) == ("gradient", batch)
    expected = autograd_loop(model, inputs, batch=batch, dal=dal)
    assert list(update.grads) == list(expected if names is None else names)
    for name, gradient in update.grads.items():
        assert not gradient.requires_grad
        assert len(gradient) == steps
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12 * scale)
    if dal:
        without = autograd_loop(model, inputs, batch=batch)["pos_embed"]
        assert not torch.allclose(expected["pos_embed"], without)


@pytest.mark.parametrize(
    ("client", "inputs", "names", "named"),
    [
        ({}, step_inputs(2, torch.zeros(2, 9).bool()), APRIL, "mask"),
        ({}, step_inputs(1), ["cls_token", "pos_embd"], "pos_embed"),
        ({"withhold": ("head.wieght",)}, step_inputs(1), None, "head.weight"),
        ({"batch": 2}, step_inputs(3), None, "client.batch"),
    ],
)
def test_mistakes_are_named_and_leave_the_training_flag(
    client: dict[str, Any], inputs: ClientInput, names: Names, named: str
) -> None:
    model = tiny(**MJP).train()
    with pytest.raises(UserError, match=named):
        make_upload(model, [inputs], ClientConfig(**client), names=names)
    assert model.training


# the class that a gradient shows ------------------------------------------------------------------


def of_a_classifier(label: int, classes: int, smoothing: float = 0.0) -> dict[str, Tensor]:
    torch.manual_seed(label)
    head = nn.Linear(16, classes)
    logits, target = head(torch.randn(1, 16)), torch.tensor([label])
    F.cross_entropy(logits, target, label_smoothing=smoothing).backward()
    return {"head.weight": head.weight.grad[None], "head.bias": head.bias.grad[None]}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kept", ["head.bias", "head.weight"])
def test_every_class_is_read_off_bias_or_weight(smoothing: float, kept: str) -> None:
    steps = [of_a_classifier(label, 7, smoothing) for label in range(7)]
    told = label_in_gradient({kept: torch.cat([step[kept] for step in steps])})
    assert told.tolist() == list(range(7))


def test_a_class_that_noise_hides_in_the_bias_is_read_off_both() -> None:
    step, generator, right = of_a_classifier(4, 40), torch.Generator().manual_seed(1), [0, 0]
    for _ in range(40):
        noisy = {n: g + 0.4 * torch.randn(g.shape, generator=generator) for n, g in step.items()}
        for place, sent in enumerate((noisy, {"head.bias": noisy["head.bias"]})):
            right[place] += int(label_in_gradient(sent)) == 4
    assert right[0] > 36
    assert right[1] < 30


def test_no_class_is_made_up() -> None:
    two = of_a_classifier(1, 2)["head.weight"]  # whose rows are alike
    of_another_loss = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    for silent in ({}, {"head.weight": two}, {"head.weight": of_another_loss}):
        assert label_in_gradient(silent) is None


# under autocast, bit for bit ----------------------------------------------------------------------

each_kind = pytest.mark.parametrize("kind", ["bf16", "fp16"])


@pytest.fixture(scope="module")
def single() -> LoadedModel:
    return tiny(**MJP, dal="linear").float()


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
@pytest.mark.parametrize(("batch", "dal"), [(1, 0.5), (3, 0.0)])
def test_uploads_are_those_of_a_plain_loop(
    single: LoadedModel, kind: Any, batch: int, dal: float
) -> None:
    """Also where only some parameters are asked for, and with DAL in the loss."""
    inputs = step_inputs(2 * batch, some_masks(2 * batch))
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


@pytest.mark.parametrize("factor", [300, 1e9])
def test_the_loss_scale_is_halved_where_half_precision_ends(factor: float) -> None:
    """A head with large weights makes gradients that overflow; no scale brings in the largest."""
    model, client = tiny(**MJP).float(), ClientConfig(autocast="fp16")
    with torch.no_grad():
        model.head.weight.mul_(factor)
    inputs = step_inputs(1, some_masks(1))
    first = by_hand(model, inputs, "fp16", halve=False)
    assert not all(bool(grad.isfinite().all()) for grad in first.values())
    if factor > 300:
        with pytest.raises(UserError, match="autocast"):
            make_upload(model, [inputs], client)
        return
    sent = make_upload(model, [inputs], client).grads
    assert all(bool(gradient.isfinite().all()) for gradient in sent.values())


@each_kind
def test_gradients_show_the_autocast_that_made_them(single: LoadedModel, kind: Any) -> None:
    sent, plain = (
        make_upload(single, [step_inputs(1, some_masks(1))], ClientConfig(autocast=autocast)).grads
        for autocast in (kind, "none")
    )
    afterwards = {name: g.to(HALF[kind]).float() for name, g in sent.items()}
    without_table = {name: g for name, g in sent.items() if name != "pos_embed"}
    assert shown_autocast(sent) == kind
    assert {shown_autocast(of) for of in (plain, afterwards, without_table)} == {"none"}
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert rounded(values, HALF[kind]).equal(values.to(HALF[kind]).double())
    small = values * 2.0**-40  # below the numbers of float16
    assert rounded(small, HALF[kind]).equal(rounded(values, HALF[kind]) * 2.0**-40)
