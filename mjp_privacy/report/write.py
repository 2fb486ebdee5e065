"""Turn stored rows into tables, pictures and a web page. Nothing here attacks or scores.

OUT/table.md  table.html  table.tex    the same tables and notes in three formats
OUT/table.csv                          the figures at full precision, for both metric variants
OUT/samples.csv                        every stored row
OUT/choices.csv                        which attack the worst case took for each image
OUT/rounds.csv                         PSNR against the number of uploads
OUT/figures/                           strips of images, an overview, the spread of PSNR, curves

choices.csv is written only if some target met several attacks, rounds.csv and its picture only if
an attack was run with several numbers of uploads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically
from mjp_privacy.report.ceilings import diagnostics_table
from mjp_privacy.report.chosen_attacks import choices_section, write_choices
from mjp_privacy.report.console import console_table
from mjp_privacy.report.export import latex, markdown, table_csv, write_samples
from mjp_privacy.report.headline import headline_tables
from mjp_privacy.report.loading import Line, Loaded, load_runs
from mjp_privacy.report.measures import image_counts, not_run
from mjp_privacy.report.notes import Section, all_notes
from mjp_privacy.report.page import Image, html_page
from mjp_privacy.report.regions import regions_table
from mjp_privacy.report.rounds import curve_points, write_points
from mjp_privacy.report.tables import VARIANTS, Table, build_table
from mjp_privacy.report.timing import timing_table
from mjp_privacy.report.views import TextTable, comparison_table, main_table
from mjp_privacy.report.worst_case import DerivedLine, Group, derived_lines, reduced_groups

__all__ = ["ReportSummary", "write_report"]

CAPTIONS = {
    "paper": "Metrics as the paper defines them; mean [95 % interval]. Notes below.",
    "standard": "Metrics as generally defined; not comparable with the paper's figures.",
}


@dataclass(frozen=True)
class ReportSummary:
    """What was written, what to print, and whether anything failed."""

    console: str
    files: tuple[Path, ...]
    lines: int
    failed_lines: int  # cells that failed or have no rows; unsupported ones are not failures
    failed_images: int
    not_run: int  # images that a killed run still owes, over all lines

    @property
    def any_failed(self) -> bool:
        """Whether any line or image failed, or has not been run yet."""
        return self.failed_lines > 0 or self.failed_images > 0 or self.not_run > 0


def write_report(runs: Sequence[Path], out: Path) -> ReportSummary:
    """Write every file of the report of one run or several into `out`."""
    if out.exists() and not out.is_dir():
        raise UserError(f"Expected a folder to write the report into, but {out} is a file.")
    loaded = load_runs([Path(run) for run in runs])
    groups = reduced_groups(loaded.lines)
    derived = derived_lines(groups)
    tables = [build_table(loaded.lines, variant, derived) for variant in VARIANTS]
    texts = _text_tables(loaded, tables, groups)
    notes = all_notes(loaded.lines, choices_section(loaded.lines, derived))
    images, pictures = _write_figures(loaded.lines, derived, out)
    files = _write_texts(loaded, tables, texts, notes, images, out)
    files += _write_further(loaded, derived, out)
    failed = [
        max(image_counts(line, variant).failed for variant in VARIANTS) for line in loaded.lines
    ]
    return ReportSummary(
        console=console_table(tables[0], many_runs=loaded.many_runs),
        files=(*files, *pictures),
        lines=len(loaded.lines),
        failed_lines=sum(line.status == "failed" for line in loaded.lines),
        failed_images=sum(failed),
        not_run=sum(not_run(line) for line in loaded.lines),
    )


def _text_tables(
    loaded: Loaded, tables: Sequence[Table], groups: Sequence[Group]
) -> list[TextTable]:
    paper, standard = tables
    many = loaded.many_runs
    optional = [
        *headline_tables(groups, many_runs=many),
        main_table(paper, many_runs=many, caption=CAPTIONS["paper"]),
        comparison_table(paper),
        diagnostics_table(paper, standard),
        regions_table([*loaded.lines, *derived_lines(groups)]),
        main_table(standard, many_runs=many, caption=CAPTIONS["standard"]),
        timing_table(loaded.lines, loaded.timings),
    ]
    return [table for table in optional if table is not None]


def _write_texts(
    loaded: Loaded,
    tables: Sequence[Table],
    texts: Sequence[TextTable],
    notes: Sequence[Section],
    images: Sequence[Image],
    out: Path,
) -> list[Path]:
    contents = {
        "table.md": markdown(texts, notes),
        "table.html": html_page(texts, images, notes),
        "table.tex": latex(texts, notes),
        "table.csv": table_csv(tables, many_runs=loaded.many_runs),
    }
    for name, content in contents.items():
        _write_text(out / name, content)
    samples = out / "samples.csv"
    write_atomically(
        samples,
        lambda temporary: write_samples(loaded.lines, temporary, many_runs=loaded.many_runs),
    )
    return [*(out / name for name in contents), samples]


def _write_further(loaded: Loaded, derived: Sequence[DerivedLine], out: Path) -> list[Path]:
    """Write choices.csv and rounds.csv where they have rows; stale ones in `out` are deleted."""
    choices, rounds = out / "choices.csv", out / "rounds.csv"
    points = curve_points(loaded.lines)
    for path, wanted in ((choices, len(derived)), (rounds, len(points))):
        if not wanted:
            path.unlink(missing_ok=True)
    if derived:
        write_atomically(choices, lambda temporary: write_choices(derived, temporary))
    if len(points):
        write_atomically(rounds, lambda temporary: write_points(points, temporary))
    return [path for path in (choices, rounds) if path.is_file()]


def _write_text(path: Path, content: str) -> None:
    data = content.encode("utf-8")  # as bytes, since text mode would translate line ends
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def _write_figures(
    cells: Sequence[Line], derived: Sequence[DerivedLine], out: Path
) -> tuple[list[Image], list[Path]]:
    """Write the pictures in the order of the page and delete stale ones in `out`."""
    from mjp_privacy.report.comparison import write_comparison
    from mjp_privacy.report.figures import write_distributions, write_overview, write_strips
    from mjp_privacy.report.rounds import CAPTION, write_rounds

    folder = out / "figures"
    lines = [*cells, *derived]
    images: list[tuple[Path, str]] = []
    if write_rounds(cells, folder / "rounds.png"):
        images.append((folder / "rounds.png", CAPTION))
    if write_overview(lines, folder / "overview.png"):
        caption = (
            "The median image of every line by PSNR (standard): the 50 % quantile, not picked by "
            "hand."
        )
        images.append((folder / "overview.png", caption))
    if shown := write_comparison(cells, folder / "comparison.png"):
        caption = (
            f"The same images in every line: {', '.join(shown)}, at the 25 % and 75 % quantiles of "
            "the first line's PSNR (standard), not picked by hand."
        )
        images.append((folder / "comparison.png", caption))
    if write_distributions(lines, folder / "psnr.png"):
        caption = (
            "Per-image PSNR (standard) of every line: density, quartiles and median, and the mean "
            "ceiling for attacks that have one."
        )
        images.append((folder / "psnr.png", caption))
    images += [(strip.path, strip.caption) for strip in write_strips(lines, folder)]
    written = [path for path, _ in images]
    named = ("overview.png", "comparison.png", "psnr.png", "rounds.png")
    for pattern in ("line_[0-9][0-9][0-9]_*.png", *named):
        for stale in sorted({*folder.glob(pattern)} - {*written}):
            stale.unlink()
    return [Image(path.relative_to(out).as_posix(), text) for path, text in images], written
