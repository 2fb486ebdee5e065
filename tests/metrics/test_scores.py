"""The metrics against other people's code, against naive code, and where numbers end; what
`score` takes and refuses; which weights LPIPS loads."""

from pathlib import Path

import lpips as lpips_package
import numpy as np
import pytest
import scipy.signal
import scipy.spatial.distance
import skimage.data
import skimage.metrics
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import mjp_privacy
from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics.pictures import StructuralSimilarity, quantise
from mjp_privacy.metrics.scores import METRICS, prepare, score

WEIGHTS = Path(mjp_privacy.__file__).parent / "assets" / "alexnet_features_fp16.safetensors"
PAPER_ARROWS = {"mse": True, "fft2d": True, "psnr": False, "ssim": False, "lpips": True}
EVERY = {(name, variant) for name in PAPER_ARROWS for variant in ("paper", "standard")}


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


# naive code, and other people's -------------------------------------------------------------------


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


def naive_fft2d(u: np.ndarray, v: np.ndarray) -> float:
    """SciPy 1.9's cosine, as its source has it, on complex vectors."""
    a, b = np.fft.fft2(u).ravel(), np.fft.fft2(v).ravel()
    distance = abs(1 - np.average(a * b) / np.sqrt(np.average(a * a) * np.average(b * b)))
    return max(0, min(distance, 2.0))


def skimage_ssim(u: np.ndarray, v: np.ndarray) -> float:
    how = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    return skimage.metrics.structural_similarity(u, v, data_range=1, channel_axis=0, **how)


def skimage_psnr(u: np.ndarray, v: np.ndarray) -> float:
    return skimage.metrics.peak_signal_noise_ratio(u, v, data_range=1)


OTHERS = {  # metric, variant, who says so: their code and the tolerance
    ("mse", "paper", "skimage"): (skimage.metrics.mean_squared_error, 1e-12),
    ("psnr", "paper", "skimage"): (skimage_psnr, 1e-9),
    ("ssim", "paper", "naive"): (naive_ssim, 1e-12),
    ("fft2d", "paper", "naive"): (naive_fft2d, 1e-12),
    ("mse", "standard", "skimage"): (skimage.metrics.mean_squared_error, 1e-12),
    ("psnr", "standard", "skimage"): (skimage_psnr, 1e-9),
    ("ssim", "standard", "skimage"): (skimage_ssim, 1e-9),
    ("fft2d", "standard", "scipy"): (
        lambda u, v: scipy.spatial.distance.cosine(u.ravel(), v.ravel()),
        1e-12,
    ),
}


@pytest.mark.parametrize("case", OTHERS, ids="-".join)
def test_a_metric_is_what_other_code_says(case: tuple[str, str, str], pairs) -> None:
    """The paper's variants are of the images on 8 bits."""
    (theirs, tolerance), key = OTHERS[case], case[:2]
    seen = eight_bits if case[1] == "paper" else lambda image: image
    wanted = [theirs(seen(u), seen(v)) for u, v in zip(*pairs, strict=True)]
    np.testing.assert_allclose(score(*pairs, metrics=[key])[key], wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(1, 11, 11), (3, 27, 43), (3, 64, 33)])
def test_ssim_by_strips_is_the_convolution(shape) -> None:
    """Sides that fill the strips, and sides that do not."""
    u, v = np.random.default_rng(4).random((2, *shape))
    for left in (u, v, 0 * u, 0 * u + 0.5):
        for reference, padded in ((naive_ssim, True), (skimage_ssim, False)):
            measure = StructuralSimilarity(zero_padded=padded)
            made, known = torch.from_numpy(left[None]), torch.from_numpy(v[None])
            found = measure.compare(made, known, measure.prepare(known))
            assert found.item() == pytest.approx(reference(left, v), abs=1e-9)


def test_lpips_is_the_packages_to_a_millionth() -> None:
    """The package's own network and heads, with this package's weights of AlexNet."""
    network = lpips_package.LPIPS(net="alex", pnet_rand=True, verbose=False).requires_grad_(False)
    weights = load_file(WEIGHTS)
    layers = [layer for layer in network.net.modules() if isinstance(layer, torch.nn.Conv2d)]
    for k, layer in zip((0, 3, 6, 8, 10), layers, strict=True):
        layer.weight.data.copy_(weights[f"features.{k}.weight"])
        layer.bias.data.copy_(weights[f"features.{k}.bias"])
    right = pictures(97, on_levels=False, count=3)
    grey = noised(right)[:, :1]
    for left in (noised(right), grey.expand_as(right), torch.zeros_like(right)):
        found = score(left, right, ["lpips"])
        on_8_bits = (quantise(left).float(), quantise(right).float())
        for variant, pair in (("standard", (left, right)), ("paper", on_8_bits)):
            wanted = network(*pair, normalize=True).flatten().double().numpy()
            np.testing.assert_allclose(found["lpips", variant], wanted, rtol=0, atol=1e-6)
    three = score(grey.expand_as(right), grey.expand_as(right).flip(0), ["lpips"])
    for key, values in score(grey, grey.flip(0), ["lpips"]).items():
        np.testing.assert_allclose(values, three[key], rtol=0, atol=1e-6)


# levels and edges ---------------------------------------------------------------------------------


def test_arrows_and_8_bits_are_the_papers() -> None:
    arrows = {f"{name}/{variant}": PAPER_ARROWS[name] for name, variant in EVERY}
    assert {name: METRICS[name].higher_is_better for name in METRICS} == arrows
    assert quantise(torch.tensor([[[[-0.1, 1.1]]]])).flatten().tolist() == [0.0, 1.0]
    levels = np.random.default_rng(3).integers(1, 255, (1, 3, 32, 32)) / 255
    scores = score(levels + 0.4 / 255, levels)
    assert scores["psnr", "paper"][0] == np.inf
    assert scores["psnr", "standard"][0] == pytest.approx(20 * np.log10(255 / 0.4))
    originals = pictures(40, on_levels=False).round().double()
    past = originals + 9e-7 * (2 * originals - 1)  # rounding carries pixels beyond the range
    known = score(noised(originals), originals)
    for key, values in score(noised(originals), past).items():
        assert np.array_equal(values, known[key])
    assert np.isinf(score(past, originals, ["psnr/standard"])["psnr", "standard"]).all()


def test_fft2d_of_black_images_and_without_overlap_with_their_reflection() -> None:
    black, grey = np.zeros((1, 1, 8, 8)), np.full((1, 1, 8, 8), 0.5)
    for u, v, wanted in ((black, grey, 1.0), (grey, black, 1.0), (black, black, 0.0)):
        assert {values[0] for values in score(u, v, ["fft2d"]).values()} == {wanted}
    corner = black.copy()
    corner[..., 1, 2] = 1.0
    scores = score(corner, grey, ["fft2d"])
    assert scores["fft2d", "paper"][0] == 2.0  # as SciPy 1.9.3 gives: x / 0, cut to 2
    assert scores["fft2d", "standard"][0] == pytest.approx(1 - 1 / 8)
    assert score(corner, corner, ["fft2d"])["fft2d", "paper"][0] == 0.0


# prepared references ------------------------------------------------------------------------------


def pictures(side: int, *, on_levels: bool, count: int = 5) -> Tensor:
    values = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(side))
    return (values * 255).round() / 255 if on_levels else values


def noised(images: Tensor) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + 0.1 * noise).clamp(0, 1)


@pytest.mark.parametrize(("side", "on_levels"), [(32, True), (57, False)])
def test_prepared_references_give_the_scores_of_images(side: int, on_levels: bool) -> None:
    """Alone and in any batch, also where some pictures are equal."""
    originals = pictures(side, on_levels=on_levels, count=35)  # more than are scored at a time
    noisy = noised(originals)
    half = torch.cat([originals[:2], noisy[2:]])  # on levels, the first two are alike
    known = prepare(originals)
    for attempt in (noisy, originals * 0, half):
        plain, prepared = score(attempt, originals), score(attempt, known)
        assert list(plain) == list(prepared)
        alone = score(attempt[[33, 0]], known.at([33, 0]))
        for key, values in plain.items():
            assert np.array_equal(values, prepared[key])
            np.testing.assert_allclose(alone[key], values[[33, 0]], rtol=0, atol=1e-6)
    for key, values in plain.items():
        only = score(half[:3], originals[:3], [key])[key]
        np.testing.assert_allclose(values[:3], only, rtol=0, atol=1e-6)


# what goes in, what is refused --------------------------------------------------------------------


def test_tensors_arrays_and_names_give_the_same(pairs) -> None:
    u, v = (images.astype(np.float32) for images in pairs)
    arrays = score(u, v)
    tensors = score(torch.from_numpy(u).requires_grad_(), torch.from_numpy(v), device="cpu")
    views = score(u[:, :, ::-1], v[:, :, ::-1], ["mse"])
    assert set(arrays) == EVERY
    assert all(np.array_equal(arrays[key], tensors[key]) for key in arrays)
    np.testing.assert_allclose(views["mse", "paper"], arrays["mse", "paper"], rtol=1e-12)
    asked = [("ssim", "paper"), "mse/standard", "mse"]
    assert list(score(u, v, asked)) == [asked[0], ("mse", "standard"), ("mse", "paper")]
    assert list(score(u, prepare(v, "psnr/paper", device="cpu"))) == [("psnr", "paper")]


OK = np.full((2, 3, 32, 32), 0.5)
KNOWN = prepare(OK, ["mse"])
REFUSED = {
    "shapes": ((OK, OK[:1]), {}, r"\(2, 3, 32, 32\).*\(1, 3, 32, 32\)"),
    "one image": ((OK[0], OK[0]), {}, r"\(3, 32, 32\)"),
    "8 bits": ((OK.astype(np.uint8), OK), {}, "reconstructions.*uint8"),
    "list": ((OK.tolist(), OK), {}, "list"),
    "below": ((OK, OK - 0.50001), {}, "references.*-1e-05 to -1e-05"),
    "nan": ((np.where(np.arange(32) == 3, np.nan, OK), OK), {}, "nan"),
    "name": ((OK, OK), {"metrics": ["psn"]}, "'psn'.*psnr"),
    "variant": ((OK, OK), {"metrics": [("ssim", "papr")]}, "'ssim/papr'.*ssim/paper"),
    "no metric": ((OK, OK), {"metrics": []}, "none"),
    "device": ((OK, OK), {"device": "gpu0"}, "'gpu0'"),
    "no GPU": ((OK, OK), {"device": "cuda"}, "cuda"),
    "small for ssim": ((OK[..., :10], OK[..., :10]), {"metrics": ["ssim"]}, "SSIM.*32×10"),
    "small for lpips": ((OK[:, :, :30],) * 2, {"metrics": ["lpips"]}, "LPIPS.*30×32"),
    "channels": ((OK[:, :2],) * 2, {"metrics": ["lpips"]}, "LPIPS.*2"),
    "metrics of known": ((OK, KNOWN), {"metrics": ["mse"]}, "metrics"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_came(case: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    images, arguments, message = REFUSED[case]
    with pytest.raises(UserError, match=f"(?s){message}"):
        score(*images, **arguments)
