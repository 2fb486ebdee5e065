"""How close a reconstruction comes to the private image, and statistics of many.

The names are imported when first used: `mjp score --help` needs none of them.
"""

from typing import TYPE_CHECKING

from mjp_privacy.core.registry import imported_on_use

if TYPE_CHECKING:
    from mjp_privacy.metrics.pictures import lpips_backbone as lpips_backbone
    from mjp_privacy.metrics.scores import METRICS as METRICS
    from mjp_privacy.metrics.scores import References as References
    from mjp_privacy.metrics.scores import prepare as prepare
    from mjp_privacy.metrics.scores import score as score

SCORES = ("METRICS", "References", "prepare", "score")

__getattr__ = imported_on_use(
    __name__,
    {
        **dict.fromkeys(SCORES, "mjp_privacy.metrics.scores"),
        "lpips_backbone": "mjp_privacy.metrics.pictures",
    },
)
