"""The paper's Table 5 as printed, and what differs from its set-up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.metrics import METRICS as SCORES
from mjp_privacy.metrics.pictures import arrow
from mjp_privacy.metrics.statistics import LEVEL, MOST_DRAWN, PSNR_CAP, RESAMPLES
from mjp_privacy.report.lines import Line

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


# what differs -------------------------------------------------------------------------------------

PAPER_IMAGES = 1000
PAPER_SIZE = 224


def differences(lines: Sequence[Line]) -> list[str]:
    """How images, labels, model, client and precision of each line differ from the paper's."""
    topics = (_images, _labels, _model, _victim, _precision, _client, _stored_notes)
    return [sentence for topic in topics for sentence in grouped(lines, topic)]


def _images(line: Line) -> Iterable[str]:
    data = line.cell.command.data or "images of unknown origin"
    if not line.cell.command.data_is_papers:
        yield (
            f"Images: {data}; they were not declared to be ImageNet-1K validation images like the "
            "paper's (--data-is-papers), so the paper's figures do not stand beside them."
        )
    images = len(line.images)
    if images and images != PAPER_IMAGES:
        yield f"Number of images: {images}; the paper says 1K."
    if line.photographs is not None:
        photographs = len(line.photographs.present().words)
        yield (
            f"The images are crops of {photographs} photographs; for the intervals of "
            "means whole photographs are resampled, and shares count crops as if they agreed."
        )


def _labels(line: Line) -> Iterable[str]:
    if line.cell.command.labels:
        yield line.cell.command.labels
    if not line.cell.command.true_labels:
        yield "No true labels are known, so there is no accuracy."


def _model(line: Line) -> Iterable[str]:
    cell = line.cell
    if cell.model.checkpoint:
        digest = re.fullmatch(r"[0-9a-f]{64}", str(cell.model.checkpoint_sha))
        sha = f", sha256 {digest[0][:12]}" if digest else ""
        architecture = f" ({cell.model.architecture})" if cell.model.architecture else ""
        yield f"{cell.model.label}{architecture}: weights from {cell.model.checkpoint}{sha}."
    if cell.model.resize:
        mean, std = (
            "/".join(f"{n:g}" for n in dict.fromkeys(numbers or ()))
            for numbers in (cell.model.mean, cell.model.std)
        )
        yield (
            f"{cell.model.label}: images are resized to a short side of {cell.model.resize} "
            f"({cell.model.interpolation}) and cropped to the central {cell.model.size} pixels, "
            f"unless they already have that size; mean {mean}, std {std}."
        )
    if cell.model.size and cell.model.size != PAPER_SIZE:
        yield f"Input size {cell.model.size}; the paper's is {PAPER_SIZE}."


def _victim(line: Line) -> Iterable[str]:
    if line.cell.attack.victim != "april_block":
        return
    if line.cell.model.first_block == "closed_form":
        yield (
            f"{line.cell.model.label} was trained with the block that {line.attack} needs "
            "(no norm1, no residuals in block 0): the attacked model is the one that a client "
            "trains, and Acc. altered equals Acc."
        )
    else:
        yield (
            f"{line.attack} needs a client whose block 0 has neither norm1 nor residuals: "
            "the gradients are those of a model altered in this way, which has weights trained for "
            "the intact one. Acc. is the accuracy of the intact model on the line's input, Acc. "
            "altered that of the attacked model, both in float32. The paper prints that of the "
            "intact model."
        )


def _precision(line: Line) -> Iterable[str]:
    yield (
        f"Client gradients in {line.cell.dtype}; the paper does not state the precision, and "
        "the code it used defaults to float32."
    )


def _client(line: Line) -> Iterable[str]:
    cell = line.cell
    client = cell.client
    facts = {"mode": client.mode, "loss": client.loss, "batch": client.batch}
    parts = [f"{name} {value}" for name, value in facts.items() if value is not None]
    if client.dal is not None:
        parts.append("DAL in the loss" if client.dal else "no DAL in the loss")
    if parts:
        yield f"Client: {', '.join(parts)}. The paper does not state these for its client."
    if cell.command.lpips:
        yield f"LPIPS (AlexNet): {cell.command.lpips}."
    if cell.model.position_embedding:
        yield f"Position embedding: {cell.model.position_embedding}."


def _stored_notes(line: Line) -> Iterable[str]:
    return (str(note) for note in line.cell.outcome.notes or ())


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
        "(≥ 100 is printed for it); exact images are those equal to the compared one in every "
        "8-bit value.",
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


def which(lines: Iterable[Line], among: Sequence[Line]) -> str:
    """The numbers of `lines`: `lines 1–3, 5`, or `all lines` if they are all of `among`."""
    numbers = sorted(line.number for line in lines)
    if len(numbers) == len(among):
        return "all lines" if len(numbers) > 1 else "line 1"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)
    return f"line{'s' if len(numbers) > 1 else ''} {text}"


def grouped(lines: Sequence[Line], sentences_of: Callable[[Line], Iterable[str]]) -> list[str]:
    """The sentences of all lines; equal ones become one, which names the lines it holds for.

    For example `Input size 64; the paper's is 224. (lines 1–3)`.
    """
    lines_by_sentence: dict[str, list[Line]] = {}
    for line in lines:
        for sentence in dict.fromkeys(sentences_of(line)):
            lines_by_sentence.setdefault(sentence, []).append(line)
    return [
        f"{sentence} ({which(its_lines, lines)})"
        for sentence, its_lines in lines_by_sentence.items()
    ]
