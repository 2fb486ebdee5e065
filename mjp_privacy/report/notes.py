"""What a reader must know beside the figures: flags of a figure, notes of lines, and reasons.

A flag is a footnote of one figure or client on the card; a note is a sentence under the tables with
the lines it holds for. Each is a row of FLAGS or LINE_NOTES: its name, its sentence, when it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from attacks import traits_of
from mjp_privacy.core.text import counted, first_of, shown
from mjp_privacy.experiment.cell_facts import ClientFacts
from mjp_privacy.experiment.source import IN_STEP_OF
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.clients import Client, same_kind
from mjp_privacy.report.figures import ceiling_distance, paper_row, rank_bound
from mjp_privacy.report.lines import Line, exact_images, failed_images, late_images, not_run
from mjp_privacy.report.published import CAVEATS, differences, grouped, method, which
from mjp_privacy.report.worst_case import DerivedLine, meets_trained_model

DIGITS = {"float32": 24, "float64": 53}
"""Bits of a significand: cond(A) is compared with 2 to this power."""

RESIDUAL_CONVERGED = 0.1
"""An optimising attack whose picture leaves more than this of the gradient has not converged."""

REASONS_SHOWN = 30
NAMED = 3
"""Files that are called by their names."""
NOT_RUN = ("not run yet", "no rows stored")
"""How reasons of lines begin that a run did not come to."""
STORED_ROLES = ("attack", "floor", "ceiling")
"""Roles of lines whose rows a run stored; others are put together from several of these."""
WORTH_SAYING = 0.1  # dB; a smaller gap between ceiling and score gets no note


# flags: footnotes of the card ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What a flag is asked of: a client, beside all others; of a figure also its line and the PSNR
    of the best control by image."""

    client: Client
    others: Sequence[Client] = ()
    line: Line | None = None
    floor: pd.Series[float] = field(default_factory=lambda: pd.Series(dtype=float))

    @property
    def of(self) -> Line:
        """The line of the figure."""
        assert self.line is not None
        return self.line

    @property
    def chosen(self) -> tuple[Line, ...]:
        """The attacks whose pictures the line shows: its own, or those that a worst case took."""
        return self.of.taken if isinstance(self.of, DerivedLine) else (self.of,)


@dataclass(frozen=True)
class Flag:
    """A warning: `name` in a few words, `text` as a sentence, `applies` says when it holds."""

    key: str
    name: str
    text: str
    applies: Callable[[Case], bool] = field(default=lambda _: False, compare=False)


def figure_flags(client: Client, line: Line, floor: pd.Series[float]) -> tuple[Flag, ...]:
    """The flags of what one attacker got, an attack's line or a worst case.

    Controls have none, nor what was not scored. floor: PSNR of the best control by image
    """
    if line.role in ("floor", "ceiling") or not line.count("psnr", "standard"):
        return ()
    case = Case(client, line=line, floor=floor)
    return tuple(flag for flag in OF_FIGURES if flag.applies(case))


def client_flags(client: Client, others: Sequence[Client]) -> tuple[Flag, ...]:
    """The flags that hold for all that was got from a client; `others`: all clients."""
    case = Case(client, others)
    return tuple(flag for flag in OF_CLIENTS if flag.applies(case))


def _below(case: Case) -> bool:
    """Whether the line's mean is below that of the floor on the same images."""
    scored = case.of.scored("psnr", "standard").clip(upper=PSNR_CAP)
    both = scored.index.intersection(case.floor.index)
    return len(both) > 0 and float((scored[both] - case.floor[both]).sum()) < 0


def _lacking(case: Case) -> tuple[bool, bool]:
    """Whether pictures without a score count as not recovered, and whether some count nowhere."""
    column = case.of.column("psnr", "standard")
    unscored = column.statuses.equal("unscored")
    return bool((~column.scored & ~unscored).any()), bool(unscored.any())


def _not_converged(case: Case) -> bool:
    searching = [member for member in case.chosen if "steps" in _traits(member)]
    residuals = [member.scored("gradient_residual", "diagnostic") for member in searching]
    return any(len(values) and values.median() > RESIDUAL_CONVERGED for values in residuals)


def _ill_conditioned(case: Case) -> bool:
    bits = DIGITS.get(case.of.cell.dtype)
    bounded = [member for member in case.chosen if "rank" in _traits(member)]
    conditions = [member.scored("cond_a", "diagnostic") for member in bounded]
    return bits is not None and any(len(c) and c.median() > 2.0**bits for c in conditions)


def _unfinished(case: Case) -> bool:
    """Whether a planned image has no row, or attacks that compete for the client's pictures have
    not the same images: some were not run yet, or their rows are damaged."""
    line, rivals = case.of, _rivals(case)
    if line not in (*rivals, *case.client.group.derived):
        return not_run(line) > 0
    members = line.members if isinstance(line, DerivedLine) else (line,)
    begun = [member for member in (*members, *rivals) if len(member.images)]
    images = {id(member.images) for member in begun}  # equal ones are one object
    return len(images) > 1 or any(map(not_run, (*members, *rivals)))


def _rivals(case: Case) -> list[Line]:
    """The attacks on the trained model that compete for the pictures of the figure."""
    return [
        attack
        for attack in case.client.group.attacks
        if meets_trained_model(attack) and attack.uploads <= max(case.of.uploads, 1)
    ]


def _cut_short(case: Case) -> bool:
    """Whether an attack failed, or was ended by its time, on a picture that is not exact here."""
    of_best = case.of in (*_rivals(case), *case.client.group.derived)
    attacks = _rivals(case) if of_best else [case.of]
    if len(exact := exact_images(case.of)) and len(exact) == len(case.of.images):
        return False
    single = attacks == [case.of]  # whose failures have a flag of their own
    return any(
        late_images(attack) - exact or (not single and failed_images(attack) - exact)
        for attack in attacks
    ) or any(attack.cell.outcome.status == "failed" for attack in attacks)


def _unshuffled(case: Case) -> bool:
    client = case.client
    recipe = client.cell.client.plain_share != ClientFacts.plain_share
    return bool(client.cell.gamma) and (recipe or any(map(unshuffled_images, client.lines)))


def missed_attacks(client: Client, others: Sequence[Client]) -> tuple[str, ...]:
    """Attacks on one upload that made pictures of a like client and were not even tried on this
    one: with them, more might leak."""
    tried, kind = {line.cell.attack.known_as for line in client.group.attacks}, same_kind(client)
    found = (
        line.cell.attack.known_as
        for other in others
        if same_kind(other) == kind
        for line in other.matching
        if line.uploads == 1
    )
    return tuple(dict.fromkeys(name for name in found if name not in tried))


def _traits(line: Line) -> frozenset[str]:
    return traits_of(line.cell.attack.known_as)


OF_FIGURES: tuple[Flag, ...] = (
    Flag(
        "below_floor",
        "below the floor",
        "A picture made without any gradient scores as well: the attack failed, which is no "
        "measure of how well the client is protected.",
        _below,
    ),
    Flag(
        "altered_client",
        "altered client",
        "The attack met a model whose block 0 was altered for it, which no client trains.",
        lambda case: not meets_trained_model(case.of),
    ),
    Flag(
        "noise_ignored",
        "noise not modelled",
        "The client adds known errors to its upload, and the attack does not weigh them: one that "
        "does may get more.",
        lambda case: case.client.noisy and not all("noise" in _traits(x) for x in case.chosen),
    ),
    Flag(
        "not_converged",
        "not converged",
        "The attack optimises in steps and ended far from the uploaded gradient: more steps or "
        "other starts may give more.",
        _not_converged,
    ),
    Flag(
        "ill_conditioned",
        "ill-conditioned",
        "Rounding decides this score, so that another machine may give another: on most images "
        "cond(A) exceeds what the precision of the gradients resolves.",
        _ill_conditioned,
    ),
    Flag(
        "assumes_8_bit",
        "8-bit pixels assumed",
        "Some of these pictures come from an attack that takes pixels for multiples of 1/255.",
        lambda case: any("8 bit" in _traits(member) for member in case.chosen),
    ),
    Flag(
        "partly_inapplicable",
        "not applicable to all",
        "On some pictures every attack was refused or failed; they count as not recovered, and are "
        "missing from the mean.",
        lambda case: _lacking(case)[0],
    ),
    Flag(
        "partly_unscored",
        "not all scored",
        "Some pictures could not be scored, though an attack made them; they are in no count and "
        "in no mean.",
        lambda case: _lacking(case)[1],
    ),
    Flag(
        "cut_short",
        "an attack failed",
        "An attack failed, or its time ran out, on some of these pictures: with more memory or "
        "time it may get more.",
        _cut_short,
    ),
    Flag(
        "unfinished",
        "unfinished",
        "Rows are missing, because attacks were not run on all pictures yet or their rows are "
        "damaged; weaker attacks fill the gap, and more may leak.",
        _unfinished,
    ),
)

OF_CLIENTS: tuple[Flag, ...] = (
    Flag(
        "no_adaptive_attack",
        "no adaptive attack",
        "No attack that knows this client gave a picture: what is shown is the least that leaks.",
        lambda case: not any(map(case.client.knows, case.client.matching)),
    ),
    Flag(
        "fewer_attacks",
        "fewer attacks",
        "An attack that scored on another client of this model was not run on this one, so that "
        "the two cannot be compared: with it, more may leak.",
        lambda case: bool(case.client.matching and missed_attacks(case.client, case.others)),
    ),
    Flag(
        "undeclared_error",
        "error not declared",
        "A defence changes the upload and does not say by how much, or cannot know it, so that the "
        "attacks take the upload for better than it is: the client looks safer than it is.",
        lambda case: any(line.some_above_zero("undeclared_error") for line in case.client.lines),
    ),
    Flag(
        "some_unshuffled",
        "some uploads unshuffled",
        "In some uploads nothing was shuffled, by the client's recipe or because its mask was "
        "empty, and the attacker can see in which.",
        _unshuffled,
    ),
)
FLAGS: Mapping[str, Flag] = {flag.key: flag for flag in (*OF_FIGURES, *OF_CLIENTS)}


# notes: sentences under the tables, each with the lines it holds for ------------------------------


@dataclass(frozen=True)
class Section:
    """A heading and the notes under it."""

    title: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class LineNote:
    """A note: what its sentence says of a line, or None where it does not hold of it."""

    key: str
    sentence: str
    facts: Callable[[Line], Mapping[str, object] | None]

    def of(self, line: Line) -> Iterable[str]:
        """The sentence, if it holds of the line."""
        facts = self.facts(line)
        return () if facts is None else (self.sentence.format_map(facts),)


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
    sentences = [sentence for note in LINE_NOTES for sentence in grouped(lines, note.of)]
    if len({id(line.images) for line in lines if len(line.images)}) > 1:  # equal ones are one
        sentences.append(
            "The lines do not cover the same images (see n), so their means are not paired. To "
            "complete an unfinished run, give its command again."
        )
    return sentences


def unfinished(lines: Sequence[Line]) -> list[str]:
    """Lines that lack images which their run had planned."""
    return grouped(lines, LINE_NOTES[0].of)


def _missing(line: Line) -> Mapping[str, object] | None:
    missing, planned = not_run(line), line.cell.outcome.planned_images
    return {"missing": missing, "planned": planned} if missing and not line.left_out else None


def _several_codes(line: Line) -> Mapping[str, object] | None:
    if line.role not in STORED_ROLES or line.table.codes is None:
        return None
    counts = line.table.codes.counts()
    unrecorded = counts.pop("", 0)
    versions = len(counts) + bool(unrecorded)
    recorded = ", ".join(map(str, sorted(counts.values(), reverse=True)))
    earlier = f", and {unrecorded} from before code was recorded" if unrecorded else ""
    return {"versions": versions, "counts": recorded, "earlier": earlier} if versions > 1 else None


def unshuffled_images(line: Line) -> frozenset[str]:
    """The images of which the attack read an upload in which nothing was shuffled.

    As the uploads show it themselves, or as the client's own mask of the first one says.
    """
    seen = (line.scored(name, "diagnostic") for name in ("unshuffled_uploads", "empty_mask"))
    return frozenset(str(image) for counts in seen for image in counts.index[counts > 0])


def _came_unshuffled(line: Line) -> Mapping[str, object] | None:
    unshuffled = unshuffled_images(line)
    if line.role != "attack" or not unshuffled:
        return None
    exact = exact_images(line)
    among = f"; {len(exact & unshuffled)} of the {len(exact)} exact pictures are among them"
    facts = {"unshuffled": len(unshuffled), "of": len(line.images)}
    return {**facts, "among": among if exact else ""}


def _zero_rows(line: Line) -> Mapping[str, object] | None:
    """Zero rows in the system A that the attack solves."""
    condition = line.scored("cond_a", "diagnostic")
    if line.cell.dtype not in DIGITS or not len(condition) or not rank_bound(line):
        return None
    zero_rows = line.scored("zero_rows", "diagnostic").reindex(condition.index).fillna(0)
    singular = int((zero_rows > 0).sum())
    masks_alone = bool(line.cell.gamma) and "top_k" not in line.cell.client.defenses
    facts = {"attack": line.attack, "dtype": line.cell.dtype, "of": len(condition)}
    cause = ", those of shuffled patches," if masks_alone else ""
    return {**facts, "singular": singular, "cause": cause} if singular else None


def _rounding(line: Line) -> Mapping[str, object] | None:
    """A gap below the ceiling that nothing but rounding explains."""
    condition, client = line.scored("cond_a", "diagnostic"), line.cell.client
    approximate = client.pseudo_gradient != ClientFacts.pseudo_gradient
    altered = approximate or bool(client.defenses or client.position_noise)
    if _zero_rows(line) or altered or (client.batch or 1) > 1:
        return None
    if line.cell.dtype not in DIGITS or not len(condition) or not rank_bound(line):
        return None
    bits, gap = DIGITS[line.cell.dtype], ceiling_distance(line)
    facts = {"attack": line.attack, "dtype": line.cell.dtype, "of": len(condition)}
    over = int((condition > 2.0**bits).sum())
    return {**facts, "gap": gap, "bits": bits, "over": over} if gap > WORTH_SAYING else None


LINE_NOTES: tuple[LineNote, ...] = (
    LineNote(
        "unfinished",
        "UNFINISHED: {missing} of {planned} images were not run. To complete the run, give its "
        "command again.",
        _missing,
    ),
    LineNote(
        "mixed_code",
        "MIXED CODE: its images were made by {versions} versions of the attack's or the defence's "
        "code ({counts} images{earlier}). `mjp attack … --fresh` makes those of earlier versions "
        "again.",
        _several_codes,
    ),
    LineNote(
        "unshuffled",
        "Unshuffled: {unshuffled} of {of} pictures have an upload in which no patch was masked, "
        "which is that of a plain client{among}.",
        _came_unshuffled,
    ),
    LineNote(
        "zero_rows",
        "{attack}, {dtype}: A has zero rows{cause} on {singular} of {of} images: the upload holds "
        "no gradient at these positions, so no precision can restore them. How much rounding adds "
        "can be seen from the line with the other precision.",
        _zero_rows,
    ),
    LineNote(
        "rounding",
        "{attack}, {dtype}: on average {gap:.2f} dB below the ceiling, although no row of A is "
        "zero: with exact gradients this system would reach the ceiling, so the gap is due to "
        "rounding and not to a defence (cond(A) exceeds 2^{bits} on {over} of {of} images).",
        _rounding,
    ),
)


# reasons: why lines and images have no score ------------------------------------------------------


def not_scored(lines: Sequence[Line]) -> list[str]:
    """Damaged rows and files that are no images; then reasons of failed, unsupported and unscored
    lines and images: each once, with its counts.

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
    sentences = [*_damaged(lines), *_unreadable(lines)]
    sentences += [
        f"{counted(len(of), 'line')} {status}: {reason} ({which(of, lines)})"
        for (status, reason), of in whole.items()
    ]
    for (status, reason), by_line in single.items():
        noun = "image" if len(by_line) == 1 else "row"  # an image in several lines is several rows
        rows = counted(sum(count for _, count in by_line.values()), noun)
        numbers = which([line for line, _ in by_line.values()], lines)
        sentences.append(f"{rows} {status}: {reason} ({numbers})")
    shown_ones = sentences[:REASONS_SHOWN]
    if left := len(sentences) - len(shown_ones):
        shown_ones.append(f"{left} further reasons, which the rows themselves say")
    return shown_ones


def image_reasons(line: Line) -> Counter[tuple[str, str]]:
    """The number of images by (status, reason); an image counts once for each of its reasons."""
    return line.reduced("image_reasons", lambda: _image_reasons(line))


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


def unreadable_images(lines: Sequence[Line]) -> dict[str, str]:
    """Why images could not be read, by image_id."""
    return {image: reason for line in lines for image, reason in line.unreadable.items()}


def _unreadable(lines: Sequence[Line]) -> Iterable[str]:
    """Which files are no images, and which images were lost with one of them."""
    reasons = unreadable_images(lines)
    lost = [name for name, reason in reasons.items() if reason.startswith(IN_STEP_OF)]
    files = [f"{name} ({reason})" for name, reason in reasons.items() if name not in lost]
    if files:
        what = "file is no readable image" if len(files) == 1 else "files are no readable images"
        yield f"{len(files)} {what}: {first_of(files, NAMED)}; in no figure"
    if lost:
        images = "1 image is" if len(lost) == 1 else f"{len(lost)} images are"
        yield f"{images} in a client step with such a file: {first_of(lost, NAMED)}; in no figure"


def _damaged(lines: Sequence[Line]) -> Iterable[str]:
    """How many units changed after they were written, and in which files: an image counts once for
    each of its lines."""
    files = [path.relative_to(line.store.root) for line in lines for path in line.left_out]
    if not files:
        return
    there = [len(line.images) + len(line.unreadable) for line in lines]
    planned = [line.cell.outcome.planned_images + len(line.unreadable) for line in lines]
    of = sum(map(max, planned, there))
    lost = sum(
        max(1, a - b) for line, a, b in zip(lines, planned, there, strict=True) if line.left_out
    )
    named = first_of([shown(file) for file in files], NAMED)
    yield (
        f"DAMAGED: {lost} units of {of} are damaged and in no figure: run the attack again "
        f"({named})"
    )
