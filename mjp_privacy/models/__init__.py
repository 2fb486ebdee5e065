"""Vision Transformers with and without MJP, and how to load them."""

from mjp_privacy.models.loading import LoadedModel, ModelCard, load_model
from mjp_privacy.models.mjp_vit import MJPVisionTransformer

__all__ = ["LoadedModel", "MJPVisionTransformer", "ModelCard", "load_model"]
