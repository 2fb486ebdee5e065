"""Gradients as a user holds them, read into tensors under this package's parameter names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attacks.equations.names import PATCH
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.core.text import shown
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.layouts import recognised
from mjp_privacy.own.tensors import FLOATS, as_tensor

WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|_fsdp_wrapped_module\.)+")
NAMED = 4  # names that a message lists
LONGEST_NAME = 200  # characters of a parameter's name

Held = Any
"""A mapping by parameter name, a sequence in parameter order, a module whose parameters hold
`.grad`, or None for the `.grad` of the attacked model."""


def separate_uploads(gradients: Held) -> list[Held]:
    """The uploads in what was given: one, or those of a list of mappings or of lists.

    separate_uploads([{"a": t}, {"a": u}]) has two, separate_uploads([t, u]) one in parameter order.
    """
    if gradients is None or isinstance(gradients, Mapping | nn.Module):
        return [gradients]
    if isinstance(gradients, Tensor | np.ndarray | str) or not isinstance(gradients, Iterable):
        raise UserError(
            "gradients: expected a dictionary by parameter name, a list in parameter order, a "
            f"model with .grad, or a list of several of these; got {_kind(gradients)}. Give "
            "{name: p.grad for name, p in model.named_parameters()}."
        )
    entries = list(gradients)
    if entries and all(_is_pair(entry) for entry in entries):
        return [dict(entries)]
    if not entries:
        raise UserError("gradients: expected at least one tensor, got an empty list.")
    if any(isinstance(entry, Mapping | nn.Module | list | tuple) for entry in entries):
        if wrong := [e for e in entries if not isinstance(e, Mapping | nn.Module | list | tuple)]:
            raise UserError(
                "gradients: expected a list of uploads (dictionaries or lists), or one list of "
                f"tensors in parameter order; got a mixture with {_kind(wrong[0])}."
            )
        return entries
    return [entries]


def _is_pair(entry: Any) -> bool:
    """Whether it is a name with its tensor, as named_parameters() gives them."""
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)


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
    if sent and all(name in own and _are_equal(g, own[name]) for name, g in sent.items()):
        raise UserError(
            "gradients: these are the model's weights. Expected their gradients: "
            "{name: p.grad for name, p in model.named_parameters()}."
        )
    if sent.keys() <= own.keys():
        shaped = _with_step_axis(sent, {name: own[name] for name in sent}, "the model's")
        named = recognised(own).to_own(shaped, axes=1)
    else:
        named = _of_another_layout(sent, own, model)
    parameters = dict(model.named_parameters())
    named = {name: tensor for name, tensor in named.items() if name in parameters}
    _check_numbers(named)
    return named


def _are_equal(sent: Tensor, parameter: Tensor) -> bool:
    return sent.shape == parameter.shape and torch.equal(sent, parameter.detach().cpu().to(sent))


def _of_another_layout(
    sent: Mapping[str, Tensor], own: Mapping[str, Tensor], model: LoadedModel
) -> dict[str, Tensor]:
    """Gradients under names that the model does not have, such as timm's of a torchvision model."""
    parameters = dict(model.named_parameters())
    axes = 0 if all(_has_own_axes(sent, name) for name in sent) else 1
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


def _has_own_axes(sent: Mapping[str, Tensor], name: str) -> bool:
    """Whether a tensor has no step axis, as far as the number of its axes shows: a bias of one axis
    has none, one of two has one."""
    return not name.endswith("bias") or sent[name].ndim == 1


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
        where = " on the meta device, where it has no values" if _is_meta(value) else ""
        raise UserError(
            f"gradients: {name} is a {_kind(value)}{where}; expected a tensor of floating-point "
            "numbers. Give {name: p.grad for name, p in model.named_parameters()}."
        )
    if tensor.dtype not in FLOATS:
        raise UserError(
            f"gradients: {name} holds {str(tensor.dtype).removeprefix('torch.')}; expected "
            "floating-point numbers of 16 to 64 bits. Undo the client's quantisation first (times "
            "its scale), and give its error as rounding=…."
        )
    return tensor


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


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


def _kind(value: Any) -> str:
    return type(value).__name__
