"""Batches that worker processes decode each time they are needed.

Every image is seeded by (seed, epoch, place in the epoch), so an epoch is the same with any number
of workers, and a run can continue in the middle of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.data import ImageError
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.examples import epoch_order
from mjp_privacy.training.processes import World


class Items(Protocol):
    """Images with what is known of them, by (place of the image, seed of its augmentation).

    For an unreadable one the error is returned: raised in a worker, it would lose its message.
    """

    def __getitem__(self, index: tuple[int, int]) -> tuple[Tensor, Any] | ImageError: ...

    def __len__(self) -> int: ...


def unreadable(error: ImageError, used_for: str) -> UserError:
    """What to say of an image that training or validation needs and cannot read."""
    return UserError(
        f"Image {error}. Expected every {used_for} image to be readable: repair it, and the same "
        "command goes on; or take it out, and where steps were trained already start in another "
        "--out, for a run belongs to its list of images."
    )


def _collated(items: list[Any]) -> Any:
    """A batch, or the first error among its images."""
    error = next((item for item in items if isinstance(item, ImageError)), None)
    return default_collate(items) if error is None else error


class LoadedBatches:
    """`Batches` that are decoded by worker processes each time they are needed.

    training  images with their labels, augmented
    plain     the same, as they are validated
    """

    def __init__(
        self,
        config: TrainingConfig,
        training: Items,
        plain: Items,
        world: World,
        workers: int,
    ) -> None:
        self.config, self.world, self.workers = config, world, workers
        self.training, self.plain = training, plain

    def epoch(self, epoch: int, first: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from `first` up to `steps` of an epoch, in its random order, augmented."""
        batch, seed = self.config.recipe.batch, self.config.seed
        number = len(self.training)
        order = epoch_order(seed, epoch, number, self.config.augmentation.repeats).tolist()
        part = self.world.part(batch)
        batches = []
        for start in range(first * batch, steps * batch, batch):
            places = range(start, start + batch)[part]
            batches.append([(order[p], derive_seed("image", seed, epoch, p)) for p in places])
        yield from self._load(self.training, batches, "training")

    def in_order(self, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of all images, once and not augmented, for validation."""
        mine = [(p, 0) for p in range(self.world.rank, len(self.plain), self.world.size)]
        batches = [mine[i : i + batch] for i in range(0, len(mine), batch)]
        yield from self._load(self.plain, batches, "validation")

    def _load(
        self, images: Items, batches: Sequence[Sequence[tuple[int, int]]], used_for: str
    ) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.world.device
        loader: Any = DataLoader(
            images,  # type: ignore[arg-type]
            batch_sampler=batches,  # type: ignore[arg-type]
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            prefetch_factor=4 if self.workers else None,
            collate_fn=_collated,
        )
        for batch in loader:
            if isinstance(batch, ImageError):
                raise unreadable(batch, used_for)
            pixels, labels = batch
            yield pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)
