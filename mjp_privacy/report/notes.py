"""The notes under the tables: what differs from the paper, what limits the scores, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mjp_privacy.core.text import counted
from mjp_privacy.experiment.cell_facts import ClientFacts
from mjp_privacy.report.card.flags import DIGITS
from mjp_privacy.report.damaged import damaged_notes
from mjp_privacy.report.data_files import samples_name
from mjp_privacy.report.differences import differences, grouped, method, which
from mjp_privacy.report.lines import Line, ceiling_distance, not_run
from mjp_privacy.report.published import CAVEATS
from mjp_privacy.report.tables.figures import paper_row, rank_bound
from mjp_privacy.report.unreadable import unreadable_notes
from mjp_privacy.report.unshuffled import unshuffled_note

REASONS_SHOWN = 30
NOT_RUN = ("not run yet", "no rows stored")
"""How reasons of lines begin that a run did not come to."""
STORED_ROLES = ("attack", "floor", "ceiling")
"""Roles of lines whose rows a run stored; others are put together from several of these."""
WORTH_SAYING = 0.1  # dB; a smaller gap between ceiling and score gets no note


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
    if (missing := not_run(line)) and not line.left_out:
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
    sentences = [
        *damaged_notes(lines),
        *unreadable_notes(lines),
    ] + [
        f"{counted(len(of), 'line')} {status}: {reason} ({which(of, lines)})"
        for (status, reason), of in whole.items()
    ]
    for (status, reason), by_line in single.items():
        noun = "image" if len(by_line) == 1 else "row"  # an image in several lines is several rows
        rows = counted(sum(count for _, count in by_line.values()), noun)
        numbers = which([line for line, _ in by_line.values()], lines)
        sentences.append(f"{rows} {status}: {reason} ({numbers})")
    shown = sentences[:REASONS_SHOWN]
    if len(sentences) > len(shown):
        shown.append(f"{len(sentences) - len(shown)} further reasons; see {samples_name(lines)}")
    return shown


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
