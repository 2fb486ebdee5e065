"""The metrics against other people's code, against naive code, and by their properties."""

from pathlib import Path

import lpips as lpips_package
import numpy as np
import pytest
import scipy.signal
import scipy.spatial.distance
import skimage.data
import skimage.metrics
import torch
import torchmetrics.functional.image as torchmetrics_image
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

import mjp_privacy
from mjp_privacy.metrics import METRICS, score
from mjp_privacy.metrics.pictures import StructuralSimilarity, quantise

ROOT = Path(mjp_privacy.__file__).parent
WEIGHTS = ROOT / "assets" / "alexnet_features_fp16.safetensors"
PAPER_ARROWS = {"mse": True, "fft2d": True, "psnr": False, "ssim": False, "lpips": True}


@pytest.fixture(scope="module")
def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Reconstructions (noisy, other, grey, random) and references, (4, 3, 48, 57) float64."""
    photos = (skimage.data.astronaut(), skimage.data.chelsea(), skimage.data.coffee())
    first, second, third = (p[100:148, 150:207].transpose(2, 0, 1) / 255 for p in photos)
    rng = np.random.default_rng(0)
    noisy = np.clip(first + 0.1 * rng.standard_normal(first.shape), 0, 1)
    random = rng.random(first.shape)
    return np.stack([noisy, third, 0 * second + 0.5, random]), np.stack([first, second] * 2)


def eight_bits(image: np.ndarray) -> np.ndarray:
    """What a PNG would hold, by way of Pillow."""
    pixels = Image.fromarray(np.rint(255 * image).astype(np.uint8).transpose(1, 2, 0))
    return np.asarray(pixels).transpose(2, 0, 1) / 255.0


# naive implementations ----------------------------------------------------------------------------


def naive_ssim(u: np.ndarray, v: np.ndarray) -> float:
    taps = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    window = np.outer(taps, taps) / taps.sum() ** 2
    means = []
    for a, b in zip(u, v, strict=True):

        def mean(x: np.ndarray) -> np.ndarray:
            return scipy.signal.convolve2d(x, window, mode="same", fillvalue=0)

        var_a, var_b = mean(a * a) - mean(a) ** 2, mean(b * b) - mean(b) ** 2
        cov = mean(a * b) - mean(a) * mean(b)
        top = (2 * mean(a) * mean(b) + 0.01**2) * (2 * cov + 0.03**2)
        bottom = (mean(a) ** 2 + mean(b) ** 2 + 0.01**2) * (var_a + var_b + 0.03**2)
        means.append(np.mean(top / bottom))
    return float(np.mean(means))


def naive_spectrum(image: np.ndarray) -> np.ndarray:
    """The two-dimensional Fourier sum, written as such."""
    rows, columns = (
        np.exp(-2j * np.pi * np.outer(k, k) / len(k)) for k in map(np.arange, image.shape[1:])
    )
    return np.stack([rows @ channel @ columns for channel in image]).ravel()


def naive_fft2d(u: np.ndarray, v: np.ndarray) -> float:
    """SciPy 1.9's cosine, as its source has it, on complex vectors."""
    a, b = naive_spectrum(u), naive_spectrum(v)
    distance = abs(1 - np.average(a * b) / np.sqrt(np.average(a * a) * np.average(b * b)))
    return max(0, min(distance, 2.0))


NAIVE = {
    "mse": (lambda u, v: np.mean((u - v) ** 2), 1e-12),
    "psnr": (lambda u, v: 10 * np.log10(1 / np.mean((u - v) ** 2)), 1e-9),
    "ssim": (naive_ssim, 1e-12),
    "fft2d": (naive_fft2d, 1e-12),
}


@pytest.mark.parametrize("metric", NAIVE)
def test_paper_variant_is_the_naive_one_on_8_bits(metric: str, pairs) -> None:
    naive, tolerance = NAIVE[metric]
    wanted = [naive(eight_bits(u), eight_bits(v)) for u, v in zip(*pairs, strict=True)]
    scores = score(*pairs, metrics=[(metric, "paper")])
    np.testing.assert_allclose(scores[metric, "paper"], wanted, rtol=0, atol=tolerance)


# other people's code ------------------------------------------------------------------------------


def skimage_ssim(u: np.ndarray, v: np.ndarray) -> float:
    return skimage.metrics.structural_similarity(
        u, v, gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
        data_range=1, channel_axis=0,
    )  # fmt: skip


def torchmetrics_psnr(u: np.ndarray, v: np.ndarray) -> float:
    a, b = (torch.from_numpy(x) for x in (u, v))
    return torchmetrics_image.peak_signal_noise_ratio(a, b, data_range=1.0).item()


def skimage_psnr(u: np.ndarray, v: np.ndarray) -> float:
    return skimage.metrics.peak_signal_noise_ratio(v, u, data_range=1)


OTHERS = {
    "mse-skimage": (skimage.metrics.mean_squared_error, 1e-12),
    "psnr-skimage": (skimage_psnr, 1e-9),
    "psnr-torchmetrics": (torchmetrics_psnr, 1e-5),
    "ssim-skimage": (skimage_ssim, 1e-9),
    "fft2d-pixel cosine": (lambda u, v: scipy.spatial.distance.cosine(u.ravel(), v.ravel()), 1e-12),
}


@pytest.mark.parametrize("case", OTHERS)
def test_standard_variant_agrees_with_other_code(case: str, pairs) -> None:
    other, tolerance = OTHERS[case]
    metric = case.split("-")[0]
    wanted = [other(u, v) for u, v in zip(*pairs, strict=True)]
    scores = score(*pairs, metrics=[(metric, "standard")])
    np.testing.assert_allclose(scores[metric, "standard"], wanted, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def lpips_network() -> lpips_package.LPIPS:
    """The package's own network and heads, with this package's weights of AlexNet."""
    network = lpips_package.LPIPS(net="alex", pnet_rand=True, verbose=False)
    weights = load_file(WEIGHTS)
    layers = [layer for layer in network.net.modules() if isinstance(layer, torch.nn.Conv2d)]
    for k, layer in zip((0, 3, 6, 8, 10), layers, strict=True):
        layer.weight.data.copy_(weights[f"features.{k}.weight"])
        layer.bias.data.copy_(weights[f"features.{k}.bias"])
    return network.requires_grad_(False)


@pytest.mark.parametrize("side", [32, 56, 192, 224])
def test_lpips_is_the_packages_to_a_millionth(side: int, lpips_network) -> None:
    generator = torch.Generator().manual_seed(side)
    right = torch.rand(3, 3, side, side, generator=generator)
    noisy = (right + 0.1 * torch.randn(right.shape, generator=generator)).clamp(0, 1)
    for left in (noisy, torch.full_like(right, 0.5), torch.zeros_like(right)):
        found = score(left, right, ["lpips"])
        for variant, pair in (
            ("standard", (left, right)),
            ("paper", (quantise(left).float(), quantise(right).float())),
        ):
            wanted = lpips_network(*pair, normalize=True).flatten().double().numpy()
            np.testing.assert_allclose(found["lpips", variant], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 11, 11), (3, 16, 26), (3, 27, 43), (3, 64, 33)])
def test_ssim_by_strips_is_the_convolution(shape) -> None:
    """Sides that fill the strips, and sides that do not."""
    u, v = np.random.default_rng(4).random((2, *shape))
    for left in (u, v, 0 * u, 0 * u + 0.5):
        for reference, padded in ((naive_ssim, True), (skimage_ssim, False)):
            measure = StructuralSimilarity(zero_padded=padded)
            made, known = torch.from_numpy(left[None]), torch.from_numpy(v[None])
            found = measure.compare(made, known, measure.prepare(known))
            assert found.item() == pytest.approx(reference(left, v), abs=1e-9)


# properties ---------------------------------------------------------------------------------------

RANGES = {"mse": (0, 1), "psnr": (0, np.inf), "ssim": (-1, 1), "fft2d": (0, 2), "lpips": (0, 10)}


@given(
    seed=st.integers(0, 2**32 - 1),
    channels=st.sampled_from([1, 3]),
    height=st.integers(31, 40),
    width=st.integers(31, 40),
    contrast=st.floats(0, 1),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_range_symmetry_and_identity(seed, channels, height, width, contrast) -> None:
    rng = np.random.default_rng(seed)
    u, v = rng.random((2, 1, channels, height, width))
    v = v * contrast
    forward, backward, same = score(u, v), score(v, u), score(u, u)
    for (metric, variant), value in forward.items():
        low, high = RANGES[metric]
        assert low <= value[0] <= high
        np.testing.assert_allclose(value, backward[metric, variant], rtol=1e-6, atol=1e-12)
        best = {"psnr": np.inf, "ssim": 1.0}.get(metric, 0.0)
        np.testing.assert_allclose(same[metric, variant], best, rtol=0, atol=1e-9)


def test_an_image_scores_the_same_alone_and_in_any_batch() -> None:
    u, v = np.random.default_rng(1).random((2, 70, 3, 32, 32))
    together = score(u, v)
    for at in (0, 33, 69):
        for key, values in score(u[at : at + 1], v[at : at + 1]).items():
            assert together[key].shape == (70,)
            assert together[key].dtype == np.float64
            np.testing.assert_allclose(together[key][at], values[0], rtol=0, atol=1e-6)


def test_higher_is_better_as_the_papers_arrows() -> None:
    arrows = {f"{n}/{v}": up for n, up in PAPER_ARROWS.items() for v in ("paper", "standard")}
    assert {name: METRICS[name].higher_is_better for name in METRICS} == arrows


def test_quantise_rounds_as_a_saved_file() -> None:
    image = np.random.default_rng(2).random((1, 3, 20, 20))
    assert np.array_equal(quantise(torch.from_numpy(image))[0].numpy(), eight_bits(image[0]))
    beyond = torch.tensor([-0.1, 1.1]).reshape(1, 1, 1, 2)
    assert quantise(beyond).flatten().tolist() == [0.0, 1.0]


def test_paper_variant_does_not_see_what_8_bits_do_not_hold() -> None:
    levels = np.random.default_rng(3).integers(1, 255, (1, 3, 32, 32)) / 255
    scores = score(levels + 0.4 / 255, levels)
    assert scores["psnr", "paper"][0] == np.inf
    assert scores["psnr", "standard"][0] == pytest.approx(20 * np.log10(255 / 0.4))


def test_fft2d_of_black_images() -> None:
    black, grey = np.zeros((1, 3, 8, 8)), np.full((1, 3, 8, 8), 0.5)
    for variant in ("paper", "standard"):
        for u, v, wanted in ((black, grey, 1.0), (grey, black, 1.0), (black, black, 0.0)):
            assert score(u, v, [("fft2d", variant)])["fft2d", variant][0] == wanted


def test_paper_fft2d_is_2_without_overlap_with_its_own_reflection() -> None:
    corner, grey = np.zeros((1, 1, 8, 8)), np.full((1, 1, 8, 8), 0.5)
    corner[..., 1, 2] = 1.0
    scores = score(corner, grey, ["fft2d"])
    assert scores["fft2d", "paper"][0] == 2.0  # as SciPy 1.9.3 gives: x / 0, cut to 2
    assert scores["fft2d", "standard"][0] == pytest.approx(1 - 1 / 8)
    assert score(corner, corner, ["fft2d"])["fft2d", "paper"][0] == 0.0
