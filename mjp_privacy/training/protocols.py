"""How a model's accuracy and consistency are measured: by this project, by the paper's authors.

protocols("authors_code")   # accuracy at γ = .9 with one mask a batch; consistency at γ = .5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from mjp_privacy.data import Preprocessing
from mjp_privacy.models import LoadedModel
from mjp_privacy.training.presets import Choice, Preset

ACCURACY = ("top1", "top5", "top1_shuffled")
CONSISTENCY = ("diff_norm", "consistency")
OUR_GAMMA, AUTHORS_ACCURACY_GAMMA, AUTHORS_CONSISTENCY_GAMMA = 0.27, 0.9, 0.5
Fit = Literal["checkpoint", "crop_256", "squash"]

EVALUATION_CHOICES = (
    Choice(
        "picture for accuracy",
        "short side 248/224, or the checkpoint's",
        None,
        "short side 256/224",
        "eval.py",
    ),
    Choice(
        "picture for consistency",
        "the same",
        None,
        "squashed to a square, nothing cut off",
        "consistency.py",
    ),
    Choice(
        "γ of shuffled accuracy",
        0.27,
        None,
        0.9,
        "the poster's caption of Table 5 says .27, eval.py .9",
    ),
    Choice(
        "γ of Diff. Norm. and Consistency",
        0.27,
        None,
        0.5,
        "Tables 3 and 4 print none, and Table 1's is lost in the text we have; consistency.py",
    ),
    Choice(
        "mask for accuracy",
        "one an image",
        None,
        "one for 128 images",
        "eval.py shuffles whole batches alike",
    ),
    Choice(
        "mean and std",
        "as the model was trained",
        None,
        "ImageNet's for every model",
        "eval.py hands them to ViT-S too, whose weights expect .5",
    ),
)


@dataclass(frozen=True)
class Protocol:
    """A group of measures, the images they are taken on, and how these are shuffled."""

    measures: tuple[str, ...] = (*ACCURACY, *CONSISTENCY)
    gammas: tuple[float, ...] = (OUR_GAMMA,)
    fit: Fit = "checkpoint"
    mask_per: Literal["image", "batch"] = "image"

    def preparation(self, model: LoadedModel) -> Preprocessing:
        """From a picture to the model's input."""
        card = model.card
        if self.fit == "checkpoint":
            return Preprocessing(card.img_size, card.resize, card.interpolation)  # type: ignore[arg-type]
        if self.fit == "squash":
            return Preprocessing(card.img_size, squash=True)
        return Preprocessing(card.img_size, card.img_size * 256 // 224)


def protocols(preset: Preset, gammas: tuple[float, ...] | None = None) -> tuple[Protocol, ...]:
    """What to measure under a preset; `gammas` replace the preset's own."""
    given = None if gammas is None else tuple(sorted(set(gammas)))
    if preset != "authors_code":
        return (Protocol(gammas=given or (OUR_GAMMA,)),)
    return (
        Protocol(ACCURACY, given or (AUTHORS_ACCURACY_GAMMA,), "crop_256", "batch"),
        Protocol(CONSISTENCY, given or (AUTHORS_CONSISTENCY_GAMMA,), "squash"),
    )


AUTHORS_MEAN, AUTHORS_STD = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
