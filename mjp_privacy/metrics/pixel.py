"""Scores that compare pixel with pixel, and the 8-bit levels that image files hold."""

from torch import Tensor


def quantise(images: Tensor) -> Tensor:
    """(m, C, H, W) -> float64 in [0, 1] on the levels k / 255, as saved to a file and read back."""
    return (images.double().clamp(0, 1) * 255).round() / 255


def mse(reconstructions: Tensor, references: Tensor) -> Tensor:
    """Mean of (u - v)^2 over channels and pixels. (m, C, H, W) twice -> (m,) float64 in [0, 1]."""
    return (reconstructions.double() - references.double()).square().flatten(1).mean(1)


def psnr(reconstructions: Tensor, references: Tensor) -> Tensor:
    """10 log10(1 / MSE) in dB, peak 1; inf where the images are identical. -> (m,) float64."""
    return 0.0 - 10 * mse(reconstructions, references).log10()  # 0 - x, so that MSE 1 is 0, not -0
