"""APRIL beside breaching's own loop, in one run, as a ratio.

    python -m benchmarks.april [--images 16] [--repeats 3]          (or: make bench)

Both sides get the same images and weights and make the same reconstructions (checked). Per image:
gradient of the client, then attack. breaching's side differentiates every parameter image by
image, as its user does, and solves image by image; ours differentiates what the attack reads, for
many images at once, and inverts the embedding once per model. Repeats alternate; medians are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import torch
import tyro
from torch import Tensor

from attacks import find_attack
from attacks.april import April
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.interfaces import Attack, AttackerView, ClientInput, ClientUpdate, Pixels
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.mjp_vit import with_closed_form_block

T = TypeVar("T")

MODELS = {"ViT-Ti/16 @192": ("vit_tiny_patch16_224", 192), "ViT-S/16 @224": ("vit_small", 224)}


@dataclass(frozen=True)
class Arguments:
    images: int = 16
    repeats: int = 3
    device: str = "cpu"


def main(arguments: Arguments) -> None:
    print(f"{torch.get_num_threads()} threads, {arguments.device}, {arguments.images} images")
    print("seconds an image, median over repeats:")
    print(f"{'model':16} {'dtype':8} {'stage':9} {'breaching':>10} {'ours':>10} {'ratio':>6}")
    for label, (name, size) in MODELS.items():
        for dtype in (torch.float32, torch.float64):
            compare(label, victim(name, size, dtype, arguments.device), dtype, arguments)


def victim(name: str, size: int, dtype: torch.dtype, device: str) -> LoadedModel:
    """Untrained weights: the time does not depend on them."""
    model = load_model(
        name, checkpoint="random", img_size=size, num_classes=1000, mean=0.5, std=0.5
    )
    altered = with_closed_form_block(model).to(device, dtype)
    assert isinstance(altered, LoadedModel)
    return altered


def compare(label: str, model: LoadedModel, dtype: torch.dtype, arguments: Arguments) -> None:
    size = model.card.img_size
    images = torch.rand(arguments.images, 3, size, size, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(arguments.images)
    inputs = ClientInput(images, labels, [str(index) for index in range(arguments.images)])
    ours, theirs = find_attack("april"), find_attack("april", {"engine": "breaching"})
    client = FedSGDClient(model)
    seconds: dict[str, list[float]] = {"g0": [], "g1": [], "a0": [], "a1": []}
    for _ in range(arguments.repeats):
        loop = timed(seconds["g0"], partial(gradients_one_by_one, model, inputs))
        update = timed(seconds["g1"], partial(client.update, inputs, names=ours.needs(model)))
        reference = timed(seconds["a0"], partial(attack, theirs, model, loop, size))
        found = timed(seconds["a1"], partial(attack, ours, model, update, size))
    if dtype == torch.float64:
        assert (found - reference).abs().max() < 1e-3, "the two sides disagree"
    per_image = {key: median(values) / arguments.images for key, values in seconds.items()}
    stages = {"gradient": ("g0", "g1"), "attack": ("a0", "a1")}
    for stage, (one, other) in stages.items():
        line(label, dtype, stage, per_image[one], per_image[other])
    both = [per_image[f"g{side}"] + per_image[f"a{side}"] for side in (0, 1)]
    line(label, dtype, "both", *both)


def timed(record: list[float], work: Callable[[], T]) -> T:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    record.append(time.perf_counter() - started)
    return result


def gradients_one_by_one(model: LoadedModel, inputs: ClientInput) -> ClientUpdate:
    """As breaching's user: every parameter, one image at a time."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    wanted = [names.index(name) for name in April().needs(model)]
    kept: dict[str, list[Tensor]] = {names[index]: [] for index in wanted}
    x = model.normalize(inputs.images.to(model.cls_token))
    for index in range(len(x)):
        logits = model(x[index : index + 1])
        loss = torch.nn.functional.cross_entropy(
            logits, inputs.labels[index : index + 1].to(x.device)
        )
        grads = torch.autograd.grad(loss, parameters)
        for place in wanted:
            kept[names[place]].append(grads[place])
    stacked = {name: torch.stack(found) for name, found in kept.items()}
    return ClientUpdate(stacked, dtype=x.dtype)


def attack(april: Attack, model: LoadedModel, update: ClientUpdate, size: int) -> Tensor:
    view = AttackerView(model, [update], Pixels(size, model.card.mean, model.card.std))
    images = april.run(view, generator=torch.Generator()).images
    assert images is not None
    return images.cpu()


def line(label: str, dtype: torch.dtype, stage: str, breaching: float, ours: float) -> None:
    name = str(dtype).removeprefix("torch.")
    print(f"{label:16} {name:8} {stage:9} {breaching:10.4f} {ours:10.4f} {breaching / ours:6.2f}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
