"""Why recorded uploads cannot be attacked: the one answer that `mjp check` and a run both give.

    folder = examine(UploadFolder(Path("uploads")))
    folder.sound                        # uploads to attack
    folder.refused["round_3_client_7"]  # ("round_3_client_7.json, mean: ...",)

Headers of files are compared with the model before a value is read. So what an upload makes anyone
allocate is bounded by its weights file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mjp_privacy.core.errors import BadFile, UserError, format_error
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import MIB
from mjp_privacy.core.stop import interrupted
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.data.files import is_usable
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.checkpoint_files import file_sha256
from mjp_privacy.models.tensor_files import check_digest
from mjp_privacy.uploads.folder import CHANGES, Series, UploadFolder, lines_of, series_of
from mjp_privacy.uploads.header import (
    HEADER,
    header_before_a_flip,
    header_changed,
    header_refusal,
)
from mjp_privacy.uploads.record import WEIGHTS_FILE, Upload

NAMED = 10
"""Uploads that a message lists."""
FLIPPED = "one of which a bit flipped after it was recorded; where you changed it, take `seal` out"
NO_HEADER = "no header beside it: it was lost, or the recorder was stopped. Record it again"


@dataclass(frozen=True)
class Examined:
    """The uploads of a folder, all of them examined."""

    known: Sequence[Upload]
    """Those whose headers can be read, refused ones among them: lines are named by them all."""
    refused: Mapping[str, tuple[str, ...]]  # by name, every reason
    """A name with characters that nothing shows is escaped."""
    changed: Sequence[str] = ()
    """Sound uploads whose headers are not as they were recorded."""

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
        lines = []
        if self.changed:
            lines.append(
                f"{len(self.changed)} header(s) changed after they were recorded "
                f"({first_of([*map(shown, self.changed)], NAMED)}), as their seals say, and are "
                "read as they are; where you did not change them, record or copy these uploads "
                "again. A header without its field `seal` is not compared."
            )
        if any(upload.name in self.refused for upload in self.known):
            lines.append(
                "refused uploads leave their series out; what is left of their lines is attacked "
                "under another run_id until they are mended"
            )
        return lines


@dataclass(frozen=True)
class Opened:
    """An upload by its header. Where a single bit of that flipped, the upload is known by what it
    said before; a person's changes are read as they are."""

    upload: Upload | None
    error: UserError | None  # what is wrong with the header
    changed: bool = False

    @classmethod
    def of(cls, folder: UploadFolder, name: str) -> Opened:
        """The upload of this name."""
        opened, path = cls(None, None), folder.root / f"{name}.json"
        try:
            opened = cls(folder.upload(name), None, header_changed(path))
            if not opened.changed:
                return opened
        except UserError as error:
            opened = cls(None, error)
        with suppress(UserError):
            if is_usable(name) and (header := header_before_a_flip(path)) is not None:
                return cls(Upload(folder.root, name, header), HEADER.refusal(path, FLIPPED))
        return opened

    @property
    def stands(self) -> bool:
        """Whether a refused upload's header tells where it stood: a person did not change it."""
        return self.upload is not None and not self.changed


def examine(folder: UploadFolder) -> Examined:
    """Examine every upload of a folder. All of its files are read, one tensor at a time."""
    examiner = Examiner()
    known: list[Upload] = []
    changed: list[str] = []
    refused: dict[str, tuple[str, ...]] = {
        shown(name.removesuffix(".safetensors")): (f"{shown(name)}: {NO_HEADER}",)
        for name in folder.unfinished()
    }
    names = folder.names()
    with Progress("reading uploads", lambda: len(names)) as bar:
        for name in names:
            bar.advance()
            opened = Opened.of(folder, name)
            if opened.upload is None or opened.error is not None:
                refused[shown(name)] = (one_line(opened.error, folder.root),)
            elif faults := examiner.faults(opened.upload):
                refused[name] = tuple(faults)
            if opened.upload is not None and (name not in refused or opened.stands):
                known.append(opened.upload)
            changed += [name] if opened.changed else []
    sound = [upload for upload in known if upload.name not in refused]
    refused |= {name: (reason,) for name, reason in contradictions(sound).items()}
    refused |= _with_their_series(known, refused)
    told = [name for name in changed if name not in refused]
    return Examined(known, dict(sorted(refused.items())), told)


def known_uploads(folder: UploadFolder, refused: Mapping[str, str]) -> list[Upload]:
    """`examine(folder).known` of a folder that was examined before; of its refused uploads the
    headers alone are read."""
    known = []
    for name in folder.names():
        if shown(name) not in refused:
            known.append(folder.upload(name))
            continue
        opened = Opened.of(folder, name)
        known += [opened.upload] if opened.upload is not None and opened.stands else []
    return known


def check_some(examined: Examined, folder: UploadFolder) -> None:
    """Raise, with the reasons, if no upload can be attacked."""
    if examined.sound:
        return
    lines = [f"  {name}: {reason}" for name, reason in examined.reasons.items()]
    more = [f"  ... and {len(lines) - NAMED} more"] if len(lines) > NAMED else []
    raise UserError(
        f"{shown(folder.root)}: expected at least one sound upload, got {len(examined.refused)} "
        "that cannot be attacked:\n" + "\n".join([*lines[:NAMED], *more])
    )


def _with_their_series(
    known: Sequence[Upload], refused: Mapping[str, object]
) -> dict[str, tuple[str]]:
    """Why the other uploads of a refused upload's series are left out: with fewer rounds they would
    be another series, in a line of its own. An upload whose header is lost is known by its name,
    which begins with that of its series."""
    lost = sorted(refused.keys() - {upload.name for upload in known})
    reasons: dict[str, tuple[str]] = {}
    for series in series_of(known):
        missing = [upload.name for upload in series.uploads if upload.name in refused]
        if name := next(iter(missing), series.lacking(lost)):
            reason = f"left out with {name}, an upload of its series that cannot be attacked"
            reasons |= {u.name: (reason,) for u in series.uploads if u.name not in missing}
    return reasons


def one_line(reason: object, folder: Path) -> str:
    """A reason as a row holds it: without breaks of lines, and with paths inside the folder."""
    return " ".join(str(reason).replace(f"{shown(folder)}{os.sep}", "").split())


# faults of one upload ----------------------------------------------------------------------------

SENT_AS = {"float32": ("F32", "F16", "BF16"), "float64": ("F64",)}
"""Types of an upload's tensors, by the precision in which the header says the client computed."""
COPIED = WEIGHTS_FILE.advising("Record or copy it again.")
ROOM = 16
"""How many times the size of its weights file a model may have in memory. Half precision takes 2,
tables for more patches than the file's a few more."""


@dataclass
class Examiner:
    """Examines uploads; weights that several of them share are looked at once."""

    outlines: dict[str, LoadedModel | str] = field(default_factory=dict)
    """The model of each weights file and header, or why there is none."""
    digests: dict[str, str] = field(default_factory=dict)
    """That of each file of weights."""

    def faults(self, upload: Upload) -> list[str]:
        """The reasons why this upload cannot be attacked, each one sentence; none if it can."""
        model = self._outline(upload)
        reasons = [model] if isinstance(model, str) else []
        checks = [_of_seals(upload), _of_tensors(upload, None)]
        if not isinstance(model, str):
            checks = [
                *(_of_seals(upload), self._of_weights(upload), _of_header(upload, model)),
                *(_of_tensors(upload, model), _of_truth(upload, model)),
            ]
        for check in checks:
            try:
                reasons += check  # as many as it yields before it raises
            except Exception as error:
                reasons.append(_said(error))
        return [one_line(reason, upload.folder) for reason in dict.fromkeys(reasons)]

    def _outline(self, upload: Upload) -> LoadedModel | str:
        """The upload's model without its weights, or why it cannot be loaded."""
        header = upload.header
        key = json.dumps([header.weights, header.model, header.mean, header.std], sort_keys=True)
        try:
            upload.check_weights()
            if key not in self.outlines:
                self.outlines[key] = _checked_outline(upload)
        except BadFile as error:
            if error.path == upload.header_path:
                return str(error)
            self.outlines[key] = str(error)
        except Exception as error:
            self.outlines[key] = _said(error)
        outline = self.outlines[key]
        is_reason = isinstance(outline, str)
        return f"{upload.header_path.name}, weights: {outline}" if is_reason else outline

    def _of_weights(self, upload: Upload) -> Iterator[str]:
        expected, name = upload.header.weights_sha256, upload.header.weights
        if upload.weights_path.suffix.lower() == ".safetensors":
            check_digest(upload.weights_path, COPIED)
        if expected is not None and name not in self.digests:
            with WEIGHTS_FILE.reading(upload.weights_path):
                self.digests[name] = file_sha256(upload.weights_path)
        if expected is not None and self.digests[name] != expected:
            yield (
                f"{shown(name)} is not the file whose weights the client had: sha256 "
                f"{self.digests[name][:12]}, expected {expected[:12]}"
            )


def _said(error: Exception) -> str:
    """What a reason says of an error. Where it is a fault of our own code, the other uploads are
    examined all the same."""
    if interrupted():
        raise error
    known = isinstance(error, UserError)
    return str(error) if known else f"what nobody expected: {format_error(error)}"


def _checked_outline(upload: Upload) -> LoadedModel:
    """The model without its weights, unless it is far larger than its weights file."""
    model = upload.outline()
    needed = 4 * sum(p.numel() for p in model.parameters())
    held = upload.weights_path.stat().st_size
    if needed > ROOM * held + MIB:
        raise UserError(
            f"expected a model such as that of a file of {held / MIB:,.1f} MiB; got one of "
            f"{needed / MIB:,.0f} MiB. Mend `model` in the header."
        )
    return model


def _of_seals(upload: Upload) -> Iterator[str]:
    upload.check_seals()
    yield from ()


def _of_header(upload: Upload, model: LoadedModel) -> Iterator[str]:
    """Labels and names of errors that the model does not have: what they say would be lost."""
    names = {name for name, _ in model.named_parameters()}
    header, classes = upload.header, model.card.num_classes
    for field_name, expected, strange in (
        ("labels", f"0 to {classes - 1}", [n for n in header.labels or () if n >= classes]),
        ("noise", "names of its parameters", header.noise.keys() - names),
        ("rounding", "names of its parameters", header.rounding.keys() - names),
    ):
        if strange:
            said = f"what the model has: {expected}", shown(str(min(strange)))
            yield str(header_refusal(upload.header_path, field_name, *said))


def _of_tensors(upload: Upload, model: LoadedModel | None) -> Iterator[str]:
    """Of their types, their names, their shapes and, where these are sound, their numbers."""
    file, dtype = upload.tensor_file(), upload.header.dtype
    types, allowed = set(file.dtypes.values()), SENT_AS[dtype]
    if len(types) != 1 or not types <= set(allowed):
        got = ", ".join(sorted(types)) or "no tensors"
        raise file.kind.refusal(
            upload.path,
            f"{got}, and the header's dtype is {dtype}, which is sent as one of "
            f"{', '.join(allowed)}",
        )
    if model is None:
        return
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if unknown := [name for name in file.names if name not in shapes]:
        yield (
            f"it holds {first_of([shown(name, 60) for name in unknown], 3)}, which the model of "
            f"{shown(upload.header.weights)} does not have: expected an upload of that model"
        )
    for name in (n for n in file.names if n in shapes and file.shapes[n] != shapes[n]):
        yield (
            f"{name} has the shape {file.shapes[name]}, and the model's {shapes[name]}: expected "
            "an upload of that model, without a leading axis"
        )
        return
    if unknown:
        return
    broken, empty = [], True
    for name in file.names:  # one tensor at a time, so that memory holds the largest alone
        tensor = file.tensors([name])[name]
        broken += [] if bool(tensor.isfinite().all()) else [name]
        empty = empty and not bool(tensor.any())
    if broken:
        yield f"NaN or infinity in {', '.join(broken[:3])}: the client's step broke down"
    elif empty:
        yield "every number in it is zero: nothing was trained in this round"


def _of_truth(upload: Upload, model: LoadedModel) -> Iterator[str]:
    file = upload.truth_file()
    if file is not None:
        file.check_shapes(upload.header.batch, model.card.img_size, model.patch_embed.num_patches)
        file.read()
    yield from ()


# headers that contradict each other ---------------------------------------------------------------

MOST_TOGETHER = 100_000
"""Images of a block, which holds whole steps of every client of a folder."""


def contradictions(uploads: Sequence[Upload]) -> dict[str, str]:
    """Why uploads cannot be attacked together, by name; what they contradict is named too."""
    too_many = _of_batches(uploads)
    series = series_of([upload for upload in uploads if upload.name not in too_many])
    reasons = {each: _within(each) for each in series}
    for line in lines_of([each for each, reason in reasons.items() if not reason]):
        reasons |= _of_one_image(line)
    refused = {u.name: reason for each, reason in reasons.items() if reason for u in each.uploads}
    return too_many | refused


def _of_batches(uploads: Sequence[Upload]) -> dict[str, str]:
    """Uploads whose batch fits into no block beside the commoner ones."""
    block, reasons = 1, dict[str, str]()
    for batch, _ in Counter(upload.header.batch for upload in uploads).most_common():
        if (together := math.lcm(block, batch)) <= MOST_TOGETHER:
            block = together
            continue
        expected = (
            f"batch: expected one of which a block of {MOST_TOGETHER} images holds whole steps, as "
            f"of this folder's other uploads; got {batch}. Put it into a folder of its own."
        )
        own = [upload.name for upload in uploads if upload.header.batch == batch]
        reasons |= {name: f"{name}.json, {expected}" for name in own}
    return reasons


def _within(series: Series) -> str:
    """What the uploads of a series disagree in; empty if they agree."""
    first, shuffles = series.first, series.first.shuffles_images
    for other in series.uploads[1:]:
        for name, ours, theirs in _shared_facts(first, other):
            may_differ = name in ("labels", "image_ids") and (shuffles or None in (ours, theirs))
            if ours != theirs and not may_differ:
                return (
                    f"series {first.header.series}: {name} is {shown(ours, 60)} in {first.name} "
                    f"and {shown(theirs, 60)} in {other.name}. Expected the same in all uploads of "
                    "a series: mend the headers, or give them series of their own."
                )
    return ""


def _shared_facts(one: Upload, other: Upload) -> Iterator[tuple[str, object, object]]:
    """What uploads of a series have in common, by name: fields of the header, names of images."""
    for each in dataclasses.fields(one.header):
        if each.name not in CHANGES:
            yield each.name, getattr(one.header, each.name), getattr(other.header, each.name)
    files = one.truth_file(), other.truth_file()
    ours, theirs = (None if file is None else file.image_ids for file in files)
    yield "image_ids", ours, theirs


def _of_one_image(line: Sequence[Series]) -> dict[Series, str]:
    """Series of one line that hold an image of the same name."""
    holders: dict[str, list[Series]] = {}
    for series in line:
        for record in series.records:
            holders.setdefault(record.image_id, []).append(series)
    return {
        series: (
            f"two uploads of one round hold an image of the same name, {shown(image_id)} "
            f"({', '.join(each.first.name for each in together[:3])}). Give uploads of the same "
            "image one `series` in their headers, or the images different names in the truth "
            "folder."
        )
        for image_id, together in holders.items()
        if len(together) > 1
        for series in together
    }
