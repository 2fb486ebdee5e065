"""Why there is nothing to attack or to score, before an attack is asked."""

from __future__ import annotations

from attacks import traits_of
from mjp_privacy.client.settings import SETTINGS
from mjp_privacy.experiment.config import Cell
from mjp_privacy.interfaces import Attack, Control, Refusal
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
NOT_A_VIT = {
    "swin": "a Swin normalises its embedded patches before any position is added, so that the "
    "gradients of its table and of its patch embedding are no linear system in the patches",
    "resnet": "a ResNet has no patch embedding and no position embeddings",
}
"""Why what reads the parts of a ViT has nothing to read in networks of another family."""
NO_TRUTH = Refusal("target", "the private images were not given, so nothing is scored")


def refused_by_setting(cell: Cell, attack: Attack) -> Refusal | None:
    """Why the cell's setting leaves nothing to score the attack against, or None."""
    setting = SETTINGS[cell.setting]
    if attack.uploads > 1 and setting.shuffles and setting.against == "input":
        return NO_ONE_INPUT
    fresh = attack.uploads > 1 and cell.client.partners == "fresh"
    return NO_SERIES if fresh and "shared pictures" not in traits_of(attack.name) else None


def refused_by_network(
    cell: Cell, model: MJPVisionTransformer, attack: Attack | Control
) -> Refusal | None:
    """Why the attack or the client does not suit a network that is no plain ViT, or None."""
    if model.family == "vit":
        return None
    reason, client = NOT_A_VIT[model.family], cell.client
    if client.positions != "own" or client.adapters is not None:
        return Refusal(
            "model", f"{reason}: its clients have positions: own and no low-rank adapters here"
        )
    if client.mode == "train" and model.family == "resnet":
        text = "in training mode a ResNet's batch norm mixes images: clients need client.mode: eval"
        return Refusal("model", text)
    is_floor = isinstance(attack, Control) and attack.role == "floor"
    if is_floor or "any network" in traits_of(attack.name):
        return None
    return Refusal("model", f"it reads a plain ViT's patch embedding and positions: {reason}")


def refused_by_block(model: MJPVisionTransformer, attack: Attack) -> Refusal | None:
    """Why uploads of this model, made by somebody else, do not suit the attack; or None."""
    if attack.victim == "intact" or model.first_block == "closed_form":
        return None
    return Refusal(
        "block",
        "it needs a client whose block 0 has neither norm1 nor residuals; this one trained the "
        "intact model",
    )
