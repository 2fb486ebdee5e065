"""Which attack each derived line took for which image: as notes, and as rows of choices.csv.

With more rows than a CSV file is good for it is choices.parquet, with the same columns.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mjp_privacy.core.files import write_atomically
from mjp_privacy.metrics.coded import Images
from mjp_privacy.metrics.spreadsheet import formula_free
from mjp_privacy.report.grouping import grouped, which
from mjp_privacy.report.loading import Line
from mjp_privacy.report.notes import REASONS_SHOWN, Section
from mjp_privacy.report.samples import MOST_ROWS
from mjp_privacy.report.worst_case import RULES, WORST_CASE, DerivedLine

COLUMNS = ("line", "run", "reduction", "image_id", "chosen_line", "chosen_run_id", "chosen_attack")
CSV, PARQUET = "choices.csv", "choices.parquet"
TITLE = "Worst case and attacker's choice"


def choices_section(lines: Sequence[Line], derived: Sequence[DerivedLine]) -> Section:
    """Notes on what each derived line is made of, and on which lines are controls."""
    items = [_sentence(line) for line in derived]
    items += grouped([*lines, *derived], _missing_images)
    controls = [line for line in lines if line.role in ("floor", "ceiling")]
    if controls:
        items.append(
            f"Controls ({which(controls, lines)}) are not attacks: a floor shows what a score is "
            "worth, a ceiling what an attack can reach. They may use the private images, so they "
            "are not compared with published figures, and no derived line chooses them."
        )
    return Section(TITLE, tuple(items))


def _sentence(line: DerivedLine) -> str:
    how = (
        "an oracle selection that takes, for each image, the attack with the highest PSNR "
        "(standard); an upper bound on what any selector can reach"
        if line.role == WORST_CASE.name
        else "for each image the attack with the smallest gradient residual; the private images "
        "are not used for the choice"
    )
    counts = ", ".join(f"{name} {count}" for name, count in line.counts.items())
    parts = [
        f"Line {line.number}, {line.attack}: {how}. A choice was made for {len(line.chosen)} "
        f"images: {counts}."
    ]
    if line.uploads > 1:
        parts.append(f"Its attacks may use up to {line.uploads} uploads of one image.")
    if incomplete := _incomplete_choices(line):
        lacking = "score" if line.role == WORST_CASE.name else "residual"
        parts.append(
            f"For {incomplete} of these images not every attack could be compared: at least one "
            f"has no {lacking}."
        )
    return " ".join(parts)


def _incomplete_choices(line: DerivedLine) -> int:
    """On how many images at least one member has no value to be chosen by."""
    (rule,) = (rule for rule in RULES if rule.name == line.role)
    images = line.chosen.images
    compared = np.zeros(len(images), dtype=int)
    for member in line.members:
        column = member.column(rule.metric, rule.variant)
        compared[images.places(member.images.ids)[column.at[column.scored]]] += 1
    return int(((line.chosen.member >= 0) & (compared < len(line.members))).sum())


def _missing_images(line: Line) -> list[str]:
    """Why images of a derived line have no reconstruction; other lines have their own section."""
    if not isinstance(line, DerivedLine):
        return []
    column = line.column("psnr", "standard")
    column = column.chosen(~column.statuses.equal("ok"))
    reasons = Counter(zip(column.statuses.tolist(), column.reasons.tolist(), strict=True))
    return [
        f"{'1 image' if count == 1 else f'{count} images'} {status}: {reason}"
        for (status, reason), count in reasons.most_common(REASONS_SHOWN)
    ]


def write_choices(derived: Sequence[DerivedLine], out: Path) -> Path | None:
    """Write one row per derived line and image, ordered by line, then by image, into choices.csv
    or choices.parquet; the file's path, None without derived lines. Stale ones are deleted."""
    many = sum(len(line.chosen) for line in derived) > MOST_ROWS
    writers = {CSV: _write_csv, PARQUET: _write_parquet}
    written = (PARQUET if many else CSV) if derived else None
    for name, write in writers.items():
        if name == written:
            write_atomically(out / name, partial(write, derived))
        else:
            (out / name).unlink(missing_ok=True)
    return None if written is None else out / written


def _write_parquet(derived: Sequence[DerivedLine], path: Path) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    kinds = (pa.int32(), *[pa.string()] * 3, pa.int32(), *[pa.string()] * 2)
    schema = pa.schema(list(zip(COLUMNS, kinds, strict=True)))
    words = [name for name in COLUMNS if name != "image_id"]
    encoding = {"image_id": "DELTA_BYTE_ARRAY"}
    ids: dict[Images, pa.Array] = {}
    layout = {"use_dictionary": words, "column_encoding": encoding}
    with (
        path.open("wb") as file,
        ParquetWriter(file, schema, compression="zstd", **layout) as writer,
    ):
        for line in derived:
            choice = line.chosen
            if choice.images not in ids:
                ids = {choice.images: pa.array(choice.images.ids, pa.string())}
            at = np.flatnonzero(choice.member >= 0)
            member = pa.array(choice.member[at].astype(np.int32))
            of_line = (line.number, line.run, line.cell.attack.title)
            of_member = [(m.number, m.run_id, m.cell.attack.title) for m in line.members]
            columns = [pa.repeat(value, len(at)) for value in of_line]
            columns.append(ids[choice.images].take(pa.array(at)))
            columns += [pa.array(values).take(member) for values in zip(*of_member, strict=True)]
            writer.write_table(pa.table(columns, names=COLUMNS).cast(schema))


def _write_csv(derived: Sequence[DerivedLine], path: Path) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for line in derived:
            before = (line.number, *map(formula_free, (line.run, line.cell.attack.title)))
            after = [(m.number, m.run_id, formula_free(m.cell.attack.title)) for m in line.members]
            choice = line.chosen
            chosen = zip(choice.images.ids, choice.member.tolist(), strict=True)
            rows.writerows(
                (*before, formula_free(image), *after[at]) for image, at in chosen if at >= 0
            )
