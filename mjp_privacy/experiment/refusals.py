"""Why there is nothing to attack or to score, before an attack is asked."""

from __future__ import annotations

from attacks import traits_of
from mjp_privacy.client.settings import SETTINGS
from mjp_privacy.experiment.config import Cell
from mjp_privacy.interfaces import Attack, Refusal
from mjp_privacy.models import MJPVisionTransformer

NO_ONE_INPUT = Refusal(
    "target",
    "each upload was shuffled differently: there is no single shuffled image to reconstruct; "
    "score several uploads against the plain image (setting c)",
)
NO_SERIES = Refusal(
    "uploads",
    "it reads several uploads of the same images, and this client shuffles its images before every "
    "round (client.partners: fresh); only attacks that find what uploads share apply",
)
NO_TRUTH = Refusal("target", "the private images were not given, so nothing is scored")


def refused_by_setting(cell: Cell, attack: Attack) -> Refusal | None:
    """Why the cell's setting leaves nothing to score the attack against, or None."""
    setting = SETTINGS[cell.setting]
    if attack.uploads > 1 and setting.shuffles and setting.against == "input":
        return NO_ONE_INPUT
    fresh = attack.uploads > 1 and cell.client.partners == "fresh"
    return NO_SERIES if fresh and "shared pictures" not in traits_of(attack.name) else None


def refused_by_block(model: MJPVisionTransformer, attack: Attack) -> Refusal | None:
    """Why uploads of this model, made by somebody else, do not suit the attack; or None."""
    if attack.victim == "intact" or model.first_block == "closed_form":
        return None
    return Refusal(
        "block",
        "it needs a client whose block 0 has neither norm1 nor residuals; this one trained the "
        "intact model",
    )
