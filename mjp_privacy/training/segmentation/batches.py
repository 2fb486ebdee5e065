"""The `Batches` of pictures with label maps."""

from __future__ import annotations

from torch import Tensor

from mjp_privacy.data import ImageError
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.loaded_batches import LoadedBatches
from mjp_privacy.training.processes import World
from mjp_privacy.training.segmentation.augmentation import Augmented, Whole
from mjp_privacy.training.segmentation.pairs import Pairs


class _Drawn:
    """The `loaded_batches.Items` of pictures with label maps."""

    def __init__(self, pairs: Pairs, transform: Augmented | Whole) -> None:
        self.pairs, self.transform = pairs, transform

    def __getitem__(self, index: tuple[int, int]) -> tuple[Tensor, Tensor] | ImageError:
        place, seed = index
        try:
            return self.transform(*self.pairs.read(place), seed)
        except ImageError as error:
            return error

    def __len__(self) -> int:
        return len(self.pairs)


class PairBatches(LoadedBatches):
    """Crops (b, 3, S, S) with labels (b, S, S); in order whole pictures of a size of their own,
    which only fit into batches of one."""

    def __init__(self, config: TrainingConfig, pairs: Pairs, world: World, workers: int) -> None:
        training, plain = _Drawn(pairs, Augmented(config)), _Drawn(pairs, Whole(config))
        super().__init__(config, training, plain, world, workers)
