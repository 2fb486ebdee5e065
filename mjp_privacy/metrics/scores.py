"""How close a reconstruction comes to the private image: one number per image and metric.

Each metric has two variants. `paper` is what the paper's own scripts compute, on both images
rounded to the 8 bits of an image file. `standard` is the usual definition, on the floating-point
images as they are. For MSE, PSNR and LPIPS the variants differ only in the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Registry, unknown_name
from mjp_privacy.metrics.lpips import Lpips
from mjp_privacy.metrics.pictures import (
    Measure,
    Metric,
    Prepared,
    SpectralCosine,
    SquaredError,
    StructuralSimilarity,
    Variant,
    decibels,
    levels,
    quantise,
    unchanged,
)

# ------------------------------------------------------------------------------------------------
# Reference images with all that metrics need of them: computed once, used by many cells.

Key = tuple[str, str]
"""(metric, variant)"""

Step = tuple[Variant, Measure]
"""What is computed once, however many metrics are made of it."""

CACHED = 1 << 17
"""Pixel values of which a processor's cache holds several float64 maps."""


@dataclass(frozen=True)
class References:
    """Reference images of a block, prepared for some metrics on one device.

    `mjp_privacy.metrics.prepare` makes them, `score` takes them in place of images.
    """

    images: Tensor  # (m, C, H, W) in [0, 1], float32 or float64
    levels: Tensor  # (m, C, H, W) uint8: the same on 8 bits, as the paper's variants see them
    metrics: Mapping[Key, Metric]
    prepared: Mapping[Step, Prepared]

    @classmethod
    def of(cls, images: Tensor, metrics: Mapping[Key, Metric]) -> References:
        """Images (m, C, H, W) in [0, 1], on the device where scores are to be computed."""
        images = images.clamp(0, 1).contiguous()
        known = cls(images, levels(images).to(torch.uint8), metrics, {})
        prepared: dict[Step, Prepared] = {}
        for step in known.steps:
            parts = [step[1].prepare(known.seen(step, part)) for part in known.parts(step)]
            prepared[step] = tuple(map(torch.cat, zip(*parts, strict=True)))
        return replace(known, prepared=prepared)

    @property
    def steps(self) -> list[Step]:
        """What has to be computed for the metrics, in their order."""
        return list(dict.fromkeys((m.variant, m.measure) for m in self.metrics.values()))

    def __len__(self) -> int:
        return len(self.images)

    def at(self, places: slice | list[int]) -> References:
        """The references at these places only."""
        prepared = {
            step: tuple(tensor[places] for tensor in tensors)
            for step, tensors in self.prepared.items()
        }
        return replace(
            self, images=self.images[places], levels=self.levels[places], prepared=prepared
        )

    def seen(self, step: Step, part: slice) -> Tensor:
        """The references at these places, as a step sees them."""
        variant, measure = step
        if variant == "standard":
            return self.images[part].to(measure.precision)
        return (self.levels[part].double() / 255).to(measure.precision)

    def parts(self, step: Step) -> list[slice]:
        """Places that are computed together: all by a network; else, on a CPU, so few that their
        maps stay in its cache."""
        network, size = step[1].precision == torch.float32, self.images[0].numel()
        together = len(self) if network or self.images.is_cuda else max(1, CACHED // size)
        return [slice(start, start + together) for start in range(0, len(self), together)]

    def score(self, reconstructions: Tensor) -> dict[Key, Tensor]:
        """The metrics of reconstructions (m, C, H, W) in [0, 1], one for each reference: (m,)."""
        images, values = reconstructions.to(self.images.device), dict[Step, Tensor]()
        for step in self.steps:
            variant, measure = step
            found = []
            for part in self.parts(step):
                pixels = images[part].clamp(0, 1).double().contiguous()
                pixels = quantise(pixels) if variant == "paper" else pixels
                prepared = tuple(tensor[part] for tensor in self.prepared[step])
                of_step = pixels.to(measure.precision)
                found.append(measure.compare(of_step, self.seen(step, part), prepared))
            values[step] = torch.cat(found).double()
        return {
            key: metric.finish(values[metric.variant, metric.measure])
            for key, metric in self.metrics.items()
        }


Images = Tensor | npt.NDArray[Any]
Names = Iterable[str | tuple[str, str]]
Scores = dict[Key, npt.NDArray[np.float64]]

METRICS: Registry[Metric] = Registry("metric")
"""Every metric under its "name/variant", as in `METRICS["psnr/paper"]`."""

BLOCK = 32  # images scored at a time, so that memory does not grow with their number
SLACK = 1e-6  # how far rounding may carry a pixel out of [0, 1]


def _register(
    name: str,
    summary: str,
    measures: Mapping[Variant, Measure],
    *,
    higher_is_better: bool,
    finish: Callable[[Tensor], Tensor] = unchanged,
) -> None:
    for variant, measure in measures.items():
        metric = Metric(name, variant, higher_is_better, measure, summary, finish)
        METRICS.register(f"{name}/{variant}", metric)


SAME: Mapping[Variant, Measure] = {"paper": SquaredError(), "standard": SquaredError()}
PADDED, INSIDE = (StructuralSimilarity(zero_padded=padded) for padded in (True, False))
PLAIN, CONJUGATE = (SpectralCosine(conjugate=conjugate) for conjugate in (False, True))
FFT2D = "distance of 2-D spectra, a cosine with (standard) or without (paper) conjugation"
_register("mse", "mean squared error of pixels", SAME, higher_is_better=True)
_register("fft2d", FFT2D, {"paper": PLAIN, "standard": CONJUGATE}, higher_is_better=True)
_register("psnr", "peak signal-to-noise ratio, dB", SAME, higher_is_better=False, finish=decibels)
_register(
    "ssim",
    "structural similarity, Gaussian window",
    {"paper": PADDED, "standard": INSIDE},
    higher_is_better=False,
)
_register(
    "lpips",
    "perceptual distance, AlexNet features",
    {"paper": Lpips(), "standard": Lpips()},
    higher_is_better=True,
)


def score(
    reconstructions: Images,
    references: Images | References,
    metrics: Names | None = None,
    device: str | torch.device | None = None,
) -> Scores:
    """Score every reconstruction against its reference, image by image.

    Both are torch tensors or NumPy arrays of floating point, (n, C, H, W) with values in [0, 1].
    `metrics` names what to compute: "psnr" (both variants), "psnr/paper" or ("psnr", "paper");
    None means every metric. `device` defaults to where the reconstructions are.

    Returns {(metric, variant): (n,) float64}. PSNR is inf for identical images.

        score(reconstructions, originals, ["psnr"])["psnr", "paper"].mean()

    Where several sets of reconstructions have the same references, `prepare` them once; they then
    decide the metrics and the device:

        known = prepare(originals)
        score(first, known), score(second, known)
    """
    left = _images("reconstructions", reconstructions)
    known, place = references, left.device if device is None else _device(device)
    if isinstance(known, References):
        if metrics is not None or device is not None:
            raise UserError(
                "Expected no metrics or device beside prepared references, which have both. Give "
                "them to `prepare`."
            )
        right = known.images
    else:
        chosen, right = chosen_metrics(metrics), _images("references", known)
    if left.shape != right.shape:
        raise UserError(
            "Expected as many references as reconstructions, in the same order and of the same "
            f"size; got reconstructions {tuple(left.shape)} and references {tuple(right.shape)}."
        )
    parts = []
    for start in range(0, len(left), BLOCK):
        block = slice(start, start + BLOCK)
        if isinstance(known, References):
            of_block = known.at(block)
        else:
            of_block = References.of(right[block].to(place), chosen)
        parts.append(of_block.score(left[block]))
    return {key: torch.cat([part[key] for part in parts]).cpu().numpy() for key in parts[0]}


def prepare(
    references: Images,
    metrics: Names | None = None,
    device: str | torch.device | None = None,
) -> References:
    """References for `score`, with all that the metrics need of them: SSIM's local moments, LPIPS'
    features. At 192 × 192 pixels that takes about 7 MB an image. Arguments as for `score`."""
    chosen = chosen_metrics(metrics)
    images = _images("references", references)
    return References.of(images.to(images.device if device is None else _device(device)), chosen)


def chosen_metrics(metrics: Names | None) -> dict[Key, Metric]:
    """What `score` computes for these names, both variants of a bare "psnr"; UserError for an
    unknown one."""
    asked = [metrics] if isinstance(metrics, str) else list(METRICS if metrics is None else metrics)
    if not asked:
        raise UserError(f"Expected at least one metric, got none. Available: {', '.join(METRICS)}.")
    chosen: dict[Key, Metric] = {}
    for entry in asked:
        name = entry if isinstance(entry, str) else "/".join(entry)
        found = [METRICS[name]] if "/" in name else [m for m in METRICS.values() if m.name == name]
        if not found:
            names = list(dict.fromkeys(metric.name for metric in METRICS.values()))
            raise unknown_name("metric", name, names)
        chosen |= {(metric.name, metric.variant): metric for metric in found}
    return chosen


def _images(role: str, images: Images) -> Tensor:
    """The images as a tensor; UserError unless type, shape and range are what a score needs."""
    if isinstance(images, np.ndarray) and np.issubdtype(images.dtype, np.floating):
        dtype = np.float64 if images.dtype.itemsize > 4 else np.float32
        images = torch.from_numpy(np.array(images, dtype=dtype, order="C"))
    if not (isinstance(images, Tensor) and images.is_floating_point()):
        kind = getattr(images, "dtype", type(images).__name__)
        raise UserError(
            f"Expected {role} as a floating-point tensor or array in [0, 1], got {kind}. "
            "Convert 8-bit images with images.astype('float32') / 255 or images.float() / 255."
        )
    if images.ndim != 4 or images.numel() == 0:
        raise UserError(
            f"Expected {role} of shape (n, C, H, W) with at least one image, got "
            f"{tuple(images.shape)}. A single image becomes a batch with images[None]."
        )
    low, high = (float(bound) for bound in images.detach().aminmax())
    if not (low >= -SLACK and high <= 1 + SLACK):  # `not` so that NaN is refused too
        raise UserError(
            f"Expected {role} with values in [0, 1], got values from {low:.6g} to {high:.6g}"
            f"{' (NaN: not a number)' if low != low else ''}. Undo any normalisation, then clip "
            "with images.clip(0, 1); leave out images that are not finite."
        )
    return images.detach()


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"Expected a device such as cpu or cuda, got {device!r}.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"Device {device} was requested, but torch sees no GPU here. Use cpu.")
    return place
