# goes with the old run store
"""Files that grow line by line, each line with a checksum of its own.

    JSON_LINES.append(path, ['{"stage": "attack", "seconds": 1.5}'])

A line of JSON ends in `, "check": "1c291ca3"}`, a line of CSV in `,1c291ca3`: the CRC-32 of what
stands before. Any changed bit of a line is noticed, and costs that line alone.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mjp_privacy.core.errors import writing
from mjp_privacy.core.files import LOG, check_folder, write_atomically

DIGITS = 8
ALLOWED = 3
"""Bytes of a checksum's frame that may have changed, in lines of JSON; else it is none."""
LONGEST_LINE = 1 << 24
"""Bytes of a line that a kill may have left unfinished; all that are written are shorter."""
MOST_PIECES = 16
"""Lines of a file that one line of a table may go over."""


@dataclass(frozen=True)
class Lines:
    """What a file of lines holds."""

    bodies: Sequence[bytes]  # of those that are whole, without their checksums
    damaged: int = 0  # number of lines whose checksum is another
    places: Sequence[int] = ()  # the numbers of these lines
    unchecked: int = 0  # number of lines without one, which earlier versions wrote
    cut_off: bool = False  # whether the last line is unfinished, as a kill leaves it

    @property
    def texts(self) -> list[str]:
        """The lines that are whole, as they were given."""
        return [body.decode("utf-8", errors="replace") for body in self.bodies]


@dataclass(frozen=True)
class CheckedLines:
    """How lines carry their checksums."""

    before: bytes
    after: bytes
    end: str = ""  # what a line without its checksum ends with, for which `before` stands

    def line(self, text: str) -> bytes:
        """The line as it stands in the file."""
        body = text.removesuffix(self.end).encode("utf-8")
        return body + self.before + _check(body) + self.after + b"\n"

    def whole(self, line: bytes) -> bytes | None:
        """The line without its checksum and its end; None where the checksum is not its own."""
        tail = len(self.before) + DIGITS + len(self.after)
        body = line[:-tail]
        return body if line[-tail:] == self.before + _check(body) + self.after else None

    def read(self, content: bytes, *, needed: bool) -> Lines:
        """The lines of a file's content.

        needed: whether a line without a checksum is damaged; earlier versions wrote none
        """
        pieces = content.split(b"\n")
        bodies: list[bytes] = []
        places: list[int] = []
        unchecked = at = 0
        before, after, end = self.before, self.after, self.end.encode()
        tail = len(before) + DIGITS + len(after)
        while at < len(pieces) - 1:
            line = pieces[at]
            if line[-tail:] == before + _check(line[:-tail]) + after:  # nearly all of millions
                bodies.append(line[:-tail] + end)
                at += 1
                continue
            body, taken = self._first(pieces, at)
            if body is not None:
                bodies.append(body + end)
            elif needed or self._has_check(pieces[at]):
                places.append(at + 1)
            else:
                bodies.append(pieces[at])
                unchecked += 1
            at += taken
        return Lines(bodies, len(places), places, unchecked, bool(pieces[-1]))

    def _first(self, pieces: Sequence[bytes], at: int) -> tuple[bytes | None, int]:
        """The whole line that begins here, and how many pieces it has: in quotes a cell of a table
        may go on behind the end of a line."""
        line, taken = pieces[at], 1
        while (body := self.whole(line)) is None and line.count(b'"') % 2:
            if taken == MOST_PIECES or at + taken == len(pieces) - 1:
                break
            line += b"\n" + pieces[at + taken]
            taken += 1
        return (body, taken) if body is not None else (None, 1)

    def _has_check(self, line: bytes) -> bool:
        """Whether the line ends as if it had a checksum, some bits of which may have changed."""
        frame = self.before + b"0" * DIGITS + self.after
        tail = line[-len(frame) :]
        if len(tail) < len(frame):
            return False
        alike = sum(
            seen in b"0123456789abcdef" if wanted == 0x30 else seen == wanted
            for seen, wanted in zip(tail, frame, strict=True)
        )
        return alike >= len(frame) - ALLOWED * bool(self.after)

    def append(self, path: Path, texts: Iterable[str], *, lasting: bool = False) -> None:
        """Add lines; what a killed process left of a last line is removed.

        lasting: the lines are on the disk itself when this returns
        """
        content = b"".join(map(self.line, texts))
        check_folder(path)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                LOG.check(path)
            with path.open("ab+") as file:
                size = file.seek(0, os.SEEK_END)
                if (keep := _whole_lines(file, size, path)) != size:
                    file.truncate(keep)
                file.write(content)
                if lasting:
                    file.flush()
                    os.fsync(file.fileno())

    def rewrite(self, path: Path, first: str, texts: Iterable[str]) -> None:
        """Write the file anew; first: a line without a checksum, or nothing."""
        content = first.encode("utf-8") + b"".join(map(self.line, texts))
        write_atomically(path, lambda temporary: temporary.write_bytes(content), durable=True)


JSON_LINES = CheckedLines(b', "check": "', b'"}', "}")
CSV_LINES = CheckedLines(b",", b"")


def _check(body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(body)


def _whole_lines(file: BinaryIO, size: int, path: Path) -> int:
    """How many bytes the file's whole lines have."""
    at = size
    while at:
        if size - at >= LONGEST_LINE:
            got = f"no line that ends in its last {LONGEST_LINE >> 20} MiB"
            raise LOG.refusal(path, got)
        begin = max(0, at - 4096)
        file.seek(begin)
        last = file.read(at - begin).rfind(b"\n")
        if last >= 0:
            return begin + last + 1
        at = begin
    return 0
