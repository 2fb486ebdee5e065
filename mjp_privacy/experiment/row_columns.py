"""The columns of a row: of one image, metric and variant in one cell."""

from __future__ import annotations

ROW_COLUMNS = (
    "run_id",
    "model",
    "checkpoint_sha",
    "architecture",
    "setting",
    "gamma",
    "attack",
    "dtype",
    "seed",
    "image_id",
    "metric",
    "variant",
    "value",
    "status",
    "reason",
)
"""Columns of a row. New columns are added to CELL_COLUMNS; none is ever renamed."""

STATUSES = ("ok", "failed", "unsupported", "unscored", "unreadable")
"""The words that a row's status may be."""

NOT_DONE = ("failed", "unreadable")
"""Statuses of rows that the next command makes again. `unreadable`: the image's file, or one of its
client step, is no image, so that nothing was attacked; such rows are in no figure."""

CELL_COLUMNS = (
    "trained_gamma",
    "position_embedding",
    "victim",
    "engine",
    "mode",
    "loss",
    "batch",
    "dal",
    "label_source",
    "dal_lambda",
    "attack_name",
    "role",
    "uploads",
    "plain_share",
    "mask",
    "augment",
    "withhold",
    "positions",
    "position_noise",
    "server_lr",
    "upload",
    "lr",
    "weight_decay",
    "round",
    "defenses",
    "steps",
    "optimizer",
    "momentum",
    "pseudo_gradient",
    "code",
    "partners",
    "lora",
    "autocast",
)
"""Further columns of every row, which describe its cell and its image."""

KEYS = ("image_id", "metric", "variant")
"""What tells the rows of a cell apart."""
