"""The parts of a plain Vision Transformer, with the parameter names and the numbers of timm's.

They are written here because `import timm` takes two seconds and 900 modules (torchvision, torch's
compiler, SymPy), of which no attack needs any.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.nn.utils import skip_init
from torch.overrides import TorchFunctionMode

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.schema import Size, height_width
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.sizes import Activation, Variant

CHANNELS = 3
START_STD = 0.02  # of tables and linear layers
PCA_ITERATIONS = 5


def start_(table: Tensor) -> Tensor:
    """Fill with normal numbers of START_STD, at most 2: the inverse of their distribution at
    uniform ones, as timm draws them. torch's `trunc_normal_` draws others from 2.15 on."""
    with torch.no_grad():
        return table.uniform_(-1, 1).erfinv_().mul_(START_STD * math.sqrt(2)).clamp_(-2, 2)


def start_linear_layers(network: nn.Module) -> None:
    """Draw the linear layers of a network, so that a seed means the same numbers in every version
    of torch; nothing is drawn for an outline."""
    for module in network.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_meta:
            start_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class QuickGELU(nn.Module):
    """CLIP's activation."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATION_LAYERS: Mapping[Activation, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "quick_gelu": QuickGELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "relu": nn.ReLU,
}


class PatchEmbedding(nn.Module):
    """Images (B, 3, H, W) to one embedding for each patch, (B, N, D), row by row."""

    def __init__(self, img_size: Size, patch_size: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.img_size = height_width(img_size)
        self.num_patches = Grid.of(img_size, patch_size).patches
        self.proj = nn.Conv2d(CHANNELS, width, patch_size, stride=patch_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[-2:] != self.img_size:
            raise UserError(
                f"Expected images (B, {CHANNELS}, {self.img_size[0]}, {self.img_size[1]}), got "
                f"{tuple(x.shape)}. Resize the images, or load the model with their img_size."
            )
        embedded: Tensor = self.proj(x)
        return embedded.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention with one linear layer for query, key and value."""

    def __init__(self, width: int, heads: int, *, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.fused_attn = True  # torch's kernel; False: plain products
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused_attn:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        projected: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return projected


class Mlp(nn.Module):
    """The two-layer network of a block."""

    def __init__(self, width: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = ACTIVATION_LAYERS[activation]()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        widened: Tensor = self.fc2(self.act(self.fc1(x)))
        return widened


class DropPath(nn.Module):
    """In training, leaves out a branch for some images and scales it up for the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty(len(x), *(1 for _ in x.shape[1:])).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


class Block(nn.Module):
    """Attention and the two-layer network, each after a norm and beside a residual connection."""

    def __init__(
        self, width: int, heads: int, hidden: int, variant: Variant, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=variant.norm_eps)
        self.attn = Attention(width, heads, bias=variant.qkv_bias)
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=variant.norm_eps)
        self.mlp = Mlp(width, hidden, variant.activation)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x (B, tokens, D) -> (B, tokens, D)."""
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        attended: Tensor = x + self.drop_path2(self.mlp(self.norm2(x)))
        return attended


class ClosedFormBlock(nn.Module):
    """A block without norm1 and residuals; its parameters keep their names."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attn = block.attn
        self.norm2 = block.norm2
        self.mlp = block.mlp
        self.drop_path2 = block.drop_path2

    def forward(self, z: Tensor) -> Tensor:
        """z (B, N+1, D) -> (B, N+1, D)."""
        mixed: Tensor = self.drop_path2(self.mlp(self.norm2(self.attn(z))))
        return mixed


class AdaptedLinear(nn.Linear):
    r"""A linear layer with an adapter beside it; its own weight and bias keep their names.

        y = W x + b + (alpha / rank) B A x,      A: LAYER.lora_A.weight (rank, in)
                                                 B: LAYER.lora_B.weight (out, rank)

    The names are PEFT's. A client with adapters trains A and B, often the classifier as well; all
    other parameters stay as they are and are never sent. As in PEFT A starts uniform within
    1 / sqrt(in) and B at zero, so that the network computes at first what it did without them.
    While B is zero, so is the gradient of every A.
    """

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        with torch.device("meta"):  # nothing is drawn; the layer's own weight and bias stay
            super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight, self.bias, self.scale = layer.weight, layer.bias, scale
        like: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.lora_A = skip_init(nn.Linear, layer.in_features, rank, bias=False, **like)
        self.lora_B = skip_init(nn.Linear, rank, layer.out_features, bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        adapted: Tensor = super().forward(x) + self.scale * self.lora_B(self.lora_A(x))
        return adapted

    def start(self, generator: torch.Generator, spread: float) -> None:
        """Draw the adapter: numbers that are equal for all precisions, and for other targets."""
        first, second = self.lora_A.weight, self.lora_B.weight
        drawn = torch.rand(first.shape, generator=generator, dtype=torch.float64)
        moved = torch.randn(second.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            first.copy_(1 / math.sqrt(self.in_features) * (2 * drawn - 1))
            second.copy_(spread * moved)


class LocalizationRegressor(nn.Module):
    """g of the paper: position embedding (..., N, D) -> position (..., N, 2).

    linear     one layer
    nonlinear  D -> D -> 2 with a ReLU, the authors' MLP
    pca        no parameters: projection onto the two leading principal directions of the visible
               embeddings, found by five steps of subspace iteration from a fixed start (the
               authors' start is random, so theirs is not reproducible)
    """

    def __init__(self, dim: int, kind: str) -> None:
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


# copies to work on --------------------------------------------------------------------------------

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class _Detached(TorchFunctionMode):
    """In this block what was computed is copied without what it was computed from, wherever a
    network keeps it; torch copies no such tensors."""

    def __torch_function__(
        self, call: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if call is Tensor.__deepcopy__ and is_functorch_wrapped_tensor(args[0]):
            return args[0]  # of a transformation that has ended: it holds nothing any more
        if call is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return call(*args, **(kwargs or {}))


def copied(module: AnyModule) -> AnyModule:
    """A copy of a network or of a part of one, also where parts keep what they last computed."""
    with _Detached():
        return deepcopy(module)


# norms of tokens, whatever they are called --------------------------------------------------------


class TokenNorm(NamedTuple):
    """weight * x / (the root of its mean square) + bias of tokens x, less their mean where it
    `centres`: a LayerNorm, or an RMSNorm."""

    weight: Tensor  # (D,)
    bias: Tensor  # (D,)
    centres: bool


FAR = 1e6
"""Length of what a norm is told by: its eps does not show."""
NORM_AGREES = 1e-5  # relative error up to which a part computes a norm


def token_norm(part: nn.Module) -> TokenNorm | None:
    """What a part of a network computes if that is a norm of tokens, whatever it is called; else
    None. Of an outline, whose weights hold no numbers, the name has to do."""
    held = [*part.parameters()]
    shapes = {tuple(one.shape) for one in held}
    stated = getattr(part, "normalized_shape", None)
    stated = (stated,) if isinstance(stated, int) else tuple(stated or ())
    shape = stated or next(iter(shapes), ())
    if [*part.children()] or len(shape) != 1 or shapes - {shape} or isinstance(part, nn.Linear):
        return None
    named = "norm" in type(part).__name__.lower()
    if isinstance(part, nn.LayerNorm) or (named and held and held[0].is_meta):
        weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        like = torch.ones(shape, dtype=torch.float64) if weight is None else weight.detach()
        without = torch.zeros_like(like) if bias is None else bias.detach()
        return TokenNorm(like, without, isinstance(part, nn.LayerNorm))
    generator = torch_generator("tokens by which a norm is told")
    x = FAR * (0.5 + torch.randn(4, *shape, generator=generator, dtype=torch.float64))
    try:
        own = copied(part).cpu().double()
        with torch.no_grad():  # without hooks, which are copied
            out, back = own.forward(x), own.forward(-x)
            bias, scaled = (out + back)[0] / 2, (out - back) / 2
    except Exception:  # a part of another kind, whatever it takes
        return None
    for centres in (True, False):
        y = x - x.mean(1, keepdim=True) if centres else x
        y = y / y.square().mean(1, keepdim=True).sqrt()
        if scaled.shape == y.shape:
            weight = (scaled * y).sum(0) / y.square().sum(0)
            if _near(weight * y, scaled) and _near(weight * y + bias, out):
                return TokenNorm(weight, bias, centres)
    return None


def _near(one: Tensor, other: Tensor) -> bool:
    return bool(other.any()) and float((one - other).norm() / other.norm()) < NORM_AGREES


# what a layer is given ----------------------------------------------------------------------------


class _Reached(Exception):
    """A forward pass came to the layer at which it stops."""

    def __init__(self, given: Tensor) -> None:
        super().__init__("reached")
        self.given = given


def first_tensor(output: Any) -> Tensor:
    """What a block hands on, which may stand beside its attention's weights."""
    return output if isinstance(output, Tensor) else next(x for x in output if x is not None)


def pictures_first(layer: nn.Module, tokens: Tensor) -> Tensor:
    """Tokens (B, T, D) of what a layer sees; torch's own attention takes them as (T, B, D) where
    nothing else is said."""
    return tokens.transpose(0, 1) if getattr(layer, "tokens_first", False) else tokens


def input_of(network: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer of the network is given where the network is given x; nothing after it is run.

    input_of(model, model.blocks[0], x) are the tokens (B, T, D) of block 0
    """

    def stop(layer: nn.Module, given: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
        raise _Reached(next(iter((*given, *named.values()))))

    handle = layer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        network(x)
    except _Reached as reached:
        return pictures_first(layer, reached.given)
    finally:
        handle.remove()
    kind = type(getattr(network, "rest", network)).__name__
    raise UserError(
        f"{kind}: expected a network that calls each of its layers, got one that does not call "
        f"this one for a picture: {layer}. Give one that calls it and does not read its weights "
        "elsewhere."
    )
