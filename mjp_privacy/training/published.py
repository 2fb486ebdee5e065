"""What the paper prints of its models (published.yaml)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mjp_privacy.training.config import PUBLISHED, TrainingConfig


@dataclass(frozen=True)
class PublishedModel:
    """One printed row, for ImageNet-1K at 224; top1 and consistency in percent.

    diff_norm is the L2 norm of the difference that shuffling makes to [CLS]; network: what the row
    was trained as, where the paper has it in no other table.
    """

    table: int
    row: str
    top1: float
    consistency: float
    diff_norm: float | None = None
    network: Sequence[str | bool] = ()

    @property
    def label(self) -> str:
        return f"Table {self.table}, {self.row}"


TABLE1 = tuple(PublishedModel(1, **row) for row in PUBLISHED["table_1"])
TABLE3 = {
    row["gamma"]: PublishedModel(
        3, f"γ = {row['gamma']:g}", row["top1"], row["consistency"], row["diff_norm"]
    )
    for row in PUBLISHED["table_3"]
}
"""DeiT-S + MJP by the shuffle ratio it was trained with."""
TABLE4 = {row["row"][0]: PublishedModel(4, **row) for row in PUBLISHED["table_4"]}
MAIN_GAMMA = 0.03
"""The shuffle ratio that the rows of Tables 1 and 4 were trained with."""


def counterpart(config: TrainingConfig | None) -> PublishedModel | None:
    """The printed row of the model that was trained with the same switches.

    Table 4's row J has a row for each shuffle ratio in Table 3. None: the paper printed no such
    model.
    """
    if config is None or config.initial is not None:
        return None
    model, jigsaw = config.model, config.jigsaw
    network = [
        *(config.family, model.position_embedding, jigsaw.shuffle),
        *(model.unknown_embedding, model.index_embedding, model.dal),
    ]
    row = next((row for row in (*TABLE4.values(), *TABLE1) if row.network == network), None)
    weight = (jigsaw.dal_lambda, jigsaw.dal_target, jigsaw.dal_schedule)
    shuffles = jigsaw.shuffle != "none"
    if (
        row is None
        or model.first_block != "intact"
        or jigsaw.position_confound
        or (shuffles and (jigsaw.mask_per, jigsaw.share) != ("batch", 0.5))
        or (model.unknown_embedding and jigsaw.position_init != "paper")
        or (model.dal != "none" and weight != (0.01, "raw", "constant"))
    ):
        return None
    if row == TABLE4["J"]:
        return TABLE3.get(jigsaw.gamma)
    has_gamma = jigsaw.shuffle == "patches" or (shuffles and config.family != "vit")
    return None if has_gamma and jigsaw.gamma != MAIN_GAMMA else row
