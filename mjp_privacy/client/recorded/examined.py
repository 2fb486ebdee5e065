"""The gate for folders that strangers hand in: which uploads are sound, and why the others are not.

    folder = examine(UploadFolder(Path("uploads")))
    folder.sound                        # uploads to attack
    folder.refused["round_3_client_7"]  # ("round_3_client_7.json, mean: ...",)

`mjp check` prints what a run makes rows of: both come from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mjp_privacy.client.recorded.contradictions import contradictions
from mjp_privacy.client.recorded.faults import Examiner, one_line
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.header import header_changed
from mjp_privacy.client.recorded.recorded_upload import RecordedUpload
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown

NAMED = 10
"""Uploads that a message lists."""


@dataclass(frozen=True)
class Examined:
    """The uploads of a folder, all of them examined."""

    sound: Sequence[RecordedUpload]
    refused: Mapping[str, tuple[str, ...]]  # by name, every reason
    """A name with characters that nothing shows is escaped."""
    changed: Sequence[str] = ()
    """Sound uploads whose headers are not as they were recorded."""

    @property
    def reasons(self) -> dict[str, str]:
        """Why each refused upload is, in one line."""
        return {name: "; ".join(reasons) for name, reasons in self.refused.items()}

    @property
    def remarks(self) -> list[str]:
        """What is said of the sound uploads, a sentence each."""
        if not self.changed:
            return []
        names = ", ".join(map(shown, self.changed[:NAMED]))
        more = ", …" if len(self.changed) > NAMED else ""
        return [
            f"{len(self.changed)} header(s) changed after they were recorded ({names}{more}): "
            "their seals are of another content. They are read as they are; where you did not "
            "change them, record or copy these uploads again. A header without its field `seal` is "
            "not compared."
        ]


def examine(folder: UploadFolder) -> Examined:
    """Examine every upload of a folder. All of its files are read, one tensor at a time."""
    from mjp_privacy.core.progress import Progress

    examiner = Examiner()
    uploads: list[RecordedUpload] = []
    refused: dict[str, tuple[str, ...]] = {}
    names = folder.names()
    with Progress("reading uploads", lambda: len(names)) as bar:
        for name in names:
            bar.advance()
            try:
                upload = folder.upload(name)
            except UserError as error:
                refused[shown(name)] = (one_line(error, folder.root),)
                continue
            if faults := examiner.faults(upload):
                refused[name] = tuple(faults)
            else:
                uploads.append(upload)
    for name, reason in contradictions(uploads).items():
        refused[name] = (reason,)
    sound = [upload for upload in uploads if upload.name not in refused]
    changed = [upload.name for upload in sound if header_changed(upload.header_path)]
    return Examined(sound, dict(sorted(refused.items())), changed)


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


def of_names(folder: UploadFolder, refused: Mapping[str, str]) -> list[RecordedUpload]:
    """The sound uploads of a folder that was examined before, without examining it again."""
    return [folder.upload(name) for name in folder.names() if shown(name) not in refused]
