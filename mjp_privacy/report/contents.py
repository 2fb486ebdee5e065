"""Everything a report says, computed once from the stored rows; writers put it into files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from mjp_privacy.core.drawing import Chart
from mjp_privacy.core.progress import Progress
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report import comparisons
from mjp_privacy.report.answer import build_card
from mjp_privacy.report.card import HEADINGS, Card, every_client
from mjp_privacy.report.clients import Client, attacked_ones, clients_of, derived_lines
from mjp_privacy.report.curves import (
    BATCH,
    UPLOADS,
    batch_points,
    curve_points,
    distribution_charts,
    panel_charts,
)
from mjp_privacy.report.figures import DerivedLine, Table, build_tables
from mjp_privacy.report.flags import figure_flags
from mjp_privacy.report.lines import Line
from mjp_privacy.report.notes import Section, all_notes, not_scored
from mjp_privacy.report.pictures import Gallery, fill_gallery
from mjp_privacy.report.runs import Loaded, RunConfig, load_runs, run_configs
from mjp_privacy.report.table5 import Row, table5, table5_rows
from mjp_privacy.report.text import TextTable, main_table
from mjp_privacy.report.tradeoff import clients_tradeoff

CAPTION = (
    "Metrics in their standard variants; mean [95 % interval]; PSNR in dB, at most 100 in means. "
    "Grey: PSNR of a uniform grey. Rank ceiling: the limit of attacks that invert the patch "
    "embedding by minimum norm, beside these alone. Acc. altered: accuracy of the model with the "
    "block 0 that the attack needs, without norm1 and residuals."
)

IDENTIFIED = 4  # lines whose pictures are looked up among all images


@dataclass(frozen=True)
class Contents:
    """A report before it is written; each part is made when it is first asked for."""

    runs: tuple[Path, ...]
    loaded: Loaded

    @property
    def lines(self) -> Sequence[Line]:
        return self.loaded.lines

    @property
    def experiments(self) -> list[list[str]]:
        """The names of the experiments in each of the run folders."""
        return [RunStore(run).experiments for run in self.runs]

    @cached_property
    def clients(self) -> list[Client]:
        """What was attacked, also where only controls were run."""
        return clients_of(self.lines)

    @cached_property
    def derived(self) -> list[DerivedLine]:
        """Worst cases and attacker's choices."""
        return derived_lines(self.clients)

    @cached_property
    def every_line(self) -> list[Line]:
        """The cells of all runs, then what is derived from them."""
        return [*self.lines, *self.derived]

    @cached_property
    def configs(self) -> list[RunConfig]:
        return run_configs(self.runs)

    @cached_property
    def card(self) -> Card:
        return build_card(self.clients, self.experiments)

    @cached_property
    def strip(self) -> tuple[tuple[str, Line], ...] | None:
        """The lines behind the main figures of the card, under their headings: the columns of the
        card's pictures. None where the card has no client."""
        if not self.card.rows:
            return None
        row = self.card.rows[self.card.main]
        client = row.client
        if row.one_upload is None and row.any_uploads is None:
            return tuple((line.attack, line) for line in client.attacks if line.picture_ids)
        lines = (client.published, client.one_upload, client.any_uploads)
        columns = zip(HEADINGS.values(), lines, strict=False)
        return tuple((title, line) for title, line in columns if line is not None)

    @property
    def chooser(self) -> Line | None:
        """The line by whose PSNR pictures are chosen: the best with one upload, or the first."""
        by_heading = dict(self.strip or ())
        return by_heading.get(HEADINGS["one_upload"]) or next(iter(by_heading.values()), None)

    @cached_property
    def gallery(self) -> Gallery:
        """The pictures that the page has room for."""
        return fill_gallery(self.every_line, self.chooser)

    @cached_property
    def client_names(self) -> dict[int, str]:
        """What the report calls the client of each line, by the line's number."""
        of_client = ((client, (*client.lines, *client.derived)) for client in self.clients)
        return {line.number: client.title for client, lines in of_client for line in lines}

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """Every line in the paper's variants of the metrics, and in the standard ones."""
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
        return all_notes(self.lines, self.derived, self.reasons)

    @cached_property
    def main(self) -> TextTable:
        """Every line, with what must not be taken at face value in words."""
        _, standard = self.tables
        beware: dict[int, str] = {}
        for client in self.clients:
            for line in (*client.attacks, *client.derived):  # controls have none
                beware[line.number] = "; ".join(flag.name for flag in figure_flags(client, line))
        return main_table(standard, CAPTION, beware, many_runs=self.loaded.many_runs)

    @cached_property
    def card_lines(self) -> list[tuple[str, Line]]:
        """The lines behind the card's figures, each with its client's name and its own."""
        attacked = attacked_ones(self.clients)
        on_card = [row.client for row in self.card.rows]
        shown = [client for client in attacked if client in on_card]
        named: dict[Line, str] = {}
        for client in shown or attacked:
            for line in (client.one_upload, client.any_uploads, client.published):
                if line is not None and len(line.images):
                    named.setdefault(line, f"{client.title}: {line.attack}")
        return [(name, line) for line, name in named.items()]

    @cached_property
    def charts(self) -> Mapping[str, tuple[Chart, ...]]:
        """The charts by section of the page, none where there is nothing to draw."""
        return {
            "distributions": distribution_charts(self.card_lines),
            "uploads": panel_charts(self.points, UPLOADS),
            "batches": panel_charts(self.batches, BATCH),
            "tradeoff": clients_tradeoff(self.clients),
        }

    @cached_property
    def comparisons(self) -> list[TextTable]:
        """All clients where the card does not show them, and uploads whose truth is not known."""
        attacked = attacked_ones(self.clients)
        every = every_client(self.card, attacked) if len(attacked) > len(self.card.rows) else None
        return [*filter(None, (every, comparisons.residual_table(self.clients)))]

    @cached_property
    def table5_rows(self) -> list[Row]:
        return table5_rows(self.clients)

    @cached_property
    def table5(self) -> TextTable | None:
        """The table as the paper prints it; None where the published attack was not run."""
        return table5(self.table5_rows)

    @property
    def table5_first(self) -> bool:
        """Whether a run is of the paper's table, which then stands right under the answer; other
        runs show their pictures first."""
        return any(name.startswith("table5") for names in self.experiments for name in names)

    @cached_property
    def tests(self) -> TextTable | None:
        """Paired tests, image by image; None where nothing can be compared."""
        return comparisons.tests_table(self.clients)

    @cached_property
    def details(self) -> list[TextTable]:
        """Whether pictures point to their own image, and whether metrics agree; identification of
        the card's main client before others'."""
        main = self.card.rows[self.card.main].client.title if self.card.rows else ""
        of_main = sorted(self.card_lines, key=lambda named: not named[0].startswith(f"{main}: "))
        tables = (
            comparisons.identification_table(of_main[:IDENTIFIED]),
            comparisons.agreement_table(self.chooser) if self.chooser else None,
        )
        return [*filter(None, tables)]


def read_contents(runs: Sequence[Path], progress: Progress | None = None) -> Contents:
    """The contents of a report of these run folders."""
    paths = tuple(Path(run) for run in runs)
    return Contents(paths, load_runs(paths, progress))
