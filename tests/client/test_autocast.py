"""A client under autocast against a plain loop as a user would write it, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FIRST_SCALE, FedSGDClient
from mjp_privacy.client.traces import HALF, rounded, shown_autocast
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import LoadedModel
from tests.helpers.models import some_images, some_labels, some_masks
from tests.helpers.models import tiny as tiny_model
from tests.helpers.runs import one_cell

NAMES = ["pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "unk_embed"]
each_kind = pytest.mark.parametrize("kind", ["bf16", "fp16"])


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(unknown_embedding=True, dal="linear").float()


def inputs_of(count: int) -> ClientInput:
    ids = tuple(f"image {place}" for place in range(count))
    return ClientInput(some_images(count).float(), some_labels(count), ids, some_masks(count))


def loss_of(model: LoadedModel, step: ClientInput, dal_lambda: float) -> Tensor:
    """The loss of one step, written out."""
    logits = model(model.normalize(step.images), step.mask)
    loss = nn.functional.cross_entropy(logits, step.labels)
    return loss + dal_lambda * model.dal_loss(step.mask) if dal_lambda else loss


def plain_loop(
    model: LoadedModel, step: ClientInput, kind: str, scale: float, dal_lambda: float = 0.0
) -> dict[str, Tensor]:
    """`torch.autocast`, a scaled backward pass, and the gradients divided by the scale."""
    model = copy.deepcopy(model)
    with sdpa_kernel(SDPBackend.MATH):
        with torch.autocast("cpu", HALF[kind]):
            loss = loss_of(model, step, dal_lambda)
        (loss * scale).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad / scale for name, grad in grads.items()}


def by_hand(model: LoadedModel, step: ClientInput, kind: str, **options: Any) -> dict[str, Tensor]:
    """The plain loop, with GradScaler's scale for fp16: halved until all gradients are finite."""
    scale = FIRST_SCALE if kind == "fp16" else 1.0
    while True:
        grads = plain_loop(model, step, kind, scale, **options)
        if all(bool(grad.isfinite().all()) for grad in grads.values()):
            return grads
        scale /= 2


@each_kind
@pytest.mark.parametrize(("batch", "dal"), [(1, 0.0), (3, 0.0), (1, 0.5)])
def test_uploads_are_those_of_a_plain_loop_bit_for_bit(
    model: LoadedModel, kind: Any, batch: int, dal: float
) -> None:
    """Also where only some parameters are asked for, and with DAL in the loss."""
    inputs = inputs_of(2 * batch)
    client = ClientConfig(autocast=kind, batch=batch, dal=dal > 0, dal_lambda=dal)
    update = make_upload(model, [inputs], client)
    some = FedSGDClient(model, client).gradients(inputs, names=NAMES)
    assert update.autocast == kind
    for place in range(2):
        step = inputs.part(slice(place * batch, (place + 1) * batch))
        expected = by_hand(model, step, kind, dal_lambda=dal)
        assert len(expected) > 20
        for name, gradient in expected.items():
            assert update.grads[name].dtype == torch.float32
            assert update.grads[name][place].equal(gradient), name
            assert name not in some or some[name][place].equal(gradient), name


@each_kind
def test_local_steps(model: LoadedModel, kind: Any) -> None:
    """Two steps of torch's SGD on weights that stay in float32."""
    client = ClientConfig(autocast=kind, upload="weight_difference", steps=2, lr=0.1)
    sent = make_upload(model, [inputs_of(1)] * 2, client).grads
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(2):
        grads = by_hand(trained, inputs_of(1), kind)
        for name, parameter in trained.named_parameters():
            parameter.grad = grads.get(name)
        optimizer.step()
    after = dict(trained.named_parameters())
    for name, before in model.named_parameters():
        assert torch.allclose(sent[name][0], after[name] - before, rtol=0, atol=1e-7), name


def test_the_loss_scale_is_halved_where_half_precision_ends() -> None:
    """A head with large weights makes gradients that overflow with GradScaler's first scale."""
    model = tiny_model(unknown_embedding=True).float()
    with torch.no_grad():
        model.head.weight.mul_(300)
    client = ClientConfig(autocast="fp16")
    first = plain_loop(model, inputs_of(1), "fp16", FIRST_SCALE)
    assert not all(bool(grad.isfinite().all()) for grad in first.values())
    sent = make_upload(model, [inputs_of(1)], client).grads
    assert all(bool(gradient.isfinite().all()) for gradient in sent.values())


def test_numbers_that_no_scale_brings_into_half_precision_are_refused() -> None:
    model = tiny_model(unknown_embedding=True).float()
    with torch.no_grad():
        model.head.weight.mul_(1e9)
    with pytest.raises(UserError, match="autocast"):
        make_upload(model, [inputs_of(1)], ClientConfig(autocast="fp16"))


def test_float64_beside_autocast_is_refused() -> None:
    fields = one_cell()
    fields |= {"dtypes": ["float32", "float64"], "client": {"autocast": "bf16"}}
    with pytest.raises(UserError, match="autocast"):
        load_experiment(fields)


@each_kind
def test_gradients_show_the_autocast_that_made_them(model: LoadedModel, kind: Any) -> None:
    sent = make_upload(model, [inputs_of(1)], ClientConfig(autocast=kind)).grads
    assert shown_autocast(sent) == kind
    assert shown_autocast({name: g for name, g in sent.items() if name != "pos_embed"}) == "none"
    afterwards = {name: g.to(HALF[kind]).float() for name, g in sent.items()}
    assert shown_autocast(afterwards) == "none"
    plain = make_upload(model, [inputs_of(1)], ClientConfig()).grads
    assert shown_autocast(plain) == "none"


@each_kind
def test_rounding_is_that_of_the_precision_without_its_limits(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(10_000, generator=generator)
    assert rounded(values, HALF[kind]).equal(values.to(HALF[kind]).double())
    small = values * 2.0**-40  # below the numbers of float16
    assert rounded(small, HALF[kind]).equal(rounded(values, HALF[kind]) * 2.0**-40)
