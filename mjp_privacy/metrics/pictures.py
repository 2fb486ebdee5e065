"""What every metric provides: a measure of one pair of images, and which direction is better.

A measure works in two steps. `prepare` computes what it needs of the reference images alone, once;
`compare` then scores any number of reconstructions against them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind
from mjp_privacy.models.tensor_files import TensorFile, read_torch_file

Variant = Literal["paper", "standard"]
Prepared = tuple[Tensor, ...]
"""What a measure keeps of the reference images. The first axis of every tensor is the image."""


def arrow(higher_is_better: bool) -> str:
    """The arrow with which tables mark the direction that is better for the model owner."""
    return "↑" if higher_is_better else "↓"


class Measure(Protocol):
    """A number for each pair of images. A frozen dataclass: equal ones are computed once.

    precision  float64: it is given few images at a time, so that they stay in the processor's
               cache. float32: a network, which is given many images at a time.
    """

    precision: ClassVar[torch.dtype]

    def prepare(self, references: Tensor) -> Prepared:
        """What `compare` needs of the references (m, C, H, W) in [0, 1] besides themselves."""

    def compare(self, reconstructions: Tensor, references: Tensor, prepared: Prepared) -> Tensor:
        """(m, C, H, W) twice in [0, 1] -> (m,), without any average over images."""


def unchanged(values: Tensor) -> Tensor:
    """The values of a measure as they are."""
    return values


@dataclass(frozen=True)
class Metric:
    """One score: a measure on the images of a variant, and what is made of its values.

    `higher_is_better` means better for privacy, as with the paper's arrows.
    """

    name: str
    variant: Variant
    higher_is_better: bool
    measure: Measure
    summary: str = ""
    finish: Callable[[Tensor], Tensor] = unchanged


# ------------------------------------------------------------------------------------------------
# Scores that compare pixel with pixel, and the 8-bit levels that image files hold.


def levels(images: Tensor) -> Tensor:
    """(m, C, H, W) in [0, 1] -> float64 of 0 to 255, as an image file holds them."""
    return (images.double().clamp(0, 1) * 255).round_()


def quantise(images: Tensor) -> Tensor:
    """(m, C, H, W) -> float64 in [0, 1] on the levels k / 255, as saved to a file and read back."""
    return levels(images).div_(255)


def mse(reconstructions: Tensor, references: Tensor) -> Tensor:
    """Mean of (u - v)^2 over channels and pixels. (m, C, H, W) twice -> (m,) float64 in [0, 1]."""
    difference = (reconstructions.double() - references.double()).flatten(1)
    return overlap(difference, difference) / difference.shape[1]


def psnr(reconstructions: Tensor, references: Tensor) -> Tensor:
    """10 log10(1 / MSE) in dB, peak 1; inf where the images are identical. -> (m,) float64."""
    return decibels(mse(reconstructions, references))


def decibels(errors: Tensor) -> Tensor:
    """PSNR from mean squared errors."""
    return 0.0 - 10 * errors.log10()  # 0 - x, so that MSE 1 is 0, not -0


def overlap(left: Tensor, right: Tensor) -> Tensor:
    """Sum of the products of corresponding pixels; (m, ...) twice -> (m,)."""
    return torch.bmm(left.flatten(1).unsqueeze(1), right.flatten(1).unsqueeze(2)).flatten()


@dataclass(frozen=True)
class SquaredError:
    """The mean squared error as a measure: MSE, and PSNR after `decibels`."""

    precision: ClassVar[torch.dtype] = torch.float64

    def prepare(self, references: Tensor) -> Prepared:
        """Nothing."""
        return ()

    def compare(self, reconstructions: Tensor, references: Tensor, prepared: Prepared) -> Tensor:
        """`mse`."""
        return mse(reconstructions, references)


# ------------------------------------------------------------------------------------------------
# FFT2D: cosine distance between the two-dimensional spectra of two images.
#
#     |1 - <U, V> / sqrt(<U, U> <V, V>)|,   U and V the flattened FFTs,   in [0, 2]
#
# The paper's score takes <U, V> = sum U V: its script passed complex vectors to SciPy's cosine,
# which in 1.9 neither conjugated nor refused them, and cut the result to [0, 2]. The standard one
# takes <U, V> = sum U conj(V). For real images u, v of H x W pixels both are sums over pixels
# (Parseval):
#
#     sum U V       = H W sum_x u(x) v(-x)
#     sum U conj(V) = H W sum_x u(x) v(x)
#
# so no spectrum is computed, and H W cancels. The paper's score compares an image with the other's
# point reflection on the periodic grid, relative to how much each image overlaps with its own; the
# standard one is exactly the cosine distance of the pixels and says nothing about frequencies.

ROUNDING = 1e-12
"""A product below this share of the images' energies is rounding error and counts as 0."""


@dataclass(frozen=True)
class SpectralCosine:
    """FFT2D as a measure.

    Where an image does not overlap with its own reflection, the paper's score is 2. 0/0 (for a
    black image, say), which SciPy leaves undefined, is 0 for identical images and 1 for others.
    """

    conjugate: bool
    precision: ClassVar[torch.dtype] = torch.float64

    def prepare(self, references: Tensor) -> Prepared:
        """The norms (m,) of the references, and their products with themselves."""
        return self._own(references, self._turned(references))

    def compare(self, reconstructions: Tensor, references: Tensor, prepared: Prepared) -> Tensor:
        """(m, C, H, W) twice, float64 -> (m,) float64 in [0, 2]."""
        turned = self._turned(reconstructions)
        norm, own = self._own(reconstructions, turned)
        reference_norm, reference_own = prepared
        shared = _rounded(overlap(turned, references), norm * reference_norm)
        cosine = shared / (own.sqrt() * reference_own.sqrt())
        if cosine.isnan().any():
            same = (reconstructions == references).flatten(1).all(1).double()
            cosine = torch.where(cosine.isnan(), same, cosine)
        return (1 - cosine).abs().clamp(max=2)

    def _turned(self, images: Tensor) -> Tensor:
        """What the pixels of the other image are multiplied with: v(x), or v(-x) on the periodic
        grid, where pixel (i, j) of v stands at (-i mod H, -j mod W)."""
        return images if self.conjugate else images.flip(-2, -1).roll((1, 1), (-2, -1))

    def _own(self, images: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        energy = overlap(images, images)
        own = energy if self.conjugate else overlap(images, turned)
        return energy.sqrt(), _rounded(own, energy)


def _rounded(products: Tensor, scale: Tensor) -> Tensor:
    return torch.where(products > ROUNDING * scale, products, 0.0)


# ------------------------------------------------------------------------------------------------
# SSIM with the 11-tap Gaussian window of Wang et al. 2004, for images with values in [0, 1].
#
#     (2 mu_u mu_v + C1) (2 cov_uv + C2) / ((mu_u^2 + mu_v^2 + C1) (var_u + var_v + C2))
#
# averaged over windows and channels; mu, var and cov are means under the window.

SIGMA = 1.5
RADIUS = 5  # 11 taps
SMALLEST = {"ssim": 2 * RADIUS + 1, "lpips": 31}
"""Pixels a side that metrics need: a whole window; at LPIPS' second pooling one."""
C1 = 0.01**2
C2 = 0.03**2
STRIP = 16  # windows that one matrix product makes along a side
REACH = STRIP + 2 * RADIUS  # pixels that they cover


@dataclass(frozen=True)
class StructuralSimilarity:
    """SSIM as a measure, in float64.

    `zero_padded` averages over a window around every pixel, with zeros beyond the border, as the
    paper's scripts do. Otherwise only windows inside the image count, as in scikit-image.
    """

    zero_padded: bool
    precision: ClassVar[torch.dtype] = torch.float64

    def prepare(self, references: Tensor) -> Prepared:
        """The references' local means, and their local variances plus C2."""
        window = self._window(references)
        mean = window.means(0, references)
        variance = window.means(1, references, references).addcmul_(mean, mean, value=-1)
        return window.by_image(mean).clone(), window.by_image(variance.add_(C2)).clone()

    def compare(self, reconstructions: Tensor, references: Tensor, prepared: Prepared) -> Tensor:
        """(m, C, H, W) twice -> (m,) in [-1, 1].

        Maps are changed in place: what takes time is reading and writing them.
        """
        window = self._window(reconstructions)
        mean_v, variance_v = (window.by_window(known) for known in prepared)
        mean = window.means(0, reconstructions)
        covariance = window.means(1, reconstructions, references)
        variance = window.means(2, reconstructions, reconstructions)
        product = torch.mul(mean, mean_v, out=window.maps[3])
        covariance.sub_(product).add_(C2 / 2)
        variance.addcmul_(mean, mean, value=-1).add_(variance_v)
        product += C1 / 2
        # mu_u^2 + mu_v^2 + C1 is (mu_u - mu_v)^2 + 2 (mu_u mu_v + C1 / 2)
        squares = mean.sub_(mean_v).square_().add_(product, alpha=2)
        quarter = product.mul_(covariance).div_(squares.mul_(variance))
        return (4 * window.by_image(quarter).sum((1, 2, 3)) - window.filling) / window.count

    def _window(self, images: Tensor) -> GaussianWindow:
        m, channels, height, width = images.shape
        margin = RADIUS if self.zero_padded else 0
        shape = (m, channels, height, width)
        return gaussian_window(shape, margin, images.device, threading.get_ident())


class GaussianWindow:
    """The window at every place of images (m, C, H, W) with `margin` zeros around them.

    Along each side, 16 windows together cover 26 pixels: a banded matrix of 16 × 26 makes their
    means, in a fifth of the time of one matrix for the whole side. Sides are filled up to whole
    strips with windows of zeros only, whose similarity is 1. A map of means is
    (strips across, 16, m * windows down * C). Its memory is used again in the next call: fresh
    memory would cost as much as the means.
    """

    def __init__(self, shape: tuple[int, int, int, int], margin: int, device: torch.device) -> None:
        self.images, channels, height, width = shape
        lost = 2 * (RADIUS - margin)
        self.down, self.across = (_bands(side - lost, device) for side in (height, width))
        rows, columns = (len(bands) * STRIP for bands in (self.down, self.across))
        self.count = channels * (height - lost) * (width - lost)
        self.filling = channels * rows * columns - self.count

        def empty(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.float64, device=device)

        # (image, row, channel, column): all channels of a row are one row of the first product
        padded = empty(self.images, rows + 2 * RADIUS, channels, columns + 2 * RADIUS)
        self.inside = padded[:, margin : margin + height, :, margin : margin + width]
        self.strips = padded.flatten(2).unfold(1, REACH, STRIP).mT
        lines = empty(self.images * rows * channels, columns + 2 * RADIUS)
        self.lines = lines.view(self.images * len(self.down), STRIP, -1)
        self.lines_by_strip = lines.unfold(1, REACH, STRIP).permute(1, 2, 0)
        self.maps = [empty(len(self.across), STRIP, len(lines)) for _ in range(4)]

    def means(self, number: int, images: Tensor, times: Tensor | None = None) -> Tensor:
        """Means of the images, or of their products with others, under every window: the map of
        this number."""
        entries = images.transpose(1, 2)
        if times is None:
            self.inside.copy_(entries)
        else:
            torch.mul(entries, times.transpose(1, 2), out=self.inside)
        down = self.down.repeat(self.images, 1, 1)
        torch.bmm(down, self.strips.flatten(0, 1), out=self.lines)
        return torch.bmm(self.across, self.lines_by_strip, out=self.maps[number])

    def by_image(self, means: Tensor) -> Tensor:
        """A map with the image as its first axis."""
        return means.reshape(*means.shape[:2], self.images, -1).movedim(2, 0)

    def by_window(self, means: Tensor) -> Tensor:
        """Back again."""
        return means.movedim(0, 2).flatten(2)


@lru_cache(maxsize=4)
def gaussian_window(
    shape: tuple[int, int, int, int], margin: int, device: torch.device, thread: int
) -> GaussianWindow:
    """The window with its memory, which belongs to one thread."""
    return GaussianWindow(shape, margin, device)


@lru_cache(maxsize=16)
def _bands(windows: int, device: torch.device) -> Tensor:
    """(strips, 16, 26): the weights with which each window sees the pixels of its strip."""
    at = torch.arange(REACH, dtype=torch.float64) - torch.arange(STRIP)[:, None] - RADIUS
    taps = torch.arange(-RADIUS, RADIUS + 1, dtype=torch.float64)
    total = torch.exp(-(taps**2) / (2 * SIGMA**2)).sum()
    band = torch.exp(-(at**2) / (2 * SIGMA**2)) / total * (at.abs() <= RADIUS)
    strips = -(-windows // STRIP)
    counted = torch.arange(strips * STRIP).reshape(strips, STRIP, 1) < windows
    return (band * counted).to(device)


# ------------------------------------------------------------------------------------------------
# LPIPS v0.1 with AlexNet (Zhang et al. 2018), without a download. Within 5e-7 of the `lpips`
# package, which takes seconds to import and is the tests' yardstick.
#
# The heads come with that package, AlexNet's convolutions from the float16 copy in this package;
# scores by torchvision's own file differ by less than 2e-4. The network computes in float32, TF32
# off.

PACKAGED = Path(__file__).parents[1] / "assets" / "alexnet_features_fp16.safetensors"

HEADS = FileKind("LPIPS' weights in the lpips package", "Install the lpips package again.")
OF_PACKAGE = FileKind("AlexNet's weights in this package", "Install mjp-privacy again.")

SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""LPIPS' own: from [-1, 1] to the values that AlexNet was trained on."""
CONVOLUTIONS = ((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1))  # index, stride, padding
POOLED_BEFORE = (3, 6)
EPS = 1e-10  # as in the lpips package


def alexnet_layers(images: Tensor) -> Iterator[Tensor]:
    """AlexNet's five rectified layers (n, places, channels) float32 of images (n, C, H, W) in
    [0, 1]; C = 3, or 1 for grey taken as three equal ones.

    On a CPU their memory has the channels last, which is what its convolutions are fastest with.
    """
    shift, scale = (torch.tensor(v, device=images.device) for v in (SHIFT, SCALE))
    gain, offset = (x.reshape(1, 3, 1, 1) for x in (2 / scale, -(1 + shift) / scale))
    layout = _layout(images.device)
    flowing = (images.float() * gain + offset).contiguous(memory_format=layout)
    for (index, stride, padding), (weight, bias) in zip(
        CONVOLUTIONS, _convolutions(images.device), strict=True
    ):
        exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
        with torch.no_grad(), exact:
            if index in POOLED_BEFORE:
                flowing = max_pool2d(flowing, kernel_size=3, stride=2)
            flowing = conv2d(flowing, weight, bias, stride=stride, padding=padding).relu_()
        yield flowing.permute(0, 2, 3, 1).flatten(1, 2)


def of_length_one(layer: Tensor) -> Tensor:
    """The layer, at every place divided by its length."""
    length: Tensor = torch.linalg.vector_norm(layer, dim=-1, keepdim=True)
    return layer / (length + EPS)


def lpips_backbone() -> str:
    """Which AlexNet weights are used, in words."""
    return f"{PACKAGED.name} of this package, float16"


@cache
def lpips_heads() -> tuple[Tensor, ...]:
    """LPIPS' weight of every channel, by layer: (1, C, 1, 1), not negative."""
    package = find_spec("lpips")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "weights" / "v0.1" / "alex.pth"
    stored = read_torch_file(file, HEADS)
    names = [f"lin{number}.model.1.weight" for number in range(len(CONVOLUTIONS))]
    with HEADS.reading(file):
        return tuple(stored[name].clamp(min=0) for name in names)


def _layout(device: torch.device) -> torch.memory_format:
    return torch.channels_last if device.type == "cpu" else torch.contiguous_format


@cache
def _convolutions(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each convolution, as the device takes them."""
    stored, layout = backbone(), _layout(device)
    return [
        (
            stored[f"features.{index}.weight"].to(device, torch.float32, memory_format=layout),
            stored[f"features.{index}.bias"].to(device, torch.float32),
        )
        for index, _, _ in CONVOLUTIONS
    ]


@cache
def backbone() -> dict[str, Tensor]:
    """AlexNet's convolutions under torchvision's names: `features.0.weight` and so on."""
    return TensorFile(PACKAGED, OF_PACKAGE).tensors(finite=True)


@dataclass(frozen=True)
class Lpips:
    """LPIPS as a measure: weighted squared distance of unit-length features, averaged over space,
    summed over layers. Float32, >= 0.

    Images have 3 channels (RGB) or 1 (grey).
    """

    precision: ClassVar[torch.dtype] = torch.float32

    def prepare(self, references: Tensor) -> Prepared:
        """The references' features, (m, places, channels) for each layer."""
        channels = references.shape[1]
        if channels not in (1, 3):
            raise UserError(
                f"LPIPS expected images of 3 channels (RGB) or 1 (grey); these have {channels}. "
                "Leave lpips out of the metrics or score RGB images."
            )
        return tuple(map(of_length_one, alexnet_layers(references)))

    def compare(self, reconstructions: Tensor, references: Tensor, prepared: Prepared) -> Tensor:
        """(m, C, H, W) in [0, 1] and the features of the references -> (m,)."""
        total = reconstructions.new_zeros(len(reconstructions))
        layers = zip(alexnet_layers(reconstructions), prepared, lpips_heads(), strict=True)
        for layer, known, head in layers:
            squares = of_length_one(layer).sub_(known).square_()
            total += (squares @ head.flatten().to(squares)).mean(1)
        return total
