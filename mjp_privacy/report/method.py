"""How scores become figures: the notes that every report ends with."""

from __future__ import annotations

from collections.abc import Sequence

from mjp_privacy.metrics.statistics import LEVEL, MOST_DRAWN, PSNR_CAP, RESAMPLES
from mjp_privacy.report.line import Line


def method(lines: Sequence[Line]) -> list[str]:
    """How scores become figures; printed with every report, so that it can stand alone."""
    by_group = any(line.photographs is not None for line in lines)
    unit = "images (photographs, where images are crops of one)" if by_group else "images"
    return [
        "Arrows give the direction that is better for the model owner's privacy, as in the paper. "
        "Acc. is in percent, PSNR in dB.",
        f"Figures are mean [low, high], where low and high bound a {LEVEL:.0%} percentile "
        f"bootstrap interval of the mean over {unit}, {_resampled(lines)}. "
        "For a single one no interval can be computed, and – is printed. Shares (Acc., counts) "
        f"have Wilson's interval{_of_crops(by_group)}. An interval says nothing "
        "about other checkpoints, shuffles or client seeds.",
        f"Means of PSNR are of min(PSNR, {PSNR_CAP:.0f}) per image, as are medians in tables "
        "(100 is the cap); exact images are those equal to the compared one in every 8-bit value.",
        "With float32 gradients APRIL's score of one image changes by up to about 2 dB with the "
        "number of images computed together, as where memory does not hold a block, and with the "
        "machine; means change by a few tenths, which the intervals do not include. With float64 "
        "gradients it does not change.",
        "n is the number of images in a mean. Images that failed, that the attack does not support "
        "or that could not be scored are counted beside it, with their reasons above.",
        "The paper variant scores both images rounded to 8 bits, as the paper's scripts do, with "
        "their FFT2D and zero-padded SSIM; images that are equal after rounding count as exact. "
        "Tables show the standard variant, and this one only beside the paper's figures and where "
        "exact pictures are counted. The standard variant scores the "
        "images as they are; its FFT2D conjugates one spectrum, which makes it the cosine distance "
        "of the pixels.",
    ]


def _of_crops(by_group: bool) -> str:
    """What Wilson's interval counts where images are crops."""
    return ", crops of one photograph counted as if they agreed" if by_group else ""


def _resampled(lines: Sequence[Line]) -> str:
    """How the intervals of lines with few and with many images or photographs are made."""
    units = [
        len(line.images) if line.photographs is None else len(line.photographs.present().words)
        for line in lines
    ]
    drawn = f"with {RESAMPLES} resamples and a fixed seed"
    if max(units, default=0) <= MOST_DRAWN:
        return drawn
    return f"{drawn}, or beyond {MOST_DRAWN} of them from their mean, spread and skewness"
