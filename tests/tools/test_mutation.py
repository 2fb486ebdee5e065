"""Faults are planted as said, and met by the tests that run their line."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutation.covering import Covering
from tools.mutation.mutants import Mutant, mutants_of
from tools.mutation.report import Trial, report

ROOT = Path(__file__).resolve().parents[2]

CHANGES = [
    ("x = a + b", {"x = (a - b)"}),
    ("x = a < b", {"x = (a <= b)"}),
    ("x = a < b <= c", {"x = (a <= b <= c)", "x = (a < b < c)"}),
    ("x = a and not b", {"x = (a or not b)", "x = a and (b)"}),
    ("x = 3", {"x = (4)"}),
    ("x = 0.5", {"x = (0.75)"}),
    ("x = 0.0", {"x = (1.0)"}),
    ("x = True", {"x = (False)"}),
    ("x = -y", {"x = (y)"}),
    ("x = a[b:]", {"x = a[b + 1:]"}),
    ("x = range(n)", {"x = (range(n + 1))"}),
    ("x = min(a, b)", {"x = (max(a, b))"}),
    ("x = a if b else c", {"x = (a if not b else c)"}),
    ("x = [a for a in b if a]", {"x = ([a for a in b if not a])"}),
    ("if a:\n    b()", {"if (not (a)):\n    b()", "if a:\n    pass"}),
    ("def f():\n    return a", {"def f():\n    return None"}),
    ("x += y", {"x -= y", "pass"}),
    ("raise a", {"pass"}),
    ("é = a + b", {"é = (a - b)"}),
]


@pytest.mark.parametrize(("source", "planted"), CHANGES)
def test_each_kind_of_fault(source: str, planted: set[str]) -> None:
    made = {mutant.planted(source.encode()).decode() for mutant in mutants_of("a.py", source)}
    assert made == planted


@pytest.mark.parametrize(
    "source",
    ["import a", '"""Words."""', "def f(a: int) -> None: ...", "x = f'{a + 1}'", "F = A[b.c]"],
)
def test_what_does_not_run_is_left_alone(source: str) -> None:
    assert mutants_of("a.py", source) == []


@pytest.mark.nightly
def test_every_fault_of_a_real_file_is_python_and_another_program() -> None:
    for name in ("mjp_privacy/metrics/statistics.py", "attacks/equations/span.py"):
        source = (ROOT / name).read_text(encoding="utf-8")
        mutants, tree = mutants_of(name, source), ast.dump(ast.parse(source))
        assert len(mutants) > 50
        for mutant in mutants:
            planted = mutant.planted(source.encode()).decode()
            assert ast.dump(ast.parse(planted)) != tree
            assert source.splitlines()[mutant.line - 1] != planted.splitlines()[mutant.line - 1]


def test_a_line_that_runs_on_import_belongs_to_all_tests_of_its_file() -> None:
    seconds = {"t.py::slow": 2.0, "t.py::quick": 1.0, "t.py::beside": 1.5, "u.py::other": 0.5}
    lines = {4: ["t.py::slow"], 5: ["t.py::quick", "t.py::slow", "t.py::failed"]}
    tests = Covering(seconds, ["t.py::failed"], {"a.py": lines, "b.py": {4: ["u.py::other"]}}, [])
    assert tests.tests_of("a.py", 4) == ["t.py::slow"]
    assert tests.tests_of("a.py", 5) == ["t.py::quick", "t.py::slow"]
    assert tests.tests_of("a.py", 1) == ["t.py::quick", "t.py::beside", "t.py::slow"]
    assert tests.tests_of("c.py", 1) == []


def test_the_report_counts_equivalent_faults_apart() -> None:
    mutants = [Mutant("a.py", at, 0, 1, "constant", "1", f"({at})") for at in range(4)]
    ends = ("killed", "timed out", "survived", "survived")
    trials = [Trial(m, "x = 1", end, 1.0) for m, end in zip(mutants, ends, strict=True)]
    lines = list(report(trials, {("a.py", "x = 1", "(2)"): "it is never read"}))
    assert lines[2:4] == [
        "| a.py | 4 | 2 | 1 | 1 | 1 | 67 % |",
        "| all | 4 | 2 | 1 | 1 | 1 | 67 % |",
    ]
    assert lines[4].endswith("a.py:3 (constant, survived)")
    assert len(lines) == 7


@pytest.mark.nightly
def test_a_tree_is_tried_and_stays_as_it_is(tmp_path: Path) -> None:
    """Of `a < b` and 1, the first fault is noticed and the second is not: no test asks for 1."""
    pytest.importorskip("coverage")
    tree, out = tmp_path / "tree", tmp_path / "out"
    shutil.copytree(ROOT / "tools", tree / "tools")
    (tree / "attacks").mkdir()
    (tree / "attacks/__init__.py").write_text("def less(a, b):\n    x = 1\n    return a < b\n")
    test = "def test_less():\n    assert not less(1, 1)\n    assert less(0, 1)\n"
    (tree / "test_less.py").write_text(f"from attacks import less\n\n{test}")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    before = (tree / "attacks/__init__.py").read_bytes()
    call = [sys.executable, str(tree / "tools/mutate"), "attacks", "--tests", "test_less.py"]
    ran = subprocess.run([*call, "--out", str(out)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "| all | 3 | 2 | 0 | 0 | 1 | 67 % |" in ran.stdout
    assert "1  ->  (2)" in (out / "report.md").read_text()
    assert (tree / "attacks/__init__.py").read_bytes() == before
    again = subprocess.run(
        [*call, "--out", str(out), "--again"], capture_output=True, text=True, check=True
    )
    assert "1/1 survived" in again.stdout
    assert "| all | 3 | 2 | 0 | 0 | 1 | 67 % |" in again.stdout
