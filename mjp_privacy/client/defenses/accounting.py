r"""The privacy that a client's DP-SGD promises: epsilon at a delta, from Opacus' accountants.

The mechanism is the sampled Gaussian one: noise multiplier sigma, `steps` steps, each of which
holds an example with probability q (sampling_rate). With q = 1 and one step it is the plain
Gaussian mechanism. This is what `dp_sgd` promises to the examples of one client. Where the same
image is in every step (local steps on one batch), no sampling protects it: q = 1.

Two data sets count as neighbours if one has one example more than the other, and steps are drawn
by Poisson sampling. Clients that draw batches of a fixed size, where neighbours differ in one
replaced example, have a sensitivity of 2C/B and need twice the noise for the same promise.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name

DELTA = 1e-5  # the probability with which the promise may fail
ACCOUNTANTS = {"prv": "PRVAccountant", "rdp": "RDPAccountant"}


def epsilon(
    noise: float,
    *,
    sampling_rate: float,
    steps: int,
    delta: float = DELTA,
    accountant: Literal["prv", "rdp"] = "prv",
) -> float:
    """An upper bound of epsilon: `epsilon(1.0, sampling_rate=0.01, steps=1000)`.

    noise: the multiplier sigma; without noise epsilon is infinite.
    accountant: `prv` is tighter, `rdp` also works where prv runs into numerical limits.
    """
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
    ledger = getattr(_opacus_accountants(), ACCOUNTANTS[accountant])()
    ledger.history = [(float(noise), float(sampling_rate), int(steps))]
    with warnings.catch_warnings():  # RDP's best order may be the last it tries: still a bound
        warnings.simplefilter("ignore")
        return float(ledger.get_epsilon(delta))


def _opacus_accountants() -> Any:
    try:
        from opacus import accountants
    except ImportError as error:
        raise UserError(
            "Accounting: epsilon needs the package opacus, which is not installed. Run "
            "`pip install .[dp]`."
        ) from error
    return accountants
