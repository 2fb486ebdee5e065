"""What one attack made of a user's gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics import METRICS, score
from mjp_privacy.metrics.assignment import assigned
from mjp_privacy.metrics.pixel import quantise

CAP = 100.0  # dB, to which a PSNR counts in means, as in the reports


@dataclass(frozen=True, repr=False)
class Reconstructed:
    """What one attack gives, for the m images of the step."""

    attack: str
    images: Tensor | None  # (m, 3, S, S) in [0, 1]; None: the attack names masked positions only
    residuals: Tensor | None = None
    """(m,) || g(image) - g || / || g || of the patch embedding's gradient; None: the labels are not
    known, or not which picture of a batch has which."""
    factors: Tensor | None = None
    """(m,) f, with which f g(image) is nearest to g: a client that clips sends less than g."""
    scaled: Tensor | None = None  # (m,) the residuals of f g(image)
    misfits: Tensor | None = None  # (m,) the same without the loss: see `uploads/checks.py`
    certain: Tensor | None = None
    """(m,) bool: whatever the loss, only the client's picture fits, or one that uploads share."""
    seconds: float = 0.0  # with its checks and scores
    mask: Tensor | None = None  # (m, N) the positions that MJP masked, as the attack names them
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)  # of images without a reconstruction
    scores: pd.DataFrame | None = None  # a row for each image, where private images were given
    places: Sequence[int] = ()  # where the picture of each private image stands, where scored

    @property
    def image(self) -> Tensor:
        """The first image (3, S, S) in [0, 1] that there is."""
        if self.images is None:
            raise UserError(f"{self.attack} names the masked positions (.mask) and no picture.")
        return self.images[next(at for at in range(len(self.images)) if at not in self.reasons)]

    @property
    def residual(self) -> float:
        """The mean of `residuals` over the images that have a picture: near 0, these have the
        gradient that was sent. NaN where the labels are not known."""
        return _mean(self.residuals)

    @property
    def factor(self) -> float:
        """The mean of `factors`: 0.017 means that the upload is the picture's gradient times that,
        as a client sends it that clips; NaN where the labels are not known."""
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
    def is_certain(self) -> bool:
        """Whether every image has a picture, and each is the only one that meets the patch
        embedding's equations; as far as mean, std and the order of the channels are as declared."""
        return self.certain is not None and not self.reasons and bool(self.certain.all())

    @property
    def verified(self) -> int:
        """How many pictures are certain, whatever the loss."""
        return 0 if self.certain is None else int(self.certain.sum())

    @property
    def exact(self) -> int:
        """How many pictures equal the private ones in every 8-bit value, where these were given."""
        return 0 if self.scores is None else int(self.scores["exact"].sum())

    @property
    def psnr(self) -> float:
        """The mean PSNR in dB, each capped at 100; NaN where no private images were given."""
        return (
            math.nan if self.scores is None else float(self.scores["psnr"].clip(upper=CAP).mean())
        )

    def scored(self, private: Tensor | None, batch: int = 1) -> Reconstructed:
        """The same with scores against the private images (m, 3, S, S). The order of pictures of
        a batch means nothing: each private image gets the one that fits it."""
        if private is None or self.images is None or len(self.images) < len(private):
            return self
        places = list(range(len(private))) if batch == 1 else _matched(self.images, private, batch)
        usable = [at for at, place in enumerate(places) if place not in self.reasons]
        images, originals = self.images[[places[at] for at in usable]], private[usable]
        names = dict.fromkeys(METRICS[key].name for key in METRICS)
        values = score(images, originals, [f"{name}/standard" for name in names])
        table = pd.DataFrame({name: numbers for (name, _), numbers in values.items()})
        same = quantise(images.double()) == quantise(originals.double())
        table["exact"] = same.flatten(1).all(1).numpy()
        table.insert(0, "image", usable)
        table.insert(0, "attack", self.attack)
        return replace(self, scores=table, places=places)

    def without(self, doubts: Collection[int]) -> Reconstructed:
        """The same with none of these pictures certain: their normalisation is not as declared."""
        if self.certain is None or not doubts:
            return self
        kept = self.certain.clone()
        kept[list(doubts)] = False
        return replace(self, certain=kept)

    def __str__(self) -> str:
        said = ["no picture" if self.images is None else f"images {tuple(self.images.shape)}"]
        for name, check in (("residual", self.residual), ("misfit", self.misfit)):
            said += [] if math.isnan(check) else [f"{name} {check:.1e}"]
        if self.scores is not None:
            said.append(f"{self.psnr:.1f} dB, {self.exact} exact")
        return f"{self.attack}: {', '.join(said)}"

    __repr__ = __str__


def _matched(images: Tensor, private: Tensor, batch: int) -> list[int]:
    """The place of the picture that belongs to each private image: within its step, or anywhere
    where the uploads of an attack need not hold the same pictures."""
    if len(images) > len(private):
        return [int(place) for place in assigned(images, private)]
    steps = range(0, len(private), batch)
    own = [assigned(images[at : at + batch], private[at : at + batch]) + at for at in steps]
    return [int(place) for place in torch.cat(own)]


def _mean(values: Tensor | None) -> float:
    return math.nan if values is None else float(values.nanmean())
