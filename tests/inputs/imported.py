"""All that commands import, for the process whose forks call them (forked.py)."""

import pkgutil
from contextlib import suppress
from importlib import import_module

import matplotlib.pyplot  # noqa: F401

import attacks
import mjp_privacy
from mjp_privacy.core.errors import UserError

for package in (mjp_privacy, attacks):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        with suppress(ModuleNotFoundError, UserError):  # of an extra that is not installed
            import_module(module.name)
