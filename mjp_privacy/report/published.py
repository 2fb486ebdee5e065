"""The paper's Table 5 as printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.metrics import METRICS as SCORES
from mjp_privacy.metrics.pictures import arrow

METRICS = ("mse", "fft2d", "psnr", "ssim", "lpips")
"""The five scores in the paper's order of columns."""

TITLES: Mapping[str, str] = {
    "acc": "Acc.",
    "mse": "MSE",
    "fft2d": "FFT2D",
    "psnr": "PSNR",
    "ssim": "SSIM",
    "lpips": "LPIPS",
}

ARROWS: Mapping[str, str] = {
    "acc": arrow(True),
    **{name: arrow(SCORES[f"{name}/paper"].higher_is_better) for name in METRICS},
}
"""Which direction is better for the model owner: a bad reconstruction is good privacy."""

CITATION = (
    "Bin Ren, Yahui Liu, Yue Song, Wei Bi, Rita Cucchiara, Nicu Sebe and Wei Wang. Masked Jigsaw "
    "Puzzle: A Versatile Position Embedding for Vision Transformers. CVPR 2023. Table 5."
)

CAVEATS = (
    "Row (3), DeiT-S+MJP (w/o) in setting (a), repeats all five scores of row (2), DeiT-S+MJP in "
    "setting (b) (.1043 .0059 11.66 .4493 .6519); only the accuracy differs (40.6 and 62.9). At "
    "least one of the two rows is a copy, so a difference from either proves nothing.",
    "γ of settings (b) and (c): the poster's caption says .27; the authors' eval.py and the "
    "supplement's figures of the same attack say .9. The printed accuracies fit .9: 18.7 for ViT-S "
    "and 36.0 for DeiT-S, where a ViT-Ti on shuffled patches keeps 77.7 % at .27, 58.8 at .5 "
    "and 27.3 at .9 (top-1, 600 ImageNet photographs). Lines at .9 are therefore to be read first "
    "beside the paper's figures, those at .27 as the caption's.",
    "The paper says 1K validation images, one per class; 999 were released.",
    "The paper's FFT2D multiplies the two spectra without conjugation, which compares with the "
    "image reflected through its centre.",
    "Its PSNR is a mean of per-image PSNRs: it lies up to 6 dB above the PSNR of the mean MSE "
    "printed beside it, so the distributions are heavy-tailed.",
)
"""Inconsistencies and open questions in the paper's own table, printed in every report."""


@dataclass(frozen=True)
class PublishedRow:
    """One printed row; accuracy in percent, PSNR in dB."""

    group: int  # (1)-(4)
    model: str
    setting: str
    acc: float
    mse: float
    fft2d: float
    psnr: float
    ssim: float
    lpips: float
    repeats: str | None = None  # the row whose five scores it repeats, digit for digit

    @property
    def label(self) -> str:
        """The row's name, such as `(2) DeiT-S b`."""
        return f"({self.group}) {self.model} {self.setting}"


TABLE5 = (
    PublishedRow(1, "ViT-S", "a", 78.1, 0.0278, 0.0039, 19.27, 0.5203, 0.3623),
    PublishedRow(1, "DeiT-S", "a", 79.8, 0.0350, 0.0057, 18.94, 0.5182, 0.3767),
    PublishedRow(1, "DeiT-S (w/o PEs)", "a", 77.5, 0.0379, 0.0082, 20.22, 0.5912, 0.2692),
    PublishedRow(1, "DeiT-S+MJP", "a", 80.5, 0.1055, 0.0166, 11.52, 0.4053, 0.6545),
    PublishedRow(2, "ViT-S", "b", 18.7, 0.0327, 0.0016, 18.44, 0.6065, 0.2836),
    PublishedRow(2, "DeiT-S", "b", 36.0, 0.0391, 0.0024, 17.60, 0.5991, 0.3355),
    PublishedRow(2, "DeiT-S (w/o PEs)", "b", 77.5, 0.0379, 0.0025, 20.25, 0.6655, 0.2370),
    PublishedRow(2, "DeiT-S+MJP", "b", 62.9, 0.1043, 0.0059, 11.66, 0.4493, 0.6519),
    PublishedRow(
        *(3, "DeiT-S+MJP (w/o)", "a", 40.6, 0.1043, 0.0059, 11.66, 0.4493, 0.6519),
        repeats="(2) DeiT-S+MJP b",
    ),
    PublishedRow(4, "DeiT-S+MJP", "c", 62.9, 0.1706, 0.0338, 8.07, 0.0875, 0.8945),
)

_BY_NAME = {(row.model, row.setting): row for row in TABLE5}


def published_row(model: str, setting: str) -> PublishedRow:
    """The printed row of a model in a setting, as in `published_row("DeiT-S", "b")`."""
    row = _BY_NAME.get((model, setting))
    if row is None:
        names = [f"{row.model} {row.setting}" for row in TABLE5]
        hint = did_you_mean(f"{model} {setting}", names)
        raise UserError(
            f"Expected a paper_row of the paper's Table 5, got model {model!r} in setting "
            f"{setting!r}.{hint} Available: {', '.join(names)}."
        )
    return row
