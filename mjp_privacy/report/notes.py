"""The notes under the tables: what differs from the paper, what limits the scores, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mjp_privacy.experiment.cell_facts import ClientFacts
from mjp_privacy.report.card.flags import DIGITS
from mjp_privacy.report.grouping import grouped, which
from mjp_privacy.report.line import Line
from mjp_privacy.report.measures import ceiling_distance, not_run
from mjp_privacy.report.method import method
from mjp_privacy.report.published import CAVEATS
from mjp_privacy.report.samples import samples_name
from mjp_privacy.report.tables.figures import paper_row, rank_bound
from mjp_privacy.report.unreadable import unreadable_notes
from mjp_privacy.report.unshuffled import unshuffled_note

REASONS_SHOWN = 30
NOT_RUN = ("not run yet", "no rows stored")
"""How reasons of lines begin that a run did not come to."""
STORED_ROLES = ("attack", "floor", "ceiling")
"""Roles of lines whose rows a run stored; others are put together from several of these."""
WORTH_SAYING = 0.1  # dB; a smaller gap between ceiling and score gets no note

PAPER_IMAGES = 1000
PAPER_SIZE = 224


@dataclass(frozen=True)
class Section:
    """A heading and the notes under it."""

    title: str
    items: tuple[str, ...]


def all_notes(lines: Sequence[Line], *further: Section) -> tuple[Section, ...]:
    """The sections that have at least one note, in the order they are printed."""
    beside_paper = any(paper_row(line) is not None for line in lines)
    sections = (
        *further,
        Section("What differs from the paper's set-up", tuple(differences(lines))),
        Section("What bounds the scores", tuple(bounds(lines))),
        Section("Images and lines without a score", tuple(not_scored(lines))),
        Section("The paper's own table", CAVEATS if beside_paper else ()),
        Section("How the figures are made", tuple(method(lines))),
    )
    return tuple(section for section in sections if section.items)


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
            f"The images are crops of {photographs} photographs; for the intervals whole "
            "photographs are resampled."
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


def bounds(lines: Sequence[Line]) -> list[str]:
    """What limits the scores besides a defence: algebra, rounding, unequal or missing images."""
    sentences = [
        *unfinished(lines),
        *grouped(lines, _several_codes),
        *grouped(lines, unshuffled_note),
        *grouped(lines, _conditioning),
    ]
    images = {id(line.images) for line in lines if len(line.images)}  # equal ones are one object
    if len(images) > 1:
        sentences.append(
            "The lines do not cover the same images (see n), so their means are not paired. To "
            "complete an unfinished run, give its command again."
        )
    return sentences


def _conditioning(line: Line) -> Iterable[str]:
    """Why a line stays below its ceiling: zero rows in the attack's system A, or rounding."""
    bits = DIGITS.get(line.cell.dtype)
    condition = line.scored("cond_a", "diagnostic")
    if bits is None or not len(condition) or not rank_bound(line):
        return
    client = line.cell.client
    name = f"{line.attack}, {line.cell.dtype}"
    zero_rows = line.scored("zero_rows", "diagnostic").reindex(condition.index).fillna(0)
    singular, gap = int((zero_rows > 0).sum()), ceiling_distance(line)
    over = int((condition > 2.0**bits).sum())
    if singular:
        masks_alone = bool(line.cell.gamma) and "top_k" not in client.defenses
        cause = ", those of shuffled patches," if masks_alone else ""
        yield (
            f"{name}: A has zero rows{cause} on {singular} of "
            f"{len(condition)} images: the upload holds no gradient at these positions, so no "
            "precision can restore them. How much rounding adds can be seen from the line with the "
            "other precision."
        )
    elif gap > WORTH_SAYING and not _is_not_one_images_gradient(client):
        yield (
            f"{name}: on average {gap:.2f} dB below the ceiling, although no row of A is zero: "
            "with exact gradients this system would reach the ceiling, so the gap is due to "
            f"rounding and not to a defence (cond(A) exceeds 2^{bits} on {over} of "
            f"{len(condition)} images)."
        )


def _is_not_one_images_gradient(client: ClientFacts) -> bool:
    """Whether more than rounding and the mask parts the upload from one image's gradient."""
    several_images = (client.batch or 1) > 1
    approximate = client.pseudo_gradient != ClientFacts.pseudo_gradient
    return several_images or approximate or bool(client.defenses or client.position_noise)


def unfinished(lines: Sequence[Line]) -> list[str]:
    """Lines that lack images which their run had planned."""
    return grouped(lines, _unfinished_line)


def _unfinished_line(line: Line) -> Iterable[str]:
    if missing := not_run(line):
        yield (
            f"UNFINISHED: {missing} of {line.cell.outcome.planned_images} images were not run. "
            "To complete the run, give its command again."
        )


def _several_codes(line: Line) -> Iterable[str]:
    """Images that different versions of the attack's or the defence's code made."""
    if line.role not in STORED_ROLES or line.table.codes is None:
        return
    counts = line.table.codes.counts()
    unrecorded = counts.pop("", 0)
    recorded = sorted(counts.values(), reverse=True)
    if (versions := len(recorded) + bool(unrecorded)) > 1:
        earlier = f", and {unrecorded} from before code was recorded" if unrecorded else ""
        yield (
            f"MIXED CODE: its images were made by {versions} versions of the attack's or the "
            f"defence's code ({', '.join(map(str, recorded))} images{earlier}). `mjp attack … "
            "--fresh` makes those of earlier versions again."
        )


def not_scored(lines: Sequence[Line]) -> list[str]:
    """Files that are no images; then reasons of failed, unsupported and unscored lines and images:
    each once, with its counts.

    For example `6 images unsupported: a batch of 2 (lines 3, 5)`.
    """
    whole: dict[tuple[str, str], list[Line]] = {}
    single: dict[tuple[str, str], dict[int, tuple[Line, int]]] = {}
    for line in lines:
        if line.status != "ok":
            status, reason = line.status, line.reason or "no reason given"
            if reason.startswith(NOT_RUN):
                status, reason = "not run", "the run ended before; run the same command again"
            whole.setdefault((status, reason), []).append(line)
        for pair, count in image_reasons(line).items():
            if pair != (line.status, line.reason):
                single.setdefault(pair, {})[line.number] = (line, count)
    sentences = unreadable_notes(lines) + [
        f"{_plural(len(of), 'line')} {status}: {reason} ({which(of, lines)})"
        for (status, reason), of in whole.items()
    ]
    for (status, reason), by_line in single.items():
        images = _plural(sum(count for _, count in by_line.values()), "image")
        numbers = which([line for line, _ in by_line.values()], lines)
        sentences.append(f"{images} {status}: {reason} ({numbers})")
    shown = sentences[:REASONS_SHOWN]
    if len(sentences) > len(shown):
        shown.append(f"{len(sentences) - len(shown)} further reasons; see {samples_name(lines)}")
    return shown


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def image_reasons(line: Line) -> Counter[tuple[str, str]]:
    """The number of images by (status, reason); an image counts once for each of its reasons."""
    if "image_reasons" not in line.reductions:
        line.reductions["image_reasons"] = _image_reasons(line)
    known: Counter[tuple[str, str]] = line.reductions["image_reasons"]
    return known


def _image_reasons(line: Line) -> Counter[tuple[str, str]]:
    images: dict[tuple[str, str], set[int]] = {}
    for metric, variant in line.table.keys:
        if metric == "top1" and line.cell.command.true_labels is False:
            continue
        column = line.column(metric, variant)
        column = column.chosen(~column.statuses.equal("ok"))
        for at, status, reason in zip(
            column.at.tolist(), column.statuses.tolist(), column.reasons.tolist(), strict=True
        ):
            images.setdefault((status, reason or "no reason given"), set()).add(at)
    return Counter({pair: len(places) for pair, places in images.items()})
