"""Vision Transformers with and without MJP, and how to load them.

The names are imported when first used: the shuffling of patches is needed where no model is, and a
model needs timm, which takes two seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mjp_privacy.models.loading import LoadedModel as LoadedModel
    from mjp_privacy.models.loading import ModelCard as ModelCard
    from mjp_privacy.models.loading import load_model as load_model
    from mjp_privacy.models.mjp_vit import MJPVisionTransformer as MJPVisionTransformer

__all__ = ["LoadedModel", "MJPVisionTransformer", "ModelCard", "load_model"]

_HOMES = {
    "LoadedModel": "mjp_privacy.models.loading",
    "MJPVisionTransformer": "mjp_privacy.models.mjp_vit",
    "ModelCard": "mjp_privacy.models.loading",
    "load_model": "mjp_privacy.models.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
