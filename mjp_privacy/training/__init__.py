"""Training ViTs with and without MJP, and measuring the trained models as the paper does.

`run` is the way in: it finds `examples`, makes batches of them (`file_batches`, `memory_batches`)
and starts the `trainer`, which repeats the steps of its `learner`. `evaluation` measures models.
"""

from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.config_files import load_training

__all__ = ["TrainingConfig", "load_training"]
