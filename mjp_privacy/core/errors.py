"""The exceptions that users see without a traceback."""

from __future__ import annotations

import errno
import os


class UserError(Exception):
    """A mistake the user can fix. The message says what was expected, what came, what to do."""


class StorageError(OSError):
    """A disk that does not take what is written: full, read-only, not ours, or gone.

    `what` names the file and says what is wrong, `do` is what helps: "Free some space".
    """

    def __init__(self, what: str, number: int) -> None:
        self.what, self.do = what, ADVICE.get(number, "See whether the disk or network is well")
        super().__init__(f"{what}. {self.do}, then give the same command again.")
        self.errno = number

    @staticmethod
    def of(path: object, number: int) -> StorageError:
        """The error for a file that cannot be written, by the system's number of the reason."""
        return StorageError(f"{path} cannot be written ({os.strerror(number).lower()})", number)


FULL = "Free some space"
ADVICE = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: f"{FULL} or raise the quota",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "Make the file system writable or take another place",
    errno.EACCES: "Get write access there or take another place",
    errno.EPERM: "Get write access there or take another place",
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
    errno.ENFILE: "Raise the system's limit on open files",
    errno.ENOENT: "Leave the folder where it is while a command works in it",
    errno.ENOTDIR: "Leave the folder where it is while a command works in it",
}
"""What helps, by the system's number of an error."""
