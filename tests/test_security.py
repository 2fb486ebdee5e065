"""SECURITY.md: what never runs does not stand in the source; the page's limits are the code's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mjp_privacy", "attacks")
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")

MODULES = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
"""Modules whose files can hold code."""
BUILTINS = ("eval", "exec", "compile", "__import__")
NAMES = ("os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv", "runpy.run_path")
READERS = ("read_pickle", "extractall", "unsafe_load", "full_load", "unpack_archive")

ALLOWED = {
    "mjp_privacy/core/registry.py: import_module(...)": "names that stand in the source",
}
"""What is found and is right, with the reason."""


def findings(source: str, name: str) -> Iterator[str]:
    """What a source holds that could run code of a stranger: "a.py: eval(...)"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            heads = [alias.name.partition(".")[0] for alias in node.names]
            yield from (f"{name}: import {head}" for head in heads if head in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if str(node.module).partition(".")[0] in MODULES:
                yield f"{name}: import {node.module}"
        elif isinstance(node, ast.Call) and (said := _call(node)):
            yield f"{name}: {said}"


def _call(node: ast.Call) -> str:
    """What is wrong with a call, or nothing."""
    called = ast.unparse(node.func)
    last = called.rpartition(".")[2]
    options = {word.arg: ast.unparse(word.value) for word in node.keywords}
    is_dynamic = last == "import_module" and not isinstance(node.args[0], ast.Constant)
    if called in BUILTINS or called in NAMES or last in READERS or is_dynamic:
        return f"{called}(...)"
    if options.get("shell") == "True":
        return f"{called}(shell=True)"
    if called == "torch.load" and options.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if called == "yaml.load":
        return "yaml.load"
    if last == "load" and options.get("allow_pickle", "False") != "False":
        return f"{called}(allow_pickle)"
    return ""


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (ROOT / package).rglob("*.py")
    yield from ROOT.glob("*.py")


def test_nothing_in_the_source_runs_what_a_file_holds() -> None:
    found = {
        finding
        for path in sources()
        for finding in findings(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import pickle", "import pickle"),
        ("from joblib.externals import loky", "import joblib.externals"),
        ("eval(text)", "eval(...)"),
        ("os.system('ls')", "os.system(...)"),
        ("subprocess.run('ls', shell=True)", "subprocess.run(shell=True)"),
        ("torch.load(path)", "torch.load without weights_only=True"),
        ("torch.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("numpy.load(path, allow_pickle=True)", "numpy.load(allow_pickle)"),
        ("pd.read_pickle(path)", "pd.read_pickle(...)"),
        ("zipfile.ZipFile(path).extractall()", "zipfile.ZipFile(path).extractall(...)"),
        ("importlib.import_module(name)", "importlib.import_module(...)"),
    ],
)
def test_what_must_not_be_is_found(line: str, said: str) -> None:
    assert list(findings(line, "a.py")) == [f"a.py: {said}"]
    assert not list(findings("model.eval()\ntorch.load(p, weights_only=True)", "a.py"))


def limits() -> list[tuple[str, str]]:
    """The page's table of limits: the constant and the figure that stands for it."""
    return re.findall(r"^\| [^|]+ \| ([^|]+) \| `([\w.]+:\w+)` \|$", PAGE, re.MULTILINE)


def test_the_pages_limits_are_those_of_the_code() -> None:
    wanted = {name: _shown(name) for _, name in limits()}
    assert len(wanted) >= 20
    assert {name: figure.strip() for figure, name in limits()} == wanted


def _shown(constant: str) -> str:
    """A constant as the page writes it: bytes of files in MiB, GiB or TiB, others in full."""
    module, _, name = constant.partition(":")
    value = getattr(import_module(module), name)
    size = getattr(value, "max_bytes", None)
    if size is None and not name.endswith("BYTES"):
        return f"{value:,}"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if (size or value) >= scale:
            return f"{(size or value) / scale:,.0f} {unit}"
    return f"{size or value} bytes"


def test_the_page_names_what_readers_of_the_readme_look_for() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "SECURITY.md" in readme
    assert "docs/reliability.md" in readme
    for heading in ("What is trusted", "What never runs", "Uploads from strangers", "Limits"):
        assert f"## {heading}" in PAGE
