"""`load_module`: a live network of another library as this package's own, with the same outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.schema import Size, height_width
from mjp_privacy.models.checkpoint_files import WeightFile, tensors_sha256
from mjp_privacy.models.checkpoints import load_into, shape_of
from mjp_privacy.models.layouts import recognised
from mjp_privacy.models.live.networks import of_live
from mjp_privacy.models.live.parts import NoPatches, other_size
from mjp_privacy.models.loading import LoadedModel, build, with_card
from mjp_privacy.models.mjp_vit import PositionEmbedding
from mjp_privacy.models.network_parts import IN_SIZE, code_of, convolution_of, run_of
from mjp_privacy.models.sizes import Activation
from mjp_privacy.models.spec import ModelSpec, completed, overridden
from mjp_privacy.models.timm_networks import TimmNetwork
from mjp_privacy.models.vit import ACTIVATION_LAYERS, copied
from mjp_privacy.models.zoo import check_complete

HEADS = ("num_heads", "num_attention_heads")
INNER = ("module", "_orig_mod")  # DataParallel, torch.compile
PROBE = torch.linspace(-4, 4, 33)
TOLERANCE = 1e-4  # of the largest output
TINY = 1e-12
OUTPUTS = ("logits", "image_embeds", "pooler_output", "last_hidden_state")

Channels = float | Sequence[float] | None


@torch.inference_mode(False)
def load_module(
    module: nn.Module,
    *,
    mean: Channels = None,
    std: Channels = None,
    num_heads: int | None = None,
    img_size: Size | None = None,
) -> LoadedModel:
    """A copy of a live Vision Transformer, in eval mode on the CPU, with its `card`.

    load_module(torchvision.models.vit_b_32(), mean=0.5, std=0.5).card.architecture

    module  of timm (any with patches and, or without, a table of positions), torchvision,
            transformers (ViT, DeiT, CLIP, Dinov2, SigLIP and their kind) or open_clip; a model of
            this package is returned as it is. Of a model of pictures and text the visual tower is
            taken.
    mean, std   of the client's normalisation, one number or three; one of grey pictures. They are
                never guessed.
    num_heads   where the network does not say
    img_size    side, or height and width, of the client's pictures, where the network stretches
                its table of positions to them (transformers' Dinov2 and ViT, timm's
                dynamic_img_size), or they are no squares

    The copy is compared with the module on one random input, so that it never stands for a network
    that computes something else.
    """
    if img_size is not None:
        img_size = overridden(ModelSpec(type(module).__name__), {"img_size": img_size}).img_size
    while inner := [child for name, child in module.named_children() if name in INNER]:
        module = inner[0]
    if type(module).__module__.startswith("open_clip."):
        module = getattr(module, "visual", module)  # of CLIP
    given = {"mean": mean, "std": std}
    if isinstance(module, LoadedModel | TimmNetwork):
        card, facts = module.card, {**given, "img_size": img_size}
        asked = overridden(ModelSpec(card.name), facts)
        for key, value in facts.items():
            if value is not None and getattr(asked, key) != getattr(card, key):
                raise UserError(
                    f"{key}: expected that of the model's card, {getattr(card, key)}, got {value}. "
                    f"Leave it out, or load the model with {key}=… as the client made its pictures."
                )
        return cast(LoadedModel, module)
    refusal: UserError | None = None
    try:
        plain = _plain_copy(module, given, num_heads)
        projection = convolution_of(module)
        if img_size is None and projection is not None:
            with _evaluated_exactly(module):
                plain.other_size = other_size(module, plain.grid, projection)
        if img_size in (None, plain.card.img_size):
            return plain
    except UserError as error:
        if num_heads is not None:
            raise
        refusal = error
    pixels = _normalisation(module, given)

    def logits(returned: Any) -> Tensor:
        """The first of the tensors that the network may mean."""
        for answer in _answers(returned):
            return answer
        raise UserError(
            f"{type(module).__name__}: expected a network that returns a tensor (B, outputs), or "
            f"one among others, got {type(returned).__name__}. Give one that does."
        )

    try:  # the module with its own forward
        other = of_live(module, logits, **pixels, img_size=img_size)
    except NoPatches as error:
        raise error from refusal
    return cast(LoadedModel, other)


def _plain_copy(
    module: nn.Module, given: Mapping[str, Channels], num_heads: int | None
) -> LoadedModel:
    """The module as a plain ViT of this package; UserError where it computes something else."""
    source = type(module).__name__
    tensors = {name: p.detach().cpu() for name, p in module.named_parameters()}
    layout = recognised(tensors)
    names = {own: name for name in tensors for own in layout.own_names(name)}
    pixels = _normalisation(module, given)
    double = all(tensor.dtype == torch.float64 for tensor in tensors.values())
    dtype = torch.float64 if double else torch.float32
    state = {name: value.to(dtype) for name, value in layout.to_own(tensors).items()}
    shape = shape_of(state, source, classifies=False)
    spec = completed(replace(_facts(module, names, num_heads), **pixels), shape, layout, source)
    check_complete(spec, source)
    copy = build(spec, source, classifies=False).to(dtype)
    file = WeightFile(Path(source), tensors_sha256(state), tensors)
    copy = with_card(copy, spec, load_into(copy, state, file))
    check_same_outputs(module, copy, next(iter(_around(module, names, "head.weight")), None))
    return copy


# what the network says of itself ------------------------------------------------------------------


def _around(module: nn.Module, names: Mapping[str, str], own: str) -> list[nn.Module]:
    """The modules that a parameter stands in, from its own layer outwards; none: no such.

    names: the network's own of this package's
    """
    parts = names.get(own, "").split(".")[:-1]
    return [module.get_submodule(".".join(parts[:end])) for end in range(len(parts), 0, -1)]


def _facts(module: nn.Module, names: Mapping[str, str], num_heads: int | None) -> ModelSpec:
    """What the network's attributes say and its tensors do not: heads, eps, activation, and what
    this package's own networks may have beside."""
    source = type(module).__name__
    heads = num_heads or _attribute(_around(module, names, "blocks.0.attn.qkv.weight"), HEADS)
    if heads is None:
        raise UserError(
            f"{source}: expected a network whose attention states its number of heads as one of "
            f"{', '.join(HEADS)}, got none. Give num_heads=…."
        )
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    positions: PositionEmbedding = "learned" if "pos_embed" in names else "strict"
    return ModelSpec(
        source,
        img_size=size if isinstance(size, tuple) else None,
        num_heads=heads,
        norm_eps=_attribute(_around(module, names, "blocks.0.norm1.weight"), ("eps",)),
        # Where no part tells, the comparison of outputs does.
        activation=_activation(_around(module, names, "blocks.0.mlp.fc1.weight")) or "gelu",
        position_embedding=getattr(module, "position_embedding", positions),
        first_block=getattr(module, "first_block", None),
    )


def _attribute(owners: Sequence[nn.Module], names: Sequence[str]) -> Any:
    """The first of these attributes that one of the modules has, innermost first; or None."""
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in values if isinstance(value, int | float)), None)


def _activation(owners: Sequence[nn.Module]) -> Activation | None:
    """The activation that stands beside a block's first layer, told by what it computes."""
    for part in (part for owner in owners[1:] for part in owner.modules()):
        if type(part) in (nn.Dropout, nn.Identity) or next(part.parameters(), None) is not None:
            continue
        try:
            values = part(PROBE)
        except Exception:  # a part of another kind, which takes something else than one tensor
            continue
        if isinstance(values, Tensor) and values.shape == PROBE.shape:
            for name, layer in ACTIVATION_LAYERS.items():
                if torch.allclose(values, layer()(PROBE), atol=1e-6):
                    return name
    return None


def _normalisation(module: nn.Module, given: Mapping[str, Channels]) -> dict[str, Any]:
    """Mean and std as numbers per channel, or a UserError with what the module declares."""
    name = type(module).__name__
    if missing := [key for key, value in given.items() if value is None]:
        declared = {key: _declared(module, key) for key in missing}
        stated = ", ".join(f"{key}={value}" for key, value in declared.items() if value)
        raise UserError(
            f"{name}: expected {' and '.join(f'{key}=…' for key in missing)} of the client's "
            "normalisation, one number or one per channel; got none. No weight shows them, and "
            "they are never guessed."
            + (f" The module declares {stated}: give that if the client used it." if stated else "")
        )
    spec = overridden(ModelSpec(name), given)
    return {key: getattr(spec, key) for key in given}


def _declared(module: nn.Module, key: str) -> tuple[float, ...] | None:
    """What timm or open_clip wrote onto the network about the pictures that it was trained on."""
    for name in ("pretrained_cfg", "default_cfg"):
        config = getattr(module, name, None)
        if isinstance(config, Mapping) and config.get(key):
            return tuple(config[key])
    stated = getattr(module, f"image_{key}", None)
    return tuple(stated) if stated else None


# whether the copy computes the same ---------------------------------------------------------------


def check_same_outputs(module: nn.Module, copy: LoadedModel, head: nn.Module | None) -> None:
    """Raise unless the copy's output on a random input is one that the module returns.

    head  the module's last layer, of which what goes in is compared too: a fresh one may be zero,
          and then every network has its outputs

    The module is left as it was: in its mode, on its device, without gradients. One of half
    precision is compared as float32, since its own rounding would hide another activation.
    """
    if next(module.parameters()).dtype.itemsize < 4:
        twins: dict[int, Any] = {}
        module = copied(module, twins).float()
        head = twins.get(id(head))
    like = next(module.parameters())
    size = height_width(copy.card.img_size)
    x = torch.randn(1, 3, *size, generator=torch_generator("comparison of a copied module"))
    entered: list[Tensor] = []
    expected_to_enter: list[Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_evaluated_exactly(module))
        for layer, inputs in ((head, entered), (copy.head, expected_to_enter)):
            if isinstance(layer, nn.Linear):
                keep = inputs.append
                hook = layer.register_forward_pre_hook(lambda _, given, keep=keep: keep(given[0]))
                stack.callback(hook.remove)
        run_of(module, x.to(like))  # which no random layer may change
        run = getattr(module, "get_image_features", module)  # of transformers' CLIP
        with code_of(module, f"that takes one picture {tuple(x.shape)}", IN_SIZE):
            answers = list(_answers(run(x.to(like))))
        expected = copy(x.to(copy.cls_token))
    errors = [_nearest(module, answers, expected)]
    if entered:
        errors.append(_nearest(module, entered, expected_to_enter[0]))
    if not all(error <= TOLERANCE for error in errors):
        raise UserError(
            f"{type(module).__name__}: the blocks compute something else than those of a plain ViT "
            f"with these weights: outputs differ by {max(errors):.1e} of the largest, expected at "
            f"most {TOLERANCE:.0e}. Layer scale, another activation, eps, pooling or attention "
            "would do that. Its gradients cannot be attacked as a plain ViT's."
        )


def _nearest(module: nn.Module, answers: Sequence[Tensor], expected: Tensor) -> float:
    """The relative error of the answer that comes nearest; there must be one of the same shape."""
    fitting = [a.cpu().to(expected) for a in answers if a.shape == expected.shape]
    if not fitting:
        shapes = ", ".join(str(tuple(a.shape)) for a in answers) or "no tensor"
        raise UserError(
            f"{type(module).__name__}: expected a tensor {tuple(expected.shape)} as the network's "
            f"weights would give, got {shapes}. Give the network itself, without parts that pool "
            "or classify otherwise."
        )
    return min(float((a - expected).abs().max() / a.abs().max().clamp_min(TINY)) for a in fitting)


def _answers(returned: Any) -> Iterator[Tensor]:
    """The tensors (B, outputs) among what a network returned; of tokens the first."""
    if isinstance(returned, Tensor):
        returned = (returned,)
    named = [getattr(returned, name, None) for name in OUTPUTS]
    others = returned if isinstance(returned, tuple | list) else ()
    if isinstance(returned, Mapping):
        named, others = [returned.get(name) for name in OUTPUTS], tuple(returned.values())
    for entry in [*named, *others]:
        if isinstance(entry, Tensor):
            yield entry[:, 0] if entry.ndim == 3 else entry


@contextmanager
def _evaluated_exactly(module: nn.Module) -> Iterator[None]:
    """The module in eval mode, and no TensorFloat-32, whose products are off by more than the
    tolerance; every part gets its own mode back."""
    modes = [(part, part.training) for part in module.modules()]
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
