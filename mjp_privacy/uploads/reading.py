"""What a user holds of a client's step - a network, gradients, labels, pictures - read into tensors
under this package's names, and what is public of it. What cannot be read is said with what to give.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attacks.equations import PATCH, PATCH_BIAS, TABLE, UNKNOWN
from mjp_privacy.client.config import ClientConfig, told_client
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean, unknown_name
from mjp_privacy.core.schema import NotNegative, Size, height_width, schema
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.layouts import recognised
from mjp_privacy.models.live.modules import of_live_names

WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|_fsdp_wrapped_module\.)+")
"""What DataParallel, FSDP and torch.compile put in front of a name."""
MASKED = 1e-3  # relative error up to which a gradient is that of masked patches
LONGEST_NAME = 200  # characters of a parameter's name
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Floating-point numbers that everything here computes with; those of 8 bits are not."""
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

Held = Any
"""A mapping by parameter name, a sequence in parameter order, a module whose parameters hold
`.grad`, or None for the `.grad` of the attacked model."""
Models = nn.Module | Sequence[nn.Module]
Labels = int | Sequence[int] | Tensor
Images = Tensor | npt.NDArray[Any]

GIVE = "Give {name: p.grad for name, p in model.named_parameters()}."
"""What to do, in a user's words."""


def said(value: object) -> str:
    """A value that a user gave, as a message shows it: one short line."""
    return shown(" ".join(repr(value).split()), 100)


def refusal(argument: str, expected: str, got: str, do: str) -> UserError:
    """The error for an argument: refusal("seed", "a whole number", "-1", "Give another.")."""
    return UserError(f"{argument}: expected {expected}; got {got}. {do}")


def as_tensor(value: Any) -> Tensor | None:
    """The numbers of an array or tensor, dense and on the CPU; None if it is nothing of the kind.

    as_tensor(np.ones(2, ">f4")) is a tensor of float32.
    """
    if isinstance(value, np.ndarray):
        try:  # a copy, without negative strides and in the machine's order of bytes
            return torch.from_numpy(np.asarray(value.astype(value.dtype.newbyteorder("="))))
        except TypeError:  # what torch has not, such as texts
            return None
    if not isinstance(value, Tensor) or value.device.type == "meta" or value.is_quantized:
        return None
    dense = value if value.layout == torch.strided else value.to_dense()
    return _differentiable(dense.detach().cpu())


def _differentiable(tensor: Tensor) -> Tensor:
    """A tensor that was made under torch.inference_mode, as one that autograd takes."""
    return tensor.clone() if tensor.is_inference() else tensor


# the client --------------------------------------------------------------------------------------


@schema
class ToldErrors:
    """Standard deviations of errors, in the units of what was sent."""

    noise: NotNegative = 0.0
    """Of what a defence added to every entry."""
    rounding: NotNegative = 0.0
    """Of errors that leave a zero entry zero (quantised or dropped entries); half-precision tensors
    need none."""


def read_step(
    facts: Mapping[str, Any], batch: Callable[[], int], others: Iterable[str] = ()
) -> tuple[ClientConfig, ToldErrors]:
    """What is public of a client's step, and of its errors, as a user told it by keywords; batch()
    is asked where nobody said how many images it has. others: the function's keywords beside."""
    of_step = [field.name for kind in (ClientConfig, ToldErrors) for field in fields(kind)]
    known = sorted({"kind", *others, *of_step} - {"upload", "step"})
    for name in facts:
        if name not in (*known, "upload"):
            raise unknown_name("keyword", name, known)
    told = {n: v for n, v in facts.items() if v is not None or n not in ("batch", "lr")}
    errors = ToldErrors(**{n: told.pop(n) for n in ("noise", "rounding") if n in told})
    if "batch" not in told:
        told["batch"] = batch()
    if told.get("dal_lambda"):
        told.setdefault("dal", True)
    client = told_client(told, "The client's step")
    if client.upload == "gradient" and (
        training := [name for name in ("lr", "weight_decay") if told.get(name)]
    ):
        named = ", ".join(f"{name}={said(told[name])}" for name in sorted(training))
        raise UserError(
            f"{named}: a gradient does not depend on them. If the client sent weights, give "
            "kind='weight_difference' and the weights after the step minus those before; else "
            "leave them out."
        )
    return client, errors


# gradients ----------------------------------------------------------------------------------------


def separate_uploads(gradients: Held) -> list[Held]:
    """The uploads in what was given: one, or those of a list of mappings or of lists.

    separate_uploads([{"a": t}, {"a": u}]) has two, separate_uploads([t, u]) one in parameter order.
    """
    if gradients is None or isinstance(gradients, Mapping | nn.Module):
        return [gradients]
    is_one = isinstance(gradients, Tensor | np.ndarray | str)
    entries = list(gradients) if isinstance(gradients, Iterable) and not is_one else []
    several = [isinstance(entry, Mapping | nn.Module | list | tuple) for entry in entries]
    if not entries or any(several) != all(several):
        expected = (
            "a dictionary by parameter name, a list in parameter order, a model with .grad, or a "
            "list of several of these"
        )
        raise refusal("gradients", expected, said(gradients), GIVE)
    return entries if all(several) else [entries]


def read_gradients(held: Held, module: nn.Module, model: LoadedModel) -> dict[str, Tensor]:
    """One upload, (1, *shape) by this package's parameter names, on the CPU.

    held    what the user gave
    module  the model as the user has it, whose parameters give names, order and shapes
    model   the same as loaded here
    """
    own = {name: p.detach().cpu() for name, p in module.named_parameters()}
    buffers = {name for name, _ in module.named_buffers()} - own.keys()
    places = {WRAPPERS.sub("", name): name for name in (*buffers, *own)}
    sent: dict[str, Tensor] = {}
    for name, value in _by_name(held, module).items():
        if name not in own:  # wrapped otherwise than the network
            name = places.get(WRAPPERS.sub("", name), shown(name, LONGEST_NAME))
        if value is not None and name not in buffers:
            sent[name] = _numbers(name, value)
    if unknown := [name for name in sent if name not in own]:
        lacking = [name for name in own if name not in sent] or list(own)
        near = did_you_mean(unknown[0], list(own), f" The model also has {first_of(lacking, 4)}.")
        got = f"{len(unknown)} of {len(sent)} that it does not have: {first_of(unknown, 4)}"
        raise refusal("gradients", "names as model.named_parameters() has them", got, near.strip())
    if sent and all(g.shape == own[n].shape and g.equal(own[n].to(g)) for n, g in sent.items()):
        raise refusal("gradients", "gradients", "the model's weights", GIVE)
    for name, tensor in sent.items():
        if tensor.shape != own[name].shape:
            expected = f"{name} of the shape {tuple(own[name].shape)}"
            do = "Check that model and gradients are of the same architecture."
            if tensor.shape[1:] == own[name].shape:
                do = "Give several uploads as a list."
            raise refusal("gradients", expected, f"{tuple(tensor.shape)}", do)
        if count := int((~tensor.isfinite()).sum()):
            got = f"{count} NaN or infinite one(s) of {tensor.numel()} in {name}"
            do = "The client's step broke down, or its loss scale was not undone: take another."
            raise refusal("gradients", "finite numbers", got, do)
    sent = given = {name: tensor.unsqueeze(0) for name, tensor in sent.items()}
    if sent and model.family == "timm":
        sent = of_live_names(model, sent)
    elif sent:
        sent = recognised(own).to_own(sent, axes=1)
    if model is not module and (name := unknown_embedding(model, own, given, sent)):
        rows = own[name].reshape(1, 1, -1)
        setattr(model, UNKNOWN, nn.Parameter(rows, requires_grad=False))
        sent[UNKNOWN] = given[name].reshape(-1, *rows.shape)
    parameters = dict(model.named_parameters())
    named = {name: tensor for name, tensor in sent.items() if name in parameters}
    frozen = [name for name in (PATCH, PATCH_BIAS) if name in named]
    passed = any(bool(g.any()) for name, g in named.items() if name.startswith("blocks."))
    if passed and not any(bool(named[name].any()) for name in frozen):
        named = {name: g for name, g in named.items() if name not in frozen}  # sent as zeros
    told = [named[PATCH]] if PATCH in named else list(named.values())
    if not any(bool(tensor.any()) for tensor in told):
        got = f"zeros alone{' in the patch embedding' if PATCH in named else ', or None'}"
        do = (
            "Call loss.backward() first. A classifier whose weights are all zeros, as in "
            "torchvision's fresh ViT, passes nothing back: take a second step. Pixels equal to "
            "the mean leave nothing either."
        )
        raise refusal("gradients", "something of a picture", got, do)
    return named


def unknown_embedding(
    model: LoadedModel,
    own: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    sent: Mapping[str, Tensor],
) -> str:
    """The name of what a live network adds to masked patches in place of their positions, or "":
    its gradient is what that of the patch embedding's bias has beyond all patches' positions'.

    own          the network's weights, by its names
    given, sent  gradients (n, *shape) by the names of the network, and of its copy
    """
    if model.unk_embed is not None or model.pos_embed is None:
        return ""
    if not {TABLE, PATCH_BIAS} <= sent.keys():
        return ""
    rows = sent[TABLE].flatten(1, -2)[:, model.rows_of_patches].double().sum(1)
    rest, size = sent[PATCH_BIAS].double() - rows, float(rows.norm())
    places = model.pos_embed.detach().reshape(-1, model.embed_dim)[model.rows_of_patches]
    decaying = model.patch_bias.detach(), places.sum(0)
    for name, weight in own.items():
        if name not in given or weight.numel() != model.embed_dim:
            continue
        weights = torch.stack([*decaying, weight.flatten()], 1).double()
        q = torch.linalg.qr(weights).Q  # weight decay adds some of each

        def off(vectors: Tensor, q: Tensor = q) -> float:
            return float((vectors - vectors @ q @ q.mT).norm())

        # else nothing is masked, or all is, which the bias looks like as well
        some = MASKED * size < off(rest) < size / MASKED
        if some and off(given[name].flatten(1).double() - rest) < MASKED * off(rest):
            return name
    return ""


def _by_name(held: Held, module: nn.Module) -> dict[str, Any]:
    """Every entry by its name; a list is as torch.autograd.grad(loss, model.parameters()) returns
    it."""
    held = module if held is None else held
    if isinstance(held, nn.Module):
        held = {name: p.grad for name, p in held.named_parameters()}
    if not isinstance(held, Mapping):
        values, every = list(held), list(module.named_parameters())
        trained = [(name, p) for name, p in every if p.requires_grad]
        fitting = next((known for known in (every, trained) if len(known) == len(values)), None)
        if fitting is None:
            expected = f"one entry for each of {len(every)} parameters, as model.parameters() has"
            do = "Keep None for parameters without a gradient, or give a dictionary by name."
            raise refusal("gradients", expected, f"a list of {len(values)}", do)
        held = dict(zip((name for name, _ in fitting), values, strict=True))
    return {str(name): value for name, value in held.items()}


def _numbers(name: str, value: Any) -> Tensor:
    """A gradient's numbers; UserError for anything else."""
    tensor = as_tensor(value)
    if tensor is None or tensor.dtype not in FLOATS:
        of = f" of {value.dtype} on {value.device}" if isinstance(value, Tensor) else ""
        expected = "tensors of floating-point numbers of 16 to 64 bits"
        do = f"{GIVE} Undo a quantisation (times its scale), and give its error as rounding=…."
        raise refusal("gradients", expected, f"a {type(value).__name__}{of} for {name}", do)
    return tensor


# models, labels, pictures -------------------------------------------------------------------------


def modules_of(model: Models, uploads: int) -> list[nn.Module]:
    """The model of each upload."""
    if isinstance(model, nn.Module):
        return [model] * uploads
    modules = list(model) if isinstance(model, Sequence) and not isinstance(model, str) else []
    if len(modules) != uploads or not all(isinstance(module, nn.Module) for module in modules):
        expected = f"a torch.nn.Module, or a list with one for each of {uploads} upload(s)"
        got = f"{len(modules) or type(model).__name__}"
        raise refusal("model", expected, got, "Of a file: load_model(checkpoint=FILE).")
    return modules


def read_labels(labels: Labels, images: int = 0, classes: int = 0) -> Tensor:
    """(m,) class indices; a UserError for anything else or, where it is known how many images and
    classes (0: unknown) there are, for others than that."""
    try:
        given = _differentiable(torch.as_tensor(labels).reshape(-1).cpu())
    except (TypeError, ValueError, RuntimeError, OverflowError):  # for text and ragged lists
        given = torch.empty(0)
    fits = given.dtype in WHOLE
    if fits and images:
        inside = (given >= 0) & (given < (classes or torch.inf))
        fits = len(given) == images and bool(inside.all())
    if not fits:
        most = f" to {classes - 1}" if classes else ""
        of = f" from 0{most} for each of {images} image(s)" if images else ""
        do = "Give labels=[3], one for each image; batch=… says how many images a step has."
        raise refusal("labels", f"class indices{of}", said(labels), do)
    return given.long()


def read_images(
    images: Any, count: int, size: Size, channels: int, whole: Size | None = None
) -> Tensor:
    """(m, C, H, W) float64 in [0, 1] from a tensor or array, one picture or several.

    whole  the size of pictures of which the network embeds `size` alone
    """
    tensor, expected = as_tensor(images), (count, channels, *height_width(size))
    if tensor is not None and whole and tuple(tensor.shape[-2:]) == height_width(whole):
        tensor = tensor[..., : expected[2], : expected[3]]
    got = said(images) if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
    pixels = torch.empty(0)
    if tensor is not None and tensor.dtype in (*FLOATS, torch.uint8):
        pixels = tensor.double() / (255 if tensor.dtype == torch.uint8 else 1)
        pixels = pixels.unsqueeze(0) if pixels.ndim == 3 else pixels
    if fits := tuple(pixels.shape) == expected:
        low, high = (float(bound) for bound in pixels.aminmax())
        fits, got = low >= -1e-6 and high <= 1 + 1e-6, f"values from {low:.3g} to {high:.3g}"
    if not fits:
        do = (
            "Give the pixels of every image of the step as the client fed them, cropped and "
            "resized, before normalisation (or undo it: images * std + mean). Were they of another "
            "size than the network's own, give img_size=… as well."
        )
        raise refusal("images", f"an array {expected} with values in [0, 1]", got, do)
    return pixels.clamp(0, 1)


def images_in_a_step(labels: Labels | None, images: Images | None) -> int:
    """How many images a step has, as far as labels and images say it; else 1."""
    if images is not None and getattr(images, "ndim", 0) == 4:
        return max(len(images), 1)
    return 1 if labels is None else max(len(read_labels(labels)), 1)
