"""How often a picture that `attack_gradients` calls certain is another one (docs/certain.md).

    python tools/calibrate_certain.py              # writes the table into docs/certain.md
    python tools/calibrate_certain.py --photographs 2 --out /tmp/table.md

Each client deviates in one way from what the attacker is told. Its picture is compared with what it
fed, on three ViTs: two untrained ones, the second 48 wide with 49 patches, and a trained one
(`cifar_vit`). Photographs are scikit-image's. Some minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from mjp_privacy import attack_gradients, load_images, load_model
from mjp_privacy.metrics.pictures import psnr, quantise
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import shuffle_patches
from mjp_privacy.models.vit import copied

ATTACKS = ("patch_gradient", "masked_span", "patch_integers")
GOOD = 40.0  # dB from which a certain picture is the client's
PAGE = Path(__file__).resolve().parents[1] / "docs" / "certain.md"
BEGIN, END = "<!-- table:begin -->\n", "<!-- table:end -->\n"
Sent = dict[str, Tensor]


@dataclass
class Client:
    """A client's step on a picture (3, S, S) in [0, 1]; what it does otherwise than told."""

    model: LoadedModel
    picture: Tensor
    other: Tensor  # another photograph
    generator: torch.Generator
    fed: Tensor = field(init=False)  # (B, 3, S, S) in [0, 1], what it fed, in the model's units

    def __post_init__(self) -> None:
        self.model = copied(self.model)
        self.fed = self.picture[None]

    def gradient(
        self, pixels: Tensor | None = None, labels: tuple[int, ...] = (3,), **loss: Any
    ) -> Sent:
        """The gradient of cross entropy on pixels that are normalised, or else on `fed`."""
        x = self.model.normalize(self.fed) if pixels is None else pixels
        logits = self.model(x)
        value = nn.functional.cross_entropy(logits, torch.tensor(labels), **loss)
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        grads = torch.autograd.grad(value, parameters, allow_unused=True)
        return {n: g for n, g in zip(names, grads, strict=True) if g is not None}

    def normalised(self, mean: Any, std: Any) -> Sent:
        """Its gradient with another normalisation than the model's."""
        mean, std = (torch.tensor(v).expand(3).view(3, 1, 1) for v in (mean, std))
        return self.gradient((self.fed - mean) / std)

    def noisy(self, share: float) -> Sent:
        """Its gradient with noise of so many times each tensor's root mean square."""

        def noise(g: Tensor) -> Tensor:
            return share * g.square().mean().sqrt() * torch.randn(g.shape, generator=self.generator)

        return each(self.gradient(), lambda g: g + noise(g))

    def with_dropout(self, share: float) -> Sent:
        """Its gradient with dropout in front of every linear layer of the blocks."""
        torch.manual_seed(1)
        layers = [
            m for n, m in self.model.named_modules() if isinstance(m, nn.Linear) and n != "head"
        ]
        hooks = [
            layer.register_forward_pre_hook(lambda _, x: (nn.functional.dropout(x[0], share),))
            for layer in layers
        ]
        sent = self.gradient()
        for hook in hooks:
            hook.remove()
        return sent

    def trained(self, optimizer: str, steps: int) -> Sent:
        """Its weights after some steps minus those before."""
        before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
        stepping = make(self.model.parameters(), lr=0.1 if optimizer == "sgd" else 1e-3)
        for _ in range(steps):
            for name, gradient in self.gradient().items():
                self.model.get_parameter(name).grad = gradient
            stepping.step()
        return {n: p.detach() - before[n] for n, p in self.model.named_parameters()}

    def shuffled(self, share: float) -> Sent:
        """Its gradient with so many of its patches in another order, and none masked."""
        patches = (self.picture.shape[-1] // self.model.patch_size) ** 2
        order = torch.arange(patches)
        chosen = torch.randperm(patches, generator=self.generator)[: int(share * patches)]
        order[chosen] = chosen.roll(1)
        self.fed = shuffle_patches(self.fed, order[None], self.model.patch_size)
        return self.gradient()

    def mixed(self, share: float) -> Sent:
        """The gradient of a mixture of two pictures."""
        self.fed = share * self.fed + (1 - share) * self.other[None]
        own, other = self.gradient(), self.gradient(labels=(5,))
        return {n: share * g + (1 - share) * other[n] for n, g in own.items()}

    def batch(self) -> Sent:
        """The gradient of two pictures."""
        self.fed = torch.stack((self.picture, self.other))
        return self.gradient(labels=(3, 5))

    def summed(self, others: int) -> Sent:
        """The sum of the gradients of several steps, as of accumulation over other photographs."""
        sent, fed = self.gradient(), self.fed
        self.fed = self.other[None]
        for _ in range(others):
            sent = {n: g + sent[n] for n, g in self.gradient(labels=(5,)).items()}
        self.fed = fed
        return sent

    def frozen(self, *starts: str) -> Sent:
        """Its gradient without those of some parameters."""
        return {n: g for n, g in self.gradient().items() if not n.startswith(starts)}

    def between_levels(self, contrast: float = 1.0) -> Sent:
        """Its gradient on pixels that were not rounded: the means of four, or another contrast."""
        if contrast == 1:
            padded = nn.functional.pad(self.fed, (0, 1, 0, 1), mode="replicate")
            self.fed = nn.functional.avg_pool2d(padded, 2, stride=1)
        self.fed = 0.5 + contrast * (self.fed - 0.5)
        return self.gradient()

    def under_autocast(self) -> Sent:
        """Its gradient in half precision."""
        with torch.autocast("cpu", torch.bfloat16):
            return each(self.gradient(), torch.Tensor.float)

    def of_other_weights(self) -> Sent:
        """Its gradient at weights that are not quite those that the server gave."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 1e-3 * torch.randn(parameter.shape, generator=self.generator)
        return self.gradient()


# what is done to a gradient before it is sent


def each(sent: Sent, altered: Callable[[Tensor], Tensor]) -> Sent:
    return {name: altered(gradient) for name, gradient in sent.items()}


def scaled(sent: Sent, factor: float) -> Sent:
    return each(sent, lambda g: factor * g)


def clipped(sent: Sent, norm: float) -> Sent:
    size = float(torch.stack([g.norm() for g in sent.values()]).norm())
    return scaled(sent, min(1.0, norm / size))


def clipped_apart(sent: Sent) -> Sent:
    return each(sent, lambda g: min(1.0, 1e-3 / float(g.norm())) * g)


def positions_scaled(sent: Sent, factor: float) -> Sent:
    return sent | {"pos_embed": factor * sent["pos_embed"]}


def kept(sent: Sent, share: float) -> Sent:
    """The largest entries of each tensor; the others are zero."""
    small = {n: g for n, g in sent.items() if g.numel() < 2**24}
    least = {n: g.abs().flatten().quantile(1 - share) for n, g in small.items()}
    return {n: torch.where(g.abs() >= least[n], g, 0.0) for n, g in small.items()}


def int8(gradient: Tensor) -> Tensor:
    step = gradient.abs().max() / 127
    return (gradient / step).round() * step


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
DIFFERENCE = {"kind": "weight_difference", "lr": 0.1}
Step = Callable[[Client], Sent]
CLIENTS: dict[str, tuple[Step, dict[str, Any]]] = {
    "as told": (Client.gradient, {}),
    "clipped at norm 1": (lambda c: clipped(c.gradient(), 1.0), {}),
    "clipped at norm .001": (lambda c: clipped(c.gradient(), 1e-3), {}),
    "each tensor clipped": (lambda c: clipped_apart(c.gradient()), {}),
    "positions' gradient halved": (lambda c: positions_scaled(c.gradient(), 1 / 2), {}),
    "positions' gradient a third": (lambda c: positions_scaled(c.gradient(), 1 / 3), {}),
    "each clipped, unrounded": (lambda c: clipped_apart(c.between_levels()), {}),
    "loss scale 65,536 not undone": (lambda c: scaled(c.gradient(), 65536.0), {}),
    "sign turned": (lambda c: scaled(c.gradient(), -1.0), {}),
    "label smoothing .1": (lambda c: c.gradient(label_smoothing=0.1), {}),
    "label smoothing .5": (lambda c: c.gradient(label_smoothing=0.5), {}),
    "another label given": (Client.gradient, {"labels": [4]}),
    "mixup .7": (lambda c: c.mixed(0.7), {}),
    "dropout .1": (lambda c: c.with_dropout(0.1), {}),
    "dropout .5": (lambda c: c.with_dropout(0.5), {}),
    "means of four pixels, not rounded": (Client.between_levels, {}),
    "contrast .9, not rounded": (lambda c: c.between_levels(0.9), {}),
    **{
        f"noise {s:f}".rstrip("0") + " of rms, not told": (lambda c, s=s: c.noisy(s), {})
        for s in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    },
    "sent as float16": (lambda c: each(c.gradient(), lambda g: g.half().float()), {}),
    "sent as bfloat16": (lambda c: each(c.gradient(), lambda g: g.bfloat16().float()), {}),
    "bf16 autocast": (Client.under_autocast, {}),
    "int8, not told": (lambda c: each(c.gradient(), int8), {}),
    "int8, by defenses=": (lambda c: each(c.gradient(), int8), {"defenses": ["int8"]}),
    "largest half of entries, not told": (lambda c: kept(c.gradient(), 0.5), {}),
    "largest 99 %, not told": (lambda c: kept(c.gradient(), 0.99), {}),
    "weights .001 off": (Client.of_other_weights, {}),
    "table frozen": (lambda c: c.frozen("pos_embed"), {}),
    "classifier withheld": (lambda c: c.frozen("head"), {}),
    "SGD, one step": (lambda c: c.trained("sgd", 1), DIFFERENCE),
    "SGD, four steps told as one": (lambda c: c.trained("sgd", 4), DIFFERENCE),
    "SGD, four steps": (lambda c: c.trained("sgd", 4), {**DIFFERENCE, "steps": 4}),
    "AdamW, one step": (
        lambda c: c.trained("adamw", 1),
        {**DIFFERENCE, "lr": 1e-3, "optimizer": "adamw"},
    ),
    "AdamW told as SGD": (lambda c: c.trained("adamw", 1), {**DIFFERENCE, "lr": 1e-3}),
    "two pictures told as one": (Client.batch, {}),
    "sum of two steps told as one": (lambda c: c.summed(1), {}),
    "sum of four steps told as one": (lambda c: c.summed(3), {}),
    "a quarter shuffled, none masked": (lambda c: c.shuffled(0.25), {}),
    "all shuffled, none masked": (lambda c: c.shuffled(1.0), {}),
    "fed [0, 1]": (lambda c: c.gradient(c.fed), {}),
    "fed [0, 255]": (lambda c: c.gradient(255 * c.fed), {}),
    "ImageNet's normalisation": (lambda c: c.normalised(*IMAGENET), {}),
    "half of the normalisation": (lambda c: c.normalised(0.5, 1.0), {}),
    "channels in the other order": (lambda c: c.gradient(c.model.normalize(c.fed).flip(1)), {}),
}
"""By name: the step, and what the attacker is told of it beside the model."""


def models() -> Iterator[LoadedModel]:
    """A ViT-Ti of three blocks for pictures of 64 pixels, untrained, one of more patches than its
    width for 56, and a trained one for 56."""
    shape = {"patch_size": 8, "depth": 3, "num_classes": 10, "mean": 0.5, "std": 0.5}
    for other in ({"img_size": 64}, {"img_size": 56, "embed_dim": 48}):
        yield load_model("vit_tiny_patch16_224", checkpoint="random", **shape, **other)
    yield load_model("cifar_vit")


def tried(name: str, model: LoadedModel, picture: Tensor, other: Tensor) -> dict[str, Any]:
    """The row of one client's step: whether its picture is certain, and how near it is."""
    step, told = CLIENTS[name]
    client = Client(model, picture, other, torch.Generator().manual_seed(0))
    sent = step(client)
    leak = attack_gradients(model, sent, attacks=ATTACKS, **told)
    found = [
        image
        for made in leak
        if made.is_certain and made.images is not None
        for image in made.images
    ]
    if not found:
        return {"client": name, "certain": False, "psnr": math.nan, "exact": False}
    nearest = min(_nearest(image, client.fed) for image in found)  # of two attacks the worse
    same = all(
        any(torch.equal(quantise(image.double()), quantise(one.double())) for one in client.fed)
        for image in found
    )
    return {"client": name, "certain": True, "psnr": nearest, "exact": same}


def _nearest(image: Tensor, fed: Tensor) -> float:
    return max(float(psnr(image[None].double(), one[None].double())) for one in fed)


def table(rows: pd.DataFrame) -> str:
    """Markdown: a line for all clients with the same outcome, and the sum."""
    by_client = [outcome(of_client) for _, of_client in rows.groupby("client", sort=False)]
    found = pd.DataFrame(by_client, index=pd.Index(rows["client"].unique(), name="client"))
    lines = [
        "| clients | certain | exact | certain and wrong | least dB of a certain one |",
        "|---|---:|---:|---:|---:|",
    ]
    same = found.reset_index().groupby(["n", "certain", "exact", "wrong"], sort=False)
    for (n, certain, exact, wrong), group in same:
        names, each = "; ".join(group["client"]), ", each" if len(group) > 1 else ""
        least = _decibels(group["least"].min())
        lines.append(f"| {names} | {certain} of {n}{each} | {exact} | {wrong} | {least} |")
    n, certain, exact, wrong = found[["n", "certain", "exact", "wrong"]].sum()
    least = _decibels(found["least"].min())
    lines.append(f"| **all** | {certain} of {n} | {exact} | {wrong} | {least} |")
    return "\n".join(lines) + "\n"


def outcome(rows: pd.DataFrame) -> dict[str, Any]:
    """Of one client's pictures: how many are certain, exact, certain and wrong; the least PSNR."""
    certain = rows[rows["certain"]]
    counts = {"n": len(rows), "certain": len(certain), "exact": int(certain["exact"].sum())}
    return {**counts, "wrong": int((certain["psnr"] < GOOD).sum()), "least": certain["psnr"].min()}


def _decibels(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--photographs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=PAGE)
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in models():
        count = chosen.photographs
        size = model.card.img_size
        pictures = [p for p, *_ in islice(load_images("embedded", size=size), count + 1)]
        for name in CLIENTS:
            started = time.perf_counter()
            for place in range(count):
                rows.append(tried(name, model, pictures[place], pictures[place + 1]))
            print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    made = table(pd.DataFrame(rows))
    if chosen.out == PAGE:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        made = f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}"
    chosen.out.write_text(made, "utf-8")


if __name__ == "__main__":
    main()
