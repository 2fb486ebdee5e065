"""How close a reconstruction comes to the private image: one number per image and metric.

Each metric has two variants. `paper` is what the paper's own scripts compute, on both images
rounded to the 8 bits of an image file. `standard` is the usual definition, on the floating-point
images as they are. For MSE, PSNR and LPIPS the variants differ only in the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Registry, unknown_name
from mjp_privacy.metrics.lpips import Lpips
from mjp_privacy.metrics.lpips import backbone as lpips_backbone
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
    alike: bool  # whether both are the same float32 images, so that networks need only see one
    metrics: Mapping[Key, Metric]
    prepared: Mapping[Step, Prepared]

    @classmethod
    def of(cls, images: Tensor, metrics: Mapping[Key, Metric]) -> References:
        """Images (m, C, H, W) in [0, 1], on the device where scores are to be computed."""
        images = images.clamp(0, 1).contiguous()
        on_8_bits = levels(images).to(torch.uint8)
        alike = torch.equal((on_8_bits.double() / 255).float(), images.float())
        known = cls(images, on_8_bits, alike, metrics, {})
        prepared: dict[Step, Prepared] = {}
        for variant, measure in known.steps:
            of_other = prepared.get((_other(variant), measure))
            if of_other is not None and alike and is_network(measure):
                prepared[variant, measure] = of_other
            else:
                parts = [
                    measure.prepare(known.seen(variant, measure.precision, part))
                    for part in known._parts(whole=is_network(measure))
                ]
                prepared[variant, measure] = tuple(map(torch.cat, zip(*parts, strict=True)))
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

    def seen(self, variant: Variant, precision: torch.dtype, part: slice) -> Tensor:
        """The references at these places, as a variant sees them."""
        if variant == "standard":
            return self.images[part].to(precision)
        return (self.levels[part].double() / 255).to(precision)

    def score(self, reconstructions: Tensor) -> dict[Key, Tensor]:
        """The metrics of reconstructions (m, C, H, W) in [0, 1], one for each reference: (m,)."""
        images = reconstructions.to(self.images.device)
        parts: dict[Step, list[Tensor]] = {step: [] for step in self.steps}
        network_input: dict[Variant, list[Tensor]] = {variant: [] for variant, _ in self.steps}
        for part in self._parts(whole=False):
            entries = images[part].clamp(0, 1).double().contiguous()
            for variant, inputs in network_input.items():
                pixels = quantise(entries) if variant == "paper" else entries
                inputs.append(pixels.float())
                known = self.seen(variant, torch.float64, part)
                for step in self._pixel_steps(variant):
                    prepared = tuple(tensor[part] for tensor in self.prepared[step])
                    parts[step].append(step[1].compare(pixels, known, prepared))
        values = {step: torch.cat(found) for step, found in parts.items() if found}
        values |= self._by_networks({v: torch.cat(given) for v, given in network_input.items()})
        return {
            key: metric.finish(values[metric.variant, metric.measure].double())
            for key, metric in self.metrics.items()
        }

    def _pixel_steps(self, variant: Variant) -> list[Step]:
        return [step for step in self.steps if step[0] == variant and not is_network(step[1])]

    def _by_networks(self, images: Mapping[Variant, Tensor]) -> dict[Step, Tensor]:
        """Values of networks. What is the same float32 image in both variants is seen once."""
        values: dict[Step, Tensor] = {}
        everything = slice(0, len(self))
        for step in self.steps:
            variant, measure = step
            if not is_network(measure):
                continue
            other, new = values.get((_other(variant), measure)), images[variant]
            if other is None or not self.alike:
                known = self.seen(variant, torch.float32, everything)
                values[step] = measure.compare(new, known, self.prepared[step])
                continue
            values[step] = other.clone()
            changed = (new != images[_other(variant)]).flatten(1).any(1).nonzero().flatten()
            if len(changed):
                rest = self.at(changed.tolist()) if len(changed) < len(self) else self
                known = rest.seen(variant, torch.float32, everything)
                values[step][changed] = measure.compare(new[changed], known, rest.prepared[step])
        return values

    def _parts(self, *, whole: bool) -> Iterator[slice]:
        """Places that are computed together: on a CPU so few that their maps stay in its cache."""
        size = self.images[0].numel()
        together = len(self) if whole or self.images.is_cuda else max(1, CACHED // size)
        return (slice(start, start + together) for start in range(0, len(self), together))


def is_network(measure: Measure) -> bool:
    """Whether the measure is computed in float32, on many images at a time."""
    return measure.precision == torch.float32


def _other(variant: Variant) -> Variant:
    return "standard" if variant == "paper" else "paper"


__all__ = ["METRICS", "References", "lpips_backbone", "prepare", "score"]

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
    *,
    higher_is_better: bool,
    paper: Measure,
    standard: Measure,
    finish: Callable[[Tensor], Tensor] = unchanged,
) -> None:
    paper_metric = Metric(name, "paper", higher_is_better, paper, summary, finish)
    METRICS.register(f"{name}/paper", paper_metric)
    metric = Metric(name, "standard", higher_is_better, standard, summary, finish)
    METRICS.register(f"{name}/standard", metric)


_register(
    "mse",
    "mean squared error of pixels",
    higher_is_better=True,
    paper=SquaredError(),
    standard=SquaredError(),
)
_register(
    "fft2d",
    "distance of 2-D spectra, a cosine with (standard) or without (paper) conjugation",
    higher_is_better=True,
    paper=SpectralCosine(conjugate=False),
    standard=SpectralCosine(conjugate=True),
)
_register(
    "psnr",
    "peak signal-to-noise ratio, dB",
    higher_is_better=False,
    paper=SquaredError(),
    standard=SquaredError(),
    finish=decibels,
)
_register(
    "ssim",
    "structural similarity, Gaussian window",
    higher_is_better=False,
    paper=StructuralSimilarity(zero_padded=True),
    standard=StructuralSimilarity(zero_padded=False),
)
_register(
    "lpips",
    "perceptual distance, AlexNet features",
    higher_is_better=True,
    paper=Lpips(),
    standard=Lpips(),
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
    if isinstance(references, References):
        if metrics is not None or device is not None:
            raise UserError(
                "Expected no metrics or device beside prepared references, which have both. Give "
                "them to `prepare`."
            )
        _check_shapes(left, references.images)
        return _scores(left, references.at)
    chosen = _choose(metrics)
    right = _images("references", references)
    _check_shapes(left, right)
    place = left.device if device is None else _device(device)
    return _scores(left, lambda block: References.of(right[block].to(place), chosen))


def prepare(
    references: Images,
    metrics: Names | None = None,
    device: str | torch.device | None = None,
) -> References:
    """References for `score`, with all that the metrics need of them: SSIM's local moments, LPIPS'
    features. At 192 × 192 pixels that takes about 6 MB an image. Arguments as for `score`."""
    chosen = _choose(metrics)
    images = _images("references", references)
    return References.of(images.to(images.device if device is None else _device(device)), chosen)


def chosen_keys(metrics: Names | None) -> list[Key]:
    """(metric, variant) of all that `score` computes for these names; UserError for an unknown
    one."""
    return list(_choose(metrics))


def _scores(left: Tensor, known: Callable[[slice], References]) -> Scores:
    parts = []
    for start in range(0, len(left), BLOCK):
        block = slice(start, start + BLOCK)
        parts.append(known(block).score(left[block]))
    return {key: torch.cat([part[key] for part in parts]).cpu().numpy() for key in parts[0]}


def _check_shapes(left: Tensor, right: Tensor) -> None:
    if left.shape != right.shape:
        raise UserError(
            "Expected as many references as reconstructions, in the same order and of the same "
            f"size; got reconstructions {tuple(left.shape)} and references {tuple(right.shape)}."
        )


def _choose(metrics: Names | None) -> dict[Key, Metric]:
    if metrics is None:
        names = list(METRICS)
    else:
        requested = [metrics] if isinstance(metrics, str) else list(metrics)
        names = [name for entry in requested for name in _expand(entry)]
    if not names:
        raise UserError(f"Expected at least one metric, got none. Available: {', '.join(METRICS)}.")
    return {(METRICS[name].name, METRICS[name].variant): METRICS[name] for name in names}


def _expand(entry: str | tuple[str, str]) -> list[str]:
    """The registered names that an entry stands for: both variants of a bare "psnr"."""
    name = entry if isinstance(entry, str) else "/".join(entry)
    if "/" in name:
        return [name]
    both = [key for key in METRICS if METRICS[key].name == name]
    if not both:
        names = list(dict.fromkeys(METRICS[key].name for key in METRICS))
        raise unknown_name("metric", name, names)
    return both


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
