"""Scores of a block beside the packages that the paper's scripts call, in one run, on one core.

    python -m benchmarks.scores [--side 192] [--images 20] [--repeats 5]

Five metrics in two variants, for every image in every cell:

    packages  image by image: the lpips package on both images, scikit-image's SSIM (the paper's
              variant by its convolution with zeros beyond the border), NumPy's FFT
    images    `score(reconstructions, references)`: nothing is kept between cells
    prepared  `score(reconstructions, prepare(references))`: a block's further cells

The values are checked to be equal. Repeats alternate. CPU seconds of one thread are shown, per
image and cell: median, and the least and the most over the repeats.
"""

from __future__ import annotations

import lpips as lpips_package
import numpy as np
import skimage.metrics
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.page import alternate, bracketed, machine, ratio, write_result
from mjp_privacy.metrics.pictures import CONVOLUTIONS, backbone, quantise
from mjp_privacy.metrics.scores import prepare, score

Values = dict[tuple[str, str], NDArray[np.float64]]
Picture = NDArray[np.float64]

TOLERANCES = {"mse": 1e-9, "psnr": 1e-6, "fft2d": 1e-9, "ssim": 1e-6, "lpips": 1e-6}


NAMES = {
    "packages": "the packages, image by image",
    "images": "ours, two sets of images",
    "prepared": "ours, what is known of the private images prepared",
}


def lpips_network() -> lpips_package.LPIPS:
    """The lpips package's network with the convolutions that come with this package, for its own
    are fetched from the network."""
    network = lpips_package.LPIPS(net="alex", pnet_rand=True, verbose=False).eval()
    network.requires_grad_(False)
    layers = [m for m in network.net.modules() if isinstance(m, torch.nn.Conv2d)]
    weights = backbone()
    for (index, _, _), layer in zip(CONVOLUTIONS, layers, strict=True):
        layer.weight.copy_(weights[f"features.{index}.weight"])
        layer.bias.copy_(weights[f"features.{index}.bias"])
    return network


class Packages:
    """The paper's way: each pair of images alone, each metric by its package."""

    def __init__(self) -> None:
        self.network = lpips_network()
        taps = torch.exp(-(torch.arange(-5, 6, dtype=torch.float64) ** 2) / (2 * 1.5**2))
        window = torch.outer(taps, taps) / taps.sum() ** 2
        self.window = window.expand(3, 1, 11, 11).contiguous()

    def score(self, reconstructions: Tensor, references: Tensor) -> Values:
        rows = [self._both(u, v) for u, v in zip(reconstructions, references, strict=True)]
        return {key: np.array([row[key] for row in rows]) for key in rows[0]}

    def _both(self, u: Tensor, v: Tensor) -> dict[tuple[str, str], float]:
        row: dict[tuple[str, str], float] = {}
        for variant in ("paper", "standard"):
            pair = [quantise(x) if variant == "paper" else x.double() for x in (u, v)]
            a, b = (x.numpy() for x in pair)
            error = float(np.mean((a - b) ** 2))
            row["mse", variant] = error
            row["fft2d", variant] = fft2d(a, b, conjugate=variant == "standard")
            row["psnr", variant] = 10 * np.log10(1 / error)
            row["ssim", variant] = self._ssim(*pair) if variant == "paper" else skimage_ssim(a, b)
            floats = [x.float()[None] for x in pair]
            row["lpips", variant] = float(self.network(*floats, normalize=True))
        return row

    def _ssim(self, u: Tensor, v: Tensor) -> float:
        maps = torch.stack([u, v, u * u, v * v, u * v])
        means = torch.nn.functional.conv2d(maps, self.window, padding=5, groups=3)
        mu_u, mu_v, uu, vv, uv = means
        top = (2 * mu_u * mu_v + 0.01**2) * (2 * (uv - mu_u * mu_v) + 0.03**2)
        bottom = (mu_u**2 + mu_v**2 + 0.01**2) * (uu - mu_u**2 + vv - mu_v**2 + 0.03**2)
        return float((top / bottom).mean())


def skimage_ssim(a: Picture, b: Picture) -> float:
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    value = skimage.metrics.structural_similarity(a, b, data_range=1, channel_axis=0, **options)
    return float(value)


def fft2d(a: Picture, b: Picture, *, conjugate: bool) -> float:
    u, v = (np.fft.fft2(x).ravel() for x in (a, b))
    w, x = (np.conj(u), np.conj(v)) if conjugate else (u, v)
    distance = abs(1 - np.mean(u * x) / np.sqrt(np.mean(u * w) * np.mean(v * x)))
    return float(min(distance, 2.0))


def main(side: int = 192, images: int = 20, repeats: int = 5) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = (images, 3, side, side)
    references = (torch.rand(shape, generator=generator) * 255).round() / 255
    attempts = (references + 0.1 * torch.randn(shape, generator=generator)).clamp(0, 1)
    packages, known = Packages(), prepare(references)
    ways = {
        "packages": lambda: packages.score(attempts, references),
        "images": lambda: score(attempts, references),
        "prepared": lambda: score(attempts, known),
    }
    check({name: way() for name, way in ways.items()})
    facts, timings = machine(), alternate(ways, repeats)
    rows, table = [], [(f"{side} px, one thread", "CPU ms an image and cell", "packages / this")]
    for name, timing in timings.items():
        times = ratio(timings["packages"], timing, "cpu")
        seconds = timing.facts(images)["cpu"]
        rows.append({"way": name, "seconds_per_image": seconds, "packages / this": times})
        table.append((NAMES[name], f"{1e3 * seconds['median']:.1f}", bracketed(times)))
    write_result("scores", {"side": side, "images": images, "rows": rows}, facts, table)


def check(found: dict[str, Values]) -> None:
    for name, values in found.items():
        for key, wanted in found["packages"].items():
            error = np.abs(values[key] - wanted).max()
            assert error <= TOLERANCES[key[0]], f"{name}: {key} is off by {error:.1e}"


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
