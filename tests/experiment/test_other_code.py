"""Results that other code made are never taken for today's: stop, make again, or keep and say."""

import ast
import hashlib
import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import pytest

from attacks import ATTACKS
from mjp_privacy.client.defenses.registry import DEFENSES, defense_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment.code import SourceReader, differences, normal_form
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from tests.helpers.runs import attack, cell, one_cell, said, same_results, tensors, values, written
from tests.helpers.uploads import edit, edit_all

# attacks and defences whose files a test edits -------------------------------------------------

PACKAGE = "workbench"

SOURCES = {
    "__init__": "",
    "levels": "LEVEL = 0.5\n",
    "shade": "from .levels import LEVEL\n",
    "tone": """
from dataclasses import dataclass
from typing import ClassVar
from tests.helpers.own_attacks import Own, grey
from workbench.shade import LEVEL
from mjp_privacy.interfaces import Reconstruction

@dataclass(frozen=True)
class Tone(Own):
    name: ClassVar[str] = "tone"

    def run(self, view, *, generator):
        return Reconstruction(2 * LEVEL * grey(view))
""",
    "dimmed": """
from dataclasses import dataclass
from typing import ClassVar
from mjp_privacy.client.defenses.disturbance import Disturbed

@dataclass(frozen=True)
class Dimmed:
    name: ClassVar[str] = "dimmed"
    main: ClassVar[str | None] = None

    def apply(self, sent, draws):
        return Disturbed({name: g * 0.5 for name, g in sent.items()}, {}, {})
""",
}


@dataclass(frozen=True)
class Workbench:
    """A package of source files with an attack `tone` and a defence `dimmed`."""

    folder: Path

    def edit(self, module: str, old: str, new: str) -> None:
        """Replace a text in a source, or write it where there is none, and import it anew."""
        path = self.folder / f"{module}.py"
        path.write_text(path.read_text().replace(old, new) if old else new)
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        importlib.invalidate_caches()
        defense_of.cache_clear()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    """Both are registered."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two edits can share a second
    made = Workbench(tmp_path / PACKAGE)
    made.folder.mkdir()
    for name, text in SOURCES.items():
        made.edit(name, "", text)
    with (
        patch.dict(ATTACKS, {"tone": Entry("workbench.tone:Tone")}),
        patch.dict(DEFENSES, {"dimmed": Entry("workbench.dimmed:Dimmed")}),
    ):
        yield made
    made.edit("levels", "", "")


TWO = one_cell(attacks=[{"name": "tone"}, {"name": "grey"}], block=3)


def refusal(images: Path, out: Path, config: Mapping[str, Any] = TWO, **arguments: Any) -> str:
    """What the same command says of the results there; it must not have written a file."""

    def everything() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    before = everything()
    with pytest.raises(UserError) as raised:
        attack(images, out, config, **arguments)
    assert everything() == before
    return str(raised.value)


DEFENDED = {**TWO, "client": {"defenses": ["dimmed"]}}


def codes(out: Path, name: str = "tone") -> dict[str, str]:
    """The digest of the code that made each image of an attack."""
    of_images = RunStore(out).read(cell(out, attack=name)["run_id"], ["image_id", "code"])
    return dict(zip(of_images["image_id"], of_images["code"], strict=True))


def levels(out: Path) -> dict[str, float]:
    """How bright the stored picture of each image is; the edited attack makes darker ones."""
    stored = tensors(out, cell(out, attack="tone")["run_id"])
    return {name: float(parts["images"].mean()) for name, parts in stored.items()}


@pytest.fixture
def bench_run(bench: Workbench, images: Path, tmp_path: Path) -> Path:
    """A finished run of `tone` and `grey`, two blocks of three images each."""
    attack(images, tmp_path / "run", TWO)
    return tmp_path / "run"


def test_every_changed_added_and_removed_file_is_named(
    bench: Workbench, bench_run: Path, images: Path, tmp_path: Path
) -> None:
    """Two imports away from the attack; a defence's file stops every cell of its clients."""
    attack(images, tmp_path / "defended", DEFENDED)
    bench.edit("levels", "0.5", "0.25")
    assert "workbench/levels.py changed" in refusal(images, bench_run)
    bench.edit("light", "", "LEVEL = 0.75\n")
    bench.edit("shade", "from .levels", "from .light")
    bench.edit("dimmed", "g * 0.5", "g * 0.25")
    told = refusal(images, bench_run)
    assert differences(None, {"light.py": "1"})  # of rows that do not say what made them
    for words in ("levels.py removed", "light.py added", "shade.py changed"):
        assert f"workbench/{words}" in told
    told = refusal(images, tmp_path / "defended", DEFENDED)
    assert "2 of 2 cells" in told
    assert "workbench/dimmed.py changed" in told


def test_attacks_on_recorded_uploads_stop_too(
    bench: Workbench, folder: Path, tmp_path: Path
) -> None:
    """Before anything is taken from the folder, as rows of refused uploads are."""
    edit_all(folder, series=None)
    edit(folder, gamma=2)
    experiment = load_experiment({"name": "named", "attacks": [{"name": "tone"}]})
    again = partial(attack_uploads, experiment, folder, tmp_path / "run", device="cpu")
    again()
    before = written(tmp_path / "run")
    bench.edit("levels", "0.5", "0.25")
    with pytest.raises(UserError, match=r"workbench/levels\.py changed"):
        again()
    assert written(tmp_path / "run") == before
    assert again(stale="keep").of_other_code == 2
    assert again(stale="fresh").of_other_code == 0


def test_a_killed_fresh_run_goes_on(
    bench: Workbench,
    bench_run: Path,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its second block has the old rows in place, its first the new ones; other cells stay."""
    grey, old = cell(bench_run, attack="grey")["run_id"], codes(bench_run)
    kept = {name: at for name, at in written(bench_run).items() if grey in name}
    bench.edit("levels", "0.5", "0.25")
    write, calls = RunStore.write, count(1)

    def mortal(self: RunStore, *arguments: Any, **named: Any) -> Path:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return write(self, *arguments, **named)

    monkeypatch.setattr(RunStore, "write", mortal)
    with pytest.raises(KeyboardInterrupt):
        attack(images, bench_run, TWO, stale="fresh")
    assert sorted(levels(bench_run).values()) == [0.25] * 3 + [0.5] * 3
    assert "1 of 2 cells" in refusal(images, bench_run)
    attack(images, bench_run, TWO, stale="fresh")
    assert next(calls) == 4  # one block was left
    assert kept.items() <= written(bench_run).items()
    assert {*old.values()}.isdisjoint(codes(bench_run).values())
    attack(images, tmp_path / "other", TWO)
    same_results(bench_run, tmp_path / "other")


def test_a_grown_run_that_keeps_says_for_each_image_which_code_made_it(
    bench: Workbench, images: Path, tmp_path: Path
) -> None:
    """Also in a block that is done as a whole: the images that were there keep their rows."""
    out = tmp_path / "run"
    attack(images, out, TWO, limit=4)
    files, before, old = written(out), values(out, attack="tone"), codes(out)
    bench.edit("levels", "0.5", "0.25")
    summary = attack(images, out, TWO, limit=4, stale="keep")
    assert (summary.exit_code, summary.of_other_code) == (0, 1)
    assert (written(out), codes(out)) == (files, old)
    assert "1 of 2 cells" in said(out)
    assert "1 of 2 cells" in refusal(images, out, limit=4)
    assert attack(images, out, TWO, limit=6, stale="keep").of_other_code == 1
    now = codes(out)
    assert {name: now[name] for name in old} == old
    assert len({now[name] for name in now.keys() - old.keys()} - {*old.values()}) == 1
    after = values(out, attack="tone")
    pd.testing.assert_series_equal(after[before.index], before, check_exact=True)
    assert levels(out) == {name: 0.5 if name in old else 0.25 for name in now}


# the normal form ----------------------------------------------------------------------------------


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


def test_the_normal_form_is_the_same_in_every_python() -> None:
    """The digest that Python 3.10, 3.11, 3.12 and 3.13 give; what does nothing does not count."""
    form = normal_form(ast.parse(SAMPLE))
    assert hashlib.sha256(form.encode()).hexdigest()[:16] == "233f06ef04126d32"
    for one, same in (
        ("a = 'x' 'y'", '# why\na = u"xy"  # one\n\n'),
        ("def f():\n return 1", 'def f():\n    """One.\n\n    Two."""\n    return 1'),
        ("def f(): pass", 'def f():\n    "text"'),
    ):
        assert normal_form(ast.parse(one)) == normal_form(ast.parse(same))


# which files --------------------------------------------------------------------------------------


def test_every_module_that_is_imported_counts_and_so_do_defences_and_presets() -> None:
    """At least those within `attacks` that Python itself imports, but for the registry."""
    script = "import attacks.masked_span, sys; print(*sys.modules)"
    printed = subprocess.check_output(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], text=True
    )
    wanted = {name for name in printed.split() if name.startswith("attacks.")}
    assert len(wanted) > 16
    files = SourceReader().code_of("pixel_lattice").files
    counted = {file.removesuffix(".py").removesuffix("/__init__") for file in files}
    assert wanted <= {file.replace("/", ".") for file in counted}
    assert {"attacks/__init__.py", "attacks/april.py"}.isdisjoint(files)
    assert all(file.startswith("attacks/") for file in files)
    reader = SourceReader()
    plain, defended = reader.code_of("grey"), reader.code_of("grey", ["top_k 0.1", "int8"])
    assert {*defended.files} - {*plain.files} == {
        "mjp_privacy/client/defenses/published.py",
        "mjp_privacy/client/defenses/disturbance.py",
        "mjp_privacy/client/defenses/registry.py (top_k)",
        "mjp_privacy/client/defenses/registry.py (int8)",
    }
    assert plain.digest != defended.digest
    assert reader.code_of("grey", ["top_k 0.5", "int8"]).digest == defended.digest
    found = []
    for words, uploads in (("", 2), ("other words", 3)):
        entry = Entry("attacks.masked_span:MaskedSpan", words, {"uploads": uploads})
        with patch.dict(ATTACKS, {"pair": entry}):
            found.append(SourceReader().code_of("pair").files)
    two, three = found
    assert {file for file in two if two[file] != three[file]} == {"attacks/__init__.py (pair)"}


def test_an_attack_from_elsewhere_counts_with_its_own_package_as_it_was_first_read(
    bench: Workbench,
) -> None:
    """A notebook that does not reload an edited module goes on with the old code."""

    def code() -> dict[str, str]:
        return dict(SourceReader().code_of("tone").files)

    own = {"workbench/tone.py", "workbench/shade.py", "workbench/levels.py"}
    assert {*code()} == {*own, "attacks/__init__.py (tone)"}
    module, before = importlib.import_module("workbench.levels"), code()
    (bench.folder / "levels.py").write_text("LEVEL = 0.25\n")
    assert code() == before
    importlib.reload(module)
    assert code() != before
    bench.edit("shade", "", "from attacks.equations import PATCH\nfrom json import dumps")
    assert {*code()} > {"workbench/shade.py", "attacks/equations/__init__.py"}
    assert "workbench/levels.py" not in code()
