"""Vision Transformers with and without MJP, and how to load them."""

from mjp_privacy.models.loading import ModelCard, Victim, load_model
from mjp_privacy.models.mjp_vit import MJPVisionTransformer

__all__ = ["MJPVisionTransformer", "ModelCard", "Victim", "load_model"]
