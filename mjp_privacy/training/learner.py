"""What learns in a run: the network with its optimiser, one step of training, and its accuracy.

Everything that the next step depends on is in `Learner.state`, the step's number and the config.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from timm.data import Mixup
from timm.optim import param_groups_weight_decay
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.text import shown
from mjp_privacy.models import load_model
from mjp_privacy.models.jigsaw import (
    ATTEMPTS,
    MIN_ASPECT,
    MIN_BLOCK,
    Grid,
    largest_block,
    shuffle_patches,
    to_images,
    to_patches,
)
from mjp_privacy.models.loading import build_other
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.training.batches import (
    Batches,
    World,
    find_examples,
    make_batches,
    seed_libraries,
)
from mjp_privacy.training.config import Initial, TrainingConfig, other_sizes
from mjp_privacy.training.run_files import STATE, TrainingCheckpoint, check_weights

# the paper's Table 7 ------------------------------------------------------------------------------


def build_optimizer(model: MJPVisionTransformer, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW. Biases, norms and embedding tables do not decay, except MJP's position embeddings if
    the config follows the paper's code."""
    spared = model.no_weight_decay()
    if config.positions_as_paper:
        spared = spared - {"pos_embed", "unk_embed", "absolute_pos_embed"}
    groups = param_groups_weight_decay(
        model, config.recipe.weight_decay, no_weight_decay_list=spared
    )
    return torch.optim.AdamW(groups, lr=config.lr, fused=True)


def learning_rate(config: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of a step: linear warm-up, then a cosine that is counted from step 0, as timm's."""
    recipe, top = config.recipe, config.lr
    warmup = config.warmup_epochs * steps_per_epoch
    if step < warmup:
        start = min(recipe.warmup_lr, top)
        return start + (top - start) * step / warmup
    total = recipe.epochs * steps_per_epoch
    end = min(recipe.min_lr, top)
    return end + (top - end) * (1 + math.cos(math.pi * step / total)) / 2


def dal_weight(config: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """The weight of L_DAL in a step; under `rising_then_halving` it changes from epoch to epoch."""
    top = config.jigsaw.dal_lambda
    if config.jigsaw.dal_schedule == "constant":
        return top
    epoch, warmup = step // steps_per_epoch, round(config.warmup_epochs)
    if epoch < warmup:
        return top * epoch / max(warmup - 1, 1)
    cosine = math.cos(math.pi * (epoch - warmup) / (config.recipe.epochs - warmup))
    return top / 2 + top / 4 * (1 + cosine)


# which steps are shuffled, and how ----------------------------------------------------------------
#
# A puzzle follows from (seed, step) alone, so all processes have the same one. The masks are those
# of `models.jigsaw`, many at a time and on any device: they take each attempt together, so the host
# never waits for the device. Only the random numbers are drawn from another stream.


def blockwise_masks(count: int, *, grid: int, gamma: float, generator: torch.Generator) -> Tensor:
    """(count, grid²) bool masks, each of at most int(grid² · gamma) patches; generator's device."""
    device = generator.device
    patches, target = grid**2, int(grid**2 * gamma)
    # after so many attempts all but about one mask in 10,000 are complete (measured in a test)
    limit = 40 + 2 * target if target else 0
    draws = torch.rand(limit, 4, count, generator=generator, device=device)
    mask = torch.zeros(count, grid, grid, dtype=torch.bool, device=device)
    masked = torch.zeros(count, device=device)
    failed = torch.zeros(count, device=device)
    log_aspect, line = math.log(MIN_ASPECT), torch.arange(grid, device=device)
    for area_draw, aspect_draw, top_draw, left_draw in draws.unbind():
        active = (masked < target) & (failed < ATTEMPTS)
        room = (target - masked).clamp(max=largest_block(patches))
        # with room < MIN_BLOCK the interval is reversed, as in `models.jigsaw`
        area = MIN_BLOCK + (room - MIN_BLOCK) * area_draw
        aspect = torch.exp(log_aspect - 2 * log_aspect * aspect_draw)
        height = torch.round(torch.sqrt(area * aspect))
        width = torch.round(torch.sqrt(area / aspect))
        top = torch.floor(top_draw * (grid - height + 1))
        left = torch.floor(left_draw * (grid - width + 1))
        rows = (line >= top[:, None]) & (line < (top + height)[:, None])
        columns = (line >= left[:, None]) & (line < (left + width)[:, None])
        block = rows[:, :, None] & columns[:, None, :]
        new = (block & ~mask).sum((1, 2))
        fits = active & (height < grid) & (width < grid) & (new > 0) & (new <= room)
        mask |= block & fits[:, None, None]
        masked += new * fits
        failed = torch.where(fits, 0.0, failed + 1)
    return mask.flatten(1)


def shuffled_orders(mask: Tensor, generator: torch.Generator) -> Tensor:
    """(m, N) permutations that shuffle the masked patches of each row among themselves."""
    number = mask.shape[-1]
    place = torch.arange(number, device=mask.device).expand_as(mask)
    noise = torch.rand(mask.shape, generator=generator, device=mask.device)
    # Both lists hold the masked positions first, then the others in order: the first lists them
    # in order too, the second at random.
    ordered = torch.where(mask, place, place + number).argsort(-1)
    random = torch.where(mask, noise.double(), (place + 1).double()).argsort(-1)
    return torch.empty_like(ordered).scatter_(-1, ordered, random)


CHUNK = 256  # steps whose masks are drawn together, because that is faster


@dataclass(frozen=True)
class Puzzle:
    """One step's mask and permutation (1, N); for SPP also the order of a patch's pixels."""

    mask: Tensor
    permutation: Tensor | None
    pixels: Tensor | None = None


class Puzzles:
    """The puzzle of every step, the same for all images of a batch."""

    def __init__(self, config: TrainingConfig, steps_per_epoch: int, device: torch.device) -> None:
        self.jigsaw, self.seed, self.device = config.jigsaw, config.seed, device
        self.patch = config.model.patch_size
        self.grid = config.model.img_size // self.patch
        self.first_step = math.ceil(config.first_epoch * steps_per_epoch)
        self._none = torch.zeros(1, self.grid**2, dtype=torch.bool, device=device)
        self._chunk: tuple[int, Tensor, Tensor] | None = None

    def shuffled(self, step: int) -> bool:
        """Whether this step is shuffled; a share of the steps after the first epochs are."""
        if self.jigsaw.shuffle == "none" or step < self.first_step:
            return False
        return derive_seed("shuffled step", self.seed, step) < self.jigsaw.share * 2**63

    def at(self, step: int) -> Puzzle:
        """The puzzle of a step. Unshuffled steps have an empty mask, to keep one graph for all."""
        if not self.shuffled(step):
            return Puzzle(self._none, None)
        if self.jigsaw.shuffle == "patches_and_pixels":
            seed = derive_seed("patches and pixels", self.seed, step)
            generator = torch.Generator(self.device).manual_seed(seed)
            everything = torch.ones_like(self._none)
            pixels = torch.ones(1, self.patch**2, dtype=torch.bool, device=self.device)
            one, other = (shuffled_orders(mask, generator) for mask in (everything, pixels))
            return Puzzle(self._none, one, other[0])
        chunk, place = divmod(step, CHUNK)
        if self._chunk is None or self._chunk[0] != chunk:
            seed = derive_seed("batch puzzles", self.seed, chunk)
            generator = torch.Generator(self.device).manual_seed(seed)
            masks = blockwise_masks(
                CHUNK, grid=self.grid, gamma=self.jigsaw.gamma, generator=generator
            )
            self._chunk = (chunk, masks, shuffled_orders(masks, generator))
        _, masks, orders = self._chunk
        return Puzzle(masks[place : place + 1], orders[place : place + 1])


def apply(puzzle: Puzzle, images: Tensor, patch_size: int) -> Tensor:
    """The images (B, C, H, W) shuffled as the puzzle says."""
    if puzzle.permutation is None:
        return images
    if puzzle.pixels is not None:  # in one order in every channel
        patches = to_patches(images, patch_size).unflatten(-1, (images.shape[1], -1))
        patches = patches[..., puzzle.pixels].flatten(-2)
        images = to_images(patches, Grid.in_pictures(images, patch_size), patch_size)
    return shuffle_patches(images, puzzle.permutation.expand(len(images), -1), patch_size)


# the network and its loss -------------------------------------------------------------------------


def build_network(config: TrainingConfig) -> MJPVisionTransformer:
    """The network with initial weights drawn from the config's seed; of a segmentation, a ViT
    without its classifier. A Swin or ResNet has all that training uses of a ViT.

    Rows of one seed start with equal weights in all tensors that they share. Models without
    position embeddings are an exception: they do not draw that table, so all later draws differ.
    """
    sizes, shape = other_sizes(config), config.model
    same = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "unknown_embedding")
    fields: dict[str, Any] = {name: getattr(shape, name) for name in same}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("initial weights", config.seed))
        if sizes is not None:
            model = cast(MJPVisionTransformer, build_other(sizes, shape.drop_path))
        else:
            model = MJPVisionTransformer(
                **fields,
                num_classes=shape.num_classes if config.task == "classification" else 0,
                drop_path_rate=shape.drop_path,
                position_embedding="strict" if shape.position_embedding == "none" else "learned",
                index_embedding=shape.index_embedding,
                dal=shape.dal,
                first_block=shape.first_block,
            )
        if config.initial is not None and sizes is None:
            _fill(model, config.initial, config)
        elif config.initial is None and config.positions_as_paper:
            nn.init.normal_(model.table)
            if model.unk_embed is not None:
                nn.init.normal_(model.unk_embed)
    return model


def _fill(model: MJPVisionTransformer, initial: Initial, config: TrainingConfig) -> None:
    """Copy every tensor that the checkpoint has; what it lacks of DAL or indices stays random."""
    shape, classifies = config.model, config.task == "classification"
    sizes = ["img_size", "patch_size", "embed_dim", "depth", "num_heads", "mean", "std"]
    sizes += ["num_classes"] if classifies else []  # a segmentation has classes of its own
    loaded = load_model(
        initial.model,
        checkpoint=initial.checkpoint,
        unknown_embedding=(shape.unknown_embedding or None) if classifies else None,
        unknown_init="mean_position",
        **{name: getattr(shape, name) for name in sizes},
    )
    if not classifies:
        check_unknown(initial.checkpoint, loaded.unk_embed is not None, shape.unknown_embedding)
    pretrained = dict(loaded.named_parameters())
    new = [name for name, _ in model.named_parameters() if name not in pretrained]
    if lacking := [name for name in new if not name.startswith(("dal_regressor", "index_embed"))]:
        raise UserError(
            f"{loaded.card.checkpoint.source} lacks {', '.join(lacking[:3])}, which training "
            "would have to start from. Give a checkpoint of the same architecture."
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in pretrained:
                parameter.copy_(pretrained[name])


def check_unknown(source: str, stored: bool, wanted: bool) -> None:
    """Raise unless weights with MJP's E_unk start a network with one, and others one without: a
    segmentation's row says by its name what its weights were trained with."""
    if stored != wanted:
        expected, got = ("MJP's unk_embed" if one else "no unk_embed" for one in (wanted, stored))
        raise UserError(
            f"{shown(source)}: model.unknown_embedding is {str(wanted).lower()}: expected weights "
            f"to start from with {expected}, got {got}. Give such weights, or the row for these."
        )


class Objective(nn.Module):
    """Model and loss in one forward pass, so that DDP and torch.compile see all of it."""

    def __init__(self, model: MJPVisionTransformer, config: TrainingConfig) -> None:
        super().__init__()
        self.model = model
        self.smoothing = config.recipe.label_smoothing
        self.normalize = config.jigsaw.dal_target == "normalized"

    def forward(
        self, images: Tensor, targets: Tensor, mask: Tensor, dal_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss, and (loss, cross-entropy, DAL, accuracy) detached, as one tensor (4,).

        targets: class indices (B,), or soft labels (B, K) from mixup; dal_weight: a scalar.
        """
        logits = self.model(images, mask).float()
        soft = targets.ndim == 2  # mixup has smoothed these labels already
        entropy = F.cross_entropy(logits, targets, label_smoothing=0 if soft else self.smoothing)
        loss, dal = entropy, torch.zeros_like(entropy)
        if self.model.dal_regressor is not None:
            with torch.autocast(images.device.type, enabled=False):
                dal = self.model.dal_loss(mask, normalize=self.normalize)
            loss = entropy + dal_weight * dal
        truth = targets.argmax(-1) if soft else targets
        accuracy = (logits.argmax(-1) == truth).float().mean()
        return loss, torch.stack((loss, entropy, dal, accuracy)).detach()


# what learns --------------------------------------------------------------------------------------


class Learner:
    """The network, its optimiser, the average of its weights if there is one, and its loss."""

    measure = "val_top1"
    """What `validated` gives that a checkpoint and the finished model keep."""
    find: Callable[..., tuple[Any, Any]] = staticmethod(find_examples)
    batches: Callable[..., Batches] = staticmethod(make_batches)
    """How its images are found and batched."""
    network: Callable[[TrainingConfig], Any] = staticmethod(build_network)
    """With its initial weights."""
    loss: Callable[[Any, TrainingConfig], nn.Module] = Objective
    """Around a network; see `Objective` for what it takes and returns."""

    def __init__(self, config: TrainingConfig, steps_per_epoch: int, world: World) -> None:
        self.config, self.steps_per_epoch, self.world = config, steps_per_epoch, world
        self.model = self.network(config).to(world.device)
        wanted = config.recipe.precision == "bfloat16"
        self.bfloat16 = wanted and (world.device.type != "cpu" or has_bfloat16())
        self.without_bfloat16 = wanted and not self.bfloat16  # it trains in float32
        if self.bfloat16 and world.device.type == "cpu":
            for module in self.model.modules():  # fused attention takes seven times as long there
                if hasattr(module, "fused_attn"):
                    setattr(module, "fused_attn", False)  # noqa: B010  (mypy: a Module's attribute)
        self.optimizer = build_optimizer(self.model, config)
        decay = config.recipe.ema_decay
        self.average = ModelEmaV3(self.model, decay=decay) if decay else None
        self.objective: Any = self.loss(self.model, config)
        if config.recipe.compile:
            self.objective = torch.compile(self.objective)
        if world.size > 1:
            self.objective = DistributedDataParallel(self.objective)
        self.mix = build_mixup(config)
        self.puzzles = Puzzles(config, steps_per_epoch, world.device)

    @property
    def trained(self) -> Any:
        """The model that is validated and exported: the average of the weights, if it is kept."""
        return self.average.module if self.average is not None else self.model

    def train_step(self, step: int, images: Tensor, labels: Tensor) -> Tensor:
        """One update; (loss, cross-entropy, DAL, accuracy, gradient norm), still on the device."""
        # timm's mixup and drop path draw from the libraries' own generators
        seed_libraries(derive_seed("step", self.config.seed, step, self.world.rank))
        if self.mix is not None:
            images, labels = self.mix(images, labels)
        puzzle = self.puzzles.at(step)
        images = apply(puzzle, images, self.config.model.patch_size)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step, self.steps_per_epoch)
        weight = torch.tensor(
            dal_weight(self.config, step, self.steps_per_epoch), device=images.device
        )
        with self._autocast():
            loss, numbers = self.objective(images, labels, puzzle.mask, weight)
        loss.backward()
        largest = self.config.recipe.clip_grad
        norm = nn.utils.clip_grad_norm_(
            self.model.parameters(), math.inf if largest is None else largest, foreach=True
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.model)
        return torch.cat((numbers, norm.detach().view(1)))

    @torch.no_grad()
    def validated(self, batches: Batches) -> dict[str, float]:
        """Top-1 in percent on these images, unshuffled; then training can go on."""
        model = self.trained.eval()
        right = torch.zeros(2, device=self.world.device)
        for pixels, labels in batches.in_order():
            with self._autocast():
                predicted = model(pixels).argmax(-1)
            right += torch.stack(((predicted == labels).sum(), torch.tensor(len(labels)).to(right)))
        right = self.world.mean(right)
        self.objective.train()
        return {self.measure: round(float(100 * right[0] / right[1]), 4)}

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bfloat16)

    def finite(self) -> bool:
        return bool(torch.stack([p.isfinite().all() for p in self.model.parameters()]).all())

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict() if self.average is not None else None,
        }

    def restore(self, stored: TrainingCheckpoint, path: Path) -> None:
        """Continue from what `state` returned in an earlier process; path: of its checkpoint."""
        check_weights(stored.model, self.model.state_dict(), path, "model")
        self.model.load_state_dict(stored.model)
        if self.average is not None:
            kept = stored.average or {}
            check_weights(kept, self.average.state_dict(), path, "average")
            self.average.load_state_dict(kept)
        own = self.optimizer.state_dict()["param_groups"]  # they follow from the config
        with STATE.reading(path):
            moments = {"state": stored.optimizer["state"], "param_groups": own}
            self.optimizer.load_state_dict(moments)
            for parameter, found in self.optimizer.state.items():
                like = {name: parameter if found[name].ndim else found[name] for name in found}
                check_weights(found, like, path, "optimizer")


def has_bfloat16() -> bool:
    """Whether the library that multiplies for torch (oneDNN) knows bfloat16 on this CPU."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported and torch.backends.mkldnn.is_available() and supported())


def build_mixup(config: TrainingConfig) -> Mixup | None:
    augmentation = config.augmentation
    if not augmentation.mixup and not augmentation.cutmix:
        return None
    return Mixup(
        mixup_alpha=augmentation.mixup,
        cutmix_alpha=augmentation.cutmix,
        label_smoothing=config.recipe.label_smoothing,
        num_classes=config.model.num_classes,
    )
