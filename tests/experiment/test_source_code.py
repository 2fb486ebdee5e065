"""The digest of an attack's and a defence's code: what counts, and what does not."""

from __future__ import annotations

import ast
import hashlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from attacks import ATTACKS
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment.code import (
    SourceReader,
    normal_form,
)
from tests.helpers.edited_code import Workbench

ROOT = Path(__file__).parents[2]


SAMPLE = '''
from __future__ import annotations
import a.b as c
from . import d
from ..e import (f, g as h,)
@c.wraps(d)
async def one(p, /, q: int = 1, *r, s=2.5, **t) -> "text":
    """Left out."""
    global k
    async with p as (u, v), q: await p[1:, ..., r]
    return [w async for w in r if not w] or {**t, 1: -2j, **q} and (x := lambda y, *, z=None: y)
class Two(d, metaclass=c):
    field: int = 0x10
    "left out too"
    def empty(self): pass
    def f_strings(self):
        return f"a{self!r:>{self.n}}b" "c" f'{self=}{{}}' + rb"\\x00" + "\\N{BULLET}"
match c:
    case {"k": [1, *_], **rest} | Two(field=None) if rest: del c[0], rest
    case _: raise KeyError from None
try:
    x = yield_ = 10_000 if a < b <= c is not None else a @ b // ~c
except (OSError, ValueError) as error: x += 1; assert x, "why"
else: print(*x, sep="")
finally:
    for i, (j, *k) in x:
        while True: break
        else: continue
'''


def form(source: str) -> str:
    return normal_form(ast.parse(source))


# the normal form ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ("a = 1", "# why\na = 1  # one\n\n"),
        ("f(a, b)", "f(\n    a,\n    b,\n)"),
        ("a = 'x' 'y'", 'a = "xy"'),
        ("a = 1000", "a = 1_000"),
        ("a = (b + c) * d", "a = ((b + c)*(d))"),
        ("def f():\n return 1", 'def f():\n    """One.\n\n    Two."""\n    return 1'),
        ("def f(): pass", 'def f():\n    "text"'),
        ("class C:\n a = 1", 'class C:\n    a = 1\n    """What a is."""'),
        ('f"a" "b"', 'f"ab"'),
        ("a = u'x'", "a = 'x'"),
    ],
)
def test_what_does_nothing_does_not_count(one: str, same: str) -> None:
    assert form(one) == form(same)


def test_the_normal_form_is_the_same_in_every_python() -> None:
    """The digest that Python 3.10, 3.11, 3.12 and 3.13 give."""
    assert hashlib.sha256(form(SAMPLE).encode()).hexdigest()[:16] == "233f06ef04126d32"


# which files --------------------------------------------------------------------------------------


def test_every_module_that_an_attack_imports_counts() -> None:
    """At least those within `attacks` that Python itself imports, but for the registry."""
    script = "import attacks.pixel_lattice, sys; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    wanted = {name for name in printed if name.startswith("attacks.")}
    assert len(wanted) > 20
    files = SourceReader().code_of("pixel_lattice").files
    counted = {file.removesuffix(".py").removesuffix("/__init__") for file in files}
    assert wanted <= {file.replace("/", ".") for file in counted}
    assert "attacks/__init__.py" not in files
    assert "attacks/april.py" not in files
    assert all(file.startswith("attacks/") for file in files)


def test_a_defences_files_count_beside_the_attacks() -> None:
    reader = SourceReader()
    plain = reader.code_of("grey")
    defended = reader.code_of("grey", ["top_k 0.1", "int8"])
    assert {*defended.files} - {*plain.files} == {
        "mjp_privacy/client/defenses/compression.py",
        "mjp_privacy/client/defenses/disturbance.py",
        "mjp_privacy/client/defenses/registry.py (top_k)",
        "mjp_privacy/client/defenses/registry.py (int8)",
    }
    assert plain.digest != defended.digest
    assert reader.code_of("grey", ["top_k 0.5", "int8"]).digest == defended.digest


def test_a_preset_in_the_registry_counts() -> None:
    entry = Entry("attacks.masked_span:MaskedSpan", "", {"uploads": 2})
    other = Entry("attacks.masked_span:MaskedSpan", "other words", {"uploads": 3})
    with ATTACKS.registered("pair", entry):
        two = SourceReader().code_of("pair")
    with ATTACKS.registered("pair", other):
        three = SourceReader().code_of("pair")
    assert {f for f in two.files if two.files[f] != three.files[f]} == {
        "attacks/__init__.py (pair)"
    }


# an attack from elsewhere -------------------------------------------------------------------------


def code() -> dict[str, str]:
    return dict(SourceReader().code_of("tone").files)


def test_an_attack_from_elsewhere_counts_with_its_own_package(bench: Workbench) -> None:
    own = {"workbench/tone.py", "workbench/shade.py", "workbench/levels.py"}
    assert {*code()} == {*own, "attacks/__init__.py (tone)"}
    bench.edit("shade", "", "from attacks.equations import PATCH\nfrom json import dumps")
    now = {*code()}
    assert now > {"workbench/shade.py", "attacks/equations/__init__.py"}
    assert "workbench/levels.py" not in now


def test_an_imported_module_counts_as_it_was_when_it_was_first_read(bench: Workbench) -> None:
    """A notebook that does not reload an edited module goes on with the old code."""
    levels = importlib.import_module("workbench.levels")
    before = code()
    (bench.folder / "levels.py").write_text("LEVEL = 0.25\n")
    assert code() == before
    importlib.reload(levels)
    assert code() != before
