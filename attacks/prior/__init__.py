"""Gaussian priors: what pictures look like before an upload is seen, and how to fit such a prior.

    mjp fit-prior --images DIR --patch 16 --out mine.safetensors

A prior describes pixels in [0, 1] and is converted to each model's own mean and std. Attacks take
`prior: fitted` (shipped, from 400 public photographs; for patch sizes other than 16 and 7 the
covariance of a patch is derived from the fitted spectrum), `prior: stationary` (three round
numbers, no data) or the path of a fitted file.
"""

MADE = ("fitted", "stationary")
"""Priors that need no file of the user's."""


def check_prior(name: str) -> None:
    """Raise UserError unless the prior can be read, if it is a file."""
    if name in MADE:
        return
    from attacks.prior.files import find_prior

    find_prior(name, patch=16, size=224)  # a file is the same for every patch and size
