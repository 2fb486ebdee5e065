"""What must be said under a table: what differs from the paper, and what bounds the scores."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mjp_privacy.metrics.statistics import LEVEL, PSNR_CAP, RESAMPLES
from mjp_privacy.report.loading import Line
from mjp_privacy.report.measures import ceiling_distance, not_run
from mjp_privacy.report.published import CAVEATS

DIGITS = {"float32": 24, "float64": 53}
"""Bits of a significand, the scale to which a cond(A) is compared."""

REASONS_SHOWN = 5
WORTH_SAYING = 0.1  # dB between ceiling and score

PAPER_IMAGES = 1000
PAPER_SIZE = 224


@dataclass(frozen=True)
class Section:
    title: str
    items: tuple[str, ...]


def all_notes(lines: Sequence[Line], *further: Section) -> tuple[Section, ...]:
    """Every section that has something to say, in the order they are printed."""
    sections = (
        *further,
        Section("What differs from the paper's set-up", tuple(differences(lines))),
        Section("What bounds the scores", tuple(bounds(lines))),
        Section("Images and lines without a score", tuple(not_scored(lines))),
        Section("The paper's own table", CAVEATS),
        Section("How the figures are made", tuple(method(lines))),
    )
    return tuple(section for section in sections if section.items)


def which(lines: Iterable[Line], among: Sequence[Line]) -> str:
    """`all lines`, or `lines 1–3, 5`."""
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


def grouped(lines: Sequence[Line], say: Callable[[Line], Iterable[str]]) -> list[str]:
    """Each sentence once, with the lines it holds for."""
    holders: dict[str, list[Line]] = {}
    for line in lines:
        for sentence in dict.fromkeys(say(line)):
            holders.setdefault(sentence, []).append(line)
    return [f"{sentence} ({which(held, lines)})" for sentence, held in holders.items()]


def differences(lines: Sequence[Line]) -> list[str]:
    """Images, labels, model, client and precision of each line, where the paper's were others."""
    sayings = (_images, _labels, _model, _victim, _precision, _client, _own_notes)
    return [sentence for say in sayings for sentence in grouped(lines, say)]


def _images(line: Line) -> Iterable[str]:
    data = line.cell.command.data or "images of unknown origin"
    if not line.cell.command.data_is_papers:
        yield (
            f"Images: {data}, not declared to be ImageNet-1K validation images as the paper's "
            "(--data-is-papers): no difference in accuracy is printed."
        )
    images = line.rows["image_id"].nunique()
    if images and images != PAPER_IMAGES:
        yield f"Number of images: {images}; the paper says 1K."
    if line.groups is not None:
        photographs = len(set(line.groups.values()))
        yield f"The images are crops of {photographs} photographs; whole photographs are resampled."


def _labels(line: Line) -> Iterable[str]:
    if line.cell.command.labels:
        yield line.cell.command.labels
    if not line.cell.command.true_labels:
        yield "No true labels, therefore no accuracy."


def _model(line: Line) -> Iterable[str]:
    cell = line.cell
    if cell.model.checkpoint:
        known = re.fullmatch(r"[0-9a-f]{64}", str(cell.model.checkpoint_sha))
        sha = f", sha256 {known[0][:12]}" if known else ""
        architecture = f" ({cell.model.architecture})" if cell.model.architecture else ""
        yield f"{cell.model.label}{architecture}: weights from {cell.model.checkpoint}{sha}."
    if cell.model.resize:
        mean, std = (
            "/".join(f"{n:g}" for n in dict.fromkeys(numbers or ()))
            for numbers in (cell.model.mean, cell.model.std)
        )
        yield (
            f"{cell.model.label}: short side to {cell.model.resize} "
            f"({cell.model.interpolation}), centre {cell.model.size}, unless an image has that "
            f"size; mean {mean}, std {std}."
        )
    if cell.model.size and cell.model.size != PAPER_SIZE:
        yield f"Input size {cell.model.size}; the paper's is {PAPER_SIZE}."


def _victim(line: Line) -> Iterable[str]:
    if line.cell.attack.victim != "april_block":
        return
    if line.cell.model.first_block == "closed_form":
        yield (
            f"{line.cell.model.label} was trained with the block that {line.attack} needs "
            "(no norm1, no residuals in block 0): the attacked model is the one a client trains, "
            "and Acc. altered is Acc."
        )
    else:
        yield (
            f"{line.attack} needs a client whose block 0 has neither norm1 nor residuals: "
            "the gradients are those of this altered model, carrying weights trained for the "
            "intact one. Acc. is the intact model's on the line's input, Acc. altered that of the "
            "model which was attacked, both in float32. The paper prints the intact model's."
        )


def _precision(line: Line) -> Iterable[str]:
    yield (
        f"Client gradients in {line.cell.dtype}; the paper does not state its precision, and "
        "the code it used defaults to float32."
    )


def _client(line: Line) -> Iterable[str]:
    cell = line.cell
    client = cell.client
    told = {"mode": client.mode, "loss": client.loss, "batch": client.batch}
    parts = [f"{name} {value}" for name, value in told.items() if value is not None]
    if client.dal is not None:
        parts.append("DAL in the loss" if client.dal else "no DAL in the loss")
    if parts:
        yield f"Client: {', '.join(parts)}. The paper does not state its client's."
    if cell.command.lpips:
        yield f"LPIPS (AlexNet): {cell.command.lpips}."
    if cell.model.position_embedding:
        yield f"Position embedding: {cell.model.position_embedding}."


def _own_notes(line: Line) -> Iterable[str]:
    return (str(note) for note in line.cell.outcome.notes or ())


def bounds(lines: Sequence[Line]) -> list[str]:
    """Scores that arithmetic or algebra limits, not a defence; and lines over unequal images."""
    sentences = [*unfinished(lines), *grouped(lines, _conditioning)]
    images = {frozenset(line.rows["image_id"]) for line in lines if not line.rows.empty}
    if len(images) > 1:
        sentences.append(
            "The lines are not over the same images (see n): their means are not paired. An "
            "unfinished run is completed by giving its command again."
        )
    return sentences


def _conditioning(line: Line) -> Iterable[str]:
    """What the gap to the ceiling is made of, by whether the attack's system lacks rows."""
    bits = DIGITS.get(line.cell.dtype)
    condition = line.scored("cond_a", "diagnostic")
    if bits is None or not len(condition):
        return
    name = f"{line.attack}, {line.cell.dtype}"
    zero_rows = line.scored("zero_rows", "diagnostic").reindex(condition.index).fillna(0)
    singular, gap = int((zero_rows > 0).sum()), ceiling_distance(line)
    over = int((condition > 2.0**bits).sum())
    if singular:
        yield (
            f"{name}: A has zero rows, those of shuffled patches, on {singular} of "
            f"{len(condition)} images: the gradient at these positions was not uploaded, so no "
            "precision restores them. What rounding adds is seen beside the line of the other "
            "precision."
        )
    elif gap > WORTH_SAYING:
        yield (
            f"{name}: {gap:.2f} dB below the ceiling in the mean, although no row of A is zero: "
            "with exact gradients this system reaches the ceiling, so the gap is arithmetic, not "
            f"a defence (cond(A) over 2^{bits} on {over} of {len(condition)} images)."
        )


def unfinished(lines: Sequence[Line]) -> list[str]:
    """Lines that wait for images of the run's own plan."""
    return grouped(lines, _waiting)


def _waiting(line: Line) -> Iterable[str]:
    if missing := not_run(line):
        yield (
            f"UNFINISHED: {missing} of {line.cell.outcome.planned_images} images were not run. "
            "Give the run's command again."
        )


def not_scored(lines: Sequence[Line]) -> list[str]:
    """Reasons of failed, unsupported and unscored lines and images, with their counts."""
    return grouped(lines, _reasons)


def _reasons(line: Line) -> Iterable[str]:
    if line.status != "ok":
        yield f"Line {line.status}: {line.reason or 'no reason given'}"
    reasons = image_reasons(line)
    reasons.pop((line.status, line.reason), None)  # said of the whole line already
    ranked = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    for (status, reason), count in ranked[:REASONS_SHOWN]:
        yield f"{'1 image' if count == 1 else f'{count} images'} {status}: {reason}"
    if len(ranked) > REASONS_SHOWN:
        yield f"{len(ranked) - REASONS_SHOWN} further reasons, see samples.csv"


def image_reasons(line: Line) -> Counter[tuple[str, str]]:
    """(status, reason) of the images that have one, each image counted once for each of them."""
    rows = line.rows[line.rows["status"] != "ok"]
    rows = rows[rows["metric"] != "top1"] if line.cell.command.true_labels is False else rows
    distinct = rows[["image_id", "status", "reason"]].drop_duplicates()
    reasons = distinct["reason"].fillna("").replace("", "no reason given")
    return Counter(zip(distinct["status"].astype(str), reasons.astype(str), strict=True))


def method(lines: Sequence[Line]) -> list[str]:
    """How images become figures; equal for every table, so that the table can stand alone."""
    by_group = any(line.groups is not None for line in lines)
    unit = "images (photographs, where images are crops of one)" if by_group else "images"
    return [
        "Arrows give the direction that is better for the model owner's privacy, as in the paper. "
        "Acc. is in percent, PSNR in dB.",
        f"Figures are mean [low, high]: a {LEVEL:.0%} percentile bootstrap interval of the mean "
        f"over {unit}, {RESAMPLES} resamples, fixed seed; it says nothing of other checkpoints, "
        "shuffles or client seeds. With a single one the interval is –.",
        f"Means of PSNR are of min(PSNR, {PSNR_CAP:.0f}) per image; the median is of the values "
        "themselves, and images recovered exactly (PSNR inf) are counted.",
        "With float32 gradients APRIL's score of one image moves by up to about 2 dB with the "
        "number of threads and of images computed together (means by a few tenths); the intervals "
        "do not contain that. With float64 ones it does not move.",
        "n counts the images in a mean; those that failed, that the attack does not support and "
        "that nobody could score are counted beside it, with their reasons above.",
        "The paper variant scores both images rounded to 8 bits, as the paper's scripts do, with "
        "their FFT2D and zero-padded SSIM; images that are equal after rounding count as exact. "
        "Only this variant is compared with the paper's column. The standard variant scores the "
        "images as they are; its FFT2D conjugates, which makes it the cosine distance of pixels.",
    ]
