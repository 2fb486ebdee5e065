"""Why recorded uploads cannot be attacked: the one answer that `mjp check` and a run both give.

    examined = examine(Path("uploads"))
    examined.sound                        # uploads to attack
    examined.refused["round_3_client_7"]  # ("round_3_client_7.json, mean: ...",)

Headers of files are compared with the model before a value is read. So what an upload makes anyone
allocate is bounded by its weights file.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mjp_privacy.core.errors import UserError, format_error
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import MIB
from mjp_privacy.core.stop import interrupted
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.tensor_files import check_digest
from mjp_privacy.uploads.folder import CHANGES, Series, known_uploads, lines_of, series_of
from mjp_privacy.uploads.header import header_refusal
from mjp_privacy.uploads.record import WEIGHTS_FILE, Upload

NAMED = 10
"""Uploads that a message lists."""
NO_HEADER = "no header beside it: it was lost, or the recorder was stopped. Record it again"


@dataclass(frozen=True)
class Examined:
    """The uploads of a folder, all of them examined."""

    folder: Path
    known: Sequence[Upload]
    """Those whose headers tell where they stand, refused ones among them: all name the lines."""
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
        if len(self.sound) == len(self.known):
            return []
        return [
            "refused uploads leave their series out; what is left of their lines is attacked "
            "under another run_id until they are mended"
        ]

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
    # With fewer rounds a series would be another one, in a line of its own. An upload whose header
    # is lost is known by its name, which begins with that of its series.
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


# faults of one upload ----------------------------------------------------------------------------

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
    digests: dict[Path, str] = field(default_factory=dict)  # of files of weights

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
        if expected is not None and path not in self.digests:
            self.digests[path] = WEIGHTS_FILE.sha256(path)
        if expected is not None and self.digests[path] != expected:
            yield (
                f"{shown(upload.header.weights)} is not the file whose weights the client had: "
                f"sha256 {self.digests[path][:12]}, expected {expected[:12]}"
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
            model, batch = self.outline(upload), upload.header.batch
            file.check_shapes(batch, model.card.img_size, model.patch_embed.num_patches)
            file.read()


# headers that contradict each other ---------------------------------------------------------------


def contradictions(uploads: Sequence[Upload]) -> dict[str, str]:
    """Why uploads cannot be attacked together, by name; what they contradict is named too."""
    reasons = {each: _within(each) for each in series_of(uploads)}
    for line in lines_of([each for each, reason in reasons.items() if not reason]):
        holders: dict[str, list[Series]] = {}
        for series in line:
            for record in series.records:
                holders.setdefault(record.image_id, []).append(series)
        for image_id, together in holders.items():
            if len(together) > 1:
                reason = (
                    f"two uploads of one round hold an image of the same name, {shown(image_id)} "
                    f"({first_of([each.first.name for each in together], 3)}). Give uploads of the "
                    "same image one `series` in their headers, or the images different names in "
                    "the truth folder."
                )
                reasons |= dict.fromkeys(together, reason)
    return {u.name: reason for each, reason in reasons.items() if reason for u in each.uploads}


def _within(series: Series) -> str:
    """What the uploads of a series disagree in; empty if they agree."""
    first, ours = series.first, _shared_facts(series.first)
    for other in series.uploads[1:]:
        for name, theirs in _shared_facts(other).items():
            unknown = None in (ours[name], theirs)
            per_round = name in ("labels", "image_ids") and (first.shuffles_images or unknown)
            if ours[name] != theirs and not per_round:
                return (
                    f"series {first.header.series}: {name} is {shown(ours[name], 60)} in "
                    f"{first.name} and {shown(theirs, 60)} in {other.name}. Expected the same in "
                    "all uploads of a series: mend the headers, or give them series of their own."
                )
    return ""


def _shared_facts(upload: Upload) -> dict[str, object]:
    """What uploads of a series have in common: fields of the header, names of images."""
    names = [f.name for f in dataclasses.fields(upload.header) if f.name not in CHANGES]
    file = upload.truth_file()
    ids = None if file is None else file.image_ids
    return {**{name: getattr(upload.header, name) for name in names}, "image_ids": ids}
