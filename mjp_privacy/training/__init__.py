"""Training ViTs with and without MJP, and measuring them as the paper does."""

from mjp_privacy.training.config import TrainingConfig, load_training

__all__ = ["TrainingConfig", "load_training"]
