"""What pictures look like before anything of them is seen: Gaussian priors, and how to fit one.

    mjp fit-prior --images DIR --patch 16 --out mine.safetensors

A prior lives in [0, 1] pixel space and is moved to each model's own mean and std. Attacks take
`prior: fitted` (shipped, from 400 public photographs), `prior: stationary` (three round numbers, no
data) or the path of a file that was fitted.
"""

from attacks.prior.files import find_prior, load_prior, save_prior
from attacks.prior.gaussian import GaussianPrior
from attacks.prior.stationary import stationary_prior

__all__ = ["GaussianPrior", "find_prior", "load_prior", "save_prior", "stationary_prior"]
