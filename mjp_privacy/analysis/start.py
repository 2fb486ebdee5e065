"""How much of a trained table is still the noise it started from.

A file that this package's trainer wrote holds its recipe and seed, so the start can be drawn again.
The paper's code starts MJP's table at N(0, 1) and its baseline's at N(0, .02²): after a short
training the first is mostly its start still, and figures of it are figures of noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mjp_privacy.analysis.position_table import PositionTable, position_table
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.config_files import load_training
from mjp_privacy.training.network import build_network
from mjp_privacy.training.published import recipe_in


@dataclass(frozen=True)
class Start:
    """What a trained table has of its own start.

    std     the standard deviation of the start
    left    by what the start is multiplied in the table: training with weight decay shrinks it
    share   of the table's variance, that along the start: 1 where training changed its scale only
    rest    the table without the part along the start: what was learned
    """

    std: float
    left: float
    share: float
    rest: PositionTable


def start_in(
    model: MJPVisionTransformer, table: PositionTable, metadata: Mapping[str, str]
) -> Start | None:
    """The model's table beside its start; None where its file's metadata do not tell the start:
    another trainer's file, one that was fine-tuned, or a table resampled for another grid."""
    config = _recipe(metadata)
    if config is None or config.initial is not None or config.family != model.family:
        return None
    shape = config.model
    said = (shape.img_size // shape.patch_size, shape.embed_dim, shape.depth, shape.num_classes)
    if said != (model.grid, model.embed_dim, len(model.blocks), model.num_classes):
        return None
    start = position_table(build_network(config), "the start")
    return None if start is None else beside_start(table, start)


def beside_start(table: PositionTable, start: PositionTable) -> Start:
    """A table split into its part along the start and the rest, both about their mean rows."""
    trained, drawn = table.centred(), start.centred()
    along = float((trained * drawn).sum() / (drawn**2).sum())
    share = along**2 * float((drawn**2).sum() / (trained**2).sum())
    rest = PositionTable(table.grid, trained - along * drawn)
    return Start(float(start.rows.std()), along, share, rest)


def _recipe(metadata: Mapping[str, str]) -> TrainingConfig | None:
    """The recipe in a file's metadata; None where there is none that this trainer reads."""
    content = recipe_in(metadata)
    try:
        return load_training(content) if isinstance(content, Mapping) else None
    except UserError:
        return None
