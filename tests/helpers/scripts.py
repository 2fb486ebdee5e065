"""The scripts in tools/ that have no .py in their names, as modules."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def script(name: str) -> Any:
    """script("slurm-here").Cluster"""
    loader = SourceFileLoader(f"script_{name.replace('-', '_')}", str(TOOLS / name))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setitem(sys.modules, loader.name, module)  # dataclasses look themselves up there
        loader.exec_module(module)
    return module
