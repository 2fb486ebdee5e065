"""One Vision Transformer for every row of the paper's tables: a plain one, plus what MJP adds; and
what every other network offers as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.schema import Size
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.sizes import DalKind, LowRank, Variant
from mjp_privacy.models.vit import (
    CHANNELS,
    AdaptedLinear,
    Block,
    ClosedFormBlock,
    LocalizationRegressor,
    PatchEmbedding,
    copied,
    start_,
    start_linear_layers,
    token_norm,
)

CLASS_START_STD = 1e-6  # of the class token, which timm starts near zero
PositionEmbedding = Literal["learned", "exposed", "strict"]
FirstBlock = Literal["intact", "closed_form"]


@dataclass(frozen=True)
class CheckpointReport:
    """How a checkpoint was loaded: printed by a run, and stored with its rows."""

    source: str
    sha256: str
    layout: str  # the name of the file's `layouts.Layout`, or `random`
    missing: tuple[str, ...] = ()  # in the model, not in the file; `notes` say how they are filled
    unexpected: tuple[str, ...] = ()  # in the file, not used by the model
    beside: tuple[str, ...] = ()  # other entries of the file: optimizer, config, ...
    notes: tuple[str, ...] = ()  # part of a run_id: rewording one gives its cells new rows
    stored_as: str = ""  # the type of the file's numbers where it is not float32


@dataclass(frozen=True)
class ModelCard:
    """The facts about a loaded model that table rows state."""

    name: str
    architecture: str
    img_size: Size
    resize: int | None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    trained_gamma: float | None
    checkpoint: CheckpointReport
    norm_eps: float | None = None  # stated, with the activation, of a network other than timm's
    activation: str | None = None


class Network(nn.Module):
    """What every network offers to those who train, simulate, attack and measure.

    family                       vit, timm, or one of `loading.NETWORKS`
    patch_size, grid, tokens     pixels along a patch, patches down and across, tokens of block 0
    table, before                positions (1, rows, D): the patches' rows stand behind `before`
    unk_embed, dal_regressor     what MJP adds, or None
    forward_features, forward_head, forward(x, mask)

    What reads more of a plain ViT asks for `family == "vit"` first.
    """

    card: ModelCard
    patch_embed: Any
    patch_size: int
    embed_dim: int
    grid: Grid
    before: int
    other_size: tuple[int, int] | None = None
    """Height and width of pictures of as many patches that a live network takes, too, where nothing
    shows those of its pictures."""
    unk_embed: nn.Parameter | None
    dal_regressor: LocalizationRegressor | None

    def normalize(self, images: Tensor) -> Tensor:
        """Images in [0, 1] -> the normalised input of the network."""
        mean, std = self._pixels(images)
        return (images - mean) / std

    def denormalize(self, x: Tensor) -> Tensor:
        """The inverse of `normalize`; values outside [0, 1] are not clipped."""
        mean, std = self._pixels(x)
        return x * std + mean

    def _pixels(self, like: Tensor) -> Tensor:
        """Mean and std (2, C, 1, 1), made in the precision of `like`: float64 numbers must not
        pass through float32."""
        numbers = (self.card.mean, self.card.std)
        return torch.tensor(numbers, dtype=like.dtype, device=like.device)[..., None, None]

    @property
    def rows_of_patches(self) -> slice:
        """The rows of the table of positions that belong to the patches."""
        return slice(self.before, self.before + self.grid.patches)

    @property
    def token_width(self) -> int:
        """Of the tokens that block 0 is given."""
        return self.embed_dim

    @property
    def other_tokens(self) -> str:
        """Why block 0's tokens are not one for each embedded patch, of its width; or ""."""
        return ""

    @property
    def whole_size(self) -> tuple[int, int] | None:
        """Height and width of its pictures, where they are no whole patches and the convolution
        never sees what is beyond."""
        size: tuple[int, int] | None = getattr(self.patch_embed, "whole_size", None)
        return size

    @property
    def like(self) -> Tensor:
        """A parameter, which tells the network's device and precision."""
        return next(self.parameters())

    def probe(self, purpose: str = "", count: int = 1) -> Tensor:
        """Inputs (count, C, H, W) by which the network is asked what it does: random ones that are
        drawn for a purpose, or zeros."""
        shape = (count, self.channels, *self.grid.pixels(self.patch_size))
        if not purpose:
            return self.like.new_zeros(shape)
        return torch.randn(shape, generator=torch_generator(purpose)).to(self.like)

    @property
    def channels(self) -> int:
        """Of the pictures whose patches are embedded: 3, or 1 for grey ones."""
        projection = getattr(getattr(self, "patch_embed", None), "proj", None)
        return int(getattr(projection, "in_channels", CHANNELS))

    @property
    def patch_norms(self) -> tuple[nn.LayerNorm | None, nn.Module | None]:
        """The norms of each patch before it is embedded, and of its embedding."""
        embed = getattr(self, "patch_embed", None)
        before = getattr(getattr(embed, "proj", None), "norm", None)
        behind = getattr(embed, "norm", None)
        return before, behind if behind is not None and token_norm(behind) else None

    @property
    def patch_bias(self) -> Tensor:
        """The patch embedding's bias (D,): zeros where it has none."""
        bias: Tensor | None = self.patch_embed.proj.bias
        return self.like.new_zeros(self.embed_dim) if bias is None else bias

    @property
    def table(self) -> Tensor:
        """The table of positions (1, rows, D)."""
        raise NotImplementedError

    def positions(self, mask: Tensor | None = None) -> Tensor:
        """(1 or B, rows, D): the table with E_unk in the masked rows, the others' as they are."""
        table = self.table
        if mask is None or self.unk_embed is None:
            return table
        hidden, own = mask.to(table.device).reshape(-1, mask.shape[-1], 1), self.rows_of_patches
        patches = torch.where(hidden, self.unk_embed, table[:, own])
        others = table.expand(patches.shape[0], -1, -1)
        return torch.cat((others[:, : own.start], patches, others[:, own.stop :]), dim=1)

    def dal_loss(self, mask: Tensor | None = None, *, normalize: bool = False) -> Tensor:
        """L_DAL: the mean |target - prediction| over the unmasked positions and both coordinates, 0
        where none is; for a batch of masks, the mean over its rows."""
        target, prediction, visible = self.localize(mask, normalize=normalize)
        weights = visible.to(prediction.dtype).unsqueeze(-1)
        error = ((target - prediction).abs() * weights).sum((-2, -1))
        return (error / (2 * weights.sum((-2, -1))).clamp(min=1)).mean()

    def localize(
        self, mask: Tensor | None, *, normalize: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Target (row and column, from 0, or normalised from 0 to 1) and prediction (..., N, 2) of
        all positions, and which (..., N) of them are not masked."""
        if mask is None:
            mask = torch.zeros(self.grid.patches, dtype=torch.bool, device=self.like.device)
        check_mask(mask, self.grid.patches)
        if self.dal_regressor is None:
            raise UserError(
                "This model has no localization regressor. Load it with dal='linear', 'nonlinear' "
                "or 'pca', or from a checkpoint that holds one (`dlocr.*`)."
            )
        embeddings = self.table[0, self.rows_of_patches].expand(*mask.shape, -1)
        visible = ~mask.to(embeddings.device)
        prediction = self.dal_regressor(embeddings, visible)
        index = torch.arange(self.grid.patches, device=prediction.device)
        target = torch.stack((index // self.grid.columns, index % self.grid.columns), -1).double()
        if normalize:
            target = target / target.new_tensor(self.grid)
        return target.to(prediction.dtype), prediction, visible


class MJPVisionTransformer(Network):
    """Patches, a class token, one table of positions, blocks, and a head on the class token.

    MJPVisionTransformer(img_size=224, patch_size=16, embed_dim=192, depth=12, num_heads=3,
    num_classes=1000) has the parameters of timm's vit_tiny_patch16_224, the same random start from
    the same seed, and the same outputs bit for bit. The other arguments are additions:

    position_embedding  `learned`, or one of two readings of "without PEs": `exposed` (the table is
                        fixed at zero and its gradient is still uploaded, which APRIL needs) and
                        `strict` (there is no table, so nothing of it is uploaded).
    unknown_embedding   `unk_embed` (1, 1, D) replaces the position embedding of masked patches.
                        Without it a mask is ignored: shuffled patches keep their own positions.
    index_embedding     `index_embed` (1, N+1, D), a second table that is never masked (IDX).
    dal                 the localization regressor: none, pca, linear or nonlinear.
    first_block         `closed_form`: the model is built with a block 0 that has neither norm1 nor
                        residuals.
    variant             where other libraries' ViTs differ from timm's: `sizes.Variant`.
    """

    index_embed: nn.Parameter | None
    dist_token: nn.Parameter | None
    dist_pos_embed: nn.Parameter | None
    family: ClassVar[str] = "vit"  # `sizes.Family`: other networks of Table 1 stand beside it
    before: int = 1  # rows of the table before the patches': the class token's
    prefix: ClassVar[int] = 1  # tokens of block 0 before the patches': the class token
    adapters: LowRank | None = None  # beside its linear layers (`with_adapters`)

    def __init__(
        self,
        *,
        img_size: Size,
        patch_size: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        num_classes: int,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        position_embedding: PositionEmbedding = "learned",
        unknown_embedding: bool = False,
        index_embedding: bool = False,
        dal: DalKind = "none",
        first_block: FirstBlock = "intact",
        variant: Variant | None = None,
    ) -> None:
        super().__init__()
        if position_embedding != "learned" and (unknown_embedding or dal != "none"):
            raise UserError(
                "A model without position embeddings has nothing to mask or to localize: expected "
                f"unknown_embedding=False and dal='none' with position_embedding="
                f"{position_embedding!r}, got unknown_embedding={unknown_embedding}, dal={dal!r}."
            )
        self.variant = variant = variant or Variant()
        self.position_embedding, self.first_block = position_embedding, first_block
        self.dal_kind = dal
        self.embed_dim, self.num_classes = embed_dim, num_classes
        self.patch_size, self.grid = patch_size, Grid.of(img_size, patch_size)
        rows = self.grid.patches + 1
        self.tokens = rows + int(variant.distillation_token)  # that block 0 sees
        self.patch_embed = PatchEmbedding(img_size, patch_size, embed_dim, bias=variant.patch_bias)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        strict = position_embedding == "strict"
        self.pos_embed = None if strict else nn.Parameter(torch.empty(1, rows, embed_dim))
        eps, hidden = variant.norm_eps, int(embed_dim * mlp_ratio)
        self.norm_pre = nn.LayerNorm(embed_dim, eps=eps) if variant.pre_norm else nn.Identity()
        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        self.blocks = nn.Sequential(
            *(Block(embed_dim, num_heads, hidden, variant, rate) for rate in rates)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=eps)
        self.head: nn.Module = (
            nn.Linear(embed_dim, num_classes, bias=variant.head_bias)
            if num_classes
            else nn.Identity()
        )
        if not self.cls_token.is_meta:  # in timm's order; an outline has no values
            if self.pos_embed is not None:
                start_(self.pos_embed)
            nn.init.normal_(self.cls_token, std=CLASS_START_STD)
            start_linear_layers(self)
        self.unk_embed = _table(1, embed_dim) if unknown_embedding else None
        self.index_embed = _table(rows, embed_dim) if index_embedding else None
        self.dal_regressor = LocalizationRegressor(embed_dim, dal) if dal != "none" else None
        self.dist_token = _table(1, embed_dim) if variant.distillation_token else None
        self.dist_pos_embed = _table(1, embed_dim) if variant.distillation_token else None
        if position_embedding == "exposed":
            nn.init.zeros_(self.table)
        if first_block == "closed_form":
            self.blocks[0] = ClosedFormBlock(self.blocks[0])  # type: ignore[arg-type]

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimiser should not decay: timm's and the new tables."""
        tables = {"pos_embed", "unk_embed", "index_embed", "dist_pos_embed"}
        return {"cls_token", "dist_token", *tables}

    @property
    def table(self) -> Tensor:
        """The position table (1, N+1, D), class row first; a `strict` model has none."""
        assert self.pos_embed is not None
        return self.pos_embed

    # forward ----------------------------------------------------------------------------------

    def embed(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """z (B, tokens, D), the input of block 0, from normalised images x (B, C, H, W)."""
        patches = self.patch_embed(x)
        z = torch.cat((self.cls_token.expand(patches.shape[0], -1, -1), patches), dim=1)
        if self.index_embed is not None:
            z = z + self.index_embed
        if self.pos_embed is not None:
            z = z + self.positions(mask)
        if self.dist_token is not None and self.dist_pos_embed is not None:
            extra = self.dist_token + self.dist_pos_embed
            z = torch.cat((z, extra.expand(len(z), -1, -1)), dim=1)
        embedded: Tensor = self.norm_pre(z)
        return embedded

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The tokens (B, tokens, D) after the last norm; token 0 is [CLS]."""
        return self.norm(self.blocks(self.embed(x, mask)))

    def forward_head(self, tokens: Tensor) -> Tensor:
        """Logits (B, classes) from the tokens (B, tokens, D) after the last norm."""
        logits: Tensor = self.head(tokens[:, 0])
        return logits

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised images (B, C, H, W); mask (N,) or (B, N) bool, True = shuffled -> logits."""
        if mask is not None:
            check_mask(mask, self.grid.patches, len(x))
        return self.forward_head(self.forward_features(x, mask))


def check_mask(mask: Tensor, patches: int, batch: int | None = None) -> None:
    """Raise unless it is a mask of all patches, for each picture of a batch or for all of them."""
    *rows, last = mask.shape or (0,)
    fits = not rows or (len(rows) == 1 and (batch is None or rows[0] in (1, batch)))
    if mask.dtype != torch.bool or last != patches or not fits:
        raise UserError(
            f"Expected a bool mask over the {patches} patches (no class position), shape "
            f"({patches},) or ({batch or 'B'}, {patches}); got {mask.dtype} of "
            f"{tuple(mask.shape)}. True means shuffled."
        )


def _table(rows: int, dim: int) -> nn.Parameter:
    table = torch.empty(1, rows, dim)
    return nn.Parameter(table if table.is_meta else start_(table))


def with_closed_form_block(model: MJPVisionTransformer) -> MJPVisionTransformer:
    """A copy of the model with the altered block 0; a plain copy if it has that block already."""
    altered = copied(model)
    if altered.first_block == "closed_form":
        return altered
    altered.blocks[0] = ClosedFormBlock(altered.blocks[0])  # type: ignore[arg-type]
    altered.first_block = "closed_form"
    return altered


# low-rank adapters (LoRA) -------------------------------------------------------------------------

Model = TypeVar("Model", bound=MJPVisionTransformer)


def with_adapters(model: Model, adapters: LowRank, seed: int) -> Model:
    """A copy of the model with an adapter beside each target, drawn from the seed; a model that
    has such adapters already, as after fine-tuning, keeps the numbers in them.

    with_adapters(load_model("cifar_vit"), LowRank(4), seed=0) has blocks.0.attn.qkv.lora_A.weight
    """
    adapted = copied(model)
    if (own := adapted.adapters) is not None:
        if (own.rank, own.targets, own.scale) != (adapters.rank, adapters.targets, adapters.scale):
            raise UserError(
                f"client.lora: expected the adapters that the model has, {own.text}, got "
                f"{adapters.text}. Give the same, or a model without adapters."
            )
        return adapted
    adapted.adapters = adapters
    for name, layer in list(adapted.blocks.named_modules(prefix="blocks")):
        owner, _, last = name.rpartition(".")
        if last in adapters.targets and isinstance(layer, nn.Linear):
            smaller = min(layer.in_features, layer.out_features)
            if adapters.rank > smaller:
                raise UserError(
                    f"adapters, rank: expected at most {smaller}, the smaller side of "
                    f"{name}.weight, got {adapters.rank}. Give a smaller rank."
                )
            beside = AdaptedLinear(layer, adapters.rank, adapters.scale)
            if not layer.weight.is_meta:
                beside.start(torch_generator("adapters", name, seed), adapters.spread)
            setattr(adapted.get_submodule(owner), last, beside)
    return adapted
