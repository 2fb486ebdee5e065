"""Sentences under the tables, each with the lines it holds for, and why lines have no score.

A note is a row of `DIFFERENCES` or `BOUNDS`: a function of a line that gives its sentences, none
where it does not hold. Equal sentences of several lines become one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mjp_privacy.core.schema import size_text
from mjp_privacy.core.text import counted, first_of, shown
from mjp_privacy.experiment.source import IN_STEP_OF
from mjp_privacy.metrics.statistics import LEAST_DRAWN, LEVEL, MOST_DRAWN, PSNR_CAP, RESAMPLES
from mjp_privacy.models.sizes import PAPERS_SIZE
from mjp_privacy.report.figures import WORST_CASE, DerivedLine
from mjp_privacy.report.lines import Line

REASONS_SHOWN = 30
NAMED = 3
"""Files that are called by their names."""
NO_REASON = "no reason given"
NOT_RUN = ("not run yet", "no rows stored")
"""How reasons of lines begin that a run did not come to."""
ENDED = "not run", "the run ended before; run the same command again"
"""Their status and reason, and those of images that it did not come to."""

Note = Callable[[Line], Iterable[str]]
"""The sentences of one subject that hold of a line."""


@dataclass(frozen=True)
class Section:
    """A heading and the notes under it."""

    title: str
    items: tuple[str, ...]


def all_notes(
    lines: Sequence[Line], derived: Sequence[DerivedLine] = (), reasons: Sequence[str] = ()
) -> tuple[Section, ...]:
    """The sections that have at least one note, in the order they are printed; `reasons`: why
    images and lines have no score."""
    choices = [*map(choice_sentence, derived)]
    controls = [line for line in lines if line.cell.role in ("floor", "ceiling")]
    if controls:
        choices.append(
            f"Controls ({which(controls, lines)}) are no attacks: a floor shows what a score is "
            "worth, a ceiling what an attack can reach. They may use the private images, and no "
            "derived line chooses them."
        )
    bounds = [sentence for note in BOUNDS for sentence in grouped(lines, note)]
    if len({tuple(line.images) for line in lines if len(line.images)}) > 1:
        bounds.append(
            "The lines do not cover the same images (see n), so their means are not paired."
        )
    differences = [sentence for note in DIFFERENCES for sentence in grouped(lines, note)]
    sections: dict[str, Sequence[str]] = {
        "Images and lines without a score": reasons,
        "Worst case and attacker's choice": choices,
        "What differs from the paper's set-up": differences,
        "What bounds the scores": bounds,
        "How the figures are made": method(lines),
    }
    return tuple(Section(title, tuple(items)) for title, items in sections.items() if items)


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


def grouped(lines: Sequence[Line], sentences_of: Note) -> list[str]:
    """The sentences of all lines; equal ones become one, which names the lines it holds for.

    For example `Input size 64; the paper's is 224. (lines 1–3)`.
    """
    lines_by_sentence: dict[str, list[Line]] = {}
    for line in lines:
        for sentence in dict.fromkeys(sentences_of(line)):
            lines_by_sentence.setdefault(sentence, []).append(line)
    return [f"{sentence} ({which(of, lines)})" for sentence, of in lines_by_sentence.items()]


# derived lines ------------------------------------------------------------------------------------


def choice_sentence(line: DerivedLine) -> str:
    """What a derived line is made of."""
    how = "smallest gradient residual, without the private images"
    if line.rule is WORST_CASE:
        how = (
            f"highest PSNR (standard; from {PSNR_CAP:.0f} dB on one that does not assume 8-bit "
            "pixels), an upper bound for any selector"
        )
    counts = ", ".join(f"{name} {count}" for name, count in line.counts.items())
    said = (
        f"Line {line.number}, {line.attack}: for each image the attack with the {how}. "
        f"Of {len(line.chosen)} images: {counts}."
    )
    if line.uploads > 1:
        said += f" Its attacks may use up to {line.uploads} uploads of one image."
    return said


# what differs from the paper's set-up -------------------------------------------------------------


def _images(line: Line) -> Iterable[str]:
    cell = line.cell
    if not cell.data_is_papers:
        yield (
            f"Images: {cell.data or 'images of unknown origin'}; not declared to be the paper's "
            "(--data-is-papers)."
        )
    if line.groups is not None:
        yield (
            f"The images are crops of {line.units} photographs, each of which counts once in "
            "intervals of means; shares count crops as if they agreed."
        )
    if cell.labels:
        yield cell.labels
    if not cell.true_labels:
        yield "No true labels are known, so there is no accuracy."


def _model(line: Line) -> Iterable[str]:
    cell = line.cell
    if cell.resize:
        mean, std = (
            "/".join(f"{n:g}" for n in dict.fromkeys(numbers or ()))
            for numbers in (cell.mean, cell.std)
        )
        yield (
            f"{cell.model}: images are resized to {cell.resize} ({cell.interpolation}) and "
            f"cropped to the central {size_text(cell.pixels or 0)} pixels, unless they have that "
            f"size; mean {mean}, std {std}."
        )
    if cell.pixels and cell.pixels != PAPERS_SIZE:
        yield f"Input size {size_text(cell.pixels)}; the paper's is {PAPERS_SIZE}."


def _client(line: Line) -> Iterable[str]:
    cell = line.cell
    facts = {"dtype": cell.dtype, "mode": cell.mode, "loss": cell.loss, "batch": cell.batch}
    parts = [f"{name} {value}" for name, value in facts.items() if value is not None]
    if cell.dal is not None:
        parts.append("DAL in the loss" if cell.dal else "no DAL in the loss")
    if parts:
        yield f"Client: {', '.join(parts)}. The paper does not state these."
    if cell.lpips:
        yield f"LPIPS (AlexNet): {cell.lpips}."
    if kind := cell.position_embedding:
        exposed = " (w/o PEs: the table stays zero; its gradient is uploaded, for APRIL reads it)"
        yield f"Position embedding: {kind}{exposed if kind == 'exposed' else ''}."
    yield from (str(note) for note in cell.notes or ())


DIFFERENCES: tuple[Note, ...] = (_images, _model, _client)


# what limits the scores besides a defence: algebra, rounding, unequal or missing images -----------


def _mixed_code(line: Line) -> Iterable[str]:
    """Whether several versions of the code made the line's images."""
    codes = Counter(line.frame["code"].dropna()) if "code" in line.frame else Counter()
    known = sorted((count for code, count in codes.items() if code), reverse=True)
    unrecorded = len(line.images) - sum(known) if known else 0
    if len(known) + bool(unrecorded) > 1:
        earlier = f", and {unrecorded} from before code was recorded" if unrecorded else ""
        yield (
            f"MIXED CODE: its images were made by {len(known) + bool(unrecorded)} versions of the "
            f"attack's or the defence's code ({', '.join(map(str, known))} images{earlier}). `mjp "
            "attack … --fresh` makes those of earlier versions again."
        )


def _unshuffled(line: Line) -> Iterable[str]:
    """How many pictures have an upload in which nothing was shuffled."""
    images, exact = line.unshuffled_images, line.exact_images
    if line.cell.role == "attack" and images:
        among = f"; {len(exact & images)} of the {len(exact)} exact pictures are among them"
        yield (
            f"Unshuffled: {len(images)} of {len(line.images)} pictures have an upload in which no "
            f"patch was masked, which is that of a plain client{among if exact else ''}."
        )


BOUNDS: tuple[Note, ...] = (_mixed_code, _unshuffled)


# how scores become figures; printed with every report, so that it can stand alone ----------------


def method(lines: Sequence[Line]) -> list[str]:
    """How the figures of these lines are made."""
    by_group = any(line.groups is not None for line in lines)
    unit = "images (photographs, where images are crops of one)" if by_group else "images"
    of_crops = ", crops of one photograph counted as if they agreed" if by_group else ""
    resampled = (
        f"with {RESAMPLES} resamples and a fixed seed; of fewer than {LEAST_DRAWN} Student's t"
    )
    if any(line.units > MOST_DRAWN for line in lines):
        resampled += f", of more than {MOST_DRAWN}, where no few decide, the normal one"
    return [
        "Arrows point to better privacy, as in the paper. Acc. is in percent, PSNR in dB.",
        f"Figures are mean [low, high]: a {LEVEL:.0%} percentile bootstrap interval of the mean "
        f"over {unit}, {resampled}; – for a single one. Shares (Acc., counts) have Wilson's "
        f"interval{of_crops}. None says anything about other checkpoints, shuffles or seeds.",
        "With float32 gradients APRIL's score of one image changes by up to about 2 dB with the "
        "machine and the number of images computed together; means change by a few tenths, which "
        "the intervals do not include. With float64 it does not change.",
        "n is the number of images in a mean; those that failed, were unsupported or could not be "
        "scored are counted beside it, with their reasons above.",
        "The paper variant scores images rounded to 8 bits, with the paper's FFT2D and zero-padded "
        "SSIM; it stands only beside the paper's figures and where exact pictures are counted. The "
        "standard one scores them as they are; its FFT2D conjugates one spectrum, which makes it "
        "the cosine distance of the pixels.",
    ]


# why lines and images have no score ---------------------------------------------------------------


def not_scored(lines: Sequence[Line]) -> list[str]:
    """Damaged rows and files that are no images; then reasons of lines and images that are not run,
    failed, unsupported and unscored: each once, with its counts.

    For example `6 images unsupported: a batch of 2 (lines 3, 5)`.
    """
    found: dict[tuple[bool, str, str], dict[Line, int]] = {}  # of whole lines: by status and reason
    for line in lines:
        lost = line.frame.loc[line.frame["status"] != "ok", ["status", "reason"]].astype(object)
        lost["reason"] = lost["reason"].replace("", NO_REASON)
        counts = Counter(lost.itertuples(index=False, name=None))
        if line.status != "ok":
            reason = line.reason or NO_REASON
            of_line = ENDED if reason.startswith(NOT_RUN) else (line.status, reason)
            found.setdefault((True, *of_line), {})[line] = 1
            counts.pop((line.status, line.reason), None)
        elif line.not_run and not line.left_out:
            found.setdefault((False, *ENDED), {})[line] = line.not_run
        for pair, count in counts.items():
            found.setdefault((False, *pair), {})[line] = count
    sentences = [*_without_rows(lines)]
    for (whole, status, reason), by_line in sorted(found.items(), key=lambda item: not item[0][0]):
        # an image in several lines is several rows
        noun = "line" if whole else "image" if len(by_line) == 1 else "row"
        count_text = counted(sum(by_line.values()), noun)
        sentences.append(f"{count_text} {status}: {reason} ({which(by_line, lines)})")
    left = len(sentences) - REASONS_SHOWN
    more = [f"{left} further reasons, which the rows themselves say"] if left > 0 else []
    return [*sentences[:REASONS_SHOWN], *more]


def _without_rows(lines: Sequence[Line]) -> Iterator[str]:
    """How many units changed after they were written, and in which files: an image counts once for
    each of its lines. Then which files are no images, and what was lost with one of them."""
    if files := [path.relative_to(line.store.root) for line in lines for path in line.left_out]:
        there = [len(line.stored) for line in lines]
        planned = [line.planned + len(line.unreadable) for line in lines]
        both = zip(lines, planned, there, strict=True)
        lost = sum(max(1, of - stored) for line, of, stored in both if line.left_out)
        yield (
            f"DAMAGED: {lost} units of {sum(map(max, planned, there))} are damaged and in no "
            f"figure: run the attack again ({first_of([shown(file) for file in files], NAMED)})"
        )
    reasons = {image: reason for line in lines for image, reason in line.unreadable.items()}
    beside = [name for name, reason in reasons.items() if reason.startswith(IN_STEP_OF)]
    broken = [f"{name} ({reason})" for name, reason in reasons.items() if name not in beside]
    if broken:
        what = "file is no readable image" if len(broken) == 1 else "files are no readable images"
        yield f"{len(broken)} {what}: {first_of(broken, NAMED)}; in no figure"
    if beside:
        images = "1 image is" if len(beside) == 1 else f"{len(beside)} images are"
        yield f"{images} in a client step with such a file: {first_of(beside, NAMED)}; in no figure"
