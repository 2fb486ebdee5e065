"""A folder of recorded uploads: how they stand together, and which of them cannot be attacked.

A series holds uploads of the same images in successive rounds. A group holds the series that begin
in the same round with the same weights and recipe: they are attacked together, as the images of
one cell, and make one line of a table.

    examined = examine(Path("uploads"))   # the one answer that `mjp check` and a run both give
    examined.sound                        # uploads to attack
    examined.refused["round_3_client_7"]  # ("round_3_client_7.json, mean: ...",)

Headers of files are compared with the model before a value is read. So what an upload makes anyone
allocate is bounded by its weights file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

from mjp_privacy.core.errors import UserError, format_error
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import MIB, FileKind
from mjp_privacy.core.stop import interrupted
from mjp_privacy.core.text import cut, first_of, shown
from mjp_privacy.data import ImageRecord
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.tensor_files import check_digest
from mjp_privacy.uploads.record import WEIGHTS_FILE, Upload, UploadHeader, header_refusal

UPLOADS, RECEIVED = "uploads", "received"
"""Folders inside a federation's that hold uploads."""
PART = FileKind("a file of an upload", "Copy it again, or take the upload's files out.", 1 << 40)

REFUSED = "refused uploads"
"""What tables call the uploads that cannot be attacked; no other line has this name."""

LONGEST_NAME = 80
"""Characters of a line's name before its number."""

CHANGES = (
    *("weights", "weights_sha256", "round", "client", "lr"),
    *("partial", "noise", "rounding", "undeclared"),
)
"""Header fields that may change from one upload of a series to the next."""
MAY_DIFFER = {*CHANGES, "series", "labels"} - {"lr"}
"""Header fields in which the uploads of a group may differ; in all others they agree."""
TOLD_APART = (("round", "round {}"), ("batch", "B {}"), ("steps", "E {}"), ("dtype", "{}"))
"""Header fields that enter a line's name where lines of the same label differ in them."""

# the files ----------------------------------------------------------------------------------------


def upload_names(folder: Path) -> list[str]:
    """The names of all uploads of a folder that have a header, sorted."""
    names = sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
    inside = [name for name in (UPLOADS, RECEIVED) if any((folder / name).glob("*.json"))]
    if inside and not any((folder / f"{name}.safetensors").exists() for name in names):
        got = f"a federation's folder, whose uploads are in {shown(folder / inside[0])}"
    elif not names:
        got = "no file that ends in .json" if folder.is_dir() else "no such folder"
    else:
        return names
    raise UserError(
        f"{shown(folder)}: expected a folder with NAME.json beside NAME.safetensors for each "
        f"upload, got {got}. `mjp federate` records such folders; mjp_privacy/federation/README.md "
        "describes the files, for those of another training."
    )


def known_uploads(folder: Path) -> tuple[list[Upload], dict[str, UserError]]:
    """The uploads of a folder whose headers are sound, and what is wrong with the others, by
    name."""
    known, wrong = list[Upload](), dict[str, UserError]()
    for name in upload_names(folder):
        try:
            known.append(Upload.load(folder / f"{name}.json"))
        except UserError as error:
            wrong[name] = error
    return known, wrong


# series and groups --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # hashable by identity
class Series:
    """Uploads of the same images, in order of their rounds; usually a single one."""

    uploads: tuple[Upload, ...]

    @property
    def first(self) -> Upload:
        """The upload of the earliest round."""
        return self.uploads[0]

    @cached_property
    def records(self) -> tuple[ImageRecord, ...]:
        """The images of its batch, named as the private images where those are known."""
        upload, header = self.first, self.first.header
        truth = upload.truth_file()
        batch = header.recipe.batch
        names = photographs = [f"{upload.name}/{place}" for place in range(batch)]
        if truth is not None:
            augments = header.recipe.augment != "none"
            names = [f"{name}@{header.round}" if augments else name for name in truth.image_ids]
            photographs = list(truth.photographs)
        labels = header.labels or (None,) * batch
        return tuple(
            ImageRecord(name, label, "none" if label is None else "file", group=photograph)
            for name, label, photograph in zip(names, labels, photographs, strict=True)
        )

    def lacking(self, lost: Iterable[str]) -> str:
        """Which of these uploads, whose headers nobody can read, is one of the series: its name
        begins with the series' name. Empty if none is."""
        series = self.first.header.series
        known = (n for n in lost if series and n.startswith(series))
        return next((n for n in known if not n[len(series or "") :][:1].isalnum()), "")


@dataclass(frozen=True)
class Group:
    """The series that make one line of a table."""

    name: str
    series: tuple[Series, ...]

    @property
    def header(self) -> UploadHeader:
        """Of its first upload; its `weights` are those of the first round."""
        return self.series[0].first.header

    @cached_property
    def scored(self) -> bool:
        """Whether every upload's private images are known."""
        return all(series.first.has_truth for series in self.series)

    @property
    def records(self) -> tuple[ImageRecord, ...]:
        """The images of all its series."""
        return tuple(record for series in self.series for record in series.records)

    @cached_property
    def _holders(self) -> Mapping[str, Series]:
        return {record.image_id: each for each in self.series for record in each.records}

    def of(self, records: Sequence[ImageRecord]) -> list[Series]:
        """The series that hold these images, each once; the images must fill whole steps."""
        return list(dict.fromkeys(self._holders[record.image_id] for record in records))

    def digest(self) -> str:
        """The sha256 of all that its rows depend on: tensors, headers, weights, private images."""
        digest = hashlib.sha256()
        for upload in (upload for series in self.series for upload in series.uploads):
            digest.update(upload.name.encode())
            paths = upload.path, upload.header_path, upload.weights_path, upload.truth_path
            for path in paths:
                if not path.is_file():
                    digest.update(b"none")
                    continue
                PART.check(path)
                with PART.reading(path), path.open("rb") as file:
                    while chunk := file.read(MIB):
                        digest.update(chunk)
        return digest.hexdigest()


def group_uploads(
    uploads: Sequence[Upload], limit: int | None = None, refused: Collection[str] = ()
) -> list[Group]:
    """Groups in order of label, round, batch and steps; of each at most `limit` images, but at
    least one step.

    refused: names of uploads that cannot be attacked. Their series are left out, and the other
    lines keep the names that they have beside them.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit: expected 1 or more images, got {limit}.")
    lost = set(refused) - {upload.name for upload in uploads}
    by_key: dict[tuple[str, int, int, int, str, str], list[Series]] = {}
    for each in series_of(uploads):
        if each.lacking(lost):
            continue
        header, client = each.first.header, each.first.header.recipe
        recipe = repr(sorted((k, v) for k, v in header.facts.items() if k not in MAY_DIFFER))
        rounds = [(u.header.round, u.header.weights, u.header.recipe.lr) for u in each.uploads]
        rest = f"{recipe} {rounds} {'' if each.first.has_truth else 'without truth'}"
        rest += " ".join(each.first.sent)
        key = (header.label, header.round, client.batch, client.steps, header.weights, rest)
        by_key.setdefault(key, []).append(each)
    lines = [by_key[key] for key in sorted(by_key)]
    groups = []
    for name, members in zip(_names(lines), lines, strict=True):
        sound = [each for each in members if not any(u.name in refused for u in each.uploads)]
        if sound:
            batch = sound[0].first.header.recipe.batch
            most = len(sound) if limit is None else max(limit // batch, 1)
            groups.append(Group(name, tuple(sound[:most])))
    return groups


def series_of(uploads: Sequence[Upload]) -> list[Series]:
    """Uploads of one label and series name together; every other upload alone."""
    members: dict[tuple[str, ...], list[Upload]] = {}
    for upload in uploads:
        header = upload.header
        key = (header.label, "series", header.series) if header.series else ("", "", upload.name)
        members.setdefault(key, []).append(upload)
    return [
        Series(tuple(sorted(together, key=lambda upload: (upload.header.round, upload.name))))
        for together in members.values()
    ]


def _names(lines: Sequence[Sequence[Series]]) -> list[str]:
    """Names of the lines for tables: the label, and with it whatever of round, batch and steps
    differs among lines of that label; " #2" and so on behind one that was there before."""
    headers = [members[0].first.header.facts for members in lines]
    names: list[str] = []
    for header in headers:
        namesakes = [other for other in headers if other["label"] == header["label"]]
        parts = [header["label"]]
        for fact, text in TOLD_APART:
            if len({namesake[fact] for namesake in namesakes}) > 1:
                parts.append(text.format(header[fact]))
        name = numbered = cut(", ".join(parts), LONGEST_NAME)
        number = 1
        while numbered in (REFUSED, *names):
            number += 1
            numbered = f"{name} #{number}"
        names.append(numbered)
    return names


# what cannot be attacked --------------------------------------------------------------------------

NAMED = 10
"""Uploads that a message lists."""
NO_HEADER = "no header beside it: it was lost, or the recorder was stopped. Record it again"


@dataclass(frozen=True)
class Examined:
    """The uploads of a folder, all of them examined."""

    folder: Path
    known: Sequence[Upload]
    """Those whose headers are sound, refused ones among them: all name the lines."""
    refused: Mapping[str, tuple[str, ...]]
    """Every reason, by name, in which characters that nothing shows are escaped."""

    @property
    def sound(self) -> list[Upload]:
        """Those that can be attacked."""
        return [upload for upload in self.known if upload.name not in self.refused]

    @property
    def reasons(self) -> dict[str, str]:
        """Why each refused upload is, in one line."""
        return {name: "; ".join(reasons) for name, reasons in self.refused.items()}

    @property
    def remarks(self) -> list[str]:
        """What is said of the sound uploads, a sentence each."""
        left_out = (
            "refused uploads leave their series out; what is left of their lines is attacked "
            "under another run_id until they are mended"
        )
        return [left_out] * (len(self.sound) < len(self.known))

    def check_some(self) -> None:
        """Raise, with the reasons, if no upload can be attacked."""
        if not self.sound:
            lines = [f"  {name}: {reason}" for name, reason in self.reasons.items()]
            more = [f"  ... and {len(lines) - NAMED} more"] if len(lines) > NAMED else []
            raise UserError(
                f"{shown(self.folder)}: expected at least one sound upload, got {len(lines)} that "
                "cannot be attacked:\n" + "\n".join([*lines[:NAMED], *more])
            )


def examine(folder: Path) -> Examined:
    """Examine every upload of a folder. All of its files are read, one tensor at a time."""
    known, wrong = known_uploads(folder)
    refused: dict[str, tuple[str, ...]] = {
        shown(name): (one_line(error, folder),) for name, error in wrong.items()
    }
    for path in folder.glob("*.safetensors"):
        if not path.with_suffix(".json").exists():
            refused[shown(path.stem)] = (f"{shown(path.name)}: {NO_HEADER}",)
    examiner = Examiner()
    with Progress("reading uploads", lambda: len(known)) as bar:
        for upload in known:
            bar.advance()
            if upload.name not in refused and (faults := examiner.faults(upload)):
                refused[upload.name] = tuple(faults)
    sound = [upload for upload in known if upload.name not in refused]
    refused |= {name: (reason,) for name, reason in contradictions(sound).items()}
    # With fewer rounds a series would be another one, in a line of its own.
    lost = sorted(refused.keys() - {upload.name for upload in known})
    for series in series_of(known):
        missing = [upload.name for upload in series.uploads if upload.name in refused]
        if name := next(iter(missing), series.lacking(lost)):
            reason = f"left out with {name}, an upload of its series that cannot be attacked"
            refused |= {u.name: (reason,) for u in series.uploads if u.name not in missing}
    return Examined(folder, known, dict(sorted(refused.items())))


def one_line(reason: object, folder: Path) -> str:
    """A reason as a row holds it: without breaks of lines, and with paths inside the folder."""
    return " ".join(str(reason).replace(f"{shown(folder)}{os.sep}", "").split())


# what is wrong with one upload -------------------------------------------------------------------

SENT_AS = {"float32": ("F32", "F16", "BF16"), "float64": ("F64",)}
"""Types of an upload's tensors, by the precision in which the header says the client computed."""
COPIED = replace(WEIGHTS_FILE, do="Record or copy it again.")
ROOM = 16
"""How many times the size of its weights file a model may have in memory. Half precision takes 2,
tables for more patches than the file's a few more."""


@dataclass
class Examiner:
    """Examines uploads; weights that several of them share are looked at once."""

    outlines: dict[str, LoadedModel] = field(default_factory=dict)  # of weights files and headers
    sha256: Callable[[Path], str] = field(default_factory=lambda: cache(WEIGHTS_FILE.sha256))

    def faults(self, upload: Upload) -> list[str]:
        """The reasons why this upload cannot be attacked, each one sentence; none if it can."""
        reasons: list[str] = []
        checks: tuple[Callable[[Upload], Iterator[str] | None], ...] = (
            Upload.check_seals,
            *(self._of_weights, self._of_header, self._of_tensors, self._of_truth),
        )
        for check in checks:
            try:
                reasons += check(upload) or ()  # as many as it yields before it raises
            except Exception as error:  # where it is our own fault, the others are examined anyway
                if interrupted():
                    raise
                known = isinstance(error, UserError)
                reasons.append(
                    str(error) if known else f"what nobody expected: {format_error(error)}"
                )
        return [one_line(reason, upload.folder) for reason in dict.fromkeys(reasons)]

    def outline(self, upload: Upload) -> LoadedModel:
        """The upload's model without its weights, unless it is far larger than its weights file."""
        header = upload.header
        upload.check_weights()
        key = json.dumps([header.weights, header.model, header.mean, header.std], sort_keys=True)
        if key not in self.outlines:
            model, held = upload.outline(), upload.weights_path.stat().st_size
            needed = 4 * sum(p.numel() for p in model.parameters())
            if needed > ROOM * held + MIB:
                raise UserError(
                    f"expected a model such as that of a file of {held / MIB:,.1f} MiB; got one of "
                    f"{needed / MIB:,.0f} MiB. Mend `model` in the header."
                )
            self.outlines[key] = model
        return self.outlines[key]

    def _of_weights(self, upload: Upload) -> Iterator[str]:
        self.outline(upload)
        expected, path = upload.header.weights_sha256, upload.weights_path
        if path.suffix.lower() == ".safetensors":
            check_digest(path, COPIED)
        if expected is not None and (found := self.sha256(path)) != expected:
            yield (
                f"{shown(upload.header.weights)} is not the file whose weights the client had: "
                f"sha256 {found[:12]}, expected {expected[:12]}"
            )

    def _of_header(self, upload: Upload) -> Iterator[str]:
        """Labels and names of errors that the model does not have: what they say would be lost."""
        header, model = upload.header, self.outline(upload)
        names, classes = {name for name, _ in model.named_parameters()}, model.card.num_classes
        for field_name, expected, strange in (
            ("labels", f"0 to {classes - 1}", [n for n in header.labels or () if n >= classes]),
            ("noise", "names of its parameters", header.noise.keys() - names),
            ("rounding", "names of its parameters", header.rounding.keys() - names),
        ):
            if strange:
                said = f"what the model has: {expected}", shown(str(min(strange)))
                yield str(header_refusal(upload.header_path, field_name, *said))

    def _of_tensors(self, upload: Upload) -> Iterator[str]:
        """Of their types, their names, their shapes and, where these are sound, their numbers."""
        file, dtype = upload.tensor_file(), upload.header.dtype
        types = set(file.dtypes.values())
        if len(types) != 1 or not types <= set(SENT_AS[dtype]):
            yield (
                f"{shown(upload.path)} holds {', '.join(sorted(types)) or 'no tensors'}, and the "
                f"header's dtype is {dtype}: expected one of {', '.join(SENT_AS[dtype])}"
            )
            return
        shapes = {name: tuple(p.shape) for name, p in self.outline(upload).named_parameters()}
        if wrong := [name for name in file.names if file.shapes[name] != shapes.get(name)]:
            got = [f"{shown(name, 60)} {file.shapes[name]}" for name in wrong]
            own = shapes.get(wrong[0], "no such parameter")
            yield (
                f"it holds {first_of(got, 3)}, where the model of {shown(upload.header.weights)} "
                f"has {own}: expected an upload of that model, without a leading axis"
            )
            return
        broken, empty = [], True
        for name in file.names:  # one tensor at a time, so that memory holds the largest alone
            tensor = file.tensors([name])[name]
            broken += [] if bool(tensor.isfinite().all()) else [name]
            empty = empty and not bool(tensor.any())
        if broken:
            yield f"NaN or infinity in {first_of(broken, 3)}: the client's step broke down"
        elif empty:
            yield "every number in it is zero: nothing was trained in this round"

    def _of_truth(self, upload: Upload) -> None:
        if (file := upload.truth_file()) is not None:
            model, batch = self.outline(upload), upload.header.recipe.batch
            file.check_shapes(batch, model.card.img_size, model.patch_embed.num_patches)
            file.read()


# headers that contradict each other ---------------------------------------------------------------


def contradictions(uploads: Sequence[Upload]) -> dict[str, str]:
    """Why uploads cannot be attacked together, by name; what they contradict is named too."""
    reasons: dict[str, str] = {}
    for series in series_of(uploads):
        if reason := _within(series):
            reasons |= dict.fromkeys((upload.name for upload in series.uploads), reason)
    for group in group_uploads([each for each in uploads if each.name not in reasons]):
        holders: dict[str, list[Upload]] = {}
        for series in group.series:
            for record in series.records:
                holders.setdefault(record.image_id, []).extend(series.uploads[:1])
        for image_id, together in holders.items():
            if len(together) > 1:
                reason = (
                    f"two uploads of one round hold an image of the same name, {shown(image_id)} "
                    f"({first_of([each.name for each in together], 3)}). Give uploads of the same "
                    "image one `series` in their headers, or the images different names in the "
                    "truth folder."
                )
                of_series = [each for each in group.series if each.first in together]
                reasons |= {u.name: reason for each in of_series for u in each.uploads}
    return reasons


def _within(series: Series) -> str:
    """What the uploads of a series disagree in; empty if they agree."""

    def facts(upload: Upload) -> dict[str, object]:
        file = upload.truth_file()
        told = {name: fact for name, fact in upload.header.facts.items() if name not in CHANGES}
        return {**told, "image_ids": None if file is None else file.image_ids}

    first, ours = series.first, facts(series.first)
    for other in series.uploads[1:]:
        for name, theirs in facts(other).items():
            unknown = None in (ours[name], theirs)
            per_round = name in ("labels", "image_ids") and (first.shuffles_images or unknown)
            if ours[name] != theirs and not per_round:
                return (
                    f"series {first.header.series}: {name} is {shown(ours[name], 60)} in "
                    f"{first.name} and {shown(theirs, 60)} in {other.name}. Expected the same in "
                    "all uploads of a series: mend the headers, or give them series of their own."
                )
    return ""
