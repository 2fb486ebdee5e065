"""One attack's pictures, with what checks without truth and scores say of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from torch import Tensor

from attacks import traits_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics import METRICS, score
from mjp_privacy.metrics.matching import assigned
from mjp_privacy.metrics.pictures import SMALLEST, quantise

CAP = 100.0  # dB, to which a PSNR counts in means, as in the reports
TIE = 1e-5
"""Values nearer than this are the same: of an original that is no 8-bit picture, some lie between
two levels, where the last bit rounds them either way."""
COLUMNS_SAID = ("attack", "residual", "misfit", "PSNR", "exact", "seconds")


def _mean(values: Tensor | None) -> float:
    return math.nan if values is None else float(values.nanmean())


def decibels(value: float) -> str:
    return f"≥ {CAP:g}" if value >= CAP else f"{value:.1f}"


@dataclass(frozen=True, repr=False)
class Reconstructed:
    """What one attack gives, for the m images of the step."""

    attack: str
    images: Tensor | None  # (m, C, H, W) in [0, 1]; None: the attack names masked positions only
    residuals: Tensor | None = None
    """(m,) || g(image) - g || / || g || of the patch embedding's gradient, of a batch that of all
    its pictures together; None: the labels are not known."""
    factors: Tensor | None = None
    """(m,) f, with which f g(image) is nearest to g: a client that clips sends less than g."""
    scaled: Tensor | None = None  # (m,) the residuals of f g(image)
    rolled: float = math.nan
    """The mean of `scaled` with all patches of these pictures moved by one; NaN where not known."""
    ordered: int = 0  # patches, masked or without positions, that borders alone put in order
    labels: Tensor | None = None
    """(m,) of a batch whose pictures explain the gradient: the class of each, as the classifier's
    gradient tells it."""
    misfits: Tensor | None = None  # (m,) the same without the loss: see `uploads/checks.py`
    certain: Tensor | None = None
    """(m,) bool: whatever the loss, only the client's picture fits, or one that uploads share."""
    doubts: Mapping[int, str] = field(default_factory=dict)
    """{place of a picture: what its pixels say against the declared mean and std}."""
    seconds: float = 0.0  # with its checks and scores
    mask: Tensor | None = None  # (m, N) the positions that MJP masked, as the attack names them
    uncompared: str = ""  # why no residual can be computed, beside missing labels and gradients
    unchecked: str = ""  # what the network raised where the residual was to be computed
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)  # of images without a reconstruction
    scores: pd.DataFrame | None = None  # a row for each image, where private images were given
    places: Sequence[int] = ()  # where the picture of each private image stands, where scored

    @property
    def image(self) -> Tensor:
        """The first image (C, H, W) in [0, 1] that there is."""
        if self.images is None:
            raise UserError(f"{self.attack} names the masked positions (.mask) and no picture.")
        return self.images[next(at for at in range(len(self.images)) if at not in self.reasons)]

    @property
    def residual(self) -> float:
        """The mean of `residuals`: near 0, the pictures have the gradient that was sent. NaN where
        the labels are not known."""
        return _mean(self.residuals)

    @property
    def factor(self) -> float:
        """The mean of `factors`: 0.017 means that the upload is the gradient times that."""
        return _mean(self.factors)

    @property
    def scaled_residual(self) -> float:
        """The residual once the gradient was multiplied by `factor`."""
        return _mean(self.scaled)

    @property
    def misfit(self) -> float:
        """The mean of `misfits`; NaN where the upload does not tell it."""
        return _mean(self.misfits)

    @property
    def is_sorted(self) -> bool:
        """Whether patches that nothing masked were moved to where their borders fit."""
        return "shuffled alone" in traits_of(self.attack)

    @property
    def verified(self) -> int:
        """How many pictures are certain, whatever the loss."""
        return 0 if self.certain is None else int(self.certain.sum())

    @property
    def is_certain(self) -> bool:
        """Whether every image has a picture and each is certain."""
        return self.certain is not None and not self.reasons and bool(self.certain.all())

    @property
    def exact(self) -> int:
        """How many pictures equal the private ones in every 8-bit value, where these were given,
        or are as near as `TIE`."""
        return 0 if self.scores is None else int(self.scores["exact"].sum())

    @property
    def psnr(self) -> float:
        """The mean PSNR in dB, each capped at 100; NaN where no private images were given."""
        scored = self.scores
        return math.nan if scored is None else float(scored["psnr"].clip(upper=CAP).mean())

    def scored(self, private: Tensor | None, batch: int = 1) -> Reconstructed:
        """The same with scores against the private images (m, C, H, W). The order of pictures of
        a batch means nothing: each private image gets the one that fits it."""
        if private is None or self.images is None or len(self.images) < len(private):
            return self
        places = list(range(len(private)))
        if len(self.images) > len(private):  # uploads that need not hold the same pictures
            places = assigned(self.images, private).tolist()
        elif batch > 1:
            steps = [slice(at, at + batch) for at in range(0, len(private), batch)]
            own = [assigned(self.images[step], private[step]) + step.start for step in steps]
            places = torch.cat(own).tolist()
        usable = [at for at, place in enumerate(places) if place not in self.reasons]
        images, originals = self.images[[places[at] for at in usable]], private[usable]
        names = dict.fromkeys(METRICS[key].name for key in METRICS)
        if private.shape[-1] < SMALLEST:
            del names["lpips"]  # which has no value of pictures like MNIST's
        values = score(images, originals, [f"{name}/standard" for name in names])
        same = (quantise(images.double()) == quantise(originals.double())) | (
            (images - originals).abs() < TIE
        )
        columns = {name: numbers for (name, _), numbers in values.items()}
        columns["exact"] = same.flatten(1).all(1).numpy()
        table = pd.DataFrame({"attack": self.attack, "image": usable, **columns})
        return replace(self, scores=table, places=places)

    def facts(self) -> dict[str, str]:
        """Its line of a table, with what is known of COLUMNS_SAID."""
        checks = {"residual": self.residual, "misfit": self.misfit}
        told = {name: f"{check:.1e}" for name, check in checks.items() if not math.isnan(check)}
        if self.scores is not None:
            told["PSNR"] = decibels(self.psnr)
            told["exact"] = f"{self.exact} of {len(self.scores) + len(self.reasons)}"
        return {"attack": self.attack, **told, "seconds": f"{self.seconds:.2f}"}

    def __repr__(self) -> str:
        told = [f"{name} {value}" for name, value in list(self.facts().items())[1:]]
        made = "no picture" if self.images is None else f"images {tuple(self.images.shape)}"
        return f"{self.attack}: {', '.join([made, *told])}"
