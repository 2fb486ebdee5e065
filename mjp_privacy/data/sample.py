"""A small copy of a labelled set of images: a few of every class, chosen by a seed.

OUT/<relative path>   the original bytes
OUT/labels.csv        file,label
OUT/manifest.csv      file,label,sha256
OUT/skipped.csv       file,label,reason: candidates that could not be read
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.errors import UserError, writing
from mjp_privacy.core.files import check_folder, check_name, check_own, output_folder, working_in
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import FileKind
from mjp_privacy.core.text import counted, first_of, shown
from mjp_privacy.data.decoding import ImageError
from mjp_privacy.data.images import ImageRecord, ImageSource, keep_apart, spread_subset

MOST_SHOWN = 10  # classes that a remark names
COPY = FileKind("a copy that this command wrote", "Give another --out.", 1 << 40)

Chosen = Sequence[tuple[ImageRecord, str]]
"""Images, each with its SHA-256 or with the reason why it cannot be read; sorted by their ids."""


@dataclass(frozen=True)
class Sample:
    """Which images were chosen, which could not be read, and which classes had too few."""

    chosen: Chosen
    skipped: Chosen
    short: Mapping[int, int]  # readable images by class, of the classes that have too few

    @property
    def reasons(self) -> dict[str, str]:
        """Why candidates could not be read."""
        return {record.image_id: reason for record, reason in self.skipped}

    def tables(self) -> dict[str, str]:
        """The text of each CSV by its file name."""
        rows, skipped = (
            [(record.image_id, record.label, fact) for record, fact in entries]
            for entries in (self.chosen, self.skipped)
        )
        return {
            "labels.csv": csv_text(("file", "label"), [row[:2] for row in rows]),
            "manifest.csv": csv_text(("file", "label", "sha256"), rows),
            "skipped.csv": csv_text(("file", "label", "reason"), skipped),
        }


def make_sample(
    source: ImageSource,
    out: Path,
    *,
    per_class: int = 1,
    limit: int | None = None,
    seed: int = 0,
) -> Outcome:
    """Write the sample to `out`, whole or not at all; returns a few lines on what was done."""
    refuse_out(source.path, out)
    sample = choose(source, per_class=per_class, limit=limit, seed=seed)
    with whole_folder(out) as folder:
        for record, _ in sample.chosen:
            file_in(folder, record.image_id).write_bytes(source.read_bytes(record))
        for name, text in sample.tables().items():
            (folder / name).write_text(text, encoding="utf-8", newline="")
        for record, sha256 in sample.chosen:  # a disk may take two names for one
            if COPY.sha256(folder / record.image_id) != sha256:
                raise UserError(
                    f"The copy of {shown(record.image_id)} is not the image that was chosen: it "
                    "changed, or this disk takes two names for one. Start again, with --out on "
                    "another disk, or rename the image."
                )
    lines = [f"Wrote {len(sample.chosen)} images to {shown(out)}.", *remarks(sample, per_class)]
    return Outcome("\n".join(lines), sample.reasons)


def choose(source: ImageSource, *, per_class: int, limit: int | None, seed: int) -> Sample:
    """The first `per_class` readable images of every class, in the order of a hash; of these the
    first `limit`, the classes taking turns.

    The hash is over the seed, the class and the file's name without its folder: the same images are
    chosen however ImageNet is laid out.
    """
    classes: dict[int, list[ImageRecord]] = defaultdict(list)
    for record in source.records:
        if record.label is None:
            raise UserError(
                f"A sample takes images of every class, but {shown(source.path)} has no classes: "
                f"{source.labels_described} Give --labels with a CSV `file,label`."
            )
        classes[record.label].append(record)

    def place(record: ImageRecord) -> tuple[int, str]:
        name = PurePosixPath(record.image_id).name
        return derive_seed("sample", seed, str(record.label), name), record.image_id

    chosen: list[tuple[ImageRecord, str]] = []
    skipped: list[tuple[ImageRecord, str]] = []
    short = {}
    with Progress("choosing", len(classes), "classes") as bar:
        for label in sorted(classes):
            before = len(chosen)
            for record in sorted(classes[label], key=place):
                if len(chosen) - before == per_class:
                    break
                try:
                    source.decode(record)
                    chosen.append((record, hashlib.sha256(source.read_bytes(record)).hexdigest()))
                except ImageError as error:
                    skipped.append((record, error.reason))
            if len(chosen) - before < per_class:
                short[label] = len(chosen) - before
            bar.advance()
    if not chosen:
        raise UserError(
            f"Expected images, got {len(skipped)} in {shown(source.path)} of which none can be "
            f"read; the first is {shown(skipped[0][0].image_id)}: {skipped[0][1]}."
        )
    kept = set(spread_subset([record for record, _ in chosen], limit, seed))
    chosen = [entry for entry in chosen if entry[0] in kept]
    for entries in (chosen, skipped):
        entries.sort(key=lambda entry: entry[0].image_id)
    return Sample(chosen, skipped, short)


def refuse_out(source: Path, out: Path) -> None:
    """Raise if `out` is a file, an address or not empty, or does not lie apart from the images."""
    check_name(out)
    if out.exists() and not out.is_dir():
        raise UserError(
            f"Expected a folder for --out, got the file {shown(out)}. Give another name."
        )
    keep_apart(out, {"--from": source})
    check_own(out)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its place, a new or empty one, at the end of this
    block: a set of files is there whole or not at all."""
    check_own(out)
    temporary = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.tmp")
    output_folder(temporary.parent)
    with writing(out):
        try:
            temporary.mkdir()
            with working_in(temporary):
                yield temporary
            if out.is_dir():
                out.rmdir()
            temporary.replace(out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def file_in(folder: Path, name: str) -> Path:
    """Where a file of such a folder is to be written; the folders above it are made."""
    check_folder(folder / name)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    return folder / name


def remarks(sample: Sample, per_class: int) -> list[str]:
    """Sentences on images that could not be read, and on classes that had too few."""
    lines = []
    if sample.skipped:
        first, reason = sample.skipped[0]
        lines.append(
            f"Skipped {counted(len(sample.skipped), 'unreadable image')}, listed in skipped.csv; "
            f"the first is {shown(first.image_id)}: {reason}."
        )
    if sample.short:
        named = first_of([f"{label} ({n})" for label, n in sample.short.items()], MOST_SHOWN)
        lines.append(
            f"Fewer than {per_class} readable images in {len(sample.short)} classes; class (images "
            f"found): {named}."
        )
    return lines


def csv_text(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The text of a CSV with these columns."""
    import pandas as pd  # half a second, which refusals need not wait for

    return str(pd.DataFrame(rows, columns=list(header)).to_csv(index=False, lineterminator="\n"))
