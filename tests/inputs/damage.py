"""Ways in which a file is not what it should be.

for name, damage in DAMAGES.items(): damage(path)
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

Damage = Callable[[Path], None]


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _written(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def missing(path: Path) -> None:
    path.unlink(missing_ok=True)


def empty(path: Path) -> None:
    _written(path, b"")


def a_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)


def a_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def dangling_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere")


def unreadable(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/self/mem")


def cut(share: float) -> Damage:
    """Keep this share of the bytes."""

    def damage(path: Path) -> None:
        content = _content(path)
        _written(path, content[: int(len(content) * share)])

    return damage


def random_bytes(path: Path) -> None:
    _written(path, random.Random(path.name).randbytes(max(64, len(_content(path)))))


def text(content: bytes | Callable[[], bytes]) -> Damage:
    """The file holds this instead; what is large is made when it is written."""
    return lambda path: _written(path, content if isinstance(content, bytes) else content())


def flipped(seed: int, bits: int = 1, within: int | None = None) -> Damage:
    """Some bits are flipped; within: among the first bytes."""

    def damage(path: Path) -> None:
        content = bytearray(_content(path))
        chance = random.Random(f"{path.name} {seed}")
        for _ in range(bits if content else 0):
            content[chance.randrange(min(len(content), within or len(content)))] ^= 1 << (
                chance.randrange(8)
            )
        _written(path, bytes(content))

    return damage


def with_more(path: Path) -> None:
    _written(path, _content(path) + b"\0" * 100 + b"more")


def with_nul(path: Path) -> None:
    content = _content(path)
    _written(path, content[: len(content) // 2] + b"\0" + content[len(content) // 2 :])


def huge_header(path: Path) -> None:
    """A safetensors file says that its header is as long as a disk."""
    _written(path, struct.pack("<Q", 1 << 60) + _content(path)[8:])


def sparse(path: Path) -> None:
    """200 GB of zeros that take no room."""
    _written(path, b"")
    with path.open("r+b") as file:
        file.truncate(200 << 30)


DAMAGES: Mapping[str, Damage] = {
    "missing": missing,
    "empty": empty,
    "a folder": a_folder,
    "a pipe": a_pipe,
    "endless device": endless_device,
    "link to itself": link_to_itself,
    "dangling link": dangling_link,
    "own memory": unreadable,
    "half": cut(0.5),
    "nearly whole": cut(0.98),
    "one byte": text(b"{"),
    "random bytes": random_bytes,
    "not UTF-8": text(b"\xff\xfe\x00caf\xe9: [\xc3\x28]\n"),
    "nul": with_nul,
    "with more": with_more,
    "huge header": huge_header,
    "sparse": sparse,
    "null": text(b"null\n"),
    "a number": text(b"5\n"),
    "a list": text(b"[1, 2]\n"),
    "empty mapping": text(b"{}\n"),
    "deep": text(b"[" * 100_000),
    "deep mappings": text(b'{"a":' * 20_000 + b"1" + b"}" * 20_000),
    "digits": text(b'{"format": 1' + b"0" * 5000 + b"}"),
    "aliases": text(
        b"a: &a [x, x, x, x, x, x, x, x, x]\n"
        + b"".join(
            b"%c: &%c [%s]\n" % (98 + k, 98 + k, b", ".join([b"*%c" % (97 + k)] * 9))
            for k in range(12)
        )
    ),
    "python object": text(b"!!python/object/apply:os.system ['touch OWNED']\n"),
    "zip": text(b"PK\x03\x04" + b"\0" * 60),
    "one bit": flipped(1),
    "another bit": flipped(2),
    "bit at the start": flipped(3, within=64),
    "many bits": flipped(4, bits=40),
    "bits at the start": flipped(5, bits=6, within=300),
}
