r"""What a client's DP-SGD promises: epsilon at a delta, from Opacus' accountants.

The mechanism is the sampled Gaussian one, noise multiplier sigma, each example in a step with
probability q (sampling_rate), `steps` steps; q = 1 and one step is the plain Gaussian mechanism.
That is what `dp_sgd` gives to the examples of one client; it says nothing where the same image is
in every step (local steps on one batch: q = 1). Sampling is Poisson's and neighbours add or remove
an example; clients that draw batches of a fixed size, whose neighbours replace one, have a
sensitivity of 2C/B, which is twice the noise for the same promise.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name

DELTA = 1e-5
ACCOUNTANTS = {"prv": "PRVAccountant", "rdp": "RDPAccountant"}


def epsilon(
    noise: float,
    *,
    sampling_rate: float,
    steps: int,
    delta: float = DELTA,
    accountant: Literal["prv", "rdp"] = "prv",
) -> float:
    """An upper bound; infinite without noise. PRV is the tighter one, RDP never runs out of
    numbers."""
    if not (noise >= 0 and 0 < sampling_rate <= 1 and steps >= 1 and 0 < delta < 1):
        raise UserError(
            "Accounting: expected a noise of 0 or above, a sampling rate in (0, 1], 1 step or more "
            f"and a delta in (0, 1); got noise {noise}, sampling_rate {sampling_rate}, steps "
            f"{steps}, delta {delta}."
        )
    if accountant not in ACCOUNTANTS:
        raise unknown_name("accountant", accountant, list(ACCOUNTANTS))
    if noise == 0:
        return math.inf
    counted = getattr(_opacus_accountants(), ACCOUNTANTS[accountant])()
    counted.history = [(float(noise), float(sampling_rate), int(steps))]
    with warnings.catch_warnings():  # its best order may be the last one it tries: still a bound
        warnings.simplefilter("ignore")
        return float(counted.get_epsilon(delta))


def _opacus_accountants() -> Any:
    try:
        from opacus import accountants
    except ImportError as error:
        raise UserError(
            "Accounting: expected Opacus for epsilon, which is not installed. Run "
            "`pip install .[dp]`."
        ) from error
    return accountants
