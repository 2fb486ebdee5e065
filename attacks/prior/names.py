"""Whether a prior that an attack's option names is there, asked before an attack runs."""

from __future__ import annotations

MADE = ("fitted", "stationary")
"""Priors that need no file of the user's."""


def check_prior(name: str) -> None:
    """Raise UserError unless the prior can be read, if it is a file."""
    if name in MADE:
        return
    from attacks.prior.files import find_prior

    find_prior(name, patch=16, size=224)  # a file is the same for every patch and size
