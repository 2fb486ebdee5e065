"""What a user holds of a client's step - a network, gradients, labels, pictures - read into tensors
under this package's names. What cannot be read is said with what to give.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attacks.equations import PATCH
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.core.text import shown
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.layouts import recognised

WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|_fsdp_wrapped_module\.)+")
NAMED = 4  # names that a message lists
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

# gradients ----------------------------------------------------------------------------------------


def separate_uploads(gradients: Held) -> list[Held]:
    """The uploads in what was given: one, or those of a list of mappings or of lists.

    separate_uploads([{"a": t}, {"a": u}]) has two, separate_uploads([t, u]) one in parameter order.
    """
    if gradients is None or isinstance(gradients, Mapping | nn.Module):
        return [gradients]
    if isinstance(gradients, Tensor | np.ndarray | str) or not isinstance(gradients, Iterable):
        raise UserError(
            "gradients: expected a dictionary by parameter name, a list in parameter order, a "
            f"model with .grad, or a list of several of these; got {type(gradients).__name__}. "
            "Give {name: p.grad for name, p in model.named_parameters()}."
        )
    entries = list(gradients)
    pairs = [e for e in entries if isinstance(e, tuple) and len(e) == 2 and isinstance(e[0], str)]
    if entries and len(pairs) == len(entries):  # as named_parameters() gives them
        return [dict(entries)]
    if not entries:
        raise UserError("gradients: expected at least one tensor, got an empty list.")
    if any(isinstance(entry, Mapping | nn.Module | list | tuple) for entry in entries):
        if wrong := [e for e in entries if not isinstance(e, Mapping | nn.Module | list | tuple)]:
            raise UserError(
                "gradients: expected a list of uploads (dictionaries or lists), or one list of "
                f"tensors in parameter order; got a mixture with {type(wrong[0]).__name__}."
            )
        return entries
    return [entries]


def read_gradients(held: Held, module: nn.Module, model: LoadedModel) -> dict[str, Tensor]:
    """One upload, (n, *shape) by this package's parameter names, on the CPU.

    held    what the user gave
    module  the model as the user has it, whose parameters give names, order and shapes
    model   the same as loaded here
    """
    sent = {name: _tensor(name, value) for name, value in _by_name(held, module)}
    if not sent:
        raise UserError(
            "gradients: expected tensors, and every entry is None. Call loss.backward() first, or "
            "give torch.autograd.grad(loss, model.parameters())."
        )
    own = {_bare(name): p for name, p in module.named_parameters()}
    buffers = {_bare(name) for name, _ in module.named_buffers()}
    sent = {name: tensor for name, tensor in sent.items() if name not in buffers - own.keys()}
    weights = {name: p.detach().cpu() for name, p in own.items()}
    if sent and all(
        name in own and g.shape == weights[name].shape and torch.equal(g, weights[name].to(g))
        for name, g in sent.items()
    ):
        raise UserError(
            "gradients: these are the model's weights. Expected their gradients: "
            "{name: p.grad for name, p in model.named_parameters()}."
        )
    if sent.keys() <= own.keys():
        shaped = _with_step_axis(sent, {name: own[name] for name in sent}, "the model's")
        timms = model.family == "timm"  # under its own names already
        named = shaped if timms else recognised(own).to_own(shaped, axes=1)
    else:
        named = _of_another_layout(sent, own, model)
    parameters = dict(model.named_parameters())
    named = {name: tensor for name, tensor in named.items() if name in parameters}
    _check_numbers(named)
    return named


def _of_another_layout(
    sent: Mapping[str, Tensor], own: Mapping[str, Tensor], model: LoadedModel
) -> dict[str, Tensor]:
    """Gradients under names that the model does not have, such as timm's of a torchvision model."""
    parameters = dict(model.named_parameters())
    own_axes = [not name.endswith("bias") or g.ndim == 1 for name, g in sent.items()]
    axes = 0 if all(own_axes) else 1  # a bias of two axes has one for independent steps
    try:
        named = recognised(sent).to_own(sent, axes=axes)
    except UserError:
        named = dict(sent)
    if unknown := [name for name in named if name not in parameters]:
        listed = ", ".join(unknown[:NAMED])
        raise UserError(
            f"gradients: {len(unknown)} of {len(sent)} names are not parameters of the model: "
            f"{listed}{', …' if len(unknown) > NAMED else ''}."
            f"{did_you_mean(unknown[0], [*own, *parameters])} Expected names as "
            f"model.named_parameters() has them, such as {next(iter(own))}."
        )
    expected = {name: parameters[name] for name in named}
    return _with_step_axis(named, expected, f"that of {model.card.architecture}")


def _by_name(held: Held, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and value of every entry that is not None; wrappers' prefixes are taken off names."""
    if held is None:
        held = module
    if isinstance(held, nn.Module):
        held = {name: p.grad for name, p in held.named_parameters()}
    if isinstance(held, Mapping):
        pairs = [(_bare(str(name)), value) for name, value in held.items()]
    else:
        pairs = _in_parameter_order(list(held), module)
    yield from ((name, value) for name, value in pairs if value is not None)


def _in_parameter_order(values: Sequence[Any], module: nn.Module) -> list[tuple[str, Any]]:
    """A list as torch.autograd.grad(loss, model.parameters()) returns it, with names."""
    everything = [(_bare(name), p) for name, p in module.named_parameters()]
    trained = [(name, p) for name, p in everything if p.requires_grad]
    for parameters in (everything, trained):
        if len(parameters) == len(values):
            return [(name, value) for (name, _), value in zip(parameters, values, strict=True)]
    raise UserError(
        f"gradients: expected a list with one entry for each of the model's {len(everything)} "
        f"parameters in the order of model.parameters(), got {len(values)}. Keep None for "
        "parameters without a gradient, or give a dictionary by name."
    )


def _bare(name: str) -> str:
    """The name without what DataParallel, FSDP and torch.compile put in front of it."""
    return shown(WRAPPERS.sub("", name), LONGEST_NAME)


def _tensor(name: str, value: Any) -> Tensor:
    tensor = as_tensor(value)
    if tensor is None:
        meta = isinstance(value, Tensor) and value.device.type == "meta"
        where = " on the meta device, where it has no values" if meta else ""
        raise UserError(
            f"gradients: {name} is a {type(value).__name__}{where}; expected a tensor of "
            "floating-point numbers. Give {name: p.grad for name, p in model.named_parameters()}."
        )
    if tensor.dtype not in FLOATS:
        raise UserError(
            f"gradients: {name} holds {str(tensor.dtype).removeprefix('torch.')}; expected "
            "floating-point numbers of 16 to 64 bits. Undo the client's quantisation first (times "
            "its scale), and give its error as rounding=…."
        )
    return tensor


def _with_step_axis(
    sent: Mapping[str, Tensor], parameters: Mapping[str, Tensor], whose: str
) -> dict[str, Tensor]:
    """Every tensor with the axis of independent steps in front; all have it, or none."""
    shaped = {}
    for name, tensor in sent.items():
        shape = tuple(parameters[name].shape)
        if tuple(tensor.shape) == shape:
            tensor = tensor.unsqueeze(0)
        elif tuple(tensor.shape[1:]) != shape:
            raise UserError(
                f"gradients: {name} has shape {tuple(tensor.shape)}, {whose} parameter {shape}. "
                "Expected the gradient of the model that was given, with or without one leading "
                "axis for independent steps; check that both are of the same architecture."
            )
        shaped[name] = tensor
    steps = {name: len(tensor) for name, tensor in shaped.items()}
    if len(set(steps.values())) > 1:
        few, many = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        raise UserError(
            f"gradients: {few} is of {steps[few]} step(s) and {many} of {steps[many]}. Expected "
            "one leading axis of the same length on every tensor, or none on any."
        )
    return shaped


def _check_numbers(sent: Mapping[str, Tensor]) -> None:
    """Raise for numbers that no step can have made."""
    for name, tensor in sent.items():
        if not bool(tensor.isfinite().all()):
            count = int((~tensor.isfinite()).sum())
            raise UserError(
                f"gradients: {name} holds {count} NaN or infinite number(s) of {tensor.numel()}; "
                "expected finite ones. The client's step broke down, or its loss scale was not "
                "undone: take the gradient of another step."
            )
    if not any(bool(tensor.any()) for tensor in sent.values()):
        raise UserError(
            "gradients: every number is zero; expected the gradient of a step on a picture. Was "
            "optimizer.zero_grad() called after loss.backward()?"
        )
    if PATCH in sent and not bool(sent[PATCH].any()):
        raise UserError(
            f"gradients: that of {PATCH} is zero throughout, so nothing of the picture is in it. A "
            "classifier whose weights are all zeros (torchvision's fresh ViT has one) passes "
            "nothing back in its first step: take a second step, or draw its weights."
        )


# models, labels, pictures -------------------------------------------------------------------------


def modules_of(model: Models, uploads: int) -> list[nn.Module]:
    """The model of each upload."""
    if isinstance(model, nn.Module):
        return [model] * uploads
    modules = list(model) if isinstance(model, Sequence) else []
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise UserError(
            "model: expected a network (torch.nn.Module), or a list of them, got "
            f"{type(model).__name__}. Of a file: load_model(checkpoint=FILE); of a state_dict: the "
            "network that it was taken from."
        )
    if len(modules) != uploads:
        raise UserError(
            f"model: expected one model, or one for each of {uploads} upload(s), got "
            f"{len(modules)}. Give the model as it was before each upload, in the same order."
        )
    return modules


def read_labels(labels: Labels) -> Tensor:
    """(m,) whole numbers; a UserError for anything else."""
    try:
        given = torch.as_tensor(labels).reshape(-1).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):  # for text and ragged lists
        given = torch.empty(0)
    if given.dtype not in WHOLE:
        raise UserError(
            f"labels: expected class indices, got {said(labels)}. Give labels=[3], or a tensor of "
            "whole numbers with one for each image."
        )
    return given


def checked_labels(labels: Labels, images: int, classes: int) -> Tensor:
    """The labels (m,) that a user gave for m images, or a UserError."""
    given = read_labels(labels)
    if len(given) != images or int(given.min()) < 0 or int(given.max()) >= max(classes, 1):
        example = list(range(min(images, 4)))
        raise UserError(
            f"labels: expected a class index from 0 to {classes - 1} for each of {images} "
            f"image(s), got {said(labels)}. Give labels={example}; batch=… says how many images a "
            "step has."
        )
    return given.long()


def read_images(images: Any, count: int, size: int) -> Tensor:
    """(m, 3, S, S) float64 in [0, 1] from a tensor or array, one picture or several."""
    tensor = as_tensor(images)
    if tensor is None or tensor.dtype not in (*FLOATS, torch.uint8):
        kind = type(images).__name__ if tensor is None else f"one of {tensor.dtype}"
        raise UserError(
            "images: expected a tensor or array (B, 3, S, S) with values in [0, 1], got "
            f"{kind}. torchvision.transforms.functional.to_tensor(picture) makes one of a picture."
        )
    pixels = tensor.double() / 255 if tensor.dtype == torch.uint8 else tensor.double()
    if pixels.ndim == 3:
        pixels = pixels.unsqueeze(0)
    expected = (count, 3, size, size)
    if tuple(pixels.shape) != expected:
        raise UserError(
            f"images: expected the shape {expected}, as many as the step had, got "
            f"{tuple(pixels.shape)}. Give the pixels as the client fed them: cropped and resized, "
            "not normalised."
        )
    low, high = (float(bound) for bound in pixels.aminmax())
    if not (low >= -1e-6 and high <= 1 + 1e-6):
        raise UserError(
            f"images: expected values in [0, 1], got values from {low:.3g} to {high:.3g}. Give "
            "them before normalisation (or undo it: images * std + mean)."
        )
    return pixels.clamp(0, 1)


def images_given(labels: Labels | None, images: Images | None) -> int | None:
    """How many images a call is about, as far as what was given says it."""
    if images is not None and getattr(images, "ndim", 0) == 4:
        return len(images)
    return None if labels is None else len(read_labels(labels))


def as_tensor(value: Any) -> Tensor | None:
    """The numbers of an array or tensor, dense and on the CPU; None if it is nothing of the kind.

    as_tensor(np.ones(2, ">f4")) is a tensor of float32.
    """
    if isinstance(value, np.ndarray):
        return _of_array(value)
    if not isinstance(value, Tensor) or value.device.type == "meta" or value.is_quantized:
        return None
    dense = value if value.layout == torch.strided else value.to_dense()
    return dense.detach().cpu()


def _of_array(array: np.ndarray[Any, Any]) -> Tensor | None:
    if not np.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
        return None
    if np.issubdtype(array.dtype, np.floating) and array.itemsize > 8:
        array = array.astype(np.float64)
    native = array.astype(array.dtype.newbyteorder("="))  # a copy, without negative strides
    try:
        return torch.from_numpy(np.asarray(native))
    except TypeError:  # numbers that torch has not
        return None


def said(value: object) -> str:
    """A value that a user gave, as a message shows it: one short line."""
    return shown(repr(value), 100)
