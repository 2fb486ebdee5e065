"""Everything a report says, computed once from the stored rows; writers put it into files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from mjp_privacy.core.progress import Progress
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.answer import build_card, of_several
from mjp_privacy.report.card import (
    Card,
    any_uploads_line,
    floor_level,
    floor_values,
    one_upload_line,
    published_line,
)
from mjp_privacy.report.charts.chart import Chart
from mjp_privacy.report.charts.curves import batch_points, curve_points, uploads_charts
from mjp_privacy.report.charts.distributions import distribution_charts
from mjp_privacy.report.charts.tradeoff import TradeoffPoint, family_and_strength, tradeoff_chart
from mjp_privacy.report.clients import (
    Client,
    circumstances,
    client_titles,
    clients_of,
    distinct_clients,
)
from mjp_privacy.report.figures import Table, build_tables, summary
from mjp_privacy.report.lines import Line
from mjp_privacy.report.notes import (
    Flag,
    Section,
    all_notes,
    figure_flags,
    missed_attacks,
    not_scored,
)
from mjp_privacy.report.page.gallery import Gallery, Strip, card_strip, fill_gallery
from mjp_privacy.report.runs import Loaded, load_runs
from mjp_privacy.report.tables.comparisons import (
    agreement_table,
    clients_table,
    residual_table,
    tests_table,
)
from mjp_privacy.report.tables.details import (
    diagnostics_table,
    identification_table,
    regions_table,
    timing_table,
)
from mjp_privacy.report.tables.table5 import Row, table5, table5_rows
from mjp_privacy.report.tables.text import TextTable, comparison_table, main_table
from mjp_privacy.report.worst_case import (
    DerivedLine,
    Group,
    choice_notes,
    derived_lines,
    reduced_groups,
)


def _tradeoff(groups: Sequence[Group], names: Mapping[int, str]) -> tuple[Chart, ...]:
    """Accuracy against leakage, where clients that are otherwise alike differ in defence.

    Of several groups of like clients the largest is drawn; clients on which fewer attacks were run
    are left out and counted.
    """
    alike: dict[object, list[Client]] = {}
    for client in distinct_clients(groups):
        if one_upload_line(client) is not None:
            around = (circumstances(client), client.lines[0].run)
            alike.setdefault(around, []).append(client)
    group = max(alike.values(), key=len, default=[])
    compared = [client for client in group if not missed_attacks(client, group)]
    points: list[TradeoffPoint] = []
    for client in compared:
        point = _tradeoff_point(client, names[client.lines[0].number])
        ordered = any(p.family == point.family and p.strength == point.strength for p in points)
        points.append(replace(point, strength=math.nan) if ordered else point)
    drawable = [point for point in points if point.drawable]
    if len(drawable) < 3 or len({point.family for point in drawable}) < 2:
        return ()
    known = [level for c in compared if not math.isnan(level := floor_level(c))]
    chart = tradeoff_chart(points, floor=sum(known) / len(known) if known else math.nan)
    left = len(group) - len(compared)
    more = (
        f" {left} further clients had fewer attacks run on them and are left out." if left else ""
    )
    return (replace(chart, caption=chart.caption + more),)


def _tradeoff_point(client: Client, title: str) -> TradeoffPoint:
    line = one_upload_line(client)
    assert line is not None
    leakage = summary(line, "psnr", "standard", cap=PSNR_CAP)
    accuracy = summary(line, "top1", "intact")
    family, strength = family_and_strength(_defence(client))
    return TradeoffPoint(
        label=title,
        family=family,
        strength=strength,
        accuracy=100 * accuracy.mean,
        accuracy_low=100 * accuracy.low,
        accuracy_high=100 * accuracy.high,
        leakage=leakage.mean,
        leakage_low=leakage.low,
        leakage_high=leakage.high,
        n=leakage.n,
        not_scored=leakage.counts.total - leakage.n,
    )


def _defence(client: Client) -> str:
    """The client's defences in the words of comparison.csv: `MJP γ=0.27; int8`."""
    cell = client.cell
    rule = "MJP" if client.masks else "shuffled"
    parts = [f"{rule} γ={cell.gamma:g}"] if cell.gamma else []
    parts += ["dal"] if cell.client.dal and cell.gamma else []
    parts += [f"plain_share {cell.client.plain_share:g}"] if cell.client.plain_share else []
    parts += [f"withhold {cell.client.withhold}"] if cell.client.withhold else []
    parts += ["positions sinusoidal"] if cell.client.positions != "own" else []
    parts += [f"lora {cell.client.lora}"] if cell.client.lora else []
    noise = cell.client.position_noise
    parts += [f"position_noise {noise:g}"] if noise else []
    defences = cell.client.defenses
    parts += defences.split(" + ") if defences else []
    return "; ".join(parts) or "none"


# the report ---------------------------------------------------------------------------------------

CAPTION = (
    "Metrics in their standard variants; mean [95 % interval]; PSNR in dB, capped at 100 in means. "
    "Exact: equal in every 8-bit value. Grey: PSNR of a uniform grey. Rank ceiling: the limit of "
    "attacks that invert the patch embedding by minimum norm, beside these attacks only. Acc. "
    "altered: accuracy of the model with the block 0 that the attack needs."
)
CAPTION_PAPER = (
    "The same lines with the metrics as the paper's scripts define them: images rounded to 8 bits, "
    "its FFT2D, zero-padded SSIM."
)

IDENTIFIED = 4  # lines whose pictures are looked up among all images


@dataclass(frozen=True)
class Contents:
    """A report before it is written; each part is made when it is first asked for."""

    runs: tuple[Path, ...]
    loaded: Loaded

    @property
    def lines(self) -> Sequence[Line]:
        """The cells of all runs."""
        return self.loaded.lines

    @cached_property
    def image_ids(self) -> list[str]:
        """Every image of the runs that a line has rows of, sorted."""
        return sorted(set().union(*(line.images.names for line in self.lines)))

    @cached_property
    def groups(self) -> list[Group]:
        """The lines by what they attack."""
        return reduced_groups(self.lines)

    @cached_property
    def derived(self) -> list[DerivedLine]:
        """Worst cases and attacker's choices."""
        return derived_lines(self.groups)

    @cached_property
    def card(self) -> Card:
        """The first screen."""
        return of_several(build_card(self.groups), self.runs)

    @cached_property
    def strip(self) -> Strip | None:
        """The columns of the card's pictures."""
        return card_strip(self.groups, self.card)

    @cached_property
    def gallery(self) -> Gallery:
        """The pictures that the page has room for."""
        chooser = self.strip.chooser if self.strip else None
        return fill_gallery([*self.lines, *self.derived], chooser)

    @cached_property
    def clients(self) -> list[Client]:
        """Every client with an attack."""
        return clients_of(self.groups)

    @cached_property
    def controls_only(self) -> list[Client]:
        """Targets on which only controls were run; they are no clients of the card."""
        return [Client(group) for group in self.groups if not group.attacks]

    @cached_property
    def client_names(self) -> dict[int, str]:
        """What the report calls the client of each line, by the line's number."""
        names: dict[int, str] = {}
        for client, title in zip(self.clients, client_titles(self.clients), strict=True):
            lines = (*client.lines, *client.group.derived)
            names |= {line.number: title for line in lines}
        for client in self.controls_only:
            names |= {line.number: f"{client.name}, {client.details}" for line in client.lines}
        return names

    @cached_property
    def line_flags(self) -> dict[int, tuple[Flag, ...]]:
        """What must not be taken at face value, by the line's number; controls have nothing."""
        return {
            line.number: figure_flags(client, line, floor_values(client))
            for client in self.clients
            for line in (*client.group.attacks, *client.group.derived)
        }

    @cached_property
    def standard(self) -> Table:
        """Every line in the standard variants of the metrics."""
        return self._tables[1]

    @cached_property
    def paper(self) -> Table:
        """Every line in the paper's variants of the metrics."""
        return self._tables[0]

    @cached_property
    def _tables(self) -> tuple[Table, ...]:
        return build_tables(self.lines, self.derived)

    @cached_property
    def points(self) -> pd.DataFrame:
        """PSNR against the number of uploads."""
        return curve_points(self.lines)

    @cached_property
    def batches(self) -> pd.DataFrame:
        """Exact pictures and PSNR against the batch."""
        return batch_points(self.lines)

    @cached_property
    def reasons(self) -> list[str]:
        """Why images or lines have no score."""
        return [*self.loaded.remarks, *not_scored(self.lines)]

    @cached_property
    def notes(self) -> tuple[Section, ...]:
        """The sections of notes."""
        left_out = Section("What is left out", tuple(self.loaded.remarks))
        choices = tuple(choice_notes(self.lines, self.derived))
        return all_notes(self.lines, left_out, Section("Worst case and attacker's choice", choices))

    def main(self, *, folded: bool) -> TextTable:
        """Every line; without the folded ones if there are others: those in float64."""
        frame = self.standard.frame
        single = frame[frame["dtype"] != "float64"]
        shown = frame if folded or single.empty else single
        left = len(frame) - len(shown)
        more = f" {left} lines in float64 are left out here." if left else ""
        table = Table("standard", shown, self.standard.varying, self.standard.measures)
        many = self.loaded.many_runs
        return main_table(table, many_runs=many, caption=CAPTION + more, title="Every line")

    @cached_property
    def card_lines(self) -> list[tuple[str, Line]]:
        """The lines behind the card's figures, each with its client's name and its own."""
        named: dict[int, tuple[str, Line]] = {}
        titles = [row.client for row in self.card.rows]
        names = {id(client): self.client_names[client.lines[0].number] for client in self.clients}
        shown = [client for client in self.clients if names[id(client)] in titles]
        for client in shown or self.clients:
            best = (one_upload_line(client), any_uploads_line(client))
            for line in (*best, published_line(client)):
                if line is not None and len(line.images):
                    named.setdefault(line.number, (f"{names[id(client)]}: {line.attack}", line))
        return list(named.values())

    @cached_property
    def charts(self) -> Mapping[str, tuple[Chart, ...]]:
        """The charts by section of the page; a section without any is left out."""
        charts = {
            "distributions": distribution_charts(self.card_lines),
            "uploads": uploads_charts(self.points),
            "tradeoff": _tradeoff(self.groups, self.client_names),
        }
        return {name: of_section for name, of_section in charts.items() if of_section}

    @cached_property
    def comparisons(self) -> list[TextTable]:
        """The tables that put clients side by side."""
        names = self.client_names
        residuals = residual_table(self.groups, lambda group: names[group.attacks[0].number])
        return _present(clients_table(self.groups), residuals)

    @cached_property
    def table5_rows(self) -> list[Row]:
        """The rows of the paper's Table 5."""
        return table5_rows(self.groups)

    @cached_property
    def table5(self) -> TextTable | None:
        """The table as the paper prints it; None where the published attack was not run."""
        return table5(self.table5_rows)

    @property
    def table5_first(self) -> bool:
        """Whether a run is of the paper's table, which then stands right under the answer; other
        runs show their pictures first."""
        names = [name for run in self.runs for name in RunStore(run).experiments]
        return any(name.startswith("table5") for name in names)

    @cached_property
    def beside_paper(self) -> list[TextTable]:
        """Our figures beside the paper's; empty where nothing is comparable."""
        return _present(comparison_table(self.paper))

    @cached_property
    def evidence(self) -> list[TextTable]:
        """Ours beside the paper's, paired tests, whether pictures point to their own image, and
        whether metrics agree; identification of the card's main client before others'."""
        main = self.card.rows[self.card.main].client if self.card.rows else ""
        of_main = sorted(self.card_lines, key=lambda named: not named[0].startswith(f"{main}: "))
        lines = [line for _, line in of_main[:IDENTIFIED]]
        chooser = self.strip.chooser if self.strip else None
        return _present(
            *self.beside_paper,
            tests_table(self.groups),
            identification_table(lines, many_runs=self.loaded.many_runs),
            agreement_table(chooser) if chooser else None,
        )

    @cached_property
    def details(self) -> list[TextTable]:
        """Diagnostics, the paper's variants and times."""
        many = self.loaded.many_runs
        lines = [*self.lines, *self.derived]
        title = "Every line, metrics as the paper defines them"
        return _present(
            diagnostics_table(self.paper, self.standard),
            regions_table(lines),
            main_table(self.paper, many_runs=many, caption=CAPTION_PAPER, title=title),
            timing_table(self.lines, self.loaded.timings),
        )


def read_contents(runs: Sequence[Path], progress: Progress | None = None) -> Contents:
    """The contents of a report of these run folders."""
    paths = tuple(Path(run) for run in runs)
    return Contents(paths, load_runs(paths, progress))


def _present(*tables: TextTable | None) -> list[TextTable]:
    return [table for table in tables if table is not None]
