"""The house has floors: a room imports only what stands below it, and no file is part of a circle.

The list of floors stands once, in CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mjp_privacy", "attacks")
BEGIN, END = "<!-- floors:begin -->", "<!-- floors:end -->"


def floors() -> list[list[str]]:
    """Rooms from the ground up, those of one floor together: paths under the root."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.split(BEGIN)[1].split(END)[0]
    lines = [line for line in block.splitlines() if line and not line.startswith("```")]
    rooms = [line.split("  ")[0].split(", ") for line in lines]
    return [
        [room if room.startswith("attacks") else f"mjp_privacy/{room}" for room in floor]
        for floor in rooms
    ]


def floor_of(file: Path, rooms: list[list[str]]) -> tuple[int, str]:
    """The number of the floor and the room of a file: the innermost room that holds it."""
    known = {room: number for number, floor in enumerate(rooms) for room in floor}
    for place in (file, *file.parents):
        if place.as_posix() in known:
            return known[place.as_posix()], place.as_posix()
    raise AssertionError(f"{file} stands in no room: give it a floor in CONTRIBUTING.md")


def imported(source: str) -> Iterator[str]:
    """Dotted names that a source imports, anywhere in it: modules, or names in modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where a room's needs stand"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(name: str) -> Path | None:
    """The file of this project that a dotted name lives in: `a.b.thing` is in a/b.py."""
    parts = name.split(".")
    if parts[0] not in (*PACKAGES, "benchmarks", "tests", "tools"):  # the last stand in no room
        return None
    while parts:
        place = Path(*parts)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if (ROOT / file).is_file():
                return file
        parts.pop()
    return None


@cache
def arrows() -> dict[Path, set[Path]]:
    """Every file of the product, and those that it imports."""
    files = [file.relative_to(ROOT) for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    found = {file: imported((ROOT / file).read_text(encoding="utf-8")) for file in sorted(files)}
    return {
        file: {target for name in names if (target := file_of(name)) is not None} - {file}
        for file, names in found.items()
    }


def test_a_room_imports_only_what_stands_below_it() -> None:
    rooms = floors()
    broken = [
        f"{file} (floor {floor}) imports {target} (floor {above})"
        for file, targets in arrows().items()
        for floor, room in [floor_of(file, rooms)]
        for target in sorted(targets)
        for above, other in [floor_of(target, rooms)]
        if other != room and above >= floor
    ]
    assert not broken, "\n".join(broken)


def test_every_room_exists_and_stands_on_one_floor_and_the_top_is_small() -> None:
    rooms = [room for floor in floors() for room in floor]
    assert len(rooms) == len(set(rooms))
    assert [room for room in rooms if not (ROOT / room).exists()] == []
    loose = {file.name for file in (ROOT / "mjp_privacy").glob("*.py")} - {"__init__.py"}
    assert loose <= {"interfaces.py", "cli.py", "__main__.py"}


def test_no_file_is_part_of_a_circle() -> None:
    TopologicalSorter(arrows()).prepare()  # a CycleError names the files
