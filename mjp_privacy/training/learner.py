"""What learns in a run: the network with its optimiser, one step of training, and its accuracy.

`trainer` repeats the steps; everything that the next step depends on is in `Learner.state`, the
number of the step and the config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from timm.data import Mixup
from timm.optim import param_groups_weight_decay
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.models import load_model
from mjp_privacy.models.families import build_other
from mjp_privacy.models.loading import outline_model
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.training.batches import Batches, find_examples, make_batches, seed_libraries
from mjp_privacy.training.config import Initial, TrainingConfig, other_sizes
from mjp_privacy.training.processes import World
from mjp_privacy.training.puzzles import Puzzles, apply
from mjp_privacy.training.run_files import STATE, TrainingCheckpoint, check_weights

# products in bfloat16 -----------------------------------------------------------------------------

_aten = torch.ops.aten
PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
}
"""What is slow: all products that a ViT, a Swin or a ResNet trains with, as long as its
attention is made of them (`learner` switches fused attention off)."""
REMARK = (
    "note: torch has no fast bfloat16 on this CPU: products are computed in float32 and rounded, "
    "as a CPU with instructions for it does, in little more time than float32 takes"
)


class RoundedProducts(TorchDispatchMode):
    """While it is entered, products of bfloat16 tensors on the CPU are computed in float32 and
    rounded to bfloat16, forwards and backwards: with RoundedProducts(): ...

    On CPUs where torch has no fast ones it multiplies the numbers one by one, and a step of a small
    ViT takes twelve times as long as in float32. What it computes is a float32 product of rounded
    numbers, rounded once more (but for the weights of a convolution, whose gradient it rounds image
    by image), and float32 products are fast on every CPU.
    """

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function not in PRODUCTS or not any(map(_is_rounded, args)):
            return function(*args, **(kwargs or {}))
        wide = (arg.float() if _is_rounded(arg) else arg for arg in args)
        result = function(*wide, **(kwargs or {}))
        if isinstance(result, Tensor):
            return result.bfloat16()
        return tuple(part if part is None else part.bfloat16() for part in result)


def _is_rounded(arg: object) -> bool:
    return isinstance(arg, Tensor) and arg.dtype == torch.bfloat16 and arg.device.type == "cpu"


def rounds_products(config: TrainingConfig, device: torch.device) -> bool:
    """Whether a training in bfloat16 needs `RoundedProducts` here. It is not compiled then, because
    compiled code calls the slow products itself."""
    slow = device.type == "cpu" and not has_bfloat16()
    return slow and config.recipe.precision == "bfloat16"


def has_bfloat16() -> bool:
    """Whether the library that multiplies for torch (oneDNN) knows bfloat16 on this CPU."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported and torch.backends.mkldnn.is_available() and supported())


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
    """Copy every tensor that the checkpoint has.

    A new E_unk starts at the mean position embedding; a new DAL regressor or index table stays
    random.
    """
    loaded = load_model(initial.model, **initial_arguments(initial, config))
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


def check_initial(config: TrainingConfig) -> None:
    """Raise where the weights to start from do not fit, as far as their names and shapes tell."""
    if config.initial is not None and config.family == "vit":
        arguments = initial_arguments(config.initial, config)
        outline_model(config.initial.model, whole=True, **arguments)


def initial_arguments(initial: Initial, config: TrainingConfig) -> dict[str, Any]:
    """How the weights to start from are loaded: as a model of the config's sizes; for a
    segmentation, whatever its classes are."""
    shape = config.model
    classes = ("num_classes",) if config.task == "classification" else ()
    sizes = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", *classes)
    return {
        **{name: getattr(shape, name) for name in (*sizes, "mean", "std")},
        "checkpoint": initial.checkpoint,
        "unknown_embedding": shape.unknown_embedding or None,
        "unknown_init": "mean_position",
    }


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
    check_initial: Callable[[TrainingConfig], None] = staticmethod(check_initial)
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
        self.bfloat16 = config.recipe.precision == "bfloat16"
        self.rounded = rounds_products(config, world.device)
        self.products: Any = RoundedProducts() if self.rounded else nullcontext()
        if self.bfloat16 and world.device.type == "cpu":
            for module in self.model.modules():  # fused attention takes seven times as long there
                if hasattr(module, "fused_attn"):
                    setattr(module, "fused_attn", False)  # noqa: B010  (mypy: a Module's attribute)
        self.optimizer = build_optimizer(self.model, config)
        decay = config.recipe.ema_decay
        self.average = ModelEmaV3(self.model, decay=decay) if decay else None
        self.objective: Any = self.loss(self.model, config)
        if config.recipe.compile and not self.rounded:
            self.objective = torch.compile(self.objective)
        if world.size > 1:
            self.objective = DistributedDataParallel(self.objective)
        self.mix = build_mixup(config)
        self.puzzles = Puzzles(
            config, steps_per_epoch, world.device, world.part(config.recipe.batch)
        )

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
        with self.products:
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
            with self.products, self._autocast():
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
