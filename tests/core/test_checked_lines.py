"""Lines with checksums: a changed bit costs its own line, and a kill the last one."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from mjp_privacy.core.checked_lines import CSV_LINES, JSON_LINES, CheckedLines
from mjp_privacy.core.errors import UserError

RECORDS = [json.dumps({"stage": f"s {number}", "seconds": number / 7}) for number in range(20)]
CELLS = ['a,1,"x ""y"""', 'b,2,"two\nlines"', "c,,ü", 'd,4,"\n\n"', "e,5,x"]


@pytest.mark.parametrize(("kind", "texts"), [(JSON_LINES, RECORDS), (CSV_LINES, CELLS)])
def test_lines_come_back_and_no_changed_bit_is_taken_for_whole(
    tmp_path: Path, kind: CheckedLines, texts: list[str]
) -> None:
    path = tmp_path / "lines"
    for text in texts:
        kind.append(path, [text])
    content = path.read_bytes()
    assert kind.read(content, needed=True).texts == texts
    assert kind.read(content, needed=False).damaged == 0
    for at in random.Random(2).sample(range(8 * len(content)), 300):
        changed = bytearray(content)
        changed[at // 8] ^= 1 << at % 8
        lines = kind.read(bytes(changed), needed=True)
        assert lines.damaged or lines.cut_off, at
        assert set(lines.texts) < set(texts)
        assert len(lines.texts) >= len(texts) - 3


def test_what_a_kill_left_of_a_line_goes_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl"
    JSON_LINES.append(path, RECORDS[:2])
    with path.open("ab") as file:
        file.write(b'{"stage": "half')
    lines = JSON_LINES.read(path.read_bytes(), needed=True)
    assert (lines.texts, lines.damaged, lines.cut_off) == (RECORDS[:2], 0, True)
    JSON_LINES.append(path, RECORDS[2:3], lasting=True)
    lines = JSON_LINES.read(path.read_bytes(), needed=True)
    assert (lines.texts, lines.damaged, lines.cut_off) == (RECORDS[:3], 0, False)


def test_a_file_of_half_a_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl"
    path.write_bytes(b"{" * 10_000)
    JSON_LINES.append(path, RECORDS[:1])
    assert JSON_LINES.read(path.read_bytes(), needed=True).texts == RECORDS[:1]


def test_a_file_without_an_end_of_a_line_is_not_searched_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with path.open("wb") as file:
        file.write(b"{}\n")
        file.truncate(200 << 30)  # zeros that take no room
    with pytest.raises(
        UserError, match=r"log\.jsonl: expected .* got no line that ends in its last"
    ):
        JSON_LINES.append(path, RECORDS[:1])
    assert path.stat().st_size == 200 << 30


def test_lines_of_earlier_versions_are_read_where_none_is_needed() -> None:
    content = "".join(f"{text}\n" for text in RECORDS).encode()
    lines = JSON_LINES.read(content, needed=False)
    assert (lines.texts, lines.unchecked, lines.damaged) == (RECORDS, 20, 0)
    assert JSON_LINES.read(content, needed=True).damaged == 20


def test_a_line_is_what_its_format_says() -> None:
    (line,) = JSON_LINES.line('{"a": 1}').splitlines()
    assert json.loads(line) == {"a": 1, "check": line[-10:-2].decode()}
    assert CSV_LINES.line("a,1").startswith(b"a,1,")


def test_a_file_is_written_anew_with_what_is_given_alone(tmp_path: Path) -> None:
    path = tmp_path / "images.csv"
    CSV_LINES.append(path, CELLS)
    CSV_LINES.rewrite(path, "head\n", CELLS[:1])
    first, _, rest = path.read_bytes().partition(b"\n")
    assert first == b"head"
    assert CSV_LINES.read(rest, needed=True).texts == CELLS[:1]


@pytest.mark.skipif(sys.platform != "linux", reason="a file of /proc")
def test_a_file_that_has_no_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match="got what nothing can be added to"):
        JSON_LINES.append(path, RECORDS[:1])
