"""Nothing on the way forward makes a tensor on the wrong device, shown without a GPU.

torch's FakeTensorMode gives tensors that have a device, a shape and a type, and no values: those of
"cuda" refuse to be computed with one of the CPU. So a forward pass that only a machine with a GPU
could refuse is refused here. Backward passes need a device, so there are none.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from attacks.controls import oracle_inverse
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import Feeding
from mjp_privacy.client.gradients import FedSGDClient, Objective, predict
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.mjp_vit import with_closed_form_block
from tests.helpers.models import PATCH, some_images, some_labels, tiny

IDS = ["one", "two", "three", "four"]


def on_cuda(mode: FakeTensorMode, model: LoadedModel) -> LoadedModel:
    """The model with fake parameters and buffers on a GPU."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            moved = mode.from_tensor(parameter.detach()).to("cuda")
            setattr(module, name, nn.Parameter(moved, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, mode.from_tensor(buffer).to("cuda"))
    return model


SINGLE, PAIRS = ClientConfig(dal=True), ClientConfig(batch=2, mask="batch", dal=True)


@pytest.mark.parametrize(
    ("network", "setting", "dtype", "client"),
    [
        ({}, "a", torch.float32, SINGLE),
        ({}, "c", torch.float64, PAIRS),
        ({"position_embedding": "strict"}, "a", torch.float64, SINGLE),
        ({"unknown_embedding": True, "dal": "linear"}, "b", torch.float32, SINGLE),
        ({"unknown_embedding": True, "dal": "nonlinear"}, "a", torch.float32, PAIRS),
        ({"unknown_embedding": True, "dal": "nonlinear"}, "c", torch.float64, SINGLE),
        ({"unknown_embedding": True, "dal": "pca"}, "c", torch.float32, PAIRS),
    ],
)
def test_a_client_goes_forward_on_its_own_device(
    network: dict[str, Any], setting: str, dtype: torch.dtype, client: ClientConfig
) -> None:
    intact = tiny(dtype, **network)
    feeding = Feeding(client, setting, 0.5, PATCH, seed=0)  # always made on the CPU
    inputs = feeding.input(some_images(len(IDS)), some_labels(len(IDS)), IDS, round=1)
    altered = with_closed_form_block(intact)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for model in (on_cuda(mode, intact), on_cuda(mode, altered)):
            steps = FedSGDClient(model, client).steps(inputs)
            assert {tensor.device.type for tensor in steps} == {"cuda"}
            objective = Objective(model, client)
            for step in zip(*steps, strict=True):
                loss = objective(*step, None) if len(step) == 2 else objective(*step)
                assert (loss.device.type, loss.dtype) == ("cuda", dtype)
            classes = predict(model, inputs.images, inputs.mask)
            assert (classes.device.type, classes.shape) == ("cpu", (len(IDS),))
            ceiling = oracle_inverse(model, inputs.images.to(model.like.device)).cpu()
            assert (ceiling.device.type, ceiling.shape) == ("cpu", inputs.images.shape)
