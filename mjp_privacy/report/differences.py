"""What differs from the paper's set-up: each line's images, labels, model, client and precision."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mjp_privacy.report.grouping import grouped
from mjp_privacy.report.line import Line

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
