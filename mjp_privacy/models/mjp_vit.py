"""One Vision Transformer for every row of the paper's tables: a plain one, plus what MJP adds."""

from __future__ import annotations

import copy
import random
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.sizes import LowRank, Variant
from mjp_privacy.models.vit import Block, ClosedFormBlock, VisionTransformer, start_

DalKind = Literal["none", "pca", "linear", "nonlinear"]
PCA_ITERATIONS = 5


def grid_positions(
    grid: int, *, normalize: bool = False, device: torch.device | None = None
) -> Tensor:
    """(N, 2) row and column of every patch, made on `device` so that nothing has to be copied."""
    index = torch.arange(grid * grid, device=device)
    positions = torch.stack((index // grid, index % grid), dim=-1).double()
    return positions / grid if normalize else positions


class LocalizationRegressor(nn.Module):
    """g of the paper: position embedding (..., N, D) -> position (..., N, 2).

    linear     one layer
    nonlinear  D -> D -> 2 with a ReLU, the authors' MLP
    pca        no parameters: projection onto the two leading principal directions of the visible
               embeddings, found by five steps of subspace iteration from a fixed start (the
               authors' start is random, so theirs is not reproducible)
    """

    def __init__(self, dim: int, kind: DalKind) -> None:
        super().__init__()
        self.kind = kind
        self.layers: nn.Module
        if kind == "nonlinear":
            self.layers = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 2))
        elif kind == "linear":
            self.layers = nn.Linear(dim, 2)
        else:
            self.layers = nn.Identity()

    def forward(self, embeddings: Tensor, visible: Tensor) -> Tensor:
        """Positions of all rows; `visible` (..., N) says which rows the PCA is computed from.

        The other kinds treat each row by itself and do not read `visible`.
        """
        if self.kind == "pca":
            return embeddings @ principal_directions(embeddings, visible)
        return self.layers(embeddings)


def principal_directions(embeddings: Tensor, visible: Tensor) -> Tensor:
    """(..., D, 2) leading principal directions of the visible rows; differentiable.

    Their signs are fixed: the entry of largest magnitude is positive. With fewer than three visible
    rows the directions are zero: such rows span no plane, and the decompositions would have an
    infinite derivative.
    """
    weights = visible.to(embeddings.dtype).unsqueeze(-1)
    number = weights.sum(-2, keepdim=True)
    mean = (embeddings * weights).sum(-2, keepdim=True) / number.clamp(min=1)
    centred = torch.where(number > 2, (embeddings - mean) * weights, 0.0)
    rng = random.Random(0)  # Python's, because under vmap torch draws anew for every sample
    start = [[rng.gauss(0, 1), rng.gauss(0, 1)] for _ in range(embeddings.shape[-1])]
    basis = torch.linalg.qr(centred.mT @ (centred @ torch.tensor(start).to(embeddings))).Q
    for _ in range(PCA_ITERATIONS):
        basis = torch.linalg.qr(centred.mT @ (centred @ basis)).Q
    projected = centred @ basis
    rotation = torch.linalg.eigh(projected.mT @ projected).eigenvectors.flip(-1)
    directions = basis @ rotation
    largest = directions.gather(-2, directions.abs().argmax(-2, keepdim=True))
    return torch.where(number > 2, directions * largest.sign(), 0.0)


def masked_l1(target: Tensor, prediction: Tensor, visible: Tensor) -> Tensor:
    """Mean |target - prediction| over visible rows and both coordinates; 0 if no row is visible."""
    weights = visible.to(prediction.dtype).unsqueeze(-1)
    error = (target.to(prediction) - prediction).abs() * weights
    return error.sum((-2, -1)) / (2 * weights.sum((-2, -1))).clamp(min=1)


PositionEmbedding = Literal["learned", "exposed", "strict"]
FirstBlock = Literal["intact", "closed_form"]


class MJPVisionTransformer(VisionTransformer):
    """The plain ViT under timm's parameter names, with these additions:

    position_embedding  `learned`, or one of two readings of "without PEs": `exposed` (the table is
                        fixed at zero and its gradient is still uploaded, which APRIL needs) and
                        `strict` (there is no table, so nothing of it is uploaded).
    unknown_embedding   `unk_embed` (1, 1, D) replaces the position embedding of masked patches.
                        Without it a mask is ignored: shuffled patches keep their own positions.
    index_embedding     `index_embed` (1, N+1, D), a second table that is never masked (IDX).
    dal                 the localization regressor: none, pca, linear or nonlinear.
    first_block         `closed_form`: the model is built with a block 0 that has neither norm1 nor
                        residuals.
    variant             where other libraries' ViTs differ from timm's: `variant.Variant`.
    """

    unk_embed: nn.Parameter | None
    index_embed: nn.Parameter | None
    dist_token: nn.Parameter | None
    dist_pos_embed: nn.Parameter | None
    family: ClassVar[str] = "vit"  # `sizes.Family`: other networks of Table 1 stand beside it
    before: ClassVar[int] = 1  # rows of the table before the patches': the class token's
    prefix: ClassVar[int] = 1  # tokens of block 0 before the patches': the class token
    adapters: LowRank | None = None  # beside its linear layers (`adapters.with_adapters`)

    def __init__(
        self,
        *,
        position_embedding: PositionEmbedding = "learned",
        unknown_embedding: bool = False,
        index_embedding: bool = False,
        dal: DalKind = "none",
        first_block: FirstBlock = "intact",
        variant: Variant | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(has_positions=position_embedding != "strict", variant=variant, **sizes)
        if position_embedding != "learned" and (unknown_embedding or dal != "none"):
            raise UserError(
                "A model without position embeddings has nothing to mask or to localize: expected "
                f"unknown_embedding=False and dal='none' with position_embedding="
                f"{position_embedding!r}, got unknown_embedding={unknown_embedding}, dal={dal!r}."
            )
        self.position_embedding = position_embedding
        self.dal_kind = dal
        rows = self.patch_embed.num_patches + 1
        self.unk_embed = _table(1, self.embed_dim) if unknown_embedding else None
        self.index_embed = _table(rows, self.embed_dim) if index_embedding else None
        self.dal_regressor = LocalizationRegressor(self.embed_dim, dal) if dal != "none" else None
        distilled = self.variant.distillation_token
        self.dist_token = _table(1, self.embed_dim) if distilled else None
        self.dist_pos_embed = _table(1, self.embed_dim) if distilled else None
        if position_embedding == "exposed":
            nn.init.zeros_(self.table)
        if first_block == "closed_form":
            self.blocks[0] = ClosedFormBlock(self.blocks[0])  # type: ignore[arg-type]

    @property
    def first_block(self) -> FirstBlock:
        """Whether block 0 is the intact one or the altered one without norm1 and residuals."""
        return "closed_form" if isinstance(self.blocks[0], ClosedFormBlock) else "intact"

    @property
    def grid(self) -> int:
        """Number of patches along a side, so that N = grid²."""
        return int(self.patch_embed.grid_size[0])

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return int(self.patch_embed.patch_size[0])

    @property
    def tokens(self) -> int:
        """How many tokens block 0 sees: the patches, the class token, a distillation token."""
        return int(self.patch_embed.num_patches) + 1 + int(self.variant.distillation_token)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimiser should not decay: timm's and the new tables."""
        return {*super().no_weight_decay(), "unk_embed", "index_embed", "dist_pos_embed"}

    @property
    def table(self) -> Tensor:
        """The position table (1, N+1, D), class row first; a `strict` model has none."""
        assert self.pos_embed is not None
        return self.pos_embed

    # forward ----------------------------------------------------------------------------------

    def positions(self, mask: Tensor | None = None) -> Tensor:
        """(1 or B, N+1, D): the table with E_unk in the masked rows, the class row as it is."""
        table = self.table
        if mask is None or self.unk_embed is None:
            return table
        rows = mask.to(table.device).reshape(-1, mask.shape[-1], 1)
        patches = torch.where(rows, self.unk_embed, table[:, 1:])
        return torch.cat((table[:, :1].expand(patches.shape[0], -1, -1), patches), dim=1)

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

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised images (B, C, H, W); mask (N,) or (B, N) bool, True = shuffled -> logits."""
        if mask is not None:
            check_mask(mask, self.patch_embed.num_patches, len(x))
        return self.forward_head(self.forward_features(x, mask))

    # localization -----------------------------------------------------------------------------

    def dal(self, mask: Tensor | None = None, *, normalize: bool = False) -> tuple[Tensor, Tensor]:
        """Target and prediction of the unmasked positions.

        A mask (N,) gives (n, 2), where n patches are unmasked; (B, N) gives (B, n, 2) and needs the
        same n in each row.
        """
        hidden = self._hidden(mask)
        target, prediction = self._localize(hidden, normalize)
        if hidden.ndim == 1:
            return target[~hidden], prediction[~hidden]
        counts = (~hidden).sum(-1)
        if not bool((counts == counts[0]).all()):
            raise UserError(
                "dal() returns one tensor, so every row of the mask must leave the same number of "
                f"patches; got {counts.tolist()}. Call it row by row, or use dal_loss()."
            )
        shape = (hidden.shape[0], int(counts[0]), 2)
        target = target.expand_as(prediction)
        return target[~hidden].reshape(shape), prediction[~hidden].reshape(shape)

    def dal_loss(self, mask: Tensor | None = None, *, normalize: bool = False) -> Tensor:
        """L_DAL over the unmasked positions; for a batch of masks, the mean over its rows."""
        hidden = self._hidden(mask)
        target, prediction = self._localize(hidden, normalize)
        return masked_l1(target, prediction, ~hidden).mean()

    def _hidden(self, mask: Tensor | None) -> Tensor:
        patches = self.patch_embed.num_patches
        if mask is None:
            return torch.zeros(patches, dtype=torch.bool, device=self.cls_token.device)
        check_mask(mask, patches)
        return mask.to(self.cls_token.device)

    def _localize(self, hidden: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
        if self.dal_regressor is None:
            raise UserError(
                "This model has no localization regressor. Load it with dal='linear', 'nonlinear' "
                "or 'pca', or from a checkpoint that holds one (`dlocr.*`)."
            )
        embeddings = self.table[0, 1:].expand(*hidden.shape, -1)
        prediction = self.dal_regressor(embeddings, ~hidden)
        target = grid_positions(self.grid, normalize=normalize, device=prediction.device)
        return target.to(prediction.dtype), prediction


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
    altered = copy.deepcopy(model)
    if altered.first_block == "closed_form":
        return altered
    block = altered.blocks[0]
    assert isinstance(block, Block)
    altered.blocks[0] = ClosedFormBlock(block)
    return altered
