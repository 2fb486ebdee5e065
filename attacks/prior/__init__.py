"""Gaussian priors: what pictures look like before an upload is seen, and how to fit such a prior.

    mjp fit-prior --images DIR --patch 16 --out mine.safetensors

A prior describes pixels in [0, 1] and is converted to each model's own mean and std. Attacks take
`prior: fitted` (shipped, from 400 public photographs; for patch sizes other than 16 and 7 the
covariance of a patch is derived from the fitted spectrum), `prior: stationary` (three round
numbers, no data) or the path of a fitted file.
"""

from typing import TYPE_CHECKING

from mjp_privacy.core.registry import imported_on_use

if TYPE_CHECKING:
    from attacks.prior.files import find_prior as find_prior
    from attacks.prior.files import load_prior as load_prior
    from attacks.prior.files import save_prior as save_prior
    from attacks.prior.gaussian import GaussianPrior as GaussianPrior
    from attacks.prior.gaussian import stationary_prior as stationary_prior

__all__ = [
    "GaussianPrior",
    "check_prior",
    "find_prior",
    "load_prior",
    "save_prior",
    "stationary_prior",
]

__getattr__ = imported_on_use(
    __name__,
    {
        "GaussianPrior": "attacks.prior.gaussian",
        "find_prior": "attacks.prior.files",
        "load_prior": "attacks.prior.files",
        "save_prior": "attacks.prior.files",
        "stationary_prior": "attacks.prior.gaussian",
    },
)

MADE = ("fitted", "stationary")
"""Priors that need no file of the user's."""


def check_prior(name: str) -> None:
    """Raise UserError unless the prior can be read, if it is a file."""
    if name in MADE:
        return
    from attacks.prior.files import find_prior

    find_prior(name, patch=16, size=224)  # a file is the same for every patch and size
