"""The first tables of a report: how well each target is protected against all attacks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mjp_privacy.metrics.statistics import PSNR_CAP, Summary
from mjp_privacy.report.cell_columns import ATTACK_FACTS, COMMAND_FACTS, MODEL_FACTS, client_text
from mjp_privacy.report.loading import Line
from mjp_privacy.report.measures import THRESHOLDS, capped_median, success, summary
from mjp_privacy.report.tables import image_counts, varying_columns
from mjp_privacy.report.views import DASH, TextTable, gamma, number
from mjp_privacy.report.worst_case import ATTACKERS_CHOICE, WORST_CASE, DerivedLine, Group, Rule

TITLE = "What the defence leaves: worst case"
TITLE_DETAILS = "What the defence leaves: by attacker"

CAPTION = (
    "PSNR (standard), dB: mean [95 % interval] of min(PSNR, 100), with n where it differs from "
    "the line's. Worst case: for each image the best attack of the group, chosen by comparing "
    "with the private image; an oracle selection, the upper bound on what any selector can reach. "
    "Attacks that need an altered block 0, as APRIL does, are candidates only where the model was "
    "trained with that block or no other attack was planned. Attacker's choice, where residuals "
    "are stored: for each image the attack whose reconstruction explains the upload best "
    "(smallest gradient residual, with the labels known); the private image is not used, and "
    "gradient matching is favoured, because it minimises such a distance itself. The last columns "
    "describe the worst case over all attacks: the number of images recovered exactly in 8 bits, "
    "and the share of images that reach 20 and 30 dB. Controls and oracle permutations are never "
    "candidates; grey and the other floors show what a score is worth, and the ceiling is that of "
    "attacks which invert the patch embedding by minimum norm."
)
CAPTION_DETAILS = (
    "PSNR (standard), dB, capped at 100: mean [95 % interval], median, and the number of images "
    "recovered exactly in 8 bits. Shares are of all images the attacker was given: those without a "
    "reconstruction count as not recovered, and those that could not be scored are left out."
)


@dataclass(frozen=True)
class Entry:
    """One attacker, floor or ceiling of a group: a line, and the metric of it to show."""

    title: str
    line: Line
    metric: str = "psnr"

    @property
    def variant(self) -> str:
        """The variant under which the metric's rows are stored."""
        return "standard" if self.metric == "psnr" else "diagnostic"

    @property
    def score(self) -> Summary:
        """The metric over the line's images, capped at 100 dB."""
        return summary(self.line, self.metric, self.variant, cap=PSNR_CAP)


def headline_tables(groups: Sequence[Group], *, many_runs: bool) -> list[TextTable]:
    """The headline and its details; empty where no group has more than one attack."""
    groups = [group for group in groups if group.derived]
    if not groups:
        return []
    differing = target_facts(groups)
    return [
        _headline(groups, differing, many_runs=many_runs),
        _details(groups, differing, many_runs=many_runs),
    ]


def target_facts(groups: Sequence[Group]) -> list[str]:
    """Facts in which the groups differ, apart from those of attack, command and model."""
    excluded = ATTACK_FACTS | COMMAND_FACTS | MODEL_FACTS
    varying = varying_columns([line for group in groups for line in group.attacks])
    return [key for key in varying if key not in excluded]


def entries(group: Group) -> list[Entry]:
    """What a group has of these: APRIL as published, the reductions, the floors, the ceiling."""
    first = group.derived[0]
    april = [line for line in group.attacks if _name(line) == "april" and len(line.rows)]
    shown = [Entry("APRIL as published", line) for line in april[:1]]
    for rule, title in ((WORST_CASE, "worst case"), (ATTACKERS_CHOICE, "attacker's choice")):
        shown += [Entry(f"{title}, {_scope(line)}", line) for line in _of(group, rule)]
    controls = {_name(line): line for line in group.controls if len(line.rows)}
    grey = controls.pop("grey", None)
    shown.append(Entry("grey", grey) if grey else Entry("grey", first, "grey_psnr"))
    shown += [
        Entry(name.replace("_", " "), line)
        for name, line in controls.items()
        if line.role == "floor"
    ]
    ceilings = [line for line in controls.values() if line.role == "ceiling"]
    if len(first.scored("ceiling_psnr", "diagnostic")):
        shown.append(Entry("ceiling", first, "ceiling_psnr"))
    elif ceilings:
        shown.append(Entry("ceiling", ceilings[0]))
    return [entry for entry in shown if entry.metric == "psnr" or entry.score.n]


def _of(group: Group, rule: Rule) -> list[DerivedLine]:
    return [line for line in group.derived if line.role == rule.name]


def _name(line: Line) -> str:
    return line.cell.attack.known_as


def _scope(line: DerivedLine) -> str:
    return "1 upload" if line.uploads == 1 else "any number of uploads"


def strongest(group: Group) -> DerivedLine:
    """The worst case over all attacks of the group."""
    return _of(group, WORST_CASE)[-1]


# tables -------------------------------------------------------------------------------------------


def _headline(groups: Sequence[Group], facts: Sequence[str], *, many_runs: bool) -> TextTable:
    by_group = [entries(group) for group in groups]
    titles = _ordered([[entry.title for entry in of_group] for of_group in by_group])
    header = ["#", *_target_titles(facts, many_runs), "n", *titles]
    header += [f"worst case: {what}" for what in ("exact", *map(_from, THRESHOLDS))]
    body = []
    for group, of_group in zip(groups, by_group, strict=True):
        worst = strongest(group)
        by_title = {entry.title: entry for entry in of_group}
        n = Entry("", worst).score.n
        cells = [_mean(by_title[title].score, n) if title in by_title else DASH for title in titles]
        target = _target(group, facts, many_runs)
        body.append((str(worst.number), *target, str(n), *cells, *_shares(Entry("", worst))))
    left = len(_target_titles(facts, many_runs))
    align = "r" + "l" * left + "r" * (len(header) - 1 - left)
    return TextTable(TITLE, CAPTION, tuple(header), tuple(body), align)


def _details(groups: Sequence[Group], facts: Sequence[str], *, many_runs: bool) -> TextTable:
    left = [*_target_titles(facts, many_runs), "Attacker"]
    header = ("#", *left, "n", "not scored", "PSNR", "median", "exact")
    header += tuple(map(_from, THRESHOLDS))
    body = []
    for group in groups:
        for entry in entries(group):
            score, line = entry.score, entry.line
            counts = image_counts(line, "standard")
            not_scored = DASH if entry.metric != "psnr" else str(counts.total - counts.ok)
            line_number = str(line.number) if entry.metric == "psnr" else ""
            median = number(capped_median(line, entry.metric, entry.variant), 2)
            body.append(
                (
                    *(line_number, *_target(group, facts, many_runs), entry.title),
                    *(str(score.n), not_scored, _mean(score, score.n), median, *_shares(entry)),
                )
            )
    align = "r" + "l" * len(left) + "r" * (len(header) - 1 - len(left))
    return TextTable(TITLE_DETAILS, CAPTION_DETAILS, header, tuple(body), align)


def _from(limit: int) -> str:
    return f"≥ {limit} dB"


def _ordered(rows: Sequence[Sequence[str]]) -> list[str]:
    """Every title once; a new one is put right behind the title before it in its row."""
    titles: list[str] = []
    for row in rows:
        at = 0
        for title in row:
            if title in titles:
                at = titles.index(title) + 1
            else:
                titles.insert(at, title)
                at += 1
    return titles


def _target_titles(facts: Sequence[str], many_runs: bool) -> list[str]:
    run = ["Run"] if many_runs else []
    return ["Model", *run, "Set.", "γ", *(["client"] if facts else []), "dtype"]


def _target(group: Group, facts: Sequence[str], many_runs: bool) -> list[str]:
    line = group.attacks[0]
    cell = line.cell
    run = [line.run] if many_runs else []
    client = [client_text(cell.columns, facts)] if facts else []
    return [
        *(cell.model.label, *run, cell.setting, gamma(cell.gamma)),
        *(*client, cell.dtype),
    ]


def _mean(score: Summary, n: int) -> str:
    if not score.n:
        return DASH
    low, high = number(score.low, 2), number(score.high, 2)
    interval = DASH if DASH in (low, high) else f"{low}, {high}"
    return f"{number(score.mean, 2)} [{interval}]" + ("" if score.n == n else f" (n={score.n})")


def _shares(entry: Entry) -> list[str]:
    """Count of exact images and shares above the thresholds; dashes for a diagnostic."""
    if entry.metric != "psnr":
        return [DASH] * (1 + len(THRESHOLDS))
    shares = [success(entry.line, limit, "standard") for limit in THRESHOLDS]
    in_8_bits = summary(entry.line, "psnr", "paper", interval=False).exact
    exact = str(in_8_bits) if entry.score.n else DASH
    return [exact, *(DASH if share != share else f"{share:.0f} %" for share in shares)]
