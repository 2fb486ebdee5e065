"""What a Vision Transformer client leaks through its gradients, with and without MJP.

The public interface is these names: `attack_gradients`, `save_upload`, `load_model`, `load_images`,
`run_experiment`, `score` and `__version__`. They are imported when first used, so that
`import mjp_privacy` stays cheap.
"""

from typing import TYPE_CHECKING

from mjp_privacy.core.registry import imported_on_use

if TYPE_CHECKING:
    from mjp_privacy.data import load_images as load_images
    from mjp_privacy.experiment.run import run_experiment as run_experiment
    from mjp_privacy.metrics.scores import score as score
    from mjp_privacy.models import load_model as load_model
    from mjp_privacy.uploads.attacking import attack_gradients as attack_gradients
    from mjp_privacy.uploads.memory import save_upload as save_upload

__version__ = "0.2.0"
__all__ = [
    "__version__",
    "attack_gradients",
    "load_images",
    "load_model",
    "run_experiment",
    "save_upload",
    "score",
]

__getattr__ = imported_on_use(
    __name__,
    {
        "attack_gradients": "mjp_privacy.uploads.attacking",
        "load_images": "mjp_privacy.data",
        "load_model": "mjp_privacy.models",
        "run_experiment": "mjp_privacy.experiment.run",
        "save_upload": "mjp_privacy.uploads.memory",
        "score": "mjp_privacy.metrics.scores",
    },
)


def __dir__() -> list[str]:
    """What completion offers: the public names too, before they are imported."""
    return sorted({*globals(), *__all__})
