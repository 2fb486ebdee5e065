"""Which tests run which line: one run of the tests under coverage, a context for each test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAGE = ".json"


@dataclass(frozen=True)
class Covering:
    """What a run of the tests showed."""

    seconds: dict[str, float]  # of each test that passed
    failed: list[str]
    tests: dict[str, dict[int, list[str]]]  # by file and line
    modules: list[str]  # that the tests import beside the project's own

    def tests_of(self, file: str, line: int) -> list[str]:
        """The tests that run this line, quickest first. A line that runs when its file is imported
        (a constant, a default) belongs to all files of tests that run anything in the file."""
        lines = self.tests.get(file, {})
        around = {name.split("::")[0] for tests in lines.values() for name in tests}
        beside = [name for name in self.seconds if name.split("::")[0] in around]
        names = [name for name in lines.get(line) or beside if name in self.seconds]
        return sorted(names, key=lambda name: (self.seconds[name], name))


def covering(tree: Path, packages: Sequence[str], tests: Sequence[str], kept: Path) -> Covering:
    """Run the tests of a tree in a process of its own, and keep what it showed in a file."""
    call = [sys.executable, "-m", "tools.mutation.covering", str(kept), ",".join(packages), *tests]
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    subprocess.run(call, cwd=tree, check=True, env=os.environ | quiet)
    shown = json.loads(kept.read_text())
    lines = {
        file: {int(line): names for line, names in by_line.items()}
        for file, by_line in shown["tests"].items()
    }
    return Covering(shown["seconds"], shown["failed"], lines, shown["modules"])


class Contexts:
    """A pytest plugin: tells coverage which test runs, and remembers how each one ended."""

    def __init__(self, measured: Any) -> None:
        self._measured = measured
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add up the phases of a test."""
        taken = self.seconds.get(report.nodeid, 0.0) + report.duration
        self.seconds[report.nodeid] = taken
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_runtest_setup(self, item: Any) -> None:
        """What a shared fixture runs, it runs for every test of the file."""
        self._measured.switch_context(f"{item.nodeid}|setup")

    def pytest_runtest_call(self, item: Any) -> None:
        """From here on the test itself."""
        self._measured.switch_context(item.nodeid)


def _by_line(data: Any, tree: Path, tests: Iterable[str]) -> dict[str, dict[int, list[str]]]:
    of_file = defaultdict(list)
    for name in tests:
        of_file[name.split("::")[0]].append(name)
    shown = {}
    for path in data.measured_files():
        lines = {}
        for line, contexts in data.contexts_by_lineno(path).items():
            names: set[str] = set()
            for context in filter(None, contexts):
                name, _, _ = context.partition("|setup")
                names.update(of_file[name.split("::")[0]] if context.endswith("|setup") else [name])
            if names:
                lines[line] = sorted(names)
        shown[str(Path(path).relative_to(tree))] = lines
    return shown


def _modules(tree: Path) -> list[str]:
    """Imported modules that come from outside the tree: a fork may find these already there."""
    inside = {
        name.partition(".")[0]
        for name, module in sys.modules.items()
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(tree)
    }
    return [name for name in sys.modules if name.partition(".")[0] not in {*inside, "__main__"}]


def main(kept: str, packages: str, *tests: str) -> None:
    """Run these tests under coverage and write what they showed."""
    import coverage
    import pytest

    tree, roots = Path.cwd(), packages.split(",")
    measured = coverage.Coverage(data_file=None, source=roots, config_file=False)
    contexts = Contexts(measured)
    measured.start()
    pytest.main([*tests, "-p", "no:cacheprovider", "--hypothesis-seed=0"], [contexts])
    measured.stop()
    passed = {n: s for n, s in contexts.seconds.items() if n not in contexts.failed}
    shown = {
        "seconds": passed,
        "failed": sorted(contexts.failed),
        "tests": _by_line(measured.get_data(), tree, passed),
        "modules": _modules(tree),
    }
    Path(kept).write_text(json.dumps(shown))


if __name__ == "__main__":
    main(*sys.argv[1:])
