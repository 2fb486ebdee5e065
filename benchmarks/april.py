"""APRIL's two stages beside breaching's own loop, in one run, as ratios.

    python -m benchmarks.april [--images 16] [--repeats 5]          (or: make bench)

gradient  breaching's user differentiates every parameter, image by image. Ours differentiates what
          the attack reads, for several images at once. `plain` is one batched forward and backward
          pass for all parameters, which gives no image its own gradient.
attack    both get the gradients of our client. breaching solves image by image, and inverts the
          patch embedding each time.

The results of both sides are compared; the figures go to benchmarks/results/april.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attacks.april import April
from attacks.breaching import configuration, server_payload, shipped
from benchmarks.page import Row, alternate, bracketed, machine, milliseconds, ratio, write_result
from mjp_privacy.client.gradients import FedSGDClient, images_at_once
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate, Grads, Pixels
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel, MJPVisionTransformer, load_model
from mjp_privacy.models.mjp_vit import with_closed_form_block

MODELS = {"ViT-Ti/16 @192": ("vit_tiny_patch16_224", 192), "ViT-S/16 @224": ("vit_small", 224)}
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Largest relative difference between two computations of one gradient."""
HEAD = (
    *("", "breaching's loop, ms", "plain batch, ms", "ours, ms"),
    *("loop / ours", "ours / plain batch"),
)


def main(images: int = 16, repeats: int = 5) -> None:
    facts, rows = machine(), []
    for label, (name, size) in MODELS.items():
        for dtype in ROUNDING:
            model = victim(name, size, dtype)
            for row in compared(model, images, repeats):
                rows.append({"model": label, "dtype": str(dtype).removeprefix("torch."), **row})
    table = [line(row) for row in rows if row["dtype"] == "float32"]
    write_result("april", {"images": images, "rows": rows}, facts, [HEAD, *table])


def line(row: Mapping[str, Any]) -> Row:
    seconds, ratios = row["seconds_per_image"], row["ratios"]
    plain = ratios.get("plain / ours")
    return (
        f"{row['model']}, {row['dtype']}, {row['stage']}",
        milliseconds(seconds["loop"]),
        milliseconds(seconds["plain"]) if plain else "",
        milliseconds(seconds["ours"]),
        bracketed(ratios["loop / ours"]["wall"]),
        f"{1 / plain['wall']['median']:.2f}" if plain else "",
    )


def victim(name: str, size: int, dtype: torch.dtype) -> LoadedModel:
    """Untrained weights: the time does not depend on them."""
    model = load_model(
        name, checkpoint="random", img_size=size, num_classes=1000, mean=0.5, std=0.5
    )
    altered = with_closed_form_block(model).to(dtype).eval()
    assert isinstance(altered, LoadedModel)
    return altered


def compared(model: LoadedModel, number: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each stage, after a check that both sides give the same."""
    size = model.card.img_size
    images = torch.rand(number, 3, size, size, generator=torch.Generator().manual_seed(0))
    inputs = ClientInput(images, torch.arange(number), [str(index) for index in range(number)])
    ours = April()
    client, names = FedSGDClient(model), ours.needs(model)
    update = client.described(client.gradients(inputs, names=names))
    gradient = alternate(
        {
            "loop": lambda: one_by_one(model, inputs),
            "plain": lambda: plain_batch(model, inputs, images_at_once(model)),
            "ours": lambda: client.gradients(inputs, names=names),
        },
        repeats,
    )
    same_gradients(gradient["loop"].result, gradient["ours"].result, update.dtype)
    attack = alternate(
        {
            "loop": lambda: attacked_by_breaching(model, update, size),
            "ours": lambda: attacked(ours, model, update, size),
        },
        repeats,
    )
    quality = [psnr(attack[name].result, images) for name in ("ours", "loop")]
    difference = float((quality[0] - quality[1]).abs().max())
    assert difference <= 0.01, f"the two sides differ by {difference:.3f} dB"
    rows = []
    for stage, timings in (("gradient", gradient), ("attack", attack)):
        seconds = {name: timing.facts(number) for name, timing in timings.items()}
        ratios = {
            f"{name} / ours": {c: ratio(timing, timings["ours"], c) for c in ("wall", "cpu")}
            for name, timing in timings.items()
            if name != "ours"
        }
        rows.append({"stage": stage, "seconds_per_image": seconds, "ratios": ratios})
    return [rows[0], {**rows[1], "largest_psnr_difference": difference}]


def one_by_one(model: LoadedModel, inputs: ClientInput) -> dict[str, Tensor]:
    """As breaching's user: every parameter, one image at a time."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    places = {name: names.index(name) for name in April().needs(model)}
    kept: dict[str, list[Tensor]] = {name: [] for name in places}
    x, labels = model.normalize(inputs.images.to(model.cls_token)), inputs.labels
    for index in range(len(x)):
        own = slice(index, index + 1)
        grads = torch.autograd.grad(
            cross_entropy(model(x[own]), labels[own].to(x.device)), parameters
        )
        for name, place in places.items():
            kept[name].append(grads[place])
    return {name: torch.stack(gradients) for name, gradients in kept.items()}


def plain_batch(model: LoadedModel, inputs: ClientInput, together: int) -> None:
    """Forward and backward for all parameters, as in training; as many images at once as ours."""
    x, labels = model.normalize(inputs.images.to(model.cls_token)), inputs.labels
    parameters = list(model.parameters())
    for images, own in zip(x.split(together), labels.split(together), strict=True):
        torch.autograd.grad(cross_entropy(model(images), own.to(x.device)), parameters)


def attacked(april: April, model: LoadedModel, update: ClientUpdate, size: int) -> Tensor:
    view = AttackerView(model, [update], Pixels(size, model.card.mean, model.card.std))
    images = april.run(view, generator=torch.Generator()).images
    assert images is not None
    return images.cpu()


def attacked_by_breaching(model: LoadedModel, update: ClientUpdate, size: int) -> Tensor:
    pixels = Pixels(size, model.card.mean, model.card.std)
    images = reconstruct_one_by_one(model, update.grads, pixels, update.dtype)
    return model.denormalize(images).clamp(0, 1).cpu()


POSITIONS = {"pos_embed": 1, "blocks.0.attn.qkv.weight": 4}
"""Places in the list of gradients where AprilAttacker looks for the two it reads."""


def reconstruct_one_by_one(
    model: MJPVisionTransformer, grads: Grads, pixels: Pixels, dtype: torch.dtype
) -> Tensor:
    """Run breaching's own attack per image: normalised images (n, C, H, W), which it clamps."""
    wrapped = nn.Module()  # breaching expects the network as an attribute of its model
    wrapped.model = model
    setup = {"device": next(model.parameters()).device}
    settings = configuration(("april_analytic",), dtype, {})
    attacker = shipped.prepare_attack(wrapped, nn.CrossEntropyLoss(), settings, setup)
    payload = server_payload(wrapped, pixels)
    metadata = {"num_data_points": 1, "labels": torch.zeros(1, dtype=torch.long)}  # 0 is a dummy
    images = []
    for index in range(len(grads["pos_embed"])):
        listed = [torch.zeros(0) for _ in range(max(POSITIONS.values()) + 1)]
        for name, position in POSITIONS.items():
            listed[position] = grads[name][index]
        shared = [{"gradients": listed, "buffers": [], "metadata": metadata}]
        data, _ = attacker.reconstruct(payload, shared, server_secrets={})
        images.append(data["data"][0])
    return torch.stack(images)


def same_gradients(theirs: Grads, ours: Grads, dtype: torch.dtype) -> None:
    for name, gradient in ours.items():
        error = float((gradient - theirs[name]).norm() / theirs[name].norm())
        assert error < ROUNDING[dtype], f"{name}: the two sides differ by {error:.1e}"


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
