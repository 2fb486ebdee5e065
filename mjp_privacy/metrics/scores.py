"""How close a reconstruction comes to the private image: one number per image and metric.

Each metric has two variants. `paper` is what the paper's own scripts compute, on both images
rounded to the 8 bits of an image file. `standard` is the usual definition, on the floating-point
images as they are. For MSE, PSNR and LPIPS the variants differ only in the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.registry import Registry, unknown_name
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.data.decoding import ImageError, decode_image
from mjp_privacy.data.files import Files, image_names, open_files
from mjp_privacy.metrics.pictures import (
    SMALLEST,
    Lpips,
    Measure,
    Metric,
    Prepared,
    SpectralCosine,
    SquaredError,
    StructuralSimilarity,
    Variant,
    arrow,
    decibels,
    levels,
    quantise,
    unchanged,
)
from mjp_privacy.metrics.statistics import PSNR_CAP, range_of, summarise

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

    `prepare` makes them, `score` takes them in place of images.
    """

    images: Tensor  # (m, C, H, W) in [0, 1], float32 or float64
    levels: Tensor  # (m, C, H, W) uint8: the same on 8 bits, as the paper's variants see them
    metrics: Mapping[Key, Metric]
    prepared: Mapping[Step, Prepared]

    @classmethod
    def of(cls, images: Tensor, metrics: Mapping[Key, Metric]) -> References:
        """Images (m, C, H, W) in [0, 1], on the device where scores are to be computed."""
        height, width = images.shape[-2:]
        for name in (metric.name for metric in metrics.values()):
            if min(height, width) < (side := SMALLEST.get(name, 1)):
                raise UserError(
                    f"{name.upper()} expected images of at least {side}×{side} pixels; these are "
                    f"{height}×{width}. Leave {name} out of the metrics or score larger images."
                )
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


def metrics_of_size(height: int, width: int) -> list[Key]:
    """The metrics that have a value of pictures of this size: not LPIPS of MNIST's."""
    large = (m for m in METRICS.values() if min(height, width) >= SMALLEST.get(m.name, 1))
    return [(metric.name, metric.variant) for metric in large]


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
            f"Expected {role} with values in [0, 1], got values from {low:.6g} to {high:.6g}. Undo "
            "any normalisation, then clip with images.clip(0, 1); leave out what is not finite."
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


# ------------------------------------------------------------------------------------------------
# Two folders or zips of image files, paired by name: the rows of `mjp score` and their means.

SHOWN = 10  # most names of a list in an error message


@dataclass(frozen=True)
class Pair:
    """The same image in both folders; `name` is its path inside either."""

    name: str
    reconstructions: Files
    references: Files

    def read(self) -> tuple[Tensor, Tensor]:
        """Reconstruction and reference, (1, 3, H, W) float64 in [0, 1]; UserError where one cannot
        be read, or they differ in size."""
        pictures = self._decoded(self.reconstructions), self._decoded(self.references)
        got, wanted = (f"{picture.height}×{picture.width}" for picture in pictures)
        if got != wanted:
            raise ImageError(
                f"expected {wanted} pixels as in {shown(self.references.path)}, got {got}",
                shown(self.reconstructions.path / self.name),
            )
        left, right = (
            torch.from_numpy(np.asarray(picture).transpose(2, 0, 1)[None] / 255)
            for picture in pictures
        )
        return left, right

    def _decoded(self, files: Files) -> Image.Image:
        try:
            return decode_image(files.read(self.name))
        except ImageError as error:
            raise ImageError(error.reason, shown(files.path / self.name)) from error


def pair_folders(
    reconstruction: Path, reference: Path, *, allow_missing: bool
) -> tuple[list[Pair], int]:
    """The pairs in the order of their names, and how many images have no partner, which is an error
    unless `allow_missing` is set."""
    folders = open_files(reconstruction), open_files(reference)
    left, right = (set(image_names(folder)) for folder in folders)
    missing = [str(reference / name) for name in sorted(left - right)]
    missing += [str(reconstruction / name) for name in sorted(right - left)]
    if missing and not allow_missing:
        raise UserError(
            "Expected every image in both folders under the same name, extension included. Missing:"
            f" {first_of([*map(shown, missing)], SHOWN)}. Supply them, or add --allow-missing."
        )
    pairs = [Pair(name, *folders) for name in sorted(left & right)]
    if not pairs:
        raise UserError(
            f"Expected images of the same name, extension included, in {shown(reconstruction)} and "
            f"{shown(reference)}; got {len(left)} and {len(right)} images with no name in common."
        )
    return pairs, len(missing)


OK, FAILED = "ok", "failed"
COLUMNS = ("image", "metric", "variant", "value", "status", "reason")
Row = tuple[str, str, str, float, str, str]


def score_pairs(
    pairs: Sequence[Pair], metrics: Sequence[str], device: torch.device
) -> pd.DataFrame:
    """A row for every pair and metric, with the reason where it cannot be scored; UserError if none
    can be."""
    keys, found = list(chosen_metrics(metrics)), list[Row]()
    with Progress("scoring", len(pairs), "images") as progress:
        for pair in pairs:
            found += _scored(pair, keys, device)
            progress.advance()
    rows = pd.DataFrame(found, columns=list(COLUMNS))
    if (rows["status"] == FAILED).all():
        raise UserError(
            f"Expected readable images of the same size; none of the {len(pairs)} pairs can be "
            f"scored; the first is {shown(rows['image'][0])}: {rows['reason'][0]}."
        )
    return rows


def _scored(pair: Pair, keys: Sequence[Key], device: torch.device) -> list[Row]:
    try:
        scores = score(*pair.read(), metrics=keys, device=device)
        return [(pair.name, *key, float(scores[key][0]), OK, "") for key in keys]
    except (UserError, MemoryError) as error:
        if len(keys) > 1 and not isinstance(error, ImageError):  # pictures too small for a metric
            return [row for key in keys for row in _scored(pair, [key], device)]
        reason = str(error) or "needs more memory than there is"
        return [(pair.name, *key, math.nan, FAILED, reason) for key in keys]


@dataclass(frozen=True)
class Mean:
    """One metric over the images that have it; PSNR averages min(PSNR, 100)."""

    metric: str
    variant: str
    mean: float
    low: float  # of the mean's 95 % interval; NaN for a single image
    high: float
    n: int
    exact: int | None  # images equal to their references; of PSNR only
    better_for_privacy: str  # higher or lower


def means(rows: pd.DataFrame) -> list[Mean]:
    """Mean, interval and number of images for each metric."""
    scored, found = rows[rows["status"] == OK], []
    for (metric, variant), own in scored.groupby(["metric", "variant"], sort=False):
        is_psnr = metric == "psnr"
        values = own["value"].to_numpy(np.float64)
        figures = summarise(values, own["status"].tolist(), within=range_of(metric))
        better = "higher" if METRICS[f"{metric}/{variant}"].higher_is_better else "lower"
        ends, exact = (figures.low, figures.high), figures.exact if is_psnr else None
        found.append(Mean(metric, variant, figures.mean, *ends, figures.n, exact, better))
    return found


def table(found: Sequence[Mean]) -> str:
    """The means as printed, and what the arrows mean."""
    lines = [f"{'metric':8}{'variant':10}{'mean':>10}  {'95 % interval':^23}{'n':>6}"]
    for of in found:
        direction = arrow(of.better_for_privacy == "higher")
        interval = f"[{of.low:10.5g},{of.high:10.5g}]"
        lines.append(f"{of.metric:8}{of.variant:10}{of.mean:10.5g}  {interval}{of.n:6} {direction}")
    lines.append("↑ higher, ↓ lower is better for privacy.")
    exact = [f"{of.exact} ({of.variant})" for of in found if of.exact is not None]
    if exact:
        lines.append(f"PSNR averages min(PSNR, {PSNR_CAP:g}). Exact images: {', '.join(exact)}.")
    return "\n".join(lines)
