"""The gate for folders that strangers hand in: which uploads are sound, and why the others are not.

    folder = examine(UploadFolder(Path("uploads")))
    folder.sound                        # uploads to attack
    folder.refused["round_3_client_7"]  # ("round_3_client_7.json, mean: ...",)

`mjp check` prints what a run makes rows of: both come from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mjp_privacy.client.recorded.contradictions import contradictions
from mjp_privacy.client.recorded.faults import Examiner, one_line
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.groups import series_of
from mjp_privacy.client.recorded.header import HEADER, header_before_a_flip, header_changed
from mjp_privacy.client.recorded.recorded_upload import RecordedUpload
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.data.ids import is_usable

NAMED = 10
"""Uploads that a message lists."""

FLIPPED = "one of which a bit flipped after it was recorded; where you changed it, take `seal` out"


@dataclass(frozen=True)
class Examined:
    """The uploads of a folder, all of them examined."""

    known: Sequence[RecordedUpload]
    """Those whose headers can be read, refused ones among them: lines are named by them all."""
    refused: Mapping[str, tuple[str, ...]]  # by name, every reason
    """A name with characters that nothing shows is escaped."""
    changed: Sequence[str] = ()
    """Sound uploads whose headers are not as they were recorded."""

    @property
    def sound(self) -> list[RecordedUpload]:
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
                f"({first_of([*map(shown, self.changed)], NAMED)}): their seals are of another "
                "content. They are read as they are; where you did not change them, record or copy "
                "these uploads again. A header without its field `seal` is not compared."
            )
        if any(upload.name in self.refused for upload in self.known):
            lines.append(
                "refused uploads leave their series out; what is left of their lines is attacked "
                "under another run_id until they are mended"
            )
        return lines


def examine(folder: UploadFolder) -> Examined:
    """Examine every upload of a folder. All of its files are read, one tensor at a time."""
    from mjp_privacy.core.progress import Progress

    examiner = Examiner()
    known: list[RecordedUpload] = []
    refused: dict[str, tuple[str, ...]] = {}
    names = folder.names()
    with Progress("reading uploads", lambda: len(names)) as bar:
        for name in names:
            bar.advance()
            upload, error = _opened(folder, name)
            if upload is None or error is not None:
                refused[shown(name)] = (one_line(error, folder.root),)
            elif faults := examiner.faults(upload):
                refused[name] = tuple(faults)
            if upload is not None and (name not in refused or _is_as_recorded(upload, error)):
                known.append(upload)
    sound = [upload for upload in known if upload.name not in refused]
    refused |= {name: (reason,) for name, reason in contradictions(sound).items()}
    refused |= _with_their_series(known, refused)
    examined = Examined(known, dict(sorted(refused.items())))
    changed = [upload.name for upload in examined.sound if header_changed(upload.header_path)]
    return replace(examined, changed=changed)


def _opened(folder: UploadFolder, name: str) -> tuple[RecordedUpload | None, UserError | None]:
    """An upload by its header, and what is wrong with that one. Where a single bit of the header
    flipped, the upload is known by what it said; a person's changes are read as they are."""
    upload, error = None, None
    path = folder.root / f"{name}.json"
    try:
        upload = folder.upload(name)
        if not header_changed(path):
            return upload, None
    except UserError as caught:
        error = caught
    with suppress(UserError):
        if is_usable(name) and (header := header_before_a_flip(path)) is not None:
            return RecordedUpload(folder.root, name, header), HEADER.refusal(path, FLIPPED)
    return upload, error


def _is_as_recorded(upload: RecordedUpload, error: UserError | None) -> bool:
    """Whether a refused upload's header tells where the upload stood: it did not change, or only by
    the bit that `error` is about."""
    return error is not None or not header_changed(upload.header_path)


def _with_their_series(
    known: Sequence[RecordedUpload], refused: Mapping[str, object]
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


def check_some(examined: Examined, folder: UploadFolder) -> None:
    """Raise, with the reasons, if no upload can be attacked."""
    if examined.sound:
        return
    lines = [f"  {name}: {reason}" for name, reason in examined.reasons.items()]
    if len(lines) > NAMED:
        lines = [*lines[:NAMED], f"  ... and {len(lines) - NAMED} more"]
    raise UserError(
        f"{shown(folder.root)}: expected at least one sound upload, got {len(examined.refused)} "
        "that cannot be attacked:\n" + "\n".join(lines)
    )


def known_uploads(folder: UploadFolder, refused: Mapping[str, str]) -> list[RecordedUpload]:
    """`examine(folder).known` of a folder that was examined before; of its refused uploads the
    headers alone are read."""
    known = []
    for name in folder.names():
        if shown(name) not in refused:
            known.append(folder.upload(name))
            continue
        upload, error = _opened(folder, name)
        known += [upload] if upload is not None and _is_as_recorded(upload, error) else []
    return known
