"""Vision Transformers with and without MJP, and how to load them.

The names are imported when first used: the shuffling of patches is needed where no model is.
"""

from typing import TYPE_CHECKING

from mjp_privacy.core.registry import imported_on_use

if TYPE_CHECKING:
    from mjp_privacy.models.loading import LoadedModel as LoadedModel
    from mjp_privacy.models.loading import load_model as load_model
    from mjp_privacy.models.mjp_vit import MJPVisionTransformer as MJPVisionTransformer

__getattr__ = imported_on_use(
    __name__,
    {
        "LoadedModel": "mjp_privacy.models.loading",
        "load_model": "mjp_privacy.models.loading",
        "MJPVisionTransformer": "mjp_privacy.models.mjp_vit",
    },
)
