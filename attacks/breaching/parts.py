"""Parts of breaching without the whole: its attackers alone, without its data sets and models.

`import breaching` also runs every subpackage's `__init__`, and with them torchvision, hydra,
torch's compiler and SymPy: two seconds and 1,500 modules. The attackers need torch and SciPy only.

    with parts_of_breaching():
        from breaching.attacks.analytic_attack import AprilAttacker

Nothing of breaching is changed or copied: the class comes from breaching's own file, and whoever
imports breaching later gets the whole of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from pathlib import Path

PASSED_THROUGH = ("breaching", "breaching.cases", "breaching.cases.models")
"""The packages that stand above what the attackers import, parents first."""


@contextmanager
def parts_of_breaching() -> Iterator[None]:
    """Within the block, modules of breaching are found without running the packages above them."""
    absent = [name for name in PASSED_THROUGH if name not in sys.modules]
    for name in absent:
        spec = find_spec(name)
        if spec is None:
            break  # the import in the block then says what is missing
        sys.modules[name] = module_from_spec(spec)  # knows its folder; its code has not run
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


def breaching_folder() -> Path:
    """Where breaching is installed; found without importing it."""
    spec = find_spec("breaching")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'breaching'", name="breaching")
    return Path(spec.origin).parent
